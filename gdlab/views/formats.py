"""What does one change do to the same run? Runs side by side, one panel each, on the same axes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import line
from gdlab.views.loss import NOTHING, not_finite
from gdlab.views.lost_updates import per_version
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.trace import Trace

Share = Callable[[np.ndarray], np.ndarray]

QUESTION = "What do number formats do to the same run?"


def formats(*traces: Trace) -> go.Figure:
    """Draw the loss, and the share of updates that rounding lost, of each run in a panel of its own on equal axes."""
    return side_by_side(traces, QUESTION, lambda rows: rows["lost_fraction"], "updates lost")


def side_by_side(traces: tuple[Trace, ...], question: str, share: Share, label: str) -> go.Figure:
    """Draw the loss of each run in a panel of its own, and as points a share taken from the pushes."""
    columns, count = min(2, max(1, len(traces))), max(1, -(-len(traces) // 2))
    names = what_differs([trace.experiment for trace in traces])
    height = 180 + 175 * count
    fig = style.figure(question, "", "", *style.captions(names, [trace.environment for trace in traces]), height=height)
    titles = ["<br>".join(textwrap.wrap(name, 22)) for name in names]
    fig.set_subplots(count, columns, subplot_titles=titles, horizontal_spacing=0.05, vertical_spacing=90 / height,
                     shared_xaxes="all", shared_yaxes="all",
                     specs=[[dict(secondary_y=True)] * columns] * count)
    found, notes, sentences = [], [], []
    for i, (trace, name) in enumerate(zip(traces, names, strict=True)):
        place, versions, losses = dict(row=i // 2 + 1, col=i % 2 + 1), trace.path_versions, trace.losses
        size = min(len(versions), len(losses))  # a run that goes on may have grown between the two looks
        x, y = line(versions[:size], losses[:size])
        at, known = per_version(trace, share)
        fig.add_scatter(x=x, y=y, mode="lines", name="loss", line=dict(color=style.BLUE, width=2.2), **place,
                        showlegend=not i, legendgroup="loss", hovertemplate="%{y:.4g} at %{x}")
        fig.add_scatter(x=at, y=known, mode="markers", name=label, marker=dict(color=style.VERMILLION, size=3),
                        opacity=0.7, **place, secondary_y=True, showlegend=not i, legendgroup="share",
                        hovertemplate="%{y:.1%} at %{x}")
        found.append(y)
        notes.append(not_finite(trace.pushes, versions[:size], losses[:size], name))
        sentences.append(f"{name + ': ' if name else ''}" + (f"loss {y[-1]:.4g}" if y.size else "no loss yet") +
                         (f", mean {label} {known.mean():.1%}." if known.size else "."))
    every_loss = np.concatenate([np.empty(0), *found])
    if every_loss.size and every_loss.min() > 0.0:
        fig.update_yaxes(style.log_axis(every_loss), secondary_y=False)
    fig.update_xaxes(title_text="updates", row=count).update_yaxes(title_text="loss", col=1, secondary_y=False)
    fig.update_yaxes(range=[-0.02, 1.03], showgrid=False, tickformat=".0%", tickvals=[0.5, 1],
                     showticklabels=False, secondary_y=True)
    fig.update_yaxes(title_text=label, showticklabels=True, col=columns, secondary_y=True)
    fig.for_each_annotation(lambda title: title.update(y=0.93 * title.y, font_size=11))  # room below the captions
    fig.for_each_yaxis(lambda axis: axis.update(domain=[0.93 * end for end in axis.domain]), secondary_y=False)
    if not any(len(part.x) for part in fig.data):
        return style.empty(fig, NOTHING)
    fig.layout.update(style.remark(fig, *notes))
    return style.describe(fig, " ".join([question, *sentences]))
