"""An experiment that the reader designs: conditions on a run, graded by the trace of each run of a panel."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

from gdlab.experiment import Experiment
from gdlab.panel.progress import record
from gdlab.panel.question import AnswerError, QuestionView
from gdlab.trace import Trace

_OPERATORS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
              ">": operator.gt}
_CONDITION = re.compile(r"\s*([a-z_][a-z_.]*)\s*(<=|>=|==|!=|<|>)\s*([\w.+-]+)\s*")
_SIGNS = {"<=": "at most", ">=": "at least", "==": "equal to", "!=": "not", "<": "below", ">": "above"}


class Condition:
    """Hold one condition such as "mean_staleness <= 1": a key of a run's summary or a field of its experiment."""

    def __init__(self, text: str) -> None:
        found = _CONDITION.fullmatch(text)
        if not found:
            raise AnswerError(f"{text!r} is no condition: write one like 'final_loss <= 0.1' or 'workers == 4'.")
        self.name, self._sign, wanted = found.groups()
        try:
            self._wanted: Any = float(wanted)
        except ValueError:
            self._wanted = wanted
        if isinstance(self._wanted, str) and self._sign not in ("==", "!="):
            raise AnswerError(f"{text!r} is no condition: {wanted} is no number, so it can only be equal (==) or not.")
        self.text = f"{self.name.replace('_', ' ').replace('.', ': ')} {_SIGNS[self._sign]} {wanted}"

    def judge(self, summary: dict[str, Any], experiment: Experiment) -> tuple[bool, str]:
        """Return whether a run meets it, and what the run had; raises AnswerError for a name that no run has."""
        value = summary[self.name] if self.name in summary else _field(experiment, self.name)
        if isinstance(self._wanted, str):
            said = str(value)
            return _OPERATORS[self._sign](said.lower(), self._wanted.lower()), said
        if value is None or not isinstance(value, int | float) or math.isnan(value):
            return False, "none" if value is None else str(value)
        return bool(_OPERATORS[self._sign](value, self._wanted)), f"{value:.4g}"


def _field(experiment: Experiment, name: str) -> Any:
    value: Any = experiment
    for part in name.split("."):
        if not hasattr(value, part):
            raise AnswerError(f"{name} is neither in a run's summary nor in its experiment: see Trace.summary().")
        value = getattr(value, part)
    return type(value).__name__ if hasattr(type(value), "model_fields") else value


class Goal:
    """Grade each run of a panel: `.right` tells of the last one, `.attempts` how many there were."""

    def __init__(self, question: str, panel: Any, conditions: Iterable[str], because: str) -> None:
        self.question, self._because = question, because
        self._conditions = [Condition(text) for text in conditions]
        if not self._conditions:
            raise AnswerError("A goal needs at least one condition, like 'final_loss <= 0.1'.")
        self.attempts, self.right = 0, False
        self.widget = QuestionView(mode="goal", question=question, tone="info", because="",
                                   message="Graded after each run of the panel above.", conditions=self._rows())
        record(question, "goal")
        panel.on_run.append(self.ran)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def ran(self, traces: Sequence[Trace]) -> None:
        """Grade the first of the runs that have just ended; a goal that was met stays met."""
        try:
            judged = [condition.judge(traces[0].summary(), traces[0].experiment) for condition in self._conditions]
        except AnswerError as error:
            self.widget.change(message=str(error), tone="bad")
            return
        met = sum(good for good, _ in judged)
        self.attempts += 1
        self.right = self.right or met == len(judged)
        if met == len(judged):
            said, tone = "Met.", "good"
        else:
            said = f"{met} of {len(judged)} conditions are met by the last run: change something and run again."
            tone = "good" if self.right else "bad"
        self.widget.change(message=said, tone=tone, conditions=self._rows(judged),
                           because=self._because if self.right else "")
        record(self.question, "goal", f"run {self.attempts}", self.right, self.attempts)

    def _rows(self, judged: Sequence[tuple[bool, str]] = ()) -> list[dict[str, Any]]:
        return [{"text": condition.text, "met": judged[at][0] if judged else None,
                 "was": judged[at][1] if judged else ""} for at, condition in enumerate(self._conditions)]


def goal(question: str, panel: Any, conditions: Iterable[str], because: str = "") -> Goal:
    """Set the reader a goal that each run of `panel` (a gd.Playground) is graded by.

    `conditions`: texts such as "final_loss <= 0.1", "mean_staleness < 2" or "strategy == Async": a key of
    `Trace.summary()`, or a field of the experiment (dotted: "optimizer.lr"), an operator (<, <=, >, >=, ==, !=) and a
    number or a name. All must hold in one run; `because` is shown once they did. Raises AnswerError for anything else.
    """
    return Goal(question, panel, conditions, because)
