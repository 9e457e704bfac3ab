"""One worker's step: read, cast, gradient, cast, unscale, clip, push."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from gdlab.clipping import apply_clip
from gdlab.descent.arithmetic import NATIVE, carrier, cast
from gdlab.descent.compression import Sender, after, compressor_of, push_format
from gdlab.descent.problem import Problem
from gdlab.descent.update import Updater, reciprocal
from gdlab.experiment import Experiment
from gdlab.parts import LocalSGD


class Read(NamedTuple):
    """What a worker takes from the shared parameters."""

    params: torch.Tensor
    """(n,) in the carrier of the weights format; not to be changed."""
    version: int
    loss_scale: float


class Push(NamedTuple):
    """What a worker gives back."""

    worker: int
    step: int
    read_version: int
    grad: torch.Tensor
    """(n,) gradient, unscaled, in the carrier of the reduce format; for local SGD the worker's new parameters."""
    loss: float
    grad_norm: float
    clip_scale: float
    nonfinite: int
    loss_scale: float
    message: torch.Tensor | None = None
    """The bytes that are sent instead of `grad`, from which that is read; None where it is not compressed."""


class Worker:
    """Compute one rank's pushes.

    Keeps nothing between steps, but for local SGD, where the momentum is the worker's, and error feedback's residual.
    """

    def __init__(self, exp: Experiment, problem: Problem, rank: int) -> None:
        self._exp, self._problem, self._rank = exp, problem, rank
        precision = exp.precision
        self._reduce = push_format(exp)
        compressor = compressor_of(exp, problem.size)
        self._sender = None if compressor is None else Sender(compressor, exp.compression.error_feedback)
        self._compute = precision.compute if problem.autocast is None else "fp32"
        self._round_compute = self._compute not in NATIVE
        self._same_reduce = carrier(self._compute) if self._reduce == self._compute in NATIVE else None
        self._clip = exp.clip if exp.clips_at == "worker" else None
        self._local = exp.strategy.period if isinstance(exp.strategy, LocalSGD) else 1
        self._updater: Updater | None = None
        self._narrow = not {self._compute, self._reduce} <= {"fp32", "fp64"} and problem.repeatable and not (
            isinstance(exp.strategy, LocalSGD))
        self.watch: Callable[[int], bool] = lambda step: False
        """Which steps `sample` is asked about."""
        self._seen: tuple[torch.Tensor, int, torch.Tensor] | None = None
        self._whole: torch.Tensor | None = None

    def gradient(self, read: Read, step: int) -> Push:
        """Return the push of one step: the gradient at what was read, unscaled, clipped, in the reduce format.

        Or compressed: then `nonfinite` counts what is not finite once the residual was added, too.
        """
        loss, grad, norm, scale, nonfinite = self._step(read.params, step, read.loss_scale)
        message = None
        if self._sender is not None:
            self._whole = grad
            message, grad, bad = self._sender.send(grad)
            nonfinite = max(nonfinite, bad)
        elif grad.dtype != self._same_reduce:
            grad = cast(grad, self._reduce)
        return Push(self._rank, step, read.version, grad, loss, norm, scale, nonfinite, read.loss_scale, message)

    def take_back(self) -> None:
        """Let error feedback forget the newest push, which was dropped."""
        if self._sender is not None:
            self._sender.take_back()

    def local_round(self, read: Read, step: int, visit: Callable[[int, torch.Tensor], None] | None = None) -> Push:
        """Return the push of one round of local SGD: the parameters after `period` steps of the worker's own.

        Step k of round r draws as step r * period + k does elsewhere. Unless it is to be applied, a gradient that is
        not finite makes no step. `loss`, `grad_norm` and `clip_scale` are the last step's, `nonfinite` the round's sum.
        `visit` is shown (local steps taken, parameters) after each step; the tensor changes in place afterwards.
        """
        if self._updater is None:
            self._updater = Updater(self._exp, read.params, key=self._rank)
        updater = self._updater
        updater.restart(read.params)
        guarded = self._exp.nonfinite_rule != "apply"
        bad = 0
        for inner in range(step * self._local, (step + 1) * self._local):
            loss, grad, norm, scale, nonfinite = self._step(updater.params, inner, read.loss_scale)
            bad += nonfinite
            if not (guarded and nonfinite):
                updater.step(grad.to(updater.dtype), inner)
            if visit is not None:
                visit(inner + 1, updater.params)
        message = None
        if self._sender is not None:
            by = self._sender.compressor
            message, change, _ = self._sender.send(updater.params.to(by.dtype) - read.params.to(by.dtype))
            result = after(read.params, change, by)
        else:
            result = cast(updater.params, self._reduce)
            if result is updater.params:
                result = result.clone()
        return Push(self._rank, step, read.version, result, loss, norm, scale, bad, read.loss_scale, message)

    def sample(self, push: Push, thorough: bool = True) -> tuple[torch.Tensor, int] | None:
        """Return the gradient of the newest push as the backward pass gave it; None if its step is not watched.

        And how many of its values were pushed as 0 though fp32 finds them, at the same point, to be something else,
        which costs a gradient: -1 if not `thorough`, where all is fp32 or wider, under local SGD, or where the
        problem's own state would change.
        """
        if self._seen is None:
            return None
        at, step, grad = self._seen
        if not (self._narrow and thorough):
            return grad, -1
        wide = self._problem.gradient(at if at.dtype == torch.float64 else at.float(), self._rank, step)[1]
        pushed = push.grad if self._sender is None else cast(self._whole, self._reduce)
        return grad, int(torch.count_nonzero((pushed == 0) & (wide != 0)))

    def _step(self, params: torch.Tensor, step: int, loss_scale: float
              ) -> tuple[float, torch.Tensor, float, float, int]:
        """Return (loss, gradient, its norm before clipping, the clip's scale, how many elements were not finite)."""
        at = cast(params.to(self._problem.device), self._compute)
        loss, grad = self._problem.gradient(at, self._rank, step, loss_scale)
        if self._round_compute:
            grad = cast(grad, self._compute)
        ends, inner = divmod(step + 1, self._local)
        self._seen = (at, step, grad) if not inner and self.watch(ends - 1) else None
        clip = self._clip
        if clip is None or not clip.before_unscale:
            whole = grad if loss_scale == 1.0 else _unscaled(grad, loss_scale)
            grad, scale, norm = apply_clip(whole, clip, at, self._problem.groups)
        else:
            whole = grad
            grad, scale, norm = apply_clip(whole, clip, at, self._problem.groups)
            grad, norm = _unscaled(grad, loss_scale), norm / loss_scale
        # Counted before the clip, which can make an infinity look like a number. A finite norm has only finite parts.
        nonfinite = 0 if math.isfinite(norm) else int(torch.count_nonzero(~torch.isfinite(whole)))
        return loss, grad, norm, scale, nonfinite


def _unscaled(grad: torch.Tensor, loss_scale: float) -> torch.Tensor:
    # In fp32 at least: half precision would lose again what the scale has saved.
    return (grad if grad.element_size() >= 4 else grad.float()) * reciprocal(loss_scale)
