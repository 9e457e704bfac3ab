"""The figures of the page: empty, live, and drawn once more in full when a run has ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from gdlab import views
from gdlab.experiment import Experiment
from gdlab.panel.chart import Chart
from gdlab.part import ExperimentError
from gdlab.trace import Chunk, Trace
from gdlab.views import live, style
from gdlab.views.redrawn import SEVERAL

USUAL = ("trajectory", "loss", "loss_seconds", "timeline", "staleness", "grad_norm")
"""The figures of a panel that is not told which."""

COMPARED = ("loss", "loss_seconds", "round_time", "stability", "efficiency", "bytes_sent")
"""Figures that hold all runs that are ticked; the others show the last one, or those that went on side by side."""


class Figures:
    """Hold one chart a view; `names` chooses which."""

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.names = (names,) if isinstance(names, str) else tuple(USUAL if names is None else names)
        for name in self.names:
            if name not in views.VIEWS:
                raise ExperimentError(f"figures = {name!r} is no view: there are {', '.join(views.VIEWS)}.")
        empty = live.make(self.names, Experiment(), {})
        self.charts = {name: Chart(empty[name].figure()) for name in self.names}
        self._live: dict[str, live.Live] = {}
        boxes = [ipywidgets.Box([chart], _dom_classes=("gd-figure", f"gd-figure-{name}"))
                 for name, chart in self.charts.items()]
        self.widget = ipywidgets.Box(boxes, _dom_classes=("gd-figures",))

    def begin(self, experiment: Experiment, environment: Mapping[str, Any], traces: Sequence[Trace] = ()) -> None:
        """Start anew for a run, or for several side by side."""
        self._live = live.make(self.names, experiment, environment, traces)
        for name, view in self._live.items():
            self.charts[name].show(view.figure())

    def make(self, chunk: Chunk) -> dict[str, list[dict[str, Any]]]:
        """Return what each chart has to be told of what is new."""
        return {name: view.update(chunk) for name, view in self._live.items()}

    def apply(self, made: Mapping[str, list[dict[str, Any]]]) -> None:
        """Tell the charts."""
        for name, operations in made.items():
            if operations:
                self.charts[name].apply(operations)

    def drawn(self, traces: Sequence[Trace], compared: Sequence[Trace]) -> dict[str, Any]:
        """Draw a run that has ended, or several side by side, and the losses of all runs that are compared."""
        drawn = self.compared(traces, compared or traces)
        whose = views.what_differs([trace.experiment for trace in traces])[0]
        for name in self.names:
            if name not in drawn:
                drawn[name] = fig = views.VIEWS[name](traces[0])
                if whose:
                    said = fig.layout.meta["description"]
                    fig.layout.update(style.remark(fig, f"Shown: {whose}."))
                    style.describe(fig, f"{said} Shown: {whose}.")
        return drawn

    def compared(self, traces: Sequence[Trace], compared: Sequence[Trace]) -> dict[str, Any]:
        """Draw the figures that hold several runs: those of `traces` side by side (none: left as they are)."""
        drawn = {name: views.VIEWS[name](*compared) for name in self.names if name in COMPARED}
        beside = [name for name in self.names if name in SEVERAL and name not in drawn and traces]
        return drawn | {name: views.VIEWS[name](*traces) for name in beside}

    def show(self, figures: Mapping[str, Any]) -> None:
        """Put figures in place of those on the page."""
        for name, figure in figures.items():
            self.charts[name].show(figure)
