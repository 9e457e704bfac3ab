"""The pieces of the lesson on automatic differentiation: the graph that one steps through, the traps, the tape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from gdlab.autodiff import figures, tape
from gdlab.autodiff.expression import ExpressionError, read_values
from gdlab.autodiff.process import HelperError
from gdlab.autodiff.recording import Recording, record
from gdlab.autodiff.traps import Trap, cases, shown, trap
from gdlab.panel import progress
from gdlab.panel.chart import Chart
from gdlab.panel.widget import PanelWidget, script

REVERSE = "reverse"


class Parts(PanelWidget):
    """Draw what `view` describes (see autodiff.js); what a reader does comes back as `got(message)`."""

    _esm = script("autodiff.js")
    _css = Path(__file__).with_name("panel.css").read_text(encoding="utf-8")
    view = traitlets.Dict().tag(sync=True)

    def __init__(self, got: Callable[[dict[str, Any]], None], **view: Any) -> None:
        super().__init__(got, view=view)

    def change(self, **view: Any) -> None:
        """Draw something else."""
        self.view = {**self.view, **view}


class Piece:
    """Show a piece of the lesson in a box of the panel's kind."""

    widget: Any

    def _show(self, *parts: Any) -> None:
        self.widget = ipywidgets.Box(parts, _dom_classes=("gd-panel",))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


class Graph(Piece):
    """Draw torch's graph of a small loss, and step the chain rule through it, by button or arrow key.

    First forward, a node at a time, then back in the order in which torch visits them; or forward only, seeded at one
    variable. Below are the bytes that are saved for the backward pass. A reader may type another loss and other values.
    """

    def __init__(self, loss: str | Recording, /, **values: Any) -> None:
        self.recording = loss if isinstance(loss, Recording) else record(loss, **values)
        self.step, self.mode = 0, REVERSE
        self.controls = Parts(self._got, piece="graph", title="Step through the graph", arrows=True, enter="set",
                              live=True, fields=self._fields(), buttons=[
            {"name": "first", "label": "|◀", "title": "To the beginning"},
            {"name": "back", "label": "◀ Back", "title": "One step back"},
            {"name": "next", "label": "Next ▶", "title": "One step on"},
            {"name": "last", "label": "▶|", "title": "To the end"}])
        self.chart = Chart()
        self.go(0)
        self._show(self.controls, ipywidgets.Box([self.chart], _dom_classes=("gd-figure",)))

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(figures.steps_of(self.recording, self._seed)[0])

    @property
    def _seed(self) -> str | None:
        return None if self.mode == REVERSE else self.mode

    def go(self, step: int) -> None:
        """Show the graph after some of its steps."""
        self.step = max(0, min(step, self.steps))
        self.controls.change(message=figures.sentence(self.recording, self.step, self._seed), tone="",
                             fields=self._fields())
        self.chart.show(figures.graph(self.recording, self.step, self._seed))

    def set(self, loss: str, values: str, mode: str) -> None:
        """Take a loss, values ("w = 2, x = [1, 2]") and a mode as they are typed; raises ExpressionError for others."""
        if (loss, values) != (self.recording.expression.text, self._values()):
            self.recording = record(loss, **read_values(values))
        elif mode == self.mode:
            return
        self.mode = mode if mode in self.recording.values else REVERSE
        self.go(0)

    def _values(self) -> str:
        return ", ".join(f"{name} = {value.tolist()}" for name, value in self.recording.values.items())

    def _fields(self) -> list[dict[str, Any]]:
        modes = [[REVERSE, "reverse: forward, then back"]]
        modes += [[name, f"forward mode, from {name}"] for name in self.recording.values]
        return [{"name": "loss", "label": "Loss", "value": self.recording.expression.text},
                {"name": "values", "label": "Values", "value": self._values()},
                {"name": "mode", "label": "Mode", "kind": "select", "value": self.mode, "options": modes}]

    def _got(self, message: dict[str, Any]) -> None:
        places = {"first": 0, "back": self.step - 1, "next": self.step + 1, "last": self.steps}
        try:
            if message.get("act") in places:
                self.go(places[message["act"]])
            elif message.get("act") == "set":
                self.set(*(str(message.get("values", {}).get(name, "")) for name in ("loss", "values", "mode")))
        except (ExpressionError, HelperError) as error:
            typed = message.get("values", {})  # left as it is, to be mended
            fields = [field | {"value": str(typed.get(field["name"], field["value"]))} for field in self._fields()]
            self.controls.change(message=str(error), tone="bad", fields=fields)


class Traps(Piece):
    """Show the traps, each with a switch that mends it: the code, what torch makes of it, what is right, and why."""

    def __init__(self) -> None:
        self.traps = {name: trap(name) for name in cases()}
        self.mended = dict.fromkeys(self.traps, False)
        self.controls = Parts(self._got, piece="traps", cards=self._cards())
        self._show(self.controls)

    def _got(self, message: dict[str, Any]) -> None:
        if message.get("act") == "switch" and message.get("name") in self.mended:
            self.mended[message["name"]] = bool(message.get("on"))
            self.controls.change(cards=self._cards())

    def _cards(self) -> list[dict[str, Any]]:
        return [_card(name, one, self.mended[name]) for name, one in self.traps.items()]


def _card(name: str, one: Trap, mended: bool) -> dict[str, Any]:
    return {"name": name, "title": one.title, "label": "mended", "on": mended, "why": one.why,
            "code": f"x = {one.at}\n{(one.mended if mended else one.code).strip()}",
            "lines": [["x.grad", str(one.mends if mended else one.becomes)], ["right", shown(one.right)]]}


class Exercise(Piece):
    """Show the tape with some local derivatives left out; `.right` tells whether the reader's agree with torch.

    They are typed in the grammar of expressions, of a, b and the result, out, and compared with torch at random points.
    """

    QUESTION = "Complete the tape: what is each operation's local derivative?"

    def __init__(self) -> None:
        self.right: bool | None = None
        self.attempts = 0
        self._given = {f"{kind} {place}": "" for kind, place in tape.BLANKS} | {"adds": ""}
        self.controls = Parts(self._got, piece="tape", title=self.QUESTION, enter="check",
                              code=inspect.getsource(tape.Tape).rstrip(), fields=self._fields({}),
                              buttons=[{"name": "check", "label": "Check", "title": "Compare with torch"}])
        progress.record(self.QUESTION, "check")
        self._show(self.controls)

    def answer(self, rules: Mapping[str, str], adds: bool | None) -> bool:
        """Grade rules, {"* 0": "b", ...} by operation and argument, and whether what goes to one row adds up."""
        whole = {kind: list(row) for kind, row in tape.RULES.items()}
        for kind, place in tape.BLANKS:
            whole[kind][place] = rules.get(f"{kind} {place}", "")
        found = tape.faults({kind: tuple(row) for kind, row in whole.items()}, adds is not False)
        if adds is None:
            found["adds"] = "Choose one."
        self.attempts += 1
        self.right = not found
        self._given = {**self._given, **rules, "adds": {True: "+=", False: "=", None: ""}[adds]}
        blanks = len(tape.BLANKS) + 1
        said = f"{blanks - len(found)} of {blanks} agree with torch." + " The tape is complete." * self.right
        self.controls.change(fields=self._fields(found), message=said, tone="good" if self.right else "bad")
        progress.record(self.QUESTION, "check", said, self.right, self.attempts)
        return self.right

    def _fields(self, found: Mapping[Any, str]) -> list[dict[str, Any]]:
        def judged(key: Any) -> dict[str, str]:
            if not self.attempts:
                return {}
            return {"note": found.get(key, "agrees with torch"), "tone": "bad" if key in found else "good"}

        fields = [{"name": f"{kind} {place}", "label": f"{tape.as_text(kind)}, by {'ab'[place]}",
                   "value": self._given[f"{kind} {place}"], "placeholder": "of a, b, out"} | judged((kind, place))
                  for kind, place in tape.BLANKS]
        ways = [["", "choose"], ["=", "the last one counts"], ["+=", "they are added"]]
        return [*fields, {"name": "adds", "label": "Two gradients for one row: self.adds", "kind": "select",
                          "value": self._given["adds"], "options": ways} | judged("adds")]

    def _got(self, message: dict[str, Any]) -> None:
        given = message.get("values")
        if message.get("act") != "check" or not isinstance(given, dict):
            return
        rules = {name: str(given.get(name, "")) for name in self._given if name != "adds"}
        try:
            self.answer(rules, {"+=": True, "=": False}.get(str(given.get("adds"))))
        except HelperError as error:
            self.controls.change(message=str(error), tone="bad")
