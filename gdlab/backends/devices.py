"""Where the ranks compute, and over which group backend they meet."""

from __future__ import annotations

from typing import NamedTuple

from gdlab.part import ExperimentError


class Placement(NamedTuple):
    """The devices and the group backend of one run."""

    device: str
    """cpu or cuda."""
    group_backend: str
    """gloo, nccl, or none for a run without collectives."""
    gpus: int
    note: str
    """What a reader of the figures must know; empty if nothing."""

    def device_of(self, rank: int) -> str:
        """Return torch's name for the device of one rank: GPUs are dealt out in turn."""
        return f"cuda:{rank % self.gpus}" if self.device == "cuda" else "cpu"


def place(wanted: str, ranks: int, gpus: int, nccl: bool, collective: bool = True) -> Placement:
    """Choose for `ranks` ranks on a machine with `gpus` GPUs.

    NCCL takes one rank a GPU: with more ranks than GPUs they share GPUs and meet over gloo. Raises ExperimentError
    for device="cuda" on a machine without a GPU.
    """
    if wanted == "cuda" and gpus == 0:
        raise ExperimentError('device = "cuda" needs a GPU and PyTorch finds none here: use device="auto" or "cpu".')
    if wanted == "cpu" or gpus == 0:
        return Placement("cpu", "gloo" if collective else "none", 0, "")
    if not collective:
        shared = "" if ranks <= gpus else f"{ranks} ranks share {_gpus(gpus)}."
        return Placement("cuda", "none", gpus, shared)
    if nccl and ranks <= gpus:
        return Placement("cuda", "nccl", gpus, "")
    why = f"{ranks} ranks share {_gpus(gpus)}" if ranks > gpus else "this PyTorch has no NCCL"
    return Placement("cuda", "gloo", gpus, f"{why}, so gradients meet over gloo, through the host's memory.")


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"
