"""What theory says of an experiment before it is run, with what it assumes; None where it has nothing exact to say."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gdlab import theory
from gdlab.experiment import VIRTUAL_STEP_S, Experiment
from gdlab.formats import facts
from gdlab.laws import Constant, Exponential
from gdlab.parts import SGD, Async, LocalSGD, Quadratic, Sync

if TYPE_CHECKING:
    from gdlab.laws import Law

FEW_STATES = 5000
"""A chain of more states takes too long for a figure."""


class Expected(NamedTuple):
    """A number, and in words what must hold for it."""

    value: float
    because: str


def law_of(experiment: Experiment, clock: str = "virtual") -> Law | None:
    """Return the law of the workers' steps; None for real steps that last as long as they do."""
    default = Constant(value=VIRTUAL_STEP_S) if clock == "virtual" else None
    return experiment.compute_time or default


def update_seconds(experiment: Experiment, clock: str = "virtual", parameters: int | None = None) -> Expected | None:
    """Return the mean seconds from one update of the shared parameters to the next.

    `parameters`: how many there are, for messages whose bytes take time. Left out: local steps, unequal speeds with
    backup workers or a bound, a bound for other than memoryless workers, a server that takes time for each push.
    """
    exp, law, n, network = experiment, law_of(experiment, clock), experiment.workers, experiment.network
    strategy, speeds, message_s = exp.strategy, np.array(exp.speeds or (1.0,) * exp.workers), 0.0
    equal = len(set(speeds)) == 1
    if law is None or isinstance(strategy, LocalSGD) or (n > 1 and network.seconds_per_byte and (
            not parameters or getattr(exp, "compression", None))):
        return None
    nbytes = (parameters or 0) * facts(exp.precision.reduce).bits / 8
    served = isinstance(strategy, Async) or strategy.exchange == "server"
    if n > 1 and served:
        message_s = network.latency_s + nbytes * network.seconds_per_byte
        if network.server_s:
            return None
    if isinstance(strategy, Sync):
        if strategy.backups and not equal:
            return None
        wait_s = theory.expected_step_time(law, n, strategy.backups, speeds.tolist())
        ring_s = 0.0 if served else theory.allreduce_time(nbytes, n, network.latency_s, network.seconds_per_byte)
        whom = f"the fastest {n - strategy.backups} of {n}" if strategy.backups else f"the slowest of {n}"
        return _known(wait_s + ring_s + 2 * message_s, f"a round waits for {whom}: the mean of that order statistic")
    if strategy.staleness_bound is None or n == 1:
        mean_s = law.mean / speeds + 2 * message_s  # type: ignore[attr-defined]
        return _known(strategy.batch / float((1.0 / mean_s).sum()), "each worker goes on at once: renewal theory, any "
                      "law" + (f"; {strategy.batch} gradients an update" if strategy.batch > 1 else ""))
    if _chained(exp, law) and not message_s:
        rate = float(speeds[0]) / law.mean  # type: ignore[attr-defined]
        return _known(strategy.batch / theory.ssp_throughput(n, strategy.staleness_bound, rate),
                      "memoryless workers: the exact Markov chain of their clocks")
    return None


def staleness(experiment: Experiment, clock: str = "virtual") -> Expected | None:
    """Return the mean staleness over updates; None with a bound, unless the workers are memoryless and equal."""
    strategy, n, law = experiment.strategy, experiment.workers, law_of(experiment, clock)
    if not isinstance(strategy, Async):
        return Expected(0.0, "a round's gradients are all of its own version")
    if strategy.staleness_bound is None or n == 1:
        # Each update makes every worker but the one that completes it one update staler.
        share = f" over the {strategy.batch} gradients of an update" if strategy.batch > 1 else ""
        return Expected((n - 1) / strategy.batch, f"mean = workers - 1{share}, for any law and any speeds")
    if law is not None and _chained(experiment, law) and strategy.batch == 1 and _free(experiment):
        return Expected(theory.ssp_staleness(n, strategy.staleness_bound),
                        "memoryless workers: the exact Markov chain of their clocks")
    return None


def staleness_shares(experiment: Experiment, size: int, clock: str = "virtual") -> tuple[np.ndarray, str] | None:
    """Return the shares of staleness 0 to size - 1 and what they assume: memoryless workers, or equal ones in turn."""
    exp, law = experiment, law_of(experiment, clock)
    if not _plain(exp.strategy) or not _free(exp) or exp.workers < 2:
        return None
    speeds = exp.speeds or (1.0,) * exp.workers
    if isinstance(law, Exponential):
        return theory.staleness_shares(speeds, size), "memoryless workers: p (1 - p)^k with p a worker's share"
    if isinstance(law, Constant) and len(set(speeds)) == 1:
        return (np.arange(size) == exp.workers - 1).astype(float), "equal workers in turn: always workers - 1"
    return None


def noise_floor(experiment: Experiment, clock: str = "virtual") -> Expected | None:
    """Return the objective at which a noisy quadratic settles, sum of curvature * E[x^2] / 2.

    For one quadratic that all workers share, and SGD without weight decay, clipping, compression or narrow formats.
    Asynchronous workers: memoryless ones, or equal ones in turn, with free messages.
    """
    exp, problem, rule, law = experiment, experiment.problem, experiment.optimizer, law_of(experiment, clock)
    if not isinstance(problem, Quadratic) or problem.eigenvalue_rows or problem.centers or not problem.noise:
        return None
    wide = {exp.precision.compute, exp.precision.weights, exp.precision.reduce} <= {"fp32", "fp64"}
    if (not isinstance(rule, SGD) or rule.weight_decay or not rule.lr or exp.clip or not wide or exp.combine != "mean"
            or getattr(exp, "compression", None) or np.min(np.asarray(problem.eigenvalues)) <= 0):
        return None
    equal = len(set(exp.speeds or (1.0,))) == 1
    strategy: Any = exp.strategy
    because = "exact on a quadratic"
    if isinstance(strategy, Async) and exp.workers > 1:
        if not (_plain(strategy) and _free(exp) and equal):
            return None
        if isinstance(law, Constant):
            strategy, because = "fixed_delay", f"{because} with equal workers in turn"
        elif isinstance(law, Exponential) and not rule.momentum:
            because += " with memoryless workers"
        else:
            return None
    elif isinstance(strategy, LocalSGD) and rule.momentum:
        return None
    elif isinstance(strategy, Async):
        if strategy.batch > 1:
            return None
        strategy = "sync"
    curvatures = np.asarray(problem.eigenvalues, float).tolist()
    floors = [theory.noise_floor(rule.lr, one, problem.noise, exp.workers, strategy, rule.momentum)
              for one in curvatures]
    return _known(float(np.dot(curvatures, floors)) / 2, because)


def _known(value: float, because: str) -> Expected | None:
    return Expected(value, because) if math.isfinite(value) else None


def _plain(strategy: object) -> bool:
    return (isinstance(strategy, Async) and strategy.staleness_bound is None and strategy.batch == 1
            and strategy.correction == "none")


def _free(experiment: Experiment) -> bool:
    """Say whether messages cost nothing."""
    network = experiment.network
    return not (network.latency_s or network.seconds_per_byte or network.server_s)


def _chained(experiment: Experiment, law: Law) -> bool:
    """Say whether the chain of bounded staleness is exact here, and short."""
    n, bound = experiment.workers, getattr(experiment.strategy, "staleness_bound", None)
    return (isinstance(law, Exponential) and len(set(experiment.speeds or (1.0,))) == 1 and bound is not None
            and n + bound < 10_000 and math.comb(n + bound, bound + 1) <= FEW_STATES)
