"""How large are the gradients? Their norms before clipping, the threshold, and which of them were clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import Thinned, line
from gdlab.views.loss import extend

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace

QUESTION = "How large are the gradients?"
NOTHING = "No gradient has arrived yet."
_LEFT_ALONE, _CLIPPED, _NOT_FINITE = 0, 1, 2
_MAX_MARKS = 200


def grad_norm(trace: Trace) -> go.Figure:
    """Draw each push's gradient norm against the version it was computed from, and what the clipping did to it."""
    fig = base(trace.experiment, trace.environment)
    pushes = trace.pushes
    left, clipped, bad = split(pushes)
    for index, (x, y) in ((_LEFT_ALONE, left), (_CLIPPED, clipped)):
        x, y = line(x, y)
        fig.data[index].update(x=x, y=y)
    marks = np.linspace(0, bad.size - 1, min(bad.size, _MAX_MARKS)).astype(int)
    fig.data[_NOT_FINITE].update(x=bad[marks].astype(np.float64), y=np.ones(marks.size))
    drawn = left[0].size + clipped[0].size
    if not (drawn or bad.size):
        style.empty(fig, NOTHING)
    fig.layout.update(style.remark(fig, not_finite(bad.size, bad)))
    words = [f"{drawn + bad.size} gradients", f"{clipped[0].size} clipped", f"{bad.size} not finite"]
    if drawn:
        norms = np.concatenate([left[1], clipped[1]])
        fig.layout.yaxis.update(style.log_axis(norms))
        words.append(f"median norm {np.median(norms):.3g}, largest {norms.max():.3g}")
    return style.describe(fig, f"{QUESTION} {'; '.join(words)}.")


def base(experiment: Experiment, environment: Mapping[str, Any]) -> go.Figure:
    """Return the empty figure: gradients left alone, clipped ones, and marks for those that are not finite."""
    fig = style.figure(QUESTION, "version of the parameters that was read", "gradient norm", style.caption(environment))
    clip = experiment.clip
    markers = (
        ("as computed", dict(color=style.BLUE, size=4, opacity=0.65)),
        ("clipped", dict(color=style.VERMILLION, size=5, symbol="diamond", opacity=0.8)),
        ("not finite", dict(color=style.INK, size=7, symbol="x-thin", line=dict(color=style.INK, width=1.5))),
    )
    for index, (name, marker) in enumerate(markers):
        fig.add_scatter(
            mode="markers", x=[], y=[], name=name, marker=marker,
            showlegend=index != _CLIPPED or clip is not None, hovertemplate="norm %{y:.4g} at version %{x}",
        )
    fig.data[_NOT_FINITE].update(yaxis="y2", hovertemplate="not finite at version %{x}")
    fig.layout.update(
        yaxis=style.log_axis(),
        yaxis2=dict(overlaying="y", range=[0, 1.03], visible=False, fixedrange=True),
    )
    if clip is not None and clip.norm is not None:
        where = "" if experiment.clips_at == "worker" else " (on the average)"
        fig.add_hline(clip.norm, line=dict(color=style.INK, width=1.5, dash="dash"))
        label = dict(
            text=f"clip at {clip.norm:g}{where}", showarrow=False, xref="paper", x=1, y=np.log10(clip.norm),
            xanchor="right", yanchor="bottom", font=dict(size=11, color=style.INK), bgcolor=style.PAPER, opacity=0.85,
        )
        fig.layout.annotations = [label]
    return fig


def split(pushes: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return (x, y) of the norms left alone, (x, y) of the clipped ones, and the versions of those not finite."""
    norm, version = pushes["grad_norm"].astype(np.float64), pushes["read_version"].astype(np.float64)
    bad = np.isinf(norm) | (pushes["nonfinite"] > 0)
    drawn = ~bad & (norm > 0.0)  # a gradient that was cancelled before it was computed has no norm
    clipped = drawn & (pushes["clip_scale"] < 1.0)
    alone = drawn & ~clipped
    return (version[alone], norm[alone]), (version[clipped], norm[clipped]), pushes["read_version"][bad]


def not_finite(count: int, versions: np.ndarray) -> str:
    """Say how many gradients were not finite and when that began, or return an empty text."""
    if not count:
        return ""
    return f"{count} gradient{'s' * (count > 1)} not finite, the first from version {int(versions.min())}."


class GradNormPoints:
    """The gradient norms while a run goes on; of each group of points the largest is kept, so that spikes stay."""

    def __init__(self, experiment: Experiment, environment: Mapping[str, Any]) -> None:
        self._base = base(experiment, environment)
        self._lines = (Thinned(limit=800, largest=True), Thinned(limit=800, largest=True), Thinned(limit=_MAX_MARKS))
        self._bad, self._first_bad, self._empty = 0, 0, True
        self._fixed = [annotation.to_plotly_json() for annotation in self._base.layout.annotations]

    def figure(self) -> go.Figure:
        """Return the figure before the first gradient."""
        return style.empty(go.Figure(self._base), NOTHING)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        left, clipped, bad = split(chunk.pushes)
        ops: list[dict[str, Any]] = []
        for index, (x, y) in enumerate((left, clipped, (bad, np.ones(bad.size)))):
            ops += extend(index, *self._lines[index].add(x, y))
        if bad.size or (self._empty and chunk.pushes.size):
            self._first_bad = min(self._first_bad, int(bad.min())) if self._bad else int(bad.min(initial=2**62))
            self._bad += bad.size
            self._empty = False
            text = not_finite(self._bad, np.array([self._first_bad]))
            ops.append({"op": "relayout", "layout": {**style.filled(self._fixed), **style.remark(self._base, text)}})
        return ops
