"""The problems with a closed-form gradient, and `build`, which makes any problem from an experiment."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.nn.functional import softplus

from gdlab import laws, parts
from gdlab.descent.arithmetic import HALF
from gdlab.descent.data import Batches, Samples
from gdlab.descent.problem import Problem
from gdlab.experiment import Experiment

__all__ = ["Problem", "build"]


def build(exp: Experiment, device: str = "cpu") -> Problem:
    """Make the problem of an experiment on a device; the same everywhere for the same experiment.

    Raises ExperimentError where the data cannot be shared out, or a reader's own problem is not what it should be.
    """
    kind = type(exp.problem)
    if kind in _CLOSED:
        return _CLOSED[kind](exp, device)
    from gdlab.descent import networks

    return networks.build(exp, device)


class Quadratic(Problem):
    """Sum of eigenvalue * (x - center)^2 / 2, each worker with its own center and eigenvalues if given."""

    def __init__(self, exp: Experiment, device: str = "cpu") -> None:
        super().__init__(exp, device)
        spec: parts.Quadratic = exp.problem  # type: ignore[assignment]
        self.size = len(spec.start)
        self._at = spec.start
        self._curvature = torch.tensor(spec.eigenvalues, dtype=torch.float64, device=device).reshape(-1, self.size)
        centers = spec.centers or [[0.0] * self.size]
        self._center = torch.tensor(centers, dtype=torch.float64, device=device)
        self._centered = spec.centers is not None
        self._rows: dict[torch.dtype, tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]] = {}

    def _start(self) -> torch.Tensor:
        return torch.tensor(self._at, dtype=torch.float64)

    def _own(self, flat: torch.Tensor, worker: int) -> tuple[torch.Tensor, torch.Tensor]:
        if flat.dtype not in self._rows:
            self._rows[flat.dtype] = (self._curvature.to(flat.dtype).unbind(), self._center.to(flat.dtype).unbind())
        curvatures, centers = self._rows[flat.dtype]
        offset = flat - centers[worker] if self._centered else flat
        return curvatures[worker if len(curvatures) > 1 else 0], offset

    def loss(self, flat: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        curvature, offset = self._own(flat, worker)
        if flat.dtype in HALF:
            curvature, offset = curvature.float(), offset.float()
        return torch.dot(curvature * offset, offset) / 2

    def gradient(self, flat: torch.Tensor, worker: int, step: int, loss_scale: float = 1.0
                 ) -> tuple[float, torch.Tensor]:
        curvature, offset = self._own(flat, worker)
        if flat.dtype in HALF:
            # One rounding, after the scale: the scale is there to lift products that half precision would lose.
            wide = offset.float()
            slope = curvature.float() * wide
            loss, slope = torch.dot(slope, wide).item() / 2, (slope * loss_scale).to(flat.dtype)
        else:
            slope = curvature * offset
            loss = torch.dot(slope, offset).item() / 2
            if loss_scale != 1.0:
                slope = slope * loss_scale
        return loss, self._noisy(slope, worker, step, loss_scale)

    def objective(self, flat: torch.Tensor) -> float:
        offset = flat.to(self.device, torch.float64) - self._center
        return (self._curvature * offset * offset).sum(-1).mean().item() / 2

    def objectives(self, points: torch.Tensor | np.ndarray | Iterable[torch.Tensor]) -> np.ndarray:
        if len(self._center) == 1 and len(self._curvature) == 1:
            x = _matrix(points) - self._center[0].cpu()
            return ((x * x) @ self._curvature[0].cpu() / 2).numpy()
        return super().objectives(points)


class Plane(Problem):
    """A loss of two parameters: a subclass gives its value and slope."""

    size = 2

    def __init__(self, exp: Experiment, device: str = "cpu") -> None:
        super().__init__(exp, device)
        self._at = exp.problem.start

    def _start(self) -> torch.Tensor:
        return torch.tensor(self._at, dtype=torch.float64)

    @staticmethod
    def _value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def _slope(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        # The scale goes into the coefficients, as in a backward pass, so that it lifts what would underflow.
        raise NotImplementedError

    def loss(self, flat: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        x, y = (flat.float() if flat.dtype in HALF else flat).unbind()
        return self._value(x, y)

    def gradient(self, flat: torch.Tensor, worker: int, step: int, loss_scale: float = 1.0
                 ) -> tuple[float, torch.Tensor]:
        x, y = flat.unbind()
        slope = torch.stack(self._slope(x, y, loss_scale))
        loss = self.loss(flat, worker, step) if flat.dtype in HALF else self._value(x, y)
        return loss.item(), self._noisy(slope, worker, step, loss_scale)

    def objective(self, flat: torch.Tensor) -> float:
        return self._value(*flat.double().unbind()).item()

    def objectives(self, points: torch.Tensor | np.ndarray | Iterable[torch.Tensor]) -> np.ndarray:
        return self._value(*_matrix(points).unbind(1)).numpy()


class Ravine(Plane):
    """(1 - x)^2 + 100 (y - x^2)^2, minimum 0 at (1, 1). Rosenbrock 1960."""

    @staticmethod
    def _value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (1 - x) ** 2 + 100 * (y - x * x) ** 2

    @staticmethod
    def _slope(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        off = (y - x * x) * (200 * scale)
        return (x - 1) * (2 * scale) - 2 * x * off, off


class Saddle(Plane):
    """x^2/2 - y^2/2 + y^4/4: a saddle at the origin, minima -1/4 at (0, -1) and (0, 1)."""

    @staticmethod
    def _value(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * x - y * y) / 2 + y**4 / 4

    @staticmethod
    def _slope(x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, (y * y - 1) * (y * scale)


class Cliff(Plane):
    """0.1 (x - 3)^2 + y^2/2 + 100 max(0, x - 1), the last with its corner rounded over a width of 0.01.

    A gentle slope leads to a wall at x = 1, where the gradient jumps from 0.4 to 100 and throws the descent far back:
    what Pascanu, Mikolov & Bengio 2013 (figure 6) draw of recurrent networks. Minimum near (0.94, 0).
    """

    WALL, HEIGHT, WIDTH = 1.0, 100.0, 0.01

    @classmethod
    def _value(cls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wall = softplus((x - cls.WALL) / cls.WIDTH) * (cls.HEIGHT * cls.WIDTH)
        return 0.1 * (x - 3) ** 2 + y * y / 2 + wall

    @classmethod
    def _slope(cls, x: torch.Tensor, y: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        wall = torch.sigmoid((x - cls.WALL) / cls.WIDTH) * (cls.HEIGHT * scale)
        return (x - 3) * (0.2 * scale) + wall, y * scale


class LinearRegression(Problem):
    """The mean of (X theta - y)^2 / 2, started at theta = 0.

    X is standard normal; y = X theta* + noise, with theta* standard normal too. Then the last column of X is
    multiplied by `feature_scale`, as if it had been measured in another unit: y and the best loss stay, while the
    curvatures, about 1 for each column, become 1 and feature_scale^2.
    """

    def __init__(self, exp: Experiment, device: str = "cpu") -> None:
        super().__init__(exp, device)
        self._noise = 0.0  # here the noise is the labels', not the gradient's
        spec: parts.LinearRegression = exp.problem  # type: ignore[assignment]
        self.size = spec.features
        draws = laws.generator(exp.seed, 0, 2, laws.INIT)
        truth = draws.standard_normal(spec.features)
        x = draws.standard_normal((spec.samples, spec.features))
        y = x @ truth + spec.noise * draws.standard_normal(spec.samples)
        x[:, -1] *= spec.feature_scale
        self._samples = Samples((torch.from_numpy(x), torch.from_numpy(y)), exp.seed, shuffle=False, device=device)
        self._batches = Batches(exp, spec.samples, device)
        self.samples = self._batches.sizes

    def _start(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.float64)

    def _residual(self, flat: torch.Tensor, batch: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = self._samples.take(batch, flat.dtype)
        return x, x @ flat - y

    def loss(self, flat: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        return _half_mean_square(self._residual(flat, self._batches.of(worker, step))[1])

    def gradient(self, flat: torch.Tensor, worker: int, step: int, loss_scale: float = 1.0
                 ) -> tuple[float, torch.Tensor]:
        x, residual = self._residual(flat, self._batches.of(worker, step))
        return _half_mean_square(residual).item(), x.T @ (residual * (loss_scale / len(residual)))

    def objective(self, flat: torch.Tensor) -> float:
        return _half_mean_square(self._residual(flat.to(self.device, torch.float64), slice(None))[1]).item()


def _half_mean_square(residual: torch.Tensor) -> torch.Tensor:
    residual = residual.float() if residual.dtype in HALF else residual
    return torch.dot(residual, residual) / (2 * len(residual))


def _matrix(points: torch.Tensor | np.ndarray | Iterable[torch.Tensor]) -> torch.Tensor:
    if not isinstance(points, torch.Tensor | np.ndarray):
        points = torch.stack([torch.as_tensor(point) for point in points])
    return torch.as_tensor(points).detach().cpu().double()


_CLOSED: dict[type, type[Problem]] = {
    parts.Quadratic: Quadratic, parts.Ravine: Ravine, parts.Saddle: Saddle, parts.Cliff: Cliff,
    parts.LinearRegression: LinearRegression,
}
