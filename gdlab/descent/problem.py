"""What every problem offers: a start, a worker's loss and gradient, and the objective that all share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gdlab import laws
from gdlab.experiment import Experiment

NOISE_BLOCK = 64
"""Steps of noise drawn at once: a generator costs about 10 us, a draw from a block far less."""


class Problem:
    """Something to minimise over one flat tensor of `size` parameters, shared out over the workers.

    Losses and gradients are pure functions of (parameters, worker, step), computed in the dtype of the parameters
    that are handed in. Abstract: a problem gives `_start`, `loss`, `gradient` and `objective`.
    """

    size: int
    samples: tuple[int, ...] | None = None
    """Samples in each worker's shard; None where there is no data."""
    groups: tuple[slice, ...] | None = None
    """Where each parameter tensor lies in the flat one; None: all are one group."""
    repeatable = True
    """Whether a gradient may be computed once more without a trace: not where buffers remember the batches seen."""
    autocast: torch.dtype | None = None
    """The dtype that the problem casts to by itself, operation by operation; parameters then come in fp32."""

    def __init__(self, exp: Experiment, device: str = "cpu") -> None:
        self.device = device
        self._seed = exp.seed
        self._start_dtype = torch.float64 if exp.precision.weights == "fp64" else torch.float32
        self._noise = float(getattr(exp.problem, "noise", 0.0))
        self._noise_blocks: dict[int, tuple[int, torch.dtype, tuple[torch.Tensor, ...]]] = {}

    def initial(self) -> torch.Tensor:
        """Return the start as a new flat tensor (size,): fp64 where the weights are, else fp32; the same everywhere."""
        return self._start().to(self.device, self._start_dtype, copy=True)

    def loss(self, flat: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        """Return a worker's own noise-free loss on the samples of one step, differentiable in `flat`; half in fp32."""
        raise NotImplementedError

    def gradient(self, flat: torch.Tensor, worker: int, step: int, loss_scale: float = 1.0
                 ) -> tuple[float, torch.Tensor]:
        """Return a worker's unscaled, noise-free loss and the gradient of loss_scale times it, in flat's dtype."""
        raise NotImplementedError

    def objective(self, flat: torch.Tensor) -> float:
        """Return the loss that all workers together minimise, at one point (size,)."""
        raise NotImplementedError

    def objectives(self, points: torch.Tensor | np.ndarray | Iterable[torch.Tensor]) -> np.ndarray:
        """Return the objective at each row of `points` (k, size) as float64 (k,)."""
        return np.array([self.objective(torch.as_tensor(point)) for point in points], dtype=np.float64)

    def accuracy(self, flat: torch.Tensor) -> float | None:
        """Return the share of all samples that are classified rightly, or None where there are no classes."""
        return None

    def _start(self) -> torch.Tensor:
        raise NotImplementedError

    def _noisy(self, gradient: torch.Tensor, worker: int, step: int, loss_scale: float) -> torch.Tensor:
        """Add this step's normal noise to a gradient, in place, scaled as the gradient is."""
        if not self._noise:
            return gradient
        # Long gradients in shorter blocks: a block then stays below a megabyte.
        length = max(1, min(NOISE_BLOCK, 65_536 // self.size))
        block, row = divmod(step, length)
        kept = self._noise_blocks.get(worker)
        if kept is None or kept[0] != block or kept[1] != gradient.dtype:
            draws = laws.generator(self._seed, worker, block, laws.NOISE).standard_normal((length, self.size))
            rows = torch.from_numpy(draws * self._noise).to(self.device, gradient.dtype).unbind()
            kept = (block, gradient.dtype, rows)
            self._noise_blocks[worker] = kept
        return gradient.add_(kept[2][row], alpha=loss_scale)
