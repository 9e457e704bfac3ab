"""Who computes, who waits? One row a worker, its latest steps as bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab import expected
from gdlab.views import style

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace

QUESTION = "Who computes, who waits?"
NOTHING = "No step has been finished yet."
MAX_ROWS = 24
STEPS = 12
"""Steps that are drawn of each worker, on average; each has up to three bars."""
_COMPUTE, _WAIT, _COMMUNICATE, _DROPPED = range(4)
_EXPECTED = 4
_NAMES = ("compute", "wait", "communicate", "never applied")


def timeline(trace: Trace) -> go.Figure:
    """Draw the latest steps of each worker: compute, wait, communicate; dropped gradients are hatched.

    On top, as long as theory says that a round lasts on average (the time from one update to the next), where it does.
    """
    parameters = trace.path.shape[1] if trace.path.size else None
    fig = base(trace.experiment, trace.environment, parameters)
    rows = recent(trace.pushes, trace.experiment.workers)
    if not rows.size:
        return style.empty(fig, NOTHING)
    for bar, change in zip(fig.data, bars(rows, trace.experiment), strict=False):
        bar.update(change)
    update = expected.update_seconds(trace.experiment, str(trace.environment.get("clock")), parameters)
    if update:
        fig.data[_EXPECTED].update(ruler(rows, trace.experiment, update.value))
    fig.data[_DROPPED].showlegend = bool(len(fig.data[_DROPPED].x))
    fig.layout.xaxis.range = window(rows)
    return style.describe(fig, f"{QUESTION} {_shares(rows, trace.experiment)} {lasted(trace.pushes, update)}".strip())


def lasted(pushes: np.ndarray, update: expected.Expected | None) -> str:
    """Say how long it took from one update to the next on average, and how long theory says."""
    count, seconds = pushes["version"].max(initial=0), np.fmax.reduce(pushes["applied_s"], initial=0.0)
    if count <= 0 or not np.isfinite(seconds):
        return ""
    theory = f", in theory {update.value:.4g} s ({update.because})" if update else ""
    return f"From one update to the next it took {seconds / count:.4g} s on average{theory}."


def base(experiment: Experiment, environment: Mapping[str, Any], parameters: int | None = None) -> go.Figure:
    """Return the empty figure, one bar trace a kind of segment, and a line for theory's round where it is known."""
    rows = min(experiment.workers, MAX_ROWS)
    update = expected.update_seconds(experiment, str(environment.get("clock")), parameters)
    lines = [style.caption(environment)]
    if update:
        lines.append(f"Theory: {update.value:.4g} s from one update to the next on average; {update.because}.")
    if rows < experiment.workers:
        lines.append(f"The first {rows} of {experiment.workers} workers.")
    unit = "virtual seconds" if environment.get("clock") == "virtual" else "seconds"
    fig = style.figure(QUESTION, f"time in {unit} (latest finished steps)", "worker", *lines)
    colours = (style.BLUE, style.ORANGE, style.GREEN, style.PAPER)
    for kind, (name, colour) in enumerate(zip(_NAMES, colours, strict=True)):
        fig.add_bar(
            orientation="h", x=[], y=[], base=[], name=name, width=0.7, marker=dict(color=colour, line=dict(width=0)),
            hovertemplate="worker %{y}: " + name + " %{x:.4g} s", showlegend=kind != _DROPPED or _drops(experiment),
        )
    fig.data[_DROPPED].marker.update(
        line=dict(color=style.VERMILLION, width=1), pattern=dict(shape="/", fgcolor=style.VERMILLION, size=6)
    )
    if update:
        fig.add_scatter(
            x=[], y=[], mode="lines+markers", name=f"theory: mean {'round' if together(experiment) else 'update'}",
            line=dict(color=style.INK, width=2), marker=dict(symbol="line-ns-open", size=9, color=style.INK),
            hovertemplate=f"theory: {update.value:.4g} s from one update to the next on average; {update.because}"
                          "<extra></extra>",
        )
    axis = dict(range=[rows - 0.5, -0.95 if update else -0.5], dtick=1 if rows <= 12 else 4, zeroline=False)
    fig.layout.update(barmode="overlay", yaxis=axis)
    return fig


def _drops(experiment: Experiment) -> bool:
    return bool(getattr(experiment.strategy, "backups", 0))


def recent(pushes: np.ndarray, workers: int) -> np.ndarray:
    """Return the latest steps of all workers by start: those drawn, and the rest of their rounds."""
    rows = pushes[np.isfinite(pushes["start_s"]) & np.isfinite(_computed(pushes))]
    return rows[np.argsort(rows["start_s"], kind="stable")][-max(2 * STEPS * MAX_ROWS, min(3 * workers, 6000)) :]


def drawn(rows: np.ndarray) -> np.ndarray:
    """Return the indices of the latest steps of the workers that have a row, and of those that last into their time."""
    workers = min(int(rows["worker"].max(initial=0)) + 1, MAX_ROWS)
    steps = np.flatnonzero(rows["worker"] < MAX_ROWS)
    if not steps.size:
        return steps
    begin = rows["start_s"][steps[-STEPS * max(workers, 2) :][0]]
    return steps[(rows["start_s"][steps] >= begin) | (_end(rows[steps]) > begin)]


def window(rows: np.ndarray) -> list[float]:
    """Return the time span of the steps drawn, in seconds."""
    workers = min(int(rows["worker"].max(initial=0)) + 1, MAX_ROWS)
    rows = rows[drawn(rows)]
    if not rows.size:
        return [0.0, 1.0]
    first, last = float(rows["start_s"][-STEPS * max(workers, 2) :][0]), float(_end(rows).max())
    room = 0.01 * (last - first or 1.0)
    return [first - room, last + room]


def _end(rows: np.ndarray) -> np.ndarray:
    end = np.where(np.isfinite(rows["applied_s"]), rows["applied_s"], _computed(rows))
    return np.where(np.isfinite(rows["released_s"]), rows["released_s"], end)


def _computed(rows: np.ndarray) -> np.ndarray:
    """Return when each gradient was there, or when its computation was given up."""
    return np.where(np.isfinite(rows["computed_s"]), rows["computed_s"], rows["released_s"])


def segments(rows: np.ndarray, together: bool) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Split the steps drawn into segments: kind -> (start in s, length in s, worker).

    `together`: an update needs the gradients of a whole round, so the wait is until the last of them was computed and
    the rest is communication. Else a gradient travels until it is applied, and then its worker may be held back.
    """
    start, computed, end = rows["start_s"], _computed(rows), _end(rows)
    dropped = rows["version"] < 0
    if together:
        _, group = np.unique(rows["version"], return_inverse=True)
        last = np.full(group.max(initial=-1) + 1, -np.inf)
        np.maximum.at(last, group, computed)
        middle = np.minimum(np.maximum(last[group], computed), np.maximum(end, computed))
    else:
        middle = np.where(np.isfinite(rows["applied_s"]), np.minimum(rows["applied_s"], end), computed)
    before, after = (_WAIT, _COMMUNICATE) if together else (_COMMUNICATE, _WAIT)
    spans = {
        _COMPUTE: (start, computed, ~dropped),
        before: (computed, middle, ~dropped),
        after: (middle, end, ~dropped),
        _DROPPED: (start, end, dropped),
    }
    shown = np.zeros(rows.size, bool)
    shown[drawn(rows)] = True
    found = {}
    for kind, (begin, finish, keep) in spans.items():
        length = finish - begin
        keep = keep & shown & (length > 0.0)
        found[kind] = (begin[keep], length[keep], rows["worker"][keep])
    return found


def bars(rows: np.ndarray, experiment: Experiment) -> list[dict[str, Any]]:
    """Return base, x and y of each bar trace."""
    found = segments(rows, together(experiment))
    return [dict(base=found[kind][0], x=found[kind][1], y=found[kind][2].astype(np.float64)) for kind in range(4)]


def ruler(rows: np.ndarray, experiment: Experiment, seconds: float) -> dict[str, Any]:
    """Return x and y of a line of that many seconds above the rows, from where a round that is drawn begins."""
    shown = rows[drawn(rows)]
    shown = shown[shown["version"] > 0]
    if not shown.size:
        return dict(x=np.empty(0), y=np.empty(0))
    version = np.sort(shown["version"])[shown.size // 2]
    chosen = shown[shown["version"] == version]
    begin = float(np.nanmin(chosen["start_s"]) if together(experiment) else np.nanmax(chosen["applied_s"]))
    return dict(x=np.array([begin, begin + seconds]), y=np.array([-0.72, -0.72]))


def together(experiment: Experiment) -> bool:
    """Say whether an update waits for a round of gradients."""
    return type(experiment.strategy).__name__ in ("Sync", "LocalSGD")


def _shares(rows: np.ndarray, experiment: Experiment) -> str:
    sums = {kind: float(length.sum()) for kind, (_, length, _) in segments(rows, together(experiment)).items()}
    whole = sum(sums.values()) or 1.0
    words = [f"{_NAMES[kind]} {100 * sums[kind] / whole:.0f}%" for kind in range(4) if kind < _DROPPED or sums[kind]]
    return f"Of the workers' time in the latest steps: {', '.join(words)}."


class TimelineBars:
    """The timeline while a run goes on: only the latest steps are kept."""

    def __init__(self, experiment: Experiment, environment: Mapping[str, Any]) -> None:
        self._experiment, self._environment = experiment, environment
        self._rows: np.ndarray | None = None
        self._empty = True
        self._update = expected.update_seconds(experiment, str(environment.get("clock")))

    def figure(self) -> go.Figure:
        """Return the figure before the first step."""
        return style.empty(base(self._experiment, self._environment), NOTHING)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        if not (chunk.pushes.size or chunk.releases.size):
            return []
        held = chunk.pushes if self._rows is None else np.concatenate([self._rows, chunk.pushes])
        self._rows = recent(held, self._experiment.workers)
        self._release(chunk.releases)
        if not self._rows.size:
            return []
        ops: list[dict[str, Any]] = [
            {"op": "replace", "trace": i, **change} for i, change in enumerate(bars(self._rows, self._experiment))
        ]
        if self._update:
            line = ruler(self._rows, self._experiment, self._update.value)
            ops.append({"op": "replace", "trace": _EXPECTED, **line})
        layout: dict[str, Any] = style.filled() if self._empty else {"xaxis": {}}
        layout["xaxis"]["range"], self._empty = window(self._rows), False
        return [*ops, {"op": "relayout", "layout": layout}]

    def _release(self, releases: np.ndarray) -> None:
        """Enter when the workers of earlier pushes could go on."""
        if self._rows is None or not (releases.size and self._rows.size):
            return
        known = self._rows["worker"].astype(np.int64) << 40 | self._rows["step"]
        wanted = releases["worker"].astype(np.int64) << 40 | releases["step"]
        order = np.argsort(wanted, kind="stable")
        at = np.minimum(np.searchsorted(wanted, known, sorter=order), wanted.size - 1)
        hit = wanted[order[at]] == known
        self._rows["released_s"][hit] = releases["released_s"][order[at[hit]]]
