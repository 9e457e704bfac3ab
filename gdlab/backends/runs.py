"""A run as its caller holds it: state, trace, pids, stop and wait; and the folder that it lives in."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from gdlab.backends.failures import Failure, RankFailed, RemoteError
from gdlab.backends.shared_state import SharedState
from gdlab.experiment import Experiment
from gdlab.part import ExperimentError
from gdlab.trace import Trace, TraceError

BAR = 20
RUN_FILES = ("run.json", "shared_state.bin", "events-*.bin", "path.*", "local-*", "losses.bin", "updates.bin",
             "exponents-*.bin", "surface-*.npz", "final.json", "failure-*.json")
ENDED = ("done", "stopped", "failed")


class Run:
    """A run that goes on in processes of its own. Every member may be used from any thread, at any time."""

    def __init__(self, experiment: Experiment, backend: str, folder: Path, timeout_s: float, shared: SharedState):
        self.experiment, self.backend, self.folder, self.timeout_s = experiment, backend, folder, timeout_s
        self.run_id = folder.name + "-" + uuid.uuid4().hex[:8]
        self.shared = shared
        self._state = "starting"
        self._message = "starting"
        self._pids: dict[str, int] = {}
        self._failure: Failure | None = None
        self._ended = threading.Event()
        self._process = os.getpid()
        self._stop_asked_at: float | None = None
        self._wake: Any = lambda: None

    def __repr__(self) -> str:
        return f"<Run {self.folder.name}: {self.message}>"

    @property
    def state(self) -> str:
        """starting, running, done, stopped or failed."""
        return self._state

    @property
    def message(self) -> str:
        """What is going on, in one plain sentence."""
        return self._message

    @property
    def progress(self) -> float | None:
        """Share of the updates, or of the time, that is done; None where neither is known."""
        exp, shared = self.experiment, self.shared
        if self._state == "done":
            return 1.0
        shares = []
        if exp.updates is not None:
            shares.append(max(shared.slot(at).version for at in range(shared.slots)) / exp.updates)
        if exp.seconds is not None and self.backend != "virtual":
            shares.append((time.monotonic() - shared.t0) / exp.seconds if shared.t0 else 0.0)
        return min(1.0, max(shares)) if shares else None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in rank order; empty until they have started, kept after they have ended."""
        pids = self._pids
        return tuple(pids[name] for name in pids if name.startswith("rank"))

    @property
    def trace(self) -> Trace:
        """What has happened so far."""
        return Trace(self.folder, self.experiment.payload)

    @property
    def environment(self) -> dict[str, Any]:
        """The machine and the software of this run, as its trace records them."""
        return self.trace.environment

    @property
    def error(self) -> RankFailed | None:
        """Who broke the run and how, or None."""
        failure = self._failure
        if failure is None:
            return None
        cause = f"timeout: {failure.what}" if failure.kind == "timeout" else failure.what
        try:
            trace = self.trace
        except TraceError:
            trace = None  # The folder is gone.
        error = RankFailed(failure.sentence(), failure.rank, cause, failure.kind, trace)
        if failure.traceback:
            error.__cause__ = RemoteError(failure.traceback)
        return error

    def stop(self) -> None:
        """Ask for the end, and return at once: within a second no process is left, and the trace stays readable."""
        if self._stop_asked_at is None and not self._ended.is_set():
            self._stop_asked_at = time.monotonic()
            self.shared.ask_stop()
            self._wake()

    def wait(self, timeout: float | None = None) -> Trace:
        """Wait for the end, `timeout` seconds at most, and return the trace.

        Raises RankFailed if a process failed, TimeoutError if the run has not ended by then, RuntimeError in a forked
        copy of the process that launched it.
        """
        if not self._ended.is_set() and os.getpid() != self._process:
            raise RuntimeError(f"The run belongs to process {self._process}, which launched it: wait there, or read "
                               f"{self.folder} here.")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"The run has not ended after {timeout:g} s ({self.message}): wait longer or stop it.")
        error = self.error
        if error is not None:
            raise error
        return self.trace


def taken(folder: Path) -> FileExistsError:
    """Return what to raise where a folder holds a run."""
    return FileExistsError(f"{folder} already holds a run, or what is left of one: choose another folder.")


def new_folder(folder: str | Path | None, label: str) -> Path:
    """Make the folder of a run: the given one, or a new one below $GDLAB_RUNS, ./runs or the temporary folder.

    Raises FileExistsError for a folder that already holds a run, or what is left of one.
    """
    if folder is not None:
        if folder == "":
            raise ExperimentError('folder = "" cannot be: give a name, or None for a new one.')
        path = Path(folder).absolute()
        path.mkdir(parents=True, exist_ok=True)
        if any(file for pattern in RUN_FILES for file in path.glob(pattern)):
            raise taken(path)
        return path
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}-{uuid.uuid4().hex[:4]}"
    for root in (os.environ.get("GDLAB_RUNS") or "runs", Path(tempfile.gettempdir(), f"gdlab-runs-{os.getuid()}")):
        path = Path(root).absolute() / name
        try:
            path.mkdir(parents=True)
            return path
        except OSError as error:
            refused = error
    raise refused


def show_progress(run: Run) -> None:
    """Write a bar and the run's message on a terminal until it has ended."""
    while not run._ended.wait(0.1):
        done = round(BAR * (run.progress or 0.0))
        sys.stderr.write(f"\r\x1b[K[{'#' * done}{'.' * (BAR - done)}] {run.message}")
        sys.stderr.flush()
    sys.stderr.write(f"\r\x1b[K{run.message}\n")
