"""The helper process of this one: started when first asked, asked in lines of JSON, gone when this process is."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gdlab
from gdlab.autodiff.expression import ExpressionError

PATIENCE_S = 30.0
"""How long an answer may take; the first one includes loading PyTorch."""

_lock = threading.Lock()
_helper: tuple[int, subprocess.Popen[str]] | None = None


class HelperError(RuntimeError):
    """Say in one sentence that the process which computes with PyTorch has failed, and what to do."""


def ask(question: str, **given: Any) -> Any:
    """Return the helper's answer; raises ExpressionError for what cannot be computed, HelperError where it has failed.

    A helper that has left meanwhile (on a shared server it does so when it was idle for long) is replaced once.
    """
    line = json.dumps({"ask": question, "given": given}) + "\n"
    with _lock:
        for _ in range(2):
            start, answer = time.monotonic(), _answer(line)
            if answer or time.monotonic() - start > PATIENCE_S:
                break
    if not answer:
        raise HelperError("The process that computes with PyTorch has ended, or gave no answer for "
                          f"{PATIENCE_S:.0f} s: see that torch can be imported, or try something smaller.")
    found = json.loads(answer)
    if "error" in found:
        raise ExpressionError(found["error"])
    return found["answer"]


def _answer(line: str) -> str:
    """Return a line for a line; an empty one where the process has gone, or has to go, for it takes too long."""
    process = _started()
    end = threading.Timer(PATIENCE_S, process.kill)
    end.start()
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except OSError:
        answer = ""
    except BaseException:  # an interrupt: the answer that is still to come must not be taken for another's
        _end()
        raise
    finally:
        end.cancel()
    if not answer:
        _end()
    return answer


def _started() -> subprocess.Popen[str]:
    """Return this process's own helper; its input ends with this process, however that ends, and then it leaves."""
    global _helper
    if _helper is None or _helper[0] != os.getpid():
        path = os.pathsep.join([str(Path(gdlab.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        _helper = os.getpid(), subprocess.Popen(
            [sys.executable, "-P", "-m", "gdlab.autodiff.serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    return _helper[1]


def _end() -> None:
    global _helper
    if _helper is not None and _helper[0] == os.getpid():
        with suppress(OSError), _helper[1] as process:  # waits for it, and closes its pipes
            process.kill()
    _helper = None


atexit.register(_end)
