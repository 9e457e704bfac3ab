"""What the processes of a run share: one mapped page in its folder that says who lives, and whether to stop.

Each process writes its own slot and reads the control words; the launcher only reads slots. Every word is an aligned
8-byte value with one writer, so no lock is needed, and the page outlives whoever is killed.
"""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

FILE = "shared_state.bin"

PHASES = ("starting", "ready", "computing", "sleeping", "waiting", "communicating", "finishing", "done")
"""What a process is doing; only `communicating` cannot beat, since it is inside a collective."""

REASONS = ("", "updates", "seconds", "target_loss", "stop", "nonfinite")
"""Why a run ended by itself."""

_STOP, _TARGET, _T0, _REASON = range(4)
_CONTROL = 8
_BEAT, _ENTERED, _PHASE, _STEP, _VERSION, _SEQUENCE, _OP, _NUMEL, _DTYPE, _OVERRUNS = range(10)
_SLOT = 16
_WORD = 8


class Slot:
    """One process's words: a beat in seconds of CLOCK_MONOTONIC, and where it is."""

    __slots__ = ("_at", "_floats", "_words")

    def __init__(self, shared: SharedState, index: int):
        self._words, self._floats = shared.words, shared.floats
        self._at = _CONTROL + index * _SLOT

    def beat(self) -> None:
        """Say that this process is alive."""
        self._floats[self._at + _BEAT] = time.monotonic()

    def enter(self, phase: str, step: int | None = None, version: int | None = None) -> None:
        """Say what this process does from now on, which is a beat too."""
        words, at = self._words, self._at
        words[at + _PHASE] = _CODES[phase]
        if step is not None:
            words[at + _STEP] = step
        if version is not None:
            words[at + _VERSION] = version
        now = time.monotonic()
        self._floats[at + _BEAT] = self._floats[at + _ENTERED] = now

    def collective(self, op: int, numel: int, dtype: int) -> None:
        """Leave the fingerprint of the collective that this rank enters now."""
        words, at = self._words, self._at
        words[at + _OP], words[at + _NUMEL], words[at + _DTYPE] = op, numel, dtype
        words[at + _SEQUENCE] += 1
        self.enter("communicating")

    def overrun(self) -> None:
        """Count a step whose gradient took longer than its drawn time."""
        self._words[self._at + _OVERRUNS] += 1

    @property
    def last_beat(self) -> float:
        return self._floats[self._at + _BEAT]

    @property
    def entered(self) -> float:
        """When it entered its phase, in seconds of CLOCK_MONOTONIC."""
        return self._floats[self._at + _ENTERED]

    @property
    def phase(self) -> str:
        return PHASES[self._words[self._at + _PHASE]]

    @property
    def step(self) -> int:
        return self._words[self._at + _STEP]

    @property
    def version(self) -> int:
        return self._words[self._at + _VERSION]

    @property
    def sequence(self) -> int:
        """How many collectives this rank has entered."""
        return self._words[self._at + _SEQUENCE]

    @property
    def fingerprint(self) -> tuple[int, int, int]:
        """Operation, number of elements and data type of the last collective."""
        at = self._at
        return self._words[at + _OP], self._words[at + _NUMEL], self._words[at + _DTYPE]

    @property
    def overruns(self) -> int:
        return self._words[self._at + _OVERRUNS]


_CODES = {name: code for code, name in enumerate(PHASES)}


class SharedState:
    """The mapped page: control words and one slot a process, in the order in which the launcher lists them."""

    def __init__(self, folder: str | Path):
        with open(Path(folder, FILE), "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        view = memoryview(self._map)
        self.words, self.floats = view.cast("q"), view.cast("d")
        self.slots = (len(self.words) - _CONTROL) // _SLOT

    @classmethod
    def create(cls, folder: str | Path, slots: int) -> SharedState:
        """Write the page for `slots` processes into `folder` and map it.

        Raises FileExistsError where there is one already: of two runs that want the same folder one gets it.
        """
        # Written and not just sized: a hole in a file that cannot be filled later would kill whoever touches it.
        size = (_CONTROL + slots * _SLOT) * _WORD
        descriptor = os.open(Path(folder, FILE), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, bytes(size))
        finally:
            os.close(descriptor)
        return cls(folder)

    def slot(self, index: int) -> Slot:
        """Return the words of the process with this index."""
        return Slot(self, index)

    @property
    def stop(self) -> bool:
        """Whether somebody asked for the run to stop."""
        return self.words[_STOP] != 0

    def ask_stop(self) -> None:
        self.words[_STOP] = 1

    @property
    def target_reached(self) -> bool:
        """Whether the evaluator found the full objective at or below the target."""
        return self.words[_TARGET] != 0

    def reach_target(self) -> None:
        self.words[_TARGET] = 1

    @property
    def t0(self) -> float:
        """When the last rank was ready, in seconds of CLOCK_MONOTONIC; 0.0 before that."""
        return self.floats[_T0]

    @t0.setter
    def t0(self, seconds: float) -> None:
        self.floats[_T0] = seconds

    @property
    def reason(self) -> str:
        """Why the run ended by itself; empty while it has not."""
        return REASONS[self.words[_REASON]]

    @reason.setter
    def reason(self, name: str) -> None:
        self.words[_REASON] = REASONS.index(name)
