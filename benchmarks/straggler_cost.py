"""What one slow rank costs: real runs of Sync and Async with and without it, beside their virtual twins.

    python benchmarks/straggler_cost.py [--updates 200] [--out straggler_cost.html]

Prints the ratios of seconds (slow over even speeds) and whether the paths are the same bits; draws all the real runs
in one figure. Exits with 1 where Sync's ratio is more than 15% off its virtual twin or a path is not as theory says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from plotly.subplots import make_subplots

import gdlab as gd

SLOW = (1.0, 1.0, 1.0, 0.25)
COLOURS = {("Sync", "even"): "#0072B2", ("Sync", "slow"): "#56B4E9",
           ("Async", "even"): "#D55E00", ("Async", "slow"): "#E69F00"}


def main() -> int:
    """Run, print and draw; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("straggler_cost.html"))
    given = parser.parse_args()
    base = gd.Experiment(compute_time=gd.Exponential(0.05), updates=given.updates)
    traces, twins = {}, {}
    for strategy in (gd.Sync(), gd.Async()):
        for speeds, name in ((None, "even"), (SLOW, "slow")):
            experiment = base.replace(strategy=strategy, speeds=speeds)
            traces[strategy.kind, name] = gd.run(experiment, backend="local")
            twins[strategy.kind, name] = gd.run(experiment, backend="virtual")
    seconds = {key: trace.summary()["seconds"] for key, trace in traces.items()}
    virtual = {key: trace.summary()["seconds"] for key, trace in twins.items()}
    ratios = {kind: seconds[kind, "slow"] / seconds[kind, "even"] for kind in ("Sync", "Async")}
    virtual_ratios = {kind: virtual[kind, "slow"] / virtual[kind, "even"] for kind in ("Sync", "Async")}
    same = {kind: np.array_equal(traces[kind, "even"].path, traces[kind, "slow"].path) for kind in ("Sync", "Async")}

    figure = make_subplots(rows=1, cols=2, column_widths=[0.65, 0.35], subplot_titles=(
        "Full loss against seconds (measured)", "Seconds with one slow rank / without"))
    for (kind, name), trace in traces.items():
        figure.add_scatter(x=trace.path_seconds, y=trace.losses, name=f"{kind}, {name} speeds",
                           line={"color": COLOURS[kind, name]}, row=1, col=1)
    kinds = list(ratios)
    figure.add_bar(x=kinds, y=[ratios[k] for k in kinds], name="measured", marker_color="#009E73", row=1, col=2)
    figure.add_bar(x=kinds, y=[virtual_ratios[k] for k in kinds], name="simulated (virtual time)",
                   marker_color="#999999", row=1, col=2)
    figure.update_xaxes(title_text="seconds since the last rank was ready (s)", row=1, col=1)
    figure.update_yaxes(title_text="full loss (nats)", type="log", row=1, col=1)
    figure.update_yaxes(title_text="ratio of seconds", row=1, col=2)
    where = traces["Sync", "even"].environment
    figure.update_layout(template="plotly_white", title=f"One rank of four is 4 times slower: measured on "
                         f"{where['ranks']} ranks, {where['cores']} cores, {where['group_backend']}")
    figure.write_html(given.out, include_plotlyjs=True)

    for kind in kinds:
        print(f"{kind}: {seconds[kind, 'even']:.2f} s even, {seconds[kind, 'slow']:.2f} s with the slow rank: "
              f"ratio {ratios[kind]:.3f}, virtual twin {virtual_ratios[kind]:.3f} "
              f"({virtual[kind, 'even']:.2f} s, {virtual[kind, 'slow']:.2f} s); "
              f"paths {'bit-identical' if same[kind] else 'differ'}")
    print(f"figure: {given.out}")
    off = abs(ratios["Sync"] / virtual_ratios["Sync"] - 1)
    return int(off > 0.15 or not same["Sync"] or same["Async"])


if __name__ == "__main__":
    sys.exit(main())
