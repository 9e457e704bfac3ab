"""Gradients that are zero, infinite, NaN, too long for their format, or none: what comes of each, and what is said."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from descending import Rounds
from processes import PATIENCE_S

import gdlab as gd
from gdlab.backends.virtual import simulate
from gdlab.clipping import apply_clip, clip_by_norm
from gdlab.descent.worker import Push

# The second of two parameters overflows in fp16 at once: 1000 * 100 > 65,504.
OVERFLOW = gd.Quadratic((1.0, 1000.0), (1.0, 100.0))
FP16 = gd.Precision(compute="fp16")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def push(values: list[float], worker: int = 0, dtype: torch.dtype = torch.float32) -> Push:
    grad = torch.tensor(values, dtype=dtype)
    bad = int((~torch.isfinite(grad)).sum())
    return Push(worker, 0, 0, grad, 0.0, 0.0, 1.0, bad, 1.0)


# ---- what a run does -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("rule", "scale", "kept"), [
    ("apply", None, False), ("skip", None, True), ("stop", None, True), ("apply", 1.0, True), ("stop", 1.0, True)])
def test_what_is_not_finite_is_applied_or_skipped_as_chosen_and_a_loss_scale_always_skips(
        rule: str, scale: float | None, kept: bool) -> None:
    exp = gd.Experiment(OVERFLOW, workers=1, precision=FP16.replace(loss_scale=scale), on_nonfinite=rule)
    assert exp.nonfinite_rule == ("skip" if scale else rule)
    run = Rounds(exp).run(1)
    assert run.pushes[0].nonfinite == 1 and run.applied[0].skipped is kept
    assert run.store.version == 1 and torch.equal(run.path[0], run.path[1]) is kept
    assert math.isnan(run.applied[0].lost_fraction) or not kept


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_a_run_that_is_to_stop_ends_at_the_version_with_the_gradient_and_does_not_apply_it(
        strategy: str, tmp_path: Path) -> None:
    # Worker 2 alone overflows, from its second step on.
    problem = gd.Quadratic(((1.0,), (1.0,), (700.0,)), (90.0,), centers=((0.0,),) * 3)
    exp = gd.Experiment(problem, workers=3, strategy=strategy, precision=FP16, on_nonfinite="stop",
                        optimizer=gd.SGD(0.02), updates=50)
    trace = simulate(exp, tmp_path)
    assert trace.ended == {"how": "stopped", "reason": "nonfinite"}
    last = trace.applied[trace.applied["nonfinite"] > 0]
    assert last["worker"].tolist() == [2] and last["version"].tolist() == [trace.path_versions[-1]]
    assert np.array_equal(trace.path[-1], trace.path[-2]) and np.isfinite(trace.path).all()
    assert trace.summary()["nonfinite"] == trace.summary()["skipped"] == 1
    assert trace.summary()["updates"] < 50


def test_skipped_steps_are_counted_and_leave_the_weights_alone(tmp_path: Path) -> None:
    exp = gd.Experiment(OVERFLOW, workers=2, precision=FP16, on_nonfinite="skip", updates=5)
    trace = simulate(exp, tmp_path)
    summary = trace.summary()
    assert (summary["updates"], summary["skipped"], summary["nonfinite"]) == (5, 5, 10)
    assert np.isnan(summary["lost_fraction"]) or summary["lost_fraction"] == 0
    assert (trace.path == trace.path[0]).all() and trace.applied["nonfinite"].tolist() == [1] * 10


def test_a_sum_that_overflows_is_not_finite_though_each_gradient_is() -> None:
    exp = gd.Experiment(gd.Quadratic((1.0,), (0.0,)), workers=2, precision=gd.Precision(reduce="fp16"),
                        on_nonfinite="skip")
    run = Rounds(exp)
    applied = run.store.apply([push([60000.0], 0, torch.float16), push([60000.0], 1, torch.float16)], [0, 0])
    assert applied.skipped and run.store.params.item() == 0.0


def test_a_run_whose_sum_overflowed_says_so_though_nothing_was_asked_for() -> None:
    problem = gd.Quadratic((1.0,), start=(0.0,), centers=((-30000.0,),) * 4)
    run = gd.launch(gd.Experiment(problem, workers=4, optimizer=gd.SGD(1.0), updates=1,
                                  precision=gd.Precision("fp32", "fp32", "fp16")), backend="virtual")
    assert np.isinf(run.wait().path[-1]).all() and run.trace.summary()["nonfinite"] == 0
    assert "though every gradient is: a sum of them, or a step, overflowed" in run.message


def test_a_local_step_with_a_gradient_that_is_not_finite_is_left_out_unless_it_is_to_be_applied() -> None:
    fields = {"problem": OVERFLOW, "workers": 1, "strategy": gd.LocalSGD(2), "precision": FP16}
    for rule in ("skip", "stop"):
        run = Rounds(gd.Experiment(on_nonfinite=rule, **fields)).run(1)
        assert run.pushes[0].nonfinite == 2 and torch.equal(run.path[0], run.path[1])
        assert run.applied[0].skipped and np.isnan(run.applied[0].lost_fraction)  # a version with unchanged parameters
    assert not torch.isfinite(Rounds(gd.Experiment(**fields)).run(1).path[1]).all()


def test_under_local_sgd_every_version_with_unchanged_parameters_is_counted_as_skipped(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((1.0, 10.0)), strategy=gd.LocalSGD(4), precision="mixed_fp16", updates=10,
                        optimizer=gd.SGD(0.02))
    trace = simulate(exp, tmp_path)
    assert trace.summary()["skipped"] == (trace.path[1:] == trace.path[:-1]).all(axis=1).sum() > 0


@pytest.mark.parametrize("fields", [{}, {"strategy": gd.Sync(exchange="server")}, {"strategy": "async"}],
                         ids=["all-reduce", "server", "Async"])
def test_real_runs_stop_and_skip_and_name_the_rank_the_step_and_the_count(fields: dict) -> None:
    # Rank 1's own bowl is so steep that its gradient alone overflows.
    problem = gd.Quadratic(((1.0, 1.0), (1000.0, 1000.0)), (100.0, 100.0), centers=((0.0, 0.0),) * 2)
    base = gd.Experiment(problem, workers=2, precision=FP16, updates=30, optimizer=gd.SGD(1e-4),
                         compute_time=gd.Constant(0.02), **fields)
    runs = [gd.launch(base.replace(on_nonfinite=rule)) for rule in ("stop", "skip")]
    stopped, skipped = (run.wait(PATIENCE_S) for run in runs)
    told = "rank 1's gradient of step 0 had 2 values that are not finite"
    assert runs[0].state == "stopped" and runs[0].message == f"stopped: {told}"
    assert stopped.ended["reason"] == "nonfinite" and stopped.ended["message"] == told
    assert np.isfinite(stopped.path).all()
    assert runs[1].state == "done" and told in runs[1].message and runs[1].message.endswith("skipped")
    assert skipped.summary()["updates"] == 30 and skipped.summary()["skipped"] >= 1
    assert np.isfinite(skipped.path).all()


# ---- five gradients that are special ---------------------------------------------------------------------------------

RULES = [gd.Clip(norm=1.0), gd.Clip(value=1.0), gd.Clip(adaptive=1.0)]


@pytest.mark.parametrize("clip", [None, *RULES], ids=str)
def test_a_zero_gradient_stays_exactly_zero_and_is_no_reason_to_say_anything(clip: gd.Clip | None,
                                                                              tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic(start=(0.0, 0.0)), workers=2, clip=clip, updates=3)
    trace = simulate(exp, tmp_path)
    assert (trace.path == 0).all()
    rows, summary = trace.applied, trace.summary()
    assert (rows["grad_norm"] == 0).all() and (rows["clip_scale"] == 1).all() and (rows["nonfinite"] == 0).all()
    assert (summary["nonfinite"], summary["clipped"], summary["lost_fraction"]) == (0, 0, 0.0)


@pytest.mark.parametrize(("values", "count"), [([1.0, math.inf], 1), ([math.nan, math.nan], 2)],
                         ids=["one inf", "all NaN"])
@pytest.mark.parametrize("rule", ["apply", "skip", "stop"])
def test_one_infinity_or_only_nan_is_counted_and_never_becomes_zero_silently(values: list[float], count: int,
                                                                              rule: str) -> None:
    run = Rounds(gd.Experiment(gd.Quadratic(start=(1.0, 1.0)), workers=1, on_nonfinite=rule, optimizer=gd.SGD(0.5)))
    assert push(values).nonfinite == count
    applied = run.store.apply([push(values)], [0])
    if rule == "apply":
        expected = [1 - 0.5 * value for value in values]
        assert not applied.skipped
    else:
        expected = [1.0, 1.0]
        assert applied.skipped
    assert np.array_equal(run.store.params.numpy(), np.float32(expected), equal_nan=True)


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["array", "tensor"])
def test_of_an_empty_gradient_the_norm_is_zero_and_nothing_is_clipped(make: object) -> None:
    for clip in (None, *RULES):
        clipped, scale, norm = apply_clip(make([]), clip, make([]))
        assert (len(clipped), scale, norm) == (0, 1.0, 0.0)
    assert len(gd.round_to(make([]), "fp16")) == 0


def test_a_problem_without_parameters_is_refused_in_one_sentence() -> None:
    with pytest.raises(gd.ExperimentError, match="start has 0 coordinates: 1 to 10,000 are possible"):
        gd.Quadratic((), ())
    with pytest.raises(gd.ExperimentError, match="needs at least one trainable parameter"):
        Rounds(gd.Experiment(gd.Torch("test_nonfinite:no_parameters"), workers=1))


def no_parameters() -> tuple:
    return torch.nn.Flatten(), torch.nn.functional.mse_loss, (torch.zeros(4, 1), torch.zeros(4, 1))


@pytest.mark.parametrize("make", [lambda v: np.array(v, np.float32), torch.tensor], ids=["array", "tensor"])
def test_a_norm_whose_square_overflows_fp32_is_right_and_clips_rightly(make: object) -> None:
    g = make([1e20, 1e20])
    clipped, scale, norm = apply_clip(g, gd.Clip(norm=1.0))
    assert norm == pytest.approx(math.sqrt(2) * 1e20, rel=1e-6) and scale == pytest.approx(1 / norm)
    assert np.asarray(clipped) == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-6)
    assert np.asarray(clip_by_norm(g, 1.0)) == pytest.approx([math.sqrt(0.5)] * 2, rel=1e-6)


def test_such_a_gradient_counts_as_finite_in_a_run_and_is_clipped(tmp_path: Path) -> None:
    exp = gd.Experiment(gd.Quadratic((1e5, 1e5), (1e15, 1e15)), workers=2, clip=1.0, updates=2, on_nonfinite="stop")
    trace = simulate(exp, tmp_path)
    assert trace.ended["reason"] == "updates" and trace.summary()["nonfinite"] == 0
    assert trace.applied["grad_norm"] == pytest.approx(math.sqrt(2) * 1e20, rel=1e-6)
    assert trace.applied["clip_scale"] == pytest.approx(1 / (math.sqrt(2) * 1e20), rel=1e-6)


@pytest.mark.parametrize("optimizer", [gd.SGD(70_000.0), gd.SGD(0.1, weight_decay=70_000.0)], ids=str)
def test_a_rate_that_the_weights_format_cannot_hold_is_refused_in_one_sentence(optimizer: gd.SGD) -> None:
    with pytest.raises(gd.ExperimentError, match="70000 does not fit into fp16, whose largest number is 65504"):
        Rounds(gd.Experiment(gd.Quadratic(), workers=1, precision="fp16", optimizer=optimizer))


# ---- noise and narrow formats ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("precision", gd.parts.NAMED_PRECISIONS)
@pytest.mark.parametrize("problem", [
    gd.Quadratic(noise=0.1), gd.Ravine(noise=0.1), gd.Saddle(noise=0.1), gd.Cliff(noise=0.1),
    gd.LinearRegression(samples=20, noise=0.1)], ids=lambda problem: problem.kind)
def test_noise_under_any_loss_scale_goes_into_a_gradient_of_any_precision(problem: object, precision: str) -> None:
    for scale in (None, 1.0, "dynamic", 2.0**20, 2.0**60):
        exp = gd.Experiment(problem, workers=2, precision=gd.Precision.named(precision).replace(loss_scale=scale),
                            optimizer=gd.SGD(1e-6))
        run = Rounds(exp).run(2)
        # What half precision cannot hold is infinite, and its step is skipped.
        assert torch.isfinite(run.path[-1]).all()
        assert run.applied[0].skipped or "fp16" not in precision or scale != 2.0**60


def test_a_loss_scale_lifts_noise_that_half_precision_would_lose() -> None:
    exp = gd.Experiment(gd.Quadratic((0.0,), (1.0,), noise=1e-9), workers=1, precision=gd.Precision(
        compute="fp16", loss_scale=2.0**20))
    assert Rounds(exp).run(1).pushes[0].grad.item() != 0
