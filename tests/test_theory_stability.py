"""Limits of delayed descent and floors of noisy descent: against published numbers, simulation and linear algebra."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab import theory
from gdlab.backends.virtual import simulate

LIMITS = [  # Levin & May 1976: delays 0 to 16, curvature 1
    2.0, 1.0, 0.6180339887498948, 0.4450418679126288, 0.34729635533386066, 0.2846296765465703, 0.2410733605106461,
    0.20905692653530691, 0.18453671892660398, 0.16515869094466465, 0.1494601871728485, 0.13648482672934195,
    0.12558103905862675, 0.11628965782095166, 0.10827781717083505, 0.10129833767742542, 0.09516383164748458,
]
STEPS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
RADII = {  # the characteristic polynomial's largest root for those steps
    0: (0.99, 0.95, 0.9, 0.8, 0.5, 0.0),
    1: (0.9898979485566357, 0.947213595499958, 0.8872983346207417, 0.7236067977499789, 0.7071067811865474, 1.0),
    2: (0.9897926849309815, 0.9438772464712465, 0.8669513175959778, 0.7248951765202788, 0.9405563125721483,
        1.1509639252577575),
    4: (0.989571764762019, 0.9344136823501246, 0.8243917649730839, 0.9168531340484214, 1.060127946024701,
        1.1873801922005693),
    8: (0.9890820407197747, 0.8990347772349165, 0.9505663212059535, 1.0067823364440183, 1.0891148122457361,
        1.1580869042861377),
    16: (0.9878371858524084, 0.9729964051316184, 1.0021433847393353, 1.0331022620072954, 1.0769607051556067,
         1.1124468924182773),
}


def test_the_largest_stable_rate_falls_with_the_delay():
    assert [theory.max_stable_lr(1.0, delay) for delay in range(17)] == pytest.approx(LIMITS, abs=1e-12)


def test_the_largest_curvature_sets_the_largest_rate():
    assert theory.max_stable_lr((0.1, 1.0, 10.0), 5) == pytest.approx(0.02846296765465703, rel=1e-9)


@pytest.mark.parametrize("delay", RADII)
def test_the_error_shrinks_by_the_largest_root_of_the_characteristic_polynomial(delay):
    assert [theory.spectral_radius(step, 1.0, delay) for step in STEPS] == pytest.approx(RADII[delay], abs=1e-9)


@pytest.mark.parametrize(("delay", "below", "above"), [
    (0, 0.96, 1.04), (3, 0.995862698039588, 1.0040750951203579), (7, 0.998081795572798, 1.001885410847327),
    (15, 0.9990728848828568, 1.0009103905421677),
])
def test_two_percent_either_side_of_the_limit_the_error_shrinks_or_grows(delay, below, above):
    limit = theory.max_stable_lr(1.0, delay)
    assert theory.spectral_radius(0.98 * limit, 1.0, delay) == pytest.approx(below, rel=1e-9)
    assert theory.spectral_radius(1.02 * limit, 1.0, delay) == pytest.approx(above, rel=1e-9)


def test_a_rate_divided_by_the_delay_has_limits_that_tend_to_half_pi():
    # Zhang et al. 2015 divide by tau; tau + 1 is safe up to pi / 2 for every delay, tau only up to 1.
    by_tau = {1: 1.0, 2: 1.2360679774997896, 3: 1.3351256037378865, 4: 1.3891854213354426, 8: 1.4762937514128318,
              16: 1.5226213063597533, 64: 1.5585810946556842}
    by_next = {0: 2.0, 1: 2.0, 2: 1.8541019662496843, 3: 1.7801674716505151, 4: 1.7364817766693033,
               8: 1.6608304703394359, 16: 1.6177851380072379, 64: 1.5829339242596792}
    for delay, limit in by_tau.items():
        assert delay * theory.max_stable_lr(1.0, delay) == pytest.approx(limit, rel=1e-9)
    for delay, limit in by_next.items():
        assert (delay + 1) * theory.max_stable_lr(1.0, delay) == pytest.approx(limit, rel=1e-9)
    assert min(by_tau.values()) == 1.0
    assert min(by_next.values()) > math.pi / 2 > by_tau[64]


@given(st.integers(0, 12), st.floats(0.0, 0.99), st.floats(0.01, 100.0))
def test_at_the_limit_a_root_lies_on_the_unit_circle_and_below_it_all_lie_inside(delay, momentum, curvature):
    limit = theory.max_stable_lr(curvature, delay, momentum)
    assert theory.spectral_radius(limit, curvature, delay, momentum) == pytest.approx(1.0, abs=1e-6)
    for share in (0.05, 0.5, 0.99):
        assert theory.spectral_radius(share * limit, curvature, delay, momentum) < 1.0
    assert theory.spectral_radius(1.01 * limit, curvature, delay, momentum) > 1.0


def test_momentum_helps_stability_only_where_there_is_no_delay():
    for momentum in (0.1, 0.5, 0.9):
        assert theory.max_stable_lr(1.0, 0, momentum) == pytest.approx(2 * (1 + momentum))
        for delay in (1, 2, 7):
            assert theory.max_stable_lr(1.0, delay, momentum) < theory.max_stable_lr(1.0, delay)


@pytest.mark.parametrize("delay", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("curvature", [2.0, (1.0, 10.0), (0.3, 1.0, 3.0)])
def test_no_rate_converges_faster_than_the_best_one(delay, curvature):
    best = theory.best_lr(curvature, delay)
    rates = np.linspace(0.02, 1.0, 150) * theory.max_stable_lr(curvature, delay)
    radii = [theory.spectral_radius(rate, curvature, delay) for rate in rates]
    assert theory.spectral_radius(best, curvature, delay) <= min(radii) + 1e-6
    if curvature == 2.0:
        assert best == pytest.approx(delay**delay / (delay + 1) ** (delay + 1) / 2.0)
        assert theory.spectral_radius(best, curvature, delay) == pytest.approx(delay / (delay + 1), abs=1e-2)


def test_polyak_s_rates_for_curvatures_of_1_and_100():
    best = theory.best_lr((1.0, 100.0), 0)
    assert best == pytest.approx(0.019801980198019802, rel=1e-6)
    assert theory.spectral_radius(best, (1.0, 100.0), 0) == pytest.approx(0.9801980198019802, rel=1e-6)
    with_momentum = theory.spectral_radius(0.03305785123966942, (1.0, 100.0), 0, 0.6694214876033059)
    assert with_momentum == pytest.approx(0.8181818181818182, rel=1e-6)


def test_with_random_delays_the_variance_diverges_before_the_mean():
    # Delays 0 to D with equal probability: the spectral radius of E[A kron A] is 1.
    limits = {1: 1.2360679774997902, 2: 0.952370661931618, 3: 0.7833230724615227, 4: 0.6683222356866413,
              7: 0.4682733662124301}
    for largest, limit in limits.items():
        shares = [1.0] * (largest + 1)
        assert theory.max_stable_lr_random(1.0, shares) == pytest.approx(limit, rel=1e-6)
        mean = np.eye(largest + 1, k=-1)
        mean[0] -= limit / (largest + 1)
        mean[0, 0] += 1.0
        assert np.abs(np.linalg.eigvals(mean)).max() < 1.0
    assert theory.max_stable_lr_random((1.0, 4.0), [1.0]) == pytest.approx(0.5)


@pytest.mark.parametrize("delay", [1, 3, 6])
def test_a_random_delay_that_is_always_the_same_is_a_fixed_one(delay):
    shares = [0.0] * delay + [1.0, 0.0]
    assert theory.max_stable_lr_random(2.0, shares) == pytest.approx(theory.max_stable_lr(2.0, delay), rel=1e-5)


def moments(step: float, workers: int) -> np.ndarray:
    """Return the map of E[x x], E[x y], E[y y], E[y z] by one update of memoryless workers; y, z: what two read."""
    q = 1 / workers
    first = np.array([1.0, -2 * step, step * step, 0.0])
    x_with_other = np.array([0.0, 1.0, 0.0, -step])
    return np.array([first, q * first + (1 - q) * x_with_other,
                     q * first + (1 - q) * np.array([0.0, 0.0, 1.0, 0.0]),
                     2 * q * x_with_other + (1 - 2 * q) * np.array([0.0, 0.0, 0.0, 1.0])])


@pytest.mark.parametrize("workers", [2, 3, 4, 8, 64])
def test_with_memoryless_workers_the_second_moments_diverge_from_the_limit_on(workers):
    limit = theory.max_stable_lr_memoryless(1.0, workers)
    for factor, stable in ((0.05, True), (0.5, True), (0.99, True), (1.01, False)):
        assert (np.abs(np.linalg.eigvals(moments(factor * limit, workers))).max() < 1.0) == stable
    assert np.abs(np.linalg.eigvals(moments(limit, workers))).max() == pytest.approx(1.0)
    assert limit < 2 * (2 * workers - 1)  # up to which the mean converges
    assert theory.max_stable_lr_memoryless((0.5, 4.0), workers) == pytest.approx(limit / 4.0)
    assert theory.max_stable_lr_memoryless(1.0, 1) == 2.0


MEAN = [1.0, 0.8, 0.61, 0.437, 0.2854, 0.15743, 0.053581, -0.0269848, -0.08605991, -0.126063247, -0.1497625874,
        -0.16004896333, -0.159761297111, -0.1515574825912, -0.13782674757179, -0.120637358928643, -0.1017134494998506]


def test_the_mean_of_memoryless_workers_follows_descent_with_momentum():
    # Mitliagkas et al. 2016, N = 4, lr = 0.2; the runs themselves are in test_truth_stragglers.
    assert theory.implicit_momentum(4) == 0.75
    assert theory.memoryless_mean(0.2, 1.0, 4, 16) == pytest.approx(MEAN, abs=1e-12)
    assert theory.memoryless_mean(0.1, 3.0, 1, 3, start=2.0) == pytest.approx(2.0 * 0.7 ** np.arange(4))


# ---- where it settles ----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers", [2, 4, 9])
def test_the_floor_of_memoryless_workers_solves_their_moment_equations(workers):
    for share in (0.1, 0.6, 0.95):
        lr = share * theory.max_stable_lr_memoryless(2.0, workers)
        q, s2 = 1 / workers, (lr * 0.3) ** 2
        fixed = np.linalg.solve(np.eye(4) - moments(2.0 * lr, workers), s2 * np.array([1.0, q, q, 0.0]))
        assert theory.noise_floor(lr, 2.0, 0.3, workers, "async") == pytest.approx(fixed[0], rel=1e-9)


@pytest.mark.parametrize("strategy", ["sync", "async", "fixed_delay", gd.Sync(), gd.Async(), gd.LocalSGD()])
def test_one_worker_settles_alike_whatever_the_strategy(strategy):
    expected = 0.1 * 0.5**2 / (2.0 * (2 - 0.1 * 2.0))
    assert theory.noise_floor(0.1, 2.0, 0.5, 1, strategy) == pytest.approx(expected, rel=1e-12)


def test_the_floor_is_infinite_from_the_stability_limit_on():
    for strategy, limit in (("sync", 2.0), ("async", theory.max_stable_lr_memoryless(1.0, 4)),
                            ("fixed_delay", theory.max_stable_lr(1.0, 3))):
        assert math.isfinite(theory.noise_floor(0.999 * limit, 1.0, 1.0, 4, strategy))
        assert theory.noise_floor(limit * (1 + 1e-12), 1.0, 1.0, 4, strategy) == math.inf
        assert theory.noise_floor(0.001, 1.0, 0.0, 4, strategy) == 0.0


def test_a_small_rate_hides_the_delay_but_not_the_mean_over_workers():
    floors = {s: theory.noise_floor(1e-5, 1.0, 1.0, 4, s) for s in ("sync", "async", "fixed_delay")}
    assert floors["async"] == pytest.approx(floors["fixed_delay"], rel=1e-3)
    assert floors["async"] == pytest.approx(4 * floors["sync"], rel=1e-3)


SETTLED = [
    ({"strategy": gd.Sync()}, 0.4, "sync"),
    ({"strategy": gd.Sync(1, "server"), "compute_time": gd.Exponential(1.0)}, 0.4, gd.Sync(1, "server")),
    ({"strategy": gd.LocalSGD(3)}, 0.4, gd.LocalSGD(3)),
    ({"strategy": gd.Async(), "compute_time": gd.Exponential(1.0)}, 0.4, gd.Async()),
    ({"strategy": gd.Async(), "compute_time": gd.Constant(1.0)}, 0.3, "fixed_delay"),
    ({"strategy": gd.Sync(), "optimizer": gd.SGD(lr=0.2, momentum=0.5)}, 0.2, "sync"),
    ({"strategy": gd.Async(), "optimizer": gd.SGD(lr=0.1, momentum=0.4)}, 0.1, "fixed_delay"),
]


@pytest.mark.parametrize(("fields", "lr", "strategy"), SETTLED, ids=[str(case[0]["strategy"]) for case in SETTLED])
def test_runs_settle_at_the_floor(fields, lr, strategy, tmp_path):
    # Coordinates are independent copies: of each the mean square over time, of these the standard error.
    problem = gd.Quadratic(eigenvalues=(1.0,) * 64, start=(0.0,) * 64, noise=1.0)
    exp = gd.Experiment(**{"problem": problem, "optimizer": gd.SGD(lr=lr), "updates": 1200, "precision": "fp64",
                           "seed": 5} | fields)
    square = (simulate(exp, tmp_path / "run").path[100:] ** 2).mean(axis=0)
    expected = theory.noise_floor(lr, 1.0, 1.0, 4, strategy, exp.optimizer.momentum)
    assert abs(square.mean() - expected) < 4 * square.std() / math.sqrt(64)


@pytest.mark.parametrize("period", [1, 2, 5, 40])
def test_local_steps_settle_where_the_fixed_point_says(period, tmp_path):
    rows, centers = ((1.0, 0.5), (8.0, 0.5), (2.0, 3.0)), ((1.0, 0.0), (-1.0, 2.0), (0.0, 1.0))
    exp = gd.Experiment(gd.Quadratic(rows, (0.0, 0.0), centers=centers), workers=3, strategy=gd.LocalSGD(period),
                        optimizer=gd.SGD(lr=0.1), updates=400, precision="fp64")
    expected = theory.local_sgd_fixed_point(rows, centers, 0.1, period)
    assert simulate(exp, tmp_path / "run").path[-1] == pytest.approx(expected, abs=1e-9)


def test_local_steps_are_right_for_a_period_of_one_or_equal_curvatures():
    curvatures, centers = (1.0, 8.0, 2.0), (1.0, -1.0, 0.0)
    minimum = np.dot(curvatures, centers) / np.sum(curvatures)
    assert theory.local_sgd_fixed_point(curvatures, centers, 0.1, 1) == pytest.approx([minimum])
    assert abs(theory.local_sgd_fixed_point(curvatures, centers, 0.1, 10)[0] - minimum) > 0.1
    assert theory.local_sgd_fixed_point(2.0, centers, 0.1, 10) == pytest.approx([0.0], abs=1e-12)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: theory.max_stable_lr(0.0, 1), "curvature = 0.0 cannot be"),
    (lambda: theory.max_stable_lr((1.0, float("nan")), 1), "curvature = "),
    (lambda: theory.max_stable_lr(1.0, -1), "delay = -1 cannot be: it must be a whole number of at least 0"),
    (lambda: theory.max_stable_lr(1.0, 1.5), "whole number"),
    (lambda: theory.max_stable_lr(1.0, 1, 1.0), "momentum = 1.0 cannot be: .* of at least 0 and below 1"),
    (lambda: theory.spectral_radius(-0.1, 1.0, 1), "lr = -0.1 cannot be"),
    (lambda: theory.spectral_radius(0.1, 1.0, 5000), "at most 2,000"),
    (lambda: theory.max_stable_lr_random(1.0, []), "delay_shares"),
    (lambda: theory.max_stable_lr_random(1.0, [0.0, 0.0]), "delay_shares"),
    (lambda: theory.max_stable_lr_memoryless(1.0, True), "workers = True cannot be"),
    (lambda: theory.noise_floor(0.1, 1.0, 1.0, 4, "ring"), "use one of sync, async, fixed_delay"),
    (lambda: theory.noise_floor(0.1, 1.0, 1.0, 4, gd.Async(staleness_bound=2)), "no closed form"),
    (lambda: theory.noise_floor(0.1, 1.0, 1.0, 4, "async", 0.5), "no closed form"),
    (lambda: theory.noise_floor(0.1, 1.0, 1.0, 4, gd.LocalSGD(), 0.5), "no closed form"),
    (lambda: theory.noise_floor(0.0, 1.0, 1.0, 4, "sync"), "lr = 0.0 cannot be"),
    (lambda: theory.local_sgd_fixed_point((1.0, 2.0), (1.0, 2.0, 3.0), 0.1, 2), "one row a worker"),
    (lambda: theory.local_sgd_fixed_point((1.0, 2.0), (1.0, 2.0), 3.0, 2), "diverges"),
    (lambda: theory.local_sgd_fixed_point((1.0, -2.0), (1.0, 2.0), 0.1, 2), "above 0"),
    (lambda: theory.memoryless_mean(0.1, 1.0, 0, 3), "workers = 0"),
])
def test_what_cannot_be_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")
