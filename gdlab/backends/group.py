"""The ranks' group: the collectives of torch.distributed, which do nothing for one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gdlab.backends.failures import PeerLost

if TYPE_CHECKING:
    from gdlab.backends.shared_state import Slot
    from gdlab.backends.zygote import Job

PATIENCE = timedelta(days=7)
"""A rank may wait for another's step for as long as it lasts: who is silent is told by the heartbeat, not here."""

_SUM, _MAX, _GATHER = 1, 2, 3
_DTYPES = {torch.float64: 1, torch.float32: 2, torch.float16: 3, torch.bfloat16: 4, torch.uint8: 5}


class Group:
    """The group of one run; each collective leaves its fingerprint in the shared state before it is entered."""

    def __init__(self, job: Job, slot: Slot, device: str):
        self.size: int = job.options["ranks"]
        self._slot, self._device = slot, device
        if self.size == 1:
            return
        try:
            store = dist.TCPStore("127.0.0.1", job.port, self.size, is_master=job.listen is not None, timeout=PATIENCE,
                                  wait_for_workers=False, master_listen_fd=job.listen)
            # Two runs never join, even where one would come across the other's store.
            dist.init_process_group(job.options["group_backend"], store=dist.PrefixStore(job.run, store),
                                    rank=job.index, world_size=self.size, timeout=PATIENCE)
        except (RuntimeError, OSError) as error:
            raise _lost(error, "the ranks could not meet") from error

    def sum(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over all ranks, in place."""
        self._reduce(tensor, _SUM, dist.ReduceOp.SUM)

    def latest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""
        tensor = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        self._reduce(tensor, _MAX, dist.ReduceOp.MAX)
        return tensor.item()

    def gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return all ranks' tensors, which have the same shape, in rank order."""
        rows = [torch.empty_like(row) for _ in range(self.size)]
        if self.size == 1:
            return [row]
        self._slot.collective(_GATHER, row.numel(), _DTYPES[row.dtype])
        try:
            dist.all_gather(rows, row)
        except RuntimeError as error:
            raise _lost(error, "an all-gather failed") from error
        return rows

    def _reduce(self, tensor: torch.Tensor, code: int, operation: dist.ReduceOp.RedOpType) -> None:
        if self.size == 1:
            return
        self._slot.collective(code, tensor.numel(), _DTYPES[tensor.dtype])
        try:
            dist.all_reduce(tensor, operation)
        except RuntimeError as error:
            raise _lost(error, "an all-reduce failed") from error


def _lost(error: Exception, what: str) -> PeerLost:
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    kind = "timeout" if "timed out" in str(error).lower() or "timeout" in str(error).lower() else "peer"
    return PeerLost(f"{what}: {first}", kind)
