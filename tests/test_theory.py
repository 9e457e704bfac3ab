"""Closed forms against numbers that were worked out elsewhere, and against each other."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdlab import laws, theory

# Latency and bandwidth model, 5 us and 80 ps per byte (Thakur, Rabenseifner & Gropp 2005, section 4).
ALLREDUCE_S = {
    (2, 1_000): (1.008e-05, 5.08e-06, 1.008e-05, 1.016e-05, 1.032e-05),
    (2, 1_000_000): (9e-05, 8.5e-05, 9e-05, 1.7e-04, 3.3e-04),
    (2, 400_000_000): (0.03201, 0.032005, 0.03201, 0.06401, 0.12801),
    (4, 1_000): (3.012e-05, 1.016e-05, 2.012e-05, 2.032e-05, 1.064e-05),
    (4, 1_000_000): (1.5e-04, 1.7e-04, 1.4e-04, 3.4e-04, 6.5e-04),
    (4, 400_000_000): (0.04803, 0.06401, 0.04802, 0.12802, 0.25601),
    (8, 1_000): (7.014e-05, 1.524e-05, 3.014e-05, 3.048e-05, 1.128e-05),
    (8, 1_000_000): (2.1e-04, 2.55e-04, 1.7e-04, 5.1e-04, 1.29e-03),
    (8, 400_000_000): (0.05607, 0.096015, 0.05603, 0.19203, 0.51201),
    (64, 1_000): (6.301575e-04, 3.048e-05, 6.01575e-05, 6.096e-05, 2.024e-05),
    (64, 1_000_000): (7.875e-04, 5.1e-04, 2.175e-04, 1.02e-03, 1.025e-02),
    (64, 400_000_000): (0.06363, 0.19203, 0.06306, 0.38406, 4.09601),
}


@pytest.mark.parametrize(("case", "expected"), ALLREDUCE_S.items())
def test_all_reduce_times_follow_the_latency_and_bandwidth_model(case, expected):
    workers, nbytes = case
    names = ("ring", "recursive_doubling", "rabenseifner", "binomial", "ps_1")
    times = [theory.allreduce_time(nbytes, workers, 5e-6, 8e-11, name) for name in names]
    assert times == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "rabenseifner", "binomial", "ps_1"])
def test_one_worker_needs_no_message(algorithm):
    assert theory.allreduce_time(10**9, 1, 1.0, 1.0, algorithm) == 0.0


def test_a_ring_helps_a_job_that_is_split_only_if_its_compute_time_beats_twice_the_transfer():
    compute_s, nbytes, per_byte = 0.01, 1e8, 8e-11
    two = compute_s / 2 + theory.allreduce_time(nbytes, 2, 0.0, per_byte)
    assert two == pytest.approx(0.013)
    assert compute_s < 2 * nbytes * per_byte


def test_all_reduce_errors_say_what_to_use():
    with pytest.raises(ValueError, match="use one of ring"):
        theory.allreduce_time(1, 2, 0, 0, "star")
    with pytest.raises(ValueError, match="at least one worker"):
        theory.allreduce_time(1, 0, 0, 0)


def test_exponential_steps_take_the_harmonic_number():
    harmonic = {1: 1.0, 2: 1.5, 4: 2.0833333333333335, 8: 2.717857142857143, 16: 3.3807289932289932,
                32: 4.05849519543652, 64: 4.743890903705769, 128: 5.433147092589173}
    for workers, value in harmonic.items():
        assert theory.expected_step_time(laws.Exponential(1.0), workers) == pytest.approx(value, rel=1e-9)


def test_an_update_of_sync_takes_as_long_as_p_times_h_p_updates_of_async():
    # P ln P, which is often quoted, is 54% too low at P = 2 and 11% at P = 128.
    for workers, ratio in {2: 3.0, 8: 21.742857142857144, 32: 129.87184625396864, 128: 695.4428278514141}.items():
        async_s = 1 / workers
        assert theory.expected_step_time(laws.Exponential(1.0), workers) / async_s == pytest.approx(ratio, rel=1e-9)


def test_splitting_a_job_over_memoryless_workers_speeds_it_up_by_n_over_h_n():
    for workers, speedup in {1: 1.0, 2: 4 / 3, 4: 1.92, 16: 4.732707067631032, 64: 13.49103537562496}.items():
        step_s = theory.expected_step_time(laws.Exponential(1.0 / workers), workers)
        assert 1 / step_s == pytest.approx(speedup, rel=1e-9)


def test_backup_workers_cut_the_largest_terms():
    # Chen et al. 2016 with exponential times: H_N - H_b.
    expected = {(8, 0): 2.717857142857143, (8, 1): 1.7178571428571427, (8, 2): 1.2178571428571427,
                (8, 4): 0.6345238095238095, (16, 0): 3.3807289932289932, (16, 1): 2.3807289932289932,
                (16, 2): 1.8807289932289932, (16, 4): 1.29739565989566, (100, 0): 5.187377517639621,
                (100, 1): 4.187377517639621, (100, 2): 3.68737751763962, (100, 4): 3.104044184306287}
    for (workers, backups), value in expected.items():
        assert theory.expected_step_time(laws.Exponential(1.0), workers, backups) == pytest.approx(value, rel=1e-9)


def test_gamma_steps_have_shape_one_over_variation_squared():
    # Ali et al. 2000: shape 1 / V^2.
    expected = {(0.1, 2): 1.0563484790092565, (0.1, 8): 1.1468716343314467, (0.1, 32): 1.2185939604766032,
                (0.1, 64): 1.2499558201972052, (0.5, 2): 1.2734374999999996, (0.5, 8): 1.807867088385795,
                (0.5, 32): 2.308914994152378, (0.5, 64): 2.547870765840491, (1.0, 2): 1.5, (1.0, 8): 2.717857142857143,
                (1.0, 32): 4.05849519543652, (1.0, 64): 4.743890903705769}
    for (cv, workers), value in expected.items():
        assert theory.expected_step_time(laws.Gamma(1.0, cv), workers) == pytest.approx(value, rel=1e-6)


def test_pareto_steps_grow_with_a_power_of_the_workers():
    expected = {(1.5, 1): 3.0, (1.5, 4): 6.942857142857148, (1.5, 16): 17.129132455193357,
                (1.5, 64): 42.937560180316716, (2.0, 1): 2.0, (2.0, 4): 3.6571428571428566,
                (2.0, 16): 7.1454124397570355, (2.0, 64): 14.207352179526627, (3.0, 1): 1.5,
                (3.0, 4): 2.2090909090909077, (3.0, 16): 3.435855195117814, (3.0, 64): 5.425875260216728}
    for (alpha, workers), value in expected.items():
        assert theory.expected_step_time(laws.Pareto(1.0, alpha), workers) == pytest.approx(value, rel=1e-8)
    assert theory.expected_step_time(laws.Pareto(1.0, 1.0), 4) == math.inf
    assert math.isfinite(theory.expected_step_time(laws.Pareto(1.0, 1.0), 4, backups=1))


def test_lognormal_and_uniform_steps():
    expected = {(0.25, 1): 1.0, (0.25, 4): 1.2734171269783623, (0.25, 16): 1.5214601612449192,
                (0.25, 64): 1.7527659529420605, (0.5, 1): 1.0, (0.5, 4): 1.573271371260295,
                (0.5, 16): 2.2178821715281494, (0.5, 64): 2.9257923696693475, (1.0, 1): 1.0,
                (1.0, 4): 2.2081257537710903, (1.0, 16): 4.169687823737105, (1.0, 64): 7.0730597558250965}
    for (sigma, workers), value in expected.items():
        assert theory.expected_step_time(laws.LogNormal(1.0, sigma), workers) == pytest.approx(value, rel=1e-6)
    for workers, value in {1: 1.0, 4: 1.3, 9: 1.4}.items():
        assert theory.expected_step_time(laws.Uniform(0.5, 1.5), workers) == pytest.approx(value, rel=1e-12)


def test_rare_hiccups_have_an_interior_best_number_of_backups():
    law = laws.Spike(1.0, 5.0, 0.02)
    throughput = {b: (100 - b) / theory.expected_step_time(law, 100, b) for b in range(13)}
    assert max(throughput, key=throughput.get) == 7
    expected = [22.373758312925364, 29.230156019539745, 42.73397102040393, 62.01436413960509, 79.7791592221378,
                89.45937287354813, 92.49708731627787, 92.6546058743188, 91.93037694158836, 90.98747400701902,
                89.99796749568432, 88.99970024814431, 87.99995956843702]
    for backups, value in enumerate(expected):
        assert throughput[backups] == pytest.approx(value, rel=1e-9)


def test_a_step_of_constant_or_shifted_time():
    assert theory.expected_step_time(laws.Constant(0.3), 17, 4) == 0.3
    law = laws.ShiftedExponential(1.0, 0.2)
    assert theory.expected_step_time(law, 100, 12) == pytest.approx(1 + 0.2 * sum(1 / k for k in range(13, 101)))


def test_mean_staleness_over_updates_is_the_number_of_others():
    rates = np.array([1.0, 1.0, 1.0, 0.25])
    each = theory.expected_staleness(rates)
    assert each == pytest.approx([2.25, 2.25, 2.25, 12.0])
    assert each @ rates / rates.sum() == pytest.approx(3.0)
    with pytest.raises(ValueError, match="above 0"):
        theory.expected_staleness([1.0, 0.0])


def test_bounded_staleness_lies_between_synchronous_and_asynchronous():
    # Exact chain values, rule A, Exp(1) workers.
    expected = {2: (4 / 3, 1.6, 12 / 7, 16 / 9),
                3: (1.6363636363636371, 2.1375, 2.3703003967504266, 2.5042768077705144),
                4: (1.92, 2.639916983742651, 2.9927627786094795, 3.200720141377406),
                8: (2.943495400788436, 4.4629543452004174, 5.299111579795327)}
    for workers, row in expected.items():
        for bound, value in enumerate(row):
            assert theory.ssp_throughput(workers, bound) == pytest.approx(value, rel=1e-9)
    for workers, value in {2: 1.8461538461538454, 3: 2.652307236171149, 4: 3.4345191193055804}.items():
        assert theory.ssp_throughput(workers, 5, rate=2.0) == pytest.approx(2 * value, rel=1e-9)
    assert theory.ssp_throughput(1, 3) == 1.0
    with pytest.raises(ValueError, match="too many states"):
        theory.ssp_throughput(100, 100)


def test_the_staleness_of_a_bound_grows_from_half_the_others_to_all_of_them():
    # Bound 0: in a round of N the k-th to push has k - 1 others' updates behind it.
    for workers in (1, 2, 5):
        assert theory.ssp_staleness(workers, 0) == pytest.approx((workers - 1) / 2)
    each = [theory.ssp_staleness(3, bound) for bound in (0, 1, 2, 4, 8, 16, 32)]
    assert each == sorted(each)
    assert 0 < 2 - each[-1] < 0.6 * (2 - each[-2])  # as 1 / bound


@given(st.lists(st.floats(0.2, 5.0), min_size=1, max_size=6))
def test_the_shares_of_staleness_sum_to_one_and_have_the_mean_of_renewal_theory(rates):
    shares = theory.staleness_shares(rates, 5_000)
    assert shares.sum() == pytest.approx(1.0)
    assert shares @ np.arange(5_000) == pytest.approx(len(rates) - 1, abs=1e-6)


def test_equal_memoryless_workers_have_a_geometric_staleness():
    assert theory.staleness_shares([2.0] * 4, 5) == pytest.approx(0.25 * 0.75 ** np.arange(5))


SPEEDS = (1.0, 1.0, 1.0, 0.25)


def test_a_round_of_unequal_workers_waits_for_the_largest_of_all_draws():
    assert theory.expected_step_time(laws.Constant(0.1), 4, speeds=SPEEDS) == pytest.approx(0.4)
    # Exponential: inclusion and exclusion over the rates.
    rates = np.array(SPEEDS)
    subsets = [np.array([bool(mask >> i & 1) for i in range(4)]) for mask in range(1, 16)]
    exact = sum((-1) ** (chosen.sum() + 1) / rates[chosen].sum() for chosen in subsets)
    assert theory.expected_step_time(laws.Exponential(1.0), 4, speeds=SPEEDS) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("law", [
    laws.Gamma(1.0, 0.5), laws.Gamma(1.0, 3.0), laws.LogNormal(1.0, 0.5), laws.LogNormal(1.0, 2.5),
    laws.Uniform(0.5, 1.5), laws.Uniform(1.0, 1.0), laws.Pareto(1.0, 1.3), laws.Pareto(1.0, 4.0),
    laws.ShiftedExponential(0.4, 0.1), laws.Spike(1.0, 5.0, 0.1), laws.Constant(0.3)], ids=str)
def test_speeds_that_hardly_differ_give_the_time_of_equal_ones_and_a_common_factor_goes_through(law):
    equal = theory.expected_step_time(law, 5)
    assert theory.expected_step_time(law, 5, speeds=(1, 1, 1, 1, 1 + 1e-9)) == pytest.approx(equal, rel=1e-6)
    assert theory.expected_step_time(law, 5, 2, speeds=(4,) * 5) == theory.expected_step_time(law, 5, 2) / 4
    unequal = theory.expected_step_time(law, 4, speeds=SPEEDS)
    assert theory.expected_step_time(law, 4, speeds=[1000 * s for s in SPEEDS]) == pytest.approx(unequal / 1000)


def test_speeds_that_cannot_be_are_refused():
    for speeds, message in (((1, 2), "2 speeds but 3 workers"), ((1, 0, 1), "above 0")):
        with pytest.raises(ValueError, match=message):
            theory.expected_step_time(laws.Constant(1.0), 3, speeds=speeds)
    with pytest.raises(ValueError, match="unequal speeds"):
        theory.expected_step_time(laws.Constant(1.0), 3, 1, speeds=(1, 2, 3))
    assert theory.expected_step_time(laws.Pareto(1.0, 1.0), 2, speeds=(1, 2)) == math.inf


def test_gradients_per_second_of_sync_and_async():
    # Renewal theorem: N / E[T] against N / E[slowest]; per gradient, not per update (Dutta et al. 2018).
    expected = {("Exponential", 4): 1.92, ("Exponential", 16): 4.732707067631042, ("Gamma", 4): 2.5900201428526537,
                ("Gamma", 16): 7.75728456276978, ("LogNormal", 4): 2.5424730107405016,
                ("LogNormal", 16): 7.214089280935873}
    for (name, workers), value in expected.items():
        law = {"Exponential": laws.Exponential(1.0), "Gamma": laws.Gamma(1.0, 0.5),
               "LogNormal": laws.LogNormal(1.0, 0.5)}[name]
        assert workers / theory.expected_step_time(law, workers) == pytest.approx(value, rel=1e-6)


def test_importing_theory_loads_neither_torch_nor_scipy_stats():
    code = "import sys, gdlab.theory; print({'torch', 'scipy.stats', 'pandas'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
