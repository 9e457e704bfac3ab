"""Lab 07 as a reader takes it: step through the graph, complete the tape, mend the traps, predict and run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Server, wait_until
from test_dashboard_browser import NOTHING_OVERFLOWS, close, finish, press
from test_lessons_browser import SPILLED, choose, keep, open_lesson, piece, results, said

from gdlab.autodiff import tape

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

DRAWN = """(box) => { const data = box.querySelector(".js-plotly-plot")?.data;
    return data ? data.at(-1).x[0] : -1; }"""
"""The step that the graph's figure shows."""


def test_lab_07_from_the_graph_to_the_last_question(page: Any, dashboard: Server, artifacts: Path) -> None:
    open_lesson(page, dashboard, "07_autodiff")
    assert all("is shown here when" in text for text in results(page)), "nothing is told before the reader commits"
    graph = page.locator(".gd-panel", has=page.locator(".gd-graph"))
    stepping, status = graph.locator(".gd-graph"), graph.locator(".gd-said")
    wait_until(lambda: graph.evaluate(DRAWN) == 0, 60, "the graph is drawn")
    stepping.focus()
    for step in (1, 2, 3):
        page.keyboard.press("ArrowRight")
        wait_until(lambda step=step: graph.evaluate(DRAWN) == step, 20, f"step {step} is shown")
    assert status.inner_text().startswith("Forward 3 of 5: tanh(w*x + b)")
    graph.get_by_role("button", name="To the end").click()
    wait_until(lambda: "One pass has given all 4 derivatives" in status.inner_text(), 20, "the end is told")
    graph.screenshot(path=artifacts / "lesson-07-graph.png")
    graph.get_by_role("button", name="One step back").click()
    wait_until(lambda: graph.evaluate(DRAWN) == 13, 20, "one step back")
    graph.get_by_label("Mode").select_option("x")
    wait_until(lambda: "with x seeded" in status.inner_text(), 20, "forward mode begins anew")
    loss = graph.get_by_role("textbox", name="Loss")
    loss.fill("x.__class__")
    loss.press("Enter")
    wait_until(lambda: "has no place here" in status.inner_text(), 20, "what is no loss is explained")
    assert loss.input_value() == "x.__class__", "what was typed stays, to be mended"
    loss.fill("exp(sin(x**2))*x")
    graph.get_by_role("textbox", name="Values").fill("x = 1.3")
    graph.get_by_role("textbox", name="Values").press("Enter")
    wait_until(lambda: "Not begun: 4 steps" in status.inner_text(), 20, "another loss is drawn")

    exercise = page.locator(".gd-tape")
    for kind, place in tape.BLANKS:
        name = f"{tape.as_text(kind)}, by {'ab'[place]}"
        exercise.get_by_role("textbox", name=name, exact=True).fill("a" if kind == "exp" else tape.RULES[kind][place])
    exercise.get_by_label("Two gradients for one row").select_option("+=")
    exercise.get_by_role("button", name="Compare with torch").click()
    wait_until(lambda: "7 of 8 agree with torch" in exercise.inner_text(), 20, "a wrong rule is found")
    assert "it gives" in exercise.inner_text()
    exercise.get_by_role("textbox", name="exp(a), by a").fill("exp(a)")
    exercise.get_by_role("textbox", name="exp(a), by a").press("Enter")
    wait_until(lambda: "The tape is complete" in exercise.inner_text(), 20, "the tape is complete")

    trap = page.locator(".gd-card", has_text="NaN from the branch not taken")
    assert "nan" not in trap.inner_text(), "the reader thinks first"
    trap.get_by_text("What torch gives").click()
    wait_until(lambda: "(nan, 0.25)" in trap.inner_text(), 20, "the trap's gradient is shown")
    trap.get_by_label("mended").check()
    wait_until(lambda: "(0, 0.25)" in trap.locator("dd").first.inner_text(), 20, "the mended gradient is shown")

    choose(page, "how far are the tape's weights", "by rounding only")
    press(page, "Run")
    wait_until(lambda: "60 of 60" in page.locator(".gd-count").inner_text(), 90, "the real run has ended")
    finish(page)
    wait_until(lambda: any("So it was" in text for text in results(page)), 20, "the run is compared")
    choose(page, "When does the graph hold the most memory?", "when the loss is known")
    asked = piece(page, "How many passes does forward mode need")
    asked.get_by_role("textbox").fill("64")
    asked.get_by_role("textbox").press("Enter")
    asked = piece(page, "Which step h gives the best central difference")
    asked.get_by_label("Least that you expect", exact=True).fill("1e-9")
    asked.get_by_label("Most that you expect", exact=True).fill("1e-4")
    asked.get_by_role("button", name="Commit").click()
    wait_until(lambda: all("is shown here when" not in text for text in results(page)), 20, "all is compared")
    asked = choose(page, "is 0. What is its gradient", "NaN")
    wait_until(lambda: said(asked).startswith("Right."), 20, "the last question is graded")
    wait_until(lambda: "6 of 6 answered" in page.locator(".gd-progress .gd-said").inner_text(), 20, "progress is told")
    keep(page, artifacts / "lesson-07-after.png")
    assert not page.problems
    close(page)


@pytest.mark.parametrize("width", [700, 1280])
def test_lab_07_fits_its_page(width: int, new_page: Callable[..., Any], dashboard: Server, artifacts: Path) -> None:
    page = new_page(viewport={"width": width, "height": 900})
    open_lesson(page, dashboard, "07_autodiff")
    graph = page.locator(".gd-panel", has=page.locator(".gd-graph"))
    graph.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    page.wait_for_function(NOTHING_OVERFLOWS, timeout=20_000)
    wait_until(lambda: not page.evaluate(SPILLED), 10, "no cell is higher than the room that it was given")
    graph.locator(".gd-graph").focus()
    page.keyboard.press("End")
    wait_until(lambda: graph.evaluate(DRAWN) == 14, 20, "the last step is drawn")
    page.set_viewport_size({"width": width, "height": 6000})
    page.wait_for_timeout(1000)
    page.screenshot(path=artifacts / f"lesson-07-{width}.png")
    assert not page.problems
    close(page)
