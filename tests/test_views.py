"""Views draw what the trace holds, say on what it was measured, and survive traces that hold little or nonsense."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import MEASURED, SIMULATED, begun, made

import gdlab as gd
from gdlab.panel.chart import change
from gdlab.panel.figures import USUAL
from gdlab.trace import PUSH, Chunk, Follower, PathWriter, write_surface
from gdlab.views import live, style, timeline, what_differs
from gdlab.views.downsample import Thinned, every, line
from gdlab.views.trajectory import NO_PLANE, NOW, PATH, READS, START, _sentence, levels

VIEWS = {name: gd.views.VIEWS[name] for name in (*USUAL, "round_time", "stability", "efficiency")}


def words(fig: go.Figure) -> str:
    title = f"{fig.layout.title.text} {fig.layout.title.subtitle.text}".replace("<br>", " ")
    return title + " ".join(f" {note.text}".replace("<br>", " ") for note in fig.layout.annotations)


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> gd.Trace:
    exp = gd.Experiment(gd.Ravine(), strategy=gd.Async(), clip=10.0, updates=120)
    return made(tmp_path_factory.mktemp("async") / "run", exp, 120, nonfinite=2)


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> gd.Trace:
    exp = gd.Experiment(gd.Ravine(), updates=30)
    return made(tmp_path_factory.mktemp("sync") / "run", exp, 30, environment=SIMULATED)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> gd.Trace:
    exp = gd.Experiment(gd.Digits(), strategy=gd.Async(), workers=3, clip=5.0, updates=50)
    return made(tmp_path_factory.mktemp("large") / "run", exp, 50, parameters=40)


# ---- every view ----

@pytest.mark.parametrize("name", VIEWS)
def test_every_view_asks_a_question_names_its_axes_and_says_what_it_was_measured_on(name, asynchronous, synchronous):
    measured, simulated = VIEWS[name](asynchronous), VIEWS[name](synchronous)
    assert "Measured: 4 ranks on 2 cores, oversubscribed, 1 thread each, gloo, wall clock." in words(measured)
    assert "Simulated (virtual time): 4 workers." in words(simulated)
    for fig in (measured, simulated):
        assert fig.layout.title.text.endswith("?")
        assert fig.layout.xaxis.title.text and fig.layout.yaxis.title.text
        assert fig.layout.meta["description"].startswith(fig.layout.title.text)


@pytest.mark.parametrize("name", VIEWS)
def test_no_line_has_more_points_than_can_be_told_apart_and_none_needs_webgl(name, asynchronous):
    for trace in VIEWS[name](asynchronous).data:
        assert trace.type in ("scatter", "bar", "contour")
        assert trace.type == "contour" or len(trace.x) <= 1501


@pytest.mark.parametrize("name", VIEWS)
def test_a_run_that_has_only_been_announced_gives_a_figure_with_a_message(name, tmp_path):
    fig = VIEWS[name](begun(tmp_path / "run"))
    assert any(note.name == "message" for note in fig.layout.annotations)
    assert "No run yet" in words(fig)


@pytest.mark.parametrize("name", VIEWS)
def test_numbers_that_are_not_finite_do_not_break_a_view(name, tmp_path):
    trace = made(tmp_path / "run", updates=20, surface=False, losses=False)
    pushes, path = trace.pushes.copy(), trace.path.copy()
    path[10:] = np.inf
    for column in ("loss", "grad_norm", "applied_s", "released_s", "clip_scale"):
        pushes[column] = np.nan
    pushes["nonfinite"] = 1
    broken = SimpleNamespace(
        experiment=trace.experiment, environment=MEASURED, pushes=pushes, path=path, local_path={},
        path_versions=trace.path_versions, path_seconds=np.full(len(path), np.nan), losses=np.full(len(path), np.inf),
        surface={"x": np.arange(3.0), "y": np.arange(2.0), "loss": np.full((2, 3), np.nan), "kind": "parameters"},
    )
    VIEWS[name](broken).to_json()


@pytest.mark.parametrize("name", VIEWS)
def test_columns_of_different_length_in_a_growing_run_do_not_break_a_view(name, asynchronous):
    growing = SimpleNamespace(
        experiment=asynchronous.experiment, environment={}, pushes=asynchronous.pushes[:7], local_path={},
        path=asynchronous.path[:9], path_versions=asynchronous.path_versions[:12], surface=None,
        path_seconds=asynchronous.path_seconds[:5], losses=asynchronous.losses[:3],
    )
    VIEWS[name](growing).to_json()


# ---- trajectory ----

def test_with_two_parameters_the_path_itself_is_drawn_from_start_to_end(asynchronous):
    fig = gd.views.trajectory(asynchronous)
    np.testing.assert_allclose(fig.data[PATH].x, asynchronous.path[:, 0])
    assert (fig.data[START].x[0], fig.data[NOW].y[0]) == (
        asynchronous.path[0, 0], asynchronous.path[-1, 1])


def test_a_worker_s_line_goes_through_the_points_that_it_read_in_its_order(asynchronous):
    fig = gd.views.trajectory(asynchronous)
    for worker in range(4):
        read = asynchronous.pushes["read_version"][asynchronous.pushes["worker"] == worker]
        np.testing.assert_allclose(fig.data[READS + worker].y, asynchronous.path[np.sort(read), 1])


def test_more_parameters_are_projected_on_the_plane_of_the_surface(large):
    fig, plane = gd.views.trajectory(large), large.surface
    expected = (large.path.astype(float) - plane["origin"]) @ plane["basis"].T
    np.testing.assert_allclose(np.stack([fig.data[PATH].x, fig.data[PATH].y], axis=1), expected)
    assert "81% of the variance" in fig.layout.xaxis.title.text


def test_without_a_plane_the_figure_says_what_it_waits_for(large):
    waiting = SimpleNamespace(**{name: getattr(large, name) for name in (
        "experiment", "environment", "path", "path_versions", "pushes", "local_path")}, surface=None)
    assert NO_PLANE in words(gd.views.trajectory(waiting))


def test_one_parameter_is_drawn_against_the_update(tmp_path):
    trace = made(tmp_path / "run", gd.Experiment(gd.Quadratic((1.0,), (3.0,)), updates=5), 5, surface=False)
    one = SimpleNamespace(**{name: getattr(trace, name) for name in (
        "experiment", "environment", "path_versions", "pushes", "local_path", "surface")}, path=trace.path[:, :1])
    np.testing.assert_array_equal(gd.views.trajectory(one).data[PATH].x, np.arange(6))


@given(st.lists(st.floats(-1e12, 1e12), min_size=4, max_size=4))
def test_levels_grow_with_the_loss_whatever_its_sign(values):
    loss = np.array(values).reshape(2, 2)
    z, places, ticks = levels(loss)
    order = np.argsort(loss, axis=None)
    assert np.all(np.diff(z.ravel()[order]) >= 0.0)
    assert np.nanmax(z) - np.nanmin(z) <= 6.0 + 1e-9
    assert len(places) == len(ticks)


# ---- loss ----

def test_the_loss_line_is_the_full_objective_at_each_version_and_at_its_time(asynchronous):
    updates, seconds = gd.views.loss(asynchronous), gd.views.loss(asynchronous, clock="seconds")
    np.testing.assert_allclose(updates.data[1].y, asynchronous.losses)
    np.testing.assert_allclose(seconds.data[1].x, asynchronous.path_seconds)


def test_several_runs_are_named_by_what_differs(asynchronous, synchronous):
    fig = gd.views.loss(asynchronous, synchronous)
    names = [trace.name for trace in fig.data[1::2]]
    assert names == ["Async, Clip (norm 10), measured", "Sync, no clipping, simulated"] or all(
        part in name for part, name in zip(("Async", "Sync"), names, strict=True))
    assert "oversubscribed" in words(fig) and "Simulated" in words(fig)


def test_a_loss_that_is_not_positive_is_not_drawn_on_a_logarithmic_axis(asynchronous):
    assert gd.views.loss(asynchronous).layout.yaxis.type == "log"
    negative = SimpleNamespace(**{name: getattr(asynchronous, name) for name in (
        "experiment", "environment", "pushes", "path_versions", "path_seconds")}, losses=asynchronous.losses - 100.0)
    assert gd.views.loss(negative).layout.yaxis.type == "linear"


def test_a_loss_that_comes_to_exactly_0_keeps_the_logarithmic_axis_and_the_figure_says_what_is_missing(tmp_path):
    experiment = gd.Experiment(gd.Quadratic((1.0,), start=(2.0,), centers=((1.0,),)), workers=1, updates=60,
                               optimizer=gd.SGD(lr=0.5), compute_time=0.01)  # fmt: skip
    trace = gd.run(experiment, backend="virtual", folder=tmp_path / "run")
    assert trace.losses[0] > 0 == trace.losses[-1]
    fig = gd.views.loss(trace)
    assert fig.layout.yaxis.type == "log" and "exactly 0 lie below" in words(fig)
    state, _ = follow("loss", trace, 7)
    assert state["layout"]["yaxis"]["type"] == "log"
    there = gd.run(experiment.replace(problem=gd.Quadratic((1.0,), start=(1.0,), centers=((1.0,),))), backend="virtual")
    assert gd.views.loss(there).layout.yaxis.type == "linear"
    state, _ = follow("loss", there, 7)
    assert not any(note.get("name") == "message" for note in state["layout"].get("annotations", ()))


def test_an_unknown_clock_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="must be \"updates\" or \"seconds\""):
        gd.views.loss(clock="hours")


def test_names_tell_apart_only_what_differs():
    base = gd.Experiment()
    assert what_differs([base]) == [""]
    assert what_differs([base, base.replace(workers=8)]) == ["4 workers", "8 workers"]
    slow = base.replace(optimizer=gd.SGD(lr=0.01))
    assert what_differs([base, slow]) == ["learning rate 0.1", "learning rate 0.01"]
    assert what_differs([base, base.replace(strategy="async")]) == ["Sync", "Async"]
    assert what_differs([base, base.replace(precision="bf16")]) == ["fp32", "bf16"]
    assert what_differs([base, base.replace(strategy=gd.Async(3))]) == ["Sync", "Async (bound 3)"]
    assert what_differs([base, base]) == ["run 1", "run 2"]
    assert what_differs([base, base], ["wall", "virtual"]) == ["measured", "simulated"]


def test_a_shortened_name_begins_with_what_was_changed_last_and_a_whole_one_leaves_nothing_out():
    first = gd.Experiment(workers=2)
    second = first.replace(workers=8, strategy=gd.Async(staleness_bound=3, batch=2), compute_time=gd.Exponential(0.05))
    third = second.replace(seed=7)
    names = what_differs([first, second, third])
    assert names[1].startswith("seed 0, ") and names[2].startswith("seed 7, ") and names[2].endswith("…")
    whole = what_differs([first, second, third], whole=True)
    assert all(part in whole[2] for part in ("8 workers", "Async", "Exponential", "seed 7")) and "…" not in whole[2]


def test_captions_say_whose_they_are_only_where_they_differ():
    two, four = ({"clock": "wall", "ranks": ranks, "cores": 8} for ranks in (2, 4))
    assert style.captions(["a", "b"], [two, two]) == [style.caption(two)]
    assert style.captions(["a", "b", "c"], [two, four, four]) == [
        f"a – {style.caption(two)}", f"b and 1 more – {style.caption(four)}"]


@pytest.mark.parametrize("decades, most", [(0.5, 3), (1.1, 3), (3.3, 4), (6.0, 4)])
def test_a_logarithmic_axis_over_many_decades_is_given_more_labels(decades, most):
    assert style.log_axis(np.array([1.0, 10.0**decades]), np.empty(0))["nticks"] == most
    assert style.log_axis()["nticks"] == 3


def test_a_loss_that_grows_over_many_decades_is_given_more_labels_while_it_runs(asynchronous):
    view = live.make(["loss"], asynchronous.experiment, {})["loss"]
    losses = np.array([(0, 1.0), (1, 5.0)], [("version", "i8"), ("loss", "f8")])
    none = dict(pushes=np.empty(0, PUSH), losses=losses)
    assert not any("nticks" in op.get("layout", {}).get("yaxis", {}) for op in view.update(SimpleNamespace(**none)))
    losses = np.array([(2, 4000.0)], losses.dtype)
    assert view.update(SimpleNamespace(**none | {"losses": losses}))[-1]["layout"]["yaxis"]["nticks"] == 4


def test_a_lone_worker_is_not_called_workers():
    assert "updates of 1 worker." in _sentence(SimpleNamespace(experiment=gd.Experiment(workers=1)),
                                               np.zeros(1), np.zeros(1), np.array([5]))


# ---- timeline ----

def rows(*lives: tuple) -> np.ndarray:
    table = np.zeros(len(lives), PUSH)
    for row, (worker, version, *times) in zip(table, lives, strict=True):
        row["worker"], row["version"] = worker, version
        row["start_s"], row["computed_s"], row["applied_s"], row["released_s"] = times
    return table


def test_in_a_round_the_wait_ends_when_the_last_gradient_is_there_and_the_rest_is_communication():
    found = timeline_segments(rows((0, 1, 0.0, 1.0, 3.5, 3.5), (1, 1, 0.0, 3.0, 3.5, 3.5)), together=True)
    assert found["compute"] == {0: 1.0, 1: 3.0}
    assert found["wait"] == {0: 2.0}
    assert found["communicate"] == {0: 0.5, 1: 0.5}


def test_without_rounds_a_gradient_travels_until_it_is_applied_and_then_its_worker_may_be_held_back():
    found = timeline_segments(rows((0, 1, 0.0, 1.0, 1.25, 2.0), (1, 2, 0.0, 3.0, 3.5, 3.5)), together=False)
    assert found["communicate"] == {0: 0.25, 1: 0.5}
    assert found["wait"] == {0: 0.75}


def test_a_step_that_was_given_up_is_drawn_as_dropped_from_its_start_to_its_end():
    found = timeline_segments(rows((0, 1, 0.0, 1.0, 1.0, 1.0), (1, -1, 0.0, np.nan, np.nan, 1.0)), together=True)
    assert found["never applied"] == {1: 1.0}


def timeline_segments(table: np.ndarray, together: bool) -> dict[str, dict[int, float]]:
    from gdlab.views.timeline import _NAMES, segments

    found = segments(table, together)
    return {_NAMES[kind]: dict(zip(found[kind][2].tolist(), found[kind][1].tolist(), strict=True)) for kind in found}


def test_a_long_step_that_lasts_into_the_latest_ones_is_drawn_and_cut_at_the_edge():
    from gdlab.views.timeline import drawn, recent, window

    short = [(0, version, 0.1 * version, 0.1 * version + 0.09, *[0.1 * version + 0.1] * 2) for version in range(1, 101)]
    table = recent(rows((1, 50, 0.0, 9.9, 10.0, 10.0), *short), 2)
    assert set(table["worker"][drawn(table)]) == {0, 1}
    assert 7.0 < window(table)[0] < 8.0


def test_the_segments_of_a_step_add_up_to_its_life(asynchronous, synchronous):
    from gdlab.views.timeline import drawn, recent, segments

    for trace, together in ((asynchronous, False), (synchronous, True)):
        table = recent(trace.pushes, 4)
        shown = table[drawn(table)]
        life = float((shown["released_s"] - shown["start_s"]).sum())
        assert sum(part[1].sum() for part in segments(table, together).values()) == pytest.approx(life)


def test_a_timeline_has_a_bounded_number_of_bars(tmp_path):
    exp = gd.Experiment(gd.Ravine(), workers=40, updates=20)
    fig = timeline(made(tmp_path / "run", exp, 20))
    assert sum(len(bar.x) for bar in fig.data) <= 3 * 12 * 24
    assert "first 24 of 40 workers" in words(fig)


# ---- staleness and gradient norms ----

def test_staleness_counts_and_mean_are_those_of_the_trace(asynchronous):
    fig, applied = gd.views.staleness(asynchronous), asynchronous.applied["staleness"]
    total = np.sum([bar.y for bar in fig.data], axis=0)
    np.testing.assert_array_equal(total, np.bincount(applied))
    assert f"mean {applied.mean():.2f}" in words(fig)


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60))
def test_a_wide_histogram_keeps_every_count_in_a_bounded_number_of_bars(values):
    from gdlab.views.staleness import Counts

    pushes = np.zeros(len(values), PUSH)
    pushes["version"], pushes["staleness"] = 1, values
    counts = Counts(100)
    counts.add(pushes)
    (bars,) = counts.bars()
    assert bars["y"].sum() == len(values) and len(bars["x"]) <= 48
    assert counts.mean == pytest.approx(np.mean(values))


def test_clipped_gradients_are_marked_and_those_not_finite_are_counted(asynchronous):
    fig, pushes = gd.views.grad_norm(asynchronous), asynchronous.pushes
    finite = np.isfinite(pushes["grad_norm"])
    assert len(fig.data[1].x) == int((finite & (pushes["clip_scale"] < 1)).sum()) > 0
    assert len(fig.data[0].x) + len(fig.data[1].x) == int(finite.sum())
    assert "2 gradients not finite" in words(fig) and "clip at 10" in words(fig)
    assert fig.layout.shapes[0].y0 == 10.0


# ---- colours ----

def test_every_colour_of_the_light_theme_has_its_own_dark_twin():
    assert len(set(style.DARK.values())) == len(style.DARK)
    assert not set(style.DARK) & set(style.DARK.values())


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = np.array([int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_words_can_be_read_in_both_themes():
    for colour in (style.INK, style.MUTED):
        assert contrast(colour, style.PAPER) >= 4.5
        assert contrast(style.DARK[colour], style.DARK[style.PAPER]) >= 4.5


def test_lines_can_be_told_from_the_page_in_the_dark_theme():
    for colour in style.WORKERS:
        assert contrast(style.DARK.get(colour, colour), style.DARK[style.PAPER]) >= 4.5


def test_a_themed_figure_is_dark_and_comes_back(asynchronous):
    fig = gd.views.loss(asynchronous)
    dark = gd.views.themed(fig)
    assert dark.layout.template.layout.paper_bgcolor == style.DARK[style.PAPER]
    assert gd.views.themed(dark, dark=False).layout.template.layout == fig.layout.template.layout


# ---- fewer points ----

@given(st.integers(0, 4000), st.integers(2, 60))
def test_every_second_power_keeps_the_first_and_the_last_row(count, points):
    index = every(count, points)
    assert len(index) <= points + 1
    assert not count or (index[0], index[-1]) == (0, count - 1)


def test_a_thinned_line_keeps_its_extremes():
    y = np.zeros(50_000)
    y[12_345], y[40_000] = 7.0, -3.0
    x, kept = line(np.arange(50_000), y, 500)
    assert len(x) <= 500 and kept.max() == 7.0 and kept.min() == -3.0


@given(st.lists(st.integers(0, 40), max_size=30), st.booleans(), st.integers(1, 12))
def test_a_live_line_is_the_same_however_it_arrives_and_a_chart_that_follows_it_holds_just_that(sizes, largest, limit):
    count = sum(sizes)
    x, y = np.arange(count) * 1.0, np.random.default_rng(count).normal(size=count)
    thinned, at_once, chart, at = Thinned(limit=limit, largest=largest), Thinned(limit=limit, largest=largest), None, 0
    chart = np.empty((2, 0))
    for size in sizes:
        whole, columns = thinned.add(x[at:at + size], y[at:at + size])
        chart = columns if whole else np.concatenate([chart, columns], axis=1)
        at += size
    at_once.add(x, y)
    np.testing.assert_array_equal(chart, thinned.kept)
    assert thinned.kept.shape[1] <= limit
    for number, point in enumerate(thinned.kept.T):
        group = slice(number * thinned.stride, (number + 1) * thinned.stride)
        assert point[1] == (y[group].max() if largest else y[group][0])
    if thinned.stride == at_once.stride:
        np.testing.assert_array_equal(thinned.kept, at_once.kept)


# ---- live ----

def pieces(chunk: Chunk, size: int):
    for at in range(0, max(len(chunk.pushes), len(chunk.path)), size):
        part = slice(at, at + size)
        yield Chunk(chunk.pushes[part], chunk.releases[part], chunk.path_versions[part], chunk.path[part],
                    chunk.losses[part], chunk.surface if at == 0 else None)


def follow(name: str, trace: gd.Trace, size: int) -> tuple[dict, list[list[dict]]]:
    """Return the chart's state after a run was followed piece by piece, and the operations of each frame."""
    view = live.make([name], trace.experiment, trace.environment)[name]
    state = {"data": [], "layout": {}}
    change(state, {"op": "figure", "figure": view.figure()})
    frames = []
    for piece in pieces(Follower(trace.folder).read(), size):
        frames.append(view.update(piece))
        for operation in frames[-1]:
            change(state, operation)
    return state, frames


@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("run", ["asynchronous", "synchronous", "large"])
def test_a_live_chart_ends_with_the_points_of_the_finished_figure(name, run, request):
    trace = request.getfixturevalue(run)
    state, _ = follow(name, trace, 7)
    final = VIEWS[name](trace)
    for index, (now, then) in enumerate(zip(state["data"], final.data, strict=True)):
        if name == "trajectory" and index >= READS:
            assert np.isin(now["x"], then.x).all()  # only the latest reads are drawn while a run goes on
        elif name.startswith("loss") and index == 0:
            assert len(now["x"]) == len(then.x)
        else:
            assert len(now.get("x", ())) == len(then.x), (name, index)
            np.testing.assert_allclose(np.sort(now.get("x", ())), np.sort(then.x), atol=1e-9)
    assert not any(note.get("name") == "message" for note in state["layout"].get("annotations", ()))


@pytest.mark.parametrize("name", USUAL)
def test_a_frame_costs_a_bounded_number_of_points_however_long_the_run(name, tmp_path):
    trace = made(tmp_path / "run", gd.Experiment(gd.Ravine(), strategy=gd.Async(), clip=10.0, updates=4000), 4000)
    state, frames = follow(name, trace, 40)
    sizes = [sum(np.size(value) for operation in frame for value in operation.values()
                 if isinstance(value, np.ndarray)) for frame in frames[1:]]
    assert max(sizes) <= 6000
    assert np.median(sizes) <= 700
    for drawn in state["data"]:
        assert len(drawn.get("x", ())) <= 1000


@pytest.mark.parametrize("name", USUAL)
def test_a_frame_in_which_nothing_happened_changes_nothing(name, asynchronous):
    view = live.make([name], asynchronous.experiment, asynchronous.environment)[name]
    nothing = Follower(Path("/nowhere")).read()
    assert view.update(nothing) == []


def test_losses_that_come_late_and_out_of_order_are_drawn_in_order(asynchronous):
    view = live.make(["loss"], asynchronous.experiment, {})["loss"]
    chunk = Follower(asynchronous.folder).read()
    state = {"data": [], "layout": {}}
    change(state, {"op": "figure", "figure": view.figure()})
    nothing = chunk.pushes[:0]
    for part in (slice(10, 20), slice(0, 10)):
        late = Chunk(nothing, nothing, chunk.path_versions[:0], chunk.path[:0], chunk.losses[part])
        for operation in view.update(late):
            change(state, operation)
    np.testing.assert_array_equal(state["data"][1]["x"], np.arange(20))


def test_a_new_plane_moves_the_whole_path(tmp_path, large):
    view = live.make(["trajectory"], large.experiment, {})["trajectory"]
    chunk = Follower(large.folder).read()
    state = {"data": [], "layout": {}}
    change(state, {"op": "figure", "figure": view.figure()})
    turned = {**chunk.surface, "basis": chunk.surface["basis"][::-1]}
    empty = chunk.pushes[:0]
    later = Chunk(empty, empty, chunk.path_versions[:0], chunk.path[:0], chunk.losses[:0], turned)
    first = None
    for piece in (chunk, later):
        for operation in view.update(piece):
            change(state, operation)
        first = first if first is not None else np.array(state["data"][PATH]["x"])
    np.testing.assert_allclose(state["data"][PATH]["y"], first, rtol=1e-5)


def test_the_axes_widen_to_a_path_that_is_ahead_of_its_surface_but_not_to_one_that_flies_away(tmp_path):
    view = live.make(["trajectory"], gd.Experiment(gd.Ravine()), {})["trajectory"]
    box = {"x": np.array([0.0, 1.0]), "y": np.array([0.0, 1.0]), "loss": np.ones((2, 2)), "kind": "parameters"}
    state = {"data": [], "layout": {}}
    change(state, {"op": "figure", "figure": view.figure()})
    none, losses = np.empty(0, PUSH), np.empty(0, [("version", "<i8"), ("loss", "<f8")])
    for version, point in enumerate([(0.5, 0.5), (1.2, 0.5), (-0.1, 0.5), (1e9, 0.5), (np.nan, np.inf)]):
        chunk = Chunk(none, none, np.array([version]), np.array([point]), losses, None if version else box)
        for operation in view.update(chunk):
            change(state, operation)
    low, high = state["layout"]["xaxis"]["range"]
    assert -1.0 < low < -0.1 and 1.2 < high < 2.0
    assert state["layout"]["yaxis"]["range"] == [0.0, 1.0]


def test_a_name_that_is_no_view_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="'speed' is no view: there are trajectory, loss"):
        live.make(["speed"], gd.Experiment(), {})


def test_a_path_of_many_parameters_is_held_in_bounded_memory(tmp_path):
    folder = tmp_path / "run"
    begun(folder)
    writer = PathWriter(folder, 100_000, "<f4", 100)
    for version in range(101):
        writer.append(version, np.full(100_000, float(version), "f4"))
    writer.close()
    write_surface(folder, 0, x=np.arange(2.0), y=np.arange(2.0), loss=np.ones((2, 2)), kind="pca",
                  origin=np.zeros(100_000), basis=np.eye(2, 100_000), explained=np.array([1.0, 0.0]))
    view = live.TrajectoryLines(gd.Experiment(), {})
    view.update(Follower(folder).read())
    assert sum(row.nbytes for row in view._rows.values()) <= 30e6
