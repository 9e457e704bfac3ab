"""Number formats: what they can hold, and rounding to them.

Rounding is done once, from the exact value: a float64 is never taken through float32 on its way to a narrower format,
since that rounds twice (1 + 2^-8 + 2^-40 would become 1.0 in bf16 instead of 1.0078125).
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import ml_dtypes
import numpy as np

from gdlab.loss_scaler import LossScaler

__all__ = [
    "NAMES", "Facts", "Float", "LossScaler", "Rounding", "compensated_add", "facts", "round_to", "ulp",
]

T = TypeVar("T")
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Float:
    """Describe a binary floating-point format by its field widths, arranged as IEEE 754 arranges fp16, fp32 and fp64.

    One sign bit, a bias of 2^(exponent_bits - 1) - 1, subnormals, and the highest exponent kept for infinity and NaN:
    Float(5, 10) is fp16, Float(8, 7) is bf16. Overflow gives infinity.

    Raises ValueError outside of 2 to 11 exponent bits and 1 to 52 mantissa bits, which is what float64 can carry.
    """

    exponent_bits: int
    mantissa_bits: int

    def __post_init__(self) -> None:
        for name, low, high in (("exponent_bits", 2, 11), ("mantissa_bits", 1, 52)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"Float: {name} = {value!r} cannot be: it must be a whole number from {low} to "
                                 f"{high}.")

    def __str__(self) -> str:
        return f"Float({self.exponent_bits}, {self.mantissa_bits})"


@dataclass(frozen=True)
class Facts:
    """Hold what a format can represent; `eps` is the spacing at 1 (numpy's eps), `unit_roundoff` half of it.

    `max_int_contiguous`: every whole number up to it is representable. `saturates`: what overflow does by default.
    """

    name: str
    bits: int
    precision: int
    min_exponent: int
    max: float
    has_infinity: bool = True
    has_nan: bool = True
    saturates: bool = False

    @property
    def eps(self) -> float:
        return math.ldexp(1.0, 1 - self.precision)

    @property
    def unit_roundoff(self) -> float:
        return self.eps / 2

    @property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        return math.ldexp(1.0, self.min_exponent - self.precision + 1)

    @property
    def max_int_contiguous(self) -> float:
        return min(2.0**self.precision, math.floor(self.max))


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Facts:
    bias = 2 ** (exponent_bits - 1) - 1
    largest = math.ldexp(2.0 - math.ldexp(1.0, -mantissa_bits), bias)
    return Facts(name, 1 + exponent_bits + mantissa_bits, mantissa_bits + 1, 1 - bias, largest)


# IEEE 754-2019; tf32: NVIDIA, 19 bits in a 32-bit word; fp8: OCP OFP8 1.0; fp4: OCP Microscaling formats 1.0.
_FACTS = {facts.name: facts for facts in (
    _ieee("fp64", 11, 52),
    _ieee("fp32", 8, 23),
    _ieee("tf32", 8, 10),
    _ieee("bf16", 8, 7),
    _ieee("fp16", 5, 10),
    _ieee("fp8_e5m2", 5, 2),
    Facts("fp8_e4m3", 8, 4, -6, 448.0, has_infinity=False, saturates=True),
    Facts("fp4_e2m1", 4, 2, 0, 6.0, has_infinity=False, has_nan=False, saturates=True),
)}
NAMES = tuple(_FACTS)
"""The formats that are known by name, from the widest to the narrowest."""

_ALIASES = {"fp8_e4m3fn": "fp8_e4m3", "fp4_e2m1fn": "fp4_e2m1"}
_WRITTEN = re.compile(r"Float\(\s*(\d+)\s*,\s*(\d+)\s*\)")


@functools.lru_cache(maxsize=256)
def facts(format: str | Float) -> Facts:
    """Return what `format` can represent: eps, unit_roundoff, min_normal, min_subnormal, max, max_int_contiguous, ...

    `format`: a name in NAMES, a Float, or a Float as text ("Float(5, 10)"). Raises ValueError for an unknown one.
    """
    if isinstance(format, Float):
        return _ieee(str(format), format.exponent_bits, format.mantissa_bits)
    if isinstance(format, str):
        known = _FACTS.get(_ALIASES.get(format, format))
        if known:
            return known
        if written := _WRITTEN.fullmatch(format):
            return facts(Float(int(written[1]), int(written[2])))
    raise ValueError(f"There is no number format {format!r}: use one of {', '.join(NAMES)}, or Float(exponent_bits, "
                     "mantissa_bits).")


def round_to(x: T, format: str | Float, rounding: Rounding = "nearest", seed: int | np.random.Generator = 0,
             saturate: bool | None = None) -> T:
    """Round every number in `x` to a value that `format` can represent.

    Returns the same kind of thing (float, numpy array or scalar, torch tensor) with the same shape and dtype, which
    should be able to hold the format's values; whole numbers become float64. May return `x` itself where its dtype is
    the format. Tensors come back detached. NaN stays NaN, also in fp4 (which has none), zeros keep their sign.

    `rounding`: "nearest" takes the nearest value, ties to the even one. "stochastic" takes one of the two neighbours
    with a probability that makes the mean exact; draws come from Philox keyed by `seed` (or from a Generator), one for
    each element in order, so the same seed rounds the same way everywhere.

    `saturate`: True takes everything beyond the largest value, infinity included, to it; False to infinity, or to NaN
    where the format has no infinity. As IEEE 754 says, a value counts as beyond once it has been rounded as if the
    exponent had no limit: 464 is still 448 in fp8_e4m3. None does as torch 2.13 casts: fp8_e4m3 and fp4_e2m1 saturate,
    all others overflow to infinity. So an overflow in fp8_e4m3 is silent, and a loss scaler that looks for infinity
    never sees it; ml_dtypes and earlier torch give NaN, which is `saturate=False`.

    Raises ValueError for an unknown format or rounding, and for fp4_e2m1 with saturate=False (it has neither infinity
    nor NaN); TypeError for complex numbers and for what is wider than float64.
    """
    known = facts(format)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"There is no rounding {rounding!r}: use 'nearest' or 'stochastic'.")
    if saturate is None:
        saturate = known.saturates
    elif not saturate and not known.has_nan:
        raise ValueError(f"{known.name} has neither infinity nor NaN, so it can only saturate: leave saturate out.")
    if rounding == "nearest":
        cast = _tensor_cast if _is_tensor(x) else _array_cast
        done = cast(x, known, saturate)
        if done is not None:
            return done
    return _elementwise(x, lambda values: _round(values, known, saturate, rounding, seed))


def ulp(x: T, format: str | Float) -> T:
    """Return the spacing of `format`'s values in the binade of each number in `x`, of the same kind and shape.

    Above a power of two, that is; below it the spacing is half as large. Subnormals and zero are min_subnormal apart.
    Infinity beyond the largest value, NaN for NaN.
    """
    known = facts(format)

    def spacing(values: np.ndarray) -> np.ndarray:
        gap = np.ldexp(1.0, _exponent(values, known) - known.precision + 1)
        gap = np.where(values == 0, known.min_subnormal, gap)
        return np.where(np.isnan(values), np.nan, np.where(np.abs(values) > known.max, np.inf, gap))

    return _elementwise(x, spacing)


def compensated_add(total: T, lost: T, term: T, format: str | Float) -> tuple[T, T]:
    """Add `term` to a running sum kept in `format`, and return (total, lost): the sum and what rounding took from it.

    Start with lost = 0. Kahan (1965), every operation rounded to `format`; the carrier needs more than twice the
    format's bits, or to be that format, for its own rounding to do no harm.
    """
    wanted = round_to(term - lost, format)  # type: ignore[operator]
    total_next = round_to(total + wanted, format)
    return total_next, round_to(round_to(total_next - total, format) - wanted, format)


def _is_tensor(x: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def _elementwise(x: Any, function: Callable[[np.ndarray], Any]) -> Any:
    """Hand `x` to a function of a float64 array and return its result as the kind of thing that `x` is."""
    if _is_tensor(x):
        if x.is_complex():
            raise TypeError("Complex tensors cannot be rounded: round their real and imaginary parts.")
        with np.errstate(all="ignore"):
            done = np.asarray(function(x.detach().cpu().double().numpy()))
        tensor = sys.modules["torch"].from_numpy(done)
        return tensor.to(x.device, x.dtype) if x.is_floating_point() else tensor.to(x.device)
    array = np.asarray(x)
    whole, narrow = array.dtype.kind in "biu", array.dtype.kind == "f" and array.dtype.itemsize <= 8
    if not (whole or narrow or array.dtype.type.__module__ == "ml_dtypes"):
        raise TypeError(f"Numbers of type {array.dtype} cannot be rounded: give real ones no wider than float64.")
    with np.errstate(all="ignore"):
        done = np.asarray(function(array.astype(np.float64))).astype(np.float64 if whole else array.dtype)
    if isinstance(x, np.ndarray):
        return done
    return float(done) if isinstance(x, int | float) and not isinstance(x, np.generic) else done[()]


def _exponent(values: np.ndarray, known: Facts) -> np.ndarray:
    return np.maximum(np.frexp(values)[1] - 1, known.min_exponent)


def _round(values: np.ndarray, known: Facts, saturate: bool, rounding: str, seed: int | np.random.Generator) -> Any:
    # Scaled by a power of two (exact) so that the format's values are the whole numbers: then any rounding to whole
    # numbers is a rounding to the format.
    shift = _exponent(values, known) - known.precision + 1
    scaled = np.ldexp(values, -shift)
    if rounding == "nearest":
        whole = np.rint(scaled)
    else:
        generator = seed if isinstance(seed, np.random.Generator) else np.random.Generator(np.random.Philox(key=seed))
        below = np.floor(scaled)
        whole = below + (generator.random(values.shape) < scaled - below)
    rounded = np.copysign(np.ldexp(whole, shift), values)
    beyond = known.max if saturate else np.inf if known.has_infinity else np.nan
    return np.where(np.abs(rounded) > known.max, np.copysign(beyond, values), rounded)


_ARRAY_DTYPES = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16,
                 "fp8_e5m2": ml_dtypes.float8_e5m2, "fp8_e4m3": ml_dtypes.float8_e4m3fn}
_DIRECT = (np.float64, np.float32, np.float16)  # what numpy casts float64 to in one rounding
_TENSOR_DTYPES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16",
                  "fp8_e5m2": "float8_e5m2", "fp8_e4m3": "float8_e4m3fn"}


def _array_cast(x: Any, known: Facts, saturate: bool) -> Any:
    """Round by numpy's or ml_dtypes' own cast, or return None where it has none or rounds twice."""
    target = _ARRAY_DTYPES.get(known.name)
    if type(x) is float and target in _DIRECT:
        with np.errstate(all="ignore"):
            return float(target(min(max(x, -known.max), known.max) if saturate and x == x else x))
    if target is None or not isinstance(x, np.ndarray) or x.dtype not in (np.float32, np.float64):
        return None
    if x.dtype == np.float64 and target not in _DIRECT:
        return None  # ml_dtypes takes float64 through float32
    with np.errstate(all="ignore"):
        limited = np.asarray(np.clip(x, -known.max, known.max)) if saturate else x
        return limited.astype(target, copy=False).astype(x.dtype, copy=False)


def _tensor_cast(x: Any, known: Facts, saturate: bool) -> Any:
    """Round by torch's own cast, or return None where it has none or rounds twice."""
    torch = sys.modules["torch"]
    target = getattr(torch, _TENSOR_DTYPES.get(known.name, ""), None)
    if target is None or x.dtype not in (torch.float32, torch.float64):
        return x.detach() if x.dtype == target and not saturate else None
    if x.dtype == torch.float64 and target not in (torch.float64, torch.float32):
        return None  # torch takes float64 through float32
    limited = x.detach()
    if saturate and known.bits <= 8 * x.element_size():
        limited = limited.clamp(-known.max, known.max)
    rounded = limited.to(target).to(x.dtype)
    if not saturate and not known.has_infinity:
        # The cast saturates from torch 2.12 on and gives NaN before. Half a spacing above the maximum is a tie, which
        # goes to the even maximum.
        rounded = rounded.masked_fill(limited.abs() > known.max + ulp(known.max, known.name) / 2, math.nan)
    return rounded
