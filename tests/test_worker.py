"""One worker's step: casts, unscaling, counting, clipping, local rounds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from descending import Rounds, run, same_path

import gdlab as gd
from gdlab.backends.virtual import simulate
from gdlab.descent.problems import build
from gdlab.descent.store import Store
from gdlab.descent.worker import Read, Worker


def _push(step: int = 0, at: torch.Tensor | None = None, loss_scale: float = 1.0, **fields: object):
    exp = gd.Experiment(**{"workers": 1, **fields})
    problem = build(exp)
    read = Store(exp, problem).read(0)
    read = Read(read.params if at is None else at, 0, loss_scale)
    return Worker(exp, problem, 0).gradient(read, step)


def test_a_plain_push_is_the_problems_gradient() -> None:
    exp = gd.Experiment(workers=1)
    problem = build(exp)
    loss, gradient = problem.gradient(problem.initial(), 0, 4)
    push = _push(step=4)
    assert torch.equal(push.grad, gradient) and push.loss == loss
    assert push.grad_norm == pytest.approx(gradient.double().norm().item(), rel=1e-12)
    assert (push.step, push.clip_scale, push.nonfinite, push.loss_scale) == (4, 1.0, 0, 1.0)


@pytest.mark.parametrize(("precision", "dtype"), [
    ("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16),
    ("fp8_e4m3", torch.float32), ("fp8_e5m2", torch.float32), ("mixed_fp16", torch.float32),
    ("mixed_bf16", torch.float32),
])
@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
def test_every_precision_gives_a_finite_push_in_its_reduce_format(precision: str, dtype: torch.dtype, model: str
                                                                  ) -> None:
    push = _push(precision=precision, problem=gd.Digits(model))
    exact = _push(precision="fp64", problem=gd.Digits(model))
    assert push.grad.dtype == dtype and push.nonfinite == 0
    assert push.loss == pytest.approx(exact.loss, rel=0.2 if "fp8" in precision else 0.02)


def test_half_precision_computes_in_half_precision() -> None:
    # 2049 is no fp16 number: the parameter itself must have been cast. In mixed precision too, though weights are fp32.
    for precision in ("fp16", "mixed_fp16"):
        push = _push(precision=precision, problem=gd.Quadratic((1.0,), (2049.0,)))
        assert push.grad.item() == 2048.0
    assert _push(precision="mixed_bf16", problem=gd.Quadratic((1.0,), (257.0,))).grad.item() == 256.0


@pytest.mark.parametrize(("format", "expected"), [("fp8_e4m3", 1.0), ("fp8_e5m2", 1.0), ("Float(5, 4)", 1.0625)])
def test_narrow_formats_round_parameters_and_gradients(format: str, expected: float) -> None:
    precision = gd.Precision(compute=format, weights="fp32", reduce="fp32")
    assert _push(precision=precision, problem=gd.Quadratic((1.0,), (1.0625,))).grad.item() == expected


def test_a_loss_scale_saves_what_would_underflow() -> None:
    problem = gd.Quadratic(eigenvalues=(2.0**-14,), start=(2.0**-12,))  # gradient 2^-26: 0 in fp16
    precision = gd.Precision(compute="fp16", weights="fp32", reduce="fp32", loss_scale=1024.0)
    assert _push(precision=precision, problem=problem).grad.item() == 0.0
    assert _push(precision=precision, problem=problem, loss_scale=1024.0).grad.item() == 2.0**-26


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["logistic", "mlp"])
def test_a_power_of_two_loss_scale_is_bit_identical_to_none(compute: str, model: str) -> None:
    fields = {"problem": gd.Digits(model), "workers": 2}
    plain = run(8, precision=gd.Precision(compute=compute, weights="fp32", reduce="fp32"), **fields)
    scaled = run(8, precision=gd.Precision(compute=compute, weights="fp32", reduce="fp32", loss_scale=2.0**12),
                 **fields)
    assert same_path(plain, scaled)
    assert scaled.pushes[0].loss_scale == 2.0**12
    other = run(8, precision=gd.Precision(compute=compute, weights="fp32", reduce="fp32", loss_scale=1000.0), **fields)
    assert not same_path(plain, other)


def test_a_power_of_two_loss_scale_is_bit_identical_in_fp16_without_underflow() -> None:
    fields = {"problem": gd.Quadratic(), "workers": 2, "optimizer": gd.SGD(0.01)}
    plain = run(20, precision=gd.Precision(compute="fp16"), **fields)
    assert same_path(plain, run(20, precision=gd.Precision(compute="fp16", loss_scale=256.0), **fields))


def test_what_is_not_finite_is_counted_before_a_clip_can_hide_it() -> None:
    at = torch.tensor([1e4, 1.0])
    fields = {"problem": gd.Quadratic((10.0, 10.0), (1.0, 1.0)), "precision": gd.Precision(compute="fp16")}
    for clip in (None, 1.0, gd.Clip(value=1.0), gd.Clip(value=1.0, before_unscale=True), gd.Clip(adaptive=0.1)):
        push = _push(at=at, clip=clip, **fields)
        assert push.nonfinite == 1, clip
        assert push.grad_norm == math.inf
    assert _push(at=at, clip=gd.Clip(value=1.0), **fields).grad.tolist() == [1.0, 1.0]
    assert _push(at=torch.tensor([math.nan, 1.0]), **fields).nonfinite == 1


def test_a_finite_gradient_whose_squares_overflow_is_counted_as_finite() -> None:
    push = _push(problem=gd.Quadratic((1.0, 1.0), (1e30, 1e30)))
    assert push.nonfinite == 0 and push.grad_norm == pytest.approx(math.sqrt(2) * 1e30)


def test_clipping_happens_after_unscaling_unless_asked_otherwise() -> None:
    problem = gd.Quadratic((1.0, 1.0), (3.0, 4.0))
    after = _push(problem=problem, clip=1.0, loss_scale=8.0)
    torch.testing.assert_close(after.grad, torch.tensor([0.6, 0.8]))
    assert after.grad_norm == 5.0 and after.clip_scale == pytest.approx(0.2)
    before = _push(problem=problem, clip=gd.Clip(norm=1.0, before_unscale=True), loss_scale=8.0)
    torch.testing.assert_close(before.grad, torch.tensor([0.6, 0.8]) / 8)
    assert before.grad_norm == 5.0 and before.clip_scale == pytest.approx(1 / 40)


def test_a_clip_at_the_average_leaves_the_workers_gradients_alone() -> None:
    push = _push(problem=gd.Quadratic((1.0, 1.0), (3.0, 4.0)), clip=gd.Clip(norm=1.0, where="average"))
    assert push.grad.tolist() == [3.0, 4.0] and push.clip_scale == 1.0


def test_adaptive_clipping_compares_each_layer_with_its_own_weights() -> None:
    factor = 0.001
    push = _push(clip=gd.Clip(adaptive=factor))
    problem = build(gd.Experiment(workers=1))
    start, plain = problem.initial(), problem.gradient(problem.initial(), 0, 0)[1]
    assert len(problem.groups) == 4
    for group in problem.groups:
        limit = factor * max(start[group].norm().item(), 1e-3)
        assert push.grad[group].norm().item() == pytest.approx(min(limit, plain[group].norm().item()), rel=1e-5)


def test_a_clip_above_every_norm_changes_no_bit() -> None:
    plain = run(20, problem=gd.Ravine(), workers=2, optimizer=gd.SGD(0.001))
    for clip in (gd.Clip(norm=1e6), gd.Clip(value=1e6), gd.Clip(norm=1e6, where="average")):
        assert same_path(plain, run(20, problem=gd.Ravine(), workers=2, optimizer=gd.SGD(0.001), clip=clip))


def test_a_clipped_descent_walks_in_equal_steps_and_then_decays() -> None:
    # w^2/2 from 100 with lr 0.1 and clip 1: 990 steps of 0.1, then a factor of 0.9 a step: 1,056 to reach 1e-3.
    rounds = Rounds(gd.Experiment(problem=gd.Quadratic((1.0,), (100.0,)), workers=1, clip=1.0, precision="fp64"))
    rounds.run(1200, until=lambda params: abs(params.item()) <= 1e-3)
    assert rounds.store.version == pytest.approx(1056, abs=1)
    assert sum(push_scale < 1 for push_scale in _scales(rounds)) == pytest.approx(990, abs=1)


def _scales(rounds: Rounds) -> list[float]:
    return [1.0 if abs(at.item()) <= 1 else 1 / abs(at.item()) for at in rounds.path[:-1]]


# ---- local rounds --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("period", [1, 3, 8])
def test_on_a_shared_quadratic_local_sgd_averages_to_synchronous_sgd(period: int) -> None:
    # By linearity, whatever the noise, if both draw it by the same (worker, step).
    fields = {"problem": gd.Quadratic(noise=0.3), "workers": 4, "optimizer": gd.SGD(0.05), "precision": "fp64"}
    local = run(24 // period, strategy=gd.LocalSGD(period), **fields)
    sync = run(24, **fields)
    for version, params in enumerate(local.path):
        torch.testing.assert_close(params, sync.path[version * period], rtol=0, atol=1e-10)


@pytest.mark.parametrize("optimizer", [gd.SGD(0.1), gd.SGD(0.1, weight_decay=0.01)])
def test_local_sgd_of_one_step_is_synchronous_sgd_up_to_rounding(optimizer: object) -> None:
    local, sync = (run(12, strategy=strategy, optimizer=optimizer) for strategy in (gd.LocalSGD(1), gd.Sync()))
    torch.testing.assert_close(torch.stack(local.path), torch.stack(sync.path), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", [gd.SGD(0.1), gd.SGD(0.1, 0.9, 0.01), gd.AdamW(0.01)])
def test_local_sgd_of_one_worker_is_sgd_bit_for_bit(optimizer: object) -> None:
    local = run(6, workers=1, strategy=gd.LocalSGD(4), optimizer=optimizer)
    plain = run(24, workers=1, optimizer=optimizer)
    assert torch.equal(torch.stack(local.path), torch.stack(plain.path[::4]))


def test_momentum_stays_with_the_worker_and_is_not_averaged() -> None:
    # Two workers with opposite centers: the average never moves, though each worker's own momentum grows.
    problem = gd.Quadratic((1.0,), (0.0,), centers=((1.0,), (-1.0,)))
    rounds = run(3, problem=problem, workers=2, strategy=gd.LocalSGD(2), optimizer=gd.SGD(0.1, 0.9))
    assert all(params.item() == 0.0 for params in rounds.path)
    first = run(1, problem=problem, workers=2, strategy=gd.LocalSGD(2), optimizer=gd.SGD(0.1, 0.9))
    assert abs(rounds.pushes[0].grad.item()) > abs(first.pushes[0].grad.item())


def test_a_local_step_that_overflows_is_skipped_under_a_loss_scale() -> None:
    problem = gd.Quadratic((1.0, 1.0), (100.0, 1.0))
    scaled = gd.Precision(compute="fp16", loss_scale=1024.0)
    rounds = run(1, problem=problem, workers=1, strategy=gd.LocalSGD(2), precision=scaled)
    assert rounds.pushes[0].nonfinite == 2
    assert rounds.pushes[0].grad.tolist() == [100.0, 1.0]


def test_a_push_is_not_changed_by_what_comes_after_it() -> None:
    for strategy in (gd.Sync(), gd.LocalSGD(2)):
        rounds = run(1, workers=2, strategy=strategy)
        kept = [push.grad.clone() for push in rounds.pushes]
        pushes = rounds.pushes
        rounds.run(3)
        assert all(torch.equal(push.grad, before) for push, before in zip(pushes, kept, strict=True))


def test_clipping_comes_before_delay_compensation_wherever_a_gradient_is_applied_alone() -> None:
    fields = {"problem": gd.Quadratic((1.0,), (4.0,)), "workers": 1, "precision": "fp64", "optimizer": gd.SGD(1.0),
              "strategy": gd.Async(correction="delay_compensation", delay_compensation_strength=0.5)}
    for where in ("worker", "average"):
        exp = gd.Experiment(clip=gd.Clip(norm=1.0, where=where), **fields)
        store, worker = Store(exp, build(exp)), Worker(exp, build(exp), 0)
        stale, fresh = store.read(0), store.read(0)
        store.apply([worker.gradient(fresh, 0)], [0])
        before = store.params.item()
        assert before == 3.0  # The weight moved by -1 between the stale read and its push, of gradient 4.
        store.apply([worker.gradient(stale, 1)], [1])
        assert before - store.params.item() == pytest.approx(1.0 + 0.5 * 1.0**2 * -1.0)


@pytest.mark.parametrize("rule", [{"norm": 1.0}, {"value": 0.3}, {"adaptive": 0.05}, {"normalised": 1.0}], ids=str)
@pytest.mark.parametrize("precision", [
    "fp32", "mixed_fp16", gd.Precision(reduce="fp16"), gd.Precision(reduce="fp8_e4m3"),
    gd.Precision("fp16", loss_scale=1024.0)], ids=str)  # fmt: skip
@pytest.mark.parametrize("correction", ["none", "inverse", "delay_compensation"])
def test_a_gradient_that_is_applied_alone_is_its_own_average(
        rule: dict, precision: Any, correction: str, tmp_path: Path) -> None:  # fmt: skip
    strategy, optimizer = gd.Async(correction=correction), gd.SGD(0.05, momentum=0.5)
    exp = gd.Experiment(gd.Quadratic(), workers=3, updates=25, optimizer=optimizer, precision=precision,
                        strategy=strategy, compute_time=gd.Exponential(0.05))
    for unscaled in (False, True):
        traces = [simulate(exp.replace(clip=gd.Clip(where=where, before_unscale=unscaled, **rule)),
                           tmp_path / f"{where}{unscaled}") for where in ("worker", "average")]
        assert traces[0].path.tobytes() == traces[1].path.tobytes()
        assert traces[0].pushes.tobytes() == traces[1].pushes.tobytes()


def test_an_average_clipped_before_it_is_unscaled_is_shorter_by_the_scale() -> None:
    precision = gd.Precision("fp32", "fp32", "fp32", loss_scale=1024.0)
    for workers, where in ((1, "worker"), (1, "average"), (4, "average")):
        clip = gd.Clip(norm=1.0, where=where, before_unscale=True)
        exp = gd.Experiment(gd.Quadratic(), workers=workers, optimizer=gd.SGD(1.0), precision=precision, clip=clip)
        run = Rounds(exp).run(1)
        assert (run.path[0] - run.path[1]).norm().item() == pytest.approx(1 / 1024, rel=1e-4)


def test_local_steps_of_period_one_are_plain_ones_but_for_what_compensation_carries() -> None:
    for compensated in (False, True):
        paths = [Rounds(gd.Experiment(
            gd.Quadratic((1.0,), (1.0,)), workers=1, strategy=strategy, optimizer=gd.SGD(0.001),
            precision=gd.Precision("fp32", "bf16", "fp32", compensated=compensated))).run(20).path
            for strategy in (gd.Sync(), gd.LocalSGD(1))]
        assert torch.equal(torch.stack(paths[0]), torch.stack(paths[1])) is not compensated
