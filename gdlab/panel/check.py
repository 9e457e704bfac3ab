"""A question that is graded at once, with a reason for every answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdlab.panel.progress import record
from gdlab.panel.question import AnswerError, QuestionView, number


class Check:
    """Grade answers: `.right` tells of the last one, `.reason` why, `.attempts` how many there were."""

    def __init__(self, question: str, options: Mapping[str, str] | None, correct: Any, tolerance: float,
                 unit: str, reasons: str | Mapping[float, str]) -> None:
        if options is not None and correct not in options:
            raise AnswerError(f"correct = {correct!r} is not among the options: {', '.join(options)}.")
        self.question, self.options, self.unit = question, options, unit
        self._correct, self._reasons = correct if options is not None else number(correct), reasons
        self._tolerance = number(tolerance, 0.0)
        self.attempts, self.reason = 0, ""
        self.right: bool | None = None
        self.widget = QuestionView(self.answer, mode="check", kind="number" if options is None else "choice",
                                question=question, options=list(options or ()), unit=unit, message="")
        record(question, "check")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def answer(self, given: Any) -> bool:
        """Grade an answer and show why; raises AnswerError (a ValueError) for what is no answer."""
        if self.options is not None:
            if given not in self.options:
                raise AnswerError("Choose one of the answers first.")
            right, self.reason = given == self._correct, self.options[given]
        else:
            given = number(given)
            right = abs(given - self._correct) <= self._tolerance
            known = self._reasons if isinstance(self._reasons, Mapping) else {self._correct: self._reasons}
            self.reason = next((why for value, why in known.items() if abs(given - value) <= self._tolerance), "")
            if not right:
                self.reason = self.reason or f"Too {'high' if given > self._correct else 'low'}: try again."
        self.attempts += 1
        self.right = bool(right)
        self.widget.change(message=f"{'Right.' if right else 'Not so.'} {self.reason}".strip(),
                           tone="good" if right else "bad")
        record(self.question, "check", f"{given} {self.unit}".strip(), self.right, self.attempts)
        return self.right


def check(question: str, options: Mapping[str, str] | None = None, correct: Any = None, tolerance: float = 0.0,
          unit: str = "", reasons: str | Mapping[float, str] = "") -> Check:
    """Ask a question and grade the answers: a choice (`options`: each text with its reason) or a number.

    A number is right within `tolerance` of `correct`; `reasons` says why, or gives a reason for each number that a
    reader may come to. Raises AnswerError where `correct` is no possible answer.
    """
    return Check(question, options, correct, tolerance, unit, reasons)
