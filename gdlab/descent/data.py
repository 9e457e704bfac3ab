"""Data: who owns which samples, which of them a step uses, and the digits that ship with the package."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from gdlab import laws
from gdlab.experiment import Experiment
from gdlab.part import ExperimentError

Batch = slice | torch.Tensor
"""Which samples: a slice where they lie together, else their indices."""

ORDER_STEP = 1
"""The step under which the order of the whole data set is drawn (step 0 draws the initial parameters)."""


def shard_sizes(total: int, workers: int, shares: Sequence[float] | None = None) -> tuple[int, ...]:
    """Share `total` samples out over the workers, in equal parts or by `shares`; what is left goes to the first ranks.

    Raises ExperimentError where a worker would have none.
    """
    if shares is None:
        sizes = [total // workers] * workers
    else:
        # The tiny addend keeps a share such as 0.7 of 10 from becoming 6.
        sizes = [int(total * share / sum(shares) + 1e-9) for share in shares]
    for worker in range(total - sum(sizes)):
        sizes[worker % workers] += 1
    if min(sizes) < 1:
        raise ExperimentError(f"Worker {sizes.index(0)} would have no data: {total:,} samples cannot be shared out "
                              f"over workers = {workers:,} like this; use fewer workers or larger shards.")
    return tuple(sizes)


class Batches:
    """Say which samples each worker uses in each step; a pure function of (seed, worker, step).

    Samples lie in the order of the data set, shard after shard. A worker goes through its own shard in a new
    permutation each epoch, and a batch that reaches the end goes on in the next one. With batch size None, or at least
    the shard, every step uses the whole shard in its fixed order.
    """

    def __init__(self, exp: Experiment, total: int, device: str = "cpu") -> None:
        self.sizes = shard_sizes(total, exp.workers, exp.shards)
        ends = np.cumsum(self.sizes).tolist()
        self._starts = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        self._batch_sizes, self._seed, self._device = exp.batch_sizes, exp.seed, device
        self._orders: dict[int, tuple[int, torch.Tensor]] = {}

    def of(self, worker: int, step: int) -> Batch:
        """Return the samples of one step of one worker."""
        start, size, batch = self._starts[worker], self.sizes[worker], self._batch_sizes[worker]
        if batch is None or batch >= size:
            return slice(start, start + size)
        epoch, first = divmod(step * batch, size)
        order = self._order(worker, epoch)
        rest = first + batch - size
        if rest <= 0:
            return order[first:first + batch]
        return torch.cat([order[first:], self._order(worker, epoch + 1)[:rest]])

    def _order(self, worker: int, epoch: int) -> torch.Tensor:
        kept = self._orders.get(worker)
        if kept is None or kept[0] != epoch:
            order = laws.generator(self._seed, worker, epoch, laws.BATCH).permutation(self.sizes[worker])
            kept = (epoch, torch.from_numpy(order + self._starts[worker]).to(self._device))
            self._orders[worker] = kept
        return kept[1]


def data_order(seed: int, total: int, shuffle: bool = True) -> torch.Tensor:
    """Return the order in which the samples are laid out before they are shared out: (total,) indices."""
    if not shuffle:
        return torch.arange(total)
    return torch.from_numpy(laws.generator(seed, 0, ORDER_STEP, laws.INIT).permutation(total))


class Samples:
    """Hold a data set, either tensors of equal first dimension or a map-style Dataset, in a given order."""

    def __init__(self, data: Any, seed: int, shuffle: bool, device: str = "cpu") -> None:
        self._device, self._cast = device, {}
        self._tensors: tuple[torch.Tensor, ...] | None = None
        if isinstance(data, torch.utils.data.TensorDataset):
            data = data.tensors
        if isinstance(data, torch.Tensor):
            data = (data,)
        if isinstance(data, tuple | list) and data and all(isinstance(x, torch.Tensor) for x in data):
            lengths = {len(x) if x.ndim else 0 for x in data}
            if len(lengths) != 1 or lengths == {0}:
                raise ExperimentError(f"The data's tensors have {sorted(lengths)} samples: all need the same number, "
                                      "at least one.")
            self.total = lengths.pop()
            self._tensors = tuple(x.detach()[data_order(seed, self.total, shuffle)].to(device) for x in data)
        elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, tuple | list | dict):
            self._dataset, self.total = data, len(data)
            if not self.total:
                raise ExperimentError("The data set is empty: it needs at least one sample.")
            self._order = data_order(seed, self.total, shuffle)
        else:
            raise ExperimentError(f"The data is a {type(data).__name__}: it must be a tuple of tensors or a Dataset "
                                  "with __len__ and __getitem__.")

    def take(self, batch: Batch, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return the samples of a batch, floating-point ones in `dtype`."""
        if self._tensors is not None:
            if dtype not in self._cast:
                self._cast[dtype] = tuple(x.to(dtype) if x.is_floating_point() else x for x in self._tensors)
            return tuple(x[batch] for x in self._cast[dtype])
        rows = torch.utils.data.default_collate([self._dataset[i] for i in self._order[batch].tolist()])
        rows = (rows,) if isinstance(rows, torch.Tensor) else tuple(rows)
        return tuple(x.to(self._device, dtype if x.is_floating_point() else None) for x in rows)


@lru_cache(maxsize=1)
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the digits: images (1797, 64) in float64, standardised, and labels (1797,).

    Alpaydin & Kaynak 1998 (UCI Optical Recognition of Handwritten Digits, test part), as scikit-learn ships them. Each
    pixel has its mean taken away, and all are divided by one deviation: some pixels are nearly always 0 and would
    become enormous by their own.
    """
    with files("gdlab").joinpath("data/digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        images = stored["images"].reshape(-1, 64).astype(np.float64)
        labels = stored["labels"].astype(np.int64)
    images -= images.mean(0)
    return torch.from_numpy(images / images.std()), torch.from_numpy(labels)
