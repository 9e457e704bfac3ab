"""Start a server of notebooks for a test, and end it with every process that it has started."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_S = 45.0
END_S = 10.0

POINTS = """(name) => (document.querySelector(`.gd-figure-${name} .js-plotly-plot`)?.data ?? [])
    .reduce((sum, trace) => sum + (trace.x?.length ?? 0), 0)"""
"""Counts the points that a figure of the panel shows, in the page."""


@dataclass
class Server:
    """A running server: where it is, its token (empty: none is asked for) and its process."""

    port: int
    token: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, str], str]:
        """Return status, headers (lower case) and text of an answer; never follows a redirection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        try:
            headers = {"Authorization": f"token {self.token}"} if self.token else {}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
        finally:
            connection.close()

    def kernels(self) -> list[psutil.Process]:
        """Return the living kernels among the server's children."""
        return [p for p in self.descendants() if "ipykernel" in _command(p)]

    def descendants(self) -> list[psutil.Process]:
        """Return the living processes that the server has started, directly or not."""
        try:
            return [p for p in psutil.Process(self.process.pid).children(recursive=True) if _alive(p)]
        except psutil.NoSuchProcess:
            return []

    def workers(self) -> list[psutil.Process]:
        """Return the living processes below the kernels: the zygote, its ranks and their like."""
        found: list[psutil.Process] = []
        for kernel in self.kernels():
            try:
                found += [p for p in kernel.children(recursive=True) if _alive(p)]
            except psutil.NoSuchProcess:
                continue
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(words: list[str], folder: Path, token: str = "", ready: str = "/", **environment: str) -> Iterator[Server]:
    """Run `python WORDS --port P` in a folder until the block ends; `ready` is asked for until it answers."""
    server = _start(words, folder, token, ready, environment)
    try:
        yield server
    finally:
        stop(server)


def _start(words: list[str], folder: Path, token: str, ready: str, environment: dict[str, str]) -> Server:
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"server-{port}.log"
    env = {**os.environ, "JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "JUPYTER_CONFIG_DIR": str(folder / "config"),
           "IPYTHONDIR": str(folder / "ipython"), "GDLAB_RUNS": str(folder / "runs"), **environment}  # fmt: skip
    if token:
        env["JUPYTER_TOKEN"] = token
    words = [sys.executable, *(word.replace("{port}", str(port)) for word in words)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    server = Server(port, token, process, log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if server.get(ready)[0] < 500:
                return server
        except OSError:
            time.sleep(0.1)
    said = log.read_text(errors="replace")[-2000:]
    stop(server)
    raise RuntimeError(f"The server {' '.join(words)} did not answer within {START_S:.0f} s; it said:\n{said}")


def stop(server: Server) -> None:
    """End a server and every process that it has started, however stubborn."""
    family = server.descendants()
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
    try:
        server.process.wait(END_S)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    _, alive = psutil.wait_procs(family, timeout=3)
    for process in alive:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def wait_until(holds: Any, timeout_s: float, what: str) -> Any:
    """Return what `holds()` gives once it is true; raises AssertionError, naming `what`, after the time is up."""
    deadline = time.monotonic() + timeout_s
    while not (value := holds()):
        assert time.monotonic() < deadline, f"within {timeout_s:.0f} s it did not happen: {what}"
        time.sleep(0.05)
    return value



def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks(server: Server) -> list[psutil.Process]:
    """Return the processes that compute: what the kernels' own children (the zygotes) have started."""
    found: list[psutil.Process] = []
    for kernel in server.kernels():
        try:
            for child in kernel.children():
                found += [p for p in child.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            continue
    return found
