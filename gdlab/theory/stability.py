"""At which learning rate does descent with stale gradients stop converging, and at which is it fastest?

On a quadratic each direction of curvature L follows x[t+1] = x[t] + momentum (x[t] - x[t-1]) - lr L x[t - delay].
Where `curvature` may be several numbers, they are the eigenvalues of one problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gdlab.theory.arguments import count, number


def max_stable_lr(curvature: float | Sequence[float], delay: int, momentum: float = 0.0) -> float:
    """Return the learning rate above which descent with a fixed delay diverges; the largest curvature sets it.

    Without momentum 2 sin(pi / (2 (2 delay + 1))) / curvature (Levin & May 1976). With heavy-ball momentum b and no
    delay 2 (1 + b) / curvature (Polyak 1964); with both, the first crossing of the unit circle: the angle w in (0, pi)
    with (delay - 1/2) w + arg(e^iw - b) = pi/2 gives lr curvature = |e^iw - 1| |e^iw - b|. Momentum raises the
    limit only where there is no delay. Deterministic gradients; momentum at the server, applied at every update.

    Raises ValueError for what cannot be.
    """
    largest, tau = float(_curvatures(curvature).max()), count("delay", delay)
    b = number("momentum", momentum, least=0, below=1)
    if not tau:
        return 2 * (1 + b) / largest
    if not b:
        return 2 * math.sin(math.pi / (2 * (2 * tau + 1))) / largest
    from scipy.optimize import brentq

    def excess(angle: float) -> float:
        return (tau - 0.5) * angle + math.atan2(math.sin(angle), math.cos(angle) - b) - math.pi / 2

    angle = brentq(excess, 0.0, math.pi, xtol=1e-15, rtol=1e-14)
    return 2 * math.sin(angle / 2) * math.hypot(math.sin(angle), math.cos(angle) - b) / largest


def best_lr(curvature: float | Sequence[float], delay: int) -> float:
    """Return the learning rate at which descent with a fixed delay and no momentum converges fastest.

    For one curvature L it is delay^delay / (delay + 1)^(delay + 1) / L, the largest without overshoot: two roots of
    the characteristic polynomial meet at delay / (delay + 1). For several, where the smallest and the largest one
    converge equally fast; without a delay that is 2 / (smallest + largest). Raises ValueError for what cannot be.
    """
    each, tau = _curvatures(curvature), count("delay", delay)
    low, high = float(each.min()), float(each.max())
    alone = (tau / (tau + 1)) ** tau / (tau + 1)
    if low == high:
        return alone / high
    if not tau:
        return 2 / (low + high)
    from scipy.optimize import brentq

    # Up to the best for the largest curvature both gain; where the largest turns unstable the smallest still gains.
    return brentq(lambda lr: spectral_radius(lr, high, tau) - spectral_radius(lr, low, tau),
                  alone / high, min(alone / low, max_stable_lr(high, tau)), xtol=1e-15 / high)


def spectral_radius(lr: float, curvature: float | Sequence[float], delay: int, momentum: float = 0.0) -> float:
    """Return the factor by which the error shrinks (below 1) or grows (above) per update, in the long run.

    The largest modulus among the eigenvalues of the companion matrix, and over several curvatures the largest of all.
    Raises ValueError for what cannot be, or for a delay above 2,000.
    """
    each = _curvatures(curvature)
    return max(float(np.abs(np.linalg.eigvals(companion(lr, float(one), delay, momentum))).max()) for one in each)


def companion(lr: float, curvature: float, delay: int, momentum: float = 0.0) -> np.ndarray:
    """Return the matrix that takes (x[t], x[t-1], ...) to (x[t+1], x[t], ...)."""
    tau, b = count("delay", delay), number("momentum", momentum, least=0, below=1)
    if tau > 2000:
        raise ValueError(f"A delay of {tau} makes too large a matrix: use one of at most 2,000.")
    matrix = np.eye(max(tau + 1, 2 if b else 1), k=-1)
    matrix[0, 0] += 1 + b
    if b:
        matrix[0, 1] -= b
    matrix[0, tau] -= number("lr", lr, least=0) * curvature
    return matrix


def max_stable_lr_memoryless(curvature: float | Sequence[float], workers: int) -> float:
    """Return the learning rate above which E[x^2] diverges in asynchronous descent with memoryless workers.

    (1 + sqrt(1 + 8 N)) / (2 N) / curvature, derived: the second moments of x and of what the N workers have read form
    a closed linear system, as each update comes from any of them with probability 1/N (equal exponential times, free
    messages, no momentum). `noise_floor(strategy="async")` has its pole there. The mean alone would converge up to
    2 (2 N - 1) / curvature. Raises ValueError for what cannot be.
    """
    n = count("workers", workers, 1)
    return (1 + math.sqrt(1 + 8 * n)) / (2 * n) / float(_curvatures(curvature).max())


def max_stable_lr_random(curvature: float | Sequence[float], delay_shares: Sequence[float]) -> float:
    """Return the learning rate above which E[x^2] diverges where each update draws its delay anew.

    `delay_shares`: the probabilities of delays 0, 1, ... (scaled to sum 1), independent from update to update. There
    the spectral radius of E[A kron A] is 1, with A the companion matrix of the delay drawn. The mean converges for
    longer. Raises ValueError for what cannot be, or for delays above 24.
    """
    share = np.asarray(delay_shares, dtype=float)
    if share.ndim != 1 or not 1 <= share.size <= 25 or not np.all(share >= 0) or not 0 < share.sum() < math.inf:
        raise ValueError(f"delay_shares = {delay_shares!r} cannot be: it must be 1 to 25 numbers of at least 0, "
                         "not all of them 0.")
    share = np.trim_zeros(share, "b") / share.sum()
    from scipy.optimize import brentq

    first, last = np.eye(share.size, k=-1), np.eye(share.size)
    first[0, 0] = 1.0

    def excess(step: float) -> float:
        each = [first - step * np.outer(last[0], last[delay]) for delay in range(share.size)]
        square = sum(p * np.kron(matrix, matrix) for p, matrix in zip(share, each, strict=True))
        return float(np.abs(np.linalg.eigvals(square)).max()) - 1.0

    step = brentq(excess, 0.1 * max_stable_lr(1.0, share.size - 1), 2.5, xtol=1e-12)
    return step / float(_curvatures(curvature).max())


def implicit_momentum(workers: int) -> float:
    """Return the momentum with which the mean of asynchronous descent moves, 1 - 1/N (Mitliagkas et al. 2016).

    For N equal memoryless workers E[x] follows heavy-ball descent with this momentum and a learning rate of lr / N.
    True of the mean only; equal workers in turn are a pure delay instead. Raises ValueError for what cannot be.
    """
    return 1 - 1 / count("workers", workers, 1)


def memoryless_mean(lr: float, curvature: float, workers: int, updates: int, start: float = 1.0) -> np.ndarray:
    """Return E[x] after 0, 1, ... updates of asynchronous descent with memoryless workers, (updates + 1,).

    E[x[t+1]] = E[x[t]] + (1 - 1/N) (E[x[t]] - E[x[t-1]]) - (lr curvature / N) E[x[t]], after a first step of -lr
    curvature x[0], since all have read the start (Mitliagkas et al. 2016, theorem 3). Exact on a quadratic for equal
    exponential times and free messages. Raises ValueError for what cannot be.
    """
    b, n, total = implicit_momentum(workers), count("workers", workers, 1), count("updates", updates, 1)
    step = number("lr", lr, least=0) * float(_curvatures(curvature).max())
    x = [number("start", start), (1 - step) * start]
    while len(x) <= total:
        x.append(x[-1] + b * (x[-1] - x[-2]) - step / n * x[-1])
    return np.array(x)


def _curvatures(curvature: float | Sequence[float]) -> np.ndarray:
    each = np.atleast_1d(np.asarray(curvature, dtype=float))
    if each.ndim != 1 or not each.size or not np.all(np.isfinite(each) & (each > 0)):
        raise ValueError(f"curvature = {curvature!r} cannot be: it must be a finite number above 0, or several.")
    return each
