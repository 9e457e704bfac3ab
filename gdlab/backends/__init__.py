"""Clocks and transport: `launch` an experiment on a backend and hold the Run."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gdlab
from gdlab.backends.failures import RankFailed
from gdlab.backends.launcher import current_launcher
from gdlab.backends.runs import Run, new_folder, show_progress, taken
from gdlab.backends.shared_state import SharedState
from gdlab.backends.topology import check, gathers, needs_server, topology_of
from gdlab.experiment import Experiment
from gdlab.part import ExperimentError
from gdlab.parts import Opaque
from gdlab.trace import Trace, write_run

__all__ = ["RankFailed", "Run", "launch", "launch_all", "run", "warm"]

BACKENDS = ("local", "virtual")


def launch(experiment: Experiment, backend: str = "local", folder: str | Path | None = None,
           timeout_s: float = 20.0) -> Run:
    """Start an experiment in processes of its own and return at once.

    `folder` holds the run (default: a new one below $GDLAB_RUNS or ./runs). A process that gives no sign of life for
    `timeout_s` seconds, which includes one whole gradient, is named and ended. Raises ExperimentError (a ValueError)
    for what cannot be run, before anything is started, FileExistsError for a folder that holds a run or what is left of
    one, and RuntimeError where this process is ending.
    """
    if not isinstance(experiment, Experiment):
        raise ExperimentError(f"launch needs a gd.Experiment, not {type(experiment).__name__}.")
    if backend not in BACKENDS:
        raise ExperimentError(f"backend = {backend!r} is not known: it must be one of {', '.join(BACKENDS)}.")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ExperimentError(f"timeout_s = {timeout_s!r} cannot be: it must be a number of seconds above 0.")
    check([experiment], backend)
    if isinstance(experiment.problem, Opaque) and experiment.payload is None:
        raise ExperimentError("The problem's function came from a cell and is not in this experiment: "
                              "give it again with exp.replace(problem=...).")
    path = new_folder(folder, _short_name(experiment))
    try:
        shared = SharedState.create(path, len(topology_of(experiment, backend).processes))
    except FileExistsError:
        raise taken(path) from None
    if experiment.payload is not None:
        (path / "payload.bin").write_bytes(experiment.payload)
    write_run(path, {"experiment": json.loads(experiment.to_json()), "environment": _environment(experiment, backend)})
    started = Run(experiment, backend, path, float(timeout_s), shared)
    current_launcher().launch(started)
    return started


def launch_all(experiments: Sequence[Experiment], backend: str = "local") -> list[Run]:
    """Start several experiments at once.

    Raises ExperimentError before anything is started, also where their workers are too many together; where one cannot
    be launched for another reason, those before it are stopped.
    """
    check(experiments, backend)
    runs: list[Run] = []
    try:
        for experiment in experiments:
            runs.append(launch(experiment, backend))
    except BaseException:
        for started in runs:
            started.stop()
        raise
    return runs


def run(experiment: Experiment, backend: str = "local", folder: str | Path | None = None,
        timeout_s: float = 20.0) -> Trace:
    """Launch an experiment, wait for its end, and return its trace; shows progress on a terminal.

    Raises RankFailed if a process failed; an interrupt (Ctrl-C) stops the run.
    """
    started = launch(experiment, backend, folder, timeout_s)
    try:
        if sys.stderr is not None and sys.stderr.isatty():
            show_progress(started)
        return started.wait()
    except KeyboardInterrupt:
        started.stop()
        raise


def warm(timeout: float | None = 0.0) -> bool:
    """Load PyTorch in the process that starts workers, so that the first run starts fast; tell whether it is ready."""
    return current_launcher().warm(timeout)


def _short_name(experiment: Experiment) -> str:
    name = f"{type(experiment.problem).__name__}-{type(experiment.strategy).__name__}-{experiment.workers}"
    return re.sub(r"[^a-z0-9-]", "", name.lower())


def _environment(experiment: Experiment, backend: str) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    order = "arrival"
    if backend == "virtual" or needs_server(experiment) or gathers(experiment):
        order = "ranks" if type(experiment.strategy).__name__ != "Async" else "arrival"
        order = experiment.reduce_order + f", in order of {order}"
    elif experiment.workers > 1:
        order = "all-reduce"  # As its library does.
    return {
        "backend": backend,
        "clock": "virtual" if backend == "virtual" else "wall",
        "cores": cores,
        "ranks": experiment.workers,
        "threads": 1,
        "device": experiment.device,
        "group_backend": "none",
        "reduce_order": order,
        "attempt": 0,
        "host": platform.node(),
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {"gdlab": gdlab.__version__, "python": platform.python_version()},
    }
