"""How long a step takes and how stale its gradient is: order statistics, renewal theory, an exact Markov chain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from gdlab.laws import Constant, Exponential, Law, Pareto, ShiftedExponential, Spike, Uniform
from gdlab.theory.arguments import count


def expected_step_time(law: Law, workers: int, backups: int = 0, speeds: Sequence[float] | None = None) -> float:
    """Return the mean seconds of a synchronous step that waits for the fastest workers - backups of them.

    That is the mean of the (workers - backups)-th smallest of independent draws of `law`, without communication: for
    an exponential law mean * (H_workers - H_backups) (Rényi 1953). Closed forms where there are any, else the
    integral of the survival function. Infinite where the tail is too heavy, such as Pareto(alpha <= 1).
    `speeds`: one a worker, by which its draws are divided; then P(all done by x) is the product of the workers' own.

    Raises ValueError for backups outside 0 to workers - 1, or together with unequal speeds.
    """
    if not 0 <= backups < workers:
        raise ValueError(f"{backups} backups leave none of {workers} workers to wait for: use 0 to {workers - 1}.")
    n, k = workers, workers - backups
    if speeds is not None and len(set(_rates(speeds, n))) > 1:
        if backups:
            raise ValueError("Backup workers of unequal speeds have no closed form here: use a virtual run.")
        return _slowest(law, _rates(speeds, n))
    if speeds is not None:
        return expected_step_time(law, workers, backups) / float(speeds[0])
    if isinstance(law, Constant):
        return law.value
    if isinstance(law, Exponential):
        return law.mean * _harmonic(backups + 1, n)
    if isinstance(law, ShiftedExponential):
        return law.shift + law.excess * _harmonic(backups + 1, n)
    if isinstance(law, Uniform):
        return law.low + (law.high - law.low) * k / (n + 1)
    if isinstance(law, Pareto):
        tail = backups + 1 - 1 / law.alpha
        if tail <= 0:
            return math.inf
        # Gamma functions of large arguments overflow, their logarithms do not.
        log = math.lgamma(n + 1) - math.lgamma(backups + 1) + math.lgamma(tail) - math.lgamma(n + 1 - 1 / law.alpha)
        return law.minimum * math.exp(log)
    from scipy.special import betainc

    if isinstance(law, Spike):
        low, high = sorted((law.base, law.slow))
        share = law.probability if law.slow >= law.base else 1 - law.probability
        return low + (high - low) * float(betainc(backups + 1, k, share))
    # Mean = integral of P(T > x) dx = integral of P(T > e^t) e^t dt: smooth and vanishing at both ends, where the
    # plain sum of equally spaced points converges faster than any power of their spacing.
    low, high = float(law.ppf(1e-15)), float(law.ppf(1 - 1e-15))
    start = max(low, 1e-12 * law.mean) * 1e-3  # type: ignore[attr-defined]
    t, spacing = np.linspace(math.log(start), math.log(high * 4), 8001, retstep=True)
    x = np.exp(t)
    return float(np.sum((1.0 - betainc(k, backups + 1, law.cdf(x))) * x) * spacing + x[0])


def _slowest(law: Law, speeds: np.ndarray) -> float:
    """Return the mean of the largest of one draw a worker, each divided by its speed."""
    if isinstance(law, Constant):
        return law.value / float(speeds.min())
    if math.isinf(law.mean):  # type: ignore[attr-defined]
        return math.inf
    speed, workers = np.unique(speeds, return_counts=True)

    def late(x: np.ndarray) -> np.ndarray:
        return 1.0 - np.prod(np.power(law.cdf(x[:, None] * speed), workers), axis=1)

    if isinstance(law, Spike):
        ends = np.unique(np.r_[0.0, law.base / speed, law.slow / speed])
        return float(np.diff(ends) @ late(ends[:-1]))
    # Gauss's rule over ln x, as the ends may lie far apart, between the points at which some worker's law has a corner.
    alpha = law.alpha if isinstance(law, Pareto) else math.inf
    first, last = law.ppf(np.array([0.0, 1 - (1e-15 if math.isinf(alpha) else 1e-7)]))
    start, end = 1e-12 * law.mean / speed[-1], last / speed[0]  # type: ignore[attr-defined]
    cuts = np.unique(np.clip(np.r_[start, first / speed, last / speed, np.geomspace(start, end, 24)], start, end))
    node, weight = np.polynomial.legendre.leggauss(40)
    total = start
    for a, b in pairwise(np.log(cuts)):
        x = np.exp((a + b) / 2 + (b - a) / 2 * node)
        total += (b - a) / 2 * float(weight @ (late(x) * x))
    # Beyond, a survival function is that of the power law itself, whose integral is known.
    return float(total + late(cuts[-1:])[0] * cuts[-1] / (alpha - 1))


def _rates(rates: Sequence[float], workers: int | None = None) -> np.ndarray:
    rate = np.asarray(rates, dtype=float)
    if rate.ndim != 1 or not rate.size or not np.all(np.isfinite(rate) & (rate > 0)):
        raise ValueError(f"Each worker needs a rate above 0, got {rates!r}.")
    if workers not in (None, rate.size):
        raise ValueError(f"There are {rate.size} speeds but {workers} workers: one a worker is needed.")
    return rate


def expected_staleness(rates: Sequence[float]) -> np.ndarray:
    """Return each worker's mean staleness in asynchronous descent, (workers,), from its gradients per second.

    Between a read and its write the others make sum(other rates) / own rate updates on average, whatever the laws
    (renewal theory), if a worker reads again as soon as it has pushed and the server takes no time. Averaged over
    updates, and so weighted by the rates, this is workers - 1. Raises ValueError for a rate that is not above 0.
    """
    rate = _rates(rates)
    return (rate.sum() - rate) / rate


def staleness_shares(rates: Sequence[float], size: int) -> np.ndarray:
    """Return the share of asynchronous updates of staleness 0, 1, ... size - 1, (size,), with memoryless workers.

    Whoever has read, each update that follows is its own with probability p = its rate / all rates: a share p of the
    updates has staleness k with probability p (1 - p)^k. For equal workers (1/N)(1 - 1/N)^k (Mitliagkas et al. 2016,
    section 3). Exact for exponential times and messages that cost nothing. Raises ValueError for what cannot be.
    """
    rate, k = _rates(rates), np.arange(count("size", size))
    p, workers = np.unique(rate / rate.sum(), return_counts=True)
    return (workers * p**2) @ np.power(1 - p[:, None], k)


def ssp_throughput(workers: int, staleness_bound: int, rate: float = 1.0) -> float:
    """Return the updates per second of bounded staleness with memoryless workers of `rate` gradients per second each.

    Exact: the stationary distribution of the Markov chain whose state is how many workers are how far ahead of the
    slowest; a worker more than `staleness_bound` ahead stands still (rule A). Bound 0 gives workers * rate / H_workers,
    the synchronous limit. Raises ValueError where the chain would have more than 200,000 states.
    """
    share, active = _bounded(workers, staleness_bound)
    return rate * float(share @ active)


def ssp_staleness(workers: int, staleness_bound: int) -> float:
    """Return the mean staleness over updates of bounded staleness with memoryless workers of equal rates.

    Exact, by the same chain: an update makes the gradient of every other worker that is computing one update staler,
    and comes at a rate in proportion to those that are computing: E[a^2] / E[a] - 1 where a of them are. Less than
    workers - 1, which it tends to as the bound grows. Raises ValueError as `ssp_throughput` does.
    """
    share, active = _bounded(workers, staleness_bound)
    return float(share @ active**2 / (share @ active)) - 1.0


@lru_cache(maxsize=64)
def _bounded(workers: int, staleness_bound: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the stationary shares of the chain's states, and how many workers are computing in each."""
    n, s = workers, staleness_bound
    if n < 1 or s < 0:
        raise ValueError(f"At least one worker and a bound of at least 0 are needed, got {n} and {s}.")
    if math.comb(n + s, s + 1) > 200_000:
        raise ValueError(f"{n} workers with a bound of {s} make too many states for an exact answer: "
                         f"measure it with a virtual run.")
    from scipy.sparse import coo_array
    from scipy.sparse.linalg import spsolve

    # counts[a]: workers a steps ahead of the slowest, a = 0 .. s + 1; those at s + 1 stand still.
    start = (n,) + (0,) * (s + 1)
    index, todo = {start: 0}, [start]
    rows, columns, flows = [], [], []
    for state in todo:
        for ahead in range(s + 1):
            if not state[ahead]:
                continue
            after = list(state)
            after[ahead] -= 1
            after[ahead + 1] += 1
            if after[0] == 0:
                after = [*after[1:], 0]
            key = tuple(after)
            if key not in index:
                index[key] = len(todo)
                todo.append(key)
            rows += [index[key], index[state]]
            columns += [index[state]] * 2
            flows += [state[ahead], -state[ahead]]
    size = len(todo)
    # Balance of flows, with the last equation (which follows from the others) replaced by "shares sum to one".
    keep = [i for i, row in enumerate(rows) if row != size - 1]
    matrix = coo_array(
        ([*(flows[i] for i in keep), *[1.0] * size],
         ([*(rows[i] for i in keep), *[size - 1] * size], [*(columns[i] for i in keep), *range(size)])),
        shape=(size, size),
    ).tocsc()
    share = spsolve(matrix, np.r_[np.zeros(size - 1), 1.0]) if size > 1 else np.ones(1)
    return share, np.array([n - state[-1] for state in todo], dtype=float)


def _harmonic(first: int, last: int) -> float:
    """Return 1/first + ... + 1/last."""
    return float(np.sum(1.0 / np.arange(first, last + 1)))
