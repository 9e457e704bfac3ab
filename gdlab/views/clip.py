"""What does clipping do? The norms with the threshold and the scale applied, and the vectors before and after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from gdlab.clipping import apply_clip
from gdlab.views import style
from gdlab.views.downsample import line
from gdlab.views.formats import side_by_side
from gdlab.views.grad_norm import QUESTION as NORMS
from gdlab.views.grad_norm import grad_norm
from gdlab.views.trajectory import PATH, READS, trajectory, walks_alone

if TYPE_CHECKING:
    from gdlab.parts import Clip
    from gdlab.trace import Trace

QUESTION = "What does clipping do to the gradients?"
VECTORS = "Where does the clipped gradient lead?"
NO_VECTORS = "No gradient of two parameters has been sampled."


def clip(*traces: Trace) -> go.Figure:
    """Draw the gradients' norms with the threshold, and below the scale applied; several runs: a panel each.

    There the loss is drawn, and as points the share of the norm that clipping takes away (0 where it lengthens).
    """
    if len(traces) != 1:
        return side_by_side(traces, QUESTION, lambda rows: 1.0 - np.minimum(1.0, rows["clip_scale"]),
                            "norm clipped away")
    (trace,) = traces
    fig, rows = grad_norm(trace), trace.pushes
    x, y = line(rows["read_version"], rows["clip_scale"])
    fig.add_scatter(x=x, y=y, mode="markers", name="scale applied", yaxis="y3", showlegend=False,
                    marker=dict(color=style.GREEN, size=4), hovertemplate="times %{y:.3g} at version %{x}")
    fig.layout.update(
        height=520, yaxis=dict(domain=[0.36, 1]), yaxis2=dict(domain=[0.36, 1]), xaxis=dict(anchor="y3"),
        yaxis3=dict(domain=[0, 0.28], range=[-0.04, 1.06], title="scale applied"),
    )
    fig.layout.title.text = QUESTION
    return style.describe(fig, fig.layout.meta["description"].replace(NORMS, QUESTION))


def clip_vectors(trace: Trace, version: int | None = None) -> go.Figure:
    """Draw, over the loss of two parameters, the step that each gradient asks for before and after clipping.

    A step is -learning rate * gradient, from the parameters of the sampled version nearest to `version` (None: the one
    with the longest gradient). Thick: the mean of the workers without clipping, and as it was clipped.
    """
    fig, clipping, lr = trajectory(trace), trace.experiment.clip, trace.experiment.optimizer.lr
    fig.layout.update(annotations=(), **style.headline(VECTORS, style.caption(trace.environment)))
    fig.data, found = fig.data[:READS], gradients(trace, version)
    if found is None:
        return style.empty(style.describe(fig, f"{VECTORS} {NO_VECTORS}"), NO_VECTORS)
    read, at, before, scales = found
    each = clipping if trace.experiment.clips_at == "worker" else None
    after = np.array([clipped(*pair, each, at) for pair in zip(before, scales, strict=True)])
    means = before.mean(axis=0), clipped(after.mean(axis=0), scales[0], None if each else clipping, at)
    fig.data[PATH].line.update(width=1.2, color=style.MUTED)
    arrows = ((before, "before", style.ORANGE, 1.5), (after, "after", style.BLUE, 1.5),
              (means[:1], "mean before", style.VERMILLION, 3.5), (means[1:], "mean after", style.INK, 3.5))
    for steps, name, colour, width in arrows[: 4 if len(before) > 1 else 2]:
        ends = np.array([[at, at - lr * step, [np.nan, np.nan]] for step in steps]).reshape(-1, 2)
        fig.add_scatter(
            x=ends[:, 0], y=ends[:, 1], mode="lines+markers", name=name, line=dict(color=colour, width=width),
            hovertemplate=name + " (%{x:.4g}, %{y:.4g})<extra></extra>", marker=dict(
                symbol="arrow", angleref="previous", color=colour, opacity=1, size=[0, 8 + 2 * width, 0] * len(steps)),
        )
    (a, b), (c, d) = means
    turn = np.degrees(abs(np.arctan2(a * d - b * c, a * c + b * d)))
    note = f"{np.hypot(a, b):.3g} long before, {np.hypot(c, d):.3g} after, turned by {round(turn, 3):g}°"
    fig.layout.update(style.headline(VECTORS, style.caption(trace.environment), f"Mean gradient of {len(before)} at "
                                     f"version {read}: {note}. Drawn: times the learning rate."))
    fig.layout.update(height=460, legend_title_text="")
    return style.describe(fig, f"{VECTORS} The mean gradient at version {read} is {note}.")


def gradients(trace: Trace, version: int | None) -> tuple[int, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return a version, its parameters, the (workers, 2) gradients sampled there and their loss scales; or None."""
    rows, pushes, versions, path = trace.exponents, trace.pushes, trace.path_versions, trace.path
    if path.shape[1:] != (2,) or not len(rows) or walks_alone(trace.experiment):  # then a push is no gradient
        return None
    pushes = pushes[np.isin(pushes["step"], rows["step"])]
    reads = {(worker, step): read for worker, step, read in pushes[["worker", "step", "read_version"]].tolist()}
    read = np.array([reads.get(key, -1) for key in rows[["worker", "step"]].tolist()])
    with np.errstate(all="ignore"):  # what overflowed is left out below
        vectors = rows["first"] / rows["loss_scale"][:, None]
    good = np.isin(read, versions[: len(path)]) & np.isfinite(vectors).all(axis=1)
    if not good.any():
        return None
    away = -np.linalg.norm(vectors, axis=1) if version is None else np.abs(read - version)
    chosen = int(read[np.argmin(np.where(good, away, np.inf))])
    here = good & (read == chosen)
    return chosen, path[np.searchsorted(versions, chosen)].astype(np.float64), vectors[here], rows["loss_scale"][here]


def clipped(gradient: np.ndarray, loss_scale: float, rule: Clip | None, at: np.ndarray) -> np.ndarray:
    """Return a gradient after the run's clipping, also where that was done before unscaling."""
    scale = loss_scale if rule is not None and rule.before_unscale else 1.0
    return apply_clip(gradient * scale, rule, at)[0] / scale
