"""What a formula may be given: one sentence for each number that cannot be."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def number(name: str, value: Any, least: float = -math.inf, above: float = -math.inf, most: float = math.inf,
           below: float = math.inf) -> float:
    """Return a finite number within the limits that are given; raises ValueError for another."""
    real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (real and least <= value <= most and above < value < below):
        words = {"of at least": least, "above": above, "of at most": most, "below": below}
        limits = [f"{word} {limit:g}" for word, limit in words.items() if math.isfinite(limit)]
        raise ValueError(f"{name} = {value!r} cannot be: it must be a finite number {' and '.join(limits)}.")
    return float(value)


def count(name: str, value: Any, least: int = 0) -> int:
    """Return a whole number of at least `least`; raises ValueError for another."""
    real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not (real and value >= least and value == int(value)):
        raise ValueError(f"{name} = {value!r} cannot be: it must be a whole number of at least {least}.")
    return int(value)
