"""The process that has torch loaded and forks the processes of a run.

It is started once, by one permanent thread, in a session of its own; it has one thread, runs no parallel region and
never touches CUDA, so that a fork is safe at any time. It knows nothing of experiments: a request names functions,
and how the processes are wired. Where fork is unsafe the same requests start fresh interpreters.

Nothing outlives its parent: each process dies with the one that made it (PR_SET_PDEATHSIG, and a check that the parent
was not gone before), and the end of the control channel kills everything.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from gdlab.backends.failures import write_failure
from gdlab.backends.job import Job
from gdlab.backends.shared_state import SharedState
from gdlab.backends.sockets import Sockets

CAN_FORK = sys.platform.startswith("linux") and os.environ.get("GDLAB_START", "fork") != "spawn"

PRELOAD = ("torch", "torch.distributed", "torch.optim", "torch._dynamo", "gdlab.backends.rank",
           "gdlab.backends.server", "gdlab.backends.virtual", "gdlab.backends.evaluator", "gdlab.descent.networks")

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Arrange that this process is killed when the one that made it ends; leave at once if it has already."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(0.25)
    os._exit(1)


def become(request: dict[str, Any], process: dict[str, Any], inherited: dict[str, Any], parent: int) -> None:
    """Live as one process of a run, from a bare start to its exit; never returns."""
    name = f"{process['role']}{process['index']}"
    code = 1
    try:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _redirect(Path(request["folder"], f"log-{name}.txt"))
        os.chdir(request["cwd"])
        sys.path[:] = request["path"]
        if process.get("nice"):
            os.nice(process["nice"])
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        module, function = process["target"].split(":")
        target = getattr(importlib.import_module(module), function)
        target(Job(request["folder"], request["run"], process["role"], process["index"], process["slot"],
                   request["timeout_s"], request["options"], inherited["links"], inherited["listen"],
                   inherited["port"]))
        SharedState(request["folder"]).slot(process["slot"]).enter("done")
        code = 0
    except BaseException as error:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
            write_failure(request["folder"], name, error)
        except BaseException:
            code = 2
    finally:
        # No teardown: tearing a process group down takes tens of milliseconds and waits for others.
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                pass
        os._exit(code)


def _redirect(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, to in ((nothing, 0), (descriptor, 1), (descriptor, 2)):
        os.dup2(source, to)
    os.close(descriptor)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class Zygote:
    """Serve requests from the control channel: start a run's processes, signal them, tell of each exit."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._children: dict[int, tuple[str, str]] = {}
        self._spawned: list[subprocess.Popen] = []
        self._received = b""

    def serve(self) -> None:
        """Answer until the control channel ends, then kill all and leave."""
        died, wake = socket.socketpair()
        died.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._wake = (died, wake)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        while True:
            ready, _, _ = select.select([self._control, died], [], [])
            if died in ready:
                died.recv(4096)
                self._reap()
            if self._control in ready:
                data = self._control.recv(65536)
                if not data:
                    break
                *lines, self._received = (self._received + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
        for pid in self._children:
            _kill_group(pid, signal.SIGKILL)
        os._exit(0)

    def _tell(self, **message: Any) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # The other end is gone, which the next read sees too.

    def _answer(self, request: dict[str, Any]) -> None:
        if request["op"] == "start":
            self._start(request)
        elif request["op"] == "signal":
            names = request.get("names")
            for pid, (run, name) in self._children.items():
                if run == request["run"] and (names is None or name in names):
                    _kill_group(pid, request["signal"])

    def _start(self, request: dict[str, Any]) -> None:
        pids: dict[str, int] = {}
        sockets = None
        try:
            sockets = Sockets(request)
            for process in request["processes"]:
                name = f"{process['role']}{process['index']}"
                make = self._fork if CAN_FORK else self._spawn
                pids[name] = pid = make(request, process, sockets, name)
                self._children[pid] = (request["run"], name)
            self._tell(started=request["run"], pids=pids)
        except OSError as error:
            for pid in pids.values():
                _kill_group(pid, signal.SIGKILL)
            self._tell(failed=request["run"], message=f"{type(error).__name__}: {error}")
        finally:
            if sockets:
                sockets.close()

    def _fork(self, request: dict[str, Any], process: dict[str, Any], sockets: Sockets, name: str) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for end in (self._control, *self._wake):
                end.close()
            inherited = sockets.of(name)
            sockets.keep_only(name)
            become(request, process, inherited, parent)
        try:
            os.setpgid(pid, pid)  # Here too, so that it has happened whoever is first.
        except OSError:
            pass
        return pid

    def _spawn(self, request: dict[str, Any], process: dict[str, Any], sockets: Sockets, name: str) -> int:
        inherited = sockets.of(name)
        passed = [*inherited["links"].values(), *([] if inherited["listen"] is None else [inherited["listen"]])]
        life = json.dumps([request, process, inherited, os.getpid()])
        child = subprocess.Popen([sys.executable, "-P", "-m", "gdlab.backends.zygote", "--role", life],
                                 pass_fds=passed, process_group=0)
        self._spawned.append(child)
        return child.pid

    def _reap(self) -> None:
        while self._children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for child in [child for child in self._spawned if child.pid == pid]:
                child.returncode = os.waitstatus_to_exitcode(status)
                self._spawned.remove(child)
            if pid in self._children:
                run, name = self._children.pop(pid)
                _kill_group(pid, signal.SIGKILL)  # What it had started itself.
                self._tell(exit=run, name=name, code=os.waitstatus_to_exitcode(status))


def _kill_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def _rehearse() -> None:
    """Take one step of the default experiment, so that a forked process finds loaded what torch loads on first use."""
    from gdlab.descent.problems import build
    from gdlab.descent.store import Store
    from gdlab.descent.worker import Worker
    from gdlab.experiment import Experiment

    experiment = Experiment(workers=1)
    problem = build(experiment)
    store = Store(experiment, problem)
    store.apply([Worker(experiment, problem, 0).gradient(store.read(0), 0)], [0])


def _facts() -> dict[str, Any]:
    """Load what every process needs, and say what the launcher cannot know without loading it."""
    import torch

    for module in PRELOAD:
        importlib.import_module(module)
    torch.set_num_threads(1)
    _rehearse()
    # Counts through NVML (see the environment the launcher sets): a fork after CUDA was used would be useless.
    return {"torch": torch.__version__, "gpus": torch.cuda.device_count(),
            "nccl": torch.distributed.is_nccl_available()}


def main(arguments: list[str]) -> None:
    """Run as the zygote (`--control DESCRIPTOR PARENT`) or, where fork is unsafe, as one process (`--role JSON`)."""
    if arguments[0] == "--role":
        become(*json.loads(arguments[1]))
    die_with_parent(int(arguments[2]))
    control = socket.socket(fileno=int(arguments[1]))
    zygote = Zygote(control)
    try:
        facts = _facts()
    except BaseException as error:
        zygote._tell(broken=f"{type(error).__name__}: {error}")
        raise
    gc.collect()
    gc.freeze()
    zygote._tell(ready=facts)
    zygote.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
