"""How fast does the loss fall? The full objective as lines, the workers' mini-batch losses as light points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from gdlab import expected
from gdlab.views import style
from gdlab.views.downsample import MAX_POINTS, Thinned, every, line
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.experiment import Experiment
    from gdlab.trace import Trace

Clock = Literal["updates", "seconds"]
_QUESTION = {"updates": "How fast does the loss fall per update?", "seconds": "How fast does the loss fall in time?"}
RUN_COLOURS = (style.BLUE, style.VERMILLION, style.GREEN, style.ORANGE, style.PURPLE, style.SKY)
NOTHING = "No loss has been evaluated yet."
ZEROS = "Losses of exactly 0 lie below every logarithmic axis."


def loss(*traces: Trace, clock: Clock = "updates") -> go.Figure:
    """Draw the full objective of one or more runs against updates or seconds; runs are named by what differs.

    Of noisy quadratics also the floor at which theory says that they settle, where it does.
    """
    if clock not in _QUESTION:
        raise ValueError(f'clock = {clock!r} is not known: it must be "updates" or "seconds".')
    environments = [trace.environment for trace in traces]
    names = what_differs([trace.experiment for trace in traces], [str(e.get("clock")) for e in environments])
    fig = base(clock, environments or [{}], names or [""])
    notes, sentences, drawn, heights = [], [], 0, [np.empty(0)]
    for index, (trace, name) in enumerate(zip(traces, names, strict=True)):
        pushes, losses = trace.pushes, np.asarray(trace.losses, np.float64)
        x = np.asarray(trace.path_versions if clock == "updates" else trace.path_seconds, np.float64)
        rows = min(losses.size, x.size)  # a run that goes on may have grown between the two looks
        versions, losses, x = np.asarray(trace.path_versions)[:rows], losses[:rows], x[:rows]
        x_line, y_line = line(x, losses)
        x_points, y_points = batch_points(pushes, clock)
        keep = every(x_points.size, MAX_POINTS // len(traces))
        fig.data[2 * index].update(x=x_points[keep], y=y_points[keep])
        fig.data[2 * index + 1].update(x=x_line, y=y_line)
        drawn += x_line.size + x_points.size
        heights += [y_line[np.isfinite(y_line)], y_points]
        notes.append(not_finite(pushes, versions, losses, name))
        sentences += [_sentence(name, versions, losses)]
    every_loss = np.concatenate(heights)
    above = every_loss[every_loss > 0.0]
    fig.layout.yaxis.update(style.log_axis(above))
    if every_loss.min(initial=np.inf) < 0.0 or not above.size:
        fig.layout.yaxis.type = "linear"
    elif above.size < every_loss.size:
        notes.append(ZEROS)
    fig.layout.update(style.remark(fig, *notes))
    style.describe(fig, " ".join([_QUESTION[clock], *sentences]))
    fig.layout.annotations = _target(fig, traces) + floors(fig, [t.experiment for t in traces], environments, names)
    return fig if drawn else style.empty(fig, NOTHING)


def base(clock: Clock, environments: Sequence[Mapping[str, Any]], names: Sequence[str]) -> go.Figure:
    """Return the empty figure: for each run its mini-batch points and then its line."""
    clocks = {environment.get("clock") for environment in environments}
    seconds = "time in virtual seconds" if clocks == {"virtual"} else "time in seconds"
    x = "updates of the shared parameters" if clock == "updates" else seconds
    fig = style.figure(_QUESTION[clock], x, "loss", *style.captions(names, environments))
    alone = len(names) == 1
    for index, name in enumerate(names):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        dash = style.DASHES[index // len(RUN_COLOURS) % len(style.DASHES)]
        fig.add_scatter(
            mode="markers", marker=dict(size=4, color=style.SKY if alone else colour, opacity=0.5 if alone else 0.2),
            name="a worker's mini-batch", showlegend=alone, legendgroup=str(index), hoverinfo="skip", x=[], y=[],
        )
        fig.add_scatter(
            mode="lines", line=dict(color=colour, width=2.2, dash=dash), name=name or "full objective",
            legendgroup=str(index), showlegend=True, x=[], y=[], hovertemplate="%{y:.4g} at %{x:.4g}",
        )
    fig.layout.yaxis.update(style.log_axis())
    return fig


def batch_points(pushes: np.ndarray, clock: Clock) -> tuple[np.ndarray, np.ndarray]:
    """Return (x, y) of the finite mini-batch losses, each where its parameters were read."""
    x = pushes["read_version" if clock == "updates" else "start_s"].astype(np.float64)
    y = pushes["loss"].astype(np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def not_finite(pushes: np.ndarray, versions: np.ndarray, losses: np.ndarray, name: str = "") -> str:
    """Say from which update on the loss was not finite, or return an empty text."""
    whole = np.asarray(versions)[np.isinf(losses)]
    computed = np.isfinite(pushes["computed_s"])  # else it was cancelled: it has no loss
    batch = pushes["read_version"][~np.isfinite(pushes["loss"]) & computed]
    text = ""
    if whole.size:
        text = f"The loss is not finite from update {whole.min()} on."
    elif batch.size:
        text = f"{batch.size} mini-batch loss{'es' * (batch.size > 1)} not finite, the first at update {batch.min()}."
    return f"{name}: {text[0].lower()}{text[1:]}" if name and text else text


def _target(fig: go.Figure, traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Draw the loss that ends the run; returns its label."""
    targets = {trace.experiment.target_loss for trace in traces}
    target = targets.pop() if len(targets) == 1 else None
    log = fig.layout.yaxis.type == "log"
    if target is None or (log and target <= 0.0):
        return []
    fig.add_shape(type="line", xref="paper", x0=0, x1=1, y0=target, y1=target, line=dict(color=style.MUTED, dash="dot"))
    return [dict(text="target", showarrow=False, xref="paper", x=1, y=np.log10(target) if log else target,
                 xanchor="right", yanchor="bottom", font=dict(size=11, color=style.MUTED))]


def floors(fig: go.Figure, experiments: Sequence[Experiment], environments: Sequence[Mapping[str, Any]],
           names: Sequence[str]) -> list[dict[str, Any]]:
    """Draw where each run settles in theory, as a dotted line in its colour; returns the label."""
    log, found = fig.layout.yaxis.type == "log", []
    for index, (experiment, environment, name) in enumerate(zip(experiments, environments, names, strict=True)):
        floor = expected.noise_floor(experiment, str(environment.get("clock")))
        if floor is not None:
            found.append((floor, f"{name}: {floor.value:.3g}" if name else f"{floor.value:.3g}"))
            line = dict(color=RUN_COLOURS[index % len(RUN_COLOURS)], dash="dot", width=1.5)
            fig.add_shape(type="line", xref="paper", x0=0, x1=1, y0=floor.value, y1=floor.value, line=line)
    if not found:
        return []
    why = "stationary mean of the objective, " + "; ".join(dict.fromkeys(floor.because for floor, _ in found))
    description, each = fig.layout.meta["description"], "; ".join(text for _, text in found)
    fig.layout.update(style.remark(fig, f"Noise floor (dotted): {why}."))
    style.describe(fig, f"{description} In theory the noise floor is {each} ({why}).")
    top = max(floor.value for floor, _ in found)
    return [dict(text=f"noise floor {top:.3g}" if len({f.value for f, _ in found}) == 1 else "noise floors",
                 showarrow=False, xref="paper", x=0.01, xanchor="left", y=np.log10(top) if log else top, opacity=0.85,
                 yanchor="bottom", bgcolor=style.PAPER, font=dict(size=11, color=style.INK),
                 hovertext="<br>".join(["theory:", *(text for _, text in found), why]))]


def _sentence(name: str, versions: np.ndarray, losses: np.ndarray) -> str:
    known = np.flatnonzero(~np.isnan(losses))
    if not known.size:
        return f"{name + ': n' if name else 'N'}o loss has been evaluated."
    first, last = known[0], known[-1]
    return (f"{name + ': f' if name else 'F'}rom {losses[first]:.4g} at update {versions[first]} "
            f"to {losses[last]:.4g} at update {versions[last]}.")


class LossLines:
    """The loss while a run goes on: one line and its mini-batch points, both thinned."""

    def __init__(self, environment: Mapping[str, Any], clock: Clock = "updates",
                 experiment: Experiment | None = None) -> None:
        self._clock = clock
        self._line, self._points = Thinned(limit=1000), Thinned(limit=800)
        self._times = Thinned(limit=4000)
        self._newest = 0.0  # the newest version whose time is known
        self._waiting = np.empty((2, 0))  # losses of later versions
        self._latest, self._log, self._empty, self._bad = -np.inf, True, True, ""
        self._base = base(clock, [environment], [""])
        self._floors = floors(self._base, [experiment], [environment], [""]) if experiment else []
        self._base.layout.annotations = self._floors
        self._span, self._labels = (np.inf, -np.inf), self._base.layout.yaxis.nticks

    def figure(self) -> go.Figure:
        """Return the figure before the first update."""
        return style.empty(go.Figure(self._base), NOTHING)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        ops: list[dict[str, Any]] = []
        x, y = batch_points(chunk.pushes, self._clock)
        heights = [y]
        ops += extend(0, *self._points.add(x, y))
        if self._clock == "seconds":
            applied = chunk.pushes[chunk.pushes["version"] > 0]
            self._times.add(applied["version"], applied["applied_s"])
            self._newest = max(self._newest, float(applied["version"].max(initial=0)))
        versions, losses = np.asarray(chunk.losses["version"], np.float64), np.asarray(chunk.losses["loss"], np.float64)
        bad = not_finite(chunk.pushes, chunk.losses["version"], losses)
        if self._clock == "seconds":
            versions, losses = self._with_time(versions, losses)
        at = self._seconds(versions) if self._clock == "seconds" else versions
        keep = np.isfinite(losses) & np.isfinite(at)
        at, losses = at[keep], losses[keep]
        heights += [losses]
        if at.size:
            in_order = at[0] >= self._latest and bool(np.all(np.diff(at) >= 0.0))
            self._latest = max(self._latest, at.max())
            whole, columns = self._line.add(at, losses)
            if not in_order:
                self._line.kept = self._line.kept[:, np.argsort(self._line.kept[0], kind="stable")]
                whole, columns = True, self._line.kept
            ops += extend(1, whole, columns)
        return ops + self._layout(np.concatenate(heights), bad)

    def _with_time(self, versions: np.ndarray, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Hold back the losses of versions whose time is not known yet."""
        whole = np.concatenate([self._waiting, np.stack([versions, losses])], axis=1)
        known = whole[0] <= self._newest
        self._waiting = whole[:, ~known]
        return whole[0, known], whole[1, known]

    def _seconds(self, versions: np.ndarray) -> np.ndarray:
        """Interpolate the time of each version between those that are kept."""
        order = np.lexsort(self._times.kept[::-1])  # of several ranks' records of one version the latest comes last
        known, seconds = np.append(0.0, self._times.kept[0][order]), np.append(0.0, self._times.kept[1][order])
        return np.interp(versions, known, np.maximum.accumulate(seconds))

    def _layout(self, heights: np.ndarray, bad: str) -> list[dict[str, Any]]:
        changes: dict[str, Any] = {}
        lowest = heights[heights != 0.0].min(initial=np.inf)  # a logarithmic axis leaves 0 out
        self._span = min(self._span[0], lowest), max(self._span[1], heights.max(initial=-np.inf))
        if self._empty and heights.size:
            changes.update(style.filled(self._floors))
        if self._log and lowest < 0.0:
            self._log = False
            changes["yaxis"] = {"type": "linear", "showticklabels": True}
        labels = style.log_axis(self._span)["nticks"]
        if self._log and labels != self._labels:
            self._labels = labels
            changes["yaxis"] = {**changes.get("yaxis", {}), "nticks": labels}
        if bad and not self._bad:
            self._bad = bad
            changes.update(style.remark(self._base, bad))
        self._empty &= not heights.size
        return [{"op": "relayout", "layout": changes}] if changes else []


def extend(trace: int, whole: bool, columns: np.ndarray) -> list[dict[str, Any]]:
    """Return the operation that brings one line of a chart up to date, or none where nothing is new."""
    if not columns.shape[1]:
        return []
    return [{"op": "replace" if whole else "extend", "trace": trace, "x": columns[0], "y": columns[1]}]
