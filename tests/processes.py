"""What tests of processes share: waiting, looking who lives, and dummy roles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil
import pytest

import gdlab as gd
from gdlab.backends import launcher
from gdlab.backends.topology import Topology, topology_of

PATIENCE_S = 50.0


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that should happen soon."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


def alive(pids: Iterable[int]) -> list[int]:
    """Return those processes that still run."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def play(monkeypatch: pytest.MonkeyPatch, role: str) -> None:
    """Let all processes of the runs of this test play a dummy role."""

    def topology(experiment: gd.Experiment, backend: str) -> Topology:
        real = topology_of(experiment, backend)
        for process in real.processes:
            process["target"] = f"dummy_roles:{role}"
        return real

    monkeypatch.setattr(launcher, "topology_of", topology)
