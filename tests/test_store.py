"""The shared parameters: combining, stepping, rounding, correcting, skipping."""

from __future__ import annotations

import math

import pytest
import torch
from descending import Rounds, run
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.descent.problems import build
from gdlab.descent.store import Store
from gdlab.descent.worker import Push, Worker

OPTIMIZERS = [gd.SGD(0.05), gd.SGD(0.05, momentum=0.9), gd.SGD(0.05, momentum=0.9, weight_decay=0.01), gd.AdamW(0.01)]


def _plain_loop(exp: gd.Experiment, rounds: int) -> torch.Tensor:
    """Descend with autograd and torch.optim on one tensor, as anybody would write it."""
    problem = build(exp)
    params = problem.initial().requires_grad_()
    spec = exp.optimizer
    if isinstance(spec, gd.SGD):
        optimizer = torch.optim.SGD([params], lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    else:
        optimizer = torch.optim.AdamW([params], lr=spec.lr, weight_decay=spec.weight_decay)
    path = [params.detach().clone()]
    for step in range(rounds):
        optimizer.zero_grad()
        problem.loss(params, 0, step).backward()
        optimizer.step()
        path.append(params.detach().clone())
    return torch.stack(path)


def _store(params: tuple[float, ...] = (0.0,), **fields: object) -> Store:
    problem = gd.Quadratic((0.0,) * len(params), params)
    exp = gd.Experiment(**{"problem": problem, "optimizer": gd.SGD(1.0), **fields})
    return Store(exp, build(exp))


def _push(store: Store, grad: list[float] | torch.Tensor, worker: int = 0, version: int | None = None,
          nonfinite: int = 0) -> Push:
    grad = grad if isinstance(grad, torch.Tensor) else torch.tensor(grad)
    at = store.version if version is None else version
    return Push(worker, 0, at, grad, 0.0, grad.norm().item(), 1.0, nonfinite, store.loss_scale)


# ---- one worker is plain SGD ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("problem", [gd.Quadratic(), gd.Digits("logistic"), gd.Digits("mlp")], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_one_worker_is_a_plain_torch_loop_bit_for_bit(problem: object, optimizer: object) -> None:
    exp = gd.Experiment(problem=problem, workers=1, optimizer=optimizer)
    expected = _plain_loop(exp, 15)
    strategies = [gd.Sync(), gd.Sync(exchange="server"), gd.Async(), gd.Async(staleness_bound=5), gd.LocalSGD(1),
                  gd.Async(correction="inverse")]
    changes = [{"strategy": strategy} for strategy in strategies] + [{"combine": how} for how in ("weighted", "sum")]
    for change in changes:
        rounds = Rounds(exp.replace(**change)).run(15)
        assert torch.equal(torch.stack(rounds.path), expected), change


def test_one_worker_on_the_mlp_is_an_ordinary_module_and_optimizer_bit_for_bit() -> None:
    exp = gd.Experiment(workers=1, optimizer=gd.SGD(0.1, 0.9))
    rounds = Rounds(exp)
    problem, network = rounds.problem, torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(),
                                                           torch.nn.Linear(32, 10))
    torch.nn.utils.vector_to_parameters(problem.initial(), network.parameters())
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for step in range(20):
        inputs, labels = problem._data.take(problem._batches.of(0, step), torch.float32)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(inputs), labels).backward()
        optimizer.step()
    rounds.run(20)
    assert torch.equal(torch.nn.utils.parameters_to_vector(network.parameters()), rounds.store.params)


@pytest.mark.parametrize("seed", range(3))
def test_four_workers_learn_the_digits_with_the_default_settings(seed: int) -> None:
    rounds = Rounds(gd.Experiment(seed=seed)).run(200)
    assert rounds.problem.accuracy(rounds.store.params) >= 0.95


# ---- combining -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("combine", "expected"), [("mean", -6.0), ("weighted", -4.0), ("sum", -12.0)])
def test_unequal_shards_bias_the_mean_and_the_weights_mend_it(combine: str, expected: float,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    # Shards (1, 2, 3) and (10), loss the mean of (w - x)^2 / 2, at w = 0: the full gradient is -4.
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])
    rounds = run(1, problem=gd.Torch("factories:point", shuffle=False), workers=2, shards=(0.75, 0.25),
                 batch_size=None, precision="fp64", combine=combine, optimizer=gd.SGD(1.0))
    assert -rounds.store.params.item() == pytest.approx(expected, abs=1e-12)
    local = run(1, problem=gd.Torch("factories:point", shuffle=False), workers=2, shards=(0.75, 0.25),
                batch_size=None, precision="fp64", combine=combine, optimizer=gd.SGD(1.0), strategy=gd.LocalSGD(1))
    assert -local.store.params.item() == pytest.approx(expected, abs=1e-12)


def test_weights_are_those_of_the_workers_that_took_part() -> None:
    exp = gd.Experiment(problem=gd.Digits("logistic"), workers=3, shards=(0.5, 0.25, 0.25), combine="weighted",
                        strategy=gd.Sync(1, "server"), optimizer=gd.SGD(1.0), precision="fp64")
    rounds = Rounds(exp)
    pushes = [worker.gradient(rounds.store.read(rank), 0) for rank, worker in enumerate(rounds.workers)][:2]
    first, second = rounds.problem.samples[:2]
    expected = (first * pushes[0].grad + second * pushes[1].grad) / (first + second)
    before = rounds.store.params.clone()
    rounds.store.apply(pushes, [0, 0])
    torch.testing.assert_close(before - rounds.store.params, expected, rtol=1e-9, atol=1e-12)


def test_clipping_each_then_averaging_is_not_averaging_then_clipping() -> None:
    pushes = ([30.0, 0.0], [0.0, 1.0])
    problem = gd.Quadratic((1.0, 1.0), (0.0, 0.0), centers=((-30.0, 0.0), (0.0, -1.0)))
    steps = {}
    for where in ("worker", "average"):
        rounds = run(1, problem=problem, workers=2, precision="fp64", optimizer=gd.SGD(1.0),
                     clip=gd.Clip(norm=1.0, where=where))
        steps[where] = -rounds.store.params
        scales = [push.clip_scale for push in rounds.pushes]
        assert (rounds.applied[0].clip_scale, scales) == (
            (1.0, [pytest.approx(1 / 30), 1.0]) if where == "worker" else (pytest.approx(1 / 15.0083310), [1.0, 1.0]))
    assert [push.grad_norm for push in rounds.pushes] == [30.0, 1.0] == [math.hypot(*push) for push in pushes]
    torch.testing.assert_close(steps["worker"], torch.tensor([0.5, 0.5], dtype=torch.float64), rtol=1e-12, atol=0)
    expected = torch.tensor([0.9994449069791543, 0.03331483023263848], dtype=torch.float64)
    torch.testing.assert_close(steps["average"], expected, rtol=1e-12, atol=0)


def test_local_sgd_clips_the_averaged_change() -> None:
    problem = gd.Quadratic((1.0, 1.0), (3.0, 4.0))
    rounds = run(1, problem=problem, workers=2, strategy=gd.LocalSGD(2), optimizer=gd.SGD(1.0),
                 clip=gd.Clip(norm=1.0, where="average"))
    torch.testing.assert_close(rounds.store.params, torch.tensor([2.4, 3.2]))
    assert rounds.applied[0].clip_scale == pytest.approx(0.2)


@given(st.lists(st.floats(-100, 100, width=16), min_size=1, max_size=6))
def test_the_running_sum_is_kept_in_the_reduce_format(values: list[float]) -> None:
    store = _store(workers=len(values), precision=gd.Precision(weights="fp64", reduce="fp16"))
    store.apply([_push(store, torch.tensor([value], dtype=torch.float16), worker)
                 for worker, value in enumerate(values)], [0] * len(values))
    total = torch.zeros(1, dtype=torch.float16)
    for value in values:
        total = total + torch.tensor([value], dtype=torch.float16)
    assert -store.params.item() == total.double().item() / len(values)


def test_a_sum_in_fp16_overflows_though_every_gradient_is_finite() -> None:
    store = _store(workers=2, precision=gd.Precision(reduce="fp16"))
    pushes = [_push(store, torch.tensor([40_000.0], dtype=torch.float16), worker) for worker in (0, 1)]
    store.apply(pushes, [0, 0])
    assert store.params.item() == -math.inf


def test_scaling_the_rate_with_the_steps_is_first_order_only() -> None:
    # w^2/2 from 1 with rate 0.1: k steps against one step of k times the rate (Goyal et al. 2017's rule).
    small = {2: 0.81, 4: 0.6561, 10: 0.3486784401000001, 25: 0.0717897987691853}
    large = {2: 0.8, 4: 0.6, 10: 0.0, 25: -1.5}
    for k in small:
        fields = {"problem": gd.Quadratic((1.0,), (1.0,)), "workers": 1, "precision": "fp64"}
        assert run(k, **fields).store.params.item() == pytest.approx(small[k], rel=1e-12)
        assert run(1, optimizer=gd.SGD(0.1 * k), **fields).store.params.item() == pytest.approx(large[k], rel=1e-12)


@pytest.mark.parametrize("fields", [
    {}, {"combine": "sum"}, {"combine": "weighted", "shards": (0.5, 0.3, 0.2)}, {"precision": "bf16"},
    {"precision": "fp8_e5m2"}, {"strategy": gd.LocalSGD(2)}, {"clip": gd.Clip(norm=0.1, where="average")},
    {"precision": "mixed_fp16"}, {"strategy": gd.LocalSGD(2), "combine": "weighted", "shards": (0.5, 0.3, 0.2)},
], ids=str)
def test_a_sum_made_elsewhere_gives_the_same_bits(fields: dict) -> None:
    exp = gd.Experiment(**{"problem": gd.Digits("logistic"), "workers": 3, **fields})
    served, reduced = Rounds(exp).run(4), Rounds(exp)
    local = isinstance(exp.strategy, gd.LocalSGD)
    for step in range(4):
        pushes = [(worker.local_round if local else worker.gradient)(reduced.store.read(rank), step)
                  for rank, worker in enumerate(reduced.workers)]
        parts = [reduced.store.contribution(push) for push in pushes]
        total = (parts[0] + parts[1])
        if exp.precision.reduce.startswith("fp8"):
            total = gd.round_to(total, exp.precision.reduce)
        reduced.store.apply_sum(total + parts[2], any(push.nonfinite for push in pushes), 3)
    assert torch.equal(served.store.params, reduced.store.params)
    assert served.store.loss_scale == reduced.store.loss_scale


def test_no_push_is_an_error() -> None:
    with pytest.raises(ValueError, match="no push"):
        _store().apply([], [])


# ---- reading -------------------------------------------------------------------------------------------------------

def test_what_was_read_stays_as_it_was() -> None:
    store = _store(workers=1)
    early = store.read(0)
    store.apply([_push(store, [1.0])], [0])
    late = store.read(0)
    assert (early.version, early.params.item(), late.version, late.params.item()) == (0, 0.0, 1, -1.0)
    assert store.read(1).params is late.params  # one copy a version, however many read it


# ---- staleness -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("late", "expected"), [(0, 1.0), (1, 1.0), (2, 0.5), (4, 0.25)])
def test_the_inverse_correction_divides_the_rate_by_the_staleness(late: int, expected: float) -> None:
    store = _store(workers=4, strategy=gd.Async(correction="inverse"))
    store.apply([_push(store, [1.0])], [late])
    assert -store.params.item() == expected
    store.apply([_push(store, [1.0])], [0])  # the rate is back
    assert -store.params.item() == expected + 1


def test_several_stale_gradients_count_each_by_its_own_staleness() -> None:
    store = _store(workers=4, strategy=gd.Async(batch=2, correction="inverse"), precision="fp64")
    grads = [torch.tensor([value], dtype=torch.float64) for value in (8.0, 2.0)]
    store.apply([_push(store, grad, worker) for worker, grad in enumerate(grads)], [4, 1])
    assert -store.params.item() == pytest.approx((8.0 / 4 + 2.0) / 2, rel=1e-12)


def test_delay_compensation_adds_the_curvature_that_was_missed() -> None:
    strategy = gd.Async(correction="delay_compensation", delay_compensation_strength=0.5)
    store = _store(workers=2, strategy=strategy)
    store.read(0), store.read(1)
    store.apply([_push(store, [3.0], 0)], [0])  # nothing missed: a plain step to -3
    assert store.params.item() == -3.0
    store.apply([_push(store, [2.0], 1, version=0)], [1])
    # g + 0.5 g^2 (w_now - w_read) = 2 + 0.5 * 4 * (-3 - 0) = -4
    assert store.params.item() == 1.0
    assert list(store._held) == []


def test_delay_compensation_remembers_a_read_while_its_push_waits_for_others() -> None:
    store = _store(workers=2, strategy=gd.Async(batch=2, correction="delay_compensation"))
    first = store.read(0)
    second = store.read(0)  # read again before the first push was applied
    assert first.params is second.params
    store.apply([_push(store, [1.0], 0), _push(store, [1.0], 0)], [0, 0])
    assert store.params.item() == -1.0 and store._held == {}


# ---- number formats ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("format", "limit"), [
    ("fp16", 2048), ("bf16", 256), ("fp8_e4m3", 16), ("fp8_e5m2", 8), ("Float(4, 3)", 16), ("tf32", 2048)])
def test_adding_one_stops_at_two_to_the_precision(format: str, limit: float) -> None:
    store = _store(workers=1, precision=gd.Precision(weights=format, reduce="fp32"))
    for _ in range(limit + 2):
        applied = store.apply([_push(store, [-1.0])], [0])
    assert store.params.item() == limit and applied.lost_fraction == 1.0


@pytest.mark.parametrize(("format", "limit"), [("fp32", 2.0**24), ("fp64", 2.0**53)])
def test_adding_one_to_two_to_the_precision_changes_nothing(format: str, limit: float) -> None:
    for start, end, lost in ((limit - 1, limit, 0.0), (limit, limit, 1.0)):
        store = _store((start,), workers=1, precision=format)
        applied = store.apply([_push(store, torch.tensor([-1.0], dtype=store.params.dtype))], [0])
        assert (store.params.item(), applied.lost_fraction) == (end, lost)


@pytest.mark.parametrize(("format", "final", "steps"), [
    ("fp32", 1.0000004768371582, 136), ("fp16", 1.00390625, 51), ("bf16", 1.03125, 31), ("fp8_e4m3", 1.5, 4),
    ("fp8_e5m2", 2.0, 0)])
def test_descent_stops_short_where_the_updates_vanish(format: str, final: float, steps: int) -> None:
    # (w - 1)^2 / 2 from 2 with rate 0.1, all in one format: it stops about ulp / (2 lr) before the minimum.
    problem = gd.Quadratic((1.0,), (2.0,), centers=((1.0,),))
    rounds = run(200, problem=problem, workers=1, precision=format)
    assert rounds.store.params.item() == final
    moved = sum(not torch.equal(a, b) for a, b in zip(rounds.path, rounds.path[1:], strict=False))
    assert abs(moved - steps) <= 1  # the rate is not rounded to the format here
    assert rounds.applied[-1].lost_fraction == 1.0


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "Float(5, 4)"])
@pytest.mark.parametrize("how", [{"rounding": "stochastic"}, {"compensated": True}])
def test_stochastic_and_compensated_updates_go_on_where_plain_ones_stop(format: str, how: dict) -> None:
    problem = gd.Quadratic((1.0,), (2.0,), centers=((1.0,),))
    plain = gd.Precision(compute="fp32", weights=format, reduce="fp32")
    stuck = run(400, problem=problem, workers=1, optimizer=gd.SGD(0.02), precision=plain).store.params.item()
    moving = run(400, problem=problem, workers=1, optimizer=gd.SGD(0.02), precision=plain.replace(**how))
    gap = gd.formats.ulp(1.0, format)
    assert abs(moving.store.params.item() - 1) <= 3 * gap < abs(stuck - 1)
    assert all(gd.round_to(at.float(), format).equal(at.float()) for at in moving.path)


def test_stochastic_rounding_is_right_on_average_and_repeatable() -> None:
    precision = gd.Precision(weights="bf16", reduce="fp32", rounding="stochastic")
    stores = [_store((1.0,) * 4000, workers=1, precision=precision) for _ in range(2)]
    for store in stores:
        store.apply([_push(store, [-0.001] * 4000)], [0])
    assert torch.equal(*(store.params for store in stores))
    steps = stores[0].params.float() - 1
    assert set(steps.tolist()) == {0.0, 2.0**-7}
    error = steps.std().item() / math.sqrt(4000)
    assert steps.mean().item() == pytest.approx(0.001, abs=4 * error)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, gd.AdamW(0.01, weight_decay=0.1)], ids=str)
@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16"])
def test_a_compensated_sum_of_small_steps_is_the_exact_one_rounded(optimizer: object, weights: str) -> None:
    gap = gd.formats.ulp(1.0, weights)
    # A hundredth of an ulp; not less, since what is carried over has no more digits than the format has.
    optimizer = optimizer.replace(lr=0.01 * gap)

    def end(precision: gd.Precision) -> float:
        store = _store((1.25,), workers=1, optimizer=optimizer, precision=precision)
        for _ in range(100):
            store.apply([_push(store, torch.tensor([-1.0], dtype=torch.float64))], [0])
        return store.params.item()

    exact = end(gd.Precision(weights="fp64", reduce="fp64"))
    assert abs(end(gd.Precision(weights=weights, reduce="fp64", compensated=True)) - exact) <= 1.1 * gap


def test_compensation_works_at_the_end_of_fp64_too() -> None:
    # Updates of a sixteenth of an ulp, each of which would be lost.
    ends = []
    for compensated in (False, True):
        precision = gd.Precision("fp64", "fp64", "fp64", compensated=compensated)
        store = _store((1.25,), workers=1, optimizer=gd.SGD(2.0**-56), precision=precision)
        for _ in range(160):
            store.apply([_push(store, torch.tensor([-1.0], dtype=torch.float64))], [0])
        ends.append(store.params.item())
    assert ends == [1.25, 1.25 + 10 * 2.0**-52]


def test_stochastic_and_compensated_together_are_refused() -> None:
    with pytest.raises(gd.ExperimentError, match="choose one of the two"):
        _store(precision=gd.Precision(rounding="stochastic", compensated=True))


def test_the_lost_fraction_counts_only_coordinates_with_something_to_do() -> None:
    store = _store((1.0, 1.0, 1.0, 1.0), workers=1, precision="bf16")
    grad = torch.tensor([2.0**-10, 0.5, 0.0, 2.0**-12], dtype=torch.bfloat16)
    assert store.apply([_push(store, grad)], [0]).lost_fraction == pytest.approx(2 / 3)
    store = _store((1.0, 1.0), workers=1)
    assert store.apply([_push(store, [0.0, 0.0])], [0]).lost_fraction == 0.0


def test_with_momentum_a_lost_update_is_the_momentums() -> None:
    store = _store((1.0,), workers=1, precision="bf16", optimizer=gd.SGD(1.0, momentum=0.5))
    store.apply([_push(store, torch.tensor([-0.5], dtype=torch.bfloat16))], [0])
    for _ in range(20):
        applied = store.apply([_push(store, torch.tensor([0.0], dtype=torch.bfloat16))], [0])
    assert applied.lost_fraction == 1.0  # the gradient is 0, the momentum is not


# ---- loss scale ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_under_a_dynamic_scale_a_bad_gradient_skips_the_step_and_backs_off(bad: float) -> None:
    store = _store(workers=1, precision="mixed_fp16")
    assert store.read(0).loss_scale == 65536.0
    applied = store.apply([_push(store, [bad], nonfinite=1)], [0])
    assert (applied.version, applied.skipped, store.params.item()) == (1, True, 0.0)
    assert math.isnan(applied.lost_fraction)
    assert store.read(0).loss_scale == 32768.0
    applied = store.apply([_push(store, [1.0])], [0])
    assert (applied.version, applied.skipped, store.params.item()) == (2, False, -1.0)


def test_under_a_static_scale_a_bad_gradient_skips_the_step_and_the_scale_stays() -> None:
    store = _store(workers=1, precision=gd.Precision(compute="fp16", loss_scale=8.0))
    assert store.apply([_push(store, [math.inf], nonfinite=1)], [0]).skipped
    assert (store.read(0).loss_scale, store.version, store.params.item()) == (8.0, 1, 0.0)


def test_without_a_scale_a_bad_gradient_is_applied_as_it_is() -> None:
    store = _store(workers=1)
    assert not store.apply([_push(store, [math.nan], nonfinite=1)], [0]).skipped
    assert math.isnan(store.params.item())


def test_an_overflow_that_the_reduce_format_hides_is_still_an_overflow() -> None:
    # A cast to fp8_e4m3 takes infinity to 448, so the sum looks fine: the worker's own count tells.
    precision = gd.Precision(compute="fp16", reduce="fp8_e4m3", loss_scale="dynamic")
    exp = gd.Experiment(problem=gd.Quadratic((1.0,), (100.0,)), workers=1, precision=precision)
    rounds = Rounds(exp).run(1)
    assert rounds.pushes[0].grad.item() == 448.0 and rounds.pushes[0].nonfinite == 1
    assert rounds.applied[0].skipped


def test_pure_fp16_stalls_where_gradients_underflow_and_a_loss_scale_mends_it() -> None:
    problem = gd.Quadratic((2.0**-20,), (2.0**-6,))
    stuck = run(3, problem=problem, workers=1, precision=gd.Precision(compute="fp16"), optimizer=gd.SGD(2.0**19))
    assert stuck.pushes[0].grad.item() == 0.0 and stuck.store.params.item() == 2.0**-6
    scaled = run(1, problem=problem, workers=1, optimizer=gd.SGD(2.0**19),
                 precision=gd.Precision(compute="fp16", loss_scale=2.0**15))
    assert scaled.store.params.item() == 2.0**-7


def test_workers_compute_what_they_are_told_though_the_store_has_moved_on() -> None:
    exp = gd.Experiment(problem=gd.Quadratic(), workers=2, strategy=gd.Async(), optimizer=gd.SGD(0.05))
    problem = build(exp)
    store, workers = Store(exp, problem), [Worker(exp, problem, rank) for rank in range(2)]
    reads = [store.read(rank) for rank in range(2)]
    store.apply([workers[0].gradient(reads[0], 0)], [0])
    assert torch.equal(workers[1].gradient(reads[1], 0).grad, workers[0].gradient(reads[0], 0).grad)


def test_the_weighted_mean_divides_by_the_weights_of_whoever_pushed() -> None:
    # As many pushes as workers, but not one of each: worker 0, with 3/4 of the data, has three of the four.
    exp = gd.Experiment(problem=gd.LinearRegression(samples=80), workers=4, shards=(0.55, 0.15, 0.15, 0.15),
                        combine="weighted", strategy=gd.Async(batch=4), optimizer=gd.SGD(1.0), precision="fp64")
    for workers in ((0, 0, 0, 1), (2, 2, 2, 2), (0, 1, 2, 3), (0, 1, 2, 2), (3, 1)):
        store = Store(exp, build(exp))
        grads = torch.arange(1.0, 1.0 + 5 * len(workers), dtype=torch.float64).reshape(-1, 5)
        pushes = [Push(worker, step, 0, grad, 0.0, 0.0, 1.0, 0, 1.0)
                  for step, (worker, grad) in enumerate(zip(workers, grads, strict=True))]
        before = store.params.clone()
        store.apply(pushes, [0] * len(pushes))
        weights = torch.tensor([(0.55, 0.15, 0.15, 0.15)[worker] for worker in workers], dtype=torch.float64)
        torch.testing.assert_close(before - store.params, weights @ grads / weights.sum())
