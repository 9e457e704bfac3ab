"""How much is sent for how much descent? The bytes of the pushes, added up, and the loss against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import line
from gdlab.views.loss import RUN_COLOURS
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "How much is sent for how much descent?"
NOTHING = "Nothing has been sent yet: one worker alone sends nothing over an all-reduce, or in virtual time."
NOT_COUNTED = "This trace does not say how many bytes were sent."


def bytes_sent(*traces: Trace) -> go.Figure:
    """Draw what all workers together have sent against updates, and the full objective against what was sent.

    Pushes only, also those that were dropped; the caption says what a server sent back. One colour a run.
    """
    names, notes, sentences = what_differs([trace.experiment for trace in traces]), [], []
    captions = style.captions(names, [trace.environment for trace in traces])
    fig = style.figure(QUESTION, "", "", *captions, height=620)
    fig.set_subplots(2, 1, vertical_spacing=0.18)
    heights, amounts = [np.empty(0)], [np.empty(0)]
    for index, (trace, name) in enumerate(zip(traces, names, strict=True)):
        rows, losses, versions = trace.pushes, np.asarray(trace.losses), np.asarray(trace.path_versions)
        total = sent_by_version(rows)
        if np.isnan(total).any():
            notes.append(f"{name}: t{NOT_COUNTED[1:]}" if name else NOT_COUNTED)
            continue
        known = (versions < total.size)[: losses.size]  # a run that goes on may have grown between the two looks
        at, losses = total[versions[: known.size][known]], losses[: known.size][known]
        each = f"{amount(total[-1] / max(1, total.size - 1))} an update"
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        dash = style.DASHES[index % len(style.DASHES)]  # lines of equally many bytes lie on each other
        look = dict(mode="lines", legendgroup=str(index), line=dict(color=colour, width=2.2, dash=dash))
        updates, sums = line(np.arange(1, total.size), total[1:])
        x, y = line(at[at > 0], losses[at > 0])
        fig.add_scatter(x=updates, y=sums, name=f"{name}: {each}" if name else each, showlegend=True, **look, row=1,
                        col=1, hovertemplate="%{y:.3s}B after %{x} updates<extra></extra>")
        fig.add_scatter(x=x, y=y, showlegend=False, **look, row=2, col=1,
                        hovertemplate="loss %{y:.4g} after %{x:.3s}B<extra></extra>")
        heights, amounts = [*heights, y[np.isfinite(y) & (y > 0)]], [*amounts, sums[sums > 0]]
        back = rows["bytes_read"].sum()
        if back > 0:
            notes.append(f"{name + ': t' if name else 'T'}he server sent {amount(back)} of parameters back.")
        sentences.append(f"{name + ': ' if name else ''}{amount(total[-1])} in {total.size - 1} updates, {each}.")
    sizes = np.concatenate(amounts)
    short = dict(tickformat="~s", rangemode="tozero")
    fig.update_xaxes(title_text="updates of the shared parameters", row=1)
    fig.update_yaxes(short, title_text="bytes sent by all workers", row=1)
    fig.update_xaxes(style.log_axis(sizes) | short, title_text="bytes sent by all workers", row=2)
    fig.update_yaxes(style.log_axis(np.concatenate(heights)), title_text="loss", row=2)
    fig.layout.update(style.remark(fig, *notes))
    style.describe(fig, " ".join([QUESTION, *sentences]))
    return fig if sizes.size else style.empty(fig, NOTHING if sentences or not notes else notes[0])


def sent_by_version(rows: np.ndarray) -> np.ndarray:
    """Return how many bytes had been sent when each version was made: (versions,), 0 for version 0.

    A push that was dropped, or not applied in the end, counts to the version after the one that it was computed from.
    """
    last = int(rows["version"].max(initial=0))
    version = np.where(rows["version"] > 0, rows["version"], np.clip(rows["read_version"] + 1, 0, last))
    return np.bincount(version, rows["bytes_sent"], last + 1).cumsum()


def amount(nbytes: float) -> str:
    """Return a number of bytes as a person reads it."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
