"""Settings that hold for every test, and the fixtures that need a browser or a server."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

hypothesis.settings.register_profile("gdlab", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("gdlab")

# Every process that a test starts, however far removed, inherits this: what is left of them can be
# found among all the processes of a shared machine.
SESSION = "GDLAB_TEST_SESSION"
os.environ[SESSION] = uuid.uuid4().hex

GRACE_S = 10.0


def started_by_tests() -> list[psutil.Process]:
    """Return the living processes that this session's tests have started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(SESSION) == os.environ[SESSION]:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def is_ours_to_keep(process: psutil.Process) -> bool:
    """Tell whether a process may live until this one ends: the zygote and Python's own helpers."""
    try:
        command = " ".join(process.cmdline())
        return process.ppid() == os.getpid() and ("zygote" in command or "resource_tracker" in command)
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    yield
    deadline = time.monotonic() + GRACE_S
    while (left := [p for p in started_by_tests() if not is_ours_to_keep(p)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = []
    for process in left:
        try:
            names.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    if names:
        pytest.fail("The tests left processes behind: " + "; ".join(names))


@pytest.fixture(autouse=True)
def _runs_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDLAB_RUNS", str(tmp_path / "runs"))
