"""How many workers are worth having: speed-up laws, the gradient noise scale, the best counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from gdlab.laws import Law
from gdlab.theory.arguments import count, number
from gdlab.theory.communication import allreduce_time
from gdlab.theory.stragglers import expected_step_time


def speedup(workers: int, serial: float, law: str = "amdahl") -> float:
    """Return how many times faster `workers` workers are than one, if a share `serial` of the work cannot be split.

    "amdahl": the same work, 1 / (serial + (1 - serial) / N) (Amdahl 1967). "gustafson": N times the parallel work in
    the same time, serial + (1 - serial) N (Gustafson 1988), where `serial` is the share in the parallel run's time.
    Neither counts waiting nor messages. Raises ValueError for what cannot be.
    """
    n, s = count("workers", workers, 1), number("serial", serial, least=0, most=1)
    if law not in ("amdahl", "gustafson"):
        raise ValueError(f"law = {law!r} is not known: use amdahl or gustafson.")
    return 1 / (s + (1 - s) / n) if law == "amdahl" else s + (1 - s) * n


def gradient_noise_scale(small_batch: float, small_norm2: float | Sequence[float], big_batch: float,
                         big_norm2: float | Sequence[float]) -> float:
    """Return B_simple = tr(Sigma) / |G|^2, the batch size above which larger batches stop paying.

    From the squared norms of gradients at two batch sizes; several at each size are averaged first, since both
    estimators are unbiased and their ratio is not (McCandlish et al. 2018, appendix A.1):
    |G|^2 = (B2 n2 - B1 n1) / (B2 - B1) and tr(Sigma) = (n1 - n2) / (1/B1 - 1/B2), as E|G_B|^2 = |G|^2 + tr(Sigma) / B.
    Infinite where no gradient is left above the noise. Samples drawn independently. In N workers' gradients and their
    mean, B1 is one worker's batch and B2 is N times that. Raises ValueError for what cannot be.
    """
    b1 = number("small_batch", small_batch, above=0)
    b2 = number("big_batch", big_batch, above=b1)
    n1, n2 = (number(name, float(np.mean(norms)), least=0)
              for name, norms in (("small_norm2", small_norm2), ("big_norm2", big_norm2)))
    signal = (b2 * n2 - b1 * n1) / (b2 - b1)
    return (n1 - n2) / (1 / b1 - 1 / b2) / signal if signal > 0 else math.inf


def best_worker_count(law: Law, most: int, noise_scale: float | None = None, nbytes: float = 0.0,
                      latency_s: float = 0.0, seconds_per_byte: float = 0.0, algorithm: str = "ring") -> int:
    """Return the number of synchronous workers, 1 to `most`, with which the work is done soonest.

    A step lasts `expected_step_time` and then `allreduce_time`. Without `noise_scale` a fixed batch is split: each
    worker's draws of `law`, one worker's time for the whole of it, are divided by N (strong scaling). With it each
    worker keeps its batch, and 1 + noise_scale / N steps are needed (McCandlish et al. 2018, eq. 2.7; `noise_scale` in
    batches of one worker). Of equals the smallest. Raises ValueError for what cannot be.
    """
    if noise_scale is not None:
        number("noise_scale", noise_scale, least=0)

    def duration(n: int) -> float:
        step_s = expected_step_time(law, n)
        sum_s = allreduce_time(nbytes, n, latency_s, seconds_per_byte, algorithm)
        return step_s / n + sum_s if noise_scale is None else (1 + noise_scale / n) * (step_s + sum_s)

    return min(range(1, count("most", most, 1) + 1), key=duration)


def best_backups(law: Law, workers: int, noise_scale: float = math.inf) -> int:
    """Return how many of `workers` synchronous workers not to wait for, so that the work is done soonest.

    1 + noise_scale / (N - b) steps are needed, of `expected_step_time(law, N, b)` each (the trade-off of McCandlish et
    al. 2018 with the backup workers of Chen et al. 2016); `noise_scale` in batches of one worker, inf: only
    gradients per second count. Of equals the smallest. Raises ValueError for what cannot be.
    """
    n = count("workers", workers, 1)
    fixed, per = (0.0, 1.0) if noise_scale == math.inf else (1.0, number("noise_scale", noise_scale, least=0))
    return min(range(n), key=lambda b: (fixed + per / (n - b)) * expected_step_time(law, n, b))
