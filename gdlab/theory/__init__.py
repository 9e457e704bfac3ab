"""Closed forms and exact sums for what the runs measure; each states what it assumes."""

from gdlab.theory.communication import (
    allreduce_time,
    gathered_bytes,
    local_sgd_bytes,
    ring_bytes,
    sign_bytes,
    topk_bytes,
)
from gdlab.theory.scaling import best_backups, best_worker_count, gradient_noise_scale, speedup
from gdlab.theory.stability import (
    best_lr,
    implicit_momentum,
    max_stable_lr,
    max_stable_lr_memoryless,
    max_stable_lr_random,
    memoryless_mean,
    spectral_radius,
)
from gdlab.theory.stationary import local_sgd_fixed_point, noise_floor
from gdlab.theory.stragglers import (
    expected_staleness,
    expected_step_time,
    ssp_staleness,
    ssp_throughput,
    staleness_shares,
)

__all__ = [
    "allreduce_time", "best_backups", "best_lr", "best_worker_count", "expected_staleness", "expected_step_time",
    "gathered_bytes", "gradient_noise_scale", "implicit_momentum", "local_sgd_bytes", "local_sgd_fixed_point",
    "max_stable_lr", "max_stable_lr_memoryless", "max_stable_lr_random", "memoryless_mean", "noise_floor",
    "ring_bytes", "sign_bytes", "spectral_radius", "speedup", "ssp_staleness", "ssp_throughput", "staleness_shares",
    "topk_bytes",
]
