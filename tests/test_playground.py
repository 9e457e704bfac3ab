"""The panel without a browser: runs, frames, history, links, heartbeats, and never a run that nobody asked for."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdlab as gd
from gdlab.panel import controls, export, history, runner
from gdlab.panel.heartbeat import HIDDEN_DEADLINE_S, VISIBLE_DEADLINE_S, Heartbeat
from gdlab.panel.playground import Playground
from gdlab.trace import PUSH, Chunk

SMALL = gd.Experiment(problem=gd.Quadratic(), workers=2, updates=30)


@pytest.fixture(autouse=True)
def _no_link(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("QUERY_STRING", raising=False)
    yield


def in_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 50))


async def until(holds: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen: {what}"
        await asyncio.sleep(0.02)


def press(playground: Playground, name: str) -> None:
    playground.controls._handle_custom_msg({"press": name}, [])


# ---- real runs ----

def test_making_a_panel_starts_nothing_and_needs_no_loop() -> None:
    playground = Playground(SMALL)
    assert not playground.controls.busy and playground.trace is None and playground.runner.run is None
    assert "2 real worker processes" in playground.controls.message
    assert "application/vnd.jupyter.widget-view+json" in playground._repr_mimebundle_()


def test_run_once_returns_the_trace_and_fills_the_figures_and_the_history(tmp_path: Any) -> None:
    playground = Playground(SMALL, backend="virtual")
    trace = playground.run_once()
    assert trace.summary()["updates"] == 30 and playground.trace.folder == trace.folder
    assert playground.controls.fraction == 1.0 and "30 of 30 updates" in playground.controls.count
    assert not playground.controls.busy and len(playground.history.widget.runs) == 1 and playground.export.ready
    line = playground.figures.charts["loss"].figure["data"][-1]
    assert len(line["x"]) == 31
    press(playground, "reset")
    assert playground.controls.fraction == 0.0 and playground.controls.count == ""


def test_an_interrupted_cell_stops_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRun()
    monkeypatch.setattr(runner, "launch", lambda *_: fake)
    monkeypatch.setattr(runner, "Follower", lambda _folder: SimpleNamespace(read=lambda: chunk_of(1)))

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.time, "sleep", interrupt)
    playground = Playground(SMALL, figures=["timeline"])
    with pytest.raises(KeyboardInterrupt):
        playground.run_once()
    assert fake.stopped and not playground.controls.busy and "interrupted" in playground.controls.message


def test_run_stop_and_run_again_from_the_buttons(tmp_path: Any) -> None:
    async def body() -> None:
        playground = Playground(SMALL.replace(updates=1_000_000, compute_time=gd.Constant(0.01)))
        press(playground, "run")
        assert playground.controls.busy
        await until(lambda: playground._updates > 3, "updates are counted")
        run = playground.runner.run
        press(playground, "run")  # refused: one run at a time
        assert playground.runner.run is run and len(run.pids) == 2
        press(playground, "stop")
        await until(lambda: not playground.controls.busy, "the run has stopped")
        assert run.state == "stopped" and playground.trace.summary()["updates"] > 3
        playground.form.set("updates", "20")
        press(playground, "run")
        await until(lambda: not playground.controls.busy, "the second run is done")
        assert playground.controls.fraction == 1.0 and len(playground.history.entries) == 2
        names = [row["name"] for row in playground.history.widget.runs]
        assert "20" in names[1] and names[0] != names[1]

    in_loop(body)


def test_a_page_that_goes_away_stops_the_workers(tmp_path: Any) -> None:
    async def body() -> None:
        playground = Playground(SMALL.replace(updates=1_000_000, compute_time=gd.Constant(0.01)))
        playground.heartbeat._handle_custom_msg({"beat": "page"}, [])
        press(playground, "run")
        await until(lambda: playground._updates > 0, "the run goes on")
        run = playground.runner.run
        playground.heartbeat._handle_custom_msg({"beat": "page", "bye": True}, [])
        await until(lambda: run.state == "stopped", "the workers were stopped")

    in_loop(body)


def test_a_killed_worker_is_named_and_the_next_run_works(tmp_path: Any) -> None:
    async def body() -> None:
        playground = Playground(SMALL.replace(updates=1_000_000, compute_time=gd.Constant(0.01)))
        press(playground, "run")
        await until(lambda: playground._updates > 0, "the run goes on")
        os.kill(playground.runner.run.pids[1], signal.SIGKILL)
        await until(lambda: not playground.controls.busy, "the failure was noticed")
        assert "ank 1" in playground.controls.message and playground.controls.tone == "error"
        playground.form.set("updates", "5")
        press(playground, "run")
        await until(lambda: not playground.controls.busy, "the next run is done")
        assert playground.controls.tone == "info" and playground.controls.fraction == 1.0

    in_loop(body)


# ---- errors become one sentence ----

def test_run_with_a_bad_setting_is_refused_in_one_sentence_and_nothing_is_lost() -> None:
    async def body() -> None:
        playground = Playground(SMALL)
        playground.form.set("workers", "abc")
        press(playground, "run")
        assert not playground.runner.busy and playground.controls.tone == "error"
        assert playground.controls.message.startswith("Not started: workers = 'abc'")
        assert {row.path: row.text for row in playground.form.rows}["workers"] == "abc"
        press(playground, "reset")
        assert playground.controls.tone == "info" and playground.experiment == SMALL

    in_loop(body)


@pytest.mark.parametrize("broken", ["launch", "make", "frame"])
def test_what_goes_wrong_in_a_run_is_said_and_the_panel_stays_usable(broken: str, monkeypatch: Any) -> None:
    fake = FakeRun()

    def fail(*_: Any) -> None:
        raise RuntimeError("the moon is full")

    monkeypatch.setattr(runner, "launch", fail if broken == "launch" else lambda *_: fake)
    monkeypatch.setattr(runner, "Follower", lambda _folder: SimpleNamespace(read=lambda: chunk_of(1)))

    async def body() -> None:
        playground = Playground(SMALL)
        if broken != "launch":
            monkeypatch.setattr(playground.runner, f"_{broken}", fail)
        press(playground, "run")
        await until(lambda: not playground.controls.busy, "the failure was noticed")
        assert playground.controls.message == "The moon is full." and playground.controls.tone == "error"
        assert broken == "launch" or fake.stopped

    in_loop(body)


def test_unknown_backends_and_figures_are_refused() -> None:
    with pytest.raises(gd.ExperimentError, match="cloud"):
        Playground(SMALL, backend="cloud")
    with pytest.raises(gd.ExperimentError, match="fireworks"):
        Playground(SMALL, figures=["fireworks"])
    assert list(Playground(SMALL, figures="timeline").figures.charts) == ["timeline"]


# ---- from a run to the page ----

class FakeRun:
    """A run whose state a test sets."""

    def __init__(self) -> None:
        self.state, self.message, self.folder, self.backend = "running", "running", "nowhere", "local"
        self.experiment, self.environment, self.stopped, self.error = SMALL, {}, False, None

    def stop(self) -> None:
        self.stopped, self.state = True, "stopped"


def chunk_of(count: int) -> Chunk:
    none = np.empty(0, PUSH)
    pushes = np.zeros(count, PUSH)
    return Chunk(pushes, none, np.empty(0, "i8"), np.empty((0, 2)), np.empty(0, [("version", "i8"), ("loss", "f8")]))


def test_at_most_ten_frames_a_second_and_the_last_is_always_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    run, frames, ended = FakeRun(), [], []
    monkeypatch.setattr(runner, "launch", lambda *_: run)
    monkeypatch.setattr(runner, "Follower", lambda _folder: SimpleNamespace(read=lambda: chunk_of(len(frames))))

    async def body() -> None:
        joined = runner.Runner(lambda _run: None, lambda _run, chunk: len(chunk.pushes), frames.append,
                           lambda _run: "finished", lambda *what: ended.append(what))  # fmt: skip
        began = time.monotonic()
        assert joined.start([SMALL], "local") and joined.busy and not joined.start([SMALL], "local")
        await asyncio.sleep(0.5)
        await until(lambda: frames, "a first frame was delivered")
        run.state = "done"
        await until(lambda: ended, "the end was told")
        assert 2 <= len(frames) <= 2 + (time.monotonic() - began) / runner.FRAME_S
        assert frames[-1].last and not any(frame.last for frame in frames[:-1])
        assert [frame.made for frame in frames] == list(range(len(frames))) and ended == [(run, "finished", None)]

    in_loop(body)


def test_a_slow_frame_holds_up_neither_the_loop_nor_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    run, threads, ticks = FakeRun(), set(), []
    monkeypatch.setattr(runner, "launch", lambda *_: run)
    monkeypatch.setattr(runner, "Follower", lambda _folder: SimpleNamespace(read=lambda: chunk_of(0)))

    def make(_run: Any, _chunk: Any) -> None:
        threads.add(threading.current_thread())
        time.sleep(0.2)

    async def body() -> None:
        joined = runner.Runner(lambda _run: None, make, lambda _frame: None, lambda _run: None, lambda *_: None)
        joined.start([SMALL], "local")
        for _ in range(20):
            ticks.append(time.monotonic())
            await asyncio.sleep(0.02)
        joined.stop()
        await until(lambda: not joined.busy, "it has ended")

    in_loop(body)
    assert threading.main_thread() not in threads and run.stopped and len(ticks) == 20


def test_a_message_on_another_thread_is_taken_on_the_loop() -> None:
    async def body() -> None:
        seen: list[threading.Thread] = []
        joined = runner.Runner(*[lambda *_: None] * 5)
        other = threading.Thread(target=joined.call, args=(lambda: seen.append(threading.current_thread()),))
        other.start()
        await until(lambda: seen, "the call arrived")
        assert seen == [threading.main_thread()]

    in_loop(body)


# ---- heartbeats ----

def test_a_silent_page_is_given_up_later_when_it_is_hidden() -> None:
    now, lost = [0.0], []
    heart = Heartbeat(lambda: lost.append(now[0]), clock=lambda: now[0])
    for hidden, deadline in ((False, VISIBLE_DEADLINE_S), (True, HIDDEN_DEADLINE_S)):
        lost.clear()
        now[0] = 0.0
        heart._handle_custom_msg({"beat": "a", "hidden": hidden}, [])
        now[0] = deadline - 1
        heart.check()
        assert not lost and heart.pages == 1
        now[0] = deadline + 1
        heart.check()
        heart.check()
        assert len(lost) == 1 and heart.pages == 0


def test_the_workers_stay_while_another_page_shows_the_panel() -> None:
    lost, found = [], []
    heart = Heartbeat(lambda: lost.append(1), lambda: found.append(1))
    heart._handle_custom_msg({"beat": "a"}, [])
    heart._handle_custom_msg({"beat": "b"}, [])
    heart._handle_custom_msg({"beat": "a", "bye": True}, [])
    assert not lost and found == [1]
    heart._handle_custom_msg({"beat": "b", "bye": True}, [])
    assert lost == [1]


def test_silence_while_the_kernel_itself_was_busy_does_not_count() -> None:
    now, lost = [0.0], []
    heart = Heartbeat(lambda: lost.append(1), clock=lambda: now[0])
    heart._handle_custom_msg({"beat": "a"}, [])
    now[0] = 100.0
    heart.check(late_s=99.0)
    assert not lost


# ---- links and files ----

def test_a_link_brings_its_settings_back(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Playground(SMALL)
    there.form.set("workers", "3")
    there.form.set("clip", "norm")
    monkeypatch.setenv("QUERY_STRING", f"{there.export.query}&theme=dark&voila-theme=dark")
    here = Playground(gd.Experiment())
    assert here.experiment == there.experiment and here.controls.tone == "info"
    press(here, "reset")
    assert here.experiment == gd.Experiment()


@pytest.mark.parametrize("query, said", [
    ("workers=abc", "workers"), ("nonsense=1", "nonsense"), ("strategy=Magic", "strategy"),
    ("workers.x=1", "workers"), ("optimizer.lr=nan", "lr"),
])  # fmt: skip
def test_a_bad_link_is_explained_in_one_sentence_and_defaults_hold(query: str, said: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("QUERY_STRING", query)
    playground = Playground(SMALL)
    assert playground.experiment == SMALL and playground.controls.tone == "error"
    assert "The link" in playground.controls.message and said in playground.controls.message


def test_a_link_names_no_function_but_the_page_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = gd.Experiment(problem=gd.Torch("mine:make"), workers=2)
    monkeypatch.setenv("QUERY_STRING", "problem=Torch&problem.factory=os:abort&workers=3")
    for page in (SMALL, own):
        playground = Playground(page)
        assert playground.experiment == page and playground.controls.tone == "error"
        assert "os:abort" in playground.controls.message and playground.controls.message.count(". ") == 0
    monkeypatch.setenv("QUERY_STRING", own.replace(workers=3).to_query())
    assert Playground(own).experiment == own.replace(workers=3)


@pytest.mark.parametrize("kind, start", [("csv", b"worker,step,"), ("parquet", b"PAR1"), ("html", b"<!doctype html>")])
def test_the_last_run_is_exported(kind: str, start: bytes, tmp_path: Any) -> None:
    playground = Playground(SMALL, backend="virtual", figures=["loss"])
    trace = playground.run_once()
    sent: list[Any] = []
    playground.export.send = lambda content, buffers=None: sent.append((content, buffers))
    playground.export._handle_custom_msg({"make": kind}, [])
    content, (data,) = sent[0]
    assert data.startswith(start) and content["file"] == f"{trace.folder.name}.{kind}"


def test_a_file_too_large_for_a_page_is_named_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(export, "MAX_BYTES", 10)
    sent: list[Any] = []
    widget = export.Export(lambda kind: None)
    widget.send = lambda content, buffers=None: sent.append(content)
    widget.hand_over("csv", b"x" * 11, tmp_path)
    assert str(tmp_path) in sent[0]["note"] and "file" not in sent[0]


# ---- history and progress ----

def test_each_heading_that_is_cut_short_is_said_in_full() -> None:
    assert set(history.TITLES) <= set(history.COLUMNS) and "communicating" in history.TITLES["wait + comm."]


def test_the_history_is_bounded_and_its_runs_can_be_hidden_used_and_forgotten(tmp_path: Any) -> None:
    playground = Playground(SMALL.replace(updates=5), backend="virtual", figures=["loss"])
    for workers in (1, 2):
        playground.form.set("workers", str(workers))
        playground.run_once()
    first, second = playground.history.entries
    assert len(playground.figures.charts["loss"].figure["data"]) == 4
    message = playground.history.widget._handle_custom_msg
    message({"show": first.id, "on": False}, [])
    assert playground.history.shown == [second] and len(playground.figures.charts["loss"].figure["data"]) == 2
    message({"use": first.id}, [])
    assert playground.experiment.workers == 1
    message({"forget": first.id}, [])
    message({"forget": "no such run"}, [])
    assert playground.history.entries == [second]
    for _ in range(history.MAX_RUNS + 2):
        playground.history.add(second.trace, "virtual")
    assert len(playground.history.entries) == history.MAX_RUNS


def test_only_runs_of_one_problem_are_drawn_together(tmp_path: Any) -> None:
    playground = Playground(SMALL.replace(updates=5), backend="virtual", figures=["loss"])
    playground.run_once()
    playground.form.set("problem", "Saddle")
    playground.run_once()
    assert [entry.shown for entry in playground.history.entries] == [False, True]
    assert [row["color"] == "transparent" for row in playground.history.widget.runs] == [True, False]


def test_progress_follows_the_end_that_is_nearest() -> None:
    assert controls.progress(SMALL, 15, 99.0) == 0.5
    assert controls.progress(SMALL.replace(seconds=2.0), 15, 1.5) == 0.75
    assert controls.progress(SMALL.replace(updates=None, target_loss=0.1), 15, 1.0) == -1.0
    assert controls.counted(SMALL, 15, 1.5, True) == "15 of 30 updates · 1.50 simulated s"
