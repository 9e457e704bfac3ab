"""The same notebook in JupyterLab: run its cells, press Run, watch, Stop; restart and close leave no worker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from servers import POINTS, Server, ranks, serving, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]



def open_lab(page: Any, server: Server, lab: str = "00_start") -> Any:
    open_cells(page, server, lab)
    page.locator(".js-plotly-plot .main-svg").first.wait_for(timeout=60_000)
    return page


def open_cells(page: Any, server: Server, lab: str) -> None:
    page.goto(f"{server.url}/lab/tree/{lab}.ipynb?token={server.token}&reset")
    page.locator(".jp-Notebook .jp-CodeCell").first.wait_for(timeout=90_000)
    wait_until(server.kernels, 60, "a kernel was started")  # before that the page says idle too
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for(timeout=90_000)
    menu(page, "Run", "Run All Cells")
    page.get_by_role("button", name="Run", exact=True).wait_for(timeout=60_000)


def menu(page: Any, title: str, entry: str) -> None:
    page.get_by_role("menuitem", name=title, exact=True).click()
    page.get_by_role("menuitem", name=re.compile(f"^{entry}")).first.click()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def set_knob(page: Any, label: str, text: str) -> None:
    box = page.get_by_role("textbox", name=re.compile(rf"^{label}"))
    box.fill(text)
    box.press("Enter")


def start_a_long_run(page: Any, server: Server) -> list[psutil.Process]:
    set_knob(page, "Updates", "100000")
    press(page, "Run")
    return wait_until(lambda: len(found := ranks(server)) >= 4 and found, 40, "four worker processes were started")


def test_run_watch_and_stop_in_a_notebook(page: Any, jupyterlab: Server, artifacts: Path) -> None:
    open_lab(page, jupyterlab)
    assert not ranks(jupyterlab)
    start_a_long_run(page, jupyterlab)
    first = wait_until(lambda: page.evaluate(POINTS, "loss"), 40, "the first points are drawn")
    wait_until(lambda: page.evaluate(POINTS, "loss") > first + 20, 30, "the figure goes on growing")
    page.screenshot(path=artifacts / "jupyterlab-while-running.png")
    press(page, "Stop")
    wait_until(lambda: not ranks(jupyterlab), 10, "no worker process is left")
    page.wait_for_function("() => !document.querySelector('.gd-run').disabled", timeout=60_000)
    page.screenshot(path=artifacts / "jupyterlab-after.png")
    for plot in page.locator(".js-plotly-plot").all():
        over = plot.evaluate("""(p) => p.getBoundingClientRect().right
            - p.closest('.jp-OutputArea').getBoundingClientRect().right""")
        assert over <= 0, "a figure overflows its cell"
    link = copied_link(page)
    assert link.startswith(f"{jupyterlab.url}/voila/render/00_start.ipynb?") and "updates=100000" in link
    assert not page.problems


def copied_link(page: Any) -> str:
    press(page, "Copy link")
    return page.get_by_label("Link to these settings").input_value()


def test_a_restarted_kernel_and_a_closed_tab_leave_no_worker(page: Any, jupyterlab: Server) -> None:
    open_lab(page, jupyterlab)
    workers = start_a_long_run(page, jupyterlab)
    menu(page, "Kernel", "Restart Kernel…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    _, alive = psutil.wait_procs(workers, timeout=15)
    assert not alive, "a restarted kernel's workers are gone"
    open_lab(page, jupyterlab)
    workers = start_a_long_run(page, jupyterlab)
    page.close(run_before_unload=True)
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive, "a closed tab stops the run"


def test_the_dark_theme_is_followed(page: Any, jupyterlab: Server, artifacts: Path) -> None:
    settings = f"{jupyterlab.url}/lab/api/settings/@jupyterlab/apputils-extension:themes"
    answer = page.request.put(settings, data={"raw": '{"theme": "JupyterLab Dark"}'},
                              headers={"Authorization": f"token {jupyterlab.token}"})  # fmt: skip
    assert answer.ok
    open_lab(page, jupyterlab)
    set_knob(page, "Updates", "30")
    press(page, "Run")
    page.wait_for_function("() => document.querySelectorAll('.gd-history tbody tr').length === 1", timeout=60_000)
    page.wait_for_timeout(1000)
    page.screenshot(path=artifacts / "jupyterlab-dark.png")
    title = page.locator(".js-plotly-plot .gtitle").first
    ink = lambda: re.findall(r"\d+", title.evaluate("(t) => getComputedStyle(t).fill"))[:3]
    wait_until(lambda: min(map(int, ink())) > 150, 20, "the ink is light on a dark page")
    assert not page.problems


def test_a_busy_notebook_is_not_called_dead_and_a_dead_one_is(page: Any, tmp_path: Path) -> None:
    panel = "import os, time, gdlab as gd\np = gd.Playground(figures=[])\np.heartbeat.answer_within_s = 3.0\np"
    first = "while not os.path.exists('noticed'):\n    time.sleep(0.1)"
    cells = [nbformat.v4.new_code_cell(source) for source in (panel, first, "time.sleep(4)")]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), tmp_path / "busy.ipynb")
    words = ["-m", "jupyterlab", "--no-browser", "--port", "{port}", "--ServerApp.port_retries=0", "--allow-root"]
    root = str(Path(__file__).resolve().parents[2])
    with serving(words, tmp_path, token="busy", ready="/api", PYTHONPATH=root) as server:
        open_cells(page, server, "busy")
        page.locator(".gd-busy").filter(has_text="still running its cells").wait_for(timeout=30_000)
        page.get_by_role("menuitem", name="Kernel", exact=True).click()  # nothing covers the menus
        page.keyboard.press("Escape")
        (tmp_path / "noticed").touch()
        page.locator(".gd-busy").wait_for(state="detached", timeout=30_000)
        assert page.locator(".gd-gone").count() == 0
        server.kernels()[0].kill()
        gone = page.get_by_role("alert").filter(has_text="kernel does not answer")
        gone.wait_for(timeout=40_000)
        assert gone.get_by_role("button").count() == 0, "a reload would lose the other panels"
