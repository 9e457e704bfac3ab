"""Small traces made in plain numpy, written by the trace's own writers, for tests that need no training."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gdlab as gd
from gdlab.trace import EventWriter, LossWriter, PathWriter, Trace, write_run, write_surface

MEASURED = dict(backend="local", clock="wall", cores=2, ranks=4, threads=1, device="cpu", group_backend="gloo")
SIMULATED = dict(backend="virtual", clock="virtual", ranks=4, cores=2, threads=1, device="cpu")


def rosenbrock(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (1 - x) ** 2 + 20 * (y - x**2) ** 2


def made(folder: Path, experiment: gd.Experiment | None = None, updates: int = 60, parameters: int = 2,
         environment: dict | None = None, surface: bool = True, losses: bool = True, nonfinite: int = 0) -> Trace:
    """Write a run of a bent valley: round by round under Sync, one push an update under Async."""
    experiment = experiment or gd.Experiment(gd.Ravine(), strategy=gd.Async(), updates=updates)
    folder.mkdir(parents=True, exist_ok=True)
    n, rng = experiment.workers, np.random.default_rng(0)
    write_run(folder, {"experiment": experiment.model_dump(mode="json", by_alias=True),
                       "environment": environment or MEASURED})
    asynchronous = type(experiment.strategy).__name__ == "Async"
    basis = np.linalg.qr(np.random.default_rng(1).normal(size=(parameters, 2)))[0].T if parameters > 2 else np.eye(2)
    at = [np.array([-1.1, 0.9])]
    events, full = EventWriter(folder, "server"), LossWriter(folder)
    path = PathWriter(folder, parameters, "<f4", updates)
    write_version(path, full if losses else None, 0, at[0], basis, parameters)
    clock, read, step, version = np.zeros(n), np.zeros(n, int), np.zeros(n, int), 0
    push, length = 0, rng.exponential(0.04, n) + 0.01
    while version < updates:
        if asynchronous:
            order = [int(np.argmin(clock + length))]
        else:
            order = list(range(n))
        gradients, last = [], max(clock[w] + length[w] for w in order)
        for worker in order:
            x, y = at[read[worker]]
            gradient = np.array([-2 * (1 - x) - 80 * x * (y - x**2), 40 * (y - x**2)]) + rng.normal(size=2)
            norm = float(np.hypot(*gradient))
            scale = min(1.0, experiment.clip.norm / norm) if experiment.clip and experiment.clip.norm else 1.0
            gradients.append(gradient * scale)
            bad = push % 37 == 36 and nonfinite > 0
            nonfinite -= bad
            done = clock[worker] + length[worker]
            applied = (done if asynchronous else last) + 0.004
            events.push(worker=worker, step=int(step[worker]), read_version=int(read[worker]), version=version + 1,
                        staleness=version - int(read[worker]), start_s=clock[worker], computed_s=done,
                        applied_s=applied, loss=np.nan if bad else rosenbrock(x, y) * rng.uniform(0.6, 1.5),
                        grad_norm=float("inf") if bad else norm, clip_scale=scale, nonfinite=int(bad))
            events.release(worker, int(step[worker]), applied + 0.002)
            clock[worker], step[worker] = applied + 0.002, step[worker] + 1
            push += 1
            length[worker] = rng.exponential(0.04) + 0.01
        version += 1
        at.append(at[-1] - 0.008 * np.mean(gradients, axis=0))
        write_version(path, full if losses else None, version, at[-1], basis, parameters)
        for worker in order:
            read[worker] = version
    events.close()
    path.finish(version, at[-1] @ basis + (0 if parameters == 2 else 1))
    full.close()
    if surface:
        x, y = np.linspace(-1.6, 1.4, 40), np.linspace(-0.5, 1.6, 36)
        extra = {} if parameters == 2 else {
            "origin": np.ones(parameters), "basis": basis, "explained": np.array([0.81, 0.12])}
        write_surface(folder, 0, x=x, y=y, loss=rosenbrock(*np.meshgrid(x, y)).astype("f4"),
                      kind="parameters" if parameters == 2 else "pca", **extra)
    return Trace(folder)


def write_version(path: PathWriter, full: LossWriter | None, version: int, at: np.ndarray, basis: np.ndarray,
                  parameters: int) -> None:
    path.append(version, at @ basis + (0 if parameters == 2 else 1))
    if full is not None:
        full.append(version, float(rosenbrock(*at)))


def begun(folder: Path, experiment: gd.Experiment | None = None) -> Trace:
    """Write a run that has only just been announced."""
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, {"experiment": (experiment or gd.Experiment()).model_dump(mode="json", by_alias=True)})
    return Trace(folder)
