"""What every process of a run does first, and the two short roles: the simulation and the evaluator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from gdlab.backends.heart import Heart
from gdlab.experiment import Experiment
from gdlab.trace import Trace, read_run

if TYPE_CHECKING:
    from gdlab.backends.zygote import Job

FINISH_S = 30.0
"""How long the evaluator may go on after the last update of a real run."""


def experiment_of(folder: str | Path) -> Experiment:
    """Return the experiment of a run's folder, with the function of a problem that came from a cell."""
    function = Path(folder, "payload.bin")
    return Trace(Path(folder), function.read_bytes() if function.exists() else None).experiment


def path_format(experiment: Experiment) -> str:
    """Return the dtype of a run's path: the weights', fp32 where those are narrower."""
    return "float64" if experiment.precision.weights == "fp64" else "float32"


def rehearse() -> None:
    """Take one step of the default experiment, so that a forked process finds loaded what torch loads on first use."""
    from gdlab.descent.problems import build
    from gdlab.descent.store import Store
    from gdlab.descent.worker import Worker

    experiment = Experiment(workers=1)
    problem = build(experiment)
    store = Store(experiment, problem)
    store.apply([Worker(experiment, problem, 0).gradient(store.read(0), 0)], [0])


def simulate(job: Job) -> None:
    """Be the process of a virtual run."""
    from gdlab.backends.virtual import Simulation

    heart = Heart(job.folder)
    slot = heart.slot(job.slot)
    simulation: Simulation | None = None

    def look() -> bool:
        slot.enter("computing", version=simulation.store.version if simulation else 0)
        return heart.stop

    slot.enter("starting")
    simulation = Simulation(experiment_of(job.folder), job.folder, look)
    heart.t0 = time.monotonic()
    look()
    reason = simulation.run()
    look()
    heart.reason = reason


def evaluate(job: Job) -> None:
    """Be the evaluator of a run: measure the objective along the path, and tell when the target is reached."""
    from gdlab.backends import evaluator

    heart = Heart(job.folder)
    slot = heart.slot(job.slot)
    slot.enter("starting")
    experiment = experiment_of(job.folder)
    target = experiment.target_loss

    def follow() -> bool:
        slot.enter("computing")
        return not heart.reason and not heart.stop

    def hurry() -> bool:
        slot.enter("finishing")
        return heart.stop

    def report(version: int, loss: float) -> None:
        slot.beat()
        if target is not None and loss <= target:
            heart.reach_target()

    simulated = read_run(job.folder)["environment"].get("backend") == "virtual"
    evaluator.evaluate(experiment, job.folder, deadline_s=None if simulated else FINISH_S, follow=follow, hurry=hurry,
                       report=report, patient=simulated)
