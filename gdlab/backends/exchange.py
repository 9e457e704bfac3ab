"""How ranks without a server exchange their pushes: an all-reduce sums them, an all-gather gives each to everybody.

Flags travel with the push, so that all ranks know the same of each other and leave after the same step.
"""

from __future__ import annotations

import torch

from gdlab import theory
from gdlab.backends.group import Group
from gdlab.backends.topology import gathers
from gdlab.descent.compression import after, compressor_of
from gdlab.descent.store import Applied, Store
from gdlab.descent.worker import Push, Read
from gdlab.experiment import Experiment
from gdlab.parts import LocalSGD


class AllReduce:
    """Sum what all ranks contribute, in the pushes' own format; the flags are the sum's last elements.

    `bytes_sent`: what this rank sends for one push, without the flags and headers.
    """

    def __init__(self, group: Group, store: Store) -> None:
        self._group, self._store = group, store
        self._buffer: torch.Tensor | None = None
        self._flags, self.bytes_sent = 0, 0.0

    def meet(self, push: Push, flags: list[bool]) -> list[float]:
        """Exchange a push and some flags with all ranks; return how many ranks raised each flag."""
        if self._buffer is None:
            self._flags = len(flags)
            self._buffer = torch.zeros(push.grad.numel() + len(flags), dtype=push.grad.dtype, device=push.grad.device)
            self.bytes_sent = theory.ring_bytes(push.grad.nbytes, self._group.size)
        self._buffer[: -self._flags] = self._store.contribution(push)
        self._buffer[-self._flags :] = torch.tensor(flags)
        self._group.sum(self._buffer)
        return self._buffer[-self._flags :].tolist()

    def apply(self, read: Read, found_inf: bool) -> Applied:
        """Make one new version from what was exchanged; `found_inf`: whether any push was not finite."""
        assert self._buffer is not None
        return self._store.apply_sum(self._buffer[: -self._flags], found_inf, self._group.size)


class AllGather:
    """Give every rank's compressed message to every rank; each then does what a server would: the same bits."""

    def __init__(self, group: Group, store: Store, exp: Experiment, size: int) -> None:
        compressor = compressor_of(exp, size)
        assert compressor is not None
        self._group, self._store, self._compressor = group, store, compressor
        self._changes = isinstance(exp.strategy, LocalSGD)
        self._pushes: list[Push] = []
        self._rows: list[torch.Tensor] = []
        self.bytes_sent = theory.gathered_bytes(compressor.nbytes, group.size)

    def meet(self, push: Push, flags: list[bool]) -> list[float]:
        """Exchange a push and some flags, of which the last says that it is not finite; see AllReduce."""
        assert push.message is not None
        own = torch.cat([push.message, torch.tensor(flags, dtype=torch.uint8, device=push.message.device)])
        rows = self._group.gather(own)
        ends = torch.stack([row[-len(flags) :] for row in rows]).tolist()
        self._pushes = [push._replace(worker=rank, nonfinite=flag[-1]) for rank, flag in enumerate(ends)]
        self._rows = [row[: -len(flags)] for row in rows]
        return [float(sum(column)) for column in zip(*ends, strict=True)]

    def apply(self, read: Read, found_inf: bool) -> Applied:
        """Make one new version from what was exchanged, whose own flags say what is not finite."""
        values = [self._compressor.decode(row) for row in self._rows]
        if self._changes:
            values = [after(read.params, value, self._compressor) for value in values]
        pushes = [push._replace(grad=value) for push, value in zip(self._pushes, values, strict=True)]
        return self._store.apply(pushes, [0] * len(pushes))


def exchange_of(exp: Experiment, group: Group, store: Store, size: int) -> AllReduce | AllGather:
    """Return how the ranks of an experiment exchange their pushes of so many parameters."""
    return AllGather(group, store, exp, size) if gathers(exp) else AllReduce(group, store)
