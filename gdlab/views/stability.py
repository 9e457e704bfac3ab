"""Which learning rates survive which delay? The stability limit over the plane of both, with runs as points."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab import theory
from gdlab.laws import Exponential
from gdlab.parts import SGD, Async, Quadratic
from gdlab.views import style
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "Which learning rates survive which delay?"
NOTHING = "No run on a quadratic has applied an update yet."
_FIXED = "the same delay for every gradient, no noise"
_MEMORYLESS = "of memoryless workers: above it E[x²] diverges"


def stability(*traces: Trace, momentum: float = 0.0) -> go.Figure:
    """Draw learning rate times curvature against the delay: the stability limit, the best rate, and runs as points.

    A run stands at its mean staleness and at its largest curvature, if its problem is a quadratic that all workers
    share, under SGD; its mark says whether its loss grew, from its first to its last quarter. The limit is for a fixed
    delay, with the momentum of each run (`momentum` where there is no run); for runs of memoryless workers theirs too.
    """
    fig = style.figure(QUESTION, "delay in updates (of a run: its mean staleness)", "learning rate × curvature",
                       *style.captions(what_differs([t.experiment for t in traces]), [t.environment for t in traces]))
    points = [point for trace, name in zip(traces, what_differs([t.experiment for t in traces]), strict=True)
              if (point := _point(trace, name))]
    most = max([8, *(math.ceil(1.3 * delay) for delay, *_ in points)])
    counts = sorted({round(d) for d in np.geomspace(1, most + 1, 60)})
    delays, notes = [count - 1 for count in counts], [f"Limit: {_FIXED}."]
    moments = sorted({trace.experiment.optimizer.momentum for trace in traces if _quadratic(trace)}) or [momentum]
    for b, dash in zip(moments, ("solid", "dash", "dot", "longdash"), strict=False):
        _line(fig, delays, [theory.max_stable_lr(1.0, delay, b) for delay in delays], style.VERMILLION, dash,
              "stability limit" + (f", momentum {b:g}" if b else ""), _FIXED)
    if any(trace.experiment.compute_time.__class__ is Exponential for trace in traces if _quadratic(trace)):
        _line(fig, delays, [theory.max_stable_lr_memoryless(1.0, count) for count in counts], style.ORANGE, "dash",
              "limit, memoryless", _MEMORYLESS)
        notes.append(f"Limit {_MEMORYLESS}.")
    if 0.0 in moments:
        _line(fig, delays, [theory.best_lr(1.0, delay) for delay in delays], style.GREEN, "dot", "fastest",
              f"converges fastest: {_FIXED}")
    for grew, word, colour, symbol in ((False, "loss fell", style.BLUE, "circle"), (True, "loss grew", style.INK, "x")):
        chosen = [point for point in points if point[2] == grew]
        if chosen:
            x, y, _, told = zip(*chosen, strict=True)
            fig.add_scatter(x=x, y=y, mode="markers", name=word, customdata=told,
                            marker=dict(color=colour, symbol=symbol, size=10, line=dict(width=1, color=style.PAPER)),
                            hovertemplate="%{customdata}<br>delay %{x:.3g}, rate × curvature %{y:.3g}<extra></extra>")
    fig.layout.showlegend = True
    fig.layout.yaxis.update(type="log", tickformat="~g", dtick="D2" if most < 40 else None)
    fig.layout.update(style.remark(fig, *notes))
    if traces and not points:
        return style.empty(style.describe(fig, f"{QUESTION} {NOTHING}"), NOTHING)
    return style.describe(fig, " ".join([f"{QUESTION} With no delay below {2 * (1 + moments[0]):g}, with a delay of 3 "
                                         f"below {theory.max_stable_lr(1.0, 3, moments[0]):.3g}.",
                                         *(f"{told.replace('<br>', ', ')}." for *_, told in points)]))


def _line(fig: go.Figure, x: list[int], y: list[float], colour: str, dash: str, name: str, because: str) -> None:
    fig.add_scatter(x=x, y=y, mode="lines", name=name, line=dict(color=colour, dash=dash, width=2),
                    hovertemplate=f"{name} at a delay of %{{x}}: %{{y:.4g}} ({because})<extra></extra>")


def _quadratic(trace: Trace) -> bool:
    problem, rule = trace.experiment.problem, trace.experiment.optimizer
    return isinstance(problem, Quadratic) and not problem.eigenvalue_rows and isinstance(rule, SGD)


def _point(trace: Trace, name: str) -> tuple[float, float, bool, str] | None:
    """Return a run's mean staleness, rate times curvature, whether its loss grew, and words; None without updates."""
    rows, losses = trace.pushes, np.asarray(trace.losses, float)
    rows, exp = rows[rows["version"] > 0], trace.experiment
    if not rows.size or not _quadratic(trace) or losses.size < 2 or np.isnan(losses).all() or not exp.optimizer.lr:
        return None
    if isinstance(exp.strategy, Async) and exp.strategy.correction != "none":
        return None  # then the rate is not the experiment's
    quarter = max(1, losses.size // 4)
    worst = [np.nanmax(np.where(np.isnan(part), -np.inf, part)) for part in (losses[:quarter], losses[-quarter:])]
    grew = not worst[1] <= worst[0]
    delay = float(rows["staleness"].mean())
    told = f"{name or 'the run'}: loss {worst[0]:.3g} at most at first, {worst[1]:.3g} in the end"
    return delay, exp.optimizer.lr * float(np.max(exp.problem.eigenvalues)), grew, told
