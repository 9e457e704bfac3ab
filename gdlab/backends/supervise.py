"""Watch over one run: say what is going on, notice what goes wrong, name who broke it, see that everybody leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.backends.failures import Failure, first_cause, of_exit
from gdlab.backends.runs import Run
from gdlab.backends.shared_state import Slot
from gdlab.backends.topology import Topology
from gdlab.trace import TraceError, read_run, write_run

GRACE_S = 0.5
"""How long a process may take to leave by itself after a stop."""
TERM_S = 2.0
"""How long a hung process has between SIGTERM and SIGKILL."""
STACK_S = 0.2
"""How long a hung process has to write its stack."""
SETTLE_S = {"signal": 0.05, "exception": 0.1, "timeout": 0.0, "peer": 0.4}
"""How long to wait, after a failure of each kind, for one that explains it better."""
WAITING_S = 0.4
"""From when on it is worth saying who is waited for."""
LOOK_S = 0.1
BLIND_S = 1.0
"""Where the launcher itself was not served for so long, the machine was asleep: nobody is blamed for that time."""
SLOW, SLOW_S = 5.0, 60.0
"""How many timeouts, and at least how many seconds, loading the data or the last evaluation may take."""


class Supervision:
    """The state of one run at the launcher. Only the launcher's thread calls it."""

    def __init__(self, run: Run, topology: Topology, send: Callable[[dict[str, Any]], None]):
        self.run, self.topology = run, topology
        self._path, self._cwd = [entry for entry in sys.path if isinstance(entry, str)], os.getcwd()
        self._send = send
        self._slots = {name: run.shared.slot(at) for at, name in enumerate(topology.names)}
        self._living: set[str] = set()
        self._failures: list[Failure] = []
        self._decide_at: float | None = None
        self._hung: str | None = None
        self._kill_at: list[tuple[float, int, tuple[str, ...]]] = []
        self._stopping = False
        self._patience_ends = 0.0
        self._next_look = 0.0
        self._looked = self._awake_since = time.monotonic()
        self._started = False
        self.computing = run.experiment.workers if run.backend == "local" else 1
        self.beside = 0  # processes of other runs that computed at the same time, at most

    @property
    def asked_to_stop(self) -> bool:
        return self.run._stop_asked_at is not None

    @property
    def stopping_s(self) -> float:
        """For how many seconds the stop has been asked for."""
        return 0.0 if self.run._stop_asked_at is None else time.monotonic() - self.run._stop_asked_at

    def request(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return what the zygote is asked."""
        self._started = True
        self.run._message = f"starting {self._people()}"
        return {"op": "start", "run": self.run.run_id, "folder": str(self.run.folder),
                "cwd": self._cwd, "path": self._path, "timeout_s": self.run.timeout_s, "options": options,
                "processes": self.topology.processes, "links": self.topology.links, "listen": self.topology.listen}

    def started(self, pids: dict[str, int]) -> None:
        self.run._pids = pids
        self._living |= set(pids)
        for slot in self._slots.values():
            slot.beat()

    def exited(self, name: str, code: int) -> None:
        """Take note that a process has ended."""
        self._living.discard(name)
        slot = self._slots[name]
        if self.asked_to_stop or self._hung or (code == 0 and slot.phase == "done"):
            return
        role, index = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
        if role != "evaluator" and self.run.shared.reason and code == 0:
            return
        self.fail(of_exit(self.run.folder, role, index, code, _where(slot)))

    def fail(self, failure: Failure) -> None:
        """Take note of a failure; who is to blame is decided when the others have had a moment to fail too."""
        self._failures.append(failure)
        decide_at = time.monotonic() + SETTLE_S[failure.kind]
        self._decide_at = decide_at if self._decide_at is None else min(self._decide_at, decide_at)

    def tick(self) -> bool:
        """Look after the run; return True once it has ended and nobody lives."""
        now = time.monotonic()
        if self._kill_at and now >= self._kill_at[0][0]:
            _, number, names = self._kill_at.pop(0)
            self._signal(number, *(name for name in names if name in self._living))
        if not self._started:
            if self.asked_to_stop:
                return self._end("stopped", "stop")
            return False
        if self.run._failure is not None:
            return not self._living and self._end("failed", self.run._failure.kind)
        if self._decide_at is not None:
            if now >= self._decide_at:
                self._blame(now)
            return False
        if self.asked_to_stop:
            if not self._stopping:
                self._stopping = True
                self.run._message = "stopping"
                self._patience_ends = self.run._stop_asked_at + GRACE_S
            if now >= self._patience_ends:
                self._signal(signal.SIGKILL, *self._living)
                self._patience_ends = now + LOOK_S
            return not self._living and bool(self.run._pids) and self._end("stopped", "stop")
        if self.run._pids and not self._living:
            return self._end("done", self.run.shared.reason)
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._watch(now)
            self._tell(now)
        return False

    # ---- what goes wrong ----

    def _watch(self, now: float) -> None:
        """Fail the run if a process has been silent for too long."""
        if now - self._looked > BLIND_S:
            self._awake_since = now
        self._looked = now
        ages = {name: now - max(self._slots[name].last_beat, self._awake_since) for name in self._living}
        silent = [name for name in self.topology.names if ages.get(name, 0.0) > self.run.timeout_s]
        guilty = [name for name in silent if _is_halted(self.run._pids[name])]
        guilty += [name for name in silent
                   if self._slots[name].phase != "communicating" and ages[name] > self._limit(name)]
        if not guilty and silent:
            # All sit in a collective: who is behind the others, or came with something else?
            inside = [name for name in silent if self._slots[name].phase == "communicating"]
            guilty = self._behind(inside)
            if not guilty and set(inside) >= {name for name in self.topology.names if name.startswith("rank")}:
                # Only now: of the first two to be there nobody can tell whose is the odd one.
                guilty = self._odd(inside) or inside  # Nobody is late, and yet nobody comes out.
        if guilty:
            self._silent(guilty[0], now)

    def _limit(self, name: str) -> float:
        """Return for how many seconds a process may be silent."""
        slow = name == "evaluator0" or self._slots[name].phase == "starting"
        return max(SLOW * self.run.timeout_s, SLOW_S) if slow else self.run.timeout_s

    def _behind(self, names: list[str]) -> list[str]:
        if not names:
            return []
        last = max(self._slots[name].sequence for name in names)
        return [name for name in names if self._slots[name].sequence < last]

    def _odd(self, names: list[str]) -> list[str]:
        prints = [self._slots[name].fingerprint for name in names]
        usual = max(prints, key=prints.count)
        return [name for name, fingerprint in zip(names, prints, strict=True) if fingerprint != usual]

    def _silent(self, name: str, now: float) -> None:
        slot = self._slots[name]
        process = self.topology.processes[self.topology.names.index(name)]
        halted = ", being halted (SIGSTOP)" if _is_halted(self.run._pids[name]) else ""
        what = f"no sign of life for {now - slot.last_beat:.0f} s{halted}"
        self._hung = name
        self.fail(Failure(process["role"], process["index"], "timeout", what, _where(slot)))

    def _blame(self, now: float) -> None:
        """Name the first cause and send everybody home."""
        if self._hung is None and first_cause(self._failures).kind == "peer":
            # The survivors' own timeout came a moment before the watch's: whoever is silent explains theirs.
            for name in self.topology.names:
                slot = self._slots[name]
                silent = slot.phase != "communicating" and now - slot.last_beat > 0.8 * self.run.timeout_s
                if name in self._living and (silent or _is_halted(self.run._pids[name])):
                    self._silent(name, now)
                    break
        cause = first_cause(self._failures)
        self.run._message = cause.sentence()
        self.run.shared.ask_stop()
        others = tuple(name for name in self._living if name not in (self._hung, "evaluator0"))
        self._signal(signal.SIGKILL, *others)
        self._kill_at = [(now + GRACE_S - 0.1, signal.SIGKILL, ("evaluator0",))]
        if self._hung:
            hung = (self._hung,)
            self._signal(signal.SIGUSR1, *hung)
            self._signal(signal.SIGCONT, *hung)
            self._kill_at += [(now + STACK_S, signal.SIGTERM, hung), (now + STACK_S + TERM_S, signal.SIGKILL, hung)]
            self._kill_at.sort()
        self.run._failure = cause

    def _signal(self, number: int, *names: str) -> None:
        if names:
            self._send({"op": "signal", "run": self.run.run_id, "signal": number, "names": list(names)})

    # ---- what is told ----

    def _people(self) -> str:
        if self.run.backend == "virtual":
            return "the simulation"
        ranks = self.run.experiment.workers
        return "1 rank" if ranks == 1 else f"{ranks} ranks"

    def _tell(self, now: float) -> None:
        run, shared = self.run, self.run.shared
        if not run._pids or (not shared.t0 and not shared.reason):
            return
        run._message = self._going_on(now)
        run._state = "running"  # After the sentence, which whoever sees the state may read.

    def _going_on(self, now: float) -> str:
        run, shared = self.run, self.run.shared
        if shared.reason:
            return f"finishing: measuring the loss after {_count(self._version(), 'update')}"
        experiment = run.experiment
        text = f"running: {self._people()}, {self._version():,}"
        text += f" of {experiment.updates:,} updates" if experiment.updates else " updates"
        if experiment.seconds and run.backend != "virtual":
            text += f", {now - shared.t0:.1f} of {experiment.seconds:g} s"
        late = self._late(now)
        return text + (f"; waiting for rank{'s' if len(late) > 1 else ''} {', '.join(late)}" if late else "")

    def _late(self, now: float) -> list[str]:
        """Return the ranks that keep others waiting for long enough to be worth a word."""
        ranks = [name for name in self.topology.names if name.startswith("rank")]
        waiting = [name for name in ranks if self._slots[name].phase in ("waiting", "communicating")]
        late = [name for name in ranks if name not in waiting]
        if not waiting or not late:
            return []
        since = max(self._slots[name].entered for name in late)
        return [name.removeprefix("rank") for name in late] if now - since > WAITING_S else []

    def _version(self) -> int:
        return max(slot.version for slot in self._slots.values())

    def _end(self, how: str, reason: str) -> bool:
        """Write how it ended, and let go whoever waits for it, whatever goes wrong with the former."""
        run = self.run
        try:
            how = self._conclude(how, reason)
        except Exception as error:
            run._message = f"{how}, with no more known ({type(error).__name__}: {error})"
        finally:
            run._state = how
            run._ended.set()
        return True

    def _conclude(self, how: str, reason: str) -> str:
        """Write how it ended; return how."""
        run = self.run
        if how == "stopped" and run.shared.reason not in ("", "stop"):
            how, reason = "done", run.shared.reason  # Asked for when only the evaluator was left.
        told = _nonfinite(run) if how == "done" else ""
        if how == "done" and reason == "nonfinite":
            how = "stopped"
        ranks = [slot for name, slot in self._slots.items() if name.startswith("rank")]
        ended: dict[str, Any] = {"how": how, "reason": reason, "updates": self._version(),
                                 "overruns": sum(slot.overruns for slot in ranks)}
        cause = run._failure
        if how == "stopped" and told:
            ended |= {"message": told}
        if cause is not None:
            ended |= {"rank": cause.rank, "cause": cause.what, "kind": cause.kind, "message": cause.sentence()}
        try:
            write_run(run.folder, read_run(run.folder) | {"ended": ended})
        except (OSError, ValueError) as error:
            _complain(f"gdlab: how the run ended could not be written to {run.folder} ({str(error).rstrip('.')}).")
        updates = _count(self._version(), "update")
        if how != "failed":
            why = _because("cap" if reason == "updates" and run.experiment.updates is None else reason)
            run._message = f"{how} after {updates}" + (f": {why}" if how == "done" else "")
            if told:
                run._message = f"stopped: {told}" if how == "stopped" else f"{run._message}; {told}"
        return how


def _complain(text: str) -> None:
    try:
        print(text, file=sys.stderr)
    except (OSError, ValueError):
        pass  # It is closed.


def _because(reason: str) -> str:
    return {"updates": "all updates are made", "seconds": "the time is up", "target_loss": "the target loss is reached",
            "cap": "no run may make more", "stop": "it was asked to"}.get(reason, "it ended by itself")


def _nonfinite(run: Run) -> str:
    """Say which gradient was the first that was not finite, and how much more there was; nothing if all were."""
    try:
        rows, path = run.trace.applied, run.trace.path
    except (OSError, TraceError):
        return ""  # The folder is gone.
    bad, skipped = rows[rows["nonfinite"] > 0], len(np.unique(rows["version"][np.isnan(rows["lost_fraction"])]))
    if not len(bad) and not np.isfinite(path[-1:]).all():
        return "the parameters are not finite though every gradient is: a sum of them, or a step, overflowed"
    if not len(bad):
        return f"{_count(skipped, 'sum')} of finite gradients overflowed" if skipped else ""
    worker, step, values = (int(bad[0][name]) for name in ("worker", "step", "nonfinite"))
    told = (f"rank {worker}'s gradient of step {step} had {_count(values, 'value')} that "
            f"{'is' if values == 1 else 'are'} not finite")
    if len(bad) > 1:
        told += f", as had {_count(len(bad) - 1, 'more gradient')}"
    if run.shared.reason == "nonfinite" or not skipped:
        return told
    return f"{told}; {_count(skipped, 'step')} {'was' if skipped == 1 else 'were'} skipped"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _where(slot: Slot) -> str:
    phase = slot.phase
    if phase in ("computing", "sleeping", "communicating"):
        return f"{phase} in step {slot.step}" if phase != "computing" else f"computing step {slot.step}"
    return phase


def _is_halted(pid: int) -> bool:
    """Tell whether a process is stopped by a signal or a debugger (Linux only)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
