"""Run, Stop and Reset, with how far the run is and one plain sentence about it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import traitlets

from gdlab.experiment import Experiment
from gdlab.panel.widget import PanelWidget, at_once, script

BACKENDS = {"local": "this machine: real processes", "virtual": "a simulated clock: repeatable"}


class Controls(PanelWidget):
    """Draw the buttons, the progress and the status line; `press(name)` and `choose(backend)` are called back."""

    _esm = script("controls.js")
    _css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")  # of the whole panel, brought once a page
    busy = traitlets.Bool(False).tag(sync=True)
    message = traitlets.Unicode("").tag(sync=True)
    tone = traitlets.Unicode("info").tag(sync=True)
    fraction = traitlets.Float(0.0).tag(sync=True)
    count = traitlets.Unicode("").tag(sync=True)
    backend = traitlets.Unicode("local").tag(sync=True)
    backends = traitlets.List().tag(sync=True)
    answered = traitlets.Unicode("").tag(sync=True)  # which press was dealt with last

    def __init__(self, press: Callable[[str], None], choose: Callable[[str], None],
                 call: Callable[..., Any] = at_once, **traits: Any) -> None:
        def answer(name: str, token: str) -> None:
            try:
                press(name)
            finally:
                self.answered = token

        def got(message: dict[str, Any]) -> None:
            if message.get("press") == "stop":
                press("stop")  # also while a cell holds the loop, where the page's messages have a thread of their own
            elif message.get("press") in ("run", "reset"):
                call(answer, message["press"], str(message.get("token", "")))
            elif message.get("backend") in BACKENDS:
                call(choose, message["backend"])

        super().__init__(got, backends=[list(item) for item in BACKENDS.items()],
                         _dom_classes=("gd-bar",), **traits)

    def say(self, sentence: str, tone: str = "info") -> None:
        """Show one sentence in the status line; tone "error" for what a person has to mend."""
        self.message, self.tone = sentence, tone


def progress(experiment: Experiment, updates: int, seconds: float) -> float:
    """Return how far a run is, 0 to 1, by whichever of its ends is nearest; -1 where only a target loss ends it."""
    shares = [done / limit for done, limit in ((updates, experiment.updates), (seconds, experiment.seconds)) if limit]
    return min(1.0, max(shares)) if shares else -1.0


def counted(experiment: Experiment, updates: int, seconds: float, simulated: bool) -> str:
    """Say how many updates there were and how long they took."""
    of = f" of {experiment.updates:,}" if experiment.updates else ""
    return f"{updates:,}{of} updates · {seconds:,.2f} {'simulated ' if simulated else ''}s"
