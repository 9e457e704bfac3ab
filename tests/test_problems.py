"""What is minimised: losses, gradients, objectives, starts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab import laws
from gdlab.descent.problem import NOISE_KEPT, Noise
from gdlab.descent.problems import build

SPECS = [
    gd.Quadratic(),
    gd.Quadratic(eigenvalues=((1.0, 2.0), (3.0, 4.0)), start=(1.0, 2.0), centers=((0.0, 1.0), (5.0, 2.0))),
    gd.Ravine(), gd.Saddle(start=(0.7, 0.4)), gd.Cliff(), gd.Cliff(start=(1.003, -2.0)),
    gd.LinearRegression(features=3, samples=40, feature_scale=10.0),
    gd.Digits("logistic"), gd.Digits("mlp"), gd.Digits("cnn"),
]
CLOSED = SPECS[:7]


def _experiment(spec: object, **fields: object) -> gd.Experiment:
    return gd.Experiment(problem=spec, workers=2, **fields)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_gradients_are_those_of_autograd(spec: object, precision: str) -> None:
    problem = build(_experiment(spec, precision=precision))
    start = problem.initial()
    at = (start + 0.01 * torch.arange(problem.size).sin()).to(start.dtype)
    for worker, step in ((0, 0), (1, 3)):
        leaf = at.clone().requires_grad_()
        expected = problem.loss(leaf, worker, step)
        expected.backward()
        loss, gradient = problem.gradient(at, worker, step)
        assert gradient.dtype == at.dtype and gradient.shape == (problem.size,)
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        close = 1e-5 if precision == "fp32" else 1e-12
        torch.testing.assert_close(gradient, leaf.grad, rtol=close, atol=close * leaf.grad.abs().max().item())


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_power_of_two_loss_scale_changes_no_bit(spec: object, dtype: torch.dtype) -> None:
    problem = build(_experiment(spec))
    at = problem.initial().to(dtype)
    plain_loss, plain = problem.gradient(at, 1, 2)
    loss, scaled = problem.gradient(at, 1, 2, loss_scale=2.0**7)
    assert loss == plain_loss
    # Scaled up, half precision keeps more of what is tiny: equal where the plain gradient is a normal number.
    normal = plain.abs() >= torch.finfo(dtype).tiny
    if spec.kind == "Digits":  # inner gradients that underflow unscaled take part in sums
        torch.testing.assert_close(scaled.float() / 2.0**7, plain.float(), rtol=1e-2, atol=1e-4)
        normal &= dtype != torch.float16
    assert torch.equal(scaled.float()[normal] / 2.0**7, plain.float()[normal])


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=2), st.sampled_from(["Ravine", "Saddle", "Cliff"]))
def test_objectives_of_many_points_are_the_objectives_of_each(point: list[float], kind: str) -> None:
    problem = build(gd.Experiment(problem=getattr(gd, kind)(start=point)))
    matrix = torch.tensor([point, [0.0, 0.0]])
    expected = [problem.objective(row) for row in matrix]
    np.testing.assert_allclose(problem.objectives(matrix), expected, rtol=1e-12)
    np.testing.assert_allclose(problem.objectives(matrix.numpy()), expected, rtol=1e-12)


def test_the_quadratic_objective_is_the_mean_over_the_workers() -> None:
    spec = gd.Quadratic(eigenvalues=((1.0, 2.0), (3.0, 4.0)), start=(1.0, 2.0), centers=((0.0, 1.0), (5.0, 2.0)))
    problem = build(_experiment(spec, precision="fp64"))
    at = torch.tensor([2.0, -1.0], dtype=torch.float64)
    # Worker 0: (1 * 4 + 2 * 4) / 2 = 6; worker 1: (3 * 9 + 4 * 9) / 2 = 31.5.
    assert [problem.loss(at, worker, 0).item() for worker in (0, 1)] == [6.0, 31.5]
    assert problem.objective(at) == 18.75
    assert problem.objectives(at[None]) == [18.75]
    assert build(gd.Experiment(problem=gd.Quadratic())).objectives([torch.tensor([3.0, 1.0])]) == [9.5]


def test_minima_are_where_they_are_said_to_be() -> None:
    for spec, minimum, value in ((gd.Ravine(), (1.0, 1.0), 0.0), (gd.Saddle(), (0.0, 1.0), -0.25),
                                 (gd.Saddle(), (0.0, -1.0), -0.25)):
        problem = build(gd.Experiment(problem=spec))
        at = torch.tensor(minimum)
        assert problem.objective(at) == value
        assert problem.gradient(at, 0, 0)[1].tolist() == [0.0, 0.0]


def test_the_cliffs_gradient_jumps_from_below_one_to_a_hundred() -> None:
    problem = build(gd.Experiment(problem=gd.Cliff(), precision="fp64"))
    before, after = (problem.gradient(torch.tensor([x, 0.0], dtype=torch.float64), 0, 0)[1][0] for x in (0.9, 1.1))
    assert -0.5 < before < 0 and after == pytest.approx(100 - 0.38, abs=0.01)


def test_noise_is_drawn_by_worker_and_step_and_the_loss_is_free_of_it() -> None:
    quiet, noisy = (build(_experiment(gd.Quadratic(noise=noise), seed=7, precision="fp64")) for noise in (0.0, 0.5))
    at = noisy.initial()
    keys = [(worker, step) for worker in (0, 1) for step in (0, 1, 63, 64, 500)]
    draws = {key: noisy.gradient(at, *key)[1] - quiet.gradient(at, *key)[1] for key in keys}
    again = {key: noisy.gradient(at, *key)[1] - quiet.gradient(at, *key)[1] for key in reversed(keys)}
    assert all(torch.equal(draws[key], again[key]) for key in keys)
    assert len({tuple(draw.tolist()) for draw in draws.values()}) == len(keys)
    assert all(noisy.gradient(at, *key)[0] == quiet.gradient(at, *key)[0] for key in keys)


@pytest.mark.parametrize(("size", "workers"), [(2, 1), (2, 100_000), (3_000, 4_000), (70_000, 1), (9_000, 10_000)])
def test_noise_is_the_same_in_any_order_however_little_of_it_is_kept(size: int, workers: int) -> None:
    seed, worker = 5, 3
    noise = Noise(seed, worker, size, 0.5, workers)
    length = max(1, min(64, 65_536 // size))
    steps = [0, 1, 2, 2, length - 1, length, length + length // 2, length, 3 * length, 1, 0]
    for step in steps:
        block, row = divmod(step, length)
        expected = laws.generator(seed, worker, block, laws.NOISE).standard_normal((length, size))[row] * 0.5
        for dtype in (torch.float64, torch.float32):
            assert torch.equal(noise.of(step, dtype), torch.from_numpy(expected).to(dtype))
    kept = noise._rows
    assert kept is None or kept.numel() * workers <= NOISE_KEPT
    assert kept is None or kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


def test_noise_has_the_standard_deviation_that_was_asked_for() -> None:
    problem = build(gd.Experiment(problem=gd.Quadratic(eigenvalues=(0.0,) * 50, start=(0.0,) * 50, noise=0.3)))
    draws = torch.stack([problem.gradient(torch.zeros(50), 0, step)[1] for step in range(400)])
    assert draws.std().item() == pytest.approx(0.3, rel=4 / math.sqrt(2 * draws.numel()))
    assert draws.mean().item() == pytest.approx(0.0, abs=4 * 0.3 / math.sqrt(draws.numel()))


def test_a_whole_shard_gives_the_exact_gradient_every_step() -> None:
    problem = build(gd.Experiment(problem=gd.Digits("logistic"), workers=1, batch_size=None))
    at = problem.initial()
    first, later = problem.gradient(at, 0, 0), problem.gradient(at, 0, 17)
    assert first[0] == later[0] and torch.equal(first[1], later[1])
    assert first[0] == pytest.approx(problem.objective(at), rel=1e-6)


def test_feature_scale_stretches_one_curvature_and_keeps_the_best_loss() -> None:
    def best(scale: float) -> tuple[float, float]:
        problem = build(gd.Experiment(problem=gd.LinearRegression(feature_scale=scale), workers=1, batch_size=None,
                                      precision="fp64"))
        zero, slopes = problem.gradient(torch.zeros(5, dtype=torch.float64), 0, 0)[1], []
        for axis in torch.eye(5, dtype=torch.float64):
            slopes.append(problem.gradient(axis, 0, 0)[1] - zero)
        hessian = torch.stack(slopes)
        return problem.objective(torch.linalg.solve(hessian, -zero)), torch.linalg.cond(hessian).item()

    (plain_loss, plain), (loss, stretched) = best(1.0), best(100.0)
    assert loss == pytest.approx(plain_loss, rel=1e-9)
    assert plain < 4 and stretched > 5000


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
def test_the_start_depends_on_the_seed_alone(model: str) -> None:
    starts = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        before = torch.random.get_rng_state()
        starts.append(build(gd.Experiment(problem=gd.Digits(model), workers=noise, seed=5)).initial())
        assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(*starts)
    assert not torch.equal(starts[0], build(gd.Experiment(problem=gd.Digits(model), seed=6)).initial())
    wide = build(gd.Experiment(problem=gd.Digits(model), seed=5, precision="fp64")).initial()
    assert wide.dtype == torch.float64 and torch.equal(wide.float(), starts[0])


def test_models_have_the_sizes_that_are_documented() -> None:
    sizes = {model: build(gd.Experiment(problem=gd.Digits(model))).size for model in ("logistic", "mlp", "cnn")}
    assert sizes == {"logistic": 650, "mlp": 2410, "cnn": 1898}


def test_accuracy_counts_what_is_classified_rightly() -> None:
    problem = build(gd.Experiment(problem=gd.Digits("logistic")))
    always_three = torch.zeros(650)
    always_three[-10 + 3] = 1.0
    assert problem.accuracy(always_three) == pytest.approx(183 / 1797)  # 183 of the digits are threes
    assert build(gd.Experiment(problem=gd.Quadratic())).accuracy(torch.zeros(2)) is None


# ---- the reader's own ----------------------------------------------------------------------------------------------

def _torch(name: str, **fields: object) -> gd.Experiment:
    return gd.Experiment(problem=gd.Torch(f"factories:{name}", shuffle=False), workers=2, **fields)


@pytest.fixture(autouse=True)
def _factories_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(__file__).rsplit("/", 1)[0])


@pytest.mark.parametrize(("name", "message"), [
    ("two_values", "returned 2 values: it must return"),
    ("no_model", "must be a torch.nn.Module"),
    ("no_loss", "a float as the loss"),
    ("no_parameters", "needs at least one trainable parameter"),
    ("no_data", "must be a tuple of tensors or a Dataset"),
    ("fails", "failed with FileNotFoundError: data.csv"),
    ("nobody", "has no function nobody"),
    ("not_a_function", "has no function not_a_function"),
])
def test_a_wrong_factory_is_explained_in_one_sentence(name: str, message: str) -> None:
    with pytest.raises(gd.ExperimentError, match=message):
        build(_torch(name))


def test_a_module_that_is_not_there_is_named() -> None:
    with pytest.raises(gd.ExperimentError, match="there is no module no_such_module"):
        build(gd.Experiment(problem=gd.Torch("no_such_module:make")))


def test_a_function_from_a_cell_runs_by_its_bytes_and_not_without_them() -> None:
    import factories

    exp = gd.Experiment(problem=factories.point, workers=2, precision="fp64")
    assert build(exp).objective(torch.zeros(1, dtype=torch.float64)) == pytest.approx((1 + 4 + 9 + 100) / 8)
    with pytest.raises(gd.ExperimentError, match="came from a notebook's cell"):
        build(gd.Experiment.from_json(exp.to_json()))
    with pytest.raises(gd.ExperimentError, match="its hash differs"):
        build(gd.Experiment.from_json(exp.to_json(), payload=b"other"))


def test_shuffle_off_keeps_the_readers_order() -> None:
    problem = build(_torch("point", shards=(0.75, 0.25), batch_size=None, precision="fp64"))
    zero = torch.zeros(1, dtype=torch.float64)
    assert [problem.gradient(zero, worker, 0)[1].item() for worker in (0, 1)] == [-2.0, -10.0]
    assert problem.samples == (3, 1)


def test_buffers_stay_with_each_worker_and_dropout_draws_by_step() -> None:
    problem, other = build(_torch("classes", batch_size=8)), build(_torch("classes", batch_size=8))
    at = problem.initial()
    assert torch.equal(at, other.initial())
    order = [(0, 0), (1, 0), (0, 1), (1, 1)]
    forward = {key: problem.gradient(at, *key) for key in order}
    backward = {key: other.gradient(at, *key) for key in order[::-1]}
    assert all(forward[key][0] == backward[key][0] for key in order)
    assert all(torch.equal(forward[key][1], backward[key][1]) for key in order)
    means = {worker: problem._buffers[worker][0] for worker in (0, 1)}
    assert not torch.equal(means[0], means[1])


def test_evaluating_changes_no_later_gradient() -> None:
    plain, watched = build(_torch("classes", batch_size=8)), build(_torch("classes", batch_size=8))
    at = plain.initial()
    for step in range(3):
        assert watched.objective(at) == watched.objective(at)
        assert 0 <= watched.accuracy(at) <= 1
        assert torch.equal(plain.gradient(at, 0, step)[1], watched.gradient(at, 0, step)[1])


def test_mixed_precision_uses_autocast_for_the_readers_own_module() -> None:
    mixed, plain = build(_torch("classes", precision="mixed_bf16")), build(_torch("classes"))
    at = mixed.initial()
    assert mixed.autocast == torch.bfloat16 and plain.autocast is None
    assert mixed.gradient(at, 0, 0)[1].dtype == torch.float32
    assert not torch.equal(mixed.gradient(at, 0, 0)[1], plain.gradient(at, 0, 0)[1])
