"""Which updates are lost? Each update against the spacing of its weight's format, and the share lost over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.formats import round_to, ulp
from gdlab.views import style
from gdlab.views.downsample import line
from gdlab.views.loss import RUN_COLOURS
from gdlab.views.naming import what_differs
from gdlab.views.number_line import NOTHING, how_rounded, sample

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "Which updates are lost?"
FORMATS = ("fp32", "fp16", "bf16", "fp8_e4m3")
_COLOURS = (style.GREEN, style.ORANGE, style.PURPLE, style.SKY)


def lost_updates(*traces: Trace, version: int | None = None) -> go.Figure:
    """Draw |update| against |weight| at the sample nearest to a version (None: the last), and the share lost over time.

    Below half a spacing of the weights' format (shaded) rounding to nearest gives the old weight again. One run: also
    the share that other formats would have lost of the same updates. Several: one colour a run.
    """
    names, notes, sentences = what_differs([trace.experiment for trace in traces]), [], []
    captions = style.captions(names, [trace.environment for trace in traces])
    fig = style.figure(QUESTION, "", "", *captions, height=620)
    fig.set_subplots(2, 1, vertical_spacing=0.18)
    for i, (trace, name) in enumerate(zip(traces, names, strict=True)):
        precision, colour = trace.experiment.precision, RUN_COLOURS[i % len(RUN_COLOURS)]
        group, row = dict(legendgroup=str(i), row=1, col=1), sample(trace, version)
        x, y = per_version(trace, lambda rows: rows["lost_fraction"])
        notes.append(how_rounded(precision))
        fate = "lost" if precision.rounding == "nearest" else "lost if rounded to nearest"
        if row is not None:
            weight, update = np.abs(row["weight"]), np.abs(row["update"])
            shown = (weight > 0) & (update > 0) & np.isfinite(weight) & np.isfinite(update)
            gone = is_lost(row["weight"], row["update"], precision.weights)
            for part, word, symbol in ((shown & ~gone, "kept", "circle-open"), (shown & gone, fate, "x-thin-open")):
                shade = style.VERMILLION if word == fate and len(traces) == 1 else colour
                fig.add_scatter(
                    x=weight[part], y=update[part], customdata=row["index"][part], mode="markers", name=word, **group,
                    showlegend=len(traces) == 1, marker=dict(symbol=symbol, size=7, color=shade, line_width=1.5),
                    hovertemplate=f"parameter %{{customdata}}, {word}: %{{y:.3g}} to %{{x:.4g}}<extra></extra>",
                )
            if shown.any():
                _shade(fig, weight[shown], update[shown], precision.weights, dict(color=colour), len(traces) == 1)
                sentences.append(f"{name or precision.weights}: {np.mean(gone[shown]):.0%} of {shown.sum()} sampled "
                                 f"updates of version {row['version']} are {fate}.")
        fig.add_scatter(x=x, y=y, mode="lines", line=dict(color=colour, width=2.2), name=name or precision.weights,
                        legendgroup=str(i), row=2, col=1, hovertemplate="%{y:.1%} at %{x}")
    if len(traces) == 1 and len(traces[0].updates):
        rows = traces[0].updates
        notes.append("Dotted: had the weights been kept in another format.")
        for other, colour in zip(FORMATS, _COLOURS, strict=True):
            if other != traces[0].experiment.precision.weights:
                gone = is_lost(round_to(rows["weight"], other), rows["update"], other)
                share = gone.sum(axis=1) / np.maximum(1, np.sum(rows["update"] != 0, axis=1))
                fig.add_scatter(x=rows["version"], y=share, mode="lines", line=dict(color=colour, dash="dot"),
                                name=f"in {other}", row=2, col=1, hovertemplate="%{y:.1%} at %{x}")
    fig.update_xaxes(style.log_axis(), title_text="|weight|", row=1).update_yaxes(row=1, title_text="|update|")
    fig.update_yaxes(style.log_axis(), row=1)
    fig.update_xaxes(title_text="updates of the shared parameters", row=2)
    fig.update_yaxes(title_text="share of updates lost", tickformat=".0%", range=[-0.03, 1.03], row=2)
    if not any(len(part.x) for part in fig.data):
        return style.empty(fig, NOTHING)
    fig.layout.update(style.remark(fig, *notes))
    return style.describe(fig, " ".join([QUESTION, *sentences]))


def is_lost(weight: np.ndarray, update: np.ndarray, name: str) -> np.ndarray:
    """Say which updates (not 0) leave a weight of the format as it is when the sum is rounded to nearest."""
    return (round_to(weight + update, name) == weight) & (update != 0) & np.isfinite(weight)


def per_version(trace: Trace, value: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return versions, and the mean of a value of the pushes that made each; what is not finite is left out."""
    rows = trace.applied
    version, of = np.unique(rows["version"], return_inverse=True)
    return line(version, np.bincount(of, value(rows)) / np.maximum(1, np.bincount(of)))


def _shade(fig: go.Figure, weight: np.ndarray, update: np.ndarray, name: str, line: dict, alone: bool) -> None:
    """Draw half of the format's spacing over the weights shown, and shade what is below."""
    edges = 2.0 ** np.arange(np.floor(np.log2(weight.min())), np.ceil(np.log2(weight.max())) + 1)
    half = ulp(edges, name) / 2
    floor = np.full(edges.size, min(update.min(), half.min()) / 4)
    for y, fill, width in ((floor, None, 0), (half, "tonexty" if alone else None, 1)):
        fig.add_scatter(x=edges, y=y, mode="lines", line=dict(shape="hv", width=width, **line), hoverinfo="skip", row=1,
                        col=1, fill=fill, fillcolor="rgba(213,94,0,0.14)", name="half a spacing",
                        showlegend=alone and width > 0)
