"""Closed forms and exact sums for what the runs measure; each states what it assumes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gdlab.laws import Constant, Exponential, Law, Pareto, ShiftedExponential, Spike, Uniform

_ALLREDUCE = ("ring", "recursive_doubling", "rabenseifner", "binomial", "ps_1")


def allreduce_time(
    nbytes: float, workers: int, latency_s: float, seconds_per_byte: float, algorithm: str = "ring"
) -> float:
    """Return the seconds in which `workers` ranks sum `nbytes` each, under the latency and bandwidth model.

    Each message costs latency_s + bytes * seconds_per_byte; sums are free and links do not interfere (Thakur,
    Rabenseifner & Gropp 2005, section 4). `algorithm`: "ring", "recursive_doubling", "rabenseifner", "binomial"
    (reduce, then broadcast, over a binomial tree), or "ps_1": one parameter server whose link carries all workers'
    gradients in and all their copies out. Logarithms are rounded up, exact for powers of two. One worker needs no
    message and takes 0.

    Raises ValueError for fewer than one worker or an unknown algorithm.
    """
    if algorithm not in _ALLREDUCE:
        raise ValueError(f"No all-reduce is called {algorithm!r}: use one of {', '.join(_ALLREDUCE)}.")
    if workers < 1:
        raise ValueError(f"An all-reduce needs at least one worker, got {workers}.")
    if workers == 1:
        return 0.0
    p = workers
    rounds = math.ceil(math.log2(p))
    transfer = nbytes * seconds_per_byte
    if algorithm == "ring":
        return 2 * (p - 1) * (latency_s + transfer / p)
    if algorithm == "recursive_doubling":
        return rounds * (latency_s + transfer)
    if algorithm == "rabenseifner":
        return 2 * rounds * latency_s + 2 * (p - 1) / p * transfer
    if algorithm == "binomial":
        return 2 * rounds * (latency_s + transfer)
    return 2 * latency_s + 2 * p * transfer


def expected_step_time(law: Law, workers: int, backups: int = 0) -> float:
    """Return the mean seconds of a synchronous step that waits for the fastest workers - backups of them.

    That is the mean of the (workers - backups)-th smallest of independent draws of `law`, without communication: for
    an exponential law mean * (H_workers - H_backups) (Rényi 1953). Closed forms where there are any, else the
    integral of the survival function. Infinite where the tail is too heavy, such as Pareto(alpha <= 1).

    Raises ValueError for backups outside 0 to workers - 1.
    """
    if not 0 <= backups < workers:
        raise ValueError(f"{backups} backups leave none of {workers} workers to wait for: use 0 to {workers - 1}.")
    n, k = workers, workers - backups
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


def expected_staleness(rates: Sequence[float]) -> np.ndarray:
    """Return each worker's mean staleness in asynchronous descent, (workers,), from its gradients per second.

    Between a read and its write the others make sum(other rates) / own rate updates on average, whatever the laws
    (renewal theory), if a worker reads again as soon as it has pushed and the server takes no time. Averaged over
    updates, and so weighted by the rates, this is workers - 1. Raises ValueError for a rate that is not above 0.
    """
    rate = np.asarray(rates, dtype=float)
    if rate.ndim != 1 or not rate.size or not np.all(np.isfinite(rate) & (rate > 0)):
        raise ValueError(f"Each worker needs a rate above 0, got {rates!r}.")
    return (rate.sum() - rate) / rate


def ssp_throughput(workers: int, staleness_bound: int, rate: float = 1.0) -> float:
    """Return the updates per second of bounded staleness with memoryless workers of `rate` gradients per second each.

    Exact: the stationary distribution of the Markov chain whose state is how many workers are how far ahead of the
    slowest; a worker more than `staleness_bound` ahead stands still (rule A). Bound 0 gives workers * rate / H_workers,
    the synchronous limit. Raises ValueError where the chain would have more than 200,000 states.
    """
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
    return rate * float(share @ [n - state[-1] for state in todo])


def _harmonic(first: int, last: int) -> float:
    """Return 1/first + ... + 1/last."""
    return float(np.sum(1.0 / np.arange(first, last + 1)))
