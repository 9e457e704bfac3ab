"""Closed forms and exact sums for what the runs measure; each states what it assumes."""

from __future__ import annotations

import math

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
