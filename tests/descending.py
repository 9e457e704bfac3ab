"""Run the rule of descent in rounds, without any backend, for the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

import gdlab as gd
from gdlab.descent.problems import build
from gdlab.descent.store import Applied, Store
from gdlab.descent.worker import Push, Worker


class Rounds:
    """Let all workers read, compute and push, one round after another."""

    def __init__(self, exp: gd.Experiment) -> None:
        self.exp, self.problem = exp, build(exp)
        self.store = Store(exp, self.problem)
        self.workers = [Worker(exp, self.problem, rank) for rank in range(exp.workers)]
        self.pushes: list[Push] = []
        self.applied: list[Applied] = []
        self.path = [self.store.params.clone()]

    def run(self, rounds: int, until: Callable[[torch.Tensor], bool] = lambda params: False) -> Rounds:
        """Go on for some rounds, or until the parameters are as wanted."""
        local = isinstance(self.exp.strategy, gd.LocalSGD)
        for step in range(self.store.version, self.store.version + rounds):
            self.pushes = [(worker.local_round if local else worker.gradient)(self.store.read(rank), step)
                           for rank, worker in enumerate(self.workers)]
            self.applied.append(self.store.apply(self.pushes, [0] * len(self.pushes)))
            self.path.append(self.store.params.clone())
            if until(self.store.params):
                break
        return self


def run(rounds: int, **fields: object) -> Rounds:
    """Run an experiment given by its fields for some rounds."""
    return Rounds(gd.Experiment(**fields)).run(rounds)


def same_path(one: Rounds, other: Rounds) -> bool:
    """Tell whether two runs went through the same bits."""
    return torch.equal(torch.stack(one.path), torch.stack(other.path))
