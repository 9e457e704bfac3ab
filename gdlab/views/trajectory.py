"""Where does the descent go? The shared parameters' path over the loss surface, and what each worker read of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import MAX_POINTS, every

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace

QUESTION = "Where does the descent go?"
NOTHING = "The path has not begun yet."
NO_PLANE = "The plane of the path's two main directions comes with the first surface."
SURFACE, PATH, START, NOW, READS = range(5)
MAX_READS = 400
"""Points of one worker's line."""
_DECADES = 6.0


def trajectory(trace: Trace) -> go.Figure:
    """Draw the path of the shared parameters over the loss, and a line through the points that each worker read.

    Under local SGD the thin lines are the workers' own steps between two averagings. Two parameters: their own plane.
    More: the plane of the path's first two principal components. One: the parameter against the update.
    """
    experiment, path, versions = trace.experiment, trace.path, np.asarray(trace.path_versions)
    rows = min(len(path), versions.size)
    parameters, surface = path.shape[1] if path.ndim == 2 else 0, trace.surface
    fig = base(experiment, trace.environment, parameters, surface)
    plane = Plane(parameters, surface)
    if not rows or not plane.known:
        return style.empty(fig, NO_PLANE if rows else NOTHING)
    fig.data[SURFACE].update(contours_of(surface))
    fig.layout.update(ranges_of(surface))
    keep = every(rows)
    x, y = plane.project(path[keep], versions[keep])
    fig.data[PATH].update(x=x, y=y)
    fig.data[START].update(x=x[:1], y=y[:1])
    fig.data[NOW].update(x=x[-1:], y=y[-1:])
    pushes, alone = trace.pushes, trace.local_path if walks_alone(experiment) else {}
    for worker, line in enumerate(fig.data[READS:]):
        if len(alone.get(worker, ())):
            steps = alone[worker][every(len(alone[worker]), MAX_POINTS)]
            x_own, y_own = plane.project(steps["x"], steps["version"])
            line.update(x=x_own, y=y_own)
            continue
        read = reads_of(pushes, worker)
        at = np.searchsorted(versions[:rows], read)
        at = at[(at < rows) & (versions[np.minimum(at, rows - 1)] == read)]
        at = at[every(at.size, MAX_READS)]
        x_read, y_read = plane.project(path[at], versions[at])
        line.update(x=x_read, y=y_read)
    return style.describe(fig, _sentence(trace, x, y, versions[:rows]))


def base(
    experiment: Experiment, environment: Mapping[str, Any], parameters: int, surface: Mapping[str, Any] | None
) -> go.Figure:
    """Return the empty figure: surface, path, start, current point, then a line a worker."""
    titles = axis_titles(parameters, surface)
    thin = "workers' own steps" if walks_alone(experiment) else "each worker's reads"
    captions = [style.caption(environment), f"Thick: shared parameters, ○ to ★. Thin: {thin}."]
    if parameters > 2:
        captions.append(f"The plane of the path's two main directions, of {parameters:,} parameters.")
    if experiment.workers > style.MAX_WORKERS:
        captions.append(f"Drawn: {style.MAX_WORKERS} of {experiment.workers} workers.")
    fig = style.figure(QUESTION, *titles, *captions, height=style.HEIGHT)
    fig.add_contour(
        x=[], y=[], z=[], autocolorscale=False, colorscale=[[i / 4, colour] for i, colour in enumerate(style.SURFACE)],
        ncontours=16, line=dict(width=0.5, color=style.MUTED), contours=dict(coloring="fill"), hoverinfo="skip",
        name="loss", connectgaps=False, visible=parameters != 1,
        colorbar=dict(
            title=dict(text="loss", font_size=11), thickness=10, tickfont_size=10, outlinewidth=0, x=1.01, xpad=4,
        ),
    )
    where = "(%{x:.4g}, %{y:.4g})"
    fig.add_scatter(
        mode="lines", x=[], y=[], line=dict(color=style.INK, width=3.5), name="shared", showlegend=False,
        hovertemplate="shared " + where + "<extra></extra>",
    )
    fig.add_scatter(
        mode="markers", x=[], y=[], name="start", showlegend=False, hovertemplate="start " + where + "<extra></extra>",
        marker=dict(symbol="circle-open", size=10, color=style.INK, line=dict(width=2, color=style.INK)),
    )
    fig.add_scatter(
        mode="markers", x=[], y=[], name="now", showlegend=False, hovertemplate="now " + where + "<extra></extra>",
        marker=dict(symbol="star", size=14, color=style.INK, line=dict(width=1, color=style.PAPER)),
    )
    for worker in range(min(experiment.workers, style.MAX_WORKERS)):
        fig.add_scatter(
            mode="lines+markers", x=[], y=[], name=str(worker), line=style.worker_line(worker, width=1.1),
            marker=dict(size=4, color=style.worker_colour(worker)), opacity=0.85,
            hovertemplate=f"worker {worker} read " + where + "<extra></extra>", showlegend=True,
        )
    fig.layout.legend = style.workers_legend()
    return fig


def walks_alone(experiment: Experiment) -> bool:
    """Say whether workers take steps of their own between two averagings."""
    return type(experiment.strategy).__name__ == "LocalSGD"


def axis_titles(parameters: int, surface: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the words at the axes; for a plane they say how much of the path's variance each direction holds."""
    if parameters == 1:
        return "updates of the shared parameters", "parameter"
    if parameters in (0, 2):
        return "first parameter", "second parameter"
    share = np.asarray((surface or {}).get("explained", ()), np.float64)
    tails = (" of the variance", "")
    words = [f" ({100 * part:.0f}%{tail})" for part, tail in zip(share, tails, strict=False)] + ["", ""]
    return f"first direction{words[0]}", f"second direction{words[1]}"


class Plane:
    """Project parameters on what is drawn: themselves, a plane, or (one parameter) the update and the value."""

    def __init__(self, parameters: int, surface: Mapping[str, Any] | None) -> None:
        self._parameters = parameters
        self._origin = self._basis = None
        if parameters > 2 and surface is not None and "basis" in surface:
            self._origin, self._basis = np.asarray(surface["origin"]), np.asarray(surface["basis"])

    @property
    def known(self) -> bool:
        """Whether points can be drawn yet."""
        return 0 < self._parameters <= 2 or self._basis is not None

    def project(self, rows: np.ndarray, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of parameters of the shape (versions, parameters)."""
        rows = np.asarray(rows, np.float64)
        if self._parameters == 1:
            return np.asarray(versions, np.float64), rows[:, 0]
        with np.errstate(all="ignore"):  # a run that diverges leaves numbers behind that are not finite
            points = rows if self._basis is None else (rows - self._origin) @ self._basis.T
        return np.ascontiguousarray(points[:, 0]), np.ascontiguousarray(points[:, 1])


def reads_of(pushes: np.ndarray, worker: int) -> np.ndarray:
    """Return the versions that one worker read, in the order in which it read them."""
    return np.sort(pushes["read_version"][pushes["worker"] == worker], kind="stable")


def contours_of(surface: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return x, y, z and the colour bar of the surface; z is spaced by the logarithm of the loss."""
    if surface is None or np.size(surface["loss"]) == 0:
        return {}
    loss = np.asarray(surface["loss"], np.float64)
    z, ticks, words = levels(loss)
    return dict(
        x=np.asarray(surface["x"], np.float64), y=np.asarray(surface["y"], np.float64), z=z.astype(np.float32),
        colorbar=dict(tickvals=ticks, ticktext=words),
    )


def ranges_of(surface: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the axes' ranges: the surface's own, so that a path that diverges leaves the picture as it is."""
    if surface is None or np.size(surface["loss"]) == 0:
        return {}
    return {f"{axis}axis": {"range": [float(np.min(surface[axis])), float(np.max(surface[axis]))]} for axis in "xy"}


def levels(loss: np.ndarray) -> tuple[np.ndarray, list[float], list[str]]:
    """Return (z, tick places, tick words): log10 of the loss, or of its height above the lowest if not all positive.

    At most six decades below the highest are told apart; what is not finite is left blank.
    """
    finite = loss[np.isfinite(loss)]
    if not finite.size:
        return np.full(loss.shape, np.nan), [], []
    low, high = float(finite.min()), float(finite.max())
    shift = 0.0
    if low <= 0.0:  # z grows from the lowest point on, a hundredth of the range being the first level
        shift = low - max(high - low, 1e-300) / 100.0
    height = np.where(np.isfinite(loss), loss - shift, np.nan)
    top = np.log10(max(high - shift, 1e-300))
    floor = max(10.0 ** (top - _DECADES), 1e-300)
    z = np.log10(np.maximum(height, floor))
    bottom = float(np.nanmin(z))
    places = np.linspace(bottom, top, 5) if top > bottom else np.array([bottom])
    return z, [float(place) for place in places], [f"{float(f'{10.0**place + shift:.3g}'):g}" for place in places]


def _sentence(trace: Trace, x: np.ndarray, y: np.ndarray, versions: np.ndarray) -> str:
    return (
        f"{QUESTION} The shared parameters went from ({x[0]:.3g}, {y[0]:.3g}) to ({x[-1]:.3g}, {y[-1]:.3g}) "
        f"in {int(versions[-1])} updates of {trace.experiment.workers} worker{'s' * (trace.experiment.workers != 1)}."
    )
