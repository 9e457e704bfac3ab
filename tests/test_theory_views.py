"""Theory is drawn over runs where it has something exact to say, and nothing is drawn where it has not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import plotly.graph_objects as go
import pytest
from made_traces import MEASURED, made

import gdlab as gd
from gdlab import expected, theory
from gdlab.backends.virtual import simulate
from gdlab.trace import PUSH, LossWriter, write_run
from gdlab.views.efficiency import same_loss
from gdlab.views.round_time import mean_and_error

LAW = gd.Exponential(0.05)
PLAIN = {"problem": gd.Quadratic((1.0, 4.0), (1.0, 1.0)), "compute_time": LAW, "optimizer": gd.SGD(lr=0.05),
         "updates": 120}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root, numbers = tmp_path_factory.mktemp("runs"), itertools.count()

    def run(**fields):
        trace = simulate(gd.Experiment(**PLAIN | fields), root / str(next(numbers)))
        curvature = np.asarray(trace.experiment.problem.eigenvalues)
        losses = LossWriter(trace.folder)
        for version, x in zip(trace.path_versions, trace.path.astype(float), strict=True):
            losses.append(int(version), float(curvature @ x**2 / 2))
        losses.close()
        return trace

    return run


def trace_of(fig: go.Figure, name: str) -> go.Figure | None:
    return next((part for part in fig.data if part.name == name), None)


def words(fig: go.Figure) -> str:
    return " ".join(fig.layout.meta["captions"]) + " " + fig.layout.meta["description"]


# ---- what is expected, and where nothing is ----

@pytest.mark.parametrize("fields", [
    {"strategy": gd.LocalSGD(4)},
    {"strategy": gd.Sync(1, "server"), "speeds": (1, 1, 1, 0.25)},
    {"strategy": gd.Async(staleness_bound=2), "compute_time": gd.Gamma(0.05, 0.5)},
    {"strategy": gd.Async(staleness_bound=2), "speeds": (1, 1, 1, 0.25)},
    {"strategy": gd.Async(staleness_bound=2), "network": gd.Network(0.01)},
    {"strategy": gd.Async(), "network": gd.Network(0.0, 0.0, 0.01)},
    {"strategy": gd.Async(staleness_bound=40), "workers": 40},
    {"compute_time": gd.Pareto(0.05, 0.9)},
    {"network": gd.Network(0.0, 1e-6)},  # without the number of parameters
], ids=str)
def test_theory_has_nothing_to_say_of_the_time_of_an_update(fields):
    assert expected.update_seconds(gd.Experiment(**PLAIN | fields)) is None


def test_a_real_run_without_a_law_has_no_expected_time_and_a_virtual_one_has_a_hundredth_of_a_second():
    exp = gd.Experiment(**PLAIN | {"compute_time": None})
    assert expected.update_seconds(exp, "wall") is None
    assert expected.update_seconds(exp).value == 0.01


@pytest.mark.parametrize("fields", [
    {"problem": gd.Quadratic()}, {"problem": gd.Ravine(noise=0.1)}, {"clip": 1.0}, {"precision": "bf16"},
    {"problem": gd.Quadratic(noise=0.1, centers=((0.0, 0.0),) * 4)}, {"optimizer": gd.AdamW()},
    {"problem": gd.Quadratic((0.0, 1.0), noise=0.1)}, {"optimizer": gd.SGD(0.1, weight_decay=0.1)},
    {"strategy": gd.Async(), "compute_time": gd.Gamma(0.05, 0.5)}, {"strategy": gd.Async(batch=2)},
    {"strategy": gd.Async(staleness_bound=1)}, {"strategy": gd.Async(correction="inverse")},
    {"strategy": gd.Async(), "speeds": (1, 1, 1, 2)}, {"strategy": gd.Async(), "network": gd.Network(0.01)},
    {"strategy": gd.Async(), "optimizer": gd.SGD(0.01, 0.5)}, {"strategy": gd.Async(batch=2), "workers": 1},
    {"strategy": gd.LocalSGD(), "optimizer": gd.SGD(0.1, 0.5)}, {"combine": "sum"}, {"optimizer": gd.SGD(5.0)},
], ids=str)
def test_theory_knows_no_noise_floor(fields):
    noisy = {"problem": gd.Quadratic(noise=0.1), "compute_time": LAW, "optimizer": gd.SGD(0.01)}
    assert expected.noise_floor(gd.Experiment(**noisy)) is not None
    assert expected.noise_floor(gd.Experiment(**noisy | fields)) is None


# ---- staleness ----

def test_the_histogram_has_the_mean_and_the_law_of_memoryless_workers(run):
    trace = run(strategy="async", speeds=(1, 1, 1, 0.25))
    fig = gd.views.staleness(trace)
    points = trace_of(fig, "theory")
    width = round(points.x[1] - points.x[0])
    shares = theory.staleness_shares((1, 1, 1, 0.25), width * len(points.x)).reshape(-1, width).sum(axis=1)
    assert points.y == pytest.approx(120 * shares)
    assert fig.layout.annotations[0].text.endswith("(theory 3)")
    assert [line.x0 for line in fig.layout.shapes] == [pytest.approx(trace.applied["staleness"].mean()), 3.0]
    assert "for any law" in words(fig) and "memoryless workers" in words(fig) and "memoryless" in points.hovertemplate


@pytest.mark.parametrize(("fields", "mean", "law"), [
    ({"strategy": "async", "compute_time": gd.Constant(0.05)}, "3", True),
    ({"strategy": "async", "compute_time": gd.Gamma(0.05, 0.5)}, "3", False),
    ({"strategy": gd.Async(batch=2)}, "1.5", False),
    ({"strategy": gd.Async(staleness_bound=1)}, f"{theory.ssp_staleness(4, 1):.4g}", False),
    ({"strategy": gd.Async(staleness_bound=1), "compute_time": gd.Gamma(0.05, 0.5)}, None, False),
    ({"strategy": gd.Sync()}, None, False),
    ({"strategy": gd.LocalSGD(4)}, None, False),
], ids=str)
def test_the_histogram_says_what_is_known_and_no_more(fields, mean, law, run):
    fig = gd.views.staleness(run(**fields))
    assert fig.layout.annotations[0].text.endswith(f"(theory {mean})") if mean else "theory" not in str(fig.to_dict())
    assert (trace_of(fig, "theory") is not None) == law


def test_bars_of_several_stalenesses_are_compared_with_the_sum_of_their_shares(run):
    fig = gd.views.staleness(run(strategy="async", workers=60, updates=1500))
    points, bars = trace_of(fig, "theory"), fig.data[0]
    assert bars.width[0] > 1 if np.ndim(bars.width) else bars.width > 1
    assert 0.97 * 1500 < sum(points.y) < 1500
    assert np.array_equal(points.x, bars.x)


# ---- timeline and loss ----

def test_the_timeline_has_a_ruler_as_long_as_a_round_is_in_theory(run):
    for fields, seconds in (({}, theory.expected_step_time(LAW, 4)), ({"strategy": "async"}, 0.05 / 4),
                            ({"strategy": gd.Sync(2, "server")}, theory.expected_step_time(LAW, 4, 2))):
        fig = gd.views.timeline(run(**fields))
        ruler = fig.data[-1]
        assert ruler.name.startswith("theory") and ruler.x[1] - ruler.x[0] == pytest.approx(seconds)
        low, high = fig.layout.xaxis.range
        assert low <= ruler.x[0] <= high
        assert f"{seconds:.4g} s" in words(fig) and "on average" in ruler.hovertemplate


@pytest.mark.parametrize("fields", [{"strategy": gd.LocalSGD(3)},
                                    {"strategy": gd.Sync(1, "server"), "speeds": (1, 1, 1, 0.5)}], ids=str)
def test_the_timeline_says_nothing_of_theory_where_it_has_no_form(fields, run):
    fig = gd.views.timeline(run(**fields))
    assert len(fig.data) == 4 and "heory" not in words(fig)


def test_the_loss_has_the_noise_floor_of_each_run_that_has_one(run):
    noisy = {"problem": gd.Quadratic((1.0, 4.0), (1.0, 1.0), noise=0.5)}
    silent = run(**noisy, strategy="async", compute_time=gd.Gamma(1.0, 0.5))
    runs = [run(**noisy), run(**noisy, strategy="async"), run(), silent]
    fig = gd.views.loss(*runs)
    sync, free = (sum(c * theory.noise_floor(0.05, c, 0.5, 4, s) / 2 for c in (1.0, 4.0)) for s in ("sync", "async"))
    assert [line.y0 for line in fig.layout.shapes] == pytest.approx([sync, free])
    (label,) = fig.layout.annotations
    assert label.y == pytest.approx(math.log10(max(sync, free))) and f"{sync:.3g}" in label.hovertext
    assert "memoryless" in label.hovertext and "Noise floor (dotted)" in words(fig)
    assert not gd.views.loss(runs[2]).layout.shapes


# ---- round time ----

def test_round_times_lie_on_theory_s_curve_within_their_errors(run):
    runs = [run(workers=n, updates=400) for n in (1, 2, 4, 8)]
    fig = gd.views.round_time(*runs)
    points, curve = trace_of(fig, "simulated"), trace_of(fig, "theory")
    assert points.x == (1, 2, 4, 8)
    assert curve.y == pytest.approx([theory.expected_step_time(LAW, int(n)) for n in curve.x])
    assert max(curve.x) == 10
    for n, seconds, error in zip(points.x, points.y, points.error_y.array, strict=True):
        assert abs(seconds - theory.expected_step_time(LAW, n)) < 4 * error
    assert "order statistic" in words(fig) and "order statistic" in str(curve.customdata)


def test_runs_that_take_alike_share_a_curve_and_a_measured_one_stands_beside_its_twin(run, tmp_path):
    exp = gd.Experiment(**PLAIN)
    write_run(tmp_path, {"experiment": exp.model_dump(mode="json", by_alias=True), "environment": MEASURED})
    measured = gd.Trace(tmp_path)
    twin = run()
    (tmp_path / "events-server.bin").write_bytes((twin.folder / "events-virtual.bin").read_bytes())
    fig = gd.views.round_time(measured, twin, run(workers=2), run(strategy="async"))
    names = [part.name for part in fig.data]
    assert names == ["Sync, measured", "Sync, simulated", "Sync, theory", "Async, simulated", "Async, theory"]
    assert fig.data[0].y[0] == fig.data[1].y[0] and len(fig.data[1].x) == 2
    assert "The largest run: Measured" in words(fig) and "Simulated" in words(fig)
    assert "oversubscribed" in fig.data[0].customdata[0]


def test_unequal_workers_have_a_cross_of_their_own_and_local_steps_have_no_theory(run):
    fig = gd.views.round_time(run(), run(speeds=(1, 1, 1, 0.25)))
    cross = trace_of(fig, "theory, these speeds")
    assert cross.y == pytest.approx([theory.expected_step_time(LAW, 4, speeds=(1, 1, 1, 0.25))])
    assert [part.name for part in gd.views.round_time(run(strategy=gd.LocalSGD(3))).data] == ["simulated"]


def test_the_standard_error_is_that_of_the_mean_of_rounds():
    rows = np.zeros(4000, PUSH)
    lasted = np.random.default_rng(3).exponential(0.1, 4000)
    rows["version"], rows["applied_s"] = np.arange(1, 4001), np.cumsum(lasted)
    mean, error = mean_and_error(rows)
    assert mean == pytest.approx(lasted.mean())
    assert error == pytest.approx(0.1 / math.sqrt(4000), rel=0.5)
    assert math.isnan(mean_and_error(rows[:10])[1]) and mean_and_error(rows[:0]) is None


# ---- stability ----

ONE = gd.Quadratic((1.0,), (1.0,))


def test_runs_below_the_limit_fall_and_above_it_grow(run):
    limit = theory.max_stable_lr(1.0, 3)
    fields = {"problem": ONE, "strategy": "async", "compute_time": gd.Constant(0.05), "updates": 300}
    runs = [run(**fields, optimizer=gd.SGD(lr=factor * limit)) for factor in (0.5, 0.9, 1.1, 2.0)]
    fig = gd.views.stability(*runs)
    fell, grew = trace_of(fig, "loss fell"), trace_of(fig, "loss grew")
    assert fell.y == pytest.approx([0.5 * limit, 0.9 * limit]) and grew.y == pytest.approx([1.1 * limit, 2.0 * limit])
    assert fell.x == pytest.approx([3.0] * 2, abs=0.05)
    curve, best = trace_of(fig, "stability limit"), trace_of(fig, "fastest")
    assert curve.y == pytest.approx([theory.max_stable_lr(1.0, int(delay)) for delay in curve.x])
    assert best.y == pytest.approx([theory.best_lr(1.0, int(delay)) for delay in best.x])
    assert fell.marker.symbol != grew.marker.symbol and "no noise" in words(fig) and "no noise" in curve.hovertemplate


def test_memoryless_workers_have_a_limit_of_their_own_and_momentum_a_curve(run):
    fig = gd.views.stability(run(problem=ONE, strategy="async"), run(problem=ONE, optimizer=gd.SGD(0.05, 0.9)))
    curve = trace_of(fig, "limit, memoryless")
    assert curve.y == pytest.approx([theory.max_stable_lr_memoryless(1.0, int(delay) + 1) for delay in curve.x])
    with_momentum = trace_of(fig, "stability limit, momentum 0.9")
    assert with_momentum.y[2] == pytest.approx(theory.max_stable_lr(1.0, int(with_momentum.x[2]), 0.9))
    assert [part.name for part in gd.views.stability(momentum=0.5).data] == ["stability limit, momentum 0.5"]


def test_a_run_without_a_known_curvature_or_rate_is_not_drawn(run, tmp_path):
    for trace in (made(tmp_path / "ravine"), run(strategy=gd.Async(correction="inverse"))):
        fig = gd.views.stability(trace)
        assert any(note.name == "message" for note in fig.layout.annotations)
        assert trace_of(fig, "loss fell") is None


# ---- efficiency ----

def test_the_time_to_a_loss_is_updates_times_seconds_each(run):
    baseline, other = run(workers=1), run(workers=4, strategy="async", optimizer=gd.SGD(lr=0.04))
    fig = gd.views.efficiency(baseline, other)
    faster, fewer, product = (np.array(part.y) for part in fig.data if part.type == "bar")
    assert faster * fewer == pytest.approx(product)
    assert (faster[0], fewer[0], product[0]) == (1.0, 1.0, 1.0)
    level = np.median(other.losses[-12:])
    first, second = (int(np.argmax(trace.losses <= level)) for trace in (baseline, other))
    assert fewer[1] == pytest.approx(first / second)
    assert product[1] == pytest.approx(baseline.path_seconds[first] / other.path_seconds[second])
    assert faster[1] > 2.0 and fewer[1] < 1.0
    assert f"{level:.4g}" in words(fig)


def test_a_target_that_all_share_and_reach_is_the_loss_to_compare_at(run):
    runs = [run(target_loss=0.5, workers=n) for n in (1, 4)]
    fig = gd.views.efficiency(*runs)
    assert "To a loss of 0.5." in words(fig)
    measured = [trace.summary()["seconds_to_target"] for trace in runs]
    assert [part.y[1] for part in fig.data if part.type == "bar"][2] == pytest.approx(measured[0] / measured[1])


def test_a_run_that_never_fell_has_no_bars_and_a_baseline_that_never_fell_none_at_all(run):
    good, bad = run(), run(optimizer=gd.SGD(lr=0.6))
    fig = gd.views.efficiency(good, bad)
    assert all(len(part.x) == 1 for part in fig.data if part.type == "bar") and "never below its start" in words(fig)
    fig = gd.views.efficiency(bad, good)
    assert not any(part.type == "bar" for part in fig.data) and "no loss to compare at" in words(fig)


def test_a_lucky_dip_is_no_loss_to_compare_at():
    versions, noisy = np.arange(100), np.where(np.arange(100) == 50, 0.001, np.linspace(2.0, 1.0, 100))
    steady = np.linspace(2.0, 0.5, 100)
    curves = [(versions, versions * 1.0, steady), (versions, versions * 1.0, noisy)]
    level, found = same_loss([None, None], curves)
    assert level == pytest.approx(1.04, abs=0.02) and found[0][0] < 70
