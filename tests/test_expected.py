"""What theory says of an experiment holds in virtual runs of it, within their own standard errors."""

import math

import numpy as np
import pytest
from scipy.stats import binom

import gdlab as gd
from gdlab import expected
from gdlab.backends.virtual import simulate

STILL = gd.Quadratic(eigenvalues=(1.0,), start=(1.0,))
BATCHES = 40


def mean_and_error(values):
    """Return the mean of a stationary sequence and its standard error, from the means of 40 batches in a row."""
    size = len(values) // BATCHES
    batches = np.asarray(values[: BATCHES * size], float).reshape(BATCHES, size).mean(axis=1)
    return batches.mean(), batches.std(ddof=1) / math.sqrt(BATCHES)


def settings(count, seed=2026):
    """Draw settings of law, workers, strategy and network; the seed was fixed before the first comparison."""
    rng = np.random.default_rng(seed)
    laws = (lambda: gd.Exponential(rng.uniform(0.01, 2)), lambda: gd.Gamma(rng.uniform(0.01, 2), rng.uniform(0.2, 1.5)),
            lambda: gd.LogNormal(rng.uniform(0.01, 2), rng.uniform(0.1, 1)),
            lambda: gd.Uniform(0.1, rng.uniform(0.2, 2)),
            lambda: gd.ShiftedExponential(rng.uniform(0.1, 1), rng.uniform(0.05, 1)),
            lambda: gd.Pareto(rng.uniform(0.1, 1), rng.uniform(3.5, 6)),
            lambda: gd.Spike(rng.uniform(0.1, 0.5), rng.uniform(1, 3), rng.uniform(0.05, 0.3)))
    for number in range(count):
        n, law = int(rng.integers(2, 17)), laws[rng.integers(len(laws))]()
        kind, speeds = number % 5, None
        if kind == 0:
            strategy = gd.Sync()
            speeds = tuple(rng.uniform(0.3, 2, n)) if rng.random() < 0.5 else None
        elif kind == 1:
            strategy = gd.Sync(int(rng.integers(1, n)), "server")
        elif kind == 2:
            strategy, speeds = gd.Async(), tuple(rng.uniform(0.3, 2, n))
        elif kind == 3:
            strategy = gd.Async(batch=int(rng.integers(2, 6)))
        else:
            n = min(n, 8)
            strategy, law = gd.Async(staleness_bound=int(rng.integers(0, 4))), gd.Exponential(rng.uniform(0.01, 2))
        costs = kind != 4 and rng.random() < 0.4
        network = gd.Network(rng.uniform(0, 0.1), rng.uniform(0, 0.01)) if costs else gd.Network()
        yield gd.Experiment(STILL, workers=n, strategy=strategy, compute_time=law, speeds=speeds, network=network,
                            optimizer=gd.SGD(lr=0.0), seed=int(rng.integers(2**31)),
                            updates=1000 if kind < 2 else 2400 // getattr(strategy, "batch", 1))


def rare(exp, rounds):
    """Return the standard error that a sample cannot see: of a law of two values one may never have come."""
    law, strategy = exp.compute_time, exp.strategy
    if not (isinstance(law, gd.Spike) and isinstance(strategy, gd.Sync)):
        return 0.0
    fast = binom.sf(exp.workers - strategy.backups - 1, exp.workers, 1 - law.probability)
    return (law.slow - law.base) * math.sqrt(fast * (1 - fast) / rounds)


def shown(exp):
    return f"{exp.strategy}, {exp.workers} workers, {exp.compute_time}"


@pytest.mark.parametrize("exp", list(settings(30)), ids=shown)
def test_round_time_throughput_and_staleness_of_random_settings_are_those_of_theory(exp, tmp_path):
    trace = simulate(exp, tmp_path / "run")
    rows, whole = trace.applied, len(trace.pushes)
    update = expected.update_seconds(exp, parameters=1)
    times = np.unique(np.c_[rows["version"], rows["applied_s"]], axis=0)[:, 1]
    lasted, error = mean_and_error(np.diff(times)[20:])
    error = max(error, rare(exp, len(times)))
    assert abs(lasted - update.value) < 4 * error + 1e-12
    # Throughput: gradients that took part, per second.
    each = exp.workers - exp.strategy.backups if isinstance(exp.strategy, gd.Sync) else exp.strategy.batch
    assert len(rows) == each * exp.updates <= whole
    assert abs(trace.summary()["throughput"] - each / update.value) < 4 * each * error / update.value**2 + 1e-12
    late = expected.staleness(exp)
    if isinstance(exp.strategy, gd.Sync):
        assert late.value == 0.0 == rows["staleness"].max()
        return
    mean, error = mean_and_error(rows["staleness"][20 * exp.workers:])
    # Without a bound the mean is an identity but for the pushes that are on their way at either end.
    ends = exp.workers * (exp.workers - 1) / len(rows)
    assert abs(mean - late.value) < 4 * error + 1e-12 + (ends if exp.strategy.staleness_bound is None else 0.0)
