"""What every problem offers: a start, a worker's loss and gradient, and the objective that all share."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from gdlab import laws
from gdlab.descent.arithmetic import HALF
from gdlab.experiment import Experiment

NOISE_BLOCK = 64
"""Steps of noise that share a generator: one costs about 10 us, a draw from it far less."""
NOISE_KEPT = 4_000_000
"""Numbers of noise that all workers together keep drawn beforehand, 16 MB in fp32."""


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
        self._workers = exp.workers
        self._noises: dict[int, Noise] = {}

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
        draws = self._noises.get(worker)
        if draws is None:
            draws = Noise(self._seed, worker, self.size, self._noise, self._workers, self.device)
            self._noises[worker] = draws
        noise = draws.of(step, torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        if gradient.dtype in HALF:
            # One rounding, after the scale, which half precision need not hold: what is too large becomes infinite.
            return gradient.copy_(gradient.float().add_(noise, alpha=loss_scale))
        return gradient.add_(noise, alpha=loss_scale)


class Noise:
    """One worker's normal noise, step by step: the same numbers in whatever order, and however few are kept."""

    def __init__(self, seed: int, worker: int, size: int, deviation: float, workers: int, device: str = "cpu"
                 ) -> None:
        self._key, self._size, self._deviation, self._device = (seed, worker), size, deviation, device
        # Long gradients in shorter blocks: a block then stays below a megabyte.
        self._length = max(1, min(NOISE_BLOCK, 65_536 // size))
        self._ahead = max(1, min(self._length, NOISE_KEPT // (size * workers)))
        self._block, self._next = -1, 0
        self._rows: torch.Tensor | None = None
        self._draws: np.random.Generator | None = None

    def of(self, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the noise (size,) of one step."""
        block, row = divmod(step, self._length)
        rows = self._rows
        if (rows is None or block != self._block or rows.dtype != dtype
                or not self._next - len(rows) <= row < self._next):
            rows = self._drawn(block, row, dtype)
        return rows[row - self._next]  # counted from the end

    def _drawn(self, block: int, row: int, dtype: torch.dtype) -> torch.Tensor:
        """Draw the rows of a block up to the one that is wanted, and some more."""
        if self._draws is None or block != self._block or row < self._next:
            self._draws = laws.generator(*self._key, block, laws.NOISE)
            self._block, self._next = block, 0
        while self._next <= row:
            count = min(self._ahead, self._length - self._next)
            drawn = self._draws.standard_normal((count, self._size))
            self._next += count
        rows = torch.from_numpy(drawn * self._deviation).to(self._device, dtype)
        self._rows = rows if self._ahead > 1 else None
        if self._next == self._length:
            self._draws = None
        return rows
