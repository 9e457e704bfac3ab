"""The lessons as a reader takes them: predict, commit, run, read what happened, check oneself, export the progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import Server, ranks, wait_until
from test_dashboard_browser import NOTHING_OVERFLOWS, close, finish, press, status
from test_jupyterlab_browser import open_lab

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


SPILLED = """() => [...document.querySelectorAll('.jp-Cell')]
    .filter((cell) => Math.abs(cell.offsetHeight - cell.scrollHeight) > 1).map((cell) => cell.innerText.slice(0, 60))"""


def open_lesson(page: Any, server: Server, lab: str) -> Any:
    page.goto(f"{server.url}/voila/render/{lab}.ipynb", wait_until="commit")  # the page is sent as its cells are run
    page.get_by_role("button", name="Export as JSON").wait_for(timeout=120_000)
    return page


def keep(page: Any, path: Path) -> None:
    """Take a picture of the whole lesson: it scrolls inside the page, so the window is made as high as it is."""
    page.set_viewport_size({"width": 1280, "height": 5600})
    page.wait_for_timeout(1000)
    page.screenshot(path=path)
    page.set_viewport_size({"width": 1280, "height": 900})


def piece(page: Any, question: str) -> Any:
    """Return the prediction or check that asks a question."""
    return page.locator(".gd-box").filter(has_text=question).first


def choose(page: Any, question: str, option: str) -> Any:
    asked = piece(page, question)
    asked.get_by_label(option, exact=True).check()
    asked.get_by_role("button").click()
    return asked


def said(box: Any) -> str:
    return box.locator(".gd-said").inner_text()


def results(page: Any) -> list[str]:
    """Return what each comparison says, in the order of the page."""
    return page.locator(".gd-compare .gd-said").all_inner_texts()


def test_a_lesson_from_prediction_to_progress(page: Any, dashboard: Server, artifacts: Path, tmp_path: Path) -> None:
    open_lesson(page, dashboard, "04_precision")
    assert all("is shown here when" in text for text in results(page)), "nothing is told before the reader commits"
    assert "1.03125" not in page.content()
    keep(page, artifacts / "lesson-04-before.png")

    press(page, "Run")
    wait_until(lambda: "Not started: first commit" in status(page), 20, "Run waits for the prediction")
    asked = piece(page, "At which value does it stop?")
    field = asked.get_by_role("textbox")
    for text, why in (("many", "is no number"), ("7", "at most 2")):
        field.fill(text)
        field.press("Enter")
        wait_until(lambda why=why: why in said(asked), 20, f"{text} is explained")
    field.fill("1.0")
    asked.get_by_role("button", name="Commit").click()
    wait_until(lambda: "Locked: you predict 1. Now press Run." in said(asked), 20, "the prediction is locked")
    assert field.is_disabled() and asked.get_by_role("button").is_disabled()
    wait_until(lambda: "run has ended" in results(page)[1], 20, "the comparison waits for the run")

    press(page, "Run")
    wait_until(lambda: "120 of 120" in page.locator(".gd-count").inner_text(), 90, "the real run has ended")
    finish(page)
    wait_until(lambda: "it was 1.03125" in results(page)[1], 20, "the prediction is compared with what happened")
    assert "too low" in results(page)[1]
    page.locator(".gd-compared .js-plotly-plot .main-svg").first.wait_for(timeout=40_000)

    choose(page, "In fp32, which sum", "only 1 + 1e-10")
    wait_until(lambda: "So it was" in results(page)[0], 20, "a choice is compared")
    asked = choose(page, "You halve the learning rate", "nearer to 1")
    wait_until(lambda: said(asked).startswith("Not so."), 20, "a wrong answer is told why")
    choose(page, "You halve the learning rate", "farther from 1")
    wait_until(lambda: said(asked).startswith("Right."), 20, "the right answer is graded")
    keep(page, artifacts / "lesson-04-after.png")

    with page.expect_download() as started:
        press(page, "Export as JSON")
    started.value.save_as(tmp_path / "progress.json")
    pieces = json.loads((tmp_path / "progress.json").read_text())["pieces"]
    mine = pieces["You halve the learning rate, to be more careful, and stay in bf16. Where does the weight stop?"]
    assert mine["right"] is True and mine["attempts"] == 2 and mine["lab"] == "04_precision"
    reader = page.evaluate("localStorage.getItem('gdlab-reader')")
    kept = dashboard.log.parent / "runs" / f"progress-{reader}.json"
    assert json.loads(kept.read_text()) == pieces, "other readers of this server have files of their own"
    assert not page.problems
    close(page)


def test_a_range_is_drawn_with_the_keyboard_and_nothing_overflows(
        page: Any, dashboard: Server, artifacts: Path) -> None:  # fmt: skip
    open_lesson(page, dashboard, "05_clipping")
    asked = piece(page, "How long will the longest step")
    least = asked.get_by_label("Least that you expect, slider")
    least.focus()
    before = asked.get_by_label("Least that you expect", exact=True).input_value()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    wait_until(lambda: asked.get_by_label("Least that you expect", exact=True).input_value() != before, 10, "it moves")
    most = asked.get_by_label("Most that you expect", exact=True)
    most.fill("50")
    asked.get_by_role("button", name="Commit").focus()
    page.keyboard.press("Enter")
    wait_until(lambda: "Locked: you predict" in said(asked) and "to 50" in said(asked), 20, "the range is locked")
    four_runs_side_by_side(page, dashboard, artifacts / "lesson-05-side-by-side.png")
    keep(page, artifacts / "lesson-05-range.png")
    for width in (1280, 700, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(NOTHING_OVERFLOWS, timeout=20_000)
    for box in page.locator(".gd-box form").all():
        assert box.get_attribute("aria-labelledby"), "a screen reader is told what is asked"
    assert not page.problems
    close(page)


PANELS = """(panel) => panel.querySelector('.gd-figure-clip .js-plotly-plot').data
    .filter((line) => line.name === "loss").map((line) => line.x.length)"""


def four_runs_side_by_side(page: Any, server: Server, picture: Path) -> None:
    """Start the lesson's four variants, see all of them grow at once, and stop them."""
    panel = page.locator(".gd-panel", has=page.locator(".gd-run")).filter(has_text="average of the three clipped")
    panel.get_by_role("textbox", name="What is the average").fill("0")
    panel.get_by_role("button", name="Commit").click()
    wait_until(lambda: "with 12 real worker processes" in panel.locator(".gd-status").inner_text(), 20, "it may run")
    panel.get_by_role("button", name="Run", exact=True).click()
    first = wait_until(lambda: min(now := panel.evaluate(PANELS) or [0]) > 3 and now, 60, "four panels are drawn")
    assert len(first) == 4 and len(ranks(server)) >= 12
    wait_until(lambda: min(panel.evaluate(PANELS)) > max(first), 30, "all of them grow")
    panel.screenshot(path=picture)
    panel.locator(".gd-stop").evaluate("(button) => button.click()")  # it may have ended by itself
    wait_until(lambda: not ranks(server), 20, "no worker process is left")
    wait_until(lambda: panel.locator(".gd-history tbody tr").count() == 4, 20, "four runs are kept")


@pytest.mark.parametrize("width", [700, 770, 1280])
def test_no_text_lies_on_a_figure_when_a_lesson_opens(
        width: int, new_page: Callable[..., Any], dashboard: Server) -> None:  # fmt: skip
    page = new_page(viewport={"width": width, "height": 900})
    page.goto(f"{dashboard.url}/voila/render/03_staleness.ipynb", wait_until="commit")
    page.locator(".gd-run").wait_for(timeout=120_000)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    wait_until(lambda: not page.evaluate(SPILLED), 10, "no cell is higher than the room that it was given")
    left = [page.locator(name).first.bounding_box()["x"] for name in (".gd-panel", ".jp-RenderedMarkdown")]
    assert left[0] == pytest.approx(left[1], abs=1), "the panel and the text begin on one line"
    close(page)


def test_in_jupyterlab_folded_cells_ask_and_a_commitment_shows_what_happened(
        page: Any, jupyterlab: Server, artifacts: Path) -> None:  # fmt: skip
    page.set_viewport_size({"width": 1280, "height": 7000})  # JupyterLab draws only what is in sight
    open_lab(page, jupyterlab, "04_precision")
    page.get_by_role("button", name="Export as JSON").wait_for(timeout=120_000)
    assert page.get_by_text("because=").count() == 0, "code that tells an answer is folded"
    choose(page, "In fp32, which sum", "both")
    wait_until(lambda: "What happened: only 1 + 1e-10" in results(page)[0], 20, "a choice is compared")
    asked = piece(page, "At which value does it stop?")
    asked.get_by_role("textbox").fill("1.03")
    asked.get_by_role("textbox").press("Enter")
    wait_until(lambda: "Now press Run" in said(asked), 20, "the prediction is locked")
    press(page, "Run")
    wait_until(lambda: "which is close enough" in results(page)[1], 90, "the run has ended and is compared")
    page.wait_for_timeout(1000)
    page.screenshot(path=artifacts / "lesson-04-jupyterlab.png")
    assert not page.problems
