"""The runs of this page: kept, named by what differs, compared in a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import traitlets

from gdlab.experiment import Experiment
from gdlab.panel.widget import PanelWidget, at_once, script
from gdlab.trace import Trace
from gdlab.views import what_differs
from gdlab.views.loss import RUN_COLOURS

MAX_RUNS = 12
"""Runs that the page keeps; older ones stay in their folders."""

COLUMNS = ("final loss", "accuracy", "seconds", "updates", "mean staleness", "wait + comm.")
TITLES = {"wait + comm.": "Waiting and communicating: the share of the workers' time between a gradient's end and the "
                          "next one's beginning"}
"""What a column's heading says in full."""


@dataclass
class Entry:
    """Hold one finished run."""

    id: str
    trace: Trace
    experiment: Experiment
    backend: str
    summary: dict[str, Any]
    shown: bool = True


class HistoryView(PanelWidget):
    """Draw the table of runs."""

    _esm = script("history.js")
    runs = traitlets.List().tag(sync=True)
    columns = traitlets.List(list(COLUMNS)).tag(sync=True)
    titles = traitlets.Dict(TITLES).tag(sync=True)


class History:
    """Keep the last runs; `on_change` is called when another set of them is to be drawn, `on_use` with settings."""

    def __init__(self, on_change: Callable[[], None], on_use: Callable[[Experiment], None],
                 call: Callable[..., Any] = at_once) -> None:
        self.entries: list[Entry] = []
        self._on_change, self._on_use, self._made = on_change, on_use, 0
        self.widget = HistoryView(self._got, call)

    def add(self, trace: Trace, backend: str) -> Entry:
        """Keep a finished run."""
        entry = Entry(f"run-{self._made}", trace, trace.experiment, backend, trace.summary())
        self._made += 1
        for earlier in self.entries:
            if type(earlier.experiment.problem) is not type(entry.experiment.problem):
                earlier.shown = False  # losses of different problems have no common scale
        self.entries = [*self.entries, entry][-MAX_RUNS:]
        self._publish()
        return entry

    @property
    def shown(self) -> list[Entry]:
        """The runs that are ticked, oldest first."""
        return [entry for entry in self.entries if entry.shown]

    def names(self) -> list[str]:
        """Return a name a run, made of what differs between them."""
        if len(self.entries) == 1:
            return ["run 1"]
        clocks = [entry.trace.environment.get("clock", "") for entry in self.entries]
        return what_differs([entry.experiment for entry in self.entries], clocks, whole=True)

    def _publish(self) -> None:
        colours = {entry.id: RUN_COLOURS[place % len(RUN_COLOURS)] for place, entry in enumerate(self.shown)}
        self.widget.runs = [
            {"id": entry.id, "name": name, "color": colours.get(entry.id, "transparent"), "shown": entry.shown,
             "cells": cells(entry.summary)}
            for entry, name in zip(self.entries, self.names(), strict=True)]

    def _got(self, message: dict[str, Any]) -> None:
        wanted = message.get("show") or message.get("use") or message.get("forget")
        entry = next((entry for entry in self.entries if entry.id == wanted), None)
        if entry is None:
            return
        if "use" in message:
            self._on_use(entry.experiment)
            return
        if "forget" in message:
            self.entries = [kept for kept in self.entries if kept is not entry]
        else:
            entry.shown = bool(message.get("on"))
        self._publish()
        self._on_change()


def cells(summary: dict[str, Any]) -> list[str]:
    """Return the figures of a run as the table shows them."""
    return [
        _number(summary.get("final_loss"), ".4g"), _number(summary.get("accuracy"), ".1%"),
        _number(summary.get("seconds"), ",.2f"), _number(summary.get("updates"), ",.0f"),
        _number(summary.get("mean_staleness"), ".2f"), _number(summary.get("wait_fraction"), ".0%"),
    ]


def _number(value: Any, form: str) -> str:
    return "–" if value is None or value != value else format(value, form)
