"""The charts on a page: all of them go on at a slow browser, none loses a point, themes and widths are followed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import plotly
import pytest
from servers import Server, serving, wait_until

from gdlab.views import style

pytestmark = [pytest.mark.browser, pytest.mark.timeout(180)]

CHARTS, FRAMES, POINTS = 8, 40, 10

SETUP = f"""
import asyncio, ipywidgets, numpy as np, plotly.graph_objects as go
from gdlab.panel.chart import Chart
from gdlab.views import style

def base(number):
    fig = style.figure(f"Chart {{number}}", "updates", "loss", style.caption(None))
    fig.add_scatter(x=[], y=[], mode="lines", line_color=style.INK, name="a")
    fig.add_scatter(x=[], y=[], mode="markers", name="b")
    return fig

class SlowChart(Chart):
    # The page takes longer over this one than anywidget allows: two seconds, after which it passes nothing on.
    _esm = "await new Promise((go) => setTimeout(go, 3000));\\n" + Chart._esm

charts = [(SlowChart if number == 1 else Chart)(base(number)) for number in range({CHARTS})]

async def grow():
    for frame in range({FRAMES}):
        x = np.arange(frame * {POINTS}, (frame + 1) * {POINTS}) * 1.0
        for chart in charts:
            chart.apply([{{"op": "extend", "trace": t, "x": x, "y": np.sin(x / 50) + t}} for t in (0, 1)])
        await asyncio.sleep(0.1)
    for number, chart in enumerate(charts):
        final = base(number)
        for trace in final.data:
            x = np.arange({FRAMES * POINTS}) * 1.0
            trace.update(x=x, y=np.cos(x / 50))
        style.describe(final, f"The end of chart {{number}}.")
        chart.show(final)

task = asyncio.get_event_loop().create_task(grow())
"""
SHOW = """
boxes = [ipywidgets.Box([chart], layout=dict(min_width="0", overflow="hidden")) for chart in charts]
columns = "repeat(auto-fit, minmax(min(100%, 380px), 1fr))"
ipywidgets.GridBox(boxes, layout=dict(grid_template_columns=columns, width="100%"))
"""
LENGTHS = """() => [...document.querySelectorAll(".gd-chart")].map(
    (box) => Math.min(...(box.data ?? [{}]).map((trace) => trace.x?.length ?? 0)))"""
ENDED = """([charts, points]) => {
  const boxes = [...document.querySelectorAll(".gd-chart")];
  return boxes.length === charts && boxes.every((box) => box.data?.length === 2
    && box.data.every((trace) => trace.x?.length === points && Math.abs(trace.y[0] - 1) < 1e-9));
}"""


LABELS = """(axes) => axes.map((yaxis) => {
  Plotly.react("chart", [{ x: [0, 1], y: [1, 2] }], { margin: { t: 76, b: 44 }, yaxis });
  return [...document.querySelectorAll(".ytick text")].filter((text) => text.textContent).length;
})"""


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("charts")
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in (SETUP, SHOW)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, folder / "charts.ipynb")
    return folder


@pytest.fixture(scope="module")
def voila(notebooks: Path) -> Iterator[Server]:
    root = str(Path(__file__).resolve().parents[2])
    words = ["-m", "voila", "charts.ipynb", "--no-browser", "--port", "{port}", "--Voila.ip=127.0.0.1"]
    with serving(words, notebooks, ready="/static/", PYTHONPATH=root) as server:
        yield server


def throttle(page: Any, times: float) -> None:
    page.context.new_cdp_session(page).send("Emulation.setCPUThrottlingRate", {"rate": times})


def errors(page: Any) -> list[str]:
    """Return what the page threw; Voila's own template asks other hosts for fonts, which is not the charts' doing."""
    known = "Failed to initialize model"  # what anywidget says of the slow chart
    return [problem for problem in page.problems if problem.startswith("error") and known not in problem]


def wait_for_the_end(page: Any, timeout_s: float = 90.0) -> None:
    page.wait_for_function(ENDED, arg=[CHARTS, FRAMES * POINTS], timeout=1000 * timeout_s)


def test_a_logarithmic_axis_has_two_to_eight_labels_whatever_it_spans(page: Any) -> None:
    page.set_content("<div id=chart style='width: 400px; height: 400px'></div>")
    page.add_script_tag(path=Path(plotly.__file__).with_name("package_data") / "plotly.min.js")
    spans = [(low, low + decades) for low in np.linspace(-3, 1, 9) for decades in np.geomspace(0.05, 9, 25)]
    axes = [style.log_axis(np.power(10.0, span)) | {"range": padded(*span)} for span in spans]
    counts = page.evaluate(LABELS, axes)
    assert min(counts) >= 2 and max(counts) <= 8


def padded(low: float, high: float) -> list[float]:
    """Return the range that Plotly draws, a little wider than the data."""
    return [low - (high - low) / 18, high + (high - low) / 18]


def test_eight_charts_go_on_at_a_browser_that_is_four_times_slower(voila: Server, page: Any) -> None:
    throttle(page, 4)
    page.goto(voila.url, wait_until="commit")
    page.wait_for_function(f"({LENGTHS})().filter((n) => n > 0).length === {CHARTS}", timeout=90_000)
    before = page.evaluate(LENGTHS)
    if max(before) < FRAMES * POINTS:  # else the page came so late that the run had ended
        page.wait_for_function(f"({LENGTHS})().every((n, i) => n > {before}[i])", timeout=60_000)
    wait_for_the_end(page)
    assert errors(page) == []


def test_after_a_reload_in_the_middle_no_point_is_missing(voila: Server, page: Any) -> None:
    page.goto(voila.url, wait_until="commit")
    page.wait_for_function(f"({LENGTHS})().some((n) => n > 0)", timeout=60_000)
    page.reload(wait_until="commit")
    wait_for_the_end(page)
    assert errors(page) == []


def test_charts_follow_the_theme_and_the_width_and_say_what_they_show(voila: Server, page: Any) -> None:
    page.goto(voila.url, wait_until="commit")
    wait_for_the_end(page)
    first = page.locator(".gd-chart").first
    assert first.get_attribute("role") == "img"
    assert first.get_attribute("aria-label").startswith("Chart 0")
    said = page.locator(f"#{first.get_attribute('aria-describedby')}").text_content()
    assert said == "The end of chart 0."
    colour = "() => document.querySelector('.gd-chart').layout.template.layout.font.color"
    assert page.evaluate(colour) == "#1f2430"
    page.evaluate("() => { document.body.dataset.jpThemeLight = 'false'; }")
    page.wait_for_function(f"({colour})() === '#e9ebf0'")
    for width in (1280, 700, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(
            """() => [...document.querySelectorAll(".gd-chart")].every((box) => {
                const drawn = box.querySelector(".main-svg").getBoundingClientRect();
                const inside = box.getBoundingClientRect().right <= innerWidth + 1;
                return inside && Math.abs(drawn.width - box.clientWidth) < 2;
            })"""
        )
    assert errors(page) == []




@pytest.fixture(scope="module")
def jupyter(notebooks: Path) -> Iterator[Server]:
    root = str(Path(__file__).resolve().parents[2])
    words = ["-m", "jupyterlab", "--no-browser", "--port", "{port}", "--ServerApp.port_retries=0", "--allow-root"]
    with serving(words, notebooks, token="charts", ready="/api", PYTHONPATH=root) as server:
        yield server


def test_in_jupyterlab_a_page_that_is_reloaded_while_its_kernel_goes_on_misses_no_point(
    jupyter: Server, notebooks: Path, page: Any
) -> None:
    page.goto(f"{jupyter.url}/lab/tree/charts.ipynb?token={jupyter.token}&reset")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=60_000)
    wait_until(jupyter.kernels, 60, "a kernel was started")  # before that the page says idle too
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=60_000)
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Shift+Enter")
    page.wait_for_function(f"({LENGTHS})().some((n) => n > 0)", timeout=60_000)
    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")  # what is not saved has no output to restore
    wait_until(lambda: "widget-view" in (notebooks / "charts.ipynb").read_text(), 20, "the notebook was saved")
    page.reload()
    wait_for_the_end(page)
    assert errors(page) == []
