"""The dashboard as a person uses it: turn a knob, press Run, watch, press Stop, close the tab; nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import POINTS, Server, ranks, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# The figures follow the page's width when the browser gets to it, so this is waited for.
NOTHING_OVERFLOWS = """() => document.documentElement.scrollWidth === document.documentElement.clientWidth
    && [...document.querySelectorAll(".js-plotly-plot")].map((plot) => plot.getBoundingClientRect())
        .every((box) => box.left >= 0 && box.right <= innerWidth)"""


def open_lab(page: Any, server: Server, query: str = "", lab: str = "00_start") -> Any:
    page.goto(f"{server.url}/voila/render/{lab}.ipynb?{query}")
    page.get_by_role("button", name="Run", exact=True).wait_for(timeout=90_000)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    return page


def knob(page: Any, label: str) -> Any:
    return page.get_by_role("textbox", name=re.compile(rf"^{label}"))


def set_knob(page: Any, label: str, text: str) -> None:
    knob(page, label).fill(text)
    knob(page, label).press("Enter")


def status(page: Any) -> str:
    return page.locator(".gd-status").inner_text()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def copied_link(page: Any) -> str:
    """Return the link of what the kernel has heard so far: one that was shown earlier does not change."""
    press(page, "Copy link")
    return page.get_by_label("Link to these settings").input_value()


def finish(page: Any, timeout_s: float = 60) -> None:
    page.wait_for_function("() => !document.querySelector('.gd-run').disabled", timeout=1000 * timeout_s)


def close(page: Any) -> None:
    """Close the tab as a person does: with the page's last words, which Playwright leaves out unless asked."""
    page.close(run_before_unload=True)


def test_a_knob_a_run_a_stop_and_a_closed_tab(page: Any, dashboard: Server, artifacts: Path) -> None:
    open_lab(page, dashboard)
    set_knob(page, "Workers", "3")
    set_knob(page, "Updates", "100000")
    page.get_by_label("Step time", exact=True).select_option("Constant")
    wait_until(lambda: "3 real worker processes" in status(page), 10, "the knob arrived in the kernel")
    assert not ranks(dashboard)
    press(page, "Run")
    wait_until(lambda: len(ranks(dashboard)) >= 3, 40, "three worker processes were started")
    first = wait_until(lambda: page.evaluate(POINTS, "loss"), 40, "the first points are drawn")
    wait_until(lambda: page.evaluate(POINTS, "loss") > first + 20, 30, "the figure goes on growing")
    page.screenshot(path=artifacts / "dashboard-while-running.png", full_page=True)
    press(page, "Stop")
    wait_until(lambda: not ranks(dashboard), 10, "no worker process is left")
    finish(page)
    assert "top" in status(page) and page.locator(".gd-history tbody tr").count() == 1
    close(page)
    wait_until(lambda: not dashboard.kernels(), 20, "the kernel has gone with its tab")
    assert not page.problems


def test_a_reload_in_the_middle_of_a_run_leaves_no_process(page: Any, dashboard: Server) -> None:
    open_lab(page, dashboard)
    set_knob(page, "Updates", "100000")
    press(page, "Run")
    before = wait_until(lambda: {p.pid for p in ranks(dashboard)}, 40, "the workers run")
    page.reload()
    wait_until(lambda: not before & {p.pid for p in ranks(dashboard)}, 20, "the old workers have gone")
    page.get_by_role("button", name="Run", exact=True).wait_for(timeout=90_000)
    wait_until(lambda: len(dashboard.kernels()) == 1, 20, "the old kernel has gone")
    close(page)
    wait_until(lambda: not dashboard.kernels(), 20, "the kernel has gone with its tab")


def test_a_dead_kernel_takes_its_workers_along_and_the_page_says_so(page: Any, dashboard: Server) -> None:
    open_lab(page, dashboard)
    set_knob(page, "Updates", "100000")
    press(page, "Run")
    workers = wait_until(lambda: ranks(dashboard), 40, "the workers run")
    dashboard.kernels()[0].kill()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive
    page.get_by_role("alert").filter(has_text="kernel does not answer").wait_for(timeout=40_000)
    close(page)


def test_bad_texts_are_explained_and_nothing_is_lost(page: Any, dashboard: Server) -> None:
    open_lab(page, dashboard)
    set_knob(page, "Learning rate", "0.05")
    for text in ("abc", "-1", "1000000000", "1.5", "0"):
        set_knob(page, "Workers", text)
        said = "'abc'" if text == "abc" else text
        wait_until(lambda said=said: f"workers = {said} cannot be" in status(page), 10, f"{text} is explained")
        assert "whole number from 1 to 100,000" in status(page) and knob(page, "Workers").input_value() == text
    press(page, "Run")
    wait_until(lambda: "Not started" in status(page), 10, "Run is refused")
    assert knob(page, "Workers").get_attribute("aria-invalid") == "true"
    assert knob(page, "Learning rate").input_value() == "0.05"
    slider = page.get_by_label("Learning rate, slider")
    before = slider.input_value()
    set_knob(page, "Learning rate", "fast")
    wait_until(lambda: "1 more field is wrong too" in status(page), 10, "both are counted")
    for label in ("Workers", "Learning rate"):
        assert knob(page, label).get_attribute("aria-invalid") == "true", "each wrong field is marked"
    assert slider.input_value() == before, "a slider stays where it was"
    set_knob(page, "Learning rate", "0.05")
    set_knob(page, "Workers", "2")
    wait_until(lambda: "2 real worker processes" in status(page), 10, "a good text mends it")
    assert not dashboard.workers() or not ranks(dashboard)
    close(page)


CLICKED = """() => {
  const run = document.querySelector(".gd-run");
  run.click();
  return run.disabled;
}"""


def test_run_is_shut_from_the_click_on_and_opens_when_it_was_refused_or_has_ended(page: Any, dashboard: Server) -> None:
    open_lab(page, dashboard, "updates=20&workers=2")
    set_knob(page, "Workers", "none")
    wait_until(lambda: "workers = 'none'" in status(page), 10, "the knob is explained")
    assert page.evaluate(CLICKED), "a second click cannot overtake the kernel's answer"
    wait_until(lambda: "Not started" in status(page), 10, "Run is refused")
    finish(page, 5)
    set_knob(page, "Workers", "2")
    for number in (1, 2):
        assert page.evaluate(CLICKED)
        finish(page)
        assert page.locator(".gd-history tbody tr").count() == number, "each press is one run"
    close(page)


def test_a_link_opens_the_same_settings_and_a_bad_one_is_explained(
        new_page: Callable[..., Any], dashboard: Server) -> None:  # fmt: skip
    page = open_lab(new_page(), dashboard)
    set_knob(page, "Workers", "5")
    page.get_by_label("Strategy", exact=True).select_option("Async")
    wait_until(lambda: "5 real worker processes" in status(page), 10, "the knobs arrived")
    link = wait_until(lambda: "Async" in (text := copied_link(page)) and text, 20, "the link names the strategy")
    assert link.startswith(dashboard.url) and "workers=5" in link
    page.goto(link)
    page.get_by_role("button", name="Run", exact=True).wait_for(timeout=90_000)
    wait_until(lambda: knob(page, "Workers").input_value() == "5", 20, "the settings are back")
    wait_until(lambda: page.get_by_label("Strategy", exact=True).input_value() == "Async", 20, "the strategy is back")
    open_lab(page, dashboard, "workers=abc")
    assert "The link cannot be followed" in status(page) and knob(page, "Workers").input_value() == "4"
    assert "Traceback" not in page.content()
    close(page)


def test_a_link_copied_in_the_moment_after_a_knob_was_turned_has_the_knob_in_it(page: Any, dashboard: Server) -> None:
    open_lab(page, dashboard)
    page.evaluate("""() => {
        const knob = [...document.querySelectorAll("select")].find((node) => node.ariaLabel === "Strategy"
            || node.labels?.[0]?.textContent.startsWith("Strategy"));
        knob.value = "Async";
        knob.dispatchEvent(new Event("change", { bubbles: true }));
        [...document.querySelectorAll("button")].find((node) => node.textContent === "Copy link").click();
    }""")  # sooner than any answer of the kernel
    field = page.get_by_label("Link to these settings")
    wait_until(lambda: "Async" in field.input_value(), 20, "the link names the strategy")
    assert field.is_visible()
    close(page)


def test_files_are_saved_from_the_page(page: Any, dashboard: Server, tmp_path: Path) -> None:
    open_lab(page, dashboard, "problem=Quadratic&workers=2&updates=20")
    press(page, "Run")
    finish(page)
    wait_until(lambda: page.get_by_role("button", name="CSV").is_enabled(), 20, "there is something to save")
    for button, start in (("CSV", b"worker,"), ("Parquet", b"PAR1"), ("HTML", b"<!doctype"), ("PNG", b"\x89PNG")):
        with page.expect_download() as started:
            press(page, button)
        started.value.save_as(tmp_path / button)
        assert (tmp_path / button).read_bytes().startswith(start)
    close(page)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_after_runs_nothing_overflows_in_either_theme(
        theme: str, new_page: Callable[..., Any], dashboard: Server, artifacts: Path) -> None:  # fmt: skip
    page = open_lab(new_page(), dashboard, f"theme={theme}&updates=60&workers=2")
    press(page, "Run")
    finish(page)
    page.get_by_label("Strategy", exact=True).select_option("Async")
    press(page, "Run")
    page.wait_for_function("() => document.querySelectorAll('.gd-history tbody tr').length === 2", timeout=60_000)
    finish(page)
    for width, height in ((1280, 1750), (700, 3600)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(800)
        page.screenshot(path=artifacts / f"dashboard-{theme}-{width}.png")
        page.wait_for_function(NOTHING_OVERFLOWS, timeout=20_000)
    page.set_viewport_size({"width": 1280, "height": 900})
    run = page.get_by_role("button", name="Run", exact=True).bounding_box()
    assert run["y"] + run["height"] < 400, "a newcomer sees Run without scrolling"
    assert not page.problems
    close(page)


def test_a_lesson_shows_its_run_and_only_its_knobs(page: Any, dashboard: Server, artifacts: Path) -> None:
    open_lab(page, dashboard, lab="03_staleness")
    wait_until(lambda: page.evaluate(POINTS, "loss") > 100, 20, "the lesson's own run is drawn")
    assert page.locator(".gd-figure").count() == 2
    page.locator(".gd-row label").nth(3).wait_for()
    labels = page.locator(".gd-row label").all_inner_texts()
    assert labels[0].startswith("Workers") and len(labels) == 4
    page.screenshot(path=artifacts / "lesson-03.png", full_page=True)
    assert not page.problems
    close(page)


def test_a_slow_browser_follows_a_run_to_its_last_point(page: Any, dashboard: Server) -> None:
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": 4})
    open_lab(page, dashboard, "updates=100&workers=2&compute_time=Constant&compute_time.value=0.02")
    press(page, "Run")
    wait_until(lambda: 0 < page.evaluate(POINTS, "loss") and "100 of 100" not in status(page), 60, "figures grow live")
    page.wait_for_function("() => document.querySelector('.gd-history tbody tr')", timeout=90_000)
    finish(page, 90)
    last = "() => document.querySelector('.gd-figure-loss .js-plotly-plot').data.at(-1).x.at(-1)"
    wait_until(lambda: page.evaluate(last) == 100, 30, "the last point is drawn")
    close(page)


@pytest.mark.slow
def test_a_crashed_browser_stops_the_workers(chromium: str, dashboard: Server) -> None:
    from conftest import CHROMIUM_FLAGS
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        page = opened.new_page()
        open_lab(page, dashboard)
        set_knob(page, "Updates", "1000000")
        press(page, "Run")
        wait_until(lambda: ranks(dashboard), 40, "the workers run")
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # a zombie's command line is gone too
                if "chrom" in process.name() and "--headless" in " ".join(process.cmdline()):
                    process.kill()
        wait_until(lambda: not ranks(dashboard), 90, "the heartbeat's silence stopped the workers")
