"""What one process of a run is given, and how it reads its experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from gdlab.experiment import Experiment
from gdlab.trace import Trace


class Job(NamedTuple):
    """What one process of a run is given."""

    folder: str
    run: str
    """The run's name, the key under which its ranks meet."""
    role: str
    index: int  # type: ignore[assignment]
    slot: int
    """Its slot in the shared."""
    timeout_s: float
    options: dict[str, Any]
    links: dict[str, int]
    """Descriptors of connected sockets, by the name of the process at the other end."""
    listen: int | None
    """Descriptor of the listening socket of the ranks' store, for the one that serves it."""
    port: int | None


def experiment_of(folder: str | Path) -> Experiment:
    """Return the experiment of a run's folder, with the function of a problem that came from a cell."""
    function = Path(folder, "payload.bin")
    return Trace(Path(folder), function.read_bytes() if function.exists() else None).experiment


def path_format(experiment: Experiment) -> str:
    """Return the dtype of a run's path: the weights', fp32 where those are narrower."""
    return "float64" if experiment.precision.weights == "fp64" else "float32"
