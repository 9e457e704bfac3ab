"""Which values can a weight take? The numbers that its format has around it, and the update drawn among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab.formats import round_to, ulp
from gdlab.views import style

if TYPE_CHECKING:
    from gdlab.parts import Precision
    from gdlab.trace import Trace

QUESTION = "Which values can the weights take?"
NOTHING = "No update has been sampled yet."
_MAX_ROWS = 5


def number_line(trace: Trace, version: int | None = None, parameter: int | None = None) -> go.Figure:
    """Draw what the weights' format can hold around some weights, each update as an arrow, and where it ends.

    The sample nearest to `version` is shown (None: the last), and the sampled parameter nearest to `parameter` (None:
    up to five, evenly spaced). Distances are in spacings of the format at the weight; for one parameter the values
    themselves are written at the axis.
    """
    precision = trace.experiment.precision
    name, row = precision.weights, sample(trace, version)
    fig = style.figure(QUESTION, f"spacings of {name} from the weight", "parameter: weight",
                       style.caption(trace.environment))
    if row is None:
        return style.empty(fig, NOTHING)
    which = np.flatnonzero(np.isfinite(row["weight"]) & np.isfinite(row["update"]))
    if not which.size:
        return style.empty(fig, f"No weight of version {row['version']} is finite.")
    if parameter is not None:
        which = which[[np.argmin(np.abs(row["index"][which].astype(np.int64) - parameter))]]
    which = which[np.unique(np.linspace(0, which.size - 1, _MAX_ROWS).astype(int))]
    weight, update = row["weight"][which], row["update"][which]
    gap, landing = ulp(weight, name), round_to(weight + update, name)
    reach = float(np.clip(1.3 * np.abs(update / gap).max(), 2.2, 8.0))
    rows = range(weight.size)
    near = [neighbours(w, reach * g, name) for w, g in zip(weight, gap, strict=True)]
    places = [(values - w) / g for values, w, g in zip(near, weight, gap, strict=True)]
    fig.add_scatter(
        x=np.concatenate(places), y=np.repeat(rows, [len(values) for values in near]), customdata=np.concatenate(near),
        mode="markers", name="values", hovertemplate="%{customdata:.17g}<extra></extra>",
        marker=dict(symbol="line-ns-open", size=16, color=style.MUTED, line_width=1.5),
    )
    fig.add_scatter(x=0.0 * weight, y=list(rows), mode="markers", name="weight", marker=dict(size=11, color=style.BLUE))
    if precision.rounding == "nearest":
        fig.add_scatter(x=(landing - weight) / gap, y=list(rows), mode="markers", name="after it",
                        marker=dict(symbol="diamond-open", size=15, color=style.INK, line_width=2))
    words = [outcome(*values, precision, near[i]) for i, values in enumerate(zip(weight, update, landing, strict=True))]
    for i, u, text in zip(rows, update / gap, words, strict=True):
        fig.add_scatter(
            x=np.clip([0.0, u], -reach, reach), y=[i + 0.18] * 2, mode="lines+markers", showlegend=i == 0,
            name="update", line=dict(color=style.VERMILLION, width=2.5), hoverinfo="skip",
            marker=dict(symbol=["line-ns-open", "arrow"], angleref="previous", size=[9, 11], color=style.VERMILLION),
        )
        fig.add_annotation(x=0, xref="paper", y=i + 0.24, showarrow=False, xanchor="left", yanchor="bottom",
                           text=f"{u:+.3g} spacings: {text}", font_size=11, bgcolor=style.PAPER)
    fig.update_xaxes(range=[-reach, reach], zeroline=False, showgrid=False)
    labels = [f"{index}: {w:.7g}" for index, w in zip(row["index"][which], weight, strict=True)]
    fig.update_yaxes(tickvals=list(rows), ticktext=labels, range=[-0.5, weight.size - 0.3], zeroline=False)
    if weight.size == 1:
        shown = (np.abs(places[0]) <= 1.0) | (near[0] == landing[0])
        fig.update_xaxes(tickvals=places[0][shown], ticktext=[f"{value:.9g}" for value in near[0][shown]],
                         title_text=f"values that {name} can hold")
    fig.layout.update(height=300 + 40 * weight.size, **style.remark(fig, f"The update of version {row['version']}.",
                                                                    how_rounded(precision)))
    return style.describe(fig, f"{QUESTION} Parameters of version {row['version']} in {name}: " + "; ".join(
        f"{label}, update {u:+.3g}, {text}" for label, u, text in zip(labels, update, words, strict=True)) + ".")


def neighbours(weight: float, reach: float, name: str) -> np.ndarray:
    """Return the values of a format within `reach` of a weight, sorted; of more than 2,001 those farthest apart."""
    values = np.unique(round_to(np.linspace(weight - reach, weight + reach, 2001), name))
    return values[np.abs(values - weight) <= reach]


def sample(trace: Trace, version: int | None = None) -> Any:
    """Return the sampled weights and updates nearest to a version (None: the last), or None where there are none."""
    rows = trace.updates
    return rows[-1 if version is None else np.argmin(np.abs(rows["version"] - version))] if len(rows) else None


def how_rounded(precision: Precision) -> str:
    """Say what else decides whether a small update is lost."""
    if precision.compensated:
        return "Compensated: what rounding takes from an update is carried over to the next."
    return "Rounded at random, right on average." if precision.rounding == "stochastic" else ""


def outcome(weight: float, update: float, landing: float, precision: Precision, values: np.ndarray) -> str:
    """Say in a few words what becomes of an update; `values`: the format's own around the weight, sorted."""
    if update == 0.0:
        return "nothing to do"
    if precision.rounding == "stochastic":
        toward = values[values > weight][:1] if update > 0.0 else values[values < weight][-1:]
        return "moves" + "".join(f" with a chance of {min(1.0, update / (v - weight)):.3g}" for v in toward)
    return "lost" if landing == weight else f"becomes {landing:.7g}"
