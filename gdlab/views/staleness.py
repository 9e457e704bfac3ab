"""How stale are the updates? How many other updates were applied between a gradient's read and its write."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab import expected
from gdlab.parts import Async
from gdlab.views import style

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace

QUESTION = "How stale are the updates?"
NOTHING = "No update has been applied yet."
_BINS = 48


def staleness(trace: Trace) -> go.Figure:
    """Draw how often each staleness occurred, by worker where there are few, with the mean; over it what theory says.

    That is the mean wherever it is known, and how often each occurs for memoryless workers or equal ones in turn.
    """
    counts = Counts(trace.experiment.workers, Theory(trace.experiment, trace.environment))
    counts.add(trace.pushes)
    fig = base(trace.experiment, trace.environment)
    for bar, change in zip(fig.data, counts.bars(), strict=True):
        bar.update(change)
    if not counts.total:
        return style.empty(fig, NOTHING)
    fig.layout.update(counts.layout())
    return style.describe(fig, f"{QUESTION} {counts.sentence()}")


class Theory:
    """What theory says of an experiment's staleness: the mean, the share of each, and why; None where it is silent."""

    def __init__(self, experiment: Experiment, environment: Mapping[str, Any]) -> None:
        self._experiment, self._clock = experiment, str(environment.get("clock"))
        stale = isinstance(experiment.strategy, Async)
        self.mean = expected.staleness(experiment, self._clock) if stale else None
        self.why = (expected.staleness_shares(experiment, 1, self._clock) or (None, ""))[1]

    def shares(self, size: int) -> np.ndarray:
        """Return the share of each staleness from 0 to size - 1."""
        found = expected.staleness_shares(self._experiment, size, self._clock)
        return np.empty(0) if found is None else found[0]


def base(experiment: Experiment, environment: Mapping[str, Any]) -> go.Figure:
    """Return the empty figure: one stacked bar trace a worker, or one for all where there are many; then theory's."""
    workers, theory = experiment.workers, Theory(experiment, environment)
    said = theory.mean and f"Theory: {'; '.join(text for text in (theory.mean.because, theory.why) if text)}."
    fig = style.figure(
        QUESTION, "staleness: other updates between read and write", "updates", style.caption(environment), said or ""
    )
    few = workers <= style.MAX_WORKERS
    for worker in range(workers if few else 1):
        fig.add_bar(
            x=[], y=[], name=str(worker) if few else f"all {workers}", showlegend=True,
            marker=dict(
                color=style.worker_colour(worker), line=dict(width=0),
                pattern=dict(shape="/" if worker >= len(style.WORKERS) else "", solidity=0.3),
            ),
            hovertemplate="staleness %{x}: %{y} updates" + (f" of worker {worker}" if few else "") + "<extra></extra>",
        )
    if theory.why:
        fig.add_scatter(
            x=[], y=[], name="theory", showlegend=True, mode="markers",
            marker=dict(color=style.INK, symbol="diamond", size=6),
            hovertemplate=f"theory: %{{y:.4g}} updates of staleness %{{x}} ({theory.why})<extra></extra>",
        )
    fig.layout.update(barmode="stack", legend=style.workers_legend())
    return fig


class Counts:
    """Count stalenesses by worker: what is kept does not grow with the run."""

    def __init__(self, workers: int, theory: Theory | None = None) -> None:
        self._theory = theory
        self._rows = workers if workers <= style.MAX_WORKERS else 1
        self._table = np.zeros((self._rows, 8), np.int64)

    def add(self, pushes: np.ndarray) -> bool:
        """Count the applied pushes; return whether there were any."""
        applied = pushes[(pushes["version"] >= 0) & (pushes["staleness"] >= 0)]
        if not applied.size:
            return False
        value = applied["staleness"]
        row = np.minimum(applied["worker"], self._rows - 1) if self._rows > 1 else np.zeros(value.size, np.int64)
        while value.max() >= self._table.shape[1]:
            self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
        np.add.at(self._table, (row, value), 1)
        return True

    @property
    def total(self) -> int:
        """Number of gradients counted."""
        return int(self._table.sum())

    @property
    def mean(self) -> float:
        """Mean staleness; NaN before the first update."""
        each = self._table.sum(axis=0)
        return float(each @ np.arange(each.size) / each.sum()) if each.sum() else float("nan")

    def _largest(self) -> int:
        return int(np.flatnonzero(self._table.sum(axis=0)).max(initial=0))

    def bars(self) -> list[dict[str, Any]]:
        """Return x, y and width of each row's bars, at most 48 of them, then x and y of theory's line if it has one."""
        size = self._largest() + 1
        width = -(-size // _BINS)
        padded = np.zeros((self._rows, -(-size // width) * width), np.int64)
        padded[:, :size] = self._table[:, :size]
        binned = padded.reshape(self._rows, -1, width).sum(axis=2).astype(np.float64)
        x = np.arange(binned.shape[1]) * float(width) + (width - 1) / 2
        if not self.total:
            x, binned = x[:0], binned[:, :0]
        bars = [dict(x=x, y=row, width=0.8 * width) for row in binned]
        if self._theory is not None and self._theory.why:
            counted = self.total * self._theory.shares(x.size * width).reshape(x.size, width).sum(axis=1)
            bars.append(dict(x=x, y=counted))
        return bars

    def layout(self) -> dict[str, Any]:
        """Return the line at the mean and its words, and the range of the axis."""
        mean, largest = self.mean, self._largest()
        right = mean > 0.55 * largest and largest > 0
        theory = self._theory.mean if self._theory else None
        text = dict(
            text=f"mean {mean:.2f}" + (f" (theory {theory.value:.4g})" if theory else ""), x=mean, xref="x", y=1,
            yref="paper", yanchor="top", showarrow=False,
            xanchor="right" if right else "left", xshift=-3 if right else 3, font=dict(size=11, color=style.INK),
            bgcolor=style.PAPER, opacity=0.85, hovertext=f"theory: {theory.because}" if theory else None,
        )
        dashed = dict(color=style.INK, dash="dash", width=1.5)
        lines = [dict(type="line", x0=mean, x1=mean, y0=0, y1=1, yref="paper", line=dashed)]
        if theory:
            dotted = dict(color=style.VERMILLION, dash="dot", width=2)
            lines.append(dict(type="line", x0=theory.value, x1=theory.value, y0=0, y1=1, yref="paper", line=dotted))
            largest = max(largest, math.ceil(theory.value))
        axis = dict(range=[-0.75, max(largest, 3) + 0.75], dtick=1 if largest <= 12 else None, showticklabels=True)
        return {**style.filled([text]), "shapes": lines, "xaxis": axis}

    def sentence(self) -> str:
        """Say the mean and the largest staleness."""
        if not self.total:
            return NOTHING
        theory = self._theory.mean if self._theory else None
        return (f"{self.total} gradients applied; mean staleness {self.mean:.2f}, largest {self._largest()}."
                + (f" In theory its mean is {theory.value:.4g}: {theory.because}." if theory else ""))


class StalenessBars:
    """The staleness histogram while a run goes on."""

    def __init__(self, experiment: Experiment, environment: Mapping[str, Any]) -> None:
        self._experiment, self._environment = experiment, environment
        self._counts = Counts(experiment.workers, Theory(experiment, environment))

    def figure(self) -> go.Figure:
        """Return the figure before the first update."""
        return style.empty(base(self._experiment, self._environment), NOTHING)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        if not self._counts.add(chunk.pushes):
            return []
        bars = self._counts.bars()
        ops: list[dict[str, Any]] = [{"op": "replace", "trace": i, **change} for i, change in enumerate(bars)]
        return [*ops, {"op": "relayout", "layout": self._counts.layout()}]
