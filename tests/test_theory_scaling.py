"""Bytes, speed-up, the noise scale and the best counts, against numbers that were worked out elsewhere."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab import theory


def test_a_ring_sends_less_than_twice_the_data_however_many_ranks():
    # Patarasuk & Yuan 2009: 2 (p - 1) / p n, in 2 (p - 1) rounds.
    assert [theory.ring_bytes(24_000, p) for p in (1, 2, 3, 4, 8)] == [0, 24_000, 32_000, 36_000, 42_000]
    assert theory.ring_bytes(24_000, 10**9) == pytest.approx(48_000)
    for ranks, rounds in {2: 2, 3: 4, 4: 6, 8: 14}.items():  # of one latency each
        assert theory.allreduce_time(24_000, ranks, 1.0, 0.0) == rounds
        assert theory.allreduce_time(24_000, ranks, 0.0, 1.0) == theory.ring_bytes(24_000, ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_ring_s_bytes_are_those_that_a_ring_sends(ranks):
    # Reduce-scatter, then all-gather: in each round each rank passes one chunk on to its neighbour.
    data = np.random.default_rng(0).integers(0, 9, (ranks, ranks, 1000 // ranks)).astype("f8")
    sums, sent = data.copy(), np.zeros(ranks)
    for phase in (0, 1):
        for turn in range(ranks - 1):
            moving = [(rank, (rank - turn + phase) % ranks) for rank in range(ranks)]
            chunks = [sums[rank, chunk].copy() for rank, chunk in moving]
            for (rank, chunk), values in zip(moving, chunks, strict=True):
                target = (rank + 1) % ranks
                sums[target, chunk] = values if phase else sums[target, chunk] + values
                sent[rank] += values.nbytes
    assert np.array_equal(sums, np.broadcast_to(data.sum(axis=0), sums.shape))
    assert sent.tolist() == [theory.ring_bytes(data[0].nbytes, ranks)] * ranks


def test_local_steps_and_compression_send_less_but_not_as_much_less_as_they_say():
    # A million fp32 parameters on eight ranks.
    for period, nbytes in {1: 7_000_000.0, 10: 700_000.0, 500: 14_000.0}.items():
        assert theory.local_sgd_bytes(4e6, 8, period) == pytest.approx(nbytes, rel=1e-9)
    assert theory.topk_bytes(1_000_000, 8, 0.01) == pytest.approx(560_000, rel=1e-9)
    assert theory.sign_bytes(1_000_000, 8) == pytest.approx(875_000, rel=1e-9)
    assert theory.ring_bytes(4e6, 8) / theory.topk_bytes(1_000_000, 8, 0.01) == pytest.approx(12.5)
    # Values alone, two ranks: a hundredth of the data each.
    assert theory.ring_bytes(4e6, 2) / theory.topk_bytes(1_000_000, 2, 0.01, index_bytes=0) == pytest.approx(100)


def test_splitting_a_job_helps_over_a_ring_only_if_it_beats_twice_the_transfer():
    # d/dN: C > 2 n beta, no latency.
    for compute_s, best in ((0.01, 1), (0.017, 64)):
        assert theory.best_worker_count(gd.Constant(compute_s), 64, nbytes=1e8, seconds_per_byte=8e-11) == best


@given(st.floats(0.01, 10.0), st.floats(1e-4, 1e-2))
def test_latency_alone_makes_the_square_root_of_half_the_ratio_best(compute_s, latency_s):
    best = theory.best_worker_count(gd.Constant(compute_s), 300, latency_s=latency_s)
    ideal = min(300.0, max(1.0, math.sqrt(compute_s / (2 * latency_s))))
    assert math.floor(ideal) <= best <= math.ceil(ideal)


def test_where_every_worker_brings_a_batch_the_noise_scale_says_how_many_pay():
    # Steps 1 + B / N, H_N each (McCandlish et al. 2018): with no noise one is enough, with much the more the better.
    law = gd.Exponential(1.0)
    assert theory.best_worker_count(law, 50, noise_scale=0.0) == 1
    counts = [theory.best_worker_count(law, 50, noise_scale=scale) for scale in (1.0, 10.0, 50.0, 1e6)]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 50
    times = {n: (1 + 10.0 / n) * sum(1 / k for k in range(1, n + 1)) for n in range(1, 51)}
    assert counts[1] == min(times, key=times.get)


def test_the_best_number_of_backups_shrinks_as_a_run_becomes_limited_by_noise():
    # 100 workers, 1 + Exp(0.2) s, steps 1 + kappa / (N - b): Chen et al. 2016 with McCandlish et al. 2018.
    law = gd.ShiftedExponential(1.0, 0.2)
    for kappa, best in {10: 51, 100: 21, 1000: 13, 1e6: 12}.items():
        assert theory.best_backups(law, 100, kappa) == best
    assert theory.best_backups(law, 100) == 12
    assert theory.best_backups(gd.Spike(1.0, 5.0, 0.02), 100) == 7
    assert theory.best_backups(gd.Constant(1.0), 100) == 0


@given(st.integers(1, 1000), st.floats(0.0, 1.0))
def test_amdahl_is_bounded_by_the_serial_share_and_gustafson_agrees_with_him_on_the_same_run(workers, serial):
    fixed, scaled = theory.speedup(workers, serial), theory.speedup(workers, serial, "gustafson")
    assert 1.0 - 1e-12 <= fixed <= scaled + 1e-9 <= workers + 2e-9
    assert fixed * serial <= 1.0 + 1e-12
    # Gustafson's share is of the parallel run's time; Amdahl's, of the same work by one worker, is this one.
    assert theory.speedup(workers, serial / scaled) == pytest.approx(scaled)


def test_speedup_by_hand():
    assert theory.speedup(4, 0.25) == pytest.approx(1 / (0.25 + 0.75 / 4))
    assert theory.speedup(4, 0.25, "gustafson") == pytest.approx(3.25)


# Model: f = E|x - z|^2 / 2, z ~ N(target, diag(1, 2, 3)), at distance (1, 2, 2) from the target.
DISTANCE, VARIANCE = np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0])
MEAN_NORM2 = {1: 15.0, 2: 12.0, 10: 9.6}


def test_the_noise_scale_is_trace_over_squared_gradient_from_any_two_batch_sizes():
    for small, big in ((1, 2), (1, 10), (2, 10)):
        scale = theory.gradient_noise_scale(small, MEAN_NORM2[small], big, MEAN_NORM2[big])
        assert scale == pytest.approx(2 / 3, rel=1e-12)
    assert theory.gradient_noise_scale(1, 4.0, 2, 2.0) == math.inf  # all noise: halved by twice the batch


def test_the_noise_scale_of_sampled_gradients():
    rng, draws = np.random.default_rng(0), 40_000
    norms = {}
    for batch, expected in MEAN_NORM2.items():
        gradients = DISTANCE + rng.normal(size=(draws, 3)) * np.sqrt(VARIANCE / batch)
        norms[batch] = (gradients**2).sum(axis=1)
        assert norms[batch].mean() == pytest.approx(expected, rel=0.03)
    assert theory.gradient_noise_scale(1, norms[1], 10, norms[10]) == pytest.approx(2 / 3, rel=0.03)


def test_the_noise_scale_of_a_run_from_each_worker_s_norm_and_their_mean_s():
    # E|G|^2 of N workers' own gradients and of their mean: the quadratic's noise has tr(Sigma) = n sigma^2.
    from descending import Rounds

    problem = gd.Quadratic(eigenvalues=(1.0,) * 8, start=(0.5,) * 8, noise=1.0)
    rounds = Rounds(gd.Experiment(problem, workers=4, optimizer=gd.SGD(lr=0.0), updates=2000, precision="fp64"))
    own, mean = [], []
    for _ in range(2000):
        rounds.run(1)
        gradients = np.array([push.grad.numpy() for push in rounds.pushes])
        own.append((gradients**2).sum(axis=1).mean())
        mean.append((gradients.mean(axis=0) ** 2).sum())
    assert theory.gradient_noise_scale(1, own, 4, mean) == pytest.approx(8.0 / 2.0, rel=0.1)


@pytest.mark.parametrize(("call", "message"), [
    (lambda: theory.ring_bytes(1, 0), "workers = 0 cannot be: it must be a whole number of at least 1"),
    (lambda: theory.ring_bytes(-1, 2), "nbytes = -1 cannot be: it must be a finite number of at least 0"),
    (lambda: theory.local_sgd_bytes(1, 2, 0), "period = 0"),
    (lambda: theory.topk_bytes(10, 2, 0.0), "fraction = 0.0 cannot be: it must be a finite number above 0 and of at m"),
    (lambda: theory.sign_bytes(2.5, 2), "parameters = 2.5"),
    (lambda: theory.speedup(4, 1.5), "serial = 1.5"),
    (lambda: theory.speedup(4, 0.5, "moore"), "use amdahl or gustafson"),
    (lambda: theory.gradient_noise_scale(2, 1.0, 2, 1.0), "big_batch = 2 cannot be: .* above 2"),
    (lambda: theory.gradient_noise_scale(1, math.nan, 2, 1.0), "small_norm2 = nan"),
    (lambda: theory.best_worker_count(gd.Constant(1.0), 0), "most = 0"),
    (lambda: theory.best_worker_count(gd.Constant(1.0), 4, noise_scale=-1.0), "noise_scale = -1.0"),
    (lambda: theory.best_backups(gd.Constant(1.0), 4, math.nan), "noise_scale = nan"),
])
def test_what_cannot_be_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
