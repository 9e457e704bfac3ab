"""Settings that hold for every test, and the fixtures that need a browser or a server."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
from servers import Server, serving

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("gdlab", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("gdlab")

# One thread, as in every rank: small tensors take many times longer with more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every process that a test starts, however far removed, inherits this: what is left of them can be
# found among all the processes of a shared machine.
SESSION = "GDLAB_TEST_SESSION"
os.environ[SESSION] = uuid.uuid4().hex
GRACE_S = 10.0

REQUIRE_BROWSER = "GDLAB_REQUIRE_BROWSER"

# No look-up and no report to its maker's hosts; no sandbox, since CI runs as root.
CHROMIUM_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # The notebooks run in kernels of their own, which see the environment and no fixture.
    if "GDLAB_RUNS" not in os.environ:
        import tempfile

        folder = tempfile.mkdtemp(prefix="gdlab-tests-")
        os.environ["GDLAB_RUNS"] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # Where the browser is required, a browser test that was skipped is one that nobody has run.
    report = yield
    if report.skipped and os.environ.get(REQUIRE_BROWSER) and item.get_closest_marker("browser"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped although {REQUIRE_BROWSER} is set: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def _runs_in_a_folder_of_their_own(request: pytest.FixtureRequest) -> Iterator[None]:
    if "tmp_path" not in request.fixturenames:  # most tests need no folder: make none
        yield
        return
    before = os.environ["GDLAB_RUNS"]
    os.environ["GDLAB_RUNS"] = str(request.getfixturevalue("tmp_path") / "runs")
    yield
    os.environ["GDLAB_RUNS"] = before


def started_by_tests() -> list[psutil.Process]:
    """Return the living processes that this session's tests have started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION) == os.environ[SESSION]:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except psutil.Error:
            continue
    return found


def may_stay(process: psutil.Process) -> bool:
    """Tell whether a process may live until this one ends: the zygote, what torch serves, and Python's own helpers."""
    try:
        command = " ".join(process.cmdline())
        helpers = ("zygote", "autodiff.serve", "resource_tracker")
        return process.ppid() == os.getpid() and any(name in command for name in helpers)
    except psutil.Error:
        return True


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := [p for p in started_by_tests() if not may_stay(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in left:
        try:
            names.append(f"{process.pid} ({' '.join(process.cmdline())[:120]})")
            process.kill()
        except psutil.Error:
            continue
    if names:
        pytest.fail(f"The tests left {len(names)} processes behind: " + "; ".join(names))


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return Chromium's path; skips where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("Chromium is not installed: browser tests cannot run (Debian: apt-get install chromium)")
    return path


# One browser a module: Playwright keeps an event loop running in this thread while it is open, which
# tests of other modules that run a loop of their own would stumble over.
@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    """Give Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


@pytest.fixture
def new_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Give a function that opens a page of its own (keywords go to Playwright's new_context).

    `page.problems` lists the errors that the page threw and every request that left this machine.
    """
    contexts = []

    def opened(**keywords: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **keywords})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.problems = []
        page.on("pageerror", lambda error: _note_unless_jupyters_own(page, str(error)))
        page.on("request", lambda request: _note_if_outside(page, request.url))
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page: Callable[..., Any]) -> Any:
    """Give one page, 1280 by 900 pixels."""
    return new_page()


def _note_unless_jupyters_own(page: Any, error: str) -> None:
    # JupyterLab says this of every kernel that ends, or starts slowly, while it waits for an answer.
    if "Canceled future for" not in error:
        page.problems.append(f"error on the page: {error}")


def _note_if_outside(page: Any, url: str) -> None:
    if not url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:", "about:")):
        page.problems.append(f"request to another host: {url}")


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Return the folder whose files CI keeps."""
    folder = ROOT / "artifacts"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give the dashboard as `gdlab dashboard` starts it, on a free port."""
    folder = tmp_path_factory.mktemp("dashboard")
    with serving(["-m", "gdlab", "dashboard", "--no-browser", "--port", "{port}"], folder) as server:
        yield server


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give JupyterLab as `gdlab lab` starts it, on a free port; `.token` opens it."""
    folder = tmp_path_factory.mktemp("jupyterlab")
    # A copy: JupyterLab saves an open notebook every two minutes, outputs and all, and other tests read the labs.
    labs = shutil.copytree(ROOT / "labs", folder / "labs", ignore=shutil.ignore_patterns(".*"))
    words = ["-m", "gdlab", "lab", "--no-browser", "--port", "{port}", str(labs)]
    with serving(words, folder, token=uuid.uuid4().hex, ready="/api") as server:
        yield server
