"""The shared parameters: combine pushes, clip, correct for staleness, step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import numpy as np
import torch

from gdlab.clipping import apply_clip
from gdlab.descent.arithmetic import NATIVE, carrier, cast
from gdlab.descent.compression import push_format
from gdlab.descent.problem import Problem
from gdlab.descent.update import Updater
from gdlab.descent.worker import Push, Read
from gdlab.experiment import Experiment
from gdlab.formats import LossScaler
from gdlab.parts import Async, LocalSGD


class Applied(NamedTuple):
    """What became of pushes that were applied together."""

    version: int
    skipped: bool
    """True where a gradient that is not finite left the parameters as they were."""
    clip_scale: float
    """The average's norm after clipping over that before; 1.0 where it was not clipped here."""
    lost_fraction: float
    """The share of updates that rounding lost; NaN for a skipped step."""


class Watch(Protocol):
    """Whoever wants to see updates: of which coordinates, and from which versions."""

    index: np.ndarray

    def due(self, version: int) -> bool:
        """Tell whether the update that starts from a version is wanted."""

    def append(self, version: int, weight: torch.Tensor, update: torch.Tensor, lost_fraction: float) -> None:
        """Take the weights as they were stored, and what was to be added to them."""


class Store:
    """Keep the parameters that all workers share, and make one version after another of them.

    Every rank of an all-reduce keeps one too: the same sums through `apply_sum` give the same bits everywhere.
    """

    def __init__(self, exp: Experiment, problem: Problem) -> None:
        self._problem, self._workers, self._combine = problem, exp.workers, exp.combine
        self._reduce = push_format(exp)
        self._rounded_sum = self._reduce not in NATIVE
        self._averages = isinstance(exp.strategy, LocalSGD)
        self._clip = exp.clip if exp.clips_at == "average" else None
        self._correction = exp.strategy.correction if isinstance(exp.strategy, Async) else "none"
        self._strength = exp.strategy.delay_compensation_strength if isinstance(exp.strategy, Async) else 0.0
        self._weights = _weights(problem, exp) if exp.combine == "weighted" else None
        scale = exp.precision.loss_scale
        self._scaler = LossScaler() if scale == "dynamic" else None
        self._scale = 1.0 if scale is None else self._scaler.scale if self._scaler else float(scale)
        self._rule = exp.nonfinite_rule
        self._guarded = self._rule != "apply"
        self._order = exp.reduce_order
        self.watch: Watch | None = None
        """Who is shown some of the updates."""
        self._updater = Updater(exp, problem.initial(), key=exp.workers)
        self._wide = torch.promote_types(carrier(self._reduce), self._updater.dtype)
        self._version = 0
        self._snapshot: Read | None = None
        self._held: dict[int, list] = {}

    @property
    def params(self) -> torch.Tensor:
        """The newest parameters (n,), in the carrier of the weights format; changed in place by the next version."""
        return self._updater.params

    @property
    def version(self) -> int:
        """How many times the parameters have been replaced, skipped steps included."""
        return self._version

    @property
    def loss_scale(self) -> float:
        """The factor on the loss that goes out with the next read; 1.0 where there is none."""
        return self._scale

    def read(self, worker: int) -> Read:
        """Hand out the newest version; the tensor stays as it is when the parameters move on, and is shared."""
        now = self._now()
        if self._correction == "delay_compensation":
            held = self._held.setdefault(now.version, [now.params, 0])
            held[1] += 1
        return now

    def apply(self, pushes: Sequence[Push], staleness: Sequence[int]) -> Applied:
        """Combine pushes, in the order given, into one new version.

        The running sum is kept in the reduce format and divided once. One push alone is taken as it is. Under a loss
        scale, or as `on_nonfinite` says, a gradient that is not finite makes a version with unchanged parameters.
        Raises ValueError for none.
        """
        if not pushes:
            raise ValueError("There is no push to apply: give at least one.")
        alone = len(pushes) == 1
        summands, weights, rates = [], [], []
        for push, late in zip(pushes, staleness, strict=True):
            weight = 1.0 if alone else self.weight(push.worker)
            rate = 1.0 / max(1, late) if self._correction == "inverse" else 1.0
            part = self._compensated(push) if self._correction == "delay_compensation" else push.grad
            # Several stale gradients: each counts by its own rate, the learning rate by their mean (Zhang et al. 2016).
            summands.append(self._times(part, weight if alone else weight * rate))
            weights.append(weight)
            rates.append(rate)
        total = self._sum(summands)
        found_inf = self._guarded and (any(p.nonfinite for p in pushes) or not bool(torch.isfinite(total).all()))
        everybody = len(pushes) == len({push.worker for push in pushes}) == self._workers
        count = float(len(pushes)) if self._weights is None or everybody or alone else math.fsum(weights)
        effective = math.fsum(w * r for w, r in zip(weights, rates, strict=True))
        lr_factor = 1.0
        if self._correction == "inverse" and (alone or self._combine != "sum"):
            lr_factor = effective / math.fsum(weights)
            count = 1.0 if alone else effective
        return self._finish(total, found_inf, count, lr_factor)

    def apply_sum(self, total: torch.Tensor, found_inf: bool, count: int) -> Applied:
        """Make one new version from a sum over `count` workers that was made elsewhere, as by an all-reduce.

        `total`: (n,) sum of what `contribution` returned; `found_inf`: whether any worker's gradient was not finite
        (what is found in the total is added to that).
        """
        if self._rounded_sum:
            total = cast(total, self._reduce)
        found_inf = self._guarded and (found_inf or not bool(torch.isfinite(total).all()))
        return self._finish(total, found_inf, float(count), 1.0)

    def contribution(self, push: Push) -> torch.Tensor:
        """Return what a push adds to the sum: its gradient, times its weight where `combine` weighs."""
        return self._times(push.grad, self.weight(push.worker) if self._workers > 1 else 1.0)

    def weight(self, worker: int) -> float:
        """Return a worker's weight in the sum: 1, or its share of the data times the number of workers."""
        return 1.0 if self._weights is None else self._weights[worker]

    # ---- how ----

    def _now(self) -> Read:
        if self._snapshot is None or self._snapshot.version != self._version:
            self._snapshot = Read(self._updater.params.clone(), self._version, self._scale)
        return self._snapshot

    def _times(self, part: torch.Tensor, weight: float) -> torch.Tensor:
        return part if weight == 1.0 else cast(part * weight, self._reduce)

    def _sum(self, summands: list[torch.Tensor]) -> torch.Tensor:
        """Sum in the experiment's order. Ring: as in a ring all-reduce, the k-th of n pieces starts at the k-th."""
        if self._order == "tree":
            while len(summands) > 1:
                pairs = zip(summands[::2], summands[1::2], strict=False)
                summands = [self._plus(*pair) for pair in pairs] + (summands[-1:] if len(summands) % 2 else [])
            return summands[0]
        if self._order == "ring":
            pieces = zip(*(part.tensor_split(len(summands)) for part in summands), strict=True)
            return torch.cat([reduce(self._plus, piece[k:] + piece[:k]) for k, piece in enumerate(pieces)])
        return reduce(self._plus, summands)

    def _plus(self, total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        total = total + part
        return cast(total, self._reduce) if self._rounded_sum else total

    def _compensated(self, push: Push) -> torch.Tensor:
        """Return g + strength * g * g * (w_now - w_read). Zheng et al. 2017, arXiv:1609.08326, equation 10."""
        held = self._held[push.read_version]
        held[1] -= 1
        if not held[1]:
            del self._held[push.read_version]
        gradient = push.grad.to(self._wide)
        moved = self._updater.params.to(self._wide) - held[0].to(self._wide)
        return cast(gradient + self._strength * gradient * gradient * moved, self._reduce)

    def _finish(self, total: torch.Tensor, found_inf: bool, count: float, lr_factor: float) -> Applied:
        before = self._now()
        # Local steps have left out their own non-finite gradients, so their average is good unless it overflowed.
        skipped = found_inf and (self._rule == "stop" or not self._averages or not bool(torch.isfinite(total).all()))
        clip_scale, lost, change = 1.0, math.nan, None
        watch = self.watch if self.watch is not None and self.watch.due(self._version) else None
        if not skipped:
            combined = total.to(self._wide)
            if count != 1.0 and self._combine != "sum":
                combined = combined / count
            if self._averages:
                clip_scale, lost, change = self._average(combined, before.params, count)
                if found_inf and not bool(change.any()):  # every local step of every worker was left out
                    skipped, lost = True, math.nan
                change = change[watch.index] if watch is not None else None
            else:
                if self._clip is not None:
                    scale = before.loss_scale if self._clip.before_unscale else 1.0
                    combined, clip_scale, _ = apply_clip(combined * scale, self._clip, before.params,
                                                         self._problem.groups)
                    combined = combined / scale
                if watch is not None:
                    change = self._updater.intended(combined, watch.index, lr_factor)
                self._updater.step(combined.to(self._updater.dtype), self._version, lr_factor)
                lost = self._updater.lost_fraction(combined, before.params)
        if watch is not None:
            weight = before.params[watch.index]
            watch.append(self._version, weight, torch.zeros_like(weight) if change is None else change, lost)
        if self._scaler is not None:
            self._scaler.update(found_inf)
            self._scale = self._scaler.scale
        self._version += 1
        return Applied(self._version, skipped, clip_scale, lost)

    def _average(self, combined: torch.Tensor, before: torch.Tensor, count: float
                 ) -> tuple[float, float, torch.Tensor]:
        """Take the workers' averaged parameters; with `combine="sum"` the sum of their changes."""
        wide = before.to(combined.dtype)
        if self._combine == "sum" and count != 1.0:
            combined = combined - wide * (count - 1.0)
        change, scale = combined - wide, 1.0
        if self._clip is not None:
            change, scale, _ = apply_clip(change, self._clip, before, self._problem.groups)
            # Only where it was clipped: the average itself has one rounding less.
            combined = combined if scale == 1.0 else wide + change
        self._updater.assign(combined, self._version)
        wanted = change != 0
        total = int(torch.count_nonzero(wanted))
        lost = int(torch.count_nonzero(wanted & (self._updater.params == before)))
        return scale, lost / total if total else 0.0, change


def _weights(problem: Problem, exp: Experiment) -> tuple[float, ...] | None:
    """Return each worker's share of the data times the number of workers, or None where all are equal."""
    if problem.samples is None or len(set(problem.samples)) == 1:
        return None
    total = sum(problem.samples)
    return tuple(size * exp.workers / total for size in problem.samples)
