"""How long a step takes: laws with a mean, a distribution function and draws keyed by (seed, worker, step)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from gdlab.part import Part, knob

DELAY, BATCH, NOISE, INIT, ROUNDING = range(5)
"""Streams: what a draw is for, so that a delay never shares its number with a batch or a noise."""

BLOCK = 64
"""Draws made at once: a generator costs about 10 us, a draw from a block 0.01 us."""


def generator(seed: int, worker: int, step: int, stream: int) -> np.random.Generator:
    """Return the counter-based generator that belongs to one (seed, worker, step, stream).

    Philox4x64 (Salmon et al. 2011): the key is (seed, stream), the counter's upper words are (step, worker), so that
    no two of them overlap and no order of calls can change a draw.
    """
    counter = np.array([0, step, worker, 0], dtype=np.uint64)
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


@lru_cache(maxsize=4096)
def uniforms(seed: int, worker: int, stream: int, block: int, size: int = BLOCK) -> np.ndarray:
    """Return `size` uniform draws inside (0, 1), those of steps block * size to (block + 1) * size - 1."""
    values = generator(seed, worker, block, stream).random(size)
    values += 2.0**-54  # random() can return 0, where some laws are infinite
    values.flags.writeable = False
    return values


def uniform(seed: int, worker: int, step: int, stream: int = DELAY) -> float:
    """Return the uniform draw in (0, 1) of one (seed, worker, step, stream)."""
    return float(uniforms(seed, worker, stream, step // BLOCK)[step % BLOCK])


@lru_cache(maxsize=4096)
def _delays(law: Law, seed: int, worker: int, block: int) -> np.ndarray:
    values = np.broadcast_to(law.ppf(uniforms(seed, worker, DELAY, block)), BLOCK)
    return np.ascontiguousarray(values, dtype=np.float64)


class Law(Part):
    """Describe a random duration in seconds."""

    def ppf(self, u: Any) -> Any:
        """Return the duration in seconds below which a share `u` of the draws lies."""
        raise NotImplementedError

    def cdf(self, x: Any) -> Any:
        """Return the share of draws that are at most `x` seconds; same shape as `x`."""
        raise NotImplementedError

    def draw(self, seed: int, worker: int, step: int) -> float:
        """Return the duration in seconds of one step of one worker: ppf(uniform(seed, worker, step))."""
        return float(_delays(self, seed, worker, step // BLOCK)[step % BLOCK])

    def block(self, seed: int, worker: int, block: int) -> np.ndarray:
        """Return the BLOCK durations in seconds of steps block * BLOCK and on."""
        return _delays(self, seed, worker, block)


def _seconds(default: float, label: str, help: str, **bounds: Any) -> Any:
    bounds = {"gt": 0, "le": 3600} | bounds
    return knob(default, label=label, help=help, unit="s", group="stragglers", **bounds)


def _above(x: Any, low: float) -> np.ndarray:
    return np.maximum(np.asarray(x, dtype=float) - low, 0.0)


class Constant(Law):
    """Take the same time every step."""

    value: float = _seconds(0.05, "time of a step", "Every step takes this long", ge=0, gt=None)
    kind: Literal["Constant"] = "Constant"

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return self.value

    def ppf(self, u: Any) -> Any:
        return np.full_like(np.asarray(u, dtype=float), self.value)

    def cdf(self, x: Any) -> Any:
        return (np.asarray(x, dtype=float) >= self.value).astype(float)[()]


class Exponential(Law):
    """Take a memoryless time: most steps are short, a few are long."""

    mean: float = _seconds(0.05, "mean time", "Mean of the exponential law")
    kind: Literal["Exponential"] = "Exponential"

    def ppf(self, u: Any) -> Any:
        return -self.mean * np.log1p(-np.asarray(u))

    def cdf(self, x: Any) -> Any:
        return -np.expm1(-_above(x, 0.0) / self.mean)


class ShiftedExponential(Law):
    """Take at least `shift`, and an exponential time of mean `mean` more; `.mean` is the mean of the sum."""

    shift: float = _seconds(0.04, "least time", "No step is faster than this", ge=0, gt=None)
    excess: float = Field(0.01, alias="mean", gt=0, le=3600, description="Mean of the exponential part above it",
                          json_schema_extra={"label": "mean excess", "unit": "s", "group": "stragglers"})
    kind: Literal["ShiftedExponential"] = "ShiftedExponential"

    @property
    def mean(self) -> float:
        """Mean in seconds, shift included."""
        return self.shift + self.excess

    def ppf(self, u: Any) -> Any:
        return self.shift - self.excess * np.log1p(-np.asarray(u))

    def cdf(self, x: Any) -> Any:
        return -np.expm1(-_above(x, self.shift) / self.excess)


class Gamma(Law):
    """Take a gamma-distributed time of given mean and coefficient of variation (Ali et al. 2000)."""

    mean: float = _seconds(0.05, "mean time", "Mean of the gamma law")
    cv: float = knob(0.5, label="variation", help="Standard deviation over mean", group="stragglers", gt=0, le=10)
    kind: Literal["Gamma"] = "Gamma"

    def ppf(self, u: Any) -> Any:
        from scipy.special import gammaincinv

        return self.mean * self.cv**2 * gammaincinv(self.cv**-2, u)

    def cdf(self, x: Any) -> Any:
        from scipy.special import gammainc

        return gammainc(self.cv**-2, _above(x, 0.0) / (self.mean * self.cv**2))


class Uniform(Law):
    """Take any time between `low` and `high`, all equally likely."""

    low: float = _seconds(0.025, "shortest", "Shortest step", ge=0, gt=None)
    high: float = _seconds(0.075, "longest", "Longest step")
    kind: Literal["Uniform"] = "Uniform"

    @model_validator(mode="after")
    def _ordered(self) -> Uniform:
        if self.high < self.low:
            raise ValueError(f"high = {self.high:g} s is below low = {self.low:g} s")
        return self

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return (self.low + self.high) / 2

    def ppf(self, u: Any) -> Any:
        return self.low + (self.high - self.low) * np.asarray(u)

    def cdf(self, x: Any) -> Any:
        if self.high == self.low:
            return (np.asarray(x, dtype=float) >= self.low).astype(float)[()]
        return np.clip((np.asarray(x, dtype=float) - self.low) / (self.high - self.low), 0.0, 1.0)


class LogNormal(Law):
    """Take a log-normal time of given mean; `sigma` is the standard deviation of its logarithm."""

    mean: float = _seconds(0.05, "mean time", "Mean of the law")
    sigma: float = knob(0.5, label="spread", help="Standard deviation of the logarithm", group="stragglers", gt=0, le=5)
    kind: Literal["LogNormal"] = "LogNormal"

    def ppf(self, u: Any) -> Any:
        from scipy.special import ndtri

        return np.exp(math.log(self.mean) - self.sigma**2 / 2 + self.sigma * ndtri(u))

    def cdf(self, x: Any) -> Any:
        from scipy.special import ndtr

        with np.errstate(divide="ignore"):
            return ndtr((np.log(_above(x, 0.0)) - math.log(self.mean) + self.sigma**2 / 2) / self.sigma)


class Pareto(Law):
    """Take at least `minimum`, with a heavy tail: P(T > x) = (minimum / x)^alpha; no finite mean for alpha <= 1."""

    minimum: float = _seconds(0.03, "least time", "No step is faster than this")
    alpha: float = knob(2.5, label="tail exponent", help="Smaller means wilder stragglers", group="stragglers",
                        gt=0, le=100)
    kind: Literal["Pareto"] = "Pareto"

    @property
    def mean(self) -> float:
        """Mean in seconds, inf where alpha <= 1."""
        return math.inf if self.alpha <= 1 else self.minimum * self.alpha / (self.alpha - 1)

    def ppf(self, u: Any) -> Any:
        return self.minimum * np.exp(-np.log1p(-np.asarray(u)) / self.alpha)

    def cdf(self, x: Any) -> Any:
        x = np.maximum(np.asarray(x, dtype=float), self.minimum)
        return 1.0 - (self.minimum / x) ** self.alpha


class Spike(Law):
    """Take `base` seconds, and `slow` seconds with a small probability: the occasional hiccup."""

    base: float = _seconds(0.05, "usual time", "What a step usually takes", ge=0, gt=None)
    slow: float = _seconds(0.25, "slow time", "What a slow step takes")
    probability: float = knob(0.05, label="share of slow steps", help="How often a step is slow", group="stragglers",
                              ge=0, le=1)
    kind: Literal["Spike"] = "Spike"

    @property
    def mean(self) -> float:
        """Mean in seconds."""
        return self.base + (self.slow - self.base) * self.probability

    def ppf(self, u: Any) -> Any:
        low, high = sorted((self.base, self.slow))
        share_low = 1 - self.probability if self.base <= self.slow else self.probability
        return np.where(np.asarray(u) <= share_low, low, high)

    def cdf(self, x: Any) -> Any:
        x = np.asarray(x, dtype=float)
        return (x >= self.base) * (1 - self.probability) + (x >= self.slow) * self.probability


AnyLaw = Annotated[
    Constant | Exponential | Gamma | ShiftedExponential | Uniform | LogNormal | Pareto | Spike,
    Field(discriminator="kind"),
]
LAWS = (Constant, Exponential, Gamma, ShiftedExponential, Uniform, LogNormal, Pareto, Spike)
