"""What carries a number format: its own dtype where torch computes in it, else a wider one that is rounded."""

from __future__ import annotations

import torch

from gdlab.formats import facts, round_to

NATIVE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF = (torch.float16, torch.bfloat16)


def carrier(format: str) -> torch.dtype:
    """Return the dtype that holds values of `format`: its own, else fp32, or fp64 where fp32 is too narrow."""
    if format in NATIVE:
        return NATIVE[format]
    known = facts(format)
    narrow = known.precision <= 24 and known.max <= facts("fp32").max and known.min_exponent >= -126
    return torch.float32 if narrow else torch.float64


def wider(format: str) -> torch.dtype:
    """Return a dtype with more than twice the digits of `format` (fp64 for fp64, which has nothing above it)."""
    return torch.float32 if facts(format).precision <= 11 else torch.float64


def cast(x: torch.Tensor, format: str) -> torch.Tensor:
    """Round a tensor to `format` and return it in the format's carrier; may return `x` itself."""
    if x.dtype == torch.float64:  # torch would take it through fp32 to a narrower format, which rounds twice
        return round_to(x, format).to(carrier(format))
    return x.to(NATIVE[format]) if format in NATIVE else round_to(x.to(carrier(format)), format)
