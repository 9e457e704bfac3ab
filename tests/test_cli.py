"""The command line: what it says, and what it leaves with."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

import gdlab
from gdlab import cli
from gdlab.dashboard import serve


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run the command line in this process and return (exit code, stdout, stderr)."""
    try:
        code = cli.main(list(words))
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--workers", "0"],
        ["run", "--workers", "-1"],
        ["run", "--workers", "1.5"],
        ["run", "--workers", "abc"],
        ["run", "--workers", "1000000000"],
        ["run", "--optimizer.lr", "nan"],
        ["run", "--optimizer.lr", "-1"],
        ["run", "--strategy", "Bogus"],
        ["run", "--strategy", "Async", "--strategy.staleness_bound", "-3"],
        ["run", "--strategy.bogus", "1"],
        ["run", "--bogus", "1"],
        ["run", "--workers"],
        ["run", "--workers", "--seed"],
        ["run", "workers", "4"],
        ["run", "--backend", "nowhere"],
        ["lab", "--port", "0"],
        ["lab", "--port", "x"],
        ["dashboard", "--port", "70000"],
        ["lab", "--prt", "1"],
        ["dashboard", "no/such/folder"],
        ["frobnicate"],
        [],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_answered_in_one_sentence_and_with_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *words)
    assert code == cli.BAD_INPUT
    assert out == ""
    assert err.strip() and err.count("\n") == 1
    assert "Traceback" not in err


def test_the_message_names_the_field_the_value_and_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = said(capsys, "run", "--workers", "0")
    assert "workers" in err
    assert "0" in err
    assert "100,000" in err


def test_flags_and_their_equals_form_build_the_same_experiment() -> None:
    apart = cli.experiment_from(["--workers", "3", "--strategy", "Async", "--strategy.staleness_bound", "2"])
    joined = cli.experiment_from(["--workers=3", "--strategy=Async", "--strategy.staleness-bound=2"])
    assert apart == joined == gdlab.Experiment(workers=3, strategy=gdlab.Async(staleness_bound=2))


def test_every_field_of_the_experiment_is_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, "run", "--help")
    assert code == 0
    assert [name for name in gdlab.Experiment.model_fields if name != "kind" and f"--{name} " not in out] == []


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version")[1].split() == ["gdlab", gdlab.__version__]


QUICK = ["run", "--problem", "Quadratic", "--workers", "2", "--updates", "5", "--compute_time", "0.001"]


def test_a_folder_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, *QUICK, "--backend", "virtual", "--folder", "/proc/none")
    assert code == cli.BAD_INPUT
    assert "/proc/none" in err
    assert err.count("\n") == 1


def test_a_run_that_fails_says_why_and_leaves_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "run", "--problem", "Torch", "--problem.factory", "nosuch:factory", "--workers", "2")
    assert code == cli.FAILED
    assert "nosuch" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("backend", ["virtual", "local"])
def test_a_run_prints_its_summary(backend: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = said(capsys, *QUICK, "--backend", backend, "--folder", str(tmp_path / "run"))
    assert code == 0, err
    assert "updates" in out
    assert ("Measured: 2 ranks" if backend == "local" else "Simulated (virtual time)") in out
    assert "nan" not in out
    assert str(tmp_path / "run") in out


def test_a_run_prints_its_summary_as_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, err = said(capsys, *QUICK, "--backend", "virtual", "--json")
    assert code == 0, err
    assert json.loads(out)["updates"] == 5


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind((serve.ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(serve.ServeError, match=str(port)):
            serve.free_port(port, 0)


def test_without_a_port_the_first_free_one_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind((serve.ADDRESS, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve.free_port(None, port) > port


def test_without_a_screen_no_browser_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not serve.has_screen()
    monkeypatch.setenv("DISPLAY", ":0")
    assert serve.has_screen()


def become(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep the words of the program that this one would become."""
    words: list[str] = []
    monkeypatch.setattr(os, "execve", lambda path, argv, env: words.extend(argv))
    return words


def test_jupyterlab_listens_on_this_machine_only_and_keeps_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    words = become(monkeypatch)
    serve.serve_lab(browser=False)
    assert "--ServerApp.ip=127.0.0.1" in words
    assert "--no-browser" in words
    assert "--LabApp.default_url=/lab/tree/00_start.ipynb" in words
    assert not [word for word in words if "token" in word.lower() or "password" in word.lower()]


@pytest.mark.parametrize(("user", "allowed"), [(0, True), (1000, False)])
def test_only_root_is_allowed_to_be_root(user: int, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    words = become(monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    serve.serve_lab(browser=False)
    assert ("--allow-root" in words) is allowed


def test_an_installed_package_copies_its_notebooks_and_never_over_the_readers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed = tmp_path / "share" / "labs"
    installed.mkdir(parents=True)
    (installed / serve.START).write_text("new")
    monkeypatch.setattr(serve, "labs_folder", lambda: installed)
    monkeypatch.chdir(tmp_path)
    copy = serve.notebooks_to_edit()
    assert (copy / serve.START).read_text() == "new"
    (copy / serve.START).write_text("mine")
    assert (serve.notebooks_to_edit() / serve.START).read_text() == "mine"
