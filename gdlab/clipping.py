"""Gradient clipping: by norm, by value, adaptive; and the normalised gradient beside it.

A zero gradient stays exactly zero under every rule, and an empty one has norm 0. Norms are summed in float64, so one
whose square overflows fp32, as of (1e20, 1e20), is right, and is no reason to call the gradient not finite.
NaN and infinity follow the formulas in IEEE arithmetic and are never hidden by the order of a comparison: clipping by
norm turns a gradient with a NaN into NaN everywhere, and one with an infinity into NaN there and 0 elsewhere. Clipping
by value keeps NaN, but takes infinity to the limit: look for overflow before it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from gdlab.parts import Clip

T = TypeVar("T")


def norm(g: Any) -> float:
    """Return the Euclidean norm over all elements of an array or tensor, summed in float64.

    Right also where the sum of squares would overflow or vanish: infinite only if the norm itself is beyond float64,
    or an element infinite; NaN if an element is.
    """
    if _is_tensor(g):
        torch = sys.modules["torch"]
        plain = torch.linalg.vector_norm(g.detach(), dtype=torch.float64).item()
        wide = g.dtype == torch.float64
    else:
        values = _values(g)
        with np.errstate(all="ignore"):
            plain = math.sqrt(np.dot(values, values))
        wide = True
    if not wide or 1e-140 < plain < math.inf:
        return plain
    direction, largest = _direction(_values(g))
    return plain if direction is None else _length(direction) * largest


def clip_by_norm(g: T, c: float) -> T:
    """Return g / max(1, ||g|| / c): the gradient, shortened to norm `c` where it is longer.

    `g`: numpy array, list or torch tensor of any shape, one norm over all of it. Pascanu, Mikolov & Bengio 2013,
    exactly (torch's clip_grad_norm_ adds 1e-6 to the norm, and so shrinks what is just at the threshold). Returns `g`
    itself where nothing is to be done: norm at most c, or c infinite. With a NaN in `g` all becomes NaN; with an
    infinity that element becomes NaN and the others 0. Raises ValueError unless c > 0.
    """
    _check("norm", c)
    values = _real(g)
    return _shorten(values, norm(values), c)


def clip_by_value(g: T, c: float) -> T:
    """Return `g` with every element limited to [-c, c]; NaN stays NaN, infinity becomes c. ValueError unless c > 0."""
    _check("value", c)
    values: Any = _real(g)
    tensor = _is_tensor(values)
    finfo = sys.modules["torch"].finfo if tensor else ml_dtypes.finfo
    if c > float(finfo(values.dtype).max):
        return values
    return values.clamp(-c, c) if tensor else values.clip(-c, c)


def normalise(g: T, length: float = 1.0) -> T:
    """Return g / ||g|| times `length`: its direction alone; zero stays zero. ValueError unless length > 0."""
    _check("normalised", length)
    values = _real(g)
    before = norm(values)
    return values if before == 0 else _resize(values, before / length, length)


def clip_as_torch(g: T, c: float) -> T:
    """Return g * min(1, c / (||g|| + 1e-6)), which is the rule of torch.nn.utils.clip_grad_norm_, for comparison."""
    values: Any = _real(g)
    scale = c / (norm(values) + 1e-6)
    with np.errstate(invalid="ignore"):
        return values * (1.0 if scale > 1 else scale)


def clip_adaptive(g: T, params: T, factor: float, groups: Sequence[slice] | None = None, eps: float = 1e-3) -> T:
    """Shorten each group of a gradient to `factor` times the norm of its own parameters (at least `eps`).

    `g`, `params`: same shape; `groups`: slices of the first axis, one for each parameter of the module (None: all is
    one group). Brock et al. 2021, equation 3, with a tensor in place of a unit. ValueError unless factor > 0.
    """
    _check("adaptive", factor)
    values: Any = _real(g)
    weights: Any = _real(params)
    done = values
    if factor == math.inf:
        return values
    for group in groups or (slice(None),):
        part = values[group]
        shorter = _shorten(part, norm(part), factor * max(norm(weights[group]), eps))
        if shorter is not part:
            if done is values:
                done = values.clone() if _is_tensor(values) else values.copy()
            done[group] = shorter
    return done


def apply_clip(g: T, clip: Clip | None, params: Any = None, groups: Sequence[slice] | None = None
               ) -> tuple[T, float, float]:
    """Clip `g` as an experiment says and return (clipped, scale, norm): the norm before, and the norm's ratio after it.

    `params`, `groups`: as in clip_adaptive, which alone needs them. `scale` is 1.0 where nothing was clipped, 0.0 for
    an infinite norm and NaN for a NaN one. Returns `g` itself where nothing is to be done.
    """
    before = norm(g)
    if clip is None:
        return g, 1.0, before
    if clip.norm is not None:
        clipped = _shorten(g, before, clip.norm)
        return clipped, 1.0 if clipped is g else clip.norm / before, before
    if clip.value is not None:
        clipped = clip_by_value(g, clip.value)
    elif clip.normalised is not None:
        clipped = normalise(g, clip.normalised)
    elif clip.adaptive is not None:
        if params is None:
            raise ValueError("Adaptive clipping compares a gradient with its parameters: give params too.")
        clipped = clip_adaptive(g, params, clip.adaptive, groups)
    else:
        return g, 1.0, before
    if clipped is g or before == 0:
        return clipped, 1.0, before
    return clipped, norm(clipped) / before, before


def _check(name: str, threshold: float) -> None:
    if not threshold > 0:
        raise ValueError(f"The clipping threshold {name} = {threshold} cannot be: it must be above 0.")


def _is_tensor(x: Any) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(x, tensor)


def _real(g: Any) -> Any:
    """Return a tensor or a floating-point array; lists and whole numbers become float64 arrays."""
    if _is_tensor(g):
        return g if g.is_floating_point() else g.double()
    array = np.asarray(g)
    return array.astype(np.float64) if array.dtype.kind in "biu" else array


def _values(g: Any) -> np.ndarray:
    array = g.detach().cpu().double().numpy() if _is_tensor(g) else np.asarray(g)
    return array.astype(np.float64, copy=False).ravel()


def _length(values: np.ndarray) -> float:
    return math.sqrt(np.dot(values, values))


def _direction(values: np.ndarray) -> tuple[np.ndarray | None, float]:
    """Divide by a power of two near the largest element, which is exact; None where that is 0 or not finite."""
    largest = float(np.abs(values).max(initial=0.0))
    if largest == 0 or not math.isfinite(largest):
        return None, largest
    exponent = math.frexp(largest)[1] - 1
    return np.ldexp(values, -exponent), math.ldexp(1.0, exponent)


def _shorten(g: Any, length: float, c: float) -> Any:
    ratio = length / c
    if ratio <= 1 or c == math.inf:
        return g
    return _resize(g, ratio, c)


def _resize(g: Any, ratio: float, c: float) -> Any:
    """Divide a gradient whose norm is `ratio` times c by that ratio."""
    tensor = _is_tensor(g)
    size = g.element_size() if tensor else g.dtype.itemsize
    if size >= 4 and (1e-38 < ratio < 1e38 or math.isnan(ratio)):
        return g / ratio
    # A ratio that the dtype cannot hold, or a norm that float64 cannot: by way of the direction, in float64.
    with np.errstate(all="ignore"):
        values = _values(g)
        direction, largest = _direction(values)
        if direction is None:
            values = values / largest
        else:
            values = direction / _length(direction) * c
        shape = tuple(g.shape)
        if tensor:
            return sys.modules["torch"].from_numpy(values.reshape(shape)).to(g.device, g.dtype)
        return values.reshape(shape).astype(g.dtype)
