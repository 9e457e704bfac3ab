"""What the pieces of a lesson share: one widget that draws any of them, and the number that a text means."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import traitlets

from gdlab.panel.widget import PanelWidget, script


class AnswerError(ValueError):
    """Say in one sentence why an answer cannot be taken."""


class QuestionView(PanelWidget):
    """Draw what `view` describes (see question.js); an answer comes back as a message {take: ...}."""

    _esm = script("question.js")
    _css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, take: Callable[[Any], Any] | None = None, **view: Any) -> None:
        def got(message: dict[str, Any]) -> None:
            if take is None or "take" not in message:
                return
            try:
                take(message["take"])
            except AnswerError as error:
                self.change(message=str(error), tone="bad")

        super().__init__(got, view=view, _dom_classes=("gd-panel", "gd-question"))

    def change(self, **view: Any) -> None:
        """Draw something else."""
        self.view = {**self.view, **view}


def number(given: Any, low: float | None = None, high: float | None = None) -> float:
    """Return the number that was given, as itself or as a text; raises AnswerError where it is none or too far out."""
    try:
        value = float(str(given).strip().replace(",", ".").replace("−", "-"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        what = f"{str(given)[:40]!r} is no number: write one" if str(given).strip() else "Give a number first,"
        raise AnswerError(f"{what} like 0.25 or 1e-3.")
    if (low is not None and value < low) or (high is not None and value > high):
        bounds = [f"at least {low:g}"] * (low is not None) + [f"at most {high:g}"] * (high is not None)
        raise AnswerError(f"{value:g} cannot be: it must be {' and '.join(bounds)}.")
    return value
