"""How large are the gradient's numbers? Their exponents, before and after loss scaling, and what formats can hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.formats import facts
from gdlab.records import LOWEST_EXPONENT, underflow_share
from gdlab.views import style
from gdlab.views.lost_updates import FORMATS

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "How large are the gradient's numbers?"
NOTHING = "No gradient has been sampled yet."


def exponents(trace: Trace) -> go.Figure:
    """Draw how often each exponent occurs in the sampled gradients, over the ranges of formats.

    As they came out of the backward pass, times the loss scale, and divided by it. Below: the formats' normal
    numbers (wide) and subnormal ones (narrow, with fewer bits the smaller they are).
    """
    rows, compute = trace.exponents, trace.experiment.precision.compute
    fig = style.figure(QUESTION, "", "", style.caption(trace.environment), height=480)
    fig.set_subplots(2, 1, shared_xaxes=True, vertical_spacing=0.04, row_heights=[0.68, 0.32])
    scaled, plain = counts(rows, scaled=True), counts(rows, scaled=False)
    total, zeros, bad = plain.sum() + rows["zeros"].sum(), int(rows["zeros"].sum()), int(rows["nonfinite"].sum())
    if not total + bad:
        return style.empty(_ranges(fig, compute, -30, 20), NOTHING)
    bins = np.arange(plain.size) + LOWEST_EXPONENT
    seen = bins[(scaled > 0) | (plain > 0)]
    low, high = min(-30, seen.min(initial=0) - 3), max(18, seen.max(initial=0) + 3)
    keep = (bins >= low) & (bins <= high)
    shares = [(plain, "unscaled" if (scaled != plain).any() else "gradient", style.BLUE)]
    if (scaled != plain).any():
        shares.append((scaled, "times the loss scale", style.ORANGE))
    for count, name, colour in shares:
        fig.add_bar(x=bins[keep], y=count[keep] / max(1, total), name=name, marker=dict(color=colour), opacity=0.75,
                    width=1, offset=0, row=1, col=1, hovertemplate="2^%{x}: %{y:.2%}")
    _ranges(fig, compute, low, high)
    lost = f"{100 * zeros / total:.3g}% of the numbers are 0" if total else "No number is finite"
    under = underflow_share(rows)
    lost += f"; {100 * under:.3g}% underflowed" if under > 0 else ""
    note = lost + (f"; {bad} {'is' if bad == 1 else 'are'} not finite." if bad else ".")
    fig.layout.update(style.remark(fig, f"In {compute}. {note}"))
    if plain.any():
        middle = bins[np.searchsorted(np.cumsum(plain), plain.sum() / 2)]
        note += f" The median exponent is {middle} without the loss scale."
    return style.describe(fig, f"{QUESTION} {note}")


def counts(rows: np.ndarray, scaled: bool) -> np.ndarray:
    """Return how many numbers have each exponent, of all samples; unscaled: moved by the logarithm of each scale."""
    total = np.zeros(rows["counts"].shape[1], np.int64)
    for scale in np.unique(rows["loss_scale"][rows["loss_scale"] > 0.0]):
        part = rows["counts"][rows["loss_scale"] == scale].sum(axis=0, dtype=np.int64)
        at = np.arange(part.size) - (0 if scaled else round(math.log2(scale)))
        np.add.at(total, np.clip(at, 0, part.size - 1), part)
    return total


def _ranges(fig: go.Figure, compute: str, low: int, high: int) -> go.Figure:
    """Draw each format's normal and subnormal numbers below, and shade what is out of range for one above."""
    for name in dict.fromkeys((compute, *FORMATS)):
        known = facts(name)
        tiny, normal, top = (math.log2(v) for v in (known.min_subnormal, known.min_normal, known.max))
        for x0, x1, width, word in ((tiny, normal, 0.25, "subnormal"), (normal, top, 0.7, "normal")):
            fig.add_bar(base=[x0], x=[x1 - x0], y=[name], orientation="h", width=width, row=2, col=1, showlegend=False,
                        marker_color=style.GREEN if name == compute else style.MUTED,
                        hovertemplate=f"{word} numbers of {name}: 2^{x0:.4g} to 2^{x1:.4g}<extra></extra>")
        if name == compute:
            for x0, x1 in ((low, tiny), (top, high)):
                if x0 < x1:
                    fig.add_vrect(x0=x0, x1=x1, fillcolor=style.VERMILLION, opacity=0.12, line_width=0, row=1, col=1)
    fig.update_xaxes(range=[low, high]).update_xaxes(title_text="log2 |g|", row=2)
    fig.update_yaxes(title_text="share of the numbers", tickformat=".0%", rangemode="tozero", row=1)
    fig.update_yaxes(title_text="format", row=2)
    fig.layout.update(barmode="overlay")
    return fig
