"""Runs in narrow formats on real ranks: mixed precision learns, underflow stalls, clipping saves a recurrent net."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from descending import Rounds
from processes import PATIENCE_S

import gdlab as gd
from gdlab.descent.problems import build
from gdlab.descent.store import Store
from gdlab.formats import facts
from gdlab.records import LOWEST_EXPONENT

# Curvatures of 1e-6 to 4e-6 under a rate to match: in exact arithmetic an ordinary descent. The gradients, up to 4e-9,
# are below half of fp16's smallest number, 2^-25.
UNDERFLOW = gd.Quadratic(tuple(np.geomspace(1e-6, 4e-6, 16)), (1e-3, -1e-3) * 8)
RATE = gd.SGD(50_000.0)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def all_of(*experiments: gd.Experiment) -> list[gd.Trace]:
    runs = [gd.launch(exp) for exp in experiments]
    return [run.wait(PATIENCE_S) for run in runs]


def test_four_real_ranks_in_mixed_fp16_learn_the_digits_as_well_as_in_fp32() -> None:
    fp32, mixed = all_of(*(gd.Experiment(gd.Digits("mlp"), precision=name) for name in ("fp32", "mixed_fp16")))
    accuracies = [trace.summary()["accuracy"] for trace in (fp32, mixed)]
    assert min(accuracies) > 0.9 and abs(accuracies[0] - accuracies[1]) < 0.01
    assert not np.array_equal(fp32.path[-1], mixed.path[-1])
    assert set(mixed.exponents["loss_scale"]) <= {2.0**k for k in range(30)} and mixed.summary()["underflow"] < 0.01


def test_pure_fp16_stalls_on_a_problem_scaled_to_underflow_and_a_loss_scale_mends_it() -> None:
    fp32, pure, mixed, static = all_of(*(gd.Experiment(UNDERFLOW, optimizer=RATE, updates=30, precision=precision)
                                         for precision in ("fp32", "fp16", "mixed_fp16",
                                                           gd.Precision("fp16", loss_scale=2.0**16))))
    ends = {name: trace.losses[-1] / trace.losses[0] for name, trace in
            (("fp32", fp32), ("pure", pure), ("mixed", mixed), ("static", static))}
    assert pure.summary()["lost_fraction"] > 0.5 and pure.summary()["underflow"] > 0.5
    # The path to the bit; its loss to rounding, since a sum over a batch of versions may run in another order.
    assert (pure.path == pure.path[0]).all() and ends["pure"] == pytest.approx(1.0, rel=1e-12)
    assert (pure.exponents["zeros"] > 8).all()
    for name, trace in (("mixed", mixed), ("static", static)):
        assert trace.summary()["lost_fraction"] < 0.01, name
        assert ends[name] == pytest.approx(ends["fp32"], rel=0.05) and ends[name] < 0.05
    # As the exponents say: below fp16's range without a loss scale, well inside of it with one.
    lifted = np.flatnonzero(static.exponents[0]["counts"]) + LOWEST_EXPONENT
    assert lifted.min() > np.log2(facts("fp16").min_subnormal)


@pytest.mark.parametrize("seed", range(5))
def test_the_recurrent_net_diverges_without_a_clip_and_converges_with_one(seed: int) -> None:
    base = gd.Experiment(gd.Sequence(), seed=seed)
    without, clipped = all_of(base.replace(updates=40), base.replace(clip=gd.Clip(norm=1.0)))
    assert not np.isfinite(without.path[-1]).all() and without.summary()["nonfinite"] > 0
    summary = clipped.summary()
    assert np.isfinite(clipped.path).all() and summary["nonfinite"] == 0 and summary["clipped"] > 0
    # To always answer 0 costs about 1, the numbers' variance.
    assert summary["final_loss"] < 0.3 and clipped.losses[0] > 10
    assert clipped.applied["grad_norm"].max() > 1000


def test_the_recurrent_net_multiplies_gradients_by_the_radius_each_step_back() -> None:
    def slope(radius: float, length: int) -> float:
        problem = build(gd.Experiment(gd.Sequence(length=length, radius=radius), workers=1, batch_size=None))
        x = torch.zeros(1, length, dtype=torch.float64, requires_grad=True)
        module = problem._module
        return torch.autograd.grad(module(x).sum(), x)[0][0, 0].norm().item()

    for radius in (0.8, 1.0, 1.2):
        # Norms of v^T W^k u: W is the radius times a rotation, so only its angle makes up for the rest.
        ratio = np.mean([slope(radius, k) / radius ** (k - 1) for k in range(2, 40)])
        base = np.mean([slope(1.0, k) for k in range(2, 40)])
        assert ratio == pytest.approx(base, rel=1e-9)


def test_every_recurrent_net_is_made_from_its_seed_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, again, other = (build(gd.Experiment(gd.Sequence(), seed=seed)).initial() for seed in (1, 1, 2))
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    assert one.numel() == 16 + 16 + 16 * 16 + 16 + 1


# ---- the order of a sum ----------------------------------------------------------------------------------------------

VALUES = [1e8, 1.0, -1e8, 1.0]  # exactly 2


def summed(order: str, rows: list[list[float]], reduce: str = "fp32") -> list[float]:
    exp = gd.Experiment(gd.Quadratic((1.0,) * len(rows[0]), (0.0,) * len(rows[0])), workers=len(rows),
                        reduce_order=order, combine="sum", optimizer=gd.SGD(1.0), precision=gd.Precision(reduce=reduce))
    store = Store(exp, build(exp))
    run = Rounds(exp).run(1)
    pushes = [push._replace(grad=torch.tensor(row, dtype=push.grad.dtype))
              for push, row in zip(run.pushes, rows, strict=True)]
    store.apply(pushes, [0] * len(rows))
    return (-store.params).tolist()


def test_the_order_of_the_sum_decides_its_value() -> None:
    assert summed("sequential", [[v] for v in VALUES]) == [1.0]  # ((0 + 1) + 2) + 3
    assert summed("tree", [[v] for v in VALUES]) == [0.0]  # (0 + 1) + (2 + 3)
    # In a ring each of the four pieces begins at another rank, so equal columns get unequal sums.
    assert summed("ring", [[v] * 4 for v in VALUES]) == [1.0, 0.0, 1.0, 0.0]
    assert summed("sequential", [[v] * 4 for v in VALUES]) == [1.0] * 4


@pytest.mark.parametrize("order", ["ring", "tree", "sequential"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_in_whole_numbers_every_order_gives_the_same_sum(order: str, workers: int) -> None:
    rows = np.random.default_rng(workers).integers(-1000, 1000, (workers, 7)).astype(float)
    assert summed(order, rows.tolist()) == rows.sum(0).tolist()


@pytest.mark.parametrize("order", ["sequential", "tree", "ring"])
def test_a_sum_in_fp16_overflows_before_it_is_divided(order: str) -> None:
    assert summed(order, [[40_000.0]] * 4, "fp16") == [np.inf]  # though their mean is 40,000
    far = [[40_000.0], [40_000.0], [-40_000.0], [-40_000.0]]
    assert not np.isfinite(summed(order, far, "fp16")).any()
    assert summed(order, [far[k] for k in (0, 2, 1, 3)], "fp16") == [0.0]  # on its way it never leaves the range


def test_a_tree_of_many_small_parts_loses_less_than_a_long_sum() -> None:
    rows = [[0.1]] * 4096
    errors = {order: abs(summed(order, rows)[0] - 409.6) for order in ("sequential", "tree")}
    assert errors["tree"] < errors["sequential"] / 10


@pytest.mark.parametrize("order", ["ring", "tree"])
def test_real_ranks_and_a_server_sum_in_the_same_order_as_virtual_time(order: str) -> None:
    exp = gd.Experiment(gd.Digits("logistic"), strategy=gd.Sync(exchange="server"), updates=5, reduce_order=order)
    (real,) = all_of(exp)
    virtual = gd.run(exp, backend="virtual")
    assert np.array_equal(real.path, virtual.path)
    assert real.environment["reduce_order"] == f"{order}, in order of ranks"
