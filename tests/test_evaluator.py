"""The evaluator: losses along the path, surfaces around it, live and at the end."""

import json
import threading
import time

import numpy as np
import pytest
import torch

import gdlab as gd
from gdlab.backends import evaluator, surface
from gdlab.backends.evaluator import Evaluator, evaluate
from gdlab.backends.surface import principal_plane
from gdlab.backends.virtual import simulate
from gdlab.descent.problems import build
from gdlab.trace import PathWriter, write_run


def evaluated(folder, **fields):
    exp = gd.Experiment(**({"problem": gd.Quadratic(), "optimizer": gd.SGD(lr=0.05), "updates": 40} | fields))
    trace = simulate(exp, folder)
    evaluate(exp, folder)
    return trace.refresh()


@pytest.mark.parametrize("problem", [gd.Quadratic(), gd.Ravine(), gd.LinearRegression(), gd.Digits("logistic")],
                         ids=lambda problem: type(problem).__name__)
def test_every_version_is_measured_by_the_full_objective(tmp_path, problem):
    trace = evaluated(tmp_path, problem=problem, optimizer=gd.SGD(lr=0.001))
    measured = build(trace.experiment)
    expected = [measured.objective(torch.from_numpy(x.copy())) for x in trace.path]
    assert trace.losses.tolist() == pytest.approx(expected, rel=1e-6)
    assert trace.summary()["final_loss"] == pytest.approx(expected[-1], rel=1e-6)


def test_the_final_file_has_version_loss_and_accuracy(tmp_path):
    trace = evaluated(tmp_path, problem=gd.Digits("logistic"))
    final = json.loads((tmp_path / "final.json").read_text())
    assert final["version"] == 40 and final["final_loss"] == trace.losses[-1]
    assert 0.5 < final["accuracy"] <= 1.0
    assert trace.summary()["accuracy"] == final["accuracy"]


@pytest.mark.parametrize("problem", [gd.Quadratic(), gd.Ravine(), gd.Saddle(), gd.Cliff()],
                         ids=lambda problem: type(problem).__name__)
def test_two_parameters_get_their_own_plane_around_path_start_and_minimum(tmp_path, problem):
    trace = evaluated(tmp_path, problem=problem, optimizer=gd.SGD(lr=0.001))
    grid = trace.surface
    assert grid["kind"] == "parameters"
    assert grid["loss"].shape == (len(grid["y"]), len(grid["x"])) == (61, 61)
    low, high = (grid["x"][0], grid["y"][0]), (grid["x"][-1], grid["y"][-1])
    for point in [*trace.path, *surface.landmarks(trace.experiment)]:
        assert np.all(point >= low) and np.all(point <= high)
    # Rows are y and columns x: checked where a transposition would show.
    problem = build(trace.experiment)
    at = torch.tensor([grid["x"][50], grid["y"][3]], dtype=torch.float32)
    assert grid["loss"][3, 50] == pytest.approx(problem.objective(at), rel=1e-5)


def test_more_parameters_get_the_principal_plane_through_the_last_point(tmp_path):
    trace = evaluated(tmp_path, problem=gd.LinearRegression(features=6))
    grid = trace.surface
    assert grid["kind"] == "pca" and grid["basis"].shape == (2, 6)
    assert grid["basis"] @ grid["basis"].T == pytest.approx(np.eye(2), abs=1e-9)
    assert grid["origin"] == pytest.approx(trace.path[-1])
    assert 0.9 < grid["explained"].sum() <= 1.0 and grid["explained"][0] >= grid["explained"][1]
    shadow = (trace.path - grid["origin"]) @ grid["basis"].T
    assert np.all(shadow >= [grid["x"][0], grid["y"][0]]) and np.all(shadow <= [grid["x"][-1], grid["y"][-1]])
    at = grid["origin"] + grid["x"][4] * grid["basis"][0] + grid["y"][9] * grid["basis"][1]
    expected = build(trace.experiment).objective(torch.from_numpy(at).float())
    assert grid["loss"][9, 4] == pytest.approx(expected, rel=1e-5)


def test_the_principal_plane_is_that_of_a_singular_value_decomposition():
    rows = np.random.default_rng(0).normal(size=(30, 8)) * [9, 5, 1, 1, 1, 1, 1, 1]
    basis, explained = principal_plane(rows)
    _, strengths, directions = np.linalg.svd(rows, full_matrices=False)
    assert np.abs(np.sum(basis * directions[:2], axis=1)) == pytest.approx([1.0, 1.0])
    assert explained == pytest.approx(strengths[:2] ** 2 / np.sum(strengths**2))


def test_a_straight_path_still_gets_a_plane():
    rows = np.outer(np.arange(5.0), [1.0, 2.0, 0.0])
    basis, explained = principal_plane(rows)
    assert basis @ basis.T == pytest.approx(np.eye(2), abs=1e-12)
    assert explained == pytest.approx([1.0, 0.0], abs=1e-12)
    basis, explained = principal_plane(np.zeros((5, 3)))
    assert basis @ basis.T == pytest.approx(np.eye(2)) and explained.tolist() == [0.0, 0.0]


def test_a_run_that_diverges_keeps_its_infinite_losses_and_a_finite_picture(tmp_path):
    trace = evaluated(tmp_path, problem=gd.Ravine(), optimizer=gd.SGD(lr=1.0))
    assert not np.isfinite(trace.losses[-1])
    assert np.isfinite(trace.losses[0])
    grid = trace.surface
    assert np.isfinite(grid["x"]).all() and np.isfinite(grid["loss"]).any()
    assert not np.isinf(grid["loss"]).any()
    json.loads((tmp_path / "final.json").read_text())


def long_path(folder, exp, versions):
    problem = build(exp)
    writer = PathWriter(folder, problem.size, "float32", versions, buffer=1 << 20)
    for version in range(versions):
        writer.append(version, np.full(problem.size, 1 / (version + 1), np.float32))
    writer.finish(versions - 1, None)
    write_run(folder, {"experiment": json.loads(exp.to_json())})
    return problem


def test_a_long_path_is_measured_at_every_second_fourth_or_eighth_version_and_at_the_last(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "MOST_CHEAP", 4096)
    exp = gd.Experiment(problem=gd.Quadratic())
    long_path(tmp_path, exp, 100_002)
    evaluate(exp, tmp_path)
    losses = gd.Trace(tmp_path).losses
    measured = np.flatnonzero(~np.isnan(losses))
    assert measured[0] == 0 and measured[-1] == 100_001
    assert len(measured) < 4 * evaluator.MOST_CHEAP
    steps = set(np.diff(measured[:-1]).tolist())
    assert all(step & (step - 1) == 0 for step in steps)


def test_where_no_data_is_needed_a_hundred_thousand_versions_are_all_measured(tmp_path):
    exp = gd.Experiment(problem=gd.Quadratic())
    long_path(tmp_path, exp, 100_002)
    evaluate(exp, tmp_path)
    assert not np.isnan(gd.Trace(tmp_path).losses).any()


def test_up_to_a_thousand_versions_none_is_passed_over_however_late_it_is(tmp_path):
    exp = gd.Experiment(problem=gd.Quadratic())
    long_path(tmp_path, exp, 1000)
    evaluate(exp, tmp_path)
    assert not np.isnan(gd.Trace(tmp_path).losses).any()


LINEAR = gd.Experiment(gd.LinearRegression(), workers=1)


def test_an_objective_that_cannot_keep_up_passes_over_versions_and_measures_them_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "LATE_S", 0.0)
    for name, fill_s, most in (("broken off", 0.0, 1100), ("filled", 60.0, 3000)):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(evaluator, "FILL_S", fill_s)
        evaluate(LINEAR, tmp_path / name, long_path(tmp_path / name, LINEAR, 3000))
        losses = gd.Trace(tmp_path / name).losses
        assert most / 3 < np.isfinite(losses).sum() <= most and np.isfinite(losses[[0, -1]]).all()
    assert np.isfinite(losses).all()
    final = json.loads((tmp_path / "filled" / "final.json").read_text())
    assert final["version"] == 2999 and final["final_loss"] == losses[-1], "what is filled in comes before the last"


def test_which_versions_of_a_simulated_run_are_measured_does_not_depend_on_the_time(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluator, "LATE_S", 0.0)
    monkeypatch.setattr(evaluator, "MOST_LOSSES", 512)
    exp = LINEAR.replace(batch_size=1, updates=3000)
    runs = [simulate(exp, tmp_path / name) for name in ("late", "along")]
    evaluate(exp, runs[0].folder, patient=True)
    along = evaluator.Evaluator(runs[1].folder, build(exp), patient=True)
    whole = along._path.rows()
    for end in (3, 500, 501, 1700, 3001):
        monkeypatch.setattr(along._path, "rows", lambda end=end: whole[:end])
        while along.advance():
            pass
    along.measure_last()
    along.close()
    assert np.array_equal(runs[0].losses, runs[1].losses, equal_nan=True) and np.isnan(runs[0].losses).any()


def test_losses_and_surfaces_come_while_the_run_goes_on(tmp_path):
    exp = gd.Experiment(problem=gd.Ravine(), optimizer=gd.SGD(lr=0.001), updates=60)
    problem = build(exp)
    writer = PathWriter(tmp_path, 2, "float32", 60)
    write_run(tmp_path, {"experiment": json.loads(exp.to_json())})
    going = threading.Event()
    seen = []
    thread = threading.Thread(target=evaluate, args=(exp, tmp_path, problem), kwargs={
        "follow": lambda: not going.is_set(), "report": lambda version, loss: seen.append(version)})
    thread.start()
    x = problem.initial()
    for version in range(60):
        writer.append(version, x)
        if version == 30:
            deadline = time.monotonic() + 30
            while (30 not in seen or gd.Trace(tmp_path).surface is None) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert 30 in seen and gd.Trace(tmp_path).surface is not None
        x = x - 0.001 * problem.gradient(x, 0, version)[1]
    going.set()
    thread.join(30)
    assert seen == list(range(60))
    assert not np.isnan(gd.Trace(tmp_path).losses).any()


def test_somebody_who_waits_gets_the_final_loss_at_once(tmp_path):
    exp = gd.Experiment(problem=gd.Digits("mlp"), updates=400)
    long_path(tmp_path, exp, 400)
    began = time.monotonic()
    evaluate(exp, tmp_path, follow=lambda: False, hurry=lambda: True)
    took = time.monotonic() - began
    trace = gd.Trace(tmp_path)
    assert np.isfinite(trace.losses[-1]) and trace.summary()["accuracy"] is not None
    assert np.isnan(trace.losses).sum() > 100
    assert took < 10  # 0.3 s, and whatever a busy machine makes of building the problem


def test_a_folder_without_a_path_is_no_error(tmp_path):
    evaluate(gd.Experiment(problem=gd.Quadratic()), tmp_path)
    assert not (tmp_path / "final.json").exists()


def test_an_evaluator_goes_on_where_the_path_has_grown(tmp_path):
    exp = gd.Experiment(problem=gd.Quadratic())
    problem = build(exp)
    writer = PathWriter(tmp_path, 2, "float32", 100)
    watching = Evaluator(tmp_path, problem)
    assert not watching.advance() and watching.last_version == -1
    writer.append(0, np.ones(2))
    watching.advance()
    assert watching.last_version == 0 and watching.last_loss == pytest.approx(5.5)
    writer.append(1, np.zeros(2))
    watching.advance()
    watching.measure_last()
    watching.close()
    assert watching.last_version == 1 and watching.last_loss == 0.0
