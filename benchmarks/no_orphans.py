"""Count the processes that are left one second after the end of runs launched from a widget's callback in a kernel.

Starts a Jupyter kernel, presses an ipywidgets button there whose callback calls gd.launch, lets four ranks run, and
ends the run in one of five ways: Stop, a rank's SIGKILL, an exception in a rank, a restart of the kernel, SIGKILL of
the kernel. Every process that the kernel starts inherits a mark in its environment, by which what is left is found.

    python benchmarks/no_orphans.py [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
import uuid

import psutil
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

MARK = "GDLAB_NO_ORPHANS"
WAYS = ("stop", "rank SIGKILL", "rank exception", "kernel restart", "kernel SIGKILL")
WITHIN_S = 1.0

SETUP = """
import json, os
import gdlab as gd
import ipywidgets
from gdlab import backends

def fragile():
    import os, time, torch
    class Fragile(torch.nn.Linear):
        began = time.monotonic()
        def forward(self, x):
            if time.monotonic() - self.began > 0.4 and os.readlink("/proc/self/fd/1").endswith("log-rank2.txt"):
                raise ValueError("made for this count")
            return super().forward(x)
    x = torch.randn(64, 4)
    return Fragile(4, 1), torch.nn.functional.mse_loss, (x, x.sum(1, keepdim=True))

base = dict(workers=4, compute_time=gd.Exponential(0.02), updates=None, seconds=600)
problem = gd.Digits("logistic")
run = None
button = ipywidgets.Button()
def clicked(_):
    global run
    run = gd.launch(gd.Experiment(problem=problem, **base))
button.on_click(clicked)
backends.warm(60)
"""


class Kernel:
    """A kernel of our own, and what it takes to press its button."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=os.environ | {MARK: self.mark})
        self.client: BlockingKernelClient = self.manager.client()
        self.prepare()

    def prepare(self) -> None:
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.ask(SETUP)
        self.pid: int = self.ask("", "os.getpid()")
        self.button: str = self.ask("", "button.comm.comm_id")

    def ask(self, code: str, expression: str = "0") -> object:
        """Run code in the kernel and return the value of an expression of JSON's kinds."""
        reply = self.client.execute(code, user_expressions={"value": f"json.dumps({expression})"}, reply=True,
                                    timeout=90)["content"]
        if reply["status"] != "ok":
            raise RuntimeError("\n".join(reply["traceback"]))
        text = reply["user_expressions"]["value"]["data"]["text/plain"]
        return json.loads(text[1:-1])

    def press(self) -> None:
        """Do what a page does when the button is pressed."""
        content = {"comm_id": self.button, "data": {"method": "custom", "content": {"event": "click"}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def marked(self) -> list[int]:
        """Return the processes that bear the mark, the kernel itself left out."""
        found = []
        for process in psutil.process_iter():
            try:
                living = process.status() != psutil.STATUS_ZOMBIE
                if living and process.pid != self.manager_pid() and process.environ().get(MARK) == self.mark:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def manager_pid(self) -> int | None:
        return getattr(self.manager.provisioner, "pid", None)

    def run_some(self, problem: str) -> dict[str, int]:
        """Press the button, wait until the ranks run, and return the processes of the run by name."""
        self.ask(f"problem = {problem}; run = None")
        self.press()
        deadline = time.monotonic() + 60
        while self.ask("", "run is not None and run.state") != "running":
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run did not start: {self.ask('', 'run and run.message')}")
            time.sleep(0.02)
        return self.ask("", "run._pids")  # type: ignore[return-value]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def lives(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits for its parent to notice does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_after(pids: list[int], began: float) -> tuple[int, float]:
    """Return how many of the processes live one second after `began`, and when the last one was gone."""
    while any(lives(pid) for pid in pids) and time.monotonic() - began < WITHIN_S:
        time.sleep(0.005)
    gone = time.monotonic() - began
    return sum(lives(pid) for pid in pids), gone


def one_round(kernel: Kernel, way: str) -> tuple[int, float, str]:
    """End one run in one way; return who is left after a second, when the last one went, and what was said."""
    pids = kernel.run_some("fragile" if way == "rank exception" else 'gd.Digits("logistic")')
    ours = list(pids.values())
    if way == "rank exception":
        while lives(pids["rank2"]):
            time.sleep(0.001)
    began = time.monotonic()
    if way == "stop":
        kernel.client.execute("run.stop()", silent=True)
    elif way == "rank SIGKILL":
        os.kill(pids["rank2"], signal.SIGKILL)
    elif way.startswith("kernel"):
        ours = kernel.marked()
        began = time.monotonic()
        if way == "kernel SIGKILL":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.client.stop_channels()
            kernel.manager.restart_kernel(now=False, newports=False)
    if way == "kernel restart":
        # When this returns the old kernel has gone, and the new one was started: the second begins with the request.
        left, gone = left_after(ours, began)
        kernel.client = kernel.manager.client()
        kernel.prepare()
        return left, gone, "restarted"
    left, gone = left_after(ours, began)
    if way == "kernel SIGKILL":
        kernel.client.stop_channels()
        kernel.manager.restart_kernel(now=True)
        kernel.client = kernel.manager.client()
        kernel.prepare()
        return left, gone, "killed"
    deadline = time.monotonic() + 10
    while kernel.ask("", "run.state") == "running" and time.monotonic() < deadline:
        time.sleep(0.02)
    said = kernel.ask("", 'f"rank {run.error.rank}: {run.error.cause}" if run.error else run.state')
    return left, gone, str(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    kernel = Kernel()
    total = 0
    try:
        for way in WAYS:
            left, gone, said = zip(*(one_round(kernel, way) for _ in range(options.rounds)), strict=True)
            total += sum(left)
            print(f"{way:15s} {options.rounds} rounds: {sum(left)} processes left; gone after "
                  f"{statistics.median(gone) * 1e3:.0f} ms (median), {max(gone) * 1e3:.0f} ms (most); "
                  f"said: {', '.join(sorted(set(said)))}", flush=True)
    finally:
        kernel.close()
    time.sleep(WITHIN_S)
    rest = len(kernel.marked())
    print(f"after the kernel's end: {rest} processes left; load {os.getloadavg()[0]:.1f} on "
          f"{len(os.sched_getaffinity(0))} cores")
    raise SystemExit(1 if total or rest else 0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="gdlab-orphans-", ignore_cleanup_errors=True) as folder:
        os.environ["GDLAB_RUNS"] = folder
        main()
