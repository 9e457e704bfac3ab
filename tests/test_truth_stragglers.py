"""Known right answers about delays and stragglers, from runs in virtual time.

Fixed seeds; bands are four standard errors, computed from the standard deviation of what is averaged. The expected
values come from the sources named, none from this package.
"""

import itertools
import math
import statistics

import numpy as np
import pytest

import gdlab as gd
from gdlab.backends.virtual import simulate

STILL = gd.Quadratic(eigenvalues=(1.0,), start=(1.0,))


@pytest.fixture
def run(tmp_path):
    folders = (tmp_path / f"{number}" for number in itertools.count())

    def run(**fields):
        exp = gd.Experiment(**({"problem": STILL, "optimizer": gd.SGD(lr=0.0)} | fields))
        return simulate(exp, next(folders))

    return run


def seconds_per_update(trace):
    rows = trace.applied
    return rows["applied_s"].max() / rows["version"].max()


# ---- how long a step takes -----------------------------------------------------------------------------------------

def deviation(workers, backups=0):
    """Standard deviation of the (workers - backups)-th smallest of exponential times with mean 1 (Rényi 1953)."""
    return math.sqrt(sum(1 / k**2 for k in range(backups + 1, workers + 1)))


@pytest.mark.parametrize(("workers", "expected", "steps"), [
    (1, 1.0, 400), (2, 1.5, 400), (4, 25 / 12, 400), (8, 761 / 280, 400), (16, 2436559 / 720720, 200),
    (32, 4.05849519543652, 100), (64, 4.743890903705769, 60), (128, 5.433147092589173, 40),
])
def test_a_synchronous_step_of_memoryless_workers_takes_the_harmonic_number(run, workers, expected, steps):
    trace = run(workers=workers, compute_time=gd.Exponential(1.0), updates=steps)
    assert abs(seconds_per_update(trace) - expected) < 4 * deviation(workers) / math.sqrt(steps)


@pytest.mark.parametrize(("workers", "backups", "expected"), [
    (8, 0, 2.717857142857143), (8, 1, 1.7178571428571427), (8, 2, 1.2178571428571427), (8, 4, 0.6345238095238095),
    (16, 0, 3.3807289932289932), (16, 1, 2.3807289932289932), (16, 2, 1.8807289932289932),
    (16, 4, 1.29739565989566), (100, 0, 5.187377517639621), (100, 1, 4.187377517639621),
    (100, 2, 3.68737751763962), (100, 4, 3.104044184306287),
])
def test_backup_workers_cut_the_slowest_ones_share(run, workers, backups, expected):
    steps = 300 if workers < 100 else 50
    trace = run(workers=workers, strategy=gd.Sync(backups, "server"), compute_time=gd.Exponential(1.0), updates=steps)
    assert abs(seconds_per_update(trace) - expected) < 4 * deviation(workers, backups) / math.sqrt(steps)
    assert len(trace.applied) == steps * (workers - backups)


def test_no_backup_workers_is_plain_sync_bit_for_bit(run):
    noisy = gd.Quadratic(noise=0.5)
    fields = {"problem": noisy, "workers": 8, "compute_time": gd.Exponential(1.0), "updates": 50,
              "optimizer": gd.SGD(lr=0.05)}
    plain = run(strategy=gd.Sync(exchange="server"), **fields)
    none = run(strategy=gd.Sync(backups=0, exchange="server"), **fields)
    reduced = run(strategy=gd.Sync(), **fields)
    assert plain.path.tobytes() == none.path.tobytes() == reduced.path.tobytes()
    assert plain.pushes.tobytes() == none.pushes.tobytes()
    # Only what goes over the wire differs: a ring sends each number 2 (N - 1) / N times, a server gets it and gives it.
    same = [name for name in plain.pushes.dtype.names if not name.startswith("bytes")]
    assert all(plain.pushes[name].tobytes() == reduced.pushes[name].tobytes() for name in same)


@pytest.mark.parametrize(("law", "workers", "expected"), [
    (gd.Gamma(1.0, 0.1), 8, 1.1468716343314467), (gd.Gamma(1.0, 0.5), 2, 1.2734374999999996),
    (gd.Gamma(1.0, 0.5), 8, 1.807867088385795), (gd.Gamma(1.0, 0.5), 32, 2.308914994152378),
    (gd.Gamma(1.0, 1.0), 8, 2.7178571428571323), (gd.Pareto(1.0, 3.0), 4, 2.2090909090909077),
    (gd.LogNormal(1.0, 0.5), 4, 1.573271371260295), (gd.LogNormal(1.0, 0.5), 16, 2.2178821715281494),
    (gd.Uniform(0.5, 1.5), 4, 1.3), (gd.Uniform(0.5, 1.5), 9, 1.4),
], ids=str)
def test_a_synchronous_step_takes_the_mean_of_the_slowest_draw(run, law, workers, expected):
    # Ali et al. 2000 for gamma (shape 1 / V^2); order statistics for the others.
    trace = run(workers=workers, compute_time=law, updates=200)
    rows = trace.applied
    steps = np.diff(np.r_[0.0, np.unique(rows["applied_s"])])
    assert len(steps) == 200
    assert abs(steps.mean() - expected) < 4 * steps.std() / math.sqrt(len(steps))


@pytest.mark.parametrize(("law", "workers", "ratio"), [
    (gd.Exponential(1.0), 4, 2.0833333333333277), (gd.Exponential(1.0), 16, 3.380728993228986),
    (gd.Gamma(1.0, 0.5), 4, 1.544389533432119), (gd.LogNormal(1.0, 0.5), 16, 2.2178821715281494),
], ids=str)
def test_per_gradient_async_is_faster_by_the_mean_of_the_slowest_over_the_mean(run, law, workers, ratio):
    gradients = 3200
    sync = run(workers=workers, compute_time=law, updates=gradients // workers).summary()["throughput"]
    free = run(workers=workers, compute_time=law, updates=gradients, strategy="async").summary()["throughput"]
    assert free == pytest.approx(workers, rel=0.07)
    assert free / sync == pytest.approx(ratio, rel=0.08)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_waiting_for_k_of_eight_and_taking_k_at_a_time(run, count):
    # Dutta et al. 2018: K-sync takes H_P - H_(P-K) for exponential times, K-batch-async K E[X] / P for any law.
    updates = 1600 // count
    k_sync = run(workers=8, strategy=gd.Sync(8 - count, "server"), compute_time=gd.Exponential(1.0), updates=updates)
    expected = {1: 0.125, 2: 0.26785714285714285, 4: 0.6345238095238095, 8: 2.717857142857143}[count]
    assert abs(seconds_per_update(k_sync) - expected) < 4 * deviation(8, 8 - count) / math.sqrt(updates)
    for law, cv in ((gd.Exponential(1.0), 1.0), (gd.Gamma(1.0, 0.5), 0.5)):
        batched = run(workers=8, strategy=gd.Async(batch=count), compute_time=law, updates=updates)
        band = 4 * cv / math.sqrt(1600) + 8 / 1600
        assert seconds_per_update(batched) == pytest.approx(count / 8, rel=band)


@pytest.mark.parametrize(("workers", "throughput"), [
    (2, {0: 4 / 3, 1: 1.6}), (4, {0: 1.92, 3: 3.200720141377406}), (8, {1: 4.4629543452004174, 2: 5.299111579795327}),
])
def test_bounded_staleness_reaches_the_throughput_of_its_chain(run, workers, throughput):
    for bound, expected in throughput.items():
        trace = run(workers=workers, strategy=gd.Async(staleness_bound=bound), compute_time=gd.Exponential(1.0),
                    updates=4000)
        assert 1 / seconds_per_update(trace) == pytest.approx(expected, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_bounded_staleness_reaches_the_throughput_of_its_chain_closely(run, workers, bound):
    trace = run(workers=workers, strategy=gd.Async(staleness_bound=bound), compute_time=gd.Exponential(1.0),
                updates=50_000)
    assert 1 / seconds_per_update(trace) == pytest.approx(gd.theory.ssp_throughput(workers, bound), rel=0.015)


def test_bounded_staleness_does_not_help_against_a_worker_that_is_always_slow(run):
    # A permanently slow worker's clock is everybody's in the long run.
    trace = run(workers=4, strategy=gd.Async(staleness_bound=3), compute_time=gd.Constant(1.0), speeds=(1, 1, 1, 0.25),
                updates=2000)
    assert 1 / seconds_per_update(trace) == pytest.approx(4 * 0.25, rel=0.02)


# ---- staleness -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers", [2, 4, 8, 16])
@pytest.mark.parametrize("law", [gd.Constant(1.0), gd.Exponential(1.0), gd.LogNormal(1.0, 1.0), gd.Pareto(1.0, 1.5)],
                         ids=lambda law: type(law).__name__)
def test_mean_staleness_is_the_number_of_others_for_any_law(run, law, workers):
    # Each update is one that every other worker waits through, once: those seen by pushes that are still on their
    # way at the end are all that the sum over updates lacks.
    updates = 500
    speeds = tuple(1 + 0.5 * (worker % 3) for worker in range(workers))
    rows = run(workers=workers, strategy="async", compute_time=law, speeds=speeds, updates=updates).applied
    last_read = np.zeros(workers, dtype=int)
    np.maximum.at(last_read, rows["worker"], rows["version"])
    assert rows["staleness"].sum() + (updates - last_read).sum() == (workers - 1) * updates


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_mean_staleness_over_many_updates(run, workers):
    rows = run(workers=workers, strategy="async", compute_time=gd.LogNormal(1.0, 0.5), updates=50_000).applied
    assert rows["staleness"].mean() == pytest.approx(workers - 1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("cv", "workers", "spread", "share"), [
    (0.1, 4, 0.6286214943548964, 0.7103232323232324), (0.1, 8, 1.0964865837015434, 0.47784175084175085),
    (0.5, 4, 1.862705031261967, 0.2226936026936027), (0.5, 8, 3.8838416017976125, 0.10256902356902357),
])
def test_the_spread_of_staleness_with_gamma_times(run, cv, workers, spread, share):
    rows = run(workers=workers, strategy="async", compute_time=gd.Gamma(1.0, cv), updates=60_000).applied
    late = rows["staleness"][1000:]
    assert late.std() == pytest.approx(spread, abs=0.02)
    assert (late == workers - 1).mean() == pytest.approx(share, abs=0.02)


# ---- delayed descent: tau + 1 equal workers give every gradient a delay of exactly tau -----------------------------

def delayed(run, delay, step, updates, **fields):
    """Return x[0], x[1], ... of x[t+1] = x[t] - step * x[t - delay] with x = 1 before."""
    trace = run(workers=delay + 1, strategy=fields.pop("strategy", "async"), optimizer=gd.SGD(lr=step),
                precision=fields.pop("precision", "fp64"), updates=updates, **fields)
    return trace.path[:, 0]


def threshold(delay):
    """Largest stable step: 2 sin(pi / (2 (2 tau + 1))) (Levin & May 1976)."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


@pytest.mark.parametrize(("delay", "below", "above"), [
    (0, 0.96, 1.04), (3, 0.995862698039588, 1.0040750951203579), (7, 0.998081795572798, 1.001885410847327),
    (15, 0.9990728848828568, 1.0009103905421677),
])
def test_descent_with_a_delay_turns_unstable_at_the_threshold(run, delay, below, above):
    updates = 3000
    for factor, rate in ((0.98, below), (1.02, above)):
        x = np.abs(delayed(run, delay, factor * threshold(delay), updates))
        period = 2 * (2 * delay + 1)
        early, late = x[500:500 + 4 * period].max(), x[-4 * period:].max()
        if rate < 1:
            assert late < early and x[-1] < 1
        if np.isfinite(late) and early > 1e-290 and late > 1e-290:
            measured = (late / early) ** (1 / (updates + 1 - 500 - 4 * period))
            assert measured == pytest.approx(rate, abs=1e-4)
        else:
            assert (rate < 1) == (late < 1)


@pytest.mark.parametrize("format", ["fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"])
def test_at_the_threshold_of_one_delay_the_orbit_is_periodic_in_every_format(run, format):
    x = delayed(run, 1, 1.0, 12, precision=format)
    assert x.tolist() == [1, 0, -1, -1, 0, 1, 1, 0, -1, -1, 0, 1, 1]


@pytest.mark.parametrize(("delay", "period"), [(tau, 2 * (2 * tau + 1)) for tau in range(9)])
def test_at_the_threshold_it_oscillates_with_twice_twice_the_delay_plus_one(run, delay, period):
    x = delayed(run, delay, threshold(delay), 30 * period)[10 * period:]
    crossings = np.flatnonzero((x[:-1] > 0) != (x[1:] > 0))
    measured = 2 * (crossings[-1] - crossings[0]) / (len(crossings) - 1)
    assert measured == pytest.approx(period, rel=0.02)


@pytest.mark.parametrize(("delay", "steps"), [(0, 1), (1, 25), (2, 43), (4, 78), (8, 148)])
def test_the_best_step_under_a_delay_needs_so_many_steps(run, delay, steps):
    # Fastest without overshoot: tau^tau / (tau + 1)^(tau + 1).
    best = delay**delay / (delay + 1) ** (delay + 1)
    x = np.abs(np.r_[np.ones(delay), delayed(run, delay, best, 200)])
    settled = next(n for n in range(201) if x[n:n + delay + 1].max() <= 1e-6)
    assert abs(settled - steps) <= 1


@pytest.mark.parametrize("delay", [1, 2, 3, 5])
def test_just_above_the_best_step_it_overshoots(run, delay):
    best = delay**delay / (delay + 1) ** (delay + 1)
    assert (delayed(run, delay, 0.99 * best, 1000) > 0).all()
    assert (delayed(run, delay, 1.05 * best, 1000) < 0).any()


def test_the_largest_eigenvalue_sets_the_largest_step_under_a_delay(run):
    problem = gd.Quadratic(eigenvalues=(0.1, 1.0, 10.0), start=(1.0, 1.0, 1.0))
    for factor, stable in ((0.98, True), (1.02, False)):
        trace = run(problem=problem, workers=6, strategy="async", precision="fp64", updates=3000,
                    optimizer=gd.SGD(lr=factor * 0.02846296765465703))
        ends = np.abs(trace.path[-100:]).max(axis=0)
        assert (ends[2] < 1e-3) == stable
        assert ends[1] < 1e-3 and ends[0] < 1


@pytest.mark.parametrize(("delay", "limit"), [(1, 1.0), (2, 1.2360679774997896), (3, 1.3351256037378865),
                                              (8, 1.4762937514128318)])
def test_a_step_divided_by_the_staleness_is_stable_up_to_its_own_limit(run, delay, limit):
    # Zhang et al. 2015: lr / tau, and lr itself where tau is 0.
    for factor, stable in ((0.97, True), (1.03, False)):
        x = delayed(run, delay, factor * limit, 1500, strategy=gd.Async(correction="inverse"))
        assert (np.abs(x[-100:]).max() < np.abs(x[500:600]).max()) == stable


def test_without_a_delay_the_optimal_step_contracts_both_ends_equally(run):
    trace = run(problem=gd.Quadratic(eigenvalues=(1.0, 100.0), start=(1.0, 1.0)), workers=1, precision="fp64",
                optimizer=gd.SGD(lr=0.019801980198019802), updates=100)
    ratios = np.abs(trace.path[1:] / trace.path[:-1])
    assert ratios == pytest.approx(np.full_like(ratios, 0.9801980198019802), rel=1e-9)


def test_without_a_delay_the_optimal_momentum_contracts_by_its_square_root(run):
    # Polyak 1964 for eigenvalues 1 and 100: both roots coincide, so the error goes as n rho^n.
    trace = run(problem=gd.Quadratic(eigenvalues=(1.0, 100.0), start=(1.0, 1.0)), workers=1, precision="fp64",
                optimizer=gd.SGD(lr=0.03305785123966942, momentum=0.6694214876033059), updates=400)
    error = np.abs(trace.path[[200, 400]]) / np.array([[200], [400]])
    assert (error[1] / error[0]) ** (1 / 200) == pytest.approx([0.8181818181818182] * 2, rel=1e-3)


MEAN_OF_MEMORYLESS = [
    1.0, 0.8, 0.61, 0.437, 0.2854, 0.15743, 0.053581, -0.0269848, -0.08605991, -0.126063247, -0.1497625874,
    -0.16004896333, -0.159761297111, -0.1515574825912, -0.13782674757179, -0.120637358928643, -0.1017134494998506,
    -0.08243484495326377, -0.06385414929566045, -0.046725920087674955, -0.031543452177302075, -0.018579428635657314,
    -0.007927439547640877, 0.0004579242457534948, 0.006724050878511599,
]
DEVIATION_OF_MEMORYLESS = [
    0.0, 0.0, 0.017319353221180025, 0.034798408929145014, 0.05172614765598444, 0.06573239105463231, 0.076260942809375,
    0.08255352965391595, 0.08533570289023171, 0.08479907991204946, 0.08232740611481301, 0.07876865360542405,
    0.07429867814654864, 0.07007341022241817, 0.06629130722629799, 0.06300403278912264, 0.060224192163956004,
    0.057730401275460835, 0.05533777111588945, 0.05281230317982309, 0.0500489406621762, 0.04698445468509019,
    0.04364802840050027, 0.0402105302383123, 0.036756954374517876,
]


def test_memoryless_workers_descend_on_average_as_if_by_momentum(run):
    # Mitliagkas et al. 2016: E x[t+1] = E x[t] + (1 - 1/N) (E x[t] - E x[t-1]) - (lr/N) E x[t].
    seeds = 150
    paths = [run(workers=4, strategy="async", compute_time=gd.Exponential(1.0), optimizer=gd.SGD(lr=0.2),
                 precision="fp64", updates=24, seed=seed).path[:, 0] for seed in range(seeds)]
    off = np.abs(np.mean(paths, axis=0) - MEAN_OF_MEMORYLESS)
    assert np.all(off <= 4 * np.array(DEVIATION_OF_MEMORYLESS) / math.sqrt(seeds) + 1e-12)
    assert np.std(paths, axis=0)[3:] == pytest.approx(np.array(DEVIATION_OF_MEMORYLESS)[3:], rel=0.3)


# ---- published -----------------------------------------------------------------------------------------------------

def test_workers_that_own_a_coordinate_each_never_feel_staleness(run):
    # Each coordinate sees only its owner, who is never late for itself: stable for lr < 2, whatever the delay.
    workers = 16
    owners = tuple(tuple(float(i == j) for j in range(workers)) for i in range(workers))
    problem = gd.Quadratic(eigenvalues=owners, start=(1.0,) * workers)
    trace = run(problem=problem, workers=workers, strategy="async", compute_time=gd.Exponential(1.0),
                optimizer=gd.SGD(lr=1.5), updates=300)
    done = np.zeros(workers, dtype=int)
    for version, worker in enumerate(trace.applied["worker"], start=1):
        done[worker] += 1
        assert trace.path[version].tolist() == [(-0.5) ** k for k in done.tolist()]


TRADE_OFF = {  # (lr, bound): median seconds to settle, 300 seeds
    (0.02, 0): 76.92727436633038, (0.02, 1): 51.11412952234076, (0.02, 2): 45.73914851138329,
    (0.02, 3): 43.33028248796324, (0.02, 5): 41.18018914544424, (0.02, 100): 39.36475185175104,
    (0.05, 0): 29.592401377185844, (0.05, 1): 16.507791744664726, (0.05, 2): 12.265236489614082,
    (0.05, 3): 11.825518626557544, (0.05, 5): 12.29453769966667, (0.05, 100): 12.260091126783177,
    (0.15, 0): 13.118268529549727, (0.15, 1): 18.256725262080998, (0.15, 2): 20.20288393473179,
    (0.15, 3): 20.964418882246804, (0.15, 5): 22.10059205984757, (0.15, 100): 22.284291226220425,
}


def settling_time(run, lr, bound, seeds, updates):
    """Return the median virtual seconds until |x| stays below 1e-3 for three rounds' worth of updates."""
    times = []
    for seed in range(seeds):
        trace = run(workers=8, strategy=gd.Async(staleness_bound=bound), compute_time=gd.Gamma(1.0, 0.5),
                    optimizer=gd.SGD(lr=lr), precision="fp64", updates=updates, seed=seed)
        close = np.abs(trace.path[1:, 0]) < 1e-3
        stays = np.convolve(close, np.ones(24), "valid") == 24
        assert stays.any(), "raise the number of updates"
        times.append(trace.path_seconds[1:][np.argmax(stays) + 23])
    return statistics.median(times)


@pytest.mark.parametrize(("lr", "bounds"), [(0.05, (0, 3)), (0.15, (0, 3))])
def test_the_best_bound_depends_on_the_step(run, lr, bounds):
    found = {bound: settling_time(run, lr, bound, seeds=20, updates=240 if lr == 0.05 else 480) for bound in bounds}
    for bound, seconds in found.items():
        assert seconds == pytest.approx(TRADE_OFF[lr, bound], rel=0.2)
    assert min(found, key=found.get) == (3 if lr == 0.05 else 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_sweet_spot_of_bounded_staleness_exists_only_in_a_band_of_steps(run):
    # Rule A, N = 8, each gradient applied at once; the shape is that of Ho et al. 2013, figure 2.
    found = {}
    updates = {0.02: 500, 0.05: 300, 0.15: 900}
    for lr, bound in TRADE_OFF:
        found[lr, bound] = settling_time(run, lr, bound, 80, updates[lr])
        assert found[lr, bound] == pytest.approx(TRADE_OFF[lr, bound], rel=0.1)
    small = [found[0.02, bound] for bound in (0, 1, 2, 3, 5, 100)]
    assert small == sorted(small, reverse=True)
    best = min((0, 1, 2, 3, 5, 100), key=lambda bound: found[0.05, bound])
    assert best in (2, 3, 5)
    assert found[0.05, 1] > 1.2 * found[0.05, best] and found[0.05, 0] > 2 * found[0.05, best]
    assert min((0, 1, 2, 3, 5, 100), key=lambda bound: found[0.15, bound]) == 0
