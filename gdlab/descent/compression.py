"""What a push becomes on its way: the bytes that are sent, what they are read as, and what error feedback still owes.

What each method sends is told by `gdlab.Compression`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gdlab.communication import Compression, summed_in_bf16
from gdlab.descent.arithmetic import carrier, cast
from gdlab.experiment import Experiment
from gdlab.formats import facts

INDEX_BYTES = 4


class Compressor:
    """Turn a flat tensor of `size` numbers into bytes and back; pure, and always of the same length, `nbytes`.

    `format`: the pushes' number format; `dtype`: of the numbers that are compressed, and of a scale. A number that is
    not finite is never hidden: what is read then is not finite either, unless it is infinite and the format saturates.
    """

    def __init__(self, spec: Compression, size: int, format: str = "fp32", dtype: torch.dtype = torch.float32) -> None:
        self.method, self.format, self.dtype, self._size, self._scaled = spec.method, format, dtype, size, spec.scaled
        self.kept = max(1, round(spec.fraction * size)) if spec.method == "topk" else size
        """How many values are sent."""
        self._bits = torch.arange(8, dtype=torch.uint8)
        self.nbytes = {"topk": self.kept * (carrier(format).itemsize + INDEX_BYTES), "bf16": 2 * size,
                       "sign": (size + 7) // 8 + dtype.itemsize, "fp8": size + dtype.itemsize}[spec.method]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bytes (nbytes,), as uint8, that are sent for `x` (size,)."""
        if self.method == "bf16":
            return _bytes(cast(x, "bf16"))
        if self.method == "topk":
            at = largest(x, self.kept)
            return _bytes(cast(x[at], self.format), at.int())
        if self.method == "sign":
            # x - x is NaN where x is not finite, else 0; a mean in fp64 cannot overflow.
            scale = x.abs().mean(dtype=torch.float64) if self._scaled else (x - x).sum() + 1.0
            rows = torch.nn.functional.pad((x >= 0).byte(), (0, -self._size % 8)).view(-1, 8)
            return _bytes((rows << self._bits.to(x.device)).sum(1, dtype=torch.uint8), scale.to(self.dtype).view(1))
        step = fp8_scale(x)
        return _bytes(cast(x / step, "fp8_e4m3").to(torch.float8_e4m3fn), x.new_tensor([step]))

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """Return what is read from such bytes: (size,) in the carrier of the pushes' format."""
        if self.method == "bf16":
            return cast(_numbers(message, torch.bfloat16).to(self.dtype), self.format)
        if self.method == "topk":
            ends = self.kept * INDEX_BYTES
            values, at = _numbers(message[:-ends], carrier(self.format)), _numbers(message[-ends:], torch.int32)
            return values.new_zeros(self._size).index_copy_(0, at.long(), values)
        body, scale = message[: -self.dtype.itemsize], _numbers(message[-self.dtype.itemsize :], self.dtype)
        if self.method == "sign":
            bits = (body[:, None] >> self._bits.to(body.device) & 1).view(-1)[: self._size]
            return cast(torch.where(bits.bool(), scale, -scale), self.format)
        return cast(_numbers(body, torch.float8_e4m3fn).to(self.dtype) * scale, self.format)


class Sent(NamedTuple):
    """One compressed push."""

    message: torch.Tensor
    """The bytes, as uint8."""
    value: torch.Tensor
    """What is read from them."""
    nonfinite: int
    """How many numbers were not finite before they were compressed."""


class Sender:
    """Compress one worker's pushes; with error feedback, keep what each left unsent and add it to the next.

    The residual is always finite: a push that is not, or overflows the format, leaves it as it was.
    """

    def __init__(self, compressor: Compressor, feedback: bool) -> None:
        self.compressor, self._feedback = compressor, feedback
        self.residual = self._before = torch.zeros((), dtype=compressor.dtype)
        """What is still owed: (size,), a single 0 before the first push."""

    def send(self, x: torch.Tensor) -> Sent:
        """Compress `x` (size,) plus the residual."""
        whole = x.to(self.compressor.dtype) + self.residual.to(x.device)
        message = self.compressor.encode(whole)
        value = self.compressor.decode(message)
        self._before = self.residual
        owed = whole - value.to(whole.dtype)
        if self._feedback and bool(torch.isfinite(owed).all()):
            self.residual = owed
        return Sent(message, value, int(torch.count_nonzero(~torch.isfinite(whole))))

    def take_back(self) -> None:
        """Put the residual back to what it was before the last push, which nobody took."""
        self.residual = self._before


def largest(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices (count,), ascending, of the largest |x|; of equal ones the lowest. NaN counts as infinity."""
    size = x.abs().nan_to_num(math.inf, math.inf)
    least = torch.topk(size, count).values[-1]
    above, equal = torch.nonzero(size > least).view(-1), torch.nonzero(size == least).view(-1)
    return torch.cat([above, equal[: count - len(above)]]).sort().values


def fp8_scale(x: torch.Tensor) -> float:
    """Return the least power of two at which no value of x / scale is above e4m3's largest, 448: exact to divide by.

    1 for zeros; NaN where a value is not finite, so that all that is read is NaN.
    """
    top = x.abs().max().item() / facts("fp8_e4m3").max
    if not math.isfinite(top):
        return math.nan
    part, exponent = math.frexp(top)
    return max(math.ldexp(1.0, exponent - (part == 0.5)), torch.finfo(x.dtype).tiny) if top else 1.0


def push_format(exp: Experiment) -> str:
    """Return the number format of what is read from a push, and of the running sum."""
    return "bf16" if summed_in_bf16(exp.compression, exp.strategy) else exp.precision.reduce


def compressor_of(exp: Experiment, size: int) -> Compressor | None:
    """Return the compressor of an experiment with so many parameters; None where pushes are sent whole."""
    wide = torch.float64 if carrier(exp.precision.reduce) == torch.float64 else torch.float32
    return None if exp.compression is None else Compressor(exp.compression, size, push_format(exp), wide)


def after(params: torch.Tensor, change: torch.Tensor, by: Compressor) -> torch.Tensor:
    """Return parameters after a change that was sent, in the carrier of the pushes' format."""
    return cast(params.to(by.dtype) + change.to(by.dtype), by.format)


def _bytes(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.contiguous().view(torch.uint8) for tensor in tensors])


def _numbers(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return message.clone().view(dtype)  # A copy: a part of a message need not lie where its numbers may.
