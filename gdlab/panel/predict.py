"""A prediction that locks before the run, and its comparison with what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets

from gdlab.panel.chart import Chart
from gdlab.panel.progress import record
from gdlab.panel.question import AnswerError, QuestionView, number

KINDS = ("number", "choice", "range")


class Prediction:
    """Ask for a prediction; `commit` locks it; `compare` shows, once it is locked, how it fits what happened."""

    def __init__(self, question: str, answer: Any, kind: str, options: Iterable[str] | None, unit: str,
                 low: float | None, high: float | None) -> None:
        if kind not in KINDS:
            raise AnswerError(f"kind = {kind!r} is not known: it must be one of {', '.join(KINDS)}.")
        if (kind == "choice") != (options is not None):
            raise AnswerError(f"A prediction of kind {kind!r} {'needs' if kind == 'choice' else 'has no'} options.")
        if kind == "range" and (low is None or high is None or not low < high):
            raise AnswerError("A range is drawn between two bounds: give low and high, with low < high.")
        self.question, self.answer, self.kind, self.unit = question, answer, kind, unit
        self.options, self.low, self.high = list(options or ()), low, high
        self.value: Any = None
        self.waits_for_run, self.shown = False, False
        self.on_change: list[Callable[[], None]] = []
        self.widget = QuestionView(self.commit, mode="predict", kind=kind, question=question, options=self.options,
                                unit=unit, low=low, high=high, locked=False, message="", value=None)
        record(question, "prediction")

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.asked()._repr_mimebundle_(**options)

    def asked(self) -> QuestionView:
        """Return the question's widget, and take note that it is shown: a panel or a comparison need not show it."""
        self.shown = True
        return self.widget

    @property
    def committed(self) -> bool:
        """Whether the reader has committed to an answer, which then stays."""
        return self.value is not None

    def commit(self, value: Any) -> None:
        """Lock an answer: a number, one of the options, or a pair (low, high).

        Raises AnswerError (a ValueError) for what is no such answer, and once one is locked.
        """
        if self.committed:
            raise AnswerError(f"Your prediction is locked: {self.text(self.value)}. Make the cell again for another.")
        if self.kind == "choice":
            if value not in self.options:
                raise AnswerError("Choose one of the answers first.")
            self.value = value
        elif self.kind == "number":
            self.value = number(value, self.low, self.high)
        else:
            if not isinstance(value, list | tuple) or len(value) != 2:
                raise AnswerError("A range is two numbers: the least and the most that you expect.")
            self.value = tuple(sorted(number(end, self.low, self.high) for end in value))
        then = "Now press Run." if self.waits_for_run else "What happened is shown below."
        self.widget.change(locked=True, value=self.value, tone="info",
                           message=f"Locked: you predict {self.text(self.value)}. {then}")
        record(self.question, "prediction", self.text(self.value), None, 1)
        self._tell()

    def ran(self) -> None:
        """Take note that the run has ended: the comparison may be seen."""
        self.waits_for_run = False
        if self.committed:
            self.widget.change(message=f"Locked: you predicted {self.text(self.value)}.")
        self._tell()

    def compare(self, actual: Any = None, tolerance: float | None = None, because: str = "",
                figure: Any = None) -> Comparison:
        """Return the comparison with what happened (default: `answer`), hidden until it may be seen.

        `tolerance` is how far a number may be off and count as right (default: a tenth of what happened); `because`
        says why, and one or several Plotly figures may show it.
        """
        actual = self.answer if actual is None else actual
        if self.kind == "choice" and actual not in self.options:
            raise AnswerError(f"What happened, {actual!r}, is not among the options: {', '.join(self.options)}.")
        return Comparison(self, actual, tolerance, because, figure)

    def text(self, value: Any) -> str:
        """Return an answer as it is read."""
        if isinstance(value, tuple):
            return f"{self.text(value[0])} to {self.text(value[1])}"
        unit = f" {self.unit}" * bool(self.unit)
        return str(value) if isinstance(value, str) else f"{float(value):.7g}{unit}"

    def judge(self, actual: Any, tolerance: float | None = None) -> tuple[bool, str]:
        """Return whether the locked answer was right, and the sentence that says so."""
        said, was = self.text(self.value), self.text(actual)
        if self.kind == "choice":
            return said == was, f"You predicted: {said}. {'So it was.' if said == was else f'What happened: {was}.'}"
        if self.kind == "range":
            below, above = self.value[0] - actual, actual - self.value[1]
            right = below <= 0 and above <= 0
            where = "inside your range" if right else "below your range" if below > 0 else "outside your range"
            where = "above your range" if above > 0 else where
            scale = math.log if self.low > 0 and self.high >= 100 * self.low else float  # as the page draws it
            share = (scale(self.value[1]) - scale(self.value[0])) / (scale(self.high) - scale(self.low))
            return right, f"It was {was}: {where}, {said}, which took up {share:.0%} of the scale."
        off = self.value - actual
        if not math.isfinite(off):
            return False, f"You predicted {said}; it was {was}, no number at all."
        right = bool(abs(off) <= (abs(actual) / 10 if tolerance is None else tolerance))
        how = "exactly that" if off == 0 else f"you were {abs(off):.3g} too {'high' if off > 0 else 'low'}"
        return right, f"You predicted {said}; it was {was}: {how}{', which is close enough' * (right and off != 0)}."

    def _tell(self) -> None:
        for told in list(self.on_change):
            told()


class Comparison:
    """Show a prediction beside what happened; a prediction that no cell has shown yet is shown above it."""

    def __init__(self, prediction: Prediction, actual: Any, tolerance: float | None, because: str, figure: Any) -> None:
        self.prediction, self.actual, self._tolerance = prediction, actual, tolerance
        self._because = because
        self._figures = list(figure) if isinstance(figure, list | tuple) else [figure] * (figure is not None)
        self.right: bool | None = None
        self.sentence = ""
        self._view = QuestionView(mode="compare", message="", because="")
        self.widget = ipywidgets.Box([self._view], _dom_classes=("gd-compared",))
        prediction.on_change.append(self._draw)
        self._draw()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        if not self.prediction.shown:
            self.widget.children = (self.prediction.asked(), *self.widget.children)
        return self.widget._repr_mimebundle_(**options)

    def _draw(self) -> None:
        asked = self.prediction
        if self.sentence:
            return
        if not asked.committed or asked.waits_for_run:
            first = "the run has ended" if asked.committed else "you have committed your prediction"
            self._view.change(message=f"What happened is shown here when {first}.", tone="wait")
            return
        self.right, self.sentence = asked.judge(self.actual, self._tolerance)
        self._view.change(message=self.sentence, tone="good" if self.right else "bad", because=self._because,
                          low=asked.low, high=asked.high, said=asked.value, actual=self.actual, kind=asked.kind)
        self.widget.children = (*self.widget.children, *map(Chart, self._figures))
        record(asked.question, "prediction", asked.text(asked.value), self.right, 1)


def predict(question: str, answer: Any = None, kind: str = "number", options: Iterable[str] | None = None,
            unit: str = "", low: float | None = None, high: float | None = None) -> Prediction:
    """Ask the reader to commit to a number, a choice or a range before the run; raises AnswerError for a bad question.

    `.committed` and `.value` tell, `.commit(value)` answers without a browser, `.compare(actual)` shows how it fits.
    """
    return Prediction(question, answer, kind, options, unit, low, high)
