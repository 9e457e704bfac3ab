"""Where a run ends though its experiment does not say so: nothing goes on for ever."""

from __future__ import annotations

import math
from typing import NamedTuple

from gdlab.experiment import MAX_SECONDS, MAX_UPDATES, Experiment


class Limits(NamedTuple):
    """The most updates and the most seconds, on the run's own clock."""

    updates: int
    seconds: float

    @classmethod
    def of(cls, experiment: Experiment) -> Limits:
        """Return an experiment's limits: its own, or the largest that one may have.

        Where the updates are counted the time is not limited: a count comes to its end by itself.
        """
        if experiment.updates is not None:
            return cls(experiment.updates, math.inf if experiment.seconds is None else experiment.seconds)
        return cls(MAX_UPDATES, MAX_SECONDS if experiment.seconds is None else experiment.seconds)
