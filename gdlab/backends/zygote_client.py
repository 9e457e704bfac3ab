"""The launcher's end of the channel to the zygote."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gdlab

PATIENCE_S = 5.0
"""How long the zygote may not read what it is sent."""
LOOPBACK = "lo" if sys.platform.startswith("linux") else "lo0"


class ZygoteClient:
    """A zygote and the channel to it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(Path(gdlab.__file__).parents[1]),
                                           *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LOOPBACK, "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        }
        environment.pop("TORCH_DISTRIBUTED_DEBUG", None)
        command = [sys.executable, "-P", "-m", "gdlab.backends.zygote"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, "--control", str(theirs.fileno()), str(os.getpid())], stdin=subprocess.DEVNULL,
                stdout=self._errors, stderr=self._errors, pass_fds=[theirs.fileno()], start_new_session=True,
                env=environment)
        self.channel = ours
        self.started = time.monotonic()
        self.facts: dict[str, Any] | None = None
        self._received = b""
        self.channel.settimeout(PATIENCE_S)

    def send(self, request: dict[str, Any]) -> None:
        try:
            self.channel.sendall(json.dumps(request).encode() + b"\n")
        except TimeoutError:
            self.kill()  # It reads no more, and half a request is no request.
        except OSError:
            pass  # Its end is seen, and told, by the next read.

    def kill(self) -> None:
        """End the zygote, and with it every process that it has started."""
        self._process.kill()

    def resume(self) -> None:
        """Let the zygote go on where somebody has halted it (SIGSTOP)."""
        self._process.send_signal(signal.SIGCONT)

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, or None if the zygote is gone."""
        try:
            data = self.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> str:
        """End it and all its children; return what it had to say."""
        self.channel.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._errors as errors:
            errors.seek(0)
            return errors.read().decode(errors="replace").strip()

    def forget(self) -> None:
        """Let go of what a forked copy of this process has inherited."""
        self.channel.close()
        self._errors.close()
        self._process.returncode = 0  # Not this process's child: nothing to wait for.
