"""The factor that lifts small gradients out of underflow, found while training goes on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


class LossScaler:
    """Keep the factor that lifts fp16 gradients out of underflow, by the rule of torch.amp.GradScaler.

    A step with an overflow multiplies it by `backoff_factor`; `growth_interval` clean steps in a row multiply it by
    `growth_factor`, unless that would be infinite. It is kept in fp32, as there (Micikevicius et al. 2018, 3.2).

    Raises ValueError for factors that could not grow and shrink.
    """

    def __init__(self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5,
                 growth_interval: int = 2000) -> None:
        if not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale = {init_scale} cannot be: it must be a finite number above 0.")
        if not 1 < growth_factor < math.inf:
            raise ValueError(f"growth_factor = {growth_factor} cannot be: it must be a finite number above 1.")
        if not 0 < backoff_factor < 1:
            raise ValueError(f"backoff_factor = {backoff_factor} cannot be: it must be between 0 and 1.")
        if growth_interval < 1:
            raise ValueError(f"growth_interval = {growth_interval} cannot be: it must be at least 1 step.")
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self._scale, self._clean_steps = float(np.float32(init_scale)), 0

    @property
    def scale(self) -> float:
        """The factor to multiply the loss by in the next step."""
        return self._scale

    def update(self, found_inf: bool) -> None:
        """Take note of one step: whether any gradient was infinite or NaN (such a step is to be skipped)."""
        if found_inf:
            self._scale, self._clean_steps = _fp32(self._scale * self.backoff_factor), 0
            return
        self._clean_steps += 1
        if self._clean_steps == self.growth_interval:
            grown = _fp32(self._scale * self.growth_factor)
            self._scale, self._clean_steps = grown if math.isfinite(grown) else self._scale, 0

    def state_dict(self) -> dict[str, float | int]:
        """Return all there is to it, under the names that torch.amp.GradScaler uses."""
        return {"scale": self._scale, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
                "growth_interval": self.growth_interval, "_growth_tracker": self._clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state that state_dict() returned."""
        self._scale, self._clean_steps = float(state["scale"]), int(state["_growth_tracker"])
        self.growth_factor, self.backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])


def _fp32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))
