"""The helper process of this one: started when first asked, asked in lines of JSON, gone when this process is."""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import gdlab
from gdlab.autodiff.expression import ExpressionError

PATIENCE_S = 30.0
"""How long an answer may take; the first one includes loading PyTorch."""


class HelperError(RuntimeError):
    """Say in one sentence that the process which computes with PyTorch has failed, and what to do."""


class Helper:
    """Hold the process and its two pipes; its end of them closes with this process, however that ends."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(gdlab.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gdlab.autodiff.serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, env=os.environ | {"PYTHONPATH": path}, start_new_session=True, bufsize=0)
        self.owner = os.getpid()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: bytes) -> bytes:
        """Return the answer's line; raises OSError where the process has gone, TimeoutError where it takes too long."""
        source, answer = self._process.stdout, b""
        self._process.stdin.write(line)
        while not answer.endswith(b"\n"):
            if not select.select([source], [], [], PATIENCE_S)[0]:
                raise TimeoutError
            part = source.read(1 << 20)
            if not part:
                raise BrokenPipeError
            answer += part
        return answer

    def close(self) -> str:
        """End the process; return the last line that it had to say."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()
        with self._said as said:
            said.seek(0)
            return (said.read().decode(errors="replace").strip().splitlines() or ["it was ended"])[-1]


_lock = threading.Lock()
_helper: Helper | None = None


def ask(question: str, **given: Any) -> Any:
    """Return the helper's answer; raises ExpressionError for what cannot be computed, HelperError where it has failed.

    A helper that has left meanwhile (it does so when it was idle for long on a shared server) is replaced once.
    """
    global _helper
    line = json.dumps({"ask": question, "given": given}).encode() + b"\n"
    with _lock:
        for last in (False, True):
            if _helper is None or _helper.owner != os.getpid():
                _helper = Helper()
            try:
                answer = json.loads(_helper.ask(line))
                break
            except BaseException as error:
                said, _helper = _helper.close(), None
                if isinstance(error, TimeoutError):
                    raise HelperError(f"The process that computes with PyTorch gave no answer for {PATIENCE_S:.0f} s "
                                      "and was ended: try something smaller.") from None
                if not isinstance(error, OSError):
                    raise  # an interrupt: the next question finds a fresh process
                if last:
                    raise HelperError(f"The process that computes with PyTorch has ended ({said}): see that torch can "
                                      "be imported, and try again.") from None
    if "error" in answer:
        raise ExpressionError(answer["error"])
    return answer["answer"]


def pid() -> int | None:
    """Return the helper's process number, None where there is none."""
    return _helper.pid if _helper is not None and _helper.owner == os.getpid() else None


def close() -> None:
    """End the helper, if there is one; the next question starts another."""
    global _helper
    with _lock:
        if _helper is not None and _helper.owner == os.getpid():
            _helper.close()
        _helper = None


atexit.register(close)
