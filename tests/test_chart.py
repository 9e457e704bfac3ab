"""The kernel's half of a chart: what it sends, when it holds back, and that a page always ends with the last state."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdlab.panel import chart as module
from gdlab.panel.chart import MAX_AHEAD, Chart, PlotlySource, change, encode


def extend(*y: float) -> dict[str, Any]:
    return {"op": "extend", "trace": 0, "x": np.arange(len(y)) * 1.0, "y": np.array(y)}


def decode(value: Any, buffers: list[bytes]) -> Any:
    """Do what the page does with a message."""
    if isinstance(value, list):
        return [decode(item, buffers) for item in value]
    if isinstance(value, dict) and {"dtype", "bytes"} <= set(value):
        data = buffers[value["bytes"]] if isinstance(value["bytes"], int) else value["bytes"]
        return np.frombuffer(data, value["dtype"]).reshape(value["shape"])
    return {key: decode(item, buffers) for key, item in value.items()} if isinstance(value, dict) else value


class Page:
    """Stand in for the page: the same rules as chart.js, on messages that can be delayed or lost."""

    def __init__(self, chart: Chart) -> None:
        self.chart, self.seq, self.figure, self.wire = chart, -1, {"data": [], "layout": {}}, []
        self.received = 0
        chart.send = lambda content, buffers=(): self.wire.append((copy.deepcopy(content), list(buffers)))

    def say(self, op: str) -> None:
        self.chart._from_page(self.chart, {"op": op, "seq": self.seq}, [])

    def take(self, draw: bool = True) -> None:
        """Take one message from the wire; with `draw`, draw what it brought and say so."""
        content, buffers = self.wire.pop(0)
        self.received += 1
        if content["op"] == "whole" and content["state"]["seq"] >= self.seq:
            state = decode(content["state"], buffers)
            self.figure, self.seq = {"data": state["data"], "layout": state["layout"]}, state["seq"]
        elif content["op"] == "change" and content["seq"] > self.seq:
            if content["from"] != self.seq:
                self.say("ready")
                return
            for operation in content["operations"]:
                change(self.figure, decode(operation, buffers))
            self.seq = content["seq"]
        if draw:
            self.say("seen")

    def take_all(self) -> None:
        while self.wire:
            self.take()


def same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second, equal_nan=True)
    return first == second


@pytest.fixture
def chart() -> Chart:
    fig = go.Figure(layout_title_text="A question?")
    fig.add_scatter(x=[], y=[])
    return Chart(fig)


def test_nothing_is_sent_before_a_page_is_there_and_then_the_whole_is(chart):
    page = Page(chart)
    chart.apply([extend(1.0, 2.0)])
    assert page.wire == []
    page.say("ready")
    page.take_all()
    assert same(page.figure, chart.figure)
    np.testing.assert_array_equal(page.figure["data"][0]["y"], [1.0, 2.0])


def test_a_change_is_sent_as_the_new_points_alone_and_as_binary(chart):
    page = Page(chart)
    page.say("ready")
    page.take_all()
    chart.apply([extend(*range(100))])
    page.take_all()
    chart.apply([extend(1.0, 2.0, 3.0)])
    content, buffers = page.wire[0]
    assert content["op"] == "change" and sum(map(len, buffers)) == 2 * 3 * 8
    page.take_all()
    assert len(page.figure["data"][0]["x"]) == 103 and same(page.figure, chart.figure)


def test_a_page_that_has_the_latest_state_already_is_sent_nothing(chart):
    page = Page(chart)
    page.seq = chart.sequence
    page.say("ready")
    assert page.wire == []


def test_a_page_that_draws_slowly_has_few_messages_on_their_way_and_catches_up_with_one(chart):
    page = Page(chart)
    page.say("ready")
    page.take_all()
    for number in range(100):
        chart.apply([extend(float(number))])
    assert len(page.wire) <= MAX_AHEAD
    page.take_all()
    assert same(page.figure, chart.figure) and page.seq == chart.sequence
    assert page.received <= MAX_AHEAD + 2


def test_a_page_that_went_away_costs_nothing_more(chart):
    page = Page(chart)
    page.say("ready")
    page.wire.clear()
    for number in range(1000):
        chart.apply([extend(float(number))])
    assert len(page.wire) <= MAX_AHEAD


def test_the_last_figure_is_sent_even_to_a_page_that_is_far_behind(chart):
    page = Page(chart)
    page.say("ready")
    for number in range(50):
        chart.apply([extend(float(number))])
    chart.show(go.Figure(layout_title_text="The end?"))
    page.take_all()
    assert page.figure["layout"]["title"]["text"] == "The end?"


def test_a_page_that_was_loaded_anew_gets_the_state_of_now(chart):
    page = Page(chart)
    page.say("ready")
    chart.apply([extend(1.0)])
    page.take_all()
    again = Page(chart)
    chart.apply([extend(2.0)])
    again.say("ready")
    again.take_all()
    assert same(again.figure, chart.figure)


def test_whoever_asks_for_the_widget_s_state_gets_the_figure_of_now(chart):
    chart.apply([extend(4.0, 5.0)])
    state = chart.get_state()["_state"]
    assert state["seq"] == chart.sequence
    np.testing.assert_array_equal(decode(state, [])["data"][0]["y"], [4.0, 5.0])


steps = st.lists(st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 4)), st.just("show"), st.just("take"), st.just("late"), st.just("lose"),
    st.just("reload"), st.just("relayout")), max_size=40)


@given(steps)
def test_whatever_is_lost_late_or_loaded_anew_a_page_that_asks_ends_with_the_kernel_s_state(script):
    fig = go.Figure()
    fig.add_scatter(x=[], y=[])
    chart = Chart(fig)
    page = Page(chart)
    page.say("ready")
    for step in script:
        if isinstance(step, tuple):
            chart.apply([extend(*range(step[1]))])
        elif step == "show":
            chart.show(fig)
        elif step == "relayout":
            chart.apply([{"op": "relayout", "layout": {"yaxis": {"type": "linear"}}}])
        elif step == "reload":
            page = Page(chart)
            page.say("ready")
        elif page.wire and step in ("take", "late"):
            page.take(draw=step == "take")
        elif page.wire:
            page.wire.pop(0)
        assert len(page.wire) <= MAX_AHEAD + 8 + sum(step == "show" for step in script)
    page.take_all()
    page.say("ready")
    page.take_all()
    assert page.seq == chart.sequence
    assert same(page.figure, chart.figure)


def test_a_late_whole_does_not_undo_what_a_page_knows_already(chart):
    page = Page(chart)
    page.say("ready")
    old = page.wire.pop(0)
    page.say("ready")
    chart.apply([extend(1.0)])
    page.take_all()
    page.wire.append(old)
    page.take_all()
    assert same(page.figure, chart.figure)


def test_values_that_json_cannot_hold_are_sent_as_null_and_long_integers_as_floats():
    buffers: list[bytes] = []
    put = lambda data: buffers.append(data) or len(buffers) - 1
    sent = encode({"a": float("nan"), "b": np.float32(2), "c": np.array([1, 2], "i8"), "d": np.array(["x"])}, put)
    assert sent["a"] is None and sent["b"] == 2.0 and sent["d"] == ["x"]
    assert sent["c"]["dtype"] == "float64" and decode(sent["c"], buffers).tolist() == [1.0, 2.0]


def test_tables_keep_their_shape_and_numbers_that_are_not_finite():
    buffers: list[bytes] = []
    put = lambda data: buffers.append(data) or len(buffers) - 1
    table = np.array([[1.0, np.nan, np.inf], [4.0, 5.0, 6.0]], "f4")
    np.testing.assert_array_equal(decode(encode(table, put), buffers), table)
    np.testing.assert_array_equal(decode(encode(table.T, put), buffers), table.T)


def test_what_is_done_to_a_figure_after_it_was_shown_does_not_reach_the_chart():
    fig = go.Figure()
    fig.add_scatter(x=np.arange(3.0), y=np.arange(3.0))
    chart = Chart(fig)
    fig.data[0].x = np.zeros(1)
    np.testing.assert_array_equal(chart.figure["data"][0]["x"], np.arange(3.0))


def test_an_operation_that_is_not_known_is_refused_in_one_sentence(chart):
    with pytest.raises(ValueError, match="'explode' is no chart operation: it must be extend, replace"):
        chart.apply([{"op": "explode"}])


def test_messages_from_a_page_that_make_no_sense_are_passed_over(chart):
    page = Page(chart)
    for message in ({}, {"op": "ready"}, {"op": "ready", "seq": "1"}, {"op": "seen", "seq": 10**9}, {"seq": None}):
        chart._from_page(chart, message, [])
    chart.apply([extend(1.0)])
    assert chart.seen <= chart.sequence and page.wire == []


def test_plotly_is_sent_once_however_many_charts_there_are_and_packed():
    Chart(go.Figure())
    first = PlotlySource._one
    Chart(go.Figure())
    assert PlotlySource._one is first
    assert 1e6 < len(first._gz) < 2e6


def test_a_chart_s_own_script_asks_no_other_host_and_evaluates_nothing():
    script = Chart._esm + PlotlySource._esm
    for word in ("http://", "https://", "eval(", "new Function", "innerHTML"):
        assert word not in script
    assert module.MAX_AHEAD >= 1
