"""Measure what rounding to a format costs, beside torch's own cast there and back.

For each format, size and kind of rounding: nanoseconds a value of `round_to` on an fp32 tensor, and how many times as
long that is as `x.to(dtype).to(x.dtype)`, both in this process, in turns, one torch thread; the least of some rounds.
A dash: torch has no such cast. One row in fp64 shows what rounding once costs where torch's cast would round twice.

    python benchmarks/round_to.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import gdlab as gd

CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8_e5m2": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}
FORMATS = ["fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1", gd.Float(4, 3)]
SIZES = (2, 2_410, 1_000_000)
"""Two parameters, the digits' mlp, and a model that fills a cache."""


def least_s(actions: list[Callable[[], object]], rounds: int, repeats: int) -> list[float]:
    """Return the least seconds of one call of each action; they take turns, so that all meet the same machine."""
    best = [float("inf")] * len(actions)
    for _ in range(rounds):
        for at, action in enumerate(actions):
            began = time.perf_counter()
            for _ in range(repeats):
                action()
            best[at] = min(best[at], (time.perf_counter() - began) / repeats)
    return best


def row(name: str, x: torch.Tensor, format: str | gd.Float, rounding: str, rounds: int) -> str:
    """Return one printed row."""
    cast = CASTS.get(str(format))
    ours = [lambda: gd.round_to(x, format, rounding)]
    theirs = [lambda: x.to(cast).to(x.dtype)] if cast else []
    seconds = least_s([*ours, *theirs], rounds, max(1, 20_000 // x.numel()))
    ratio = f"{seconds[0] / seconds[1]:8.1f}" if cast else f"{'-':>8}"
    return f"{name:14}{rounding:12}{x.numel():>10,}{seconds[0] * 1e6:12.1f}{seconds[0] / x.numel() * 1e9:12.2f}{ratio}"


def main() -> None:
    """Print one row a format, rounding and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how many times each is measured")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"{'':14}{'':12}{'values':>10}{'us a call':>12}{'ns a value':>12}{'x cast':>8}")
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        x = torch.randn(size, generator=generator)
        for format in FORMATS:
            for rounding in ("nearest", "stochastic"):
                print(row(str(format), x, format, rounding, rounds), flush=True)
        print(row("bf16 of fp64", x.double(), "bf16", "nearest", rounds), flush=True)


if __name__ == "__main__":
    main()
