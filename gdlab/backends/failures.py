"""Who broke a run: failures travel as values in its folder, and the first cause is told from its consequences.

When one rank dies the others soon fail too, each with an error about a closed connection. What counts, in this order:
death by a signal, an exception, a silence, a peer that closed its connection. Equal errors are told once.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KINDS = ("signal", "exception", "timeout", "peer")
"""What can happen to a process, the most telling first."""


MISTAKE = "ExperimentError: "


class PeerLost(RuntimeError):
    """Say that a message could not be exchanged: the fault is likely another process's (kind `timeout` or `peer`)."""

    def __init__(self, message: str, kind: str = "peer"):
        super().__init__(message)
        self.kind = kind


class RemoteError(Exception):
    """Carry the traceback of another process as text, as the cause of the error raised here."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class RankFailed(RuntimeError):
    """Name the process that broke a run: `rank` (a number, "server", "evaluator", ...), `cause`, `kind`, `trace`."""

    def __init__(self, message: str, rank: int | str, cause: str, kind: str = "exception", trace: Any = None):
        super().__init__(message)
        self.rank, self.cause, self.kind, self.trace = rank, cause, kind, trace


@dataclass(frozen=True)
class Failure:
    """What happened to one process."""

    role: str
    index: int
    kind: str
    what: str
    """In few words: SIGKILL, ValueError: message, no sign of life for 3 s."""
    where: str = ""
    """What it was doing: computing step 7."""
    traceback: str = ""
    also: tuple[int, ...] = ()
    """Other ranks with the same error."""

    @property
    def rank(self) -> int | str:
        """The rank's number, or the role of a process that is not a rank."""
        return self.index if self.role == "rank" else self.role

    @property
    def name(self) -> str:
        return f"{self.role}{self.index}"

    def sentence(self) -> str:
        """Say who, what happened, and what to do, in one sentence."""
        if self.role == "launcher":
            return self.what
        if self.what.startswith(MISTAKE):
            said = self.what.removeprefix(MISTAKE)  # It says already what to change.
            return said if said.endswith("?") else said + "."
        log = f"log-{self.name}.txt in the run's folder"
        where = f" while {self.where}" if self.where else ""
        who = called(self.role, self.index)
        if self.kind == "signal":
            told = f"{who} was killed by {self.what}{where}: "
            if self.what == "SIGKILL":
                return told + ("run again; if nobody killed it the machine ran out of memory, and fewer workers or a "
                               "smaller problem help.")
            return told + f"run again; if it dies again, its stack is in {log}."
        if self.kind == "timeout":
            return (f"{who} gave {self.what}{where}: run again, with a larger timeout_s if its steps are this slow; "
                    f"where it stood is in {log}.")
        if self.kind == "peer":
            return f"{who} lost its connection{where} ({self.what}): run again; more is in {log}."
        many = [self.index, *self.also]
        if self.also:
            who = f"Ranks {', '.join(map(str, many[:-1]))} and {many[-1]}"
        return f"{who} stopped with {self.what}{where}: correct it and run again; the traceback is in {log}."


def called(role: str, index: int) -> str:
    """Return how a process is called in a sentence: Rank 2, The server."""
    return f"Rank {index}" if role == "rank" else {"virtual": "The simulation"}.get(role, f"The {role}")


def write_failure(folder: str | Path, name: str, error: BaseException) -> None:
    """Leave an exception as a value for the launcher: type, message, traceback and kind, by atomic replace."""
    value = {
        "type": type(error).__name__,
        "message": str(error).strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "kind": error.kind if isinstance(error, PeerLost) else "exception",
    }
    path = Path(folder, f"failure-{name}.json")
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    os.replace(part, path)


def read_failure(folder: str | Path, name: str) -> dict[str, str] | None:
    """Return what `write_failure` left for this process, or None."""
    try:
        return json.loads(Path(folder, f"failure-{name}.json").read_text())
    except (OSError, ValueError):
        return None


def of_exit(folder: str | Path, role: str, index: int, code: int, where: str = "") -> Failure:
    """Explain the exit code of a process (negative: the signal that killed it) that should not have ended."""
    if code < 0:
        try:
            what = signal.Signals(-code).name
        except ValueError:
            what = f"signal {-code}"
        return Failure(role, index, "signal", what, where)
    told = read_failure(folder, f"{role}{index}")
    if told is None and code == 2:
        what = "an error that could not be written to the run's folder (is the disk full, or the folder gone?)"
        return Failure(role, index, "exception", what, where)
    if told is None:
        return Failure(role, index, "exception", f"exit code {code} and no error", where)
    message = told["message"].splitlines()[0][:300].rstrip(".") if told["message"] else ""
    what = f"{told['type']}: {message}" if message else told["type"]
    if told["kind"] != "exception":
        what = message or told["type"]
    if told["kind"] == "timeout":
        # Who waited in vain is a witness; who was silent is named by the heartbeat, which comes first in the order.
        return Failure(role, index, "peer", what, where, told["traceback"])
    return Failure(role, index, told["kind"], what, where, told["traceback"])


def first_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others: by kind, then by arrival; equal errors fold into one rank's."""
    cause = min(failures, key=lambda failure: KINDS.index(failure.kind))
    same = [f for f in failures if (f.role, f.kind, f.what) == ("rank", "exception", cause.what)]
    if not same:
        return cause
    lowest, *others = sorted(same, key=lambda failure: failure.index)
    return replace(lowest, also=tuple(failure.index for failure in others))
