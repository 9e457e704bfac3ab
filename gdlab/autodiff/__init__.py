"""Automatic differentiation taken apart: torch's own graph of a small loss, its traps, and a tape to complete.

Each name is fetched on first use; torch computes in a process of its own.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "recording": ("record", "Recording"),
    "expression": ("Expression", "ExpressionError"),
    "measures": ("finite_differences", "costs"),
    "traps": ("trap", "cases"),
    "tape": ("Tape", "train"),
    "regression": ("LOSS",),
}
_NAMES = {name: f"gdlab.autodiff.{home}" for home, names in _HOMES.items() for name in names}
_NAMES |= dict.fromkeys(("Graph", "Traps", "Exercise"), "gdlab.panel.autodiff")

__all__ = [*_NAMES]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"gdlab.autodiff has no name {name!r}: see dir(gdlab.autodiff).")
    return getattr(importlib.import_module(_NAMES[name]), name)


def __dir__() -> list[str]:
    return __all__
