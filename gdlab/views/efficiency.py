"""What does a faster update cost? Two clocks side by side, and time to the same loss = updates times seconds each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import line
from gdlab.views.loss import NOTHING, RUN_COLOURS
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "Is more per second worth more updates?"
_PARTS = (("speed-up: updates per second", style.SKY, "/"),
          ("statistical efficiency: updates needed", style.ORANGE, "."),
          ("their product: time to the same loss", style.INK, ""))
_NEVER = "The baseline has not fallen below its start: there is no loss to compare at."


def efficiency(baseline: Trace, *traces: Trace) -> go.Figure:
    """Draw the loss on both clocks, and of each run against the baseline its speed-up times its statistical efficiency.

    Speed-up: updates per second, over the baseline's. Statistical efficiency: the updates that the baseline needs for
    the same loss, over those that the run needs. Their product is the baseline's time to that loss over the run's
    (hardware and statistical efficiency: Hadjis et al. 2016). The loss is the target that all runs share, if all reach
    it, else the one that the worst of them ended with (the median of its last tenth, so that no lucky dip counts);
    runs that did not fall have no bars.
    """
    runs = (baseline, *traces)
    names = what_differs([run.experiment for run in runs]) if traces else ["the run"]
    environments = [run.environment for run in runs]
    fig = style.figure(QUESTION, "", "", *style.captions(names, environments), height=560)
    fig.set_subplots(2, 2, specs=[[{}, {}], [dict(colspan=2), None]], shared_yaxes=True, horizontal_spacing=0.08,
                     vertical_spacing=0.16, row_heights=[0.58, 0.42])
    curves = [_curves(run) for run in runs]
    for index, ((versions, seconds, losses), name) in enumerate(zip(curves, names, strict=True)):
        for column, x in enumerate((versions, seconds), 1):
            at, height = line(x, losses)
            fig.add_scatter(x=at, y=height, mode="lines", name=name, legendgroup=str(index), showlegend=column == 1,
                            line=dict(color=RUN_COLOURS[index % len(RUN_COLOURS)], width=2), row=1, col=column,
                            hovertemplate="%{y:.4g} at %{x:.4g}")
    every = np.concatenate([losses for _, _, losses in curves])
    if not every.size:
        return style.empty(fig, NOTHING)
    if every.min() > 0.0:
        fig.update_yaxes(style.log_axis(every), row=1)
    clock = "time in virtual seconds" if {e.get("clock") for e in environments} == {"virtual"} else "time in seconds"
    fig.update_xaxes(nticks=5, row=1).update_xaxes(title_text="updates", row=1, col=1)
    fig.update_xaxes(title_text=clock, row=1, col=2)
    fig.update_yaxes(title_text="loss", row=1, col=1)
    fig.update_yaxes(title_text="times the baseline", row=2, rangemode="tozero")
    level, reached = same_loss([run.experiment.target_loss for run in runs], curves)
    if level is None:
        fig.layout.update(style.remark(fig, _NEVER))
        return style.describe(fig, f"{QUESTION} {_NEVER}")
    fig.add_hline(y=level, line=dict(color=style.MUTED, dash="dot"), row=1, col="all")
    ratios, sentences = {}, []
    for name, found in zip(names, reached, strict=True):
        if found is None:
            sentences.append(f"{name}: never below its start.")
            continue
        fewer, product = reached[0][0] / found[0], reached[0][1] / found[1]
        ratios[name.replace(", ", "<br>")] = product / fewer, fewer, product
        sentences.append(f"{name}: {found[0]} updates in {found[1]:.4g} s; speed-up {product / fewer:.3g} × "
                         f"statistical efficiency {fewer:.3g} = {product:.3g}.")
    for (name, colour, shape), values in zip(_PARTS, zip(*ratios.values(), strict=True), strict=True):
        fig.add_bar(x=list(ratios), y=values, name=name, text=[f"{value:.3g}" for value in values], row=2, col=1,
                    textposition="outside", cliponaxis=False, textangle=0,
                    marker=dict(color=colour, pattern=dict(shape=shape, fillmode="overlay", solidity=0.2)),
                    hovertemplate=f"%{{x}}: {name} %{{y:.4g}} times the baseline<extra></extra>")
    fig.add_hline(y=1.0, line=dict(color=style.MUTED, dash="dot"), row=2, col=1)
    fig.layout.update(style.remark(fig, f"Time to a loss of {level:.4g}, against {names[0]}: speed-up × statistical "
                                        "efficiency. Bars above 1 are better."))
    return style.describe(fig, " ".join([QUESTION, f"To a loss of {level:.4g}.", *sentences]))


Curves = tuple[np.ndarray, np.ndarray, np.ndarray]


def same_loss(targets: list[float | None], curves: list[Curves]) -> tuple[float | None, list[tuple[int, float] | None]]:
    """Return the loss to compare at, and the updates and seconds in which each run reached it (None: it never fell).

    The loss is None where the baseline, the first run, has not fallen below its start.
    """
    ends = [float(np.median(losses[-max(1, losses.size // 10) :])) if losses.size else np.inf
            for _, _, losses in curves]
    fell = [end < losses[0] if losses.size else False for end, (_, _, losses) in zip(ends, curves, strict=True)]
    if not fell[0]:
        return None, [None for _ in curves]
    level = max(end for end, good in zip(ends, fell, strict=True) if good)
    shared, lowest = targets[0], max(losses.min() for (_, _, losses), good in zip(curves, fell, strict=True) if good)
    if shared is not None and len(set(targets)) == 1 and shared >= lowest:
        level = shared
    found: list[tuple[int, float] | None] = []
    for (versions, seconds, losses), good in zip(curves, fell, strict=True):
        first = int(np.argmax(losses <= level))
        reached = good and first > 0 and seconds[first] > 0
        found.append((int(versions[first]), float(seconds[first])) if reached else None)
    return (level, found) if found[0] else (None, found)


def _curves(run: Trace) -> Curves:
    """Return versions, seconds and finite losses of a run; a run that goes on may have grown between the looks."""
    losses, versions, seconds = np.asarray(run.losses, float), run.path_versions, run.path_seconds
    size = min(len(losses), len(versions), len(seconds))
    keep = np.isfinite(losses[:size]) & np.isfinite(seconds[:size])
    return versions[:size][keep], seconds[:size][keep], losses[:size][keep]
