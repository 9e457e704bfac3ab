"""The virtual backend: identities, clocks, ends and determinism."""

import filecmp
import itertools
import math
import tempfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gdlab as gd
from gdlab.backends import costs
from gdlab.backends.virtual import simulate

ALONE = {
    "all-reduce": gd.Sync(),
    "server": gd.Sync(exchange="server"),
    "no backups": gd.Sync(backups=0, exchange="server"),
    "async": gd.Async(),
    "bound 0": gd.Async(staleness_bound=0),
    "bound 5": gd.Async(staleness_bound=5),
    "local": gd.LocalSGD(period=1),
}
QUADRATIC = gd.Quadratic(eigenvalues=(1.0, 10.0), start=(3.0, 1.0), noise=0.3)
SLOW = (1.0, 1.0, 1.0, 0.25)


@pytest.fixture
def run(tmp_path):
    folders = (tmp_path / f"{number}" for number in itertools.count())

    def run(exp=None, /, **fields):
        exp = exp or gd.Experiment(**({"problem": QUADRATIC, "optimizer": gd.SGD(lr=0.05), "updates": 50} | fields))
        return simulate(exp, next(folders))

    return run


def plain_loop(exp):
    """Descend as one would in a notebook, with nothing of gdlab but the gradient."""
    from gdlab.descent.problems import build

    problem = build(exp)
    x = torch.nn.Parameter(problem.initial())
    spec = exp.optimizer
    optimizer = torch.optim.SGD([x], lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
    path = [x.detach().clone()]
    for step in range(exp.updates):
        optimizer.zero_grad()
        x.grad = problem.gradient(x.detach(), 0, step)[1].clone()
        optimizer.step()
        path.append(x.detach().clone())
    return torch.stack(path).numpy()


@pytest.mark.parametrize("problem", [QUADRATIC, gd.Ravine(), gd.Digits("mlp")], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_worker_is_plain_descent_under_every_strategy(run, problem, momentum):
    lr = 0.001 if isinstance(problem, gd.Ravine) else 0.05
    base = gd.Experiment(problem=problem, workers=1, optimizer=gd.SGD(lr=lr, momentum=momentum), updates=20,
                         compute_time=gd.Gamma(0.05, 0.5), network=gd.Network(0.1, 0.1, 0.1))
    expected = plain_loop(base)
    times = set()
    for name, strategy in ALONE.items():
        trace = run(base.replace(strategy=strategy))
        assert trace.path.tobytes() == expected.tobytes(), name
        times.add(tuple(trace.pushes[name].tobytes() for name in ("start_s", "computed_s", "applied_s", "released_s")))
    assert len(times) == 1


def test_the_same_experiment_writes_the_same_bytes(run):
    for strategy in (gd.Sync(backups=1, exchange="server"), gd.Async(staleness_bound=1, batch=2), gd.LocalSGD(3)):
        first, second = (run(strategy=strategy, compute_time=gd.Exponential(0.05), seconds=2.0) for _ in range(2))
        for name in ("events-virtual.bin", "path.bin"):
            assert filecmp.cmp(first.folder / name, second.folder / name, shallow=False)


def test_a_slow_worker_costs_sync_time_and_nothing_else(run):
    even = run(compute_time=gd.Exponential(0.05), updates=400)
    uneven = run(compute_time=gd.Exponential(0.05), updates=400, speeds=SLOW)
    assert uneven.path.tobytes() == even.path.tobytes()
    # Exact by inclusion and exclusion: E[max] of rates (1, 1, 1, 1/4) over E[max] of four equal ones, H_4.
    ratio = expected_maximum(SLOW) / expected_maximum((1, 1, 1, 1))
    assert ratio == pytest.approx(2.14, abs=0.01)
    assert uneven.summary()["seconds"] / even.summary()["seconds"] == pytest.approx(ratio, rel=0.15)


def expected_maximum(rates):
    subsets = itertools.chain.from_iterable(itertools.combinations(rates, k) for k in range(1, len(rates) + 1))
    return sum((-1) ** (len(subset) + 1) / sum(subset) for subset in subsets)


def test_a_slow_worker_costs_async_its_share_of_gradients_only(run):
    even = run(strategy="async", compute_time=gd.Exponential(0.05), updates=4000)
    uneven = run(strategy="async", compute_time=gd.Exponential(0.05), updates=4000, speeds=SLOW)
    assert uneven.path.tobytes() != even.path.tobytes()
    assert uneven.summary()["seconds"] / even.summary()["seconds"] == pytest.approx(4 / 3.25, rel=0.08)


def test_four_equal_asynchronous_workers_are_three_updates_late(run):
    assert run(strategy="async", updates=1000).summary()["mean_staleness"] == pytest.approx(3.0, abs=0.05)
    memoryless = run(strategy="async", updates=1000, compute_time=gd.Exponential(0.05))
    assert memoryless.summary()["mean_staleness"] == pytest.approx(3.0, abs=0.05)


@pytest.mark.parametrize("strategy", [gd.Sync(), gd.Sync(1, "server"), gd.Async(), gd.Async(2), gd.Async(batch=3),
                                      gd.LocalSGD(2)], ids=repr)
@pytest.mark.parametrize("factor", [2.0, 1024.0, 1.7])
def test_scaled_time_takes_the_same_path(run, strategy, factor):
    slow = run(strategy=strategy, compute_time=gd.Exponential(0.05 * factor))
    fast = run(strategy=strategy, compute_time=gd.Exponential(0.05))
    assert slow.path.tobytes() == fast.path.tobytes()
    assert slow.applied["applied_s"] == pytest.approx(factor * fast.applied["applied_s"], rel=1e-12)


@pytest.mark.parametrize("strategy", [gd.Sync(), gd.Sync(2, "server"), gd.Async(), gd.Async(1), gd.Async(batch=3),
                                      gd.Async(0, 2), gd.LocalSGD(2)], ids=repr)
def test_rows_tell_a_consistent_life(run, strategy):
    network = gd.Network(latency_s=0.004, seconds_per_byte=1e-5, server_s=0.002)
    trace = run(strategy=strategy, compute_time=gd.Exponential(0.05), network=network, workers=5, updates=60)
    rows, applied = trace.pushes, trace.applied
    keys = set(zip(rows["worker"].tolist(), rows["step"].tolist(), strict=True))
    assert len(keys) == len(rows)
    assert sorted(set(applied["version"].tolist())) == list(range(1, 61))
    assert np.all(applied["start_s"] <= applied["computed_s"])
    assert np.all(applied["computed_s"] <= applied["applied_s"])
    assert np.all(np.diff(applied["applied_s"]) >= 0)
    assert np.all(applied["version"] - 1 - applied["read_version"] == applied["staleness"])
    if not isinstance(strategy, gd.Async):
        assert np.all(applied["staleness"] == 0)
    for worker in range(5):
        mine = np.sort(rows[rows["worker"] == worker], order="step")
        assert mine["step"].tolist() == list(range(len(mine)))
        assert np.all(mine["start_s"][1:] == mine["released_s"][:-1])
    end_s = applied["applied_s"].max()
    lost = rows[rows["version"] < 0]
    assert np.all(np.isnan(lost["computed_s"]) | (lost["computed_s"] <= end_s + 0.01))
    assert trace.path_versions.tolist() == list(range(61))


LAWS = st.one_of(
    st.sampled_from([gd.Constant(0.0), gd.Constant(0.05), gd.Spike(0.05, 0.5, 0.2)]),
    st.builds(gd.Exponential, st.floats(0.01, 1.0)),
    st.builds(gd.Pareto, st.floats(0.01, 1.0), st.floats(1.1, 3.0)),
)


@st.composite
def experiments(draw):
    workers = draw(st.integers(1, 6))
    strategy = draw(st.one_of(
        st.builds(gd.Sync, st.integers(0, workers - 1), st.just("server")),
        st.just(gd.Sync()),
        st.builds(gd.Async, st.none() | st.integers(0, 3), st.integers(1, 4),
                  st.sampled_from(["none", "inverse", "delay_compensation"])),
        st.builds(gd.LocalSGD, st.integers(1, 3)),
    ))
    cost = st.sampled_from([0.0, 0.0, 0.01, 0.3])
    return gd.Experiment(
        problem=QUADRATIC, workers=workers, strategy=strategy, compute_time=draw(LAWS), optimizer=gd.SGD(lr=0.01),
        speeds=draw(st.none() | st.tuples(*[st.sampled_from([0.25, 1.0, 2.0])] * workers)),
        network=gd.Network(draw(cost), draw(st.sampled_from([0.0, 0.001])), draw(cost)),
        updates=draw(st.integers(1, 12)), seconds=draw(st.none() | st.floats(0.01, 3.0)), seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=60)
@given(experiments())
def test_any_experiment_loses_no_push_and_keeps_its_clock(exp):
    with tempfile.TemporaryDirectory() as folder:
        trace = simulate(exp, folder)
        rows, applied = trace.pushes.copy(), trace.applied.copy()
        versions, ended = trace.path_versions.tolist(), trace.ended["reason"]
    last = max(versions)
    assert versions == list(range(last + 1))
    assert sorted(set(applied["version"].tolist())) == versions[1:]
    assert (ended == "updates") == (last == exp.updates)
    end_s = exp.seconds if ended == "seconds" else applied["applied_s"].max()
    for name in ("applied_s", "computed_s"):
        finite = rows[name][np.isfinite(rows[name])]
        assert np.all(finite <= end_s) or (exp.strategy.kind == "Sync" and exp.strategy.backups)
    assert np.all(applied["start_s"] <= applied["computed_s"]) and np.all(applied["computed_s"] <= applied["applied_s"])
    assert np.all(np.diff(applied["applied_s"]) >= 0)
    assert np.all(applied["version"] - 1 - applied["read_version"] == applied["staleness"])
    assert np.all((applied["staleness"] == 0) | (exp.strategy.kind == "Async"))
    for worker in range(exp.workers):
        mine = np.sort(rows[rows["worker"] == worker], order="step")
        assert mine["step"].tolist() == list(range(len(mine)))
        assert np.all(mine["start_s"][1:] == mine["released_s"][:-1])
    if exp.strategy.kind == "Async" and exp.strategy.staleness_bound is not None:
        # Nobody starts a step while more than the bound ahead of the slowest (rule A).
        for row in rows[rows["step"] > 0]:
            served = [np.sum((rows["worker"] == w) & (rows["applied_s"] <= row["start_s"])) for w in range(exp.workers)]
            if exp.strategy.batch == 1:
                assert row["step"] - min(served) <= exp.strategy.staleness_bound


def test_messages_and_the_server_queue_cost_what_the_network_says(run):
    # Two parameters of four bytes: a message takes 0.5 + 8 * 0.0625 = 1 s; compute takes 2 s.
    network = gd.Network(latency_s=0.5, seconds_per_byte=0.0625, server_s=0.25)
    fields = {"compute_time": gd.Constant(2.0), "network": network, "workers": 2, "updates": 4}
    rows = run(strategy="async", **fields).applied
    assert rows["applied_s"].tolist() == [3.25, 3.5, 7.5, 7.75]
    assert rows["start_s"].tolist() == [0.0, 0.0, 4.25, 4.5]
    rows = run(strategy=gd.Sync(exchange="server"), **fields | {"updates": 2}).applied
    assert rows["applied_s"].tolist() == [3.5, 3.5, 7.75 + 0.25, 7.75 + 0.25]
    assert rows["released_s"][:2].tolist() == [4.5, 4.5]
    rows = run(strategy=gd.Sync(), **fields | {"updates": 2}).applied
    ring_s = gd.theory.allreduce_time(8, 2, 0.5, 0.0625)
    assert rows["applied_s"].tolist() == [2 + ring_s] * 2 + [4 + 2 * ring_s] * 2
    half = run(strategy="async", precision=gd.Precision(reduce="fp16"), **fields).applied
    assert half["applied_s"][0] == 2.0 + 0.75 + 0.25


def test_local_steps_each_take_their_own_time(run):
    law = gd.Exponential(0.05)
    rows = run(strategy=gd.LocalSGD(3), compute_time=law, workers=2, updates=2).applied
    for row in rows:
        steps = range(3 * row["step"], 3 * row["step"] + 3)
        drawn = sum(law.draw(0, int(row["worker"]), step) for step in steps)
        assert row["computed_s"] - row["start_s"] == pytest.approx(drawn, rel=1e-12)


def test_local_iterates_are_recorded_and_average_to_the_path(run):
    trace = run(strategy=gd.LocalSGD(3), workers=2, updates=4)
    paths = trace.local_path
    assert [records["version"].tolist() for records in paths.values()] == [list(range(1, 13))] * 2
    for version in range(1, 5):
        ends = [records["x"][3 * version - 1] for records in paths.values()]
        assert trace.path[version] == pytest.approx(np.mean(ends, axis=0), rel=1e-6)


def test_no_event_is_later_than_the_seconds_allowed(run):
    for strategy in (gd.Sync(), gd.Sync(exchange="server"), gd.Async(), gd.LocalSGD(2)):
        trace = run(strategy=strategy, updates=None, seconds=1.0, compute_time=gd.Exponential(0.05),
                    network=gd.Network(latency_s=0.01))
        rows = trace.pushes
        assert len(trace.applied) > 4 and trace.ended == {"how": "done", "reason": "seconds"}
        assert np.nanmax(rows["applied_s"]) <= 1.0 and np.nanmax(rows["computed_s"]) <= 1.0


def test_gradients_that_the_end_overtook_are_recorded_and_not_applied(run):
    rows = run(strategy="sync", updates=None, seconds=1.0, compute_time=gd.Exponential(0.3)).pushes
    lost = rows[rows["version"] == -1]
    assert 1 <= len(lost) <= 3
    assert np.all(np.isfinite(lost["loss"])) and np.all(np.isnan(lost["applied_s"]))
    assert np.all(np.isnan(lost["released_s"]))


def test_the_target_loss_ends_the_run_at_the_first_version_that_reaches_it(run):
    trace = run(problem=gd.Quadratic(), updates=500, target_loss=0.5)
    from gdlab.descent.problems import build

    losses = build(trace.experiment).objectives(trace.path.copy())
    assert trace.ended["reason"] == "target_loss"
    assert losses[-1] <= 0.5 < losses[-2]


def test_backup_workers_give_up_late_steps_and_leave_a_row(run):
    trace = run(strategy=gd.Sync(1, "server"), compute_time=gd.Constant(0.05), speeds=(1, 1, 1, 0.4), updates=3)
    rows = trace.pushes
    assert set(trace.applied["worker"].tolist()) == {0, 1, 2}
    late = rows[rows["version"] == -1]
    assert late["worker"].tolist() == [3, 3]
    assert late["step"].tolist() == [0, 1]
    assert np.all(np.isnan(late["computed_s"])) and np.all(np.isnan(late["loss"]))
    assert late["released_s"] == pytest.approx([0.05, 0.1])


def test_a_bound_holds_back_and_says_until_when(run):
    rows = run(strategy=gd.Async(staleness_bound=1), compute_time=gd.Constant(1.0), speeds=(1, 0.25), workers=2,
               updates=6).pushes
    fast = np.sort(rows[rows["worker"] == 0], order="step")
    # It may be two finished steps ahead, then waits for the slow one at 4 s.
    assert fast["start_s"][:3].tolist() == [0.0, 1.0, 4.0]
    assert fast["released_s"][:2].tolist() == [1.0, 4.0]


def test_steps_that_take_no_time_let_everybody_move(run):
    trace = run(strategy="async", compute_time=gd.Constant(0.0), updates=12)
    assert trace.applied["worker"].tolist() == [0, 1, 2, 3] * 3
    assert np.all(trace.applied["applied_s"] == 0.0)


def test_equal_moments_are_served_in_rank_order(run):
    trace = run(strategy="async", compute_time=gd.Constant(0.05), updates=12)
    assert trace.applied["worker"].tolist() == [0, 1, 2, 3] * 3
    assert trace.applied["staleness"].tolist() == [0, 1, 2, 3] + [3] * 8


def test_a_stop_ends_the_run_with_what_there_is(tmp_path):
    asked = iter([False, False, True])
    exp = gd.Experiment(problem=QUADRATIC, updates=1_000_000)
    trace = simulate(exp, tmp_path, stop=lambda: next(asked))
    assert trace.ended == {"how": "stopped", "reason": "stop"}
    assert 0 < trace.summary()["updates"] < 1_000_000
    assert trace.path_versions[-1] == trace.summary()["updates"]


def test_a_run_that_is_going_on_can_be_read(tmp_path):
    seen = []

    def stop():
        trace = gd.open_trace(tmp_path)
        seen.append((len(trace.pushes), len(trace.path)))
        return len(seen) > 4

    simulate(gd.Experiment(problem=QUADRATIC, updates=1_000_000), tmp_path, stop)
    assert all(later > earlier for earlier, later in itertools.pairwise(seen))
    assert all(pushes <= 4 * versions for pushes, versions in seen)


def test_a_run_that_diverges_says_so_with_infinities_and_ends(run):
    trace = run(problem=gd.Quadratic(eigenvalues=(1.0, 1000.0)), optimizer=gd.SGD(lr=1.0), updates=100)
    assert trace.summary()["updates"] == 100
    assert not np.isfinite(trace.path[-1]).all()
    assert trace.pushes["nonfinite"].max() > 0


def test_bytes_on_the_wire_follow_the_format():
    assert [costs.message_bytes(name) for name in ("fp64", "fp32", "tf32", "bf16", "fp8_e4m3")] == [8, 4, 4, 2, 1]
    assert costs.message_bytes("Float(5, 2)") == 1


def test_many_workers_make_a_few_updates(run):
    trace = run(workers=5000, updates=2, strategy="sync")
    assert len(trace.applied) == 10_000
    trace = run(workers=5000, updates=3, strategy=gd.Async(staleness_bound=2), compute_time=gd.Exponential(0.05))
    assert math.isfinite(trace.summary()["seconds"])
