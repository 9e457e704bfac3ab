"""Real runs on this machine: the same bits as virtual time and as a plain loop, real stragglers, every end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from processes import PATIENCE_S, alive, until

import gdlab as gd
from gdlab.backends.virtual import simulate
from gdlab.descent.problems import build

SERVER = gd.Sync(exchange="server")
ALONE = [gd.Sync(), SERVER, gd.Async(), gd.Async(staleness_bound=0), gd.Async(staleness_bound=5), gd.LocalSGD(1)]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def quick(**fields) -> gd.Experiment:
    """A small experiment whose evaluator has little to do."""
    return gd.Experiment(**{"problem": gd.Quadratic(), "workers": 4, "updates": 30, "optimizer": gd.SGD(0.02)} | fields)


def all_of(*experiments: gd.Experiment) -> list[gd.Trace]:
    """Run several experiments at once on real ranks."""
    runs = [gd.launch(exp) for exp in experiments]
    return [run.wait(PATIENCE_S) for run in runs]


def plain_loop(exp: gd.Experiment) -> np.ndarray:
    """Descend with torch.optim.SGD and nothing else; return the path."""
    problem = build(exp)
    x = problem.initial()
    optimizer = torch.optim.SGD([x], exp.optimizer.lr, exp.optimizer.momentum, weight_decay=exp.optimizer.weight_decay)
    path = [x.clone()]
    for step in range(exp.updates):
        _, x.grad = problem.gradient(x, 0, step)
        optimizer.step()
        path.append(x.clone())
    return torch.stack(path).numpy()


# ---- the same bits -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("problem", [gd.Quadratic(noise=0.1), gd.Digits("logistic")], ids=["Quadratic", "Digits"])
def test_one_real_worker_is_a_plain_loop_bit_for_bit_under_every_strategy(problem, tmp_path):
    base = gd.Experiment(problem=problem, workers=1, updates=12, optimizer=gd.SGD(0.05, 0.9, 0.01), seed=3)
    exact = plain_loop(base)
    experiments = [base.replace(strategy=strategy) for strategy in ALONE]
    for exp, trace in zip(experiments, all_of(*experiments), strict=True):
        assert np.array_equal(trace.path, exact), exp.strategy
        simulated = simulate(exp, tmp_path / repr(exp.strategy))
        assert np.array_equal(simulated.path, exact), exp.strategy
        for name in ("step", "read_version", "version", "staleness", "loss", "grad_norm"):
            assert np.array_equal(trace.applied[name], simulated.applied[name]), (exp.strategy, name)


def test_four_real_workers_and_a_server_give_virtual_times_bits(tmp_path):
    base = gd.Experiment(problem=gd.Digits("logistic"), strategy=SERVER, updates=10)
    experiments = [base, base.replace(compute_time=gd.Exponential(0.01), speeds=(1, 1, 1, 0.5)),
                   base.replace(precision="mixed_fp16", clip=gd.Clip(norm=0.5)),
                   base.replace(precision="bf16", clip=gd.Clip(norm=0.1, where="average"), combine="sum")]
    traces = all_of(*experiments)
    for number, (exp, trace) in enumerate(zip(experiments, traces, strict=True)):
        simulated = simulate(exp, tmp_path / str(number))
        assert np.array_equal(trace.path, simulated.path)
        for name in ("worker", "step", "version", "loss", "grad_norm", "clip_scale", "loss_scale", "lost_fraction"):
            ours, theirs = (np.sort(t.applied, order=["version", "worker"])[name] for t in (trace, simulated))
            assert np.array_equal(ours, theirs, equal_nan=True), name
    assert np.array_equal(traces[0].path, traces[1].path)


@pytest.mark.parametrize("fields", [{}, {"precision": "fp64", "combine": "weighted", "shards": (0.4, 0.3, 0.2, 0.1)},
                                    {"strategy": gd.LocalSGD(3)}, {"precision": "mixed_bf16", "clip": 0.5}],
                         ids=["fp32", "fp64 weighted", "LocalSGD", "mixed_bf16 clipped"])
def test_an_all_reduce_differs_from_virtual_time_only_by_the_order_of_the_sum(fields, tmp_path):
    exp = gd.Experiment(**{"problem": gd.Digits("logistic"), "updates": 10} | fields)
    trace = gd.run(exp)
    simulated = simulate(exp, tmp_path / "virtual")
    tight = 1e-12 if fields.get("precision") == "fp64" else 1e-5
    np.testing.assert_allclose(trace.path, simulated.path, rtol=tight, atol=tight)
    assert len(trace.applied) == 40 and set(trace.applied["worker"]) == {0, 1, 2, 3}


def test_virtual_time_in_a_process_of_its_own_writes_the_same_bytes(tmp_path):
    exp = quick(strategy="async", compute_time=gd.Exponential(0.05))
    run = gd.launch(exp, backend="virtual")
    trace = run.wait(PATIENCE_S)
    assert run.pids == () and trace.environment["clock"] == "virtual" and trace.ended["reason"] == "updates"
    simulate(exp, tmp_path / "here")
    for name in ("events-virtual.bin", "path.bin"):
        assert (run.folder / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


# ---- what the trace says -------------------------------------------------------------------------------------------

def test_a_real_run_records_its_machine_its_times_and_the_objective_along_its_path():
    exp = quick(compute_time=gd.Exponential(0.01))
    trace = gd.run(exp)
    environment, rows = trace.environment, trace.applied
    expected = {"backend": "local", "clock": "wall", "ranks": 4, "threads": 1, "device": "cpu", "group_backend": "gloo"}
    assert {name: environment[name] for name in expected} == expected
    assert environment["versions"]["torch"] == torch.__version__ and environment["cores"] >= 1
    assert trace.ended["how"] == "done" and trace.ended["updates"] == 30
    drawn = np.array([exp.times.draw(worker, step) for worker, step in rows[["worker", "step"]].tolist()])
    assert (rows["computed_s"] - rows["start_s"] >= drawn - 1e-6).all()
    assert (rows["start_s"] >= 0).all() and (rows["applied_s"] >= rows["computed_s"]).all()
    again = rows["version"] < 30
    assert np.array_equal(rows["released_s"][again] >= rows["applied_s"][again], np.ones(again.sum(), bool))
    problem = build(exp)
    assert np.array_equal(trace.path_versions, np.arange(31))
    expected = [problem.objective(torch.from_numpy(x.copy())) for x in trace.path]
    np.testing.assert_allclose(trace.losses, expected, rtol=1e-6)
    assert trace.surface["loss"].ndim == 2


def test_asynchronous_pushes_are_each_applied_once_with_their_true_staleness():
    trace = gd.run(quick(strategy="async", updates=400, compute_time=gd.Constant(0.002), optimizer=gd.SGD(0.001)))
    rows = trace.applied
    assert rows["version"].tolist() == list(range(1, 401))
    assert np.array_equal(rows["staleness"], rows["version"] - 1 - rows["read_version"])
    keys = set(trace.pushes[["worker", "step"]].tolist())
    assert len(keys) == len(trace.pushes)
    # Each update is one that every other worker waits through, once, however slow the machine makes it.
    last_read = np.zeros(4, dtype=int)
    np.maximum.at(last_read, rows["worker"], rows["version"])
    assert rows["staleness"].sum() + (400 - last_read).sum() == 3 * 400
    for worker in range(4):
        steps = np.sort(trace.pushes["step"][trace.pushes["worker"] == worker])
        assert np.array_equal(steps, np.arange(len(steps)))


@pytest.mark.parametrize("bound", [0, 2])
def test_no_real_worker_starts_a_step_beyond_the_staleness_bound(bound):
    trace = gd.run(quick(strategy=gd.Async(staleness_bound=bound), updates=120, compute_time=gd.Exponential(0.003),
                         speeds=(1, 1, 1, 0.3)))
    finished = [np.sort(trace.applied["applied_s"][trace.applied["worker"] == worker]) for worker in range(4)]
    for push in trace.pushes[trace.pushes["step"] > bound]:
        # Whoever starts step k needs everybody to have finished k - bound steps.
        needed = push["step"] - bound
        for times in finished:
            assert len(times) >= needed and times[needed - 1] <= push["start_s"]


def test_backup_workers_drop_the_late_pushes_and_use_up_their_steps():
    trace = gd.run(quick(strategy=gd.Sync(backups=1, exchange="server"), compute_time=gd.Exponential(0.01)))
    rows = trace.applied
    assert np.array_equal(np.bincount(rows["version"])[1:], np.full(30, 3))
    dropped = trace.pushes[(trace.pushes["version"] < 0) & (trace.pushes["read_version"] < 30)]
    made = set(rows[["version", "worker"]].tolist())
    late = {(version, worker) for version in range(1, 31) for worker in range(4)} - made
    assert len(dropped) and {(push["read_version"] + 1, push["worker"]) for push in dropped} <= late
    keys = trace.pushes[["worker", "step"]].tolist()
    assert len(set(keys)) == len(keys)


def test_local_sgd_averages_parameters_every_period():
    trace = gd.run(quick(strategy=gd.LocalSGD(5), updates=6, problem=gd.Quadratic((1.0, 2.0), (3.0, 1.0))))
    # Equal workers without noise: averaging changes nothing, so version k is 5 k plain steps.
    shrink = (1 - 0.02 * np.array([1.0, 2.0])) ** (5 * np.arange(7)[:, None])
    np.testing.assert_allclose(trace.path, np.array([3.0, 1.0]) * shrink, rtol=1e-5)
    assert [records["version"].tolist() for records in trace.local_path.values()] == [list(range(1, 31))] * 4
    np.testing.assert_allclose(trace.local_path[3]["x"][4::5], trace.path[1:], rtol=1e-5)


def test_messages_take_the_time_that_the_experiment_gives_them():
    slow = gd.Network(latency_s=0.02, server_s=0.005)
    base = quick(workers=2, updates=5, network=slow)
    over_server, over_allreduce = all_of(base.replace(strategy=SERVER), base)
    for push in over_server.applied:
        assert push["applied_s"] - push["computed_s"] >= 0.025
    late = over_server.applied["start_s"][over_server.applied["step"] > 0]
    assert (late[::2] >= np.unique(over_server.applied["applied_s"])[:4] + 0.02).all()
    # A ring of two ranks passes two messages on.
    assert (over_allreduce.applied["applied_s"] - over_allreduce.applied["computed_s"] >= 0.04).all()


# ---- how a run ends ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("strategy", [gd.Sync(), SERVER, gd.Async()], ids=["allreduce", "server", "async"])
def test_a_run_ends_when_its_time_is_up_and_nothing_is_applied_later(strategy):
    trace = gd.run(quick(strategy=strategy, updates=None, seconds=0.3, compute_time=gd.Constant(0.02)))
    assert trace.ended["reason"] == "seconds"
    assert trace.applied["computed_s"].max() <= 0.3 and len(trace.applied) >= 4
    assert trace.path_versions[-1] == trace.applied["version"].max()


@pytest.mark.parametrize("strategy", [gd.Sync(), gd.Async()], ids=["allreduce", "async"])
def test_a_run_ends_when_the_target_is_reached(strategy):
    trace = gd.run(quick(strategy=strategy, updates=100_000, target_loss=0.5, compute_time=gd.Constant(0.002)))
    assert trace.ended["reason"] == "target_loss" and np.nanmin(trace.losses) <= 0.5


@pytest.mark.parametrize("strategy", [gd.Sync(), SERVER, gd.Async(), gd.LocalSGD()], ids=lambda s: type(s).__name__)
def test_a_stopped_run_leaves_a_readable_trace_and_no_process(strategy):
    run = gd.launch(quick(strategy=strategy, updates=None, seconds=100, compute_time=gd.Exponential(0.05)))
    until(lambda: len(run.trace.applied) >= 4 and run.state == "running", "some updates")
    assert run.message.startswith("running: 4 ranks, ")
    run.stop()
    trace = run.wait(PATIENCE_S)
    assert run.state == "stopped" and trace.ended["reason"] == "stop" and not alive(run._pids.values())
    assert trace.path_versions.tolist() == list(range(len(trace.path)))
    assert trace.applied["version"].max() == trace.path_versions[-1] and trace.torn == 0


def test_every_rank_leaves_the_all_reduce_after_the_same_step():
    run = gd.launch(quick(updates=None, seconds=100, compute_time=gd.Exponential(0.01)))
    until(lambda: len(run.trace.applied) > 20, "some updates")
    run.stop()
    trace = run.wait(PATIENCE_S)
    steps = [trace.pushes["step"][trace.pushes["worker"] == worker].max() for worker in range(4)]
    assert len(set(steps)) == 1
    assert len(trace.applied) == 4 * trace.path_versions[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_many_runs_at_once_of_every_kind_end_as_they_should():
    draw = np.random.default_rng(1)
    strategies = [gd.Sync(), SERVER, gd.Sync(backups=1, exchange="server"), gd.Async(), gd.Async(staleness_bound=1),
                  gd.Async(batch=3), gd.LocalSGD(2)]
    for _ in range(16):
        runs = []
        for _ in range(3):
            exp = quick(problem=gd.Ravine(), optimizer=gd.SGD(1e-4), workers=int(draw.integers(2, 5)),
                        strategy=strategies[draw.integers(len(strategies))], updates=int(draw.choice([1, 5, 40])),
                        compute_time=[None, gd.Exponential(0.003)][draw.integers(2)])
            runs.append((gd.launch(exp), exp, draw.random() < 0.25))
        for run, exp, stop in runs:
            if stop:
                run.stop()
            trace = run.wait(PATIENCE_S)
            assert not alive(run._pids.values()) and trace.torn == 0
            if run.state == "done":
                assert trace.applied["version"].max() == exp.updates == trace.path_versions[-1]
            else:
                assert stop and run.state == "stopped"


def test_one_slow_rank_costs_synchronous_ranks_more_than_asynchronous_ones():
    law, slow = gd.Exponential(0.03), (1, 1, 1, 0.25)
    sync = quick(compute_time=law, updates=20, strategy=SERVER, speeds=slow)
    free = sync.replace(strategy="async", updates=80)
    even, late, freed = all_of(sync.replace(speeds=None), sync, free)
    assert np.array_equal(even.path, late.path)
    # What was drawn is the least that it takes, whatever the machine is busy with.
    drawn = [[sync.times.draw(worker, step) for worker in range(4)] for step in range(20)]
    assert late.summary()["seconds"] >= np.max(drawn, axis=1).sum()
    # As many gradients; but here the slow rank makes a thirteenth of them, there a quarter.
    assert freed.summary()["seconds"] < late.summary()["seconds"]
    assert np.mean(freed.applied["worker"] == 3) < 0.2 and np.mean(late.applied["worker"] == 3) == 0.25


def test_a_wait_that_is_part_of_the_experiment_may_be_longer_than_the_timeout():
    slow_server = quick(workers=2, updates=1, strategy="async", network=gd.Network(server_s=2.5))
    slow_rank = quick(workers=2, updates=1, compute_time=2.5, speeds=(1, 100))
    runs = [gd.launch(exp, timeout_s=2) for exp in (slow_server, slow_rank)]
    assert [run.wait(PATIENCE_S).ended["reason"] for run in runs] == ["updates", "updates"]


def test_a_push_that_is_being_served_when_the_time_is_up_is_not_applied():
    trace = gd.run(quick(strategy="async", updates=None, seconds=0.3, network=gd.Network(server_s=0.2)))
    assert trace.ended["reason"] == "seconds" and len(trace.applied) <= 1
    assert len(trace.pushes) > len(trace.applied)


def test_a_target_is_met_as_soon_where_the_number_of_updates_is_left_open(tmp_path: Path) -> None:
    ends = []
    for updates in (None, 2000):
        exp = gd.Experiment(updates=updates, target_loss=1.0, compute_time=gd.Constant(0.03))
        trace = gd.run(exp, folder=tmp_path / str(updates))
        versions, losses = trace.path_versions, trace.losses
        first = versions[np.flatnonzero(losses <= 1.0)[0]]
        assert list(versions[: first + 1]) == list(range(first + 1)), "the path is whole"
        ends.append((first, trace.summary()["seconds_to_target"]))
    assert abs(ends[0][0] - ends[1][0]) <= 1 and ends[0][1] < 3 * ends[1][1]
