"""The views while a run goes on: each takes what is new and says how its chart changes, at a bounded cost a frame.

An operation is a dict: {"op": "extend" | "replace", "trace": i, "x": array, "y": array, ...} appends to or sets
attributes of a trace, {"op": "relayout", "layout": {...}} merges into the layout, {"op": "figure", "figure": fig}
starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.downsample import Thinned
from gdlab.views.grad_norm import GradNormPoints
from gdlab.views.loss import LossLines
from gdlab.views.redrawn import REDRAWN, Redrawn
from gdlab.views.staleness import StalenessBars
from gdlab.views.timeline import TimelineBars
from gdlab.views.trajectory import (
    NO_PLANE,
    NOTHING,
    NOW,
    PATH,
    READS,
    START,
    SURFACE,
    Plane,
    axis_titles,
    base,
    contours_of,
    ranges_of,
    reads_of,
    walks_alone,
)

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace


class Live(Protocol):
    """One view of a run that goes on."""

    def figure(self) -> go.Figure:
        """Return the figure before anything has happened."""

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""


def make(names: Iterable[str], experiment: Experiment, environment: Mapping[str, Any],
         traces: Sequence[Trace] = ()) -> dict[str, Live]:
    """Return the live form of each named view; raises ValueError for a name that is no view.

    `traces`: what goes on, for the views that are drawn anew; several where runs go on side by side.
    """
    makers: dict[str, Any] = {
        "trajectory": lambda: TrajectoryLines(experiment, environment),
        "loss": lambda: LossLines(environment, experiment=experiment),
        "loss_seconds": lambda: LossLines(environment, "seconds", experiment),
        "timeline": lambda: TimelineBars(experiment, environment),
        "staleness": lambda: StalenessBars(experiment, environment),
        "grad_norm": lambda: GradNormPoints(experiment, environment),
        **{name: partial(Redrawn, name, traces) for name in REDRAWN},
    }
    names = list(names)
    for name in names:
        if name not in makers:
            raise ValueError(f"{name!r} is no view: there are {', '.join(makers)}.")
    return {name: makers[name]() for name in names}


class TrajectoryLines:
    """The path over the loss while a run goes on; of each worker's reads the latest ones are drawn."""

    _TAIL = 24
    _HELD_BYTES = 8e6
    _FARTHEST = 10.0  # widths of the surface

    def __init__(self, experiment: Experiment, environment: Mapping[str, Any]) -> None:
        self._experiment, self._environment = experiment, environment
        self._parameters, self._surface = 0, None
        self._plane = Plane(0, None)
        self._versions = Thinned(columns=1, limit=1000)
        self._rows: dict[int, np.ndarray] = {}  # parameters of the versions that may still be drawn
        self._recent = np.empty(0, np.int64)
        self._reads: dict[int, np.ndarray] = {}
        self._box: dict[str, list[float]] = {}  # the surface's axes
        self._ranges: dict[str, list[float]] = {}  # and the chart's

    def figure(self) -> go.Figure:
        """Return the figure before the first update."""
        return style.empty(self._base(), NOTHING)

    def _base(self) -> go.Figure:
        return base(self._experiment, self._environment, self._parameters or 2, self._surface)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        ops: list[dict[str, Any]] = []
        versions = np.asarray(chunk.path_versions, np.int64)
        if versions.size and not self._parameters:
            self._parameters = chunk.path.shape[1]
            self._versions.limit = self._room(1000)
            waits = self._parameters > 2 and not self._plane.known
            ops.append({"op": "figure", "figure": style.empty(self._base(), NO_PLANE) if waits else self._base()})
        whole, new = self._versions.add(versions)
        self._hold(versions, chunk.path)
        moved = self._read(chunk.pushes)
        if chunk.surface is not None or (versions.size and not self._plane.known):
            self._surface = chunk.surface if chunk.surface is not None else self._surface
            self._plane = Plane(self._parameters, self._surface)
            if not self._plane.known:
                return ops
            whole, new, moved = True, self._versions.kept, list(self._reads)
            ops += self._redraw()
        if not self._plane.known or not self._rows:
            return ops
        x, y = self._points(new[0])
        if x.size:
            ops.append({"op": "replace" if whole else "extend", "trace": PATH, "x": x, "y": y})
        x, y = self._points(self._recent[-1:])
        ops.append({"op": "replace", "trace": NOW, "x": x, "y": y})
        ops += self._widened(x, y)
        for worker in moved:
            x, y = self._points(self._reads[worker])
            ops.append({"op": "replace", "trace": READS + worker, "x": x, "y": y})
        return ops if versions.size or chunk.pushes.size or chunk.surface is not None else []

    def _room(self, most: int) -> int:
        return int(np.clip(self._HELD_BYTES / (4 * max(self._parameters, 1)), 16, most))

    def _hold(self, versions: np.ndarray, path: np.ndarray) -> None:
        """Keep the parameters of the thinned path and of the latest versions, and of no other."""
        if not versions.size:
            return
        self._recent = np.concatenate([self._recent, versions])[-self._room(512) :]
        thinned = np.append(self._versions.kept[0], self._versions.pending).astype(np.int64)
        wanted = {0, *thinned.tolist(), *self._recent.tolist()}
        self._rows = {version: row for version, row in self._rows.items() if version in wanted}
        for index, version in enumerate(versions.tolist()):
            if version in wanted:
                self._rows[version] = np.array(path[index], np.float64 if self._parameters <= 2 else np.float32)

    def _read(self, pushes: np.ndarray) -> list[int]:
        moved = []
        if walks_alone(self._experiment):
            return moved  # the thin lines are then the workers' own steps, which are drawn at the end
        for worker in range(min(self._experiment.workers, style.MAX_WORKERS)):
            read = reads_of(pushes, worker)[-self._TAIL :]
            if read.size:
                known = self._reads.get(worker, np.empty(0, np.int64))
                self._reads[worker] = np.concatenate([known, read])[-self._TAIL :]
                moved.append(worker)
        return moved

    def _points(self, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        known = [version for version in np.asarray(versions, np.int64).tolist() if version in self._rows]
        if not known:
            return np.empty(0), np.empty(0)
        return self._plane.project(np.stack([self._rows[version] for version in known]), np.array(known))

    def _widened(self, x: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
        """Widen the axes to the newest point, which is ahead of the surface, but not to one that flies away."""
        changed: dict[str, Any] = {}
        for axis, value in (("xaxis", x), ("yaxis", y)):
            if axis not in self._ranges or not value.size or not np.isfinite(value[0]):
                continue
            (low, high), (first, last) = self._ranges[axis], self._box[axis]
            wide, room = self._FARTHEST * (last - first), 0.25 * (high - low)
            if first - wide < value[0] < low:
                self._ranges[axis] = [float(value[0]) - room, high]
            elif high < value[0] < last + wide:
                self._ranges[axis] = [low, float(value[0]) + room]
            else:
                continue
            changed[axis] = {"range": self._ranges[axis]}
        return [{"op": "relayout", "layout": changed}] if changed else []

    def _redraw(self) -> list[dict[str, Any]]:
        """Return what a new surface, or the first row of the path, changes beside the lines."""
        x, y = self._points(np.array([0]))
        titles = axis_titles(self._parameters, self._surface)
        layout, ranges = style.filled(), ranges_of(self._surface)
        self._box = {axis: ranges[axis]["range"] for axis in ranges}
        self._ranges = dict(self._box)
        for axis, title in zip(("xaxis", "yaxis"), titles, strict=True):
            layout[axis] |= {"title": {"text": title}, **ranges.get(axis, {})}
        ops: list[dict[str, Any]] = [
            {"op": "relayout", "layout": layout},
            {"op": "replace", "trace": START, "x": x, "y": y},
        ]
        contours = contours_of(self._surface)
        return [*ops, {"op": "replace", "trace": SURFACE, **contours}] if contours else ops
