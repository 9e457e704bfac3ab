"""What a run records of a few of its steps: the exponents of gradients, the updates that were meant, what was lost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from descending import Rounds

import gdlab as gd
from gdlab.backends.virtual import simulate
from gdlab.descent.problems import build
from gdlab.reading import read_exponents
from gdlab.records import EXPONENTS, LOWEST_EXPONENT, ExponentWriter, UpdateWriter, sampled
from gdlab.trace import PathWriter, Trace, write_run

OPTIMIZERS = [gd.SGD(0.1), gd.SGD(0.1, 0.9, 0.05), gd.AdamW(0.01, weight_decay=0.2)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Seen(list):
    """Watch every update of a store."""

    def __init__(self, size: int) -> None:
        self.index = np.arange(size)

    def due(self, version: int) -> bool:
        return True

    def append(self, version: int, weight: torch.Tensor, update: torch.Tensor, lost_fraction: float) -> None:
        super().append((version, weight.double().clone(), update.double().clone(), lost_fraction))


def watched(rounds: int, **fields: object) -> tuple[Rounds, Seen]:
    run = Rounds(gd.Experiment(**fields))
    run.store.watch = seen = Seen(run.problem.size)
    return run.run(rounds), seen


# ---- which ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("updates", [1, 2, 255, 256, 257, 1000, 4096, 1_000_000])
def test_about_256_steps_are_sampled_at_a_power_of_two_and_always_the_first(updates: int) -> None:
    kept = [number for number in range(min(updates, 10_000)) if sampled(number, updates)]
    gaps = set(np.diff(kept).tolist())
    assert kept[0] == 0 and len(kept) <= 256 and len(gaps) <= 1
    if updates > 256 and len(kept) > 1:
        (stride,) = gaps
        assert math.log2(stride).is_integer() and 128 < updates / stride <= 256


def test_without_a_number_of_updates_ever_fewer_are_sampled() -> None:
    kept = [number for number in range(20_000) if sampled(number, None)]
    assert kept[:257] == list(range(257))
    assert len(kept) < 256 + 129 * 7


# ---- exponents -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_exponents_are_the_floor_of_the_binary_logarithm(make: object, tmp_path: Path) -> None:
    writer = ExponentWriter(tmp_path, "rank1", 10)
    values = [0.0, -0.0, 1.0, -1.999, 0.5, 2.0, 3.0, 5e-324, 1.7e308, math.inf, -math.inf, math.nan]
    writer.append(1, 3, 8.0, make(values) if make is np.array else make(values, dtype=torch.float64), 2)
    writer.append(0, 0, 1.0, make([1.0]))
    writer.close()
    first, row = read_exponents(tmp_path)
    assert (first["worker"], first["step"], first["underflow"]) == (0, 0, -1)
    assert (row["worker"], row["step"], row["loss_scale"]) == (1, 3, 8.0)
    assert (row["zeros"], row["nonfinite"], row["underflow"]) == (2, 3, 2)
    found = {LOWEST_EXPONENT + at: int(row["counts"][at]) for at in np.flatnonzero(row["counts"])}
    assert found == {LOWEST_EXPONENT: 1, -1: 1, 0: 2, 1: 2, 130: 1}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "mixed_fp16", "fp8_e5m2"])
def test_every_value_of_a_gradient_is_counted_once(precision: str, tmp_path: Path) -> None:
    trace = simulate(gd.Experiment(gd.Digits("logistic"), updates=3, precision=precision), tmp_path)
    rows = trace.exponents
    assert rows.dtype == EXPONENTS and rows[["step", "worker"]].tolist() == [(s, w) for s in range(3) for w in range(4)]
    assert np.array_equal(rows["counts"].sum(1) + rows["zeros"] + rows["nonfinite"], [650] * 12)
    assert np.array_equal(rows["nonfinite"], trace.applied["nonfinite"])


def test_a_loss_scale_moves_the_exponents_by_its_own(tmp_path: Path) -> None:
    fields = {"problem": gd.Digits("mlp"), "workers": 1, "updates": 1}
    plain = simulate(gd.Experiment(**fields), tmp_path / "plain").exponents[0]
    scaled = gd.Precision(compute="fp32", loss_scale=2.0**10)
    scaled = simulate(gd.Experiment(precision=scaled, **fields), tmp_path / "scaled").exponents[0]
    assert scaled["loss_scale"] == 1024.0
    assert np.array_equal(scaled["counts"][10:], plain["counts"][:-10])


def test_the_gradient_is_recorded_as_the_backward_pass_gave_it(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((4.0, 0.0), (0.5, 1.0)), workers=1, updates=1, clip=0.01,
                        precision=gd.Precision("fp16", loss_scale=8.0))
    row = simulate(exp, tmp_path).exponents[0]
    assert np.flatnonzero(row["counts"]).tolist() == [4 - LOWEST_EXPONENT] and row["zeros"] == 1  # 4 * 0.5 * 8


def test_of_very_many_workers_only_some_are_recorded(tmp_path: Path) -> None:
    rows = simulate(gd.Experiment(gd.Quadratic(), workers=100, updates=2), tmp_path).exponents
    assert set(rows["worker"]) == set(range(16))


def test_one_row_is_kept_of_a_round_of_local_steps(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((1.0,), (1.0,)), workers=1, strategy=gd.LocalSGD(3), updates=2,
                        optimizer=gd.SGD(0.5))
    rows = simulate(exp, tmp_path).exponents
    # The last of three steps: gradients 1, 1/2, 1/4, then 1/8, 1/16, 1/32.
    assert [np.flatnonzero(counts).item() + LOWEST_EXPONENT for counts in rows["counts"]] == [-2, -5]


# ---- updates ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("fields", [{}, {"precision": "fp64"}, {"strategy": gd.Async(), "workers": 1}],
                         ids=["fp32", "fp64", "Async"])
def test_the_intended_update_is_what_the_optimizer_adds(optimizer: object, fields: dict) -> None:
    run, seen = watched(6, problem=gd.Digits("logistic"), optimizer=optimizer, **fields)
    eps = 1e-15 if fields.get("precision") == "fp64" else 1e-7
    for (version, weight, update, _), before, after in zip(seen, run.path, run.path[1:], strict=False):
        assert torch.equal(weight, before.double())
        change = after.double() - before.double()
        assert torch.allclose(update, change, rtol=1e-4 if eps > 1e-10 else 1e-10, atol=4 * eps), version
    assert [version for version, *_ in seen] == list(range(6))


@pytest.mark.parametrize("how", [{}, {"rounding": "stochastic"}, {"compensated": True}], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_the_intended_update_does_not_depend_on_how_weights_are_rounded(optimizer: object, how: dict) -> None:
    fields = {"problem": gd.Quadratic((1.0, 2.0), (1.25, -0.5)), "workers": 1, "optimizer": optimizer}
    _, exact = watched(1, precision="fp64", **fields)
    _, seen = watched(1, precision=gd.Precision(weights="bf16", **how), **fields)
    assert torch.allclose(seen[0][2], exact[0][2], rtol=1e-6, atol=0)


def test_watching_changes_no_bit() -> None:
    for optimizer in OPTIMIZERS:
        fields = {"problem": gd.Digits("logistic"), "optimizer": optimizer, "precision": "mixed_fp16"}
        run, _ = watched(4, **fields)
        plain = Rounds(gd.Experiment(**fields)).run(4)
        assert torch.equal(torch.stack(run.path), torch.stack(plain.path))


def test_an_update_is_lost_where_the_weight_stays(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((1.0, 1.0), (2.0, 2.0), centers=((1.0, 1.99),)), workers=1, precision="bf16",
                        updates=40)
    trace = simulate(exp, tmp_path)
    rows = trace.updates
    assert rows["version"].tolist() == list(range(40)) and rows["index"][0].tolist() == [0, 1]
    assert np.array_equal(rows["weight"], trace.path[:-1])
    stays = trace.path[1:] == trace.path[:-1]
    wanted = rows["update"] != 0
    share = (stays & wanted).sum(1) / np.maximum(wanted.sum(1), 1)
    np.testing.assert_allclose(rows["lost_fraction"], share)
    assert np.array_equal(rows["lost_fraction"], trace.applied["lost_fraction"])
    # Each lost update is at most half the spacing that it would have to cross.
    gap = gd.formats.ulp(rows["weight"], "bf16")
    assert (np.abs(rows["update"]) <= gap / 2)[stays & wanted].all() and rows["lost_fraction"][-1] == 1.0


def test_at_most_128_coordinates_are_kept_evenly_spaced(tmp_path: Path) -> None:
    rows = simulate(gd.Experiment(gd.Digits("mlp"), updates=2), tmp_path).updates
    index = rows["index"][0]
    assert len(index) == 128 and index[0] == 0 and index[-1] < 2410 and set(np.diff(index)) <= {18, 19}


def test_under_local_sgd_the_update_is_the_averaged_change(tmp_path: Path) -> None:
    trace = simulate(gd.Experiment(gd.Quadratic(), strategy=gd.LocalSGD(4), updates=3, optimizer=gd.SGD(0.05)),
                     tmp_path)
    np.testing.assert_allclose(trace.updates["update"], np.diff(trace.path, axis=0), rtol=1e-5)


def test_a_skipped_step_has_no_update(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((1e4,), (100.0,)), workers=1, precision="mixed_fp16", updates=2)
    rows = simulate(exp, tmp_path).updates
    assert rows["update"].tolist() == [[0.0], [0.0]] and np.isnan(rows["lost_fraction"]).all()


def test_a_trace_without_samples_has_none(tmp_path: Path) -> None:
    write_run(tmp_path, {"experiment": gd.Experiment().model_dump(mode="json")})
    assert len(Trace(tmp_path).exponents) == 0 and len(Trace(tmp_path).updates) == 0
    PathWriter(tmp_path, 2, "<f4", 1).close()
    writer = UpdateWriter(tmp_path, 2, 1)
    writer.append(0, [1.0, 2.0], [0.1, 0.2], 0.5)
    writer.close()
    (row,) = Trace(tmp_path).updates
    assert (row["weight"].tolist(), row["update"].tolist(), row["lost_fraction"]) == ([1.0, 2.0], [0.1, 0.2], 0.5)


# ---- underflow -------------------------------------------------------------------------------------------------------

TINY = gd.Quadratic((2.0**-20, 2.0**-20, 1.0, 0.0), (2.0**-6,) * 4)  # gradients 2^-26: half of fp16's threshold


@pytest.mark.parametrize(("precision", "lost"), [
    ("fp32", -1), ("fp64", -1), ("fp16", 2), (gd.Precision("fp16", loss_scale=2.0**12), 0), ("mixed_fp16", 0),
    (gd.Precision("fp16", "fp16", "fp16", loss_scale=2.0**12), 2), (gd.Precision(reduce="fp16"), 2), ("bf16", 0)],
    ids=str)
def test_values_that_a_format_takes_to_zero_are_told_from_true_zeros(precision: object, lost: int) -> None:
    # A loss scale lifts them over the backward pass; where they are unscaled into fp16 again, they are lost there.
    run = Rounds(gd.Experiment(TINY, workers=1, precision=precision))
    worker = run.workers[0]
    worker.watch = lambda step: True
    _, underflow = worker.sample(worker.gradient(run.store.read(0), 0))
    assert underflow == lost


def test_looking_for_underflow_changes_no_bit_of_the_next_gradient() -> None:
    exp = gd.Experiment(gd.Quadratic((1.0, 2.0), (1.0, 1.0), noise=0.5), workers=1, precision="fp16")
    run, problem = Rounds(exp), build(exp)
    worker = run.workers[0]
    worker.watch = lambda step: True
    for step in range(5):
        push = worker.gradient(run.store.read(0), step)
        worker.sample(push)
        assert push.grad.tolist() == problem.gradient(run.store.params, 0, step)[1].tolist()
