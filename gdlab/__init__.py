"""gdlab: gradient descent on many workers, with finite numbers, for real.

Importing this package loads neither torch, plotly nor any widget: each name is fetched on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "gdlab.part": ("ExperimentError",),
    "gdlab.experiment": ("Experiment",),
    "gdlab.parts": (
        "Quadratic", "Ravine", "Saddle", "Cliff", "LinearRegression", "Digits", "Sequence", "Torch", "Opaque",
        "Sync", "Async", "LocalSGD", "Precision", "Clip", "SGD", "AdamW",
    ),
    "gdlab.communication": ("Compression", "Network"),
    "gdlab.laws": (
        "Constant", "Exponential", "Gamma", "ShiftedExponential", "Uniform", "LogNormal", "Pareto", "Spike",
    ),
    "gdlab.formats": ("Float", "round_to", "LossScaler"),
    "gdlab.clipping": ("clip_by_norm",),
    "gdlab.trace": ("Trace", "open_trace"),
    "gdlab.backends": ("launch", "run", "Run", "RankFailed"),
    "gdlab.panel": ("Playground",),
    "gdlab.panel.predict": ("predict",),
    "gdlab.panel.check": ("check",),
    "gdlab.panel.goal": ("goal",),
    "gdlab.panel.progress": ("progress",),
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("theory", "views", "laws", "formats", "clipping", "autodiff")

__all__ = ["__version__", *sorted(_NAMES), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"gdlab.{name}")
    else:
        raise AttributeError(f"gdlab has no name {name!r}: see dir(gdlab).")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
