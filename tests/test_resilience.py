"""What goes wrong with one run, its folder or the launcher itself is told, and ends no other run."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
from processes import PATIENCE_S, alive, play, until

import gdlab as gd
import gdlab.backends
from gdlab.backends import launcher, limits, virtual
from gdlab.backends.failures import of_exit
from gdlab.backends.launcher import Launcher, current_launcher
from gdlab.backends.limits import Limits
from gdlab.backends.runs import Run
from gdlab.backends.supervise import Supervision
from gdlab.backends.virtual import simulate
from gdlab.trace import TraceError

TWO = gd.Experiment(problem=gd.Quadratic(), workers=2)


def running() -> Run:
    """Launch a run and wait until each of its processes lives: the first to be there is enough for its state."""
    run = gd.launch(TWO)
    until(lambda: run.state == "running", "the run runs")
    slots = [run.shared.slot(at) for at in range(run.shared.slots)]
    until(lambda: all(slot.phase == "sleeping" for slot in slots), "every process beats")
    return run


@pytest.fixture
def mine(monkeypatch):
    """Give a launcher of this test's own, which `gd.launch` uses."""
    own = Launcher()
    monkeypatch.setattr(gdlab.backends, "current_launcher", lambda: own)
    yield own
    own.close()


@pytest.mark.parametrize("step", ["request", "started", "tick", "exited"])
def test_what_goes_wrong_with_one_run_ends_that_run_and_no_other(monkeypatch, step: str):
    play(monkeypatch, "beats")
    good = running()
    real = getattr(Supervision, step)

    def broken(self, *arguments):
        if self.run is not good and (step != "exited" or self.run.pids):
            raise OSError("no space left on device")
        return real(self, *arguments)

    monkeypatch.setattr(Supervision, step, broken)
    bad = gd.launch(TWO)
    if step == "exited":
        until(lambda: bad.pids, "the ranks have started")
        os.kill(bad.pids[0], signal.SIGKILL)
    with pytest.raises(gd.RankFailed, match=r"The run's folder cannot be used \(OSError: no space left on device"):
        bad.wait(PATIENCE_S)
    until(lambda: not alive(bad._pids.values()), "the ranks are gone")
    assert bad.state == "failed" and good.state == "running" and len(alive(good.pids)) == 2
    good.stop()
    good.wait(PATIENCE_S)
    assert good.state == "stopped"


def test_an_import_path_with_what_is_no_text_harms_nobody(monkeypatch, tmp_path: Path):
    play(monkeypatch, "short")
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, None])
    run = gd.launch(TWO)
    run.wait(PATIENCE_S)
    assert run.state == "done"


def test_a_run_ends_though_its_folder_is_gone_and_nobody_can_be_told(monkeypatch):
    play(monkeypatch, "beats")
    stopped, killed = running(), running()
    for run in (stopped, killed):
        shutil.rmtree(run.folder)
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    stopped.stop()
    with pytest.raises(TraceError, match="There is no run at"):
        stopped.wait(PATIENCE_S)
    os.kill(killed.pids[1], signal.SIGKILL)
    with pytest.raises(gd.RankFailed, match="Rank 1 was killed by SIGKILL") as caught:
        killed.wait(PATIENCE_S)
    assert (stopped.state, killed.state, caught.value.trace) == ("stopped", "failed", None)
    assert current_launcher().serves


def test_a_run_that_failed_before_it_could_start_is_not_started_later(mine: Launcher):
    run = gd.launch(TWO)
    until(lambda: mine._zygote, "the zygote is being started")
    os.kill(mine._zygote._process.pid, signal.SIGKILL)
    with pytest.raises(gd.RankFailed, match="The process that starts workers ended"):
        run.wait(PATIENCE_S)
    assert not mine._waiting and not mine._active


def test_a_closed_launcher_says_so_and_a_dead_one_is_replaced(mine: Launcher, monkeypatch):
    mine.close()
    with pytest.raises(RuntimeError, match="This process is ending and starts no run any more"):
        gd.launch(TWO)
    monkeypatch.setattr(launcher, "_current", mine)
    another = current_launcher()
    assert another is not mine and another.serves
    another.close()
    monkeypatch.setattr(launcher, "_closed", True)
    with pytest.raises(RuntimeError, match="This process is ending"):
        current_launcher()


def test_a_forked_copy_does_not_wait_for_ever_for_its_parents_run(monkeypatch):
    play(monkeypatch, "beats")
    run = running()
    monkeypatch.setattr(run, "_process", 1)
    with pytest.raises(RuntimeError, match="The run belongs to process 1, which launched it"):
        run.wait()
    monkeypatch.undo()
    run.stop()
    run.wait(PATIENCE_S)


def test_of_launches_into_one_folder_at_once_one_gets_it(monkeypatch, tmp_path: Path):
    play(monkeypatch, "short")
    folder, results = tmp_path / "one", []

    def launch() -> None:
        try:
            results.append(gd.launch(TWO, folder=folder))
        except FileExistsError as error:
            results.append(error)

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    runs = [result for result in results if isinstance(result, Run)]
    assert len(runs) == 1 and len(results) == 4
    runs[0].wait(PATIENCE_S)


@pytest.mark.parametrize("name", ["run.json", "shared_state.bin", "events-server.bin", "path.bin", "losses.bin"])
def test_a_folder_with_what_is_left_of_a_run_is_refused(name: str, tmp_path: Path):
    (tmp_path / name).touch()
    with pytest.raises(FileExistsError, match="already holds a run, or what is left of one: choose another folder"):
        gd.launch(TWO, folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_folder_without_a_name_is_refused():
    with pytest.raises(gd.ExperimentError, match=r'folder = "" cannot be'):
        gd.launch(TWO, folder="")


def test_a_stop_reaches_its_processes_though_the_zygote_is_halted(monkeypatch):
    play(monkeypatch, "deaf")
    monkeypatch.setattr(launcher, "HALTED_S", 0.6)
    first = gd.launch(TWO)
    until(lambda: first.pids, "the ranks have started")
    zygote = current_launcher()._zygote._process.pid
    os.kill(zygote, signal.SIGSTOP)
    second = gd.launch(TWO)
    try:
        for run in (first, second):
            run.stop()
        for run in (first, second):
            run.wait(PATIENCE_S)
            assert run.state == "stopped" and not alive(run._pids.values())
    finally:
        os.kill(zygote, signal.SIGCONT)
    assert current_launcher()._zygote._process.pid == zygote


@pytest.mark.parametrize("end", [{"seconds": 1.0}, {"target_loss": -1.0}, {"seconds": 1.0, "target_loss": -1.0}])
def test_a_run_whose_end_never_comes_ends_at_the_most_updates_there_may_be(monkeypatch, end, tmp_path: Path):
    monkeypatch.setattr(limits, "MAX_UPDATES", 50)
    trace = simulate(TWO.replace(updates=None, compute_time=0.0, strategy="async", **end), tmp_path)
    assert trace.ended["reason"] == "updates" and trace.path_versions[-1] == 50


def test_the_limits_are_the_experiments_own_or_the_largest_there_are():
    most = limits.MAX_UPDATES, limits.MAX_SECONDS
    assert Limits.of(TWO.replace(updates=5)) == (5, float("inf"))
    assert Limits.of(TWO.replace(updates=5, seconds=2.0)) == (5, 2.0)
    assert Limits.of(TWO.replace(updates=None, seconds=2.0)) == (most[0], 2.0)
    assert Limits.of(TWO.replace(updates=None, target_loss=0.1)) == most


def test_many_workers_that_start_at_once_do_not_hold_up_a_stop(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(virtual, "LOOK_EVERY", 10)
    monkeypatch.setattr(virtual, "LOOK_S", 0.0)
    looks = []
    simulation = virtual.Simulation(TWO.replace(workers=40, strategy="async"), tmp_path, lambda: looks.append(1))
    for rank in range(40):
        simulation._begin(rank, 0.0)
    assert len(looks) == 4


def test_a_target_that_the_start_meets_needs_no_update(tmp_path: Path):
    trace = simulate(TWO.replace(target_loss=1e9), tmp_path)
    assert trace.ended["reason"] == "target_loss" and trace.path_versions.tolist() == [0] and not len(trace.applied)
    assert trace.summary()["updates"] == 0


def test_an_error_that_a_full_disk_swallows_says_so(tmp_path: Path):
    told = of_exit(tmp_path, "rank", 1, 2, "computing step 5").sentence()
    assert "that could not be written to the run's folder (is the disk full, or the folder gone?) while" in told
