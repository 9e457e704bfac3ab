"""Who owns which samples, and which of them a step uses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.descent.data import Batches, Samples, data_order, digits, shard_sizes


def _indices(batch: slice | torch.Tensor) -> list[int]:
    return list(range(batch.start, batch.stop)) if isinstance(batch, slice) else batch.tolist()


def test_the_shipped_digits_are_scikit_learns() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    from importlib.resources import files

    known = datasets.load_digits()
    with files("gdlab").joinpath("data/digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as ours:
        assert ours["images"].dtype == ours["labels"].dtype == np.uint8
        np.testing.assert_array_equal(ours["images"], known.images)
        np.testing.assert_array_equal(ours["labels"], known.target)


def test_the_digits_are_standardised() -> None:
    images, labels = digits()
    assert images.shape == (1797, 64) and labels.shape == (1797,)
    torch.testing.assert_close(images.mean(0), torch.zeros(64, dtype=torch.float64), rtol=0, atol=1e-12)
    assert images.std(correction=0).item() == pytest.approx(1.0, abs=1e-12)


@given(st.integers(1, 5000), st.integers(1, 60))
def test_equal_shards_cover_the_data_and_differ_by_one_at_most(total: int, workers: int) -> None:
    if total < workers:
        with pytest.raises(gd.ExperimentError, match="would have no data"):
            shard_sizes(total, workers)
        return
    sizes = shard_sizes(total, workers)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


def test_shards_follow_their_shares() -> None:
    assert shard_sizes(10, 4, (0.7, 0.1, 0.1, 0.1)) == (7, 1, 1, 1)
    assert shard_sizes(4, 2, (0.75, 0.25)) == (3, 1)
    assert shard_sizes(11, 2, (0.5, 0.5)) == (6, 5)


def test_a_share_without_a_sample_is_an_error_that_names_the_worker() -> None:
    with pytest.raises(gd.ExperimentError, match="Worker 1 would have no data"):
        shard_sizes(10, 2, (0.99, 0.01))


@given(st.integers(4, 60), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**40))
def test_every_epoch_of_a_worker_uses_each_of_its_samples_once(total: int, workers: int, size: int, seed: int) -> None:
    batches = Batches(gd.Experiment(workers=workers, batch_size=size, seed=seed), total)
    for worker, own in enumerate(batches.sizes):
        if size >= own:
            continue
        stream = [i for step in range(3 * own) for i in _indices(batches.of(worker, step))]
        start = sum(batches.sizes[:worker])
        for epoch in range(3 * size):
            assert sorted(stream[epoch * own:(epoch + 1) * own]) == list(range(start, start + own))


def test_a_batch_depends_on_the_step_alone_not_on_what_was_asked_before() -> None:
    exp = gd.Experiment(workers=2, batch_size=7)
    forward, backward = Batches(exp, 50), Batches(exp, 50)
    keys = [(worker, step) for step in range(20) for worker in range(2)]
    there = {key: _indices(forward.of(*key)) for key in keys}
    back = {key: _indices(backward.of(*key)) for key in reversed(keys)}
    assert there == back


def test_two_workers_and_two_epochs_have_permutations_of_their_own() -> None:
    batches = Batches(gd.Experiment(workers=2, batch_size=25), 100)
    first, second = (np.array(_indices(batches.of(0, step))) for step in (0, 2))
    other = np.array(_indices(batches.of(1, 0))) - 50
    assert not np.array_equal(first, second) and not np.array_equal(first, other)


@pytest.mark.parametrize("size", [None, 10, 99])
def test_a_batch_of_the_whole_shard_keeps_its_order(size: int | None) -> None:
    batches = Batches(gd.Experiment(workers=2, batch_size=size), 20)
    assert [_indices(batches.of(1, step)) for step in (0, 5)] == [list(range(10, 20))] * 2


def test_a_global_batch_is_shared_out() -> None:
    batches = Batches(gd.Experiment(workers=3, global_batch=10, batch_size=None), 90)
    assert [len(_indices(batches.of(worker, 3))) for worker in range(3)] == [4, 3, 3]


def test_the_data_order_is_a_permutation_by_seed_and_may_be_kept() -> None:
    assert sorted(data_order(3, 100).tolist()) == list(range(100))
    assert torch.equal(data_order(3, 100), data_order(3, 100))
    assert not torch.equal(data_order(3, 100), data_order(4, 100))
    assert data_order(3, 5, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_tensors_and_the_same_dataset_give_the_same_samples() -> None:
    x, y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    rows = [(x[i], y[i]) for i in range(6)]

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return rows[index]

    for data in ((x, y), torch.utils.data.TensorDataset(x, y), Rows()):
        samples = Samples(data, seed=1, shuffle=True)
        inputs, targets = samples.take(slice(1, 4), torch.float64)
        order = data_order(1, 6)[1:4]
        assert inputs.dtype == torch.float64 and torch.equal(inputs, x[order].double())
        assert targets.dtype == torch.int64 and torch.equal(targets, y[order])


@pytest.mark.parametrize(("data", "message"), [
    ((torch.ones(3), torch.ones(2)), "same number"),
    ((torch.ones(0), torch.ones(0)), "same number, at least one"),
    ([1, 2], "must be a tuple of tensors"),
    ({"x": 1}, "must be a tuple of tensors"),
    (None, "must be a tuple of tensors"),
])
def test_what_is_no_data_is_an_error(data: object, message: str) -> None:
    with pytest.raises(gd.ExperimentError, match=message):
        Samples(data, seed=0, shuffle=True)


@pytest.mark.parametrize(("size", "expected"), [(1, 1.0), (10, 1 / 11), (50, 1 / 99), (100, 0.0)])
def test_batch_means_vary_as_sampling_without_replacement_says(size: int, expected: float) -> None:
    # The finite population correction: Var / sigma^2 = (n - B) / (n - 1) / B, with n = 100.
    values = np.random.default_rng(0).normal(size=100)
    means = []
    for seed in range(4000 // (100 // size)):
        batches = Batches(gd.Experiment(workers=1, batch_size=size, seed=seed), 100)
        means += [values[_indices(batches.of(0, step))].mean() for step in range(100 // size)]
    # Means of one epoch depend on each other, which leaves their mean square around the true mean unbiased.
    got = np.mean((np.array(means) - values.mean()) ** 2) / values.var()
    assert got == pytest.approx(expected, rel=0.05, abs=1e-12)
