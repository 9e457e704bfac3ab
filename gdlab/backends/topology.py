"""Which processes a run consists of, and how they are wired."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from gdlab.communication import summed_in_bf16
from gdlab.experiment import Experiment
from gdlab.part import ExperimentError
from gdlab.parts import Async, Sync

MAX_RANKS = int(os.environ.get("GDLAB_MAX_RANKS", "32"))
"""Most ranks that one launch may start on this machine: a limit of the server, whatever a page asks for."""

EVALUATOR_NICE = 10


class Topology(NamedTuple):
    """The processes of a run in the order of their slots in the shared state."""

    processes: list[dict[str, Any]]
    links: list[tuple[str, str]]
    listen: str | None
    """Who serves the store at which ranks meet."""

    @property
    def names(self) -> list[str]:
        return [f"{process['role']}{process['index']}" for process in self.processes]


def needs_server(experiment: Experiment) -> bool:
    """Tell whether the strategy needs a parameter server; otherwise the ranks meet in an all-reduce."""
    strategy = experiment.strategy
    return isinstance(strategy, Async) or (isinstance(strategy, Sync) and strategy.exchange == "server")


def gathers(experiment: Experiment) -> bool:
    """Tell whether the ranks' messages are compressed in a way that no all-reduce can sum: they are all-gathered."""
    compression = experiment.compression
    summed = needs_server(experiment) or summed_in_bf16(compression, experiment.strategy)
    return compression is not None and not summed


def topology_of(experiment: Experiment, backend: str) -> Topology:
    """Return the processes that run an experiment on a backend."""
    processes: list[dict[str, Any]] = []
    links: list[tuple[str, str]] = []

    def add(role: str, index: int, target: str, nice: int = 0) -> None:
        processes.append({"role": role, "index": index, "slot": len(processes), "target": target, "nice": nice})

    if backend == "virtual":
        add("virtual", 0, "gdlab.backends.virtual:main")
    else:
        server = needs_server(experiment)
        for rank in range(experiment.workers):
            add("rank", rank, "gdlab.backends.rank:main")
        if server:
            add("server", 0, "gdlab.backends.server:main")
            links = [("server0", f"rank{rank}") for rank in range(experiment.workers)]
    add("evaluator", 0, "gdlab.backends.evaluator:main", EVALUATOR_NICE)
    meets = backend == "local" and not links and experiment.workers > 1
    return Topology(processes, links, "rank0" if meets else None)


def check(experiments: Sequence[Experiment], backend: str) -> None:
    """Raise ExperimentError where this machine must not, or cannot, run the experiments at once on this backend."""
    ranks = [experiment.workers for experiment in experiments]
    if backend == "local" and sum(ranks) > MAX_RANKS:
        together = f" ({sum(ranks)} together in {len(ranks)} runs at once)" if len(ranks) > 1 else ""
        raise ExperimentError(f"workers = {max(ranks)}{together} is too many for real processes here, where at most "
                              f'{MAX_RANKS} are allowed (GDLAB_MAX_RANKS): use fewer, or backend="virtual".')
