"""The labs as pages, asked for over HTTP as a browser would: under a plain Jupyter server and under the dashboard."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import Server, serving, wait_until

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "gdlab" / "dashboard"
LABS = sorted((ROOT / "labs").glob("*.ipynb"))


def notebook(title: str, text: str, code: str) -> str:
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": f"# {title}\n\n{text}"},
        {"cell_type": "code", "id": "b", "metadata": {}, "source": code, "outputs": [], "execution_count": None},
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells})


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    (folder / "00_start.ipynb").write_text(notebook("The playground", "What happens?", "print('it', 'ran')"))
    (folder / "01_workers.ipynb").write_text(notebook("1. Workers", "More. What do <b>more</b> buy?", "secret = 1 / 0"))
    (folder / "02_broken.ipynb").write_text("{")
    return folder


@pytest.fixture(scope="module")
def plain(notebooks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give a plain Jupyter server that knows gdlab by its installed settings only."""
    # The checkout's own folders stand for those that pip puts below the environment's prefix.
    installed = {"JUPYTER_PATH": PACKAGE / "share/jupyter", "JUPYTER_CONFIG_PATH": PACKAGE / "etc/jupyter"}
    words = ["-m", "jupyter_server", "--ServerApp.port={port}", "--ServerApp.open_browser=False",
             "--ServerApp.ip=127.0.0.1", f"--ServerApp.root_dir={notebooks}"]  # fmt: skip
    if os.geteuid() == 0:
        words.append("--allow-root")
    environment = {name: str(place) for name, place in installed.items()}
    folder = tmp_path_factory.mktemp("plain")
    with serving(words, folder, token=uuid.uuid4().hex, ready="/api", **environment) as server:
        yield server


@pytest.fixture(scope="module")
def dashboard_of(notebooks: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give `gdlab dashboard` on the notebooks of this test."""
    words = ["-m", "gdlab", "dashboard", "--no-browser", "--port", "{port}", str(notebooks)]
    with serving(words, tmp_path_factory.mktemp("own")) as server:
        yield server


@pytest.fixture(params=["plain", "dashboard_of"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(request.param)


def landing(server: Server) -> str:
    status, _, html = server.get("/voila/tree/")
    assert status == 200
    return html


def test_a_lab_is_rendered_with_our_template_without_its_code(server: Server) -> None:
    status, _, html = server.get("/voila/render/00_start.ipynb")
    assert status == 200
    assert '<header class="gd-top">' in html
    assert '<a class="gd-skip" href="#rendered_cells">' in html
    assert "<title>The playground · gdlab</title>" in html
    assert "it ran" in html
    assert "print(" not in html


def test_the_page_sets_the_cookie_without_which_a_closed_tab_leaves_its_kernel(server: Server) -> None:
    _, headers, _ = server.get("/voila/render/00_start.ipynb")
    assert "_xsrf=" in headers.get("set-cookie", "")


def test_the_page_and_the_landing_page_ask_no_other_host_for_anything(server: Server) -> None:
    _, _, lab = server.get("/voila/render/00_start.ipynb")
    for html in (lab, landing(server)):
        assert re.findall(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>""", html) == []
        assert "cdnjs" not in re.sub(r'<script id="jupyter-config-data".*?</script>', "", html, flags=re.DOTALL)


@pytest.mark.parametrize(("theme", "light"), [("light", "true"), ("dark", "false")])
def test_the_page_takes_its_theme_from_the_address(server: Server, theme: str, light: str) -> None:
    _, _, html = server.get(f"/voila/render/00_start.ipynb?theme={theme}")
    assert f'data-jp-theme-light="{light}"' in html


def test_a_failing_lab_shows_no_traceback(server: Server) -> None:
    status, _, html = server.get("/voila/render/01_workers.ipynb")
    assert status == 200
    assert "There was an error when executing cell [1]. Reload the page to start again." in html
    assert "ZeroDivisionError" not in html
    assert "secret" not in html


def test_the_landing_page_needs_no_kernel_and_lists_each_lab_with_its_question(server: Server) -> None:
    before = len(server.kernels())
    html = landing(server)
    assert len(server.kernels()) <= before
    assert html.count("Open the playground") == 1
    assert 'href="/voila/render/00_start.ipynb"' in html
    assert 'href="/voila/render/01_workers.ipynb"' in html
    assert "Workers" in html
    assert "1. Workers" not in html
    assert "What do &lt;b" in html or "more" in html
    assert "<b>more" not in html


def test_a_broken_notebook_does_not_hide_the_others(server: Server) -> None:
    assert "Broken" in landing(server)


def test_a_page_that_does_not_exist_says_so_in_our_words(server: Server) -> None:
    status, _, html = server.get("/voila/render/99_nothing.ipynb")
    assert status == 404
    assert "Traceback" not in html


def test_a_folder_outside_the_served_one_cannot_be_listed(server: Server) -> None:
    for path in ("/voila/tree/..%2f..", "/voila/tree/%2fetc"):
        status, _, html = server.get(path)
        assert status in (400, 403, 404)
        assert "passwd" not in html


def test_the_dashboard_answers_to_this_machines_names_only(dashboard_of: Server) -> None:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", dashboard_of.port, timeout=30)
    connection.request("GET", "/", headers={"Host": "evil.example"})
    assert connection.getresponse().status == 403
    connection.close()


def test_the_dashboard_is_at_the_address_that_it_printed(dashboard_of: Server) -> None:
    text = wait_until(lambda: dashboard_of.log.read_text(), 10, "the address is printed")
    address = re.search(r"http://127\.0\.0\.1:(\d+)(/\S*)", text)
    assert address is not None
    assert int(address[1]) == dashboard_of.port
    status, _, html = dashboard_of.get(address[2])
    assert status == 200
    assert "Open the playground" in html


def test_a_kernel_goes_when_its_tab_says_goodbye(dashboard_of: Server) -> None:
    import http.client

    _, headers, html = dashboard_of.get("/voila/render/00_start.ipynb")
    found = re.search(r'"kernelId":\s*"([\w-]+)"', html)
    assert found is not None
    before = len(dashboard_of.kernels())
    cookie = headers["set-cookie"].split(";")[0]
    connection = http.client.HTTPConnection("127.0.0.1", dashboard_of.port, timeout=30)
    # As navigator.sendBeacon does: the cookie travels by itself, the token in the address.
    path = f"/voila/api/shutdown/{found[1]}?_xsrf={cookie.partition('=')[2]}"
    connection.request("POST", path, body="", headers={"Cookie": cookie})
    assert connection.getresponse().status == 204
    connection.close()
    wait_until(lambda: len(dashboard_of.kernels()) < before, 15, "the kernel is gone")


@pytest.mark.skipif(not LABS, reason="this checkout has no labs")
def test_lab_00_is_rendered_under_a_plain_jupyter_server(plain: Server, notebooks: Path) -> None:
    shutil.copyfile(ROOT / "labs/00_start.ipynb", notebooks / "10_real.ipynb")
    status, headers, html = plain.get("/voila/render/10_real.ipynb")
    assert status == 200
    assert '<header class="gd-top">' in html
    assert "_xsrf=" in headers.get("set-cookie", "")
    assert "There was an error" not in html
    assert "application/vnd.jupyter.widget-view+json" in html


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_each_lab_tells_the_landing_page_its_title_and_question(path: Path) -> None:
    from gdlab.dashboard.catalogue import describe

    lab = describe(path)
    assert lab["number"] == path.name[:2]
    assert lab["title"]
    assert lab["question"].endswith("?")
