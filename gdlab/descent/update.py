"""How a gradient changes parameters that are kept in a number format: torch.optim, and the rounding after it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gdlab import laws, parts
from gdlab.descent.arithmetic import NATIVE, cast, wider
from gdlab.experiment import Experiment
from gdlab.formats import compensated_add, round_to
from gdlab.part import ExperimentError


class Updater:
    """Keep flat parameters in the experiment's weights format and step them by its optimizer.

    Four ways, each with one optimizer on one flat tensor:
    plain: torch.optim on the parameters themselves, in their own dtype;
    rounded: the same in a wider carrier, rounded to the format after each step;
    stochastic: the step in a wider scratch tensor, then rounded up or down at random, right on average (Croci et al.
    2022, doi:10.1098/rsos.211631);
    compensated: the update alone in a wider scratch, added by Kahan's summation, which carries over what was lost.
    """

    def __init__(self, exp: Experiment, start: torch.Tensor, key: int) -> None:
        precision = exp.precision
        self._format, self._seed, self._key = precision.weights, exp.seed, key
        self._stochastic, self._compensated = precision.rounding == "stochastic", precision.compensated
        self.params = cast(start, self._format).clone()
        own = not (self._stochastic or self._compensated)
        self._work = self.params if own else torch.zeros_like(self.params, dtype=wider(self._format))
        self._lost = torch.zeros_like(self._work) if self._compensated else None
        self._rounded = own and self._format not in NATIVE
        self._spec, self._lr, self._decay = exp.optimizer, exp.optimizer.lr, exp.optimizer.weight_decay
        # The optimizer of a compensated update sees only the update, so the pull of the weights is added by hand.
        self._optimizer = _optimizer(exp.optimizer, self._work, 0.0 if self._compensated else self._decay)
        # Past torch's wrappers for the profiler and the grad mode: they cost more than the step, and nothing here is
        # differentiated.
        self._take_step = partial(inspect.unwrap(type(self._optimizer).step), self._optimizer)
        self._state = self._optimizer.state
        self._group = self._optimizer.param_groups[0]
        self._shadow: torch.optim.Optimizer | None = None
        most = torch.finfo(self._work.dtype).max
        if max(self._lr, self._decay) > most:
            raise ExperimentError(f"A learning rate or weight decay of {max(self._lr, self._decay):g} does not fit "
                                  f"into {self._format}, whose largest number is {most:g}: use a smaller one, or "
                                  "wider weights.")
        self.dtype = self._work.dtype
        """What a gradient is cast to before the step."""

    def step(self, gradient: torch.Tensor, version: int, lr_factor: float = 1.0) -> None:
        """Step along a gradient in `self.dtype`; `version` keys the random rounding, `lr_factor` is for this step."""
        if lr_factor != 1.0:
            self._group["lr"] = self._lr * lr_factor
        if self._compensated:
            self._step_compensated(gradient, self._lr * lr_factor)
        else:
            if self._stochastic:
                self._work.copy_(self.params)
            self._work.grad = gradient
            self._take_step()
            if self._stochastic:
                self._round(self._work, version)
            elif self._rounded:
                self.params.copy_(cast(self.params, self._format))
        if lr_factor != 1.0:
            self._group["lr"] = self._lr

    def assign(self, value: torch.Tensor, version: int) -> None:
        """Replace the parameters, rounded to their format; the optimizer's memory stays, what was carried over goes."""
        if self._stochastic:
            self._round(value.to(self.dtype), version)
        else:
            self.params.copy_(cast(value, self._format))
        self._forget()

    def restart(self, params: torch.Tensor) -> None:
        """Go on from parameters that are already in the weights format; the optimizer's memory stays."""
        self.params.copy_(params)
        self._forget()

    def _forget(self) -> None:
        if self._lost is not None:
            self._lost.zero_()

    def _round(self, value: torch.Tensor, version: int) -> None:
        draws = laws.generator(self._seed, self._key, version, laws.ROUNDING)
        self.params.copy_(round_to(value, self._format, "stochastic", seed=draws))

    def _step_compensated(self, gradient: torch.Tensor, lr: float) -> None:
        weights = self.params.to(self.dtype)
        self._increment(self._work.zero_(), gradient, weights, lr, self._take_step)
        total, self._lost = compensated_add(weights, self._lost, self._work, self._format)
        self.params.copy_(total)

    def _increment(self, work: torch.Tensor, gradient: torch.Tensor, weights: torch.Tensor, lr: float,
                   take_step: Callable[[], object]) -> None:
        """Step from 0 in `work`, so that it holds what is to be added to the weights."""
        decoupled = isinstance(self._spec, parts.AdamW)
        work.grad = gradient if decoupled or not self._decay else gradient.add(weights, alpha=self._decay)
        take_step()
        if self._decay and decoupled:
            work.sub_(weights, alpha=lr * self._decay)

    def intended(self, gradient: torch.Tensor, at: np.ndarray, lr_factor: float = 1.0) -> torch.Tensor:
        """Return what a step along a gradient (n,) wants to add to the coordinates `at`, in float64; changes nothing.

        Weights and the optimizer's memory are taken as they are stored; from there on nothing is rounded to a format.
        """
        if self._shadow is None:
            self._shadow = _optimizer(self._spec, torch.zeros(len(at), dtype=torch.float64, device=gradient.device),
                                      0.0)
        group = self._shadow.param_groups[0]
        (work,), group["lr"] = group["params"], self._lr * lr_factor
        self._shadow.state[work] = {name: value[at].double() if value.ndim else value.clone()
                                    for name, value in self._state.get(self._work, {}).items() if value is not None}
        step = inspect.unwrap(type(self._shadow).step)
        self._increment(work.zero_(), gradient[at].double(), self.params[at].double(), group["lr"],
                        partial(step, self._shadow))
        return work

    def lost_fraction(self, gradient: torch.Tensor, before: torch.Tensor) -> float:
        """Return the share of the last step's updates that rounding has lost.

        Of the coordinates with an update to make (momentum if there is one, else `gradient`): those whose weight is
        still as in `before`.
        """
        moved = before != self.params
        if bool(moved.all()):
            return 0.0
        state = self._state.get(self._work, {})
        wanted = state.get("momentum_buffer", state.get("exp_avg"))
        wanted = (gradient if wanted is None else wanted) != 0
        total = int(torch.count_nonzero(wanted))
        return int(torch.count_nonzero(wanted & ~moved)) / total if total else 0.0


def _optimizer(spec: parts.SGD | parts.AdamW, params: torch.Tensor, decay: float) -> torch.optim.Optimizer:
    # Neither fused nor grouped: those change the last bit.
    if isinstance(spec, parts.SGD):
        return torch.optim.SGD([params], lr=spec.lr, momentum=spec.momentum, weight_decay=decay, foreach=False)
    return torch.optim.AdamW([params], lr=spec.lr, betas=(spec.beta1, spec.beta2), weight_decay=decay, foreach=False)


def reciprocal(scale: float) -> float:
    """Return 1 / scale, in which gradients are unscaled (as torch.amp.GradScaler does); exact for powers of two."""
    return 1.0 / scale if scale else math.inf
