"""Compression as a pure rule: what is sent and what is still owed make the whole, and nothing is hidden."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from descending import Rounds, same_path
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import gdlab as gd
from gdlab.backends.costs import Costs
from gdlab.descent.arithmetic import carrier
from gdlab.descent.compression import Compressor, Sender, compressor_of, fp8_scale, largest
from gdlab.formats import facts
from gdlab.views import what_differs

METHODS = ("topk", "sign", "fp8", "bf16")
SPECS = st.builds(gd.Compression, st.sampled_from(METHODS), st.floats(0.001, 1.0), st.just(True),
                  st.sampled_from(["mean", "one"]))
FORMATS = st.sampled_from(["fp32", "fp16", "bf16", "fp64", "fp8_e4m3"])
SIZES = st.integers(1, 70)
VALUES = st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0, 448.0, 2.0**-140, 2.0**-149])
VECTORS = SIZES.flatmap(lambda n: arrays(np.float32, n, elements=VALUES)).map(torch.from_numpy)
ANY = SIZES.flatmap(lambda n: arrays(np.float32, n, elements=st.floats(width=32))).map(torch.from_numpy)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sent(x: torch.Tensor, spec: gd.Compression, format: str = "fp32") -> torch.Tensor:
    compressor = Compressor(spec, len(x), format, x.dtype)
    message = compressor.encode(x)
    assert message.dtype == torch.uint8 and message.shape == (compressor.nbytes,)
    return compressor.decode(message)


# ---- the rule --------------------------------------------------------------------------------------------------------

@given(VECTORS, SPECS, FORMATS)
def test_a_message_has_the_length_that_was_announced_and_its_bytes_alone_say_what_is_read(x, spec, format) -> None:
    wide = torch.float64 if format == "fp64" else torch.float32
    compressor = Compressor(spec, len(x), format, wide)
    message = compressor.encode(x.to(wide))
    assert message.dtype == torch.uint8 and message.shape == (compressor.nbytes,)
    value = compressor.decode(message)
    assert value.dtype == carrier(format) and value.shape == x.shape
    copied = torch.frombuffer(bytearray(b"x" * 3 + bytes(message.numpy())), dtype=torch.uint8)[3:]  # lies oddly
    assert torch.equal(compressor.decode(copied), value) or not bool(torch.isfinite(value).all())


@given(VECTORS, st.floats(0.001, 1.0))
def test_top_k_plus_what_is_owed_is_the_gradient_exactly(x, fraction) -> None:
    sender = Sender(Compressor(gd.Compression("topk", fraction), len(x)), True)
    value = sender.send(x).value
    assert torch.equal(value + sender.residual, x)
    assert int((value != 0).sum()) <= max(1, round(fraction * len(x)))
    assert not bool(((value != 0) & (sender.residual != 0)).any())


@given(VECTORS, SPECS, FORMATS)
def test_what_is_sent_plus_what_is_owed_is_the_gradient_as_far_as_arithmetic_allows(x, spec, format) -> None:
    sender = Sender(Compressor(spec, len(x), format), True)
    value = sender.send(x).value.float()
    if bool(torch.isfinite(value).all()):
        near = torch.maximum(value.abs(), x.abs()).max() * 2.0**-23
        assert bool(((value + sender.residual - x).abs() <= near).all())


@given(VECTORS, st.floats(0.001, 1.0))
def test_top_k_is_a_contraction_by_the_share_it_keeps(x, fraction) -> None:
    # Stich, Cordonnier & Jaggi 2018 (arXiv:1809.07599).
    kept = max(1, round(fraction * len(x)))
    x = x.double()
    value = sent(x, gd.Compression("topk", fraction), "fp64")
    assert (value - x).square().sum() <= (1 - kept / len(x)) * x.square().sum() * (1 + 1e-12)


@given(VECTORS)
def test_a_scaled_sign_is_a_contraction_by_the_density(x) -> None:
    # Karimireddy et al. 2019: the factor is 1 - ||x||_1^2 / (n ||x||_2^2).
    x = x.double()
    value, squares = sent(x, gd.Compression("sign"), "fp64"), x.square().sum()
    left = (squares - x.abs().sum() ** 2 / len(x)).item()
    assert (value - x).square().sum().item() == pytest.approx(left, rel=1e-9, abs=1e-9 * squares.item())
    assert set(value.abs().tolist()) == {value.abs().max().item()}


@given(VECTORS, SPECS)
def test_what_was_read_once_is_read_again(x, spec) -> None:
    value = sent(x, spec)
    again = sent(value, spec)
    # The mean of n equal numbers may be a rounding away from them.
    near = 2.0**-23 * value.abs().max() if spec.method == "sign" and spec.scaled else 0.0
    assert bool(((again - value).abs() <= near).all())


@given(VECTORS)
def test_fp8_uses_its_range_and_never_saturates(x) -> None:
    scale, largest_ = fp8_scale(x), facts("fp8_e4m3").max
    assert math.frexp(scale)[0] == 0.5 and x.abs().max().item() / scale <= largest_
    value = sent(x, gd.Compression("fp8"))
    # Half a spacing: 2^-4 of the value, or of the smallest normal number.
    assert bool(((value - x).abs() <= torch.maximum(x.abs() * 2.0**-4, torch.tensor(2.0**-10 * scale))).all())
    tiny = torch.finfo(torch.float32).tiny
    assert scale in (1.0, tiny) or x.abs().max().item() / scale > largest_ / 2


def test_of_equal_values_the_lowest_index_goes_first() -> None:
    x = torch.tensor([1.0, -3.0, 2.0, 3.0, -2.0, 2.0, 0.0])
    assert [largest(x, k).tolist() for k in range(1, 8)] == [
        [1], [1, 3], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]]
    assert largest(torch.zeros(5), 2).tolist() == [0, 1]
    assert largest(torch.tensor([9.0, math.nan, -math.inf, math.inf]), 2).tolist() == [1, 2]


def test_signs_are_packed_eight_to_a_byte_and_zero_counts_as_plus() -> None:
    x = torch.tensor([-1.0, 2.0, 0.0, -0.0, -5.0, 1.0, 1.0, -1.0, 3.0])
    one = Compressor(gd.Compression("sign", scale="one"), 9)
    assert one.encode(x)[:2].tolist() == [0b01101110, 1] and one.nbytes == 2 + 4
    assert one.decode(one.encode(x)).tolist() == [-1, 1, 1, 1, -1, 1, 1, -1, 1]
    mean = sent(x, gd.Compression("sign"))
    assert mean.abs().tolist() == [pytest.approx(14 / 9)] * 9
    assert sent(torch.zeros(4), gd.Compression("sign")).tolist() == [0.0] * 4


# ---- what is not finite ----------------------------------------------------------------------------------------------

@given(ANY, SPECS, FORMATS)
def test_a_gradient_that_is_not_finite_is_never_hidden_and_what_is_owed_stays_finite(x, spec, format) -> None:
    sender = Sender(Compressor(spec, len(x), format), True)
    for part in (torch.ones(len(x)), x, x):
        pushed = sender.send(part)
        assert bool(torch.isfinite(sender.residual).all())
        # An infinity becomes 448 in e4m3, as it does without compression; it is counted all the same.
        seen = not bool(torch.isfinite(pushed.value).all()) or (facts(format).saturates and not x.isnan().any())
        assert pushed.nonfinite == 0 or seen
    assert sender.send(x).nonfinite >= int((~torch.isfinite(x)).sum())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", ["apply", "skip", "stop"])
def test_one_infinity_is_counted_and_treated_as_without_compression(method: str, rule: str) -> None:
    exp = gd.Experiment(gd.Quadratic((1.0, 1e30, 1.0), (1.0, 1e30, 1.0)), workers=1, on_nonfinite=rule,
                        compression=method)
    run = Rounds(exp).run(1)
    assert run.pushes[0].nonfinite == 1 and run.applied[0].skipped == (rule != "apply")
    assert torch.equal(run.path[1], run.path[0]) if rule != "apply" else not torch.isfinite(run.path[1]).all()


# ---- error feedback --------------------------------------------------------------------------------------------------

@given(VECTORS, SPECS, st.integers(1, 12))
def test_all_that_was_sent_and_is_owed_adds_up_to_all_gradients(x, spec, steps) -> None:
    sender = Sender(Compressor(spec, len(x), "fp64", torch.float64), True)
    total = sum(sender.send(x.double() * (step % 3 - 1.5)).value for step in range(steps))
    whole = x.double() * sum(step % 3 - 1.5 for step in range(steps))
    torch.testing.assert_close(total + sender.residual, whole, rtol=1e-9, atol=1e-9 * (1 + float(x.abs().max())))


def test_a_push_that_is_taken_back_owes_what_was_owed_before() -> None:
    sender = Sender(Compressor(gd.Compression("topk", 0.5), 4), True)
    sender.send(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    owed = sender.residual.clone()
    sender.send(torch.tensor([1.0, 1.0, 9.0, 9.0]))
    assert not torch.equal(sender.residual, owed)
    sender.take_back()
    assert torch.equal(sender.residual, owed) and owed.tolist() == [0, 0, 2, 1]


def test_without_feedback_nothing_is_owed() -> None:
    sender = Sender(Compressor(gd.Compression("topk", 0.25, error_feedback=False), 4), False)
    for _ in range(3):
        assert sender.send(torch.tensor([4.0, 3.0, 2.0, 1.0])).value.tolist() == [4, 0, 0, 0]


def test_each_worker_owes_its_own() -> None:
    problem = gd.Quadratic((1.0, 1.0), (0.0, 0.0), centers=((-4.0, -1.0), (-1.0, -4.0)))
    run = Rounds(gd.Experiment(problem, workers=2, compression=gd.Compression("topk", 0.5), optimizer=gd.SGD(0.0)))
    run.run(1)
    assert [worker._sender.residual.tolist() for worker in run.workers] == [[0, 1], [1, 0]]


# ---- in a run of the rule of descent ---------------------------------------------------------------------------------

@pytest.mark.parametrize("exchange", ["allreduce", "server"])
def test_all_values_with_their_indices_are_the_run_without_compression(exchange: str) -> None:
    exp = gd.Experiment(gd.Digits("logistic"), workers=3, strategy=gd.Sync(exchange=exchange))
    assert same_path(Rounds(exp).run(8), Rounds(exp.replace(compression=gd.Compression("topk", 1.0))).run(8))


def test_bf16_over_an_all_reduce_without_feedback_is_reducing_in_bf16() -> None:
    exp = gd.Experiment(gd.Digits("logistic"), workers=3)
    compressed = exp.replace(compression=gd.Compression("bf16", error_feedback=False))
    assert same_path(Rounds(exp.replace(precision=gd.Precision(reduce="bf16"))).run(8), Rounds(compressed).run(8))
    assert not same_path(Rounds(compressed).run(8), Rounds(exp.replace(compression="bf16")).run(8))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("strategy", [gd.Sync(), gd.Sync(exchange="server"), gd.Async()],
                         ids=["all-reduce", "server", "Async"])
def test_one_worker_is_a_plain_loop_with_the_same_compression_bit_for_bit(method: str, strategy: object) -> None:
    spec = gd.Compression(method, 0.05)
    exp = gd.Experiment(gd.Digits("logistic"), workers=1, strategy=strategy, compression=spec, clip=0.5,
                        optimizer=gd.SGD(0.05, 0.9))
    run = Rounds(exp).run(10)
    params = run.problem.initial()
    optimizer, owed = torch.optim.SGD([params], 0.05, 0.9), torch.zeros_like(params)
    for step in range(10):
        whole = gd.clip_by_norm(run.problem.gradient(params, 0, step)[1], 0.5) + owed
        part = sent(whole, spec)
        owed, params.grad = whole - part, part
        optimizer.step()
        assert torch.equal(params, run.path[step + 1])


@pytest.mark.parametrize("method", METHODS)
def test_local_sgd_sends_the_change_of_its_parameters(method: str) -> None:
    spec = gd.Compression(method, 0.05)
    exp = gd.Experiment(gd.Digits("logistic"), workers=1, strategy=gd.LocalSGD(3), compression=spec,
                        optimizer=gd.SGD(0.05))
    run = Rounds(exp).run(6)
    params, owed = run.problem.initial(), torch.zeros(run.problem.size)
    for version in range(6):
        here = params.clone()
        for step in range(3 * version, 3 * version + 3):
            here.add_(run.problem.gradient(here, 0, step)[1], alpha=-0.05)
        whole = here - params + owed
        owed = whole - sent(whole, spec)
        params = params + sent(whole, spec)
        assert torch.equal(params, run.path[version + 1])


def test_values_that_compression_leaves_out_are_not_counted_as_underflow() -> None:
    exp = gd.Experiment(gd.Digits("logistic"), workers=1, precision="mixed_fp16", compression="topk")
    run = Rounds(exp)
    run.workers[0].watch = lambda step: True
    run.run(1)
    assert int((run.pushes[0].grad == 0).sum()) > 600
    assert run.workers[0].sample(run.pushes[0])[1] < 100


# ---- bytes and names -------------------------------------------------------------------------------------------------

def test_bytes_are_counted_as_published() -> None:
    # A ring: Patarasuk & Yuan 2009; the other volumes were counted by hand.
    rings = [Costs.of(gd.Experiment(workers=workers), 6000).bytes_sent for workers in (2, 3, 4, 8)]
    assert rings == [24_000, 32_000, 36_000, 42_000]
    million, eight = 1_000_000, {"workers": 8, "strategy": gd.Sync()}
    assert [Costs.of(gd.Experiment(**eight), million).bytes_sent / period for period in (1, 10, 500)] == [
        7_000_000, 700_000, 14_000]
    topk = compressor_of(gd.Experiment(compression="topk", **eight), million)
    assert topk.kept == 10_000 and topk.nbytes == 80_000
    assert Costs.of(gd.Experiment(compression="topk", **eight), million).bytes_sent == 560_000
    scale_bytes = 4
    assert Costs.of(gd.Experiment(compression="sign", **eight), million).bytes_sent == 875_000 + 7 * scale_bytes


def test_runs_are_named_by_their_compression() -> None:
    base = gd.Experiment()
    runs = [base, base.replace(compression="topk"), base.replace(compression=gd.Compression("topk", 0.05)),
            base.replace(compression=gd.Compression("sign", error_feedback=False)),
            base.replace(compression=gd.Compression("sign", scale="one"))]
    assert what_differs(runs) == ["no compression", "top-k 1%", "top-k 5%", "sign without feedback", "sign of step 1"]
    assert base.label + ", top-k 1%" == runs[1].label
