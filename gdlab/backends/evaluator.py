"""The evaluator: follows a run's path and measures the full objective along it and around it.

It runs beside the run at a low priority and reads nothing but the run's folder, so it can be late without any effect on
the descent. Like every process of a run it may not fail: a run whose evaluator dies has failed, and its trace stays.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gdlab.backends.job import Job, experiment_of
from gdlab.backends.shared_state import SharedState
from gdlab.backends.surface import Surface
from gdlab.descent.problems import build
from gdlab.records import path_dtype
from gdlab.trace import LossWriter, read_run, write_json

if TYPE_CHECKING:
    from gdlab.descent.problems import Problem
    from gdlab.experiment import Experiment

MOST_LOSSES, MOST_CHEAP = 4096, 131_072
"""So many versions are all measured; of a longer path every second, then every fourth, ... one. Cheap: without data."""

MOST_LATE = 1024
LATE_S, FILL_S = 2.0, 5.0
"""Where more than MOST_LATE versions of a real run wait, for more than LATE_S of work, every second one is passed over,
and measured after the end, for FILL_S at most."""

CHUNK, CHEAP_CHUNK = 8, 1024
PAUSE_S = 0.05
HURRY_S = 0.3
FINISH_S = 30.0
"""How long the evaluator may go on after the last update of a real run."""


class PathReader:
    """Read the shared parameters from a run's folder while they are being written."""

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._dtype: np.dtype | None = None
        self._rows = np.empty(0, [("version", "<i8"), ("x", "<f4", (0,))])

    def rows(self) -> np.ndarray:
        """Return the records (version, x) written so far, mapped and not copied."""
        if self._dtype is None:
            try:
                shape = json.loads((self._folder / "path.json").read_text())
            except FileNotFoundError:
                return self._rows
            self._dtype = path_dtype(shape["parameters"], shape["dtype"])
        file = self._folder / "path.bin"
        count = file.stat().st_size // self._dtype.itemsize if file.exists() else 0
        if count > len(self._rows):
            self._rows = np.memmap(file, self._dtype, mode="r", shape=(count,))
        return self._rows


class Evaluator:
    """Measure the full objective along the path of one run."""

    def __init__(self, folder: str | Path, problem: Problem, report: Callable[[int, float], None] | None = None,
                 patient: bool = False):
        self.problem = problem
        self.last_version = -1
        """The newest version that was measured, and its objective in `last_loss`."""
        self.last_loss = float("nan")
        self._report, self._patient = report, patient
        self._path = PathReader(folder)
        self._writer = LossWriter(folder)
        self._most, self._chunk = (MOST_CHEAP, CHEAP_CHUNK) if problem.samples is None else (MOST_LOSSES, CHUNK)
        self._row = 0
        self._stride = 1  # for the length of the path
        self._late = 1  # and for what is late
        self._wanted = 0
        self._passed: list[int] = []
        self._left: list[int] | None = None
        self._cost_s = 0.0

    @property
    def rows(self) -> np.ndarray:
        """The path so far, records (version, x)."""
        return self._path.rows()

    def advance(self) -> bool:
        """Measure the next few versions; return whether more are waiting."""
        rows = self._path.rows()
        waiting = (len(rows) - self._row) // (self._stride * self._late)
        if not self._patient and waiting > MOST_LATE and waiting * self._cost_s > LATE_S:
            self._late *= 2
        due: list[int] = []
        while self._row < len(rows) and len(due) < self._chunk:
            if self._row % self._stride == 0:
                (self._passed if self._row % (self._stride * self._late) else due).append(self._row)
                self._wanted += 1
                if self._wanted == self._most:
                    self._wanted //= 2
                    self._stride *= 2
            self._row += 1
        self._measure(rows[due])
        return self._row < len(rows)

    def measure_last(self) -> None:
        """Measure the last version, whatever the stride."""
        rows = self._path.rows()
        if len(rows) and rows["version"][-1] != self.last_version:
            self._measure(rows[-1:])

    def fill(self) -> bool:
        """Measure a few of the versions that were passed over; return whether there are more."""
        if self._left is None:
            # Coarse before fine, so that whenever this is broken off what is measured is spread evenly.
            passed = (row for row in self._passed if row % self._stride == 0)
            self._left = sorted(passed, key=lambda row: row & -row)
        due = [self._left.pop() for _ in range(min(self._chunk, len(self._left)))]
        self._measure(self._path.rows()[due])
        return bool(self._left)

    def close(self) -> None:
        """Close the file of losses."""
        self._writer.close()

    def _measure(self, rows: np.ndarray) -> None:
        began = time.monotonic()
        losses = objectives(self.problem, rows["x"])
        if losses:
            # The cheapest look so far: what the objective costs, not what the machine was busy with meanwhile.
            cost_s = (time.monotonic() - began) / len(losses)
            self._cost_s = min(self._cost_s or cost_s, cost_s)
        for version, loss in zip(rows["version"].tolist(), losses, strict=True):
            self._writer.append(version, loss)
            if version > self.last_version:
                self.last_version, self.last_loss = version, loss
            if self._report is not None:
                self._report(version, loss)


def objectives(problem: Problem, points: np.ndarray) -> list[float]:
    """Return the full objective at each of `points`, (m, n); what is not finite stays as it is."""
    if not len(points):
        return []
    values = problem.objectives(torch.from_numpy(np.array(points)))
    return np.asarray(values, dtype=np.float64).tolist()


def evaluate(
    exp: Experiment,
    folder: str | Path,
    problem: Problem | None = None,
    deadline_s: float | None = None,
    follow: Callable[[], bool] | None = None,
    hurry: Callable[[], bool] | None = None,
    report: Callable[[int, float], None] | None = None,
    patient: bool = False,
) -> None:
    """Write `losses.bin`, the surfaces and `final.json` of a run, while it goes on and once it has ended.

    `follow` is asked several times a second whether the run goes on; without it, it has ended. Then everything that is
    left is measured, for at most `deadline_s` seconds; if `hurry` says that somebody waits for the end, only what is
    cheap. `report(version, loss)` is called with each measured loss. Where it is `patient`, which versions are measured
    does not depend on how fast that goes.
    """
    problem = problem if problem is not None else build(exp)
    evaluator = Evaluator(folder, problem, report, patient)
    surface = Surface(exp, folder, problem)
    going = follow is not None and follow()

    def busy() -> bool:
        """Say whether a surface may still take its time."""
        return follow() if going else time.monotonic() < until

    until = 0.0
    with torch.no_grad():
        while going:
            waiting = evaluator.advance()
            surface.refresh(evaluator.rows, busy)
            if not waiting:
                time.sleep(PAUSE_S)
            going = follow is not None and follow()
        until = time.monotonic() + (HURRY_S if hurry is not None and hurry() else deadline_s or float("inf"))
        while time.monotonic() < until - HURRY_S and evaluator.advance():
            if hurry is not None and hurry():
                until = min(until, time.monotonic() + HURRY_S)
        evaluator.measure_last()
        filled = min(until - HURRY_S, time.monotonic() + FILL_S)
        while time.monotonic() < filled and not (hurry is not None and hurry()) and evaluator.fill():
            pass
        evaluator.close()
        rows = evaluator.rows
        if len(rows):
            final = torch.from_numpy(np.array(rows["x"][-1]))
            accuracy = problem.accuracy(final)
            write_json(folder, "final.json", {"version": evaluator.last_version, "final_loss": evaluator.last_loss,
                                              "accuracy": accuracy})
            surface.finish(rows, busy, until - time.monotonic())


def main(job: Job) -> None:
    """Be the evaluator of a run: measure the objective along the path, and tell when the target is reached."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    slot.enter("starting")
    experiment = experiment_of(job.folder)
    target = experiment.target_loss

    def follow() -> bool:
        slot.enter("computing")
        return not shared.reason and not shared.stop

    def hurry() -> bool:
        slot.enter("finishing")
        return shared.stop

    def report(version: int, loss: float) -> None:
        slot.beat()
        if target is not None and loss <= target:
            shared.reach_target()

    simulated = read_run(job.folder)["environment"].get("backend") == "virtual"
    evaluate(experiment, job.folder, deadline_s=None if simulated else FINISH_S, follow=follow, hurry=hurry,
                       report=report, patient=simulated)
