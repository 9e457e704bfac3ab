"""How long does a round last with so many workers? Runs as points with their standard errors, theory as a curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from gdlab import expected
from gdlab.experiment import Experiment
from gdlab.views import style
from gdlab.views.loss import RUN_COLOURS
from gdlab.views.naming import what_differs

if TYPE_CHECKING:
    from gdlab.trace import Trace

QUESTION = "How long does a round last?"
NOTHING = "No update has been applied yet."
_TIMING = ("strategy", "compute_time", "network", "precision")
_BATCHES = 20


def round_time(*traces: Trace) -> go.Figure:
    """Draw the mean time from one update of the shared parameters to the next against the number of workers.

    Runs that differ in nothing else that takes time share a colour and theory's curve for equal workers; unequal ones
    have a cross each. Circles are measured, diamonds simulated (a virtual run of the same experiment is its twin).
    Bars: the standard error, from means of 20 stretches of the run, since neighbouring rounds may be alike.
    """
    environments = [trace.environment for trace in traces]
    fig = style.figure(QUESTION, "workers", "seconds per update (mean)", *_captions(environments))
    alike: dict[Experiment, list[Trace]] = {}
    for trace in traces:
        alike.setdefault(timing(trace.experiment), []).append(trace)
    names = what_differs(list(alike))
    most = max(4, math.ceil(1.25 * max((trace.experiment.workers for trace in traces), default=1)))
    sentences, assumed, drawn = [], {}, 0
    for index, (group, name) in enumerate(zip(alike.values(), names, strict=True)):
        colour = RUN_COLOURS[index % len(RUN_COLOURS)]
        for virtual, symbol, kind in ((False, "circle", "measured"), (True, "diamond-open", "simulated")):
            chosen = [trace for trace in group if (trace.environment.get("clock") == "virtual") == virtual]
            points = [point for trace in chosen if (point := _point(trace))]
            if not points:
                continue
            drawn += len(points)
            x, y, error, told = map(list, zip(*points, strict=True))
            fig.add_scatter(
                x=x, y=y, error_y=dict(array=error, width=3, thickness=1.5), mode="markers", customdata=told,
                name=f"{name}, {kind}" if name else kind, legendgroup=str(index),
                marker=dict(color=colour, symbol=symbol, size=9, line=dict(width=2, color=colour)),
                hovertemplate="%{x} workers: %{y:.4g} s ± %{error_y.array:.2g} (standard error), %{customdata}"
                              "<extra></extra>",
            )
            whose = f"{name}: " if name else ""
            sentences += [f"{whose}{n} worker{'s' * (n > 1)} {kind} {s:.4g} s" for n, s in zip(x, y, strict=True)]
        unequal = [trace for trace in group if trace.experiment.speeds and len(set(trace.experiment.speeds)) > 1]
        curve = [] if len(unequal) == len(group) else _curve(group[0], most)
        crosses = [(trace.experiment.workers, found) for trace in unequal if (found := _of(trace, trace.experiment))]
        for line, mode, kind in ((curve, "lines", "theory"), (crosses, "markers", "theory, these speeds")):
            if line:
                fig.add_scatter(
                    x=[n for n, _ in line], y=[found.value for _, found in line], mode=mode, legendgroup=str(index),
                    line=dict(color=colour, width=1.8), marker=dict(color=colour, symbol="x-thin-open", size=11),
                    name=f"{name}, {kind}" if name else kind, customdata=[found.because for _, found in line],
                    hovertemplate="theory, %{x} workers: %{y:.4g} s (%{customdata})<extra></extra>",
                )
                assumed[line[-1][1].because.replace(f"of {line[-1][0]}", "of all")] = None
    fig.layout.xaxis.update(range=[0, most + 0.5], dtick=1 if most <= 12 else None)
    fig.layout.yaxis.rangemode = "tozero"
    if not drawn:
        return style.empty(fig, NOTHING)
    fig.layout.update(style.remark(fig, *(f"Theory: {why}." for why in assumed)))
    return style.describe(fig, f"{QUESTION} {'; '.join(sentences)}.")


def timing(experiment: Experiment) -> Experiment:
    """Return an experiment that is equal for all whose rounds take alike, but for the number and speeds of workers."""
    return Experiment().model_copy(update={name: getattr(experiment, name) for name in _TIMING})


def mean_and_error(pushes: np.ndarray) -> tuple[float, float] | None:
    """Return the mean seconds from one update to the next and its standard error (NaN for fewer than 20)."""
    rows = pushes[(pushes["version"] > 0) & np.isfinite(pushes["applied_s"])]
    if not rows.size:
        return None
    times = np.zeros(int(rows["version"].max()) + 1)
    np.maximum.at(times, rows["version"], rows["applied_s"])
    steps = np.diff(np.maximum.accumulate(times))
    size = steps.size // _BATCHES
    if not size:
        return float(steps.mean()), math.nan
    batches = steps[: size * _BATCHES].reshape(_BATCHES, size).mean(axis=1)
    return float(steps.mean()), float(batches.std(ddof=1)) / math.sqrt(_BATCHES)


def _point(trace: Trace) -> tuple[int, float, float, str] | None:
    found = mean_and_error(trace.pushes)
    return found and (trace.experiment.workers, *found, style.caption(trace.environment))


def _of(trace: Trace, experiment: Experiment) -> expected.Expected | None:
    parameters = trace.path.shape[1] if trace.path.size else None
    return expected.update_seconds(experiment, str(trace.environment.get("clock")), parameters)


def _curve(trace: Trace, most: int) -> list[tuple[int, expected.Expected]]:
    least = getattr(trace.experiment.strategy, "backups", 0) + 1
    spread = np.geomspace(least, max(least, most), 24).round().astype(int).tolist()
    counts = sorted({*range(least, min(most, 24) + 1), *spread})
    found = ((n, _of(trace, trace.experiment.model_copy(update=dict(workers=n, speeds=None)))) for n in counts)
    return [(n, one) for n, one in found if one]


def _captions(environments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of each clock on what it ran: of several runs, that with most ranks."""
    by_clock: dict[Any, Mapping[str, Any]] = {}
    for environment in sorted(environments, key=lambda env: env.get("ranks") or 0):
        by_clock[environment.get("clock")] = environment
    if len(environments) == len(by_clock):
        return [style.caption(environment) for environment in by_clock.values()]
    return [style.caption({**env, "ranks": None}) if clock == "virtual" else f"The largest run: {style.caption(env)}"
            for clock, env in by_clock.items()]
