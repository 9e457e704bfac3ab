"""Clipping by norm, by value and adaptively, at every magnitude that a gradient can have."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gdlab.clipping import apply_clip, clip_adaptive, clip_as_torch, clip_by_norm, clip_by_value, norm, normalise
from gdlab.parts import Clip

INF, NAN = math.inf, math.nan


def tensor64(v):
    return torch.tensor(v, dtype=torch.float64)


@pytest.fixture(params=[np.array, tensor64], ids=["array", "tensor"])
def make(request):
    return request.param


def same(got, wanted):
    return np.array_equal(np.asarray(got, float), np.asarray(wanted, float), equal_nan=True)


# --- by norm: g / max(1, ||g|| / c), Pascanu, Mikolov & Bengio 2013 ---------------------------------------------------


@pytest.mark.parametrize(("g", "c", "clipped"), [
    ([3.0, 4.0], 1.0, [0.6, 0.8]), ([3.0, 4.0], 5.0, [3.0, 4.0]), ([3.0, 4.0], 10.0, [3.0, 4.0]),
    ([0.0, 0.0], 1.0, [0.0, 0.0]), ([6e-07, 8e-07], 1e-06, [6e-07, 8e-07])])
def test_clipping_by_norm_is_the_textbook_rule(make, g, c, clipped):
    assert np.asarray(clip_by_norm(make(g), c)) == pytest.approx(clipped, rel=1e-12, abs=0)


@pytest.mark.parametrize(("g", "c", "theirs"), [
    ([3.0, 4.0], 1.0, [0.599999880000024, 0.799999840000032]), ([3.0, 4.0], 5.0, [2.99999940000012, 3.99999920000016]),
    ([3.0, 4.0], 10.0, [3.0, 4.0]), ([0.0, 0.0], 1.0, [0.0, 0.0]), ([6e-07, 8e-07], 1e-06, [3e-07, 4e-07])])
def test_torchs_rule_differs_at_and_near_the_threshold(g, c, theirs):  # coefficient min(1, c / (||g|| + 1e-6))
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = tensor64(g)
    returned = torch.nn.utils.clip_grad_norm_([weight], c)
    assert weight.grad.tolist() == pytest.approx(theirs, rel=1e-12, abs=0)
    assert norm(tensor64(g)) == pytest.approx(float(returned), rel=1e-15)  # the norm before clipping


def test_a_norm_at_the_threshold_is_untouched(make):
    for g, c in (([3.0, 4.0], 5.0), ([5.0, -12.0], 13.0), ([0.0, 2.0**-600], 2.0**-600), ([0.0, 0.0], 1e-300)):
        start = make(g)
        assert clip_by_norm(start, c) is start


def test_a_large_or_infinite_threshold_returns_the_same_bits(make):
    for g in ([1e300, -0.0, 1e-300], [NAN, 1.0], [INF, 1.0], [1.7e308] * 4):
        start = make(g)
        assert clip_by_norm(start, INF) is start
        assert clip_by_value(start, INF) is start
        assert clip_adaptive(start, start, INF) is start
        assert apply_clip(start, SimpleNamespace(norm=INF))[:2] == (start, 1.0)
    start = make([1e300, -0.0, 1e-300])
    assert clip_by_norm(start, 2e300) is start


@pytest.mark.parametrize(("g", "c", "clipped"), [
    ([3e200, 4e200], 1.0, [0.6, 0.8]),  # ||g||^2 overflows
    ([-1.7e308, 1.7e308, 0.0], 1.0, [-math.sqrt(0.5), math.sqrt(0.5), 0.0]),  # so does ||g||
    ([3e-200, 4e-200], 1e-200, [0.6e-200, 0.8e-200]),  # ||g||^2 vanishes
    ([3e-310, 4e-310], 5e-312, [3e-312, 4e-312]),  # subnormal
    ([3e200, 4e200], 1e-200, [0.6e-200, 0.8e-200]),  # ||g|| / c overflows
])
def test_the_norm_is_right_where_its_square_is_not(make, g, c, clipped):
    assert np.asarray(clip_by_norm(make(g), c)) == pytest.approx(clipped, rel=1e-10, abs=0)


def test_the_norm_itself_is_safe(make):
    assert norm(make([3e200, 4e200])) == pytest.approx(5e200, rel=1e-15)
    assert norm(make([3e-200, 4e-200])) == pytest.approx(5e-200, rel=1e-15)
    assert norm(make([5e-324])) == 5e-324
    assert norm(make([1.7e308, 1.7e308])) == INF  # beyond float64 itself
    assert norm(make([0.0, -0.0])) == 0.0
    assert norm(make([])) == 0.0
    assert norm(make([1.0, INF, -INF])) == INF
    assert math.isnan(norm(make([1.0, INF, NAN])))


def test_narrow_gradients_are_clipped_in_their_own_dtype():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        g = torch.tensor([3e4, 4e4]).to(dtype)
        clipped = clip_by_norm(g, 1.0)
        assert clipped.dtype == dtype
        assert clipped.double().tolist() == pytest.approx([0.6, 0.8], rel=float(torch.finfo(dtype).eps))
    for dtype in (np.float32, np.float16):
        g = np.array([3e4, 4e4], dtype)
        clipped = clip_by_norm(g, 1.0)
        assert clipped.dtype == dtype
        assert clipped.astype(float) == pytest.approx([0.6, 0.8], rel=float(np.finfo(dtype).eps))
    big = clip_by_norm(torch.tensor([3e38, 3e38]), 1e-20)  # norm and ratio beyond fp32
    assert big.tolist() == pytest.approx([math.sqrt(0.5) * 1e-20] * 2, rel=1e-6)


def test_arrays_and_tensors_are_clipped_alike():
    rng = np.random.default_rng(1)
    for dtype, rel in ((np.float32, 2e-7), (np.float64, 4e-16)):
        g = rng.normal(size=(40, 5)).astype(dtype)
        array, tensor = clip_by_norm(g, 0.5), clip_by_norm(torch.from_numpy(g), 0.5)
        assert (array.dtype, tuple(tensor.shape)) == (g.dtype, g.shape)
        np.testing.assert_allclose(tensor.numpy(), array, rtol=rel, atol=0)


def test_lists_and_whole_numbers_are_taken_as_float64():
    assert clip_by_norm([3, 4], 1.0).tolist() == [0.6, 0.8]
    assert clip_by_norm(torch.tensor([3, 4]), 1.0).tolist() == [0.6, 0.8]
    assert clip_by_value([3, -4], 1.0).tolist() == [1.0, -1.0]


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(g=st.lists(finite, max_size=6), c=st.floats(1e-290, 1e300))
@example(g=[1.7976931348623157e308] * 4, c=1.0)
@example(g=[5e-324, 5e-324], c=1e-290)
@example(g=[1e-160, 1e-300], c=1e-200)
def test_a_clipped_gradient_is_no_longer_than_the_threshold_and_keeps_its_direction(g, c):
    for start in (np.array(g), tensor64(g)):
        clipped = clip_by_norm(start, c)
        length = norm(start)
        assert norm(clipped) <= c * (1 + 1e-12)
        if length <= c:
            assert clipped is start
        elif length < INF:
            exact = [float(Fraction(x) * Fraction(c) / Fraction(length)) for x in g]
            assert np.asarray(clipped) == pytest.approx(exact, rel=1e-9, abs=max(c * 1e-300, 1e-310))


@settings(deadline=None)
@given(g=st.lists(finite, min_size=1, max_size=6), k=st.integers(-60, 60))
def test_clipping_follows_a_change_of_units(g, k):
    g = np.array(g)
    assume(all(x == 0 or 1e-250 < abs(x) < 1e250 for x in g))
    assert same(clip_by_norm(g * 2.0**k, 2.0**k), clip_by_norm(g, 1.0) * 2.0**k)


# --- NaN and infinity ------------------------------------------------------------------------------------------------


def test_nan_is_never_hidden_by_the_order_of_a_comparison(make):
    assert max(1, NAN) == 1  # a pure-Python g / max(1, norm / c) would let it through
    assert math.isnan(max(NAN, 1))
    assert same(clip_by_norm(make([NAN, 1e9, 0.0]), 1.0), [NAN, NAN, NAN])
    assert same(clip_by_value(make([NAN, 1e9]), 1.0), [NAN, 1.0])
    assert same(clip_adaptive(make([NAN, 1e9]), make([1.0, 1.0]), 0.1), [NAN, NAN])


def test_an_infinity_becomes_nan_and_the_rest_zero_as_in_torch(make):
    g = [INF, 1.0, -2.0]
    assert same(clip_by_norm(make(g), 1.0), [NAN, 0.0, 0.0])
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    weight.grad = tensor64(g)
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert same(weight.grad, [NAN, 0.0, 0.0])


@pytest.mark.parametrize("bad", [INF, NAN])
def test_torch_refuses_such_a_norm_if_asked(bad):
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.full((1,), bad)
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)


def test_clipping_by_value_hides_infinity_but_not_nan(make):  # torch's clip_grad_value_ too
    assert same(clip_by_value(make([INF, -INF, NAN]), 1.0), [1.0, -1.0, NAN])
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([INF, -INF, NAN])
    torch.nn.utils.clip_grad_value_([weight], 1.0)
    assert same(weight.grad, [1.0, -1.0, NAN])


# --- where and how much ----------------------------------------------------------------------------------------------


def test_clipping_each_worker_is_not_clipping_the_average(make):
    workers = [make([30.0, 0.0]), make([0.0, 1.0])]
    each = (clip_by_norm(workers[0], 1.0) + clip_by_norm(workers[1], 1.0)) / 2
    average = clip_by_norm((workers[0] + workers[1]) / 2, 1.0)
    assert np.asarray(each) == pytest.approx([0.5, 0.5], rel=1e-12)
    assert np.asarray(average) == pytest.approx([0.9994449069791543, 0.03331483023263848], rel=1e-12)
    assert [norm(each), norm(average)] == pytest.approx([0.7071067811865476, 1.0], rel=1e-12)


def test_one_norm_over_all_parameters_is_not_a_norm_for_each(make):
    assert np.asarray(clip_by_norm(make([3.0, 4.0]), 1.0)) == pytest.approx([0.6, 0.8], abs=1e-12)
    assert [float(clip_by_norm(make([x]), 1.0)[0]) for x in (3.0, 4.0)] == [1.0, 1.0]


def test_a_clipped_descent_walks_before_it_runs(make):
    # f = w^2 / 2 from 100 with rate 0.1: c * rate a step while |w| > c, then geometric; 990 + 66 steps.
    w, steps, clipped_steps = make([100.0]), 0, 0
    while abs(float(w[0])) > 1e-3:
        g = clip_by_norm(w, 1.0)
        clipped_steps += g is not w
        w, steps = w - 0.1 * g, steps + 1
    assert abs(steps - 1056) <= 1
    assert abs(clipped_steps - 990) <= 1


# --- by value and adaptive -------------------------------------------------------------------------------------------


def test_clipping_by_value_limits_each_element(make):
    assert same(clip_by_value(make([-3.0, -1.0, 0.5, 7.0]), 1.0), [-1.0, -1.0, 0.5, 1.0])


def test_a_value_beyond_the_dtype_clips_nothing():
    for g in (torch.tensor([6e4, INF]).half(), np.array([6e4, INF], np.float16), torch.tensor([3e38, INF])):
        assert clip_by_value(g, 1e39) is g


def test_adaptive_clipping_is_relative_to_the_parameters_of_each_group(make):  # Brock et al. 2021, equation 3
    g, w = make([3.0, 4.0, 0.06, 0.08, 1.0]), make([6.0, 8.0, 6.0, 8.0, 0.0])
    groups = [slice(0, 2), slice(2, 4), slice(4, 5)]
    clipped = np.asarray(clip_adaptive(g, w, 0.1, groups))
    # 5 > 0.1 * 10: down to norm 1; 0.1 < 1: untouched; weights of 0 count as 1e-3, so that they can grow.
    assert clipped == pytest.approx([0.6, 0.8, 0.06, 0.08, 1e-4], rel=1e-12)
    assert np.asarray(g).tolist() == [3.0, 4.0, 0.06, 0.08, 1.0]
    assert norm(clip_adaptive(g, w, 0.1)) == pytest.approx(0.1 * norm(w), rel=1e-12)
    assert clip_adaptive(g, w, 10.0 * norm(g) / 1e-3, groups) is g


def test_adaptive_clipping_agrees_with_its_formula():
    rng = np.random.default_rng(3)
    g, w, factor = rng.normal(size=12), rng.normal(size=12), 0.3
    groups = [slice(0, 5), slice(5, 6), slice(6, 12)]
    wanted = g.copy()
    for s in groups:
        limit = max(np.linalg.norm(w[s]), 1e-3)
        if np.linalg.norm(g[s]) / limit > factor:
            wanted[s] = factor * limit / np.linalg.norm(g[s]) * g[s]
    np.testing.assert_allclose(clip_adaptive(g, w, factor, groups), wanted, rtol=1e-14)
    np.testing.assert_allclose(clip_adaptive(tensor64(g), tensor64(w), factor, groups).numpy(), wanted, rtol=1e-14)


@pytest.mark.parametrize("bad", [0.0, -1.0, NAN])
def test_a_threshold_that_is_not_above_zero_is_refused(bad):
    for clipping in (lambda: clip_by_norm([1.0], bad), lambda: clip_by_value([1.0], bad),
                     lambda: clip_adaptive([1.0], [1.0], bad)):
        with pytest.raises(ValueError, match="must be above 0"):
            clipping()


# --- what a worker and the store call ---------------------------------------------------------------------------------


def test_apply_clip_reports_the_norm_before_and_how_much_is_left(make):
    g = make([3.0, 4.0])
    assert apply_clip(g, None) == (g, 1.0, 5.0)
    assert apply_clip(g, Clip(norm=5.0)) == (g, 1.0, 5.0)
    clipped, scale, before = apply_clip(g, Clip(norm=1.0))
    assert np.asarray(clipped).tolist() == [0.6, 0.8]
    assert (scale, before) == (0.2, 5.0)
    clipped, scale, before = apply_clip(g, Clip(value=3.0))
    assert np.asarray(clipped).tolist() == [3.0, 3.0]
    assert (scale, before) == (pytest.approx(math.sqrt(18) / 5), 5.0)
    clipped, scale, before = apply_clip(g, Clip(adaptive=0.5), make([6.0, 8.0]), [slice(0, 1), slice(1, 2)])
    assert np.asarray(clipped).tolist() == [3.0, 4.0]
    assert (scale, before) == (1.0, 5.0)
    clipped, scale, before = apply_clip(g, Clip(adaptive=0.1), make([6.0, 8.0]))
    assert (scale, before) == (pytest.approx(0.2), 5.0)


def test_apply_clip_of_nothing_and_of_what_is_not_finite(make):
    for rule in (None, Clip(norm=1.0), Clip(value=1.0), Clip(adaptive=1.0)):
        zero = make([0.0, 0.0])
        clipped, scale, before = apply_clip(zero, rule, zero)
        assert same(clipped, [0.0, 0.0])
        assert (scale, before) == (1.0, 0.0)
    clipped, scale, before = apply_clip(make([INF, 1.0]), Clip(norm=1.0))
    assert same(clipped, [NAN, 0.0])
    assert (scale, before) == (0.0, INF)
    clipped, scale, before = apply_clip(make([NAN, 1.0]), Clip(norm=1.0))
    assert same(clipped, [NAN, NAN])
    assert same([scale, before], [NAN, NAN])
    clipped, scale, before = apply_clip(make([INF, 1.0]), Clip(value=1.0))
    assert same(clipped, [1.0, 1.0])
    assert (scale, before) == (0.0, INF)


def test_apply_clip_is_clip_by_norm():
    rng = np.random.default_rng(2)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (1, 2, 650):
            g = torch.from_numpy(rng.normal(size=size)).to(dtype)
            assert torch.equal(apply_clip(g, Clip(norm=0.3))[0], clip_by_norm(g, 0.3))


def test_adaptive_clipping_without_parameters_says_what_to_do():
    with pytest.raises(ValueError, match="give params too"):
        apply_clip(torch.ones(2), Clip(adaptive=0.1))


def test_gradients_are_not_changed_in_place(make):
    g = make([3.0, 4.0])
    for rule in (Clip(norm=1.0), Clip(value=1.0), Clip(adaptive=0.1)):
        apply_clip(g, rule, make([1.0, 1.0]))
    assert np.asarray(g).tolist() == [3.0, 4.0]


# --- a number alone ---------------------------------------------------------------------------------------------------

SCALARS = {"float": float, "numpy scalar": np.float64, "0-d array": np.array, "0-d tensor": tensor64,
           "numpy float32": np.float32, "0-d float32 tensor": lambda v: torch.tensor(v, dtype=torch.float32)}


@pytest.fixture(params=SCALARS)
def alone(request):
    return SCALARS[request.param]


@pytest.mark.parametrize(("g", "c", "clipped"), [
    (3.0, 1.0, 1.0), (-4.0, 1.0, -1.0), (4.0, 4.0, 4.0), (0.0, 1.0, 0.0), (-0.0, 1.0, -0.0), (0.5, INF, 0.5),
    (NAN, 1.0, NAN), (INF, 1.0, NAN), (1e20, 1.0, 1.0), (1e-30, 1e-31, 1e-31)])
def test_a_number_alone_is_clipped_as_a_vector_of_one(alone, g, c, clipped):
    got = clip_by_norm(alone(g), c)
    assert np.shape(got) == ()
    assert float(got) == pytest.approx(clipped, rel=1e-6, nan_ok=True)
    assert math.isnan(got) or math.copysign(1, got) == math.copysign(1, g)
    assert norm(alone(g)) == pytest.approx(abs(g), rel=1e-7, nan_ok=True)


def test_a_number_alone_is_limited_by_value_and_nan_survives(alone):
    assert [float(clip_by_value(alone(g), 1.0)) for g in (INF, -INF, 0.5, -7.0)] == [1.0, -1.0, 0.5, -1.0]
    assert math.isnan(clip_by_value(alone(NAN), 1.0))


def test_a_number_alone_walks_before_it_runs(alone):
    w, steps = alone(100.0), 0
    while abs(float(w)) > 1e-3:
        w, steps = w - 0.1 * clip_by_norm(w, 1.0), steps + 1
    assert abs(steps - 1056) <= 1


def test_a_threshold_above_every_norm_changes_no_bit_of_a_descent(alone):
    w, plain = alone(100.0), alone(100.0)
    for _ in range(50):
        w, plain = w - 0.1 * clip_by_norm(w, 100.5), plain - 0.1 * plain
        assert float(w) == float(plain)


def test_the_normalised_gradient_has_norm_one_and_of_zero_is_zero(make):
    for g in ([3.0, 4.0], [3e200, 4e200], [3e-200, 4e-200], [3e-310, 4e-310], [1.2e308, 1.6e308]):
        assert np.asarray(normalise(make(g))) == pytest.approx([0.6, 0.8], rel=1e-9)
        assert np.asarray(normalise(make(g), 5.0)) == pytest.approx([3.0, 4.0], rel=1e-9)
    assert same(normalise(make([0.0, -0.0])), [0.0, 0.0])
    assert same(normalise(make([NAN, 1.0])), [NAN, NAN]) and same(normalise(make([INF, 1.0])), [NAN, 0.0])
    assert len(normalise(make([]))) == 0
    clipped, scale, before = apply_clip(make([0.3, 0.4]), Clip(normalised=2.0))
    assert np.asarray(clipped) == pytest.approx([1.2, 1.6]) and (scale, before) == (pytest.approx(4.0), 0.5)
    assert normalise(torch.tensor([6e4, 0.0]).half()).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(("g", "c"), [
    ([3.0, 4.0], 1.0), ([3.0, 4.0], 5.0), ([3.0, 4.0], 10.0), ([0.0, 0.0], 1.0), ([6e-07, 8e-07], 1e-06),
    ([INF, 1.0], 1.0), ([NAN, 1.0], 1.0), ([1e20, 1.0], 1.0)])
def test_torchs_rule_beside_ours_is_the_one_in_torch(make, g, c):
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    weight.grad = tensor64(g)
    torch.nn.utils.clip_grad_norm_([weight], c)
    assert np.asarray(clip_as_torch(make(g), c)) == pytest.approx(weight.grad.numpy(), rel=1e-12, abs=0, nan_ok=True)
