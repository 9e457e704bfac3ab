"""The pieces of the lesson on automatic differentiation, without a browser: the graph, the traps, the tape."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import gdlab as gd
from gdlab.autodiff import figures, tape
from gdlab.panel.progress import Progress


def shown(graph: Any) -> dict[str, Any]:
    return graph.chart.figure


def test_the_graph_steps_to_its_ends_and_no_farther() -> None:
    graph = gd.autodiff.Graph("(w*x - 1)**2", w=2, x=3)
    assert graph.steps == 8 and graph.controls.view["message"] == "Not begun: 8 steps, 3 of them forward."
    for act, step in (("back", 0), ("next", 1), ("next", 2), ("last", 8), ("next", 8), ("back", 7), ("first", 0)):
        graph._got({"act": act})
        assert graph.step == step and shown(graph)["data"][-1]["x"] == [step]
    for message in ({}, {"act": "jump"}, {"act": "set", "values": {}}, {"act": "set"}):
        graph._got(message)  # a page can send anything
        assert graph.step == 0 and graph.recording.expression.text == "(w*x - 1)**2"


def test_every_step_says_what_it_did() -> None:
    seen = gd.autodiff.record("(w*x - 1)**2", w=2, x=3)
    said = [figures.sentence(seen, step) for step in range(9)]
    assert said[1] == "Forward 1 of 3: w*x = 6. MulBackward0 saves other (8 B), self (8 B)."
    assert said[6] == ("Back 3 of 5: the loss's derivative by w*x is 10. It goes on, times 3 to w and 2 to x. "
                       "16 bytes are freed.")  # fmt: skip
    assert said[8].endswith("One pass has given all 2 derivatives.")
    assert figures.sentence(seen, 3, "x") == (
        "Forward 3 of 3: (w*x - 1)**2 = 25 changes by 20 with x (10 × 2). One pass a number: 2 in all.")


def test_a_reader_types_another_loss_and_a_wrong_one_leaves_the_graph_as_it_was() -> None:
    graph = gd.autodiff.Graph("x**2", x=3)
    graph._got({"act": "set", "values": {"loss": "sum(u*u)", "values": "u = [1, 2]", "mode": "x"}})
    assert list(graph.recording.gradient["u"]) == [2.0, 4.0] and graph.mode == "reverse"
    graph._got({"act": "set", "values": {"loss": "sum(u*u)", "values": "u = [1.0, 2.0]", "mode": "u"}})
    assert graph.mode == "u" and graph.steps == 2
    before = graph.recording
    for loss, values in (("x.grad", "x = 1"), ("x", "x = y"), ("x", "x = [1, 2]"), ("x", "z = 1"), ("", "")):
        graph._got({"act": "set", "values": {"loss": loss, "values": values, "mode": "u"}})
        assert graph.recording is before and graph.controls.view["tone"] == "bad"
        assert [field["value"] for field in graph.controls.view["fields"][:2]] == [loss, values]


LARGE = " + ".join(f"(w*{x} - b)**2" for x in range(20))


@pytest.mark.parametrize(("text", "values"), [
    ("x", {"x": 1.0}), ("3", {}), ("where(x > 0, 1, 2)", {"x": 1.0}), (gd.autodiff.LOSS, {"w": 1.0, "b": 0.0}),
    ("exp(sin(x))*x + x", {"x": 1.0}), ("sum(matmul(X, w))", {"X": [[1, 2], [3, 4]], "w": [1, 2]}),
    ("x + 1/0", {"x": 1.0})])  # fmt: skip
def test_any_graph_is_drawn_at_every_step_with_no_two_nodes_in_one_place(text: str, values: Any) -> None:
    seen = gd.autodiff.record(text, **values)
    places, ways = figures.layout(seen)
    assert len(set(places)) == len(places) == len(seen.nodes)
    for (source, target), way in ways.items():
        assert way[0] == places[source] and way[-1] == places[target]
        assert all(b[0] == pytest.approx(a[0] + 1) for a, b in itertools.pairwise(way)), "left to right"
    for seed in (None, *seen.values):
        for step in range(len(figures.steps_of(seen, seed)[0]) + 1):
            fig = figures.graph(seen, step, seed)
            assert fig.layout.meta["description"].endswith("bytes are saved.")


def test_a_graph_too_large_to_be_drawn_says_so() -> None:
    graph = gd.autodiff.Graph(LARGE, w=1, b=1)
    (note,) = shown(graph)["layout"]["annotations"]
    assert "nodes: 48" in note["text"].replace("<br>", " ")


def test_traps_are_switched_one_by_one() -> None:
    traps = gd.autodiff.Traps()
    assert [card["name"] for card in traps.controls.view["cards"]] == list(gd.autodiff.cases())
    traps._got({"act": "switch", "name": "detach", "on": True})
    cards = {card["name"]: card for card in traps.controls.view["cards"]}
    assert cards["detach"]["on"] and cards["detach"]["lines"][0] == ["x.grad", "(6)"]
    assert not cards["where"]["on"] and cards["where"]["lines"] == [["x.grad", "(nan, 0.25)"], ["right", "(0, 0.25)"]]
    for message in ({}, {"act": "switch", "name": "nothing", "on": True}, {"act": "switch"}):
        traps._got(message)
    assert sum(traps.mended.values()) == 1


def test_the_exercise_grades_each_blank_and_keeps_what_was_typed() -> None:
    exercise = gd.autodiff.Exercise()
    assert exercise.right is None and "class Tape" in exercise.controls.view["code"]
    rules = {f"{kind} {place}": tape.RULES[kind][place] for kind, place in tape.BLANKS}
    exercise._got({"act": "check", "values": {**rules, "* 0": "a", "adds": ""}})
    fields = {field["name"]: field for field in exercise.controls.view["fields"]}
    assert exercise.right is False and exercise.controls.view["message"] == "6 of 8 agree with torch."
    assert fields["* 0"]["tone"] == "bad" and fields["* 0"]["value"] == "a" and "torch" in fields["* 0"]["note"]
    assert fields["adds"]["note"] == "Choose one." and fields["exp 0"]["tone"] == "good"
    assert exercise.answer({**rules, "exp 0": "exp(a)", "/ 1": "-a/b**2"}, True) is True
    assert Progress.here[exercise.QUESTION]["right"] is True and exercise.attempts == 2
    assert exercise.answer(rules, False) is False
    for message in ({}, {"act": "check"}, {"act": "check", "values": 3}):
        exercise._got(message)
    exercise._got({"act": "check", "values": {"* 0": ["b"], "adds": {}}})
    assert exercise.right is False


def test_the_forty_lines_are_about_forty() -> None:
    lines = [line for line in gd.autodiff.Exercise().controls.view["code"].splitlines() if line.strip()]
    assert 30 <= len([line for line in lines if '"""' not in line]) <= 42


def test_figures_say_what_was_measured() -> None:
    found = gd.autodiff.finite_differences("exp(x)", x=1.0)
    assert "theory says h = " in found.figure().layout.meta["description"]
    both = gd.autodiff.costs([(3, 1)], repeats=1).figure()
    assert "3 → 1: 3 and 1 passes" in both.layout.meta["description"]
    np.testing.assert_array_equal([int(bar.text[0]) for bar in both.data], [3, 1])
