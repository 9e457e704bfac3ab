"""Where a run settles: the floor that noise keeps it above, and the point that local steps draw it to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gdlab.theory.arguments import count, number
from gdlab.theory.stability import companion, max_stable_lr

_STRATEGIES = ("sync", "async", "fixed_delay")


def noise_floor(lr: float, curvature: float, noise: float, workers: int, strategy: Any, momentum: float = 0.0) -> float:
    """Return the stationary E[x^2] of noisy descent on curvature * x^2 / 2; inf where that diverges.

    Each gradient carries independent noise of standard deviation `noise`. With h = lr * curvature, s = lr * noise and
    N workers, by `strategy` (a name, or a gd.Sync(), gd.Async() or gd.LocalSGD()):

    - "sync", the mean of N gradients (of N - backups): s^2 / N / (h (2 - h)), the AR(1) process. The same for
      LocalSGD at its averagings, since on one shared quadratic its average is that of Sync (linearity).
    - "async", equal memoryless workers: s^2 (1 + N h) / (h (2 + h - N h^2)), derived: the second moments of x and of
      what each worker has read form a closed linear system, as each update comes from any worker with probability 1/N.
    - "fixed_delay", equal workers in turn, a delay of N - 1: the Lyapunov equation P = A P A' + Q of the companion
      matrix, solved exactly (linear algebra); so too for Sync with `momentum`.

    The objective settles at the sum of curvature * E[x^2] / 2. Raises ValueError for what cannot be, and for what has
    no such form: async with a bound, a batch, a correction or momentum, and LocalSGD with momentum.
    """
    n, late = count("workers", workers, 1), 0
    name = (strategy if isinstance(strategy, str) else type(strategy).__name__).lower().replace("localsgd", "local_sgd")
    h = number("lr", lr, above=0) * number("curvature", curvature, above=0)
    s2 = (lr * number("noise", noise, least=0)) ** 2
    b = number("momentum", momentum, least=0, below=1)
    plain = (getattr(strategy, "staleness_bound", None) is None and getattr(strategy, "batch", 1) == 1
             and getattr(strategy, "correction", "none") == "none")
    if not plain or (b and name in ("async", "local_sgd")):
        raise ValueError(f"{strategy}{' with momentum' if b else ''} has no closed form here: measure it with a run.")
    if name not in (*_STRATEGIES, "local_sgd"):
        raise ValueError(f"No noise floor is known for {strategy!r}: use one of {', '.join(_STRATEGIES)}.")
    if name == "async":
        room = 2 + h - n * h * h
        return s2 * (1 + n * h) / (h * room) if room > 0 else math.inf
    if name == "fixed_delay":
        late = n - 1
    else:
        s2 /= n - getattr(strategy, "backups", 0)
    if h >= max_stable_lr(1.0, late, b):
        return math.inf
    if not (late or b):
        return s2 / (h * (2 - h))
    from scipy.linalg import solve_discrete_lyapunov

    matrix = companion(lr, curvature, late, b)
    forcing = np.zeros_like(matrix)
    forcing[0, 0] = s2
    return float(solve_discrete_lyapunov(matrix, forcing, method="bilinear")[0, 0])


def local_sgd_fixed_point(curvatures: Any, centers: Any, lr: float, period: int) -> np.ndarray:
    """Return the point to which local SGD converges where the workers' quadratics differ; shape (parameters,).

    `curvatures`, `centers`: (workers,) or (workers, parameters), each worker's own; curvatures may be one row for all.
    A worker's `period` steps take x to center + (1 - lr curvature)^period (x - center), so the averages settle at
    sum w center / sum w with w = 1 - (1 - lr curvature)^period. Only for period 1, or equal curvatures, is that the
    minimum of the mean objective, where w is in proportion to the curvature (Charles & Konečný 2021). No noise, no
    momentum. Raises ValueError where shapes do not fit or where that average diverges.
    """
    c = np.asarray(centers, dtype=float)
    c = c[:, None] if c.ndim == 1 else c
    each = np.asarray(curvatures, dtype=float)
    each = each[:, None] if each.ndim == 1 and each.size == len(c) and c.shape[1] == 1 else each
    if c.ndim != 2 or not c.size or each.shape not in ((), c.shape, c.shape[1:]):
        raise ValueError(f"Curvatures of shape {np.shape(curvatures)} do not go with centers of shape "
                         f"{np.shape(centers)}: one row a worker is needed.")
    if not (np.all(np.isfinite(each) & (each > 0)) and np.all(np.isfinite(c))):
        raise ValueError("Each curvature must be a finite number above 0, and each center finite.")
    kept = np.broadcast_to((1 - number("lr", lr, above=0) * each) ** count("period", period, 1), c.shape)
    if not np.all(np.abs(kept.mean(axis=0)) < 1):
        raise ValueError(f"Local SGD with lr = {lr:g} and period = {period} diverges here: use a smaller rate.")
    return ((1 - kept) * c).sum(axis=0) / (1 - kept).sum(axis=0)
