"""The launcher and the zygote: starting, stopping, and leaving nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import PATIENCE_S, alive, play, until

import gdlab as gd
import gdlab.backends
from gdlab.backends import launcher
from gdlab.backends.launcher import current_launcher


def two() -> gd.Experiment:
    return gd.Experiment(problem=gd.Quadratic(), workers=2)


def in_new_interpreter(code: str, **environment: str) -> subprocess.Popen:
    """Run code in an interpreter that finds gdlab and the dummy roles."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                            env=os.environ | {"PYTHONPATH": path} | environment)


def test_launching_loads_no_torch_in_the_calling_process():
    with in_new_interpreter("import sys, gdlab; gdlab.launch; print('torch' in sys.modules)") as process:
        assert process.communicate()[0].strip() == "False"


def test_the_zygote_has_one_thread():
    assert gdlab.backends.warm(PATIENCE_S)
    assert psutil.Process(current_launcher()._zygote._process.pid).num_threads() == 1


def test_a_run_goes_from_starting_to_done_and_every_process_leaves(monkeypatch):
    play(monkeypatch, "short")
    run = gd.launch(two())
    assert run.state in ("starting", "running")
    run.wait(PATIENCE_S)
    assert run.state == "done" and len(run.pids) == 2 and not alive(run._pids.values())
    assert run.trace.ended["how"] == "done" and run.trace.ended["reason"] == "updates"
    log = (run.folder / "log-rank1.txt").read_text()
    assert f"threads 1 cwd {os.getcwd()} stdin {os.stat('/dev/null').st_rdev}" in log


def test_ranks_outlive_the_thread_that_launched_them(monkeypatch):
    play(monkeypatch, "beats")
    runs: list[gd.Run] = []
    thread = threading.Thread(target=lambda: runs.append(gd.launch(two())))
    thread.start()
    thread.join()
    until(lambda: runs[0].state == "running", "the run runs")
    time.sleep(0.3)
    assert len(alive(runs[0].pids)) == 2
    runs[0].stop()
    runs[0].wait(PATIENCE_S)


def test_stop_ends_every_process_and_a_second_stop_does_nothing(monkeypatch):
    play(monkeypatch, "beats")
    run = gd.launch(two())
    until(lambda: run.state == "running", "the run runs")
    run.stop()
    run.stop()
    assert isinstance(run.wait(PATIENCE_S), gd.Trace)
    run.stop()
    assert run.state == "stopped" and not alive(run._pids.values()) and run.trace.ended["reason"] == "stop"


def test_stop_ends_a_process_that_does_not_listen(monkeypatch):
    play(monkeypatch, "deaf")
    run = gd.launch(two())
    until(lambda: run.pids, "the ranks have started")
    run.stop()
    run.wait(PATIENCE_S)
    assert run.state == "stopped" and not alive(run._pids.values())


def test_a_run_can_be_stopped_before_its_processes_exist(monkeypatch):
    play(monkeypatch, "beats")
    run = gd.launch(two())
    run.stop()
    run.wait(PATIENCE_S)
    assert run.state == "stopped" and not alive(run._pids.values())


def test_waiting_too_short_says_what_is_going_on(monkeypatch):
    play(monkeypatch, "beats")
    run = gd.launch(two())
    with pytest.raises(TimeoutError, match="has not ended after"):
        run.wait(0.05)
    run.stop()
    run.wait(PATIENCE_S)


def test_many_runs_go_on_at_once(monkeypatch):
    play(monkeypatch, "beats")
    runs = [gd.launch(two()) for _ in range(4)]
    until(lambda: all(run.state == "running" for run in runs), "all run")
    assert len({pid for run in runs for pid in run.pids}) == 8
    for run in runs:
        run.stop()
    for run in runs:
        run.wait(PATIENCE_S)
        assert run.state == "stopped"


def test_what_a_process_started_goes_with_it(monkeypatch):
    play(monkeypatch, "parent")
    run = gd.launch(two())
    run.wait(PATIENCE_S)
    children = [int((run.folder / f"child-{rank}").read_text()) for rank in (0, 1)]
    until(lambda: not alive(children), "the children are gone")


def test_a_dead_zygote_fails_its_runs_and_the_next_launch_starts_another(monkeypatch):
    play(monkeypatch, "beats")
    run = gd.launch(two())
    until(lambda: run.state == "running", "the run runs")
    os.kill(current_launcher()._zygote._process.pid, signal.SIGKILL)
    with pytest.raises(gd.RankFailed, match="The process that starts workers ended"):
        run.wait(PATIENCE_S)
    until(lambda: not alive(run._pids.values()), "the ranks are gone")
    play(monkeypatch, "short")
    again = gd.launch(two())
    again.wait(PATIENCE_S)
    assert again.state == "done"


def test_an_idle_zygote_leaves_and_comes_back_when_needed(monkeypatch):
    mine = launcher.Launcher()
    try:
        assert mine.warm(PATIENCE_S)
        with monkeypatch.context() as impatient:
            impatient.setattr(launcher, "IDLE_S", 0.2)
            mine.wake()
            until(lambda: mine._zygote is None, "the zygote has left")
        assert mine.warm(PATIENCE_S)
    finally:
        mine.close()


LAUNCH_TWO = """
import time, gdlab as gd
from gdlab.backends import launcher
from gdlab.backends.topology import topology_of
def topology(experiment, backend):
    real = topology_of(experiment, backend)
    for process in real.processes:
        process["target"] = "dummy_roles:beats"
    return real
launcher.topology_of = topology
run = gd.launch(gd.Experiment(problem=gd.Quadratic(), workers=2))
while run.state != "running":
    time.sleep(0.01)
print(launcher.current_launcher()._zygote._process.pid, *run._pids.values(), flush=True)
"""


@pytest.mark.parametrize("end", ["SIGKILL", "exit"])
def test_nothing_outlives_the_calling_process(end: str):
    last = {"SIGKILL": "time.sleep(60)", "exit": ""}[end]
    with in_new_interpreter(LAUNCH_TWO + last) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4
        if end == "SIGKILL":
            assert len(alive(pids)) == 4
            process.kill()
        process.wait(PATIENCE_S)
        until(lambda: not alive(pids), "everybody is gone")


def test_a_forked_copy_of_the_caller_starts_a_zygote_of_its_own():
    code = LAUNCH_TWO + """
import os, sys, warnings
warnings.simplefilter("ignore")
ours = launcher.current_launcher()._zygote._process.pid
pid = os.fork()
if pid == 0:
    run = gd.launch(gd.Experiment(problem=gd.Quadratic(), workers=2))
    while run.state != "running":
        time.sleep(0.01)
    other = launcher.current_launcher()._zygote._process.pid
    run.stop()
    run.wait()
    launcher._close()
    os._exit(0 if other != ours else 1)
print(os.waitpid(pid, 0)[1], run.state, flush=True)
"""
    with in_new_interpreter(code) as process:
        lines = process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert lines[1] in ("0 running", "0 done")  # a slow machine may take longer than the run does


@pytest.mark.timeout(180)
def test_where_fork_is_unsafe_fresh_interpreters_do_the_same():
    code = """
import gdlab as gd
trace = gd.run(gd.Experiment(problem=gd.Quadratic(), workers=2, updates=5), timeout_s=60)
print(len(trace.applied), trace.path_versions[-1])
"""
    with in_new_interpreter(code, GDLAB_START="spawn") as process:
        assert process.communicate(timeout=150)[0].split() == ["10", "5"]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"experiment": "digits"}, "launch needs a gd.Experiment, not str"),
    ({"backend": "cloud"}, "backend = 'cloud' is not known: it must be one of local, virtual"),
    ({"timeout_s": 0}, "timeout_s = 0 cannot be"),
    ({"timeout_s": float("nan")}, "timeout_s = nan cannot be"),
    ({"experiment": gd.Experiment(workers=1000)}, "workers = 1000 is too many for real processes here"),
])
def test_what_cannot_be_run_is_refused_in_a_sentence_before_anything_starts(arguments, message):
    with pytest.raises(gd.ExperimentError) as refused:
        gd.launch(**{"experiment": two()} | arguments)
    assert message in str(refused.value) and str(refused.value).endswith(".")


def test_a_folder_that_holds_a_run_is_not_used_again(monkeypatch, tmp_path: Path):
    play(monkeypatch, "short")
    gd.launch(two(), folder=tmp_path / "run").wait(PATIENCE_S)
    with pytest.raises(FileExistsError, match="already holds a run"):
        gd.launch(two(), folder=tmp_path / "run")
