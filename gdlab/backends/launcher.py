"""The one permanent thread that starts the zygote, asks it for processes, and watches over all runs.

A process dies when the thread that created it ends, so the thread must be one that never does: a run may be asked for
from a widget's callback. The caller's process loads no torch and computes nothing.
"""

from __future__ import annotations

import atexit
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait as wait_for
from typing import Any

from gdlab.backends.devices import place
from gdlab.backends.failures import Failure
from gdlab.backends.runs import Run
from gdlab.backends.supervise import GRACE_S, Supervision
from gdlab.backends.topology import needs_server, topology_of
from gdlab.backends.zygote_client import ZygoteClient
from gdlab.part import ExperimentError
from gdlab.trace import TraceError, read_run, write_run

TICK_S = 0.02
HALTED_S, HUNG_S = GRACE_S + 1.0, GRACE_S + 10.0
"""When, after a stop, the zygote is taken for halted, and for hung."""
IDLE_S = float(os.environ.get("GDLAB_ZYGOTE_IDLE_S", "inf"))
"""After how many seconds without a run the zygote leaves, to free its memory."""


class Launcher:
    """Serve launches from any thread; all else happens in the thread of its own."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Supervision | None] = queue.SimpleQueue()
        self._near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self._near.setblocking(False)
        self._zygote: ZygoteClient | None = None
        self._active: dict[str, Supervision] = {}
        self._waiting: list[Supervision] = []
        self._idle_since = time.monotonic()
        self._warm = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="gdlab-launcher", daemon=True)
        self._thread.start()

    def launch(self, run: Run) -> None:
        """Start a run's processes; returns at once."""
        run._wake = self.wake
        run._message = "starting"
        supervision = Supervision(run, topology_of(run.experiment, run.backend), self._send)
        if not self.serves:
            raise RuntimeError("This process is ending and starts no run any more: launch earlier.")
        self._inbox.put(supervision)
        self.wake()

    @property
    def serves(self) -> bool:
        """Whether runs can be launched: false once it was closed, or its thread has ended."""
        return not self._closing and self._thread.is_alive()

    def warm(self, timeout: float | None = None) -> bool:
        """Start the zygote, if there is none; wait for it at most `timeout` seconds and tell whether it is ready."""
        self._inbox.put(None)
        self.wake()
        return self._warm.wait(timeout) and self._zygote is not None and self._zygote.facts is not None

    def wake(self) -> None:
        try:
            self._far.send(b"\0")
        except OSError:
            pass  # Full, so it will wake anyway, or closed.

    def close(self) -> None:
        """End all runs and the zygote."""
        self._closing = True
        self.wake()
        self._thread.join(5.0)

    def forget(self) -> None:
        """Let go of what a forked copy of this process has inherited."""
        for end in (self._near, self._far):
            end.close()
        if self._zygote:
            self._zygote.forget()

    # ---- the thread ----

    def _serve(self) -> None:
        try:
            while not self._closing:
                try:
                    self._turn()
                except Exception as error:  # The thread must not end: its end is the end of every process.
                    for supervision in [*self._active.values()]:
                        self._abandon(supervision, _told(error))
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closing = True
        while not self._inbox.empty():
            if (late := self._inbox.get()) is not None:
                self._active[late.run.run_id] = late
        for supervision in self._active.values():
            supervision.run._stop_asked_at = time.monotonic()
            supervision.run.shared.ask_stop()
        self._lose_zygote()
        for supervision in self._active.values():
            supervision._end("stopped", "exit")
        for end in (self._near, self._far):
            end.close()

    def _turn(self) -> None:
        ends = [self._near] + ([self._zygote.channel] if self._zygote else [])
        wait = TICK_S if self._active else None
        idles = self._zygote is not None and self._zygote.facts is not None and IDLE_S != float("inf")
        if wait is None and idles:
            wait = max(0.0, self._idle_since + IDLE_S - time.monotonic())
        ready = wait_for(ends, wait)  # Not select, which knows no descriptor above 1023.
        if self._near in ready:
            self._near.recv(4096)
            self._take()
        if self._zygote and self._zygote.channel in ready:
            messages = self._zygote.receive()
            if messages is None:
                self._zygote_is_gone()
            else:
                for message in messages:
                    self._hear(message)
        for name, supervision in list(self._active.items()):
            if not supervision._started and self._zygote and self._zygote.facts is None:
                waited_s = time.monotonic() - self._zygote.started
                supervision.run._message = f"starting: loading PyTorch ({waited_s:.0f} s)"
            if self._try(supervision, supervision.tick):
                self._drop(name)
            elif self._zygote and supervision.asked_to_stop:
                self._see_that_it_stops(supervision.stopping_s)
        if idles and not self._active and time.monotonic() - self._idle_since >= IDLE_S:
            self._lose_zygote()

    def _see_that_it_stops(self, stopping_s: float) -> None:
        """Wake, and in the end replace, a zygote that does not do what is needed for a stop."""
        assert self._zygote is not None
        if stopping_s > HALTED_S:
            self._zygote.resume()
        if stopping_s > HUNG_S:
            self._zygote.kill()

    def _take(self) -> None:
        while not self._inbox.empty():
            supervision = self._inbox.get()
            if supervision is not None:
                self._active[supervision.run.run_id] = supervision
                self._waiting.append(supervision)
            self._idle_since = time.monotonic()
        if self._zygote is None:
            self._zygote = ZygoteClient()
        self._start_waiting()

    def _start_waiting(self) -> None:
        if self._zygote is None or self._zygote.facts is None:
            return
        waiting, self._waiting = self._waiting, []
        for supervision in waiting:
            if not supervision.asked_to_stop:
                self._try(supervision, self._start, supervision, self._zygote.facts)

    def _start(self, supervision: Supervision, facts: dict[str, Any]) -> None:
        run = supervision.run
        experiment = run.experiment
        local = run.backend == "local"
        server = needs_server(experiment)
        placement = place(experiment.device if local else "cpu", experiment.workers, facts["gpus"], facts["nccl"],
                          collective=local and not server and experiment.workers > 1)
        _note(run, {"device": placement.device, "group_backend": placement.group_backend, "note": placement.note,
                    "versions": run.environment["versions"] | {"torch": facts["torch"]}})
        self._count_who_is_beside()
        options = {"ranks": experiment.workers, "server": server, "group_backend": placement.group_backend,
                   "devices": [placement.device_of(rank) for rank in range(experiment.workers)] if local else []}
        self._send(supervision.request(options))

    def _count_who_is_beside(self) -> None:
        """Note for every run that computes how many processes of others compute beside it: they share the cores."""
        going = [supervision for supervision in self._active.values() if not supervision.run.shared.reason]
        total = sum(supervision.computing for supervision in going)
        for supervision in going:
            if (beside := total - supervision.computing) > supervision.beside:
                supervision.beside = beside
                with suppress(OSError, TraceError):  # A folder that has gone must not end the run beside it.
                    _note(supervision.run, {"beside": beside})

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            assert self._zygote is not None
            self._zygote.facts = message["ready"]
            self._idle_since = time.monotonic()
            self._warm.set()
            self._start_waiting()
        elif "broken" in message:
            self._warm.set()
            for supervision in [*self._active.values()]:
                self._abandon(supervision, f"PyTorch could not be loaded ({message['broken']}): install it and "
                              "launch again.")
        elif "started" in message and message["started"] in self._active:
            supervision = self._active[message["started"]]
            self._try(supervision, supervision.started, message["pids"])
        elif "failed" in message and message["failed"] in self._active:
            self._abandon(self._active[message["failed"]], "The processes could not be started "
                          f"({message['message']}): use fewer workers, or free memory and descriptors.")
        elif "exit" in message and message["exit"] in self._active:
            supervision = self._active[message["exit"]]
            self._try(supervision, supervision.exited, message["name"], message["code"])

    def _zygote_is_gone(self) -> None:
        said = self._lose_zygote()
        last = said.splitlines()[-1] if said else "it was killed"
        for name, supervision in [*self._active.items()]:
            if supervision.asked_to_stop:
                supervision._end("stopped", "stop")
                self._drop(name)
                continue
            self._abandon(supervision, f"The process that starts workers ended ({last}): launch again.")

    def _lose_zygote(self) -> str:
        self._warm.clear()  # First: whoever sees no zygote may ask for the next one at once, and must wait for that.
        zygote, self._zygote = self._zygote, None
        return zygote.close() if zygote else ""

    def _try(self, supervision: Supervision, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something for one run; what goes wrong there ends that run, and no other."""
        try:
            return act(*arguments)
        except Exception as error:
            self._abandon(supervision, _told(error))

    def _abandon(self, supervision: Supervision, why: str) -> None:
        """End a run whose processes cannot be started, or whose supervision has failed."""
        run = supervision.run
        self._drop(run.run_id)
        self._send({"op": "signal", "run": run.run_id, "signal": signal.SIGKILL})
        run._failure = Failure("launcher", 0, "exception", why)
        run._message = why
        supervision._end("failed", "exception")

    def _drop(self, name: str) -> None:
        self._active.pop(name, None)
        self._waiting = [waiting for waiting in self._waiting if waiting.run.run_id != name]
        self._idle_since = time.monotonic()

    def _send(self, request: dict[str, Any]) -> None:
        if self._zygote:
            self._zygote.send(request)


def _told(error: Exception) -> str:
    """Say in a sentence why a run cannot go on."""
    if isinstance(error, ExperimentError):
        return str(error)
    what = f"{type(error).__name__}: {str(error).rstrip('.')}"
    if isinstance(error, OSError | TraceError):
        return (f"The run's folder cannot be used ({what}): see that it is there and the disk is not full, and launch "
                "again.")
    return f"The run could not be looked after ({what}): launch again."


def _note(run: Run, found: dict[str, Any]) -> None:
    """Add to a run's environment in run.json what was found only later."""
    content = read_run(run.folder)
    content["environment"] |= found
    write_run(run.folder, content)


_lock = threading.Lock()
_current: Launcher | None = None
_closed = False


def current_launcher() -> Launcher:
    """Return this process's launcher; the first call starts it, as does one after its thread has died.

    Raises RuntimeError where this process is ending.
    """
    global _current
    with _lock:
        if _closed:
            raise RuntimeError("This process is ending and starts no run any more: launch earlier.")
        if _current is None or not _current.serves:
            _current = Launcher()
        return _current


def _forget() -> None:
    # In a forked copy the thread does not exist, and the zygote is somebody else's.
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.forget()
        _current = None


def _close() -> None:
    global _closed
    _closed = True
    if _current is not None:
        _current.close()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close)
