"""The pieces of a lesson: predictions lock, comparisons wait, checks give reasons, progress lasts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.panel.playground import Playground
from gdlab.panel.progress import Progress
from gdlab.panel.question import AnswerError, number

QUESTION = "Where does the weight stop?"
FINITE = st.floats(-1e9, 1e9)


@pytest.fixture(autouse=True)
def _nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GDLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(Progress, "here", {})
    monkeypatch.setattr(Progress, "_shown", [])
    yield


def from_page(piece: Any, take: Any) -> dict[str, Any]:
    """Answer as the page does, and return what it is shown."""
    piece.widget._handle_custom_msg({"take": take}, [])
    return piece.widget.view


# ---- predictions ----

def test_a_prediction_locks_when_it_is_committed() -> None:
    asked = gd.predict(QUESTION, unit="m")
    assert not asked.committed and asked.value is None and not asked.widget.view["locked"]
    asked.commit(1.5)
    assert asked.committed and asked.value == 1.5 and asked.widget.view["locked"]
    with pytest.raises(AnswerError, match=r"locked: 1\.5 m"):
        asked.commit(2.0)
    assert asked.value == 1.5


def test_the_page_commits_with_texts_and_bad_ones_are_explained() -> None:
    asked = gd.predict(QUESTION, low=0.0, high=2.0)
    for text, why in (("abc", "is no number"), ("", "Give a number first"), ("nan", "is no number"), ("3", "at most 2"),
                      ([1, 2], "is no number")):  # fmt: skip
        shown = from_page(asked, text)
        assert why in shown["message"] and shown["tone"] == "bad" and not asked.committed
    assert from_page(asked, " 1,25 ")["locked"] and asked.value == 1.25


def test_a_choice_must_be_one_of_the_options() -> None:
    asked = gd.predict(QUESTION, kind="choice", options=["up", "down"])
    assert "Choose one" in from_page(asked, "")["message"]
    assert "Choose one" in from_page(asked, "sideways")["message"] and not asked.committed
    from_page(asked, "down")
    assert asked.value == "down"
    assert asked.judge("down") == (True, "You predicted: down. So it was.")
    assert asked.judge("up") == (False, "You predicted: down. What happened: up.")


@given(FINITE, FINITE, FINITE)
def test_a_range_is_right_where_what_happened_lies_inside(one: float, other: float, actual: float) -> None:
    asked = gd.predict(QUESTION, kind="range", low=-1e9, high=1e9)
    asked.commit((one, other))
    right, sentence = asked.judge(actual)
    assert right == (min(one, other) <= actual <= max(one, other))
    assert ("inside" in sentence) == right
    assert ("above your range" in sentence) == (actual > max(one, other))


@given(FINITE, FINITE, st.floats(0, 1e9))
def test_a_number_is_right_within_its_tolerance(said: float, actual: float, tolerance: float) -> None:
    asked = gd.predict(QUESTION)
    asked.commit(said)
    right, sentence = asked.judge(actual, tolerance)
    assert right == (abs(said - actual) <= tolerance)
    assert sentence.startswith("You predicted ")


def test_without_a_tolerance_a_tenth_of_what_happened_is_close_enough() -> None:
    asked = gd.predict(QUESTION)
    asked.commit(1.05)
    assert asked.judge(1.0) == (True, "You predicted 1.05; it was 1: you were 0.05 too high, which is close enough.")
    assert asked.judge(2.0)[0] is False and "0.95 too low" in asked.judge(2.0)[1]
    assert asked.judge(1.05)[1].endswith("exactly that.")
    assert asked.judge(math.inf) == (False, "You predicted 1.05; it was inf, no number at all.")


@pytest.mark.parametrize(("words", "why"), [
    (dict(kind="essay"), "must be one of number, choice, range"),
    (dict(kind="choice"), "needs options"),
    (dict(options=["a"]), "has no options"),
    (dict(kind="range", low=1.0), "give low and high"),
])  # fmt: skip
def test_a_bad_question_is_refused_with_a_sentence(words: dict[str, Any], why: str) -> None:
    with pytest.raises(AnswerError, match=why):
        gd.predict(QUESTION, **words)


# ---- comparisons ----

def test_what_happened_stays_hidden_until_the_prediction_is_committed() -> None:
    asked = gd.predict(QUESTION)
    seen = asked.compare(1.03125, tolerance=0.01, because="The gap is the reason.", figure=go.Figure())
    assert "1.03125" not in json.dumps(seen._view.view) and "reason" not in json.dumps(seen._view.view)
    assert len(seen.widget.children) == 1 and seen.right is None
    asked.commit(1.03)
    assert seen.right is True and "it was 1.03125" in seen.sentence
    assert seen._view.view["because"] == "The gap is the reason." and len(seen.widget.children) == 2


def test_the_answer_given_with_the_question_is_what_happened() -> None:
    asked = gd.predict(QUESTION, answer=3.0)
    asked.commit(3)
    assert asked.compare().right


def test_an_outcome_that_is_no_option_is_refused() -> None:
    with pytest.raises(AnswerError, match="not among the options"):
        gd.predict(QUESTION, kind="choice", options=["up", "down"]).compare("left")


def test_a_prediction_that_no_cell_has_shown_is_shown_with_its_comparison() -> None:
    apart, together = gd.predict(QUESTION), gd.predict(QUESTION + "?")
    apart._repr_mimebundle_()
    for asked, shown in ((apart, 1), (together, 2)):
        seen = asked.compare(1.0)
        seen._repr_mimebundle_()
        assert len(seen.widget.children) == shown
        seen._repr_mimebundle_()  # a second view of it adds nothing
        assert len(seen.widget.children) == shown


def test_a_panel_runs_only_after_the_commitment_and_then_shows_the_comparison() -> None:
    asked = gd.predict(QUESTION)
    panel = Playground(gd.Experiment(problem=gd.Quadratic(), workers=1, updates=5), backend="virtual", predict=asked)
    seen = asked.compare(2.0)
    panel.controls._handle_custom_msg({"press": "run"}, [])
    assert "Not started" in panel.controls.message and not panel.controls.busy
    asked.commit(2.0)
    assert panel.controls.message.startswith("Run starts") and seen.right is None
    assert "run has ended" in seen._view.view["message"]
    panel.run_once()
    assert seen.right is True and "5" in panel.controls.count and "Run starts" not in panel.controls.message


# ---- checks ----

def test_a_check_grades_each_choice_with_its_reason() -> None:
    asked = gd.check("Which?", {"a": "a is too small", "b": "b fits"}, correct="b")
    assert from_page(asked, "a")["message"] == "Not so. a is too small" and asked.right is False
    assert from_page(asked, "b")["message"] == "Right. b fits" and asked.right is True
    assert asked.attempts == 2
    assert "Choose one" in from_page(asked, "c")["message"] and asked.attempts == 2


def test_a_check_grades_numbers_within_the_tolerance_and_knows_common_mistakes() -> None:
    asked = gd.check("How much?", correct=0.5, tolerance=0.01, reasons={0.5: "half of it", 2.0: "upside down"})
    assert asked.answer(0.505) and asked.reason == "half of it"
    assert not asked.answer(2.0) and asked.reason == "upside down"
    assert not asked.answer("7") and asked.reason.startswith("Too high")
    with pytest.raises(AnswerError, match="no number"):
        asked.answer("many")


def test_the_right_answer_never_reaches_the_page_before_it_is_given() -> None:
    asked = gd.check("Which?", {"a": "secret", "b": "secret"}, correct="b")
    assert "secret" not in json.dumps(asked.widget.view) and "correct" not in asked.widget.view
    assert "0.125" not in json.dumps(gd.check("How much?", correct=0.125).widget.view)


def test_a_check_without_a_possible_right_answer_is_refused() -> None:
    with pytest.raises(AnswerError, match="not among the options"):
        gd.check("Which?", {"a": "", "b": ""}, correct="c")
    with pytest.raises(AnswerError, match="no number"):
        gd.check("How much?")


# ---- progress ----

def test_progress_counts_and_exports_what_was_answered(tmp_path: Path) -> None:
    shown = gd.progress()
    asked, graded = gd.predict(QUESTION), gd.check("Which?", {"a": "", "b": ""}, correct="b")
    assert "0 of 2 answered" in shown._view.view["message"]
    asked.commit(1.0)
    asked.compare(5.0)
    graded.answer("b")
    assert "2 of 2 answered on this page, 1 right" in shown._view.view["message"]
    pieces = json.loads(shown.to_json())["pieces"]
    assert pieces[QUESTION]["answer"] == "1" and pieces[QUESTION]["right"] is False
    assert pieces["Which?"]["right"] is True and pieces["Which?"]["attempts"] == 1
    assert json.loads((tmp_path / "runs" / "progress.json").read_text()) == pieces
    assert json.loads(shown._view.view["file"])["pieces"] == pieces


def test_progress_outlives_the_kernel_and_survives_a_broken_file(tmp_path: Path) -> None:
    gd.check("First?", correct=1).answer(1)
    Progress.here = {}  # another kernel
    gd.check("Second?", correct=1)
    shown = gd.progress()
    assert set(shown.entries) == {"First?"} and "1 more from before" in shown._view.view["message"]
    (tmp_path / "runs" / "progress.json").write_text("{ torn")
    assert gd.progress().entries == {}
    gd.check("Third?", correct=1).answer(2)
    assert gd.progress().entries["Third?"]["right"] is False


def test_progress_stays_in_memory_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GDLAB_RUNS", str(tmp_path / "file" / "runs"))
    gd.check("Where?", correct=1).answer(1)
    assert gd.progress().entries["Where?"]["right"] is True


def test_a_dashboard_s_readers_see_and_export_their_own_answers_only(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("VOILA_REQUEST_URL", "http://127.0.0.1/voila/render/04_precision.ipynb")
    first, second, runs = "1" * 32, "2" * 32, tmp_path / "runs"

    def page(reader: str, question: str) -> gd.panel.progress.Progress:
        Progress.here, Progress.reader = {}, ""  # each page has a kernel of its own
        gd.check(question, correct=1).answer(1)
        shown = gd.progress()
        assert set(shown.entries) == {question}, "before the page has told whose it is, nobody's file is read"
        shown._view._handle_custom_msg({"take": reader}, [])
        return shown

    assert set(page(first, "One?").entries) == {"One?"}
    assert set(page(second, "Two?").entries) == {"Two?"}
    again = page(first, "Three?")
    assert set(again.entries) == {"One?", "Three?"} and "1 more from before" in again._view.view["message"]
    assert set(json.loads(again._view.view["file"])["pieces"]) == {"One?", "Three?"}
    assert sorted(path.name for path in runs.iterdir()) == [f"progress-{first}.json", f"progress-{second}.json"]
    for bad in ("", "../" * 10 + "x", "1" * 31, "g" * 32, None, ["1"], {"a": 1}):
        assert set(page(bad, "Four?").entries) == {"Four?"}
    assert len(list(runs.iterdir())) == 2


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_finite_number_is_read_back_as_it_was_written(value: float) -> None:
    assert number(repr(value)) == value == number(value)
