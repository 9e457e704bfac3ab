"""What a message costs: seconds of an all-reduce, and bytes that each rank sends."""

from __future__ import annotations

import math

from gdlab.theory.arguments import count, number

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


def ring_bytes(nbytes: float, workers: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of `nbytes`: 2 (p - 1) / p * nbytes.

    In 2 (p - 1) rounds of nbytes / p each, and so less than 2 nbytes however many ranks there are; no all-reduce
    sends less (Patarasuk & Yuan 2009). `nbytes` is taken to be a multiple of p. Raises ValueError for what cannot be.
    """
    p = count("workers", workers, 1)
    return 2 * (p - 1) * number("nbytes", nbytes, least=0) / p


def local_sgd_bytes(nbytes: float, workers: int, period: int) -> float:
    """Return the bytes that each rank sends for each local step: one ring all-reduce in `period` steps.

    Raises ValueError for what cannot be.
    """
    return ring_bytes(nbytes, workers) / count("period", period, 1)


def gathered_bytes(message_bytes: float, workers: int) -> float:
    """Return the bytes that each rank sends in a ring all-gather of one message a rank: (p - 1) * message_bytes.

    Compressed gradients of several ranks do not sum to a compressed one, so each of them goes all the way round, and
    the cost grows with the workers where that of an all-reduce does not. Raises ValueError for what cannot be.
    """
    return (count("workers", workers, 1) - 1) * number("message_bytes", message_bytes, least=0)


def topk_bytes(parameters: int, workers: int, fraction: float = 0.01, value_bytes: float = 4,
               index_bytes: float = 4) -> float:
    """Return the bytes that each rank sends to gather the largest `fraction` of each gradient, values and indices.

    The number of kept values is taken to be parameters * fraction exactly. At 1% of fp32 with 4-byte indices and 8
    ranks that is 12.5 times less than a ring all-reduce, not 100 times. Raises ValueError for what cannot be.
    """
    kept = count("parameters", parameters, 1) * number("fraction", fraction, above=0, most=1)
    each = number("value_bytes", value_bytes, least=0) + number("index_bytes", index_bytes, least=0)
    return gathered_bytes(kept * each, workers)


def sign_bytes(parameters: int, workers: int) -> float:
    """Return the bytes that each rank sends to gather one bit a parameter; a common scale is not counted.

    Raises ValueError for what cannot be.
    """
    return gathered_bytes(count("parameters", parameters, 1) / 8, workers)
