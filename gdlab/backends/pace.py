"""How long a real step lasts: the drawn time, or the measured time stretched for a slower worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from gdlab.backends.limits import Limits
from gdlab.backends.shared_state import SharedState, Slot
from gdlab.experiment import Experiment
from gdlab.parts import LocalSGD

SLICE_S = 0.02
"""A sleep is cut into slices, so that a stop wakes it."""


class Pace:
    """Give the moment at which each step of one worker is over, and sleep until then."""

    def __init__(self, experiment: Experiment, rank: int, shared: SharedState, slot: Slot):
        self._shared, self._slot, self._rank = shared, slot, rank
        self._draw = experiment.times.draw if experiment.compute_time is not None else None
        self._period = experiment.strategy.period if isinstance(experiment.strategy, LocalSGD) else 1
        self._stretch = max(experiment.speeds or (1.0,)) / experiment.speed(rank)
        self._limit_s = Limits.of(experiment).seconds

    def due(self, step: int, start: float) -> float:
        """Return when the step that began at `start` and was computed just now is over; count an overrun.

        Both are seconds of CLOCK_MONOTONIC.
        """
        now = time.monotonic()
        if self._draw is None:
            return now if self._stretch == 1.0 else start + (now - start) * self._stretch
        if self._period == 1:
            due = start + self._draw(self._rank, step)
        else:
            steps = range(step * self._period, (step + 1) * self._period)
            due = start + sum(self._draw(self._rank, local) for local in steps)
        if due < now:
            self._slot.overrun()
        return due

    def pass_time(self, seconds: float, step: int) -> None:
        """Let the time of a message go by, where the experiment gives it one."""
        if seconds:
            self.sleep(time.monotonic() + seconds, step)

    def sleep(self, due: float, step: int, pause: Callable[[float], bool] | None = None) -> bool:
        """Sleep until `due`; return True if something woke it earlier: a stop, the end of time, or `pause`.

        `pause(seconds)` waits for at most that long and tells whether to wake up.
        """
        if due <= time.monotonic():
            return False
        end = due
        if self._shared.t0:
            end = min(due, self._shared.t0 + self._limit_s)
        self._slot.enter("sleeping", step)
        while (left := end - time.monotonic()) > 0:
            if self._shared.stop or self._shared.target_reached:
                return True
            if pause is None:
                time.sleep(min(left, SLICE_S))
            elif pause(min(left, SLICE_S)):
                return True
            self._slot.beat()
        return end < due
