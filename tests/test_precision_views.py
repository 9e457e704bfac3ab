"""The views of finite numbers: what is drawn is what the formats, the samples and the clipping's formula say."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_traces import begun, made

import gdlab as gd
from gdlab.formats import facts, round_to, ulp
from gdlab.trace import ExponentWriter, Trace, UpdateWriter
from gdlab.views import clip, clip_vectors, exponents, formats, loss_scale, lost_updates, number_line
from gdlab.views.clip import gradients
from gdlab.views.lost_updates import is_lost
from gdlab.views.number_line import neighbours

VIEWS = (number_line, lost_updates, exponents, loss_scale, formats, clip, clip_vectors)


def words(fig) -> str:
    title = f"{fig.layout.title.text} {fig.layout.title.subtitle.text}".replace("<br>", " ")
    return title + " ".join(f" {note.text}".replace("<br>", " ") for note in fig.layout.annotations)


def named(fig, name: str):
    return [trace for trace in fig.data if trace.name == name]


def sampled(folder: Path, experiment: gd.Experiment, weights=(1.03125, -0.72), updates=(-0.0035, 0.002),
            gradients=((3.0, 4.0), (0.3, 0.4)), loss_scale: float = 1.0, nonfinite: int = 0) -> Trace:
    """Write a run of two parameters with the same samples at each fourth version."""
    trace = made(folder, experiment, 20, nonfinite=nonfinite)
    with_updates, name = UpdateWriter(folder, 2, 20), experiment.precision.weights
    ranks = ExponentWriter(folder, "rank0", 20)
    for version in range(0, 20, 4):
        weight = round_to(np.array(weights), name)
        lost = np.mean(is_lost(weight, np.array(updates), name))
        with_updates.append(version, weight, np.array(updates), float(lost))
        for worker, gradient in enumerate(gradients):
            ranks.append(worker, version, loss_scale, np.array(gradient) * loss_scale)
    with_updates.close()
    ranks.close()
    return trace


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return sampled(tmp_path_factory.mktemp("bf16") / "run", gd.Experiment(gd.Ravine(), precision="bf16", clip=10.0))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return sampled(tmp_path_factory.mktemp("mixed") / "run", gd.Experiment(gd.Ravine(), precision="mixed_fp16"),
                   loss_scale=1024.0, nonfinite=2)


# ---- every view ----

@pytest.mark.parametrize("view", VIEWS)
def test_every_view_asks_a_question_names_its_axes_and_says_what_it_was_measured_on(view, mixed):
    fig = view(mixed)
    assert fig.layout.title.text.endswith("?") and fig.layout.meta["description"].startswith(fig.layout.title.text)
    assert "Measured: 4 ranks on 2 cores, oversubscribed" in words(fig)
    assert any(axis.title.text for axis in fig.select_xaxes()) and any(axis.title.text for axis in fig.select_yaxes())
    assert not any(note.name == "message" for note in fig.layout.annotations)


@pytest.mark.parametrize("view", VIEWS)
def test_a_run_that_has_only_been_announced_gives_a_figure_with_a_message(view, tmp_path):
    fig = view(begun(tmp_path / "run"))
    assert any(note.name == "message" for note in fig.layout.annotations)
    assert "No run yet" in words(fig)


@pytest.mark.parametrize("view", VIEWS)
def test_records_that_are_half_written_and_numbers_that_are_not_finite_do_not_break_a_view(view, tmp_path):
    nan, inf = float("nan"), float("inf")
    exp = gd.Experiment(gd.Ravine(), precision="mixed_fp16")
    trace = sampled(tmp_path / "run", exp, (nan, inf), (inf, nan), ((nan, 1.0), (inf, inf)), nonfinite=3)
    for file in ("updates.bin", "exponents-rank0.bin", "events-server.bin"):
        with open(trace.folder / file, "ab") as opened:
            opened.write(b"torn")
    assert view(trace).to_json()


@pytest.mark.parametrize("view", [gd.views.loss, lost_updates, formats, clip])
def test_views_of_several_runs_draw_none_without_complaint(view):
    assert any(note.name == "message" for note in view().layout.annotations)


# ---- the number line ----

def test_bf16_stays_at_1_03125_when_the_update_is_less_than_half_a_spacing(bf16):
    fig = number_line(bf16, parameter=0)
    assert "-0.448 spacings: lost" in words(fig)
    assert fig.layout.xaxis.ticktext == ("1.0234375", "1.03125", "1.0390625")
    (after,) = named(fig, "after it")
    assert after.x.tolist() == [0.0]


def test_below_a_power_of_two_the_spacing_is_half_as_large(tmp_path):
    trace = sampled(tmp_path / "run", gd.Experiment(gd.Ravine(), precision="bf16"), (1.0, 1.0), (-0.003, 0.003))
    down, up = number_line(trace, parameter=0), number_line(trace, parameter=1)
    assert "becomes 0.9960938" in words(down) and "lost" in words(up)


@given(st.floats(2.0**-14, 100.0), st.sampled_from(["fp32", "fp16"]), st.booleans())
def test_the_values_around_a_weight_are_those_next_to_it(size, name, negative):
    dtype = {"fp32": np.float32, "fp16": np.float16}[name]
    weight = dtype(-size if negative else size)
    values = neighbours(float(weight), 2.2 * ulp(float(weight), name), name)
    at = int(np.flatnonzero(values == weight)[0])
    assert values[at + 1] == float(np.nextafter(weight, dtype(np.inf)))
    assert values[at - 1] == float(np.nextafter(weight, dtype(-np.inf)))


def test_rounding_at_random_is_told_as_a_chance(tmp_path):
    precision = gd.Precision("bf16", "bf16", "bf16", rounding="stochastic")
    fig = number_line(sampled(tmp_path / "run", gd.Experiment(gd.Ravine(), precision=precision)), parameter=0)
    assert "moves with a chance of 0.448" in words(fig) and "right on average" in words(fig)


# ---- lost updates ----

@given(st.lists(st.tuples(st.floats(-4.0, 4.0, width=32), st.floats(-0.1, 0.1)), min_size=1))
def test_an_update_is_lost_exactly_if_the_cast_gives_the_old_weight_again(pairs):
    weight, update = round_to(np.array(pairs).T, "bf16")
    total = (weight + update).astype(np.float32)  # exact: both are bf16, and not far apart
    exact = total == weight + update
    again = total.astype(ml_dtypes.bfloat16).astype(np.float64) == weight
    np.testing.assert_array_equal(is_lost(weight, update, "bf16")[exact], (again & (update != 0))[exact])


def test_the_microscope_shows_each_sampled_update_once_on_its_side_of_half_a_spacing(bf16):
    fig = lost_updates(bf16)
    (kept,), (lost,), (half,) = named(fig, "kept"), named(fig, "lost"), named(fig, "half a spacing")[1:]
    assert (kept.x.size, lost.x.tolist()) == (1, [1.03125])
    np.testing.assert_array_equal(half.y, ulp(np.array(half.x), "bf16") / 2)
    assert "50% of 2 sampled updates of version 16 are lost" in fig.layout.meta["description"]


def test_the_share_lost_is_that_of_the_trace_and_other_formats_lose_of_the_same_updates(bf16):
    rows = made_lost(bf16, 0.25)
    fig = lost_updates(rows)
    (line,), (fp32,), (fp8,) = named(fig, "bf16"), named(fig, "in fp32"), named(fig, "in fp8_e4m3")
    assert set(line.y) == {0.25} and set(fp32.y) == {0.0} and set(fp8.y) == {1.0}


def made_lost(trace: Trace, share: float) -> Trace:
    """Return the same run, whose pushes say that rounding lost this share."""
    pushes = trace.pushes.copy()
    pushes["lost_fraction"] = share
    other = Trace(trace.folder)
    other._cached("pushes", other._events, lambda: pushes)
    return other


def test_several_runs_have_a_line_each(bf16, mixed):
    fig = lost_updates(made_lost(bf16, 0.5), made_lost(mixed, 0.0))
    assert [trace.y[0] for trace in fig.data if trace.mode == "lines" and trace.xaxis == "x2"] == [0.5, 0.0]


# ---- exponents ----

def test_the_loss_scale_moves_the_exponents_by_its_logarithm(mixed):
    before, after = exponents(mixed).data[:2]
    assert [bar.name for bar in (before, after)] == ["unscaled", "times the loss scale"]
    shares = [dict(zip(bar.x.tolist(), bar.y.tolist(), strict=True)) for bar in (before, after)]
    assert {x: y for x, y in shares[0].items() if y} == {1: 0.25, 2: 0.25, -2: 0.5}
    assert {x - 10: y for x, y in shares[1].items() if y} == {1: 0.25, 2: 0.25, -2: 0.5}


def test_each_format_is_drawn_from_its_smallest_to_its_largest_number(mixed):
    bars = {(bar.y[0], bar.width): (bar.base[0], bar.base[0] + bar.x[0]) for bar in exponents(mixed).data[2:]}
    assert bars["fp16", 0.7] == pytest.approx((-14, np.log2(65504))) and bars["fp16", 0.25] == (-24, -14)
    assert 2.0 ** bars["fp8_e4m3", 0.7][1] == pytest.approx(facts("fp8_e4m3").max)


def test_zeros_and_numbers_that_are_not_finite_are_told(tmp_path):
    exp = gd.Experiment(gd.Ravine(), precision="fp16")
    fig = exponents(sampled(tmp_path / "run", exp, gradients=((0.0, 1.0), (float("nan"), 1.0))))
    assert "33.3% of the numbers are 0; 5 are not finite" in words(fig)


# ---- the loss scale ----

def test_each_overflow_and_each_skipped_step_is_marked(mixed):
    rows = mixed.pushes
    fig = loss_scale(mixed)
    (over,), (skipped,) = named(fig, "overflow"), named(fig, "step skipped")
    assert over.x.size == int((rows["nonfinite"] > 0).sum()) == 2
    assert skipped.x.size == np.unique(rows["version"][np.isnan(rows["lost_fraction"])]).size
    assert "2 gradients overflowed" in words(fig)


def test_a_run_without_a_loss_scale_says_so(bf16):
    assert "does not scale its loss" in words(loss_scale(bf16))


# ---- side by side ----

def test_each_run_has_a_panel_of_its_own_on_the_same_axes(bf16, mixed):
    fig = formats(bf16, mixed, bf16)
    losses = [trace for trace in fig.data if trace.name == "loss"]
    assert len({trace.xaxis for trace in losses}) == 3
    for trace, run in zip(losses, (bf16, mixed, bf16), strict=True):
        np.testing.assert_allclose(trace.y, run.losses)
    assert {axis.matches for axis in fig.select_xaxes()} <= {None, "x", "x3", "x4"}
    assert "mixed_fp16" in words(fig)


# ---- clipping ----

def test_the_scale_applied_brings_each_norm_to_the_threshold(bf16):
    fig = clip(bf16)
    (scale,) = named(fig, "scale applied")
    assert scale.y.min() < 1.0 == scale.y.max()
    assert "clip at 10" in words(fig)
    several = clip(bf16, bf16)
    assert max(trace.y.max() for trace in named(several, "norm clipped away")) > 0.0


def vectors(fig, name: str) -> np.ndarray:
    (arrows,) = named(fig, name)
    points = np.stack([arrows.x, arrows.y], axis=1).reshape(-1, 3, 2)
    return points[:, 1] - points[:, 0]


def test_an_arrow_is_the_learning_rate_times_the_gradient_and_a_clipped_one_keeps_its_direction(tmp_path):
    trace = sampled(tmp_path / "run", gd.Experiment(gd.Ravine(), clip=1.0, optimizer=gd.SGD(lr=0.5)))
    fig = clip_vectors(trace, 4)
    np.testing.assert_allclose(vectors(fig, "before"), [[-1.5, -2.0], [-0.15, -0.2]], atol=1e-6)
    np.testing.assert_allclose(vectors(fig, "after"), [[-0.3, -0.4], [-0.15, -0.2]], atol=1e-6)
    np.testing.assert_allclose(vectors(fig, "mean after"), [[-0.225, -0.3]], atol=1e-6)
    assert "at version 4: 2.75 long before, 0.75 after" in words(fig)


def test_clipping_each_worker_can_turn_the_mean_around_and_clipping_the_mean_cannot(tmp_path):
    gradients = ((100.0, 0.0), (-3.0, 0.0), (-3.0, 0.0))
    each = sampled(tmp_path / "each", gd.Experiment(gd.Ravine(), clip=1.0), gradients=gradients)
    mean = sampled(tmp_path / "mean", gd.Experiment(gd.Ravine(), clip=gd.Clip(norm=1.0, where="average")),
                   gradients=gradients)
    assert "turned by 180°" in words(clip_vectors(each))
    assert "turned by 0°" in words(clip_vectors(mean))


def test_clipping_before_unscaling_shortens_by_the_loss_scale_too(tmp_path):
    precision = gd.Precision(compute="fp16", loss_scale=1024.0)
    rule = gd.Clip(norm=1.0, before_unscale=True)
    exp = gd.Experiment(gd.Ravine(), clip=rule, precision=precision, optimizer=gd.SGD(lr=1.0))
    fig = clip_vectors(sampled(tmp_path / "run", exp, loss_scale=1024.0))
    np.testing.assert_allclose(np.linalg.norm(vectors(fig, "after"), axis=1), 1 / 1024, rtol=1e-2)


def test_without_a_version_the_longest_gradient_is_shown(tmp_path):
    trace = sampled(tmp_path / "run", gd.Experiment(gd.Ravine()))
    with closing(ExponentWriter(trace.folder, "rank2", 20)) as ranks:
        ranks.append(2, 7, 1.0, np.array([300.0, 400.0]))
    version, _, found, _ = gradients(trace, None)
    assert version == 7 and found.tolist() == [[300.0, 400.0]]


def test_a_run_whose_loss_overflows_says_so_beside_the_others(tmp_path, bf16):
    broken = sampled(tmp_path / "run", gd.Experiment(gd.Ravine(), precision="fp16"))
    with open(broken.folder / "losses.bin", "r+b") as file:
        file.seek(16 * 5 + 8)
        file.write(np.float64(np.inf).tobytes())
    assert "the loss is not finite from update 5 on" in words(formats(bf16, broken))


def test_local_sgd_pushes_no_gradient_that_could_be_drawn(tmp_path):
    trace = sampled(tmp_path / "run", gd.Experiment(gd.Ravine(), strategy=gd.LocalSGD(period=4)))
    assert "No gradient of two parameters" in words(clip_vectors(trace))
