"""Measure what a push costs in virtual time: event, strategy, gradient, update, trace.

Every row is one run in this process with one torch thread. Prints pushes, CPU microseconds a push, and wall seconds.

    python benchmarks/virtual_push.py [--scale 1.0]
"""

from __future__ import annotations

import argparse
import tempfile
import time

import torch

import gdlab as gd
from gdlab.backends.virtual import simulate

LAW = gd.Exponential(0.05)
QUADRATIC = gd.Quadratic()
RUNS = {
    "Sync, 4 workers, quadratic": (QUADRATIC, 4, gd.Sync(), 1000),
    "Sync, 1,000 workers, quadratic": (QUADRATIC, 1000, gd.Sync(), 200),
    "Sync, 100,000 workers, quadratic": (QUADRATIC, 100_000, gd.Sync(), 2),
    "Async, 4 workers, quadratic": (QUADRATIC, 4, gd.Async(), 10_000),
    "Async, 1,000 workers, quadratic": (QUADRATIC, 1000, gd.Async(), 20_000),
    "bound 3, 1,000 workers, quadratic": (QUADRATIC, 1000, gd.Async(staleness_bound=3), 20_000),
    "LocalSGD(8), 100 workers, quadratic": (QUADRATIC, 100, gd.LocalSGD(8), 20),
    "Sync, 4 workers, Digits(mlp)": (gd.Digits("mlp"), 4, gd.Sync(), 200),
    "Async, 4 workers, Digits(mlp)": (gd.Digits("mlp"), 4, gd.Async(), 800),
}


def measure(exp: gd.Experiment) -> tuple[int, float, float]:
    """Return the pushes of one run, its CPU seconds and its wall seconds."""
    with tempfile.TemporaryDirectory() as folder:
        cpu, wall = time.process_time(), time.monotonic()
        trace = simulate(exp, folder)
        cpu, wall = time.process_time() - cpu, time.monotonic() - wall
        return len(trace.pushes), cpu, wall


def main() -> None:
    """Print one row a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of updates")
    scale = parser.parse_args().scale
    torch.set_num_threads(1)
    measure(gd.Experiment(problem=QUADRATIC, updates=10))  # what torch loads on first use
    print(f"{'':38}{'pushes':>9}{'us a push':>11}{'wall s':>9}")
    for name, (problem, workers, strategy, updates) in RUNS.items():
        exp = gd.Experiment(problem=problem, workers=workers, strategy=strategy, compute_time=LAW,
                            optimizer=gd.SGD(lr=0.01), updates=max(1, int(updates * scale)))
        pushes, cpu, wall = measure(exp)
        print(f"{name:38}{pushes:9,}{cpu / pushes * 1e6:11.1f}{wall:9.2f}", flush=True)


if __name__ == "__main__":
    main()
