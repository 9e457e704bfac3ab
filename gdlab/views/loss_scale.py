"""How does the loss scale find its place? The scale, the gradients that overflowed, and the steps skipped for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import every

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "How does the loss scale find its place?"
NOTHING = "No gradient has arrived yet."
NO_SCALE = "This run does not scale its loss."


def loss_scale(trace: Trace) -> go.Figure:
    """Draw the loss scale of each push against the version it was read with, overflows, and skipped steps."""
    rows, scaled = trace.pushes, trace.experiment.precision.loss_scale is not None
    fig = style.figure(QUESTION, "version of the parameters that was read", "loss scale",
                       style.caption(trace.environment))
    rows = rows[np.isfinite(rows["computed_s"]) & (rows["loss_scale"] > 0.0)]  # cancelled pushes know no scale
    rows = rows[np.argsort(rows["read_version"], kind="stable")]
    if not scaled or not rows.size:
        return style.empty(fig, NOTHING if scaled else NO_SCALE)
    versions, first = np.unique(rows["read_version"], return_index=True)
    over = rows[rows["nonfinite"] > 0]
    skipped = np.unique(rows["version"][(rows["version"] > 0) & np.isnan(rows["lost_fraction"])])
    keep = every(versions.size)
    fig.add_scatter(x=versions[keep], y=rows["loss_scale"][first][keep], mode="lines", name="loss scale",
                    line=dict(color=style.BLUE, width=2.2, shape="hv"), hovertemplate="%{y} at %{x}")
    shown = over[every(over.size, 500)]
    fig.add_scatter(x=shown["read_version"], y=shown["loss_scale"], mode="markers", name="overflow",
                    customdata=np.stack([shown["worker"], shown["nonfinite"]], axis=1),
                    marker=dict(symbol="x-thin-open", size=10, color=style.VERMILLION, line_width=2),
                    hovertemplate="worker %{customdata[0]}: %{customdata[1]} numbers not finite<extra></extra>")
    marks = skipped[every(skipped.size, 500)]
    fig.add_scatter(x=marks - 1, y=np.zeros(marks.size), mode="markers", name="step skipped", yaxis="y2",
                    marker=dict(symbol="line-ns-open", size=11, color=style.INK, line_width=1.5),
                    hovertemplate="version %{x} was kept<extra></extra>")
    octaves = np.ptp(np.log2(rows["loss_scale"])) / 6.0  # between two of about six ticks
    ticks = dict(type="log", dtick=max(1.0, np.ceil(octaves)) * np.log10(2.0), tickformat="~g")
    fig.layout.update(yaxis=ticks, yaxis2=dict(overlaying="y", range=[-0.05, 1], visible=False))
    text = f"{over.size} gradients overflowed; {skipped.size} steps skipped."
    fig.layout.update(style.remark(fig, text))
    return style.describe(fig, f"{QUESTION} From {rows['loss_scale'][0]:g} to {rows['loss_scale'][-1]:g}. {text}")
