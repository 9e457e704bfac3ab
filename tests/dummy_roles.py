"""Roles without arithmetic, for tests of the machinery that starts, watches and ends processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from gdlab.backends.shared_state import SharedState


def beats(job) -> None:
    """Beat for up to a minute, longer than any test takes, and leave when asked to."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    if job.index == 0:
        shared.t0 = time.monotonic()
    for step in range(3000):
        if shared.stop or shared.reason:
            return
        slot.enter("sleeping", step, step)
        time.sleep(0.02)


def short(job) -> None:
    """End at once, saying what the process found around it."""
    shared = SharedState(job.folder)
    if job.index == 0:
        shared.t0 = time.monotonic()
        shared.reason = "updates"
    print(f"threads {threading.active_count()} cwd {os.getcwd()} stdin {os.fstat(0).st_rdev}", flush=True)


def deaf(job) -> None:
    """Never look at the stop flag, in a loop that holds on to the interpreter."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    shared.t0 = time.monotonic()
    slot.enter("communicating")
    while True:
        pass


def parent(job) -> None:
    """Start a process of its own, and end without it."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(os.path.join(job.folder, f"child-{job.index}"), "w") as file:
        file.write(str(child.pid))
    short(job)


def quits(job) -> None:
    """Rank 1 leaves with an exit code and no error; the others beat."""
    if job.index == 1:
        os._exit(3)
    beats(job)


def silent(job) -> None:
    """Rank 1 stops beating inside a computation; the others wait for it in a collective."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    shared.t0 = time.monotonic()
    if job.index == 1:
        slot.enter("computing", 7)
        stuck()
    slot.collective(1, 10, 2)
    time.sleep(60)


def differs(job) -> None:
    """Rank 1 enters a collective with another number of elements than the others, of whom rank 0 comes late."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    shared.t0 = time.monotonic()
    if job.index == 0:
        time.sleep(0.5)
    slot.collective(1, 11 if job.index == 1 else 10, 2)
    time.sleep(60)


def together(job) -> None:
    """Enter the same collective as all others, and never come out."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    shared.t0 = time.monotonic()
    slot.collective(1, 10, 2)
    time.sleep(60)


def stuck() -> None:
    """Sleep for a minute, under a name that a stack shows."""
    time.sleep(60)
