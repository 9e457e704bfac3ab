"""Number formats: facts, rounding to nearest, stochastic rounding, and what finite precision does to descent."""

import math
import subprocess
import sys

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat.types import Domain, FormatInfo
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gdlab.formats import NAMES, Float, compensated_add, facts, round_to, ulp

FLOATS = [Float(2, 1), Float(3, 2), Float(4, 3), Float(5, 6), Float(6, 1), Float(8, 18), Float(11, 5), Float(11, 52)]
FORMATS = [*NAMES, *FLOATS]
INF, NAN = math.inf, math.nan


def as_list(v):
    return [float(x) for x in v]


CARRIERS = {
    "float": lambda v, f, **kw: [round_to(x, f, **kw) for x in v],
    "array64": lambda v, f, **kw: as_list(round_to(np.array(v, np.float64), f, **kw)),
    "tensor64": lambda v, f, **kw: as_list(round_to(torch.tensor(v, dtype=torch.float64), f, **kw)),
    "array32": lambda v, f, **kw: as_list(round_to(np.array(v, np.float32), f, **kw)),
    "tensor32": lambda v, f, **kw: as_list(round_to(torch.tensor(v, dtype=torch.float32), f, **kw)),
}


# One number as every kind of thing that holds one.
HOLDERS = {
    "float": float, "numpy scalar": np.float64, "array": lambda v: np.array([v], np.float64),
    "0-d array": lambda v: np.array(v, np.float64), "tensor": lambda v: torch.tensor([v], dtype=torch.float64),
    "0-d tensor": lambda v: torch.tensor(v, dtype=torch.float64),
}


@pytest.fixture(params=HOLDERS)
def hold(request):
    return HOLDERS[request.param]


@pytest.fixture(params=CARRIERS)
def carrier(request):
    return CARRIERS[request.param]


@pytest.fixture(params=["float", "array64", "tensor64"])
def wide_carrier(request):
    return CARRIERS[request.param]


def bits(values):
    values = np.array(values, np.float64)
    return np.where(np.isnan(values), np.nan, values).view(np.int64).tolist()  # all NaNs are the same one


def reference(format):
    """The same format in gfloat, an independent implementation."""
    known = {"fp64": gfloat.formats.format_info_binary64, "fp32": gfloat.formats.format_info_binary32,
             "bf16": gfloat.formats.format_info_bfloat16, "fp16": gfloat.formats.format_info_binary16,
             "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2, "fp8_e4m3": gfloat.formats.format_info_ocp_e4m3,
             "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1}
    if format in known:
        return known[format]
    e, m = (8, 10) if format == "tf32" else (format.exponent_bits, format.mantissa_bits)
    return FormatInfo(str(format), 1 + e + m, m + 1, bias=2 ** (e - 1) - 1, is_signed=True, domain=Domain.Extended,
                      has_nz=True, num_high_nans=2**m - 1, has_subnormals=True, is_twos_complement=False)


@st.composite
def numbers_near(draw, format):
    """Any float64, and values on, between and next to the format's own: ties, subnormals, the edge of overflow."""
    known = facts(format)
    exponent = draw(st.one_of(
        st.integers(known.min_exponent - 3, known.min_exponent + 3), st.integers(-5, 5),
        st.integers(math.frexp(known.max)[1] - 3, math.frexp(known.max)[1] + 1)))
    quarters = draw(st.integers(0, 2 ** min(known.precision + 2, 53)))
    value = math.ldexp(quarters, exponent - known.precision - 1) if exponent < 1020 else known.max
    towards = draw(st.sampled_from([value, INF, 0.0]))
    return draw(st.sampled_from([1, -1])) * math.nextafter(value, towards)


SPECIAL = [0.0, -0.0, INF, -INF, NAN, 5e-324, -5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 464.0, 465.0]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rounding_to_nearest_agrees_with_gfloat_bit_for_bit(format, data):
    any_float = st.floats(allow_nan=format != "fp4_e2m1")
    values = data.draw(st.lists(st.one_of(numbers_near(format), any_float, st.sampled_from(SPECIAL)), min_size=20))
    if format == "fp4_e2m1":
        values = [v for v in values if v == v]
    saturate = data.draw(st.sampled_from([None, True] + [False] * facts(format).has_nan))
    fi, sat = reference(format), facts(format).saturates if saturate is None else saturate
    for name in ("float", "array64", "tensor64"):
        got = CARRIERS[name](values, format, saturate=saturate)
        assert bits(got) == bits([gfloat.round_float(fi, v, sat=sat) for v in values]), name
    with np.errstate(over="ignore"):
        narrow = as_list(np.array(values, np.float32))
    wanted = np.array([gfloat.round_float(fi, v, sat=sat) for v in narrow])
    with np.errstate(over="ignore"):
        wanted = wanted.astype(np.float32)  # only a format that is wider than its carrier is changed by this
    for name in ("array32", "tensor32"):
        assert bits(CARRIERS[name](narrow, format, saturate=saturate)) == bits(wanted), name


def values_near(format, count, seed):
    """Random float64: any bits (subnormals, infinities, NaN), and multiples of a quarter of the spacing, or next to one
    in every binade of the format: its subnormals, ties and what lies beside them, the edge of overflow."""
    known, rng = facts(format), np.random.default_rng(seed)
    any_bits = rng.integers(0, 2**64, count // 4, np.uint64).view(np.float64)
    exponents = rng.integers(known.min_exponent - 2, math.frexp(known.max)[1] + 1, count - len(any_bits))
    edge = rng.choice([known.min_exponent - known.precision, known.min_exponent, 0, math.frexp(known.max)[1] - 1],
                      len(exponents))
    exponents = np.where(rng.random(len(exponents)) < 0.5, exponents, edge)
    quarters = rng.integers(0, 2 ** min(known.precision + 2, 53), len(exponents)).astype(np.float64)
    with np.errstate(over="ignore"):
        grid = np.ldexp(quarters, exponents - known.precision - 1)
    grid = np.nextafter(grid, rng.choice([0.0, np.inf, np.nan], len(grid)), where=rng.random(len(grid)) < 0.5, out=grid)
    values = np.concatenate([any_bits, grid * rng.choice([-1.0, 1.0], len(grid))])
    values[:8] = [0.0, -0.0, INF, -INF, known.max, -known.max, known.min_subnormal, known.min_subnormal / 2]
    return np.where(np.isnan(values), 0.5 if format == "fp4_e2m1" else np.nan, values)


RANDOM_FLOATS = [Float(int(e), int(m)) for e, m in np.random.default_rng(20).integers([2, 1], [12, 53], (20, 2))]


@pytest.mark.parametrize("format", [*NAMES, *RANDOM_FLOATS], ids=str)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_ten_thousand_random_values_round_as_in_gfloat_bit_for_bit(format, seed):
    values = values_near(format, 2_000, seed)
    with np.errstate(over="ignore"):
        wanted = bits(gfloat.round_ndarray(reference(format), values, sat=facts(format).saturates))
    assert bits(round_to(values, format)) == wanted
    assert bits(round_to(torch.from_numpy(values), format).numpy()) == wanted
    assert bits([round_to(x, format) for x in values[:200].tolist()]) == wanted[:200]
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
        wanted = gfloat.round_ndarray(reference(format), narrow.astype(np.float64), sat=facts(format).saturates)
        wanted = bits(wanted.astype(np.float32))  # only a format wider than its carrier is changed by this
    assert bits(round_to(narrow, format)) == bits(round_to(torch.from_numpy(narrow), format).numpy()) == wanted


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1", Float(4, 3)], ids=str)
def test_every_fp16_number_rounds_alike_in_every_carrier(format):
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    every = every[~np.isnan(every)]
    wanted = gfloat.round_ndarray(reference(format), every.astype(np.float64), sat=facts(format).saturates)
    for carrier in (np.float32, np.float64):
        assert bits(round_to(every.astype(carrier), format)) == bits(wanted)
        assert bits(round_to(torch.from_numpy(every.astype(carrier)), format).double().numpy()) == bits(wanted)


# --- facts and exact cases -------------------------------------------------------------------------------------------

# eps (ulp of 1), unit roundoff, smallest normal, smallest subnormal, largest, largest n with 0..n all representable.
# IEEE 754-2019; OCP OFP8 1.0; OCP MX 1.0; NVIDIA TF32.
FACTS = {
    "fp64": (2.220446049250313e-16, 1.1102230246251565e-16, 2.2250738585072014e-308, 5e-324, 1.7976931348623157e308,
             9007199254740992.0),
    "fp32": (1.1920928955078125e-07, 5.960464477539063e-08, 1.1754943508222875e-38, 1.401298464324817e-45,
             3.4028234663852886e38, 16777216.0),
    "tf32": (0.0009765625, 0.00048828125, 1.1754943508222875e-38, 1.1479437019748901e-41, 3.4011621342146535e38,
             2048.0),
    "bf16": (0.0078125, 0.00390625, 1.1754943508222875e-38, 9.183549615799121e-41, 3.3895313892515355e38, 256.0),
    "fp16": (0.0009765625, 0.00048828125, 6.103515625e-05, 5.960464477539063e-08, 65504.0, 2048.0),
    "fp8_e5m2": (0.25, 0.125, 6.103515625e-05, 1.52587890625e-05, 57344.0, 8.0),
    "fp8_e4m3": (0.125, 0.0625, 0.015625, 0.001953125, 448.0, 16.0),
    "fp4_e2m1": (0.5, 0.25, 1.0, 0.5, 6.0, 4.0),
}


@pytest.mark.parametrize("format", NAMES)
def test_facts_are_those_of_the_standards(format):
    f = facts(format)
    assert (f.eps, f.unit_roundoff, f.min_normal, f.min_subnormal, f.max, f.max_int_contiguous) == FACTS[format]


@pytest.mark.parametrize("format", NAMES)
def test_rounding_keeps_to_the_facts(format):
    f = facts(format)
    for value in (f.max, f.min_normal, f.min_subnormal, 1 + f.eps, f.max_int_contiguous):
        assert round_to(value, format) == value
    assert round_to(f.min_subnormal / 2, format) == 0.0
    assert round_to(1 + f.unit_roundoff, format) == 1.0
    if f.max > f.max_int_contiguous + 1:
        assert round_to(f.max_int_contiguous + 1, format) != f.max_int_contiguous + 1 or format == "fp64"


@pytest.mark.parametrize(("format", "codes"), [("fp8_e4m3", 254), ("fp8_e5m2", 248), ("fp4_e2m1", 16)])
def test_an_8_or_4_bit_format_has_exactly_its_finite_values(format, codes):  # OCP OFP8, MX; both zeros counted
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    rounded = round_to(every[np.isfinite(every)], format)
    assert len(np.unique(rounded[np.isfinite(rounded)])) + 1 == codes


def test_small_formats_have_the_printed_values():  # OCP OFP8, MX
    assert np.unique(np.abs(round_to(np.linspace(-8, 8, 1001), "fp4_e2m1"))).tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e4m3 = np.unique(round_to(np.linspace(1, 1.93, 1001), "fp8_e4m3")).tolist()
    assert e4m3 == [1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875]


@pytest.mark.parametrize(("format", "cases"), [  # IEEE 754, round to nearest, ties to even
    ("fp32", {1.0000000596046448: 1.0, 1.0000000596046483: 1.0000001192092896, 1.0000001788139343: 1.000000238418579,
              16777217.0: 16777216.0, 16777219.0: 16777220.0}),
    ("bf16", {1.00390625: 1.0, 1.01171875: 1.015625, 257.0: 256.0, 259.0: 260.0, 0.1: 0.10009765625}),
    ("fp16", {2049.0: 2048.0, 2051.0: 2052.0, 0.1: 0.0999755859375, 65519.99: 65504.0, 0.0001: 0.00010001659393310547}),
    ("fp8_e4m3", {17.0: 16.0, 19.0: 20.0, 0.1: 0.1015625, 0.0009765625: 0.0, 0.0029296875: 0.00390625}),
    ("fp8_e5m2", {9.0: 8.0, 11.0: 12.0, 61439.0: 57344.0}),
    ("fp4_e2m1", {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0, 100.0: 6.0}),
])
def test_ties_go_to_even(format, cases, wide_carrier):
    assert wide_carrier(list(cases), format) == list(cases.values())


def test_a_float64_is_rounded_once(wide_carrier):
    just_above_a_tie = [1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40, 17 + 2**-40]
    assert [wide_carrier([x], f)[0] for x, f in zip(just_above_a_tie, ("bf16", "fp16", "fp8_e4m3"), strict=True)] == [
        1.0078125, 1.0009765625, 18.0]
    assert np.float64(just_above_a_tie[0]).astype(ml_dtypes.bfloat16) == 1.0  # through float32: what is avoided
    assert float(torch.tensor(just_above_a_tie[0], dtype=torch.float64).to(torch.bfloat16)) == 1.0


E4M3_OVERFLOW = [464.0, 465.0, 480.0, 100000.0, INF, NAN]


def test_e4m3_saturates_by_default_as_torch_does(carrier):  # pytorch PR 178817, OCP OFP8 section 5.2
    assert carrier(E4M3_OVERFLOW, "fp8_e4m3")[:5] == [448.0] * 5
    assert math.isnan(carrier(E4M3_OVERFLOW, "fp8_e4m3")[5])
    assert carrier([-x for x in E4M3_OVERFLOW], "fp8_e4m3", saturate=True)[:5] == [-448.0] * 5


def test_e4m3_gives_nan_on_request_as_ml_dtypes_does(carrier):  # ml_dtypes issue 400
    assert bits(carrier(E4M3_OVERFLOW, "fp8_e4m3", saturate=False)) == bits([448.0] + [NAN] * 5)
    theirs = np.array(E4M3_OVERFLOW, np.float32).astype(ml_dtypes.float8_e4m3fn)
    assert bits(theirs.astype(np.float64)) == bits([448.0] + [NAN] * 5)


def test_the_other_formats_overflow_to_infinity_unless_told_to_saturate(carrier):
    for format in ("fp8_e5m2", "fp16", "bf16", Float(4, 3)):
        largest = facts(format).max
        assert carrier([3e38 if format != "bf16" else 3.4e38, -INF], format) == [INF, -INF]
        assert carrier([3.4e38, -INF, INF], format, saturate=True) == [largest, -largest, largest]


def test_a_nan_survives_even_where_the_format_has_none(carrier):
    for format in FORMATS:
        assert math.isnan(carrier([NAN], format)[0])
        assert math.isnan(carrier([NAN], format, saturate=True)[0])


def test_fp16_keeps_what_is_above_half_its_smallest_number(carrier):
    # "fp16 turns everything below 2^-24 into zero" is wrong: the threshold is 2^-25, a tie, which goes to even.
    tiny = [5.960464477539063e-08, 2.9802322387695312e-08, 2.980235080940474e-08, 8.940696716308594e-08,
            1.4901161193847656e-07, 1.4901161193847656e-08]
    assert carrier(tiny, "fp16") == [5.960464477539063e-08, 0.0, 5.960464477539063e-08, 1.1920928955078125e-07,
                                     1.1920928955078125e-07, 0.0]


def test_fp16_has_precision_and_bf16_has_range(carrier):
    gradient = [1e-08, 1e-07, 1e-05, 100000.0]
    assert carrier(gradient, "fp16") == [0.0, 1.1920928955078125e-07, 1.0013580322265625e-05, INF]
    assert carrier(gradient, "bf16") == [1.0011717677116394e-08, 1.0011717677116394e-07, 1.0013580322265625e-05,
                                         99840.0]


def test_the_spacing_of_fp32_is_not_its_smallest_number(wide_carrier):
    def fp32(x):
        return wide_carrier([x], "fp32")[0]
    assert fp32(1e-10) != 0.0
    assert fp32(1 + 1e-10) == 1.0
    assert fp32(fp32(1e-10) + 1e-17) != fp32(1e-10)
    assert fp32(fp32(1e-30) - fp32(0.9e-30)) != 0.0


# --- properties ------------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(x=finite, y=finite)
@example(x=5e-324, y=0.0)
def test_rounding_is_idempotent_odd_and_monotone(format, x, y):
    low, high = round_to(min(x, y), format), round_to(max(x, y), format)
    assert low <= high
    assert round_to(low, format) == low
    assert bits([round_to(-x, format)]) == bits([-round_to(x, format)])


@pytest.mark.parametrize("format", FORMATS, ids=str)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rounding_moves_a_number_by_at_most_half_a_spacing(format, data):
    x = data.draw(st.floats(-facts(format).max, facts(format).max))
    assert abs(round_to(x, format) - x) <= ulp(x, format) / 2


@pytest.mark.parametrize(("format", "same"), [
    (Float(5, 10), "fp16"), (Float(8, 7), "bf16"), (Float(8, 23), "fp32"), (Float(5, 2), "fp8_e5m2"),
    (Float(8, 10), "tf32"), (Float(11, 52), "fp64")])
@given(x=st.floats())
@settings(max_examples=50, deadline=None)
def test_a_written_out_format_is_the_named_one(format, same, x):
    assert bits([round_to(x, format)]) == bits([round_to(x, same)]) == bits([round_to(x, str(format))])
    assert facts(format).max == facts(same).max
    assert facts(format).bits == facts(same).bits or same == "tf32"


@given(x=st.floats(), w=st.floats(width=32), h=st.floats(width=16))
def test_ulp_is_the_spacing_that_python_and_numpy_give(x, w, h):
    assert bits([ulp(x, "fp64")]) == bits([math.ulp(x)])
    if abs(w) < facts("fp32").max:
        assert ulp(w, "fp32") == np.spacing(abs(np.float32(w)))
    if abs(h) < facts("fp16").max:
        assert ulp(h, "fp16") == np.spacing(abs(np.float16(h)))


@given(g=st.lists(st.floats(2.0**-5, 2.0**5), min_size=1), k=st.integers(-5, 5))
def test_a_power_of_two_scale_changes_no_bit_of_a_rounding(g, k):
    g = np.array(g)
    assert (round_to(g * 2.0**k, "fp16") / 2.0**k).tolist() == round_to(g, "fp16").tolist()
    assert round_to(np.array([0.1]) * 3, "fp16")[0] / 3 != round_to(0.1, "fp16")  # any other scale does


# --- kinds of things -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp8_e4m3", "tf32", Float(4, 3)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_shape_and_dtype_are_kept(format, rounding):
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        for shape in ((), (0,), (3,), (2, 3), (2, 0, 3)):
            array = np.ones(shape, dtype)
            rounded = round_to(array, format, rounding)
            assert isinstance(rounded, np.ndarray)
            assert (rounded.shape, rounded.dtype) == (shape, array.dtype)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        for shape in ((), (0,), (3,), (2, 3)):
            rounded = round_to(torch.ones(shape).to(dtype).requires_grad_(), format, rounding)
            assert (tuple(rounded.shape), rounded.dtype, rounded.requires_grad) == (shape, dtype, False)
    assert type(round_to(1.0, format, rounding)) is float
    assert type(round_to(np.float32(1), format, rounding)) is np.float32


def test_whole_numbers_become_float64():
    assert type(round_to(2049, "fp16")) is float
    assert round_to(np.array([2049]), "fp16").dtype == np.float64
    assert round_to(torch.tensor([2049]), "fp16").dtype == torch.float64
    assert round_to([2049, 0.1], "fp16").tolist() == [2048.0, 0.0999755859375]


def test_the_original_is_left_alone():
    array, tensor = np.full(3, 0.1), torch.full((3,), 0.1)
    for format in ("fp16", "fp4_e2m1", Float(3, 2)):
        round_to(array, format)
        round_to(tensor, format, "stochastic")
    assert array.tolist() == [0.1] * 3
    assert tensor.tolist() == torch.full((3,), 0.1).tolist()


@pytest.mark.parametrize("what", [np.array([1j]), torch.tensor([1j]), np.array(["a"]), None,
                                  pytest.param(np.ones(1, np.longdouble), marks=pytest.mark.skipif(
                                      np.dtype(np.longdouble).itemsize == 8, reason="no wider float here"))], ids=repr)
def test_what_cannot_be_rounded_is_refused(what):
    with pytest.raises(TypeError, match="cannot be rounded"):
        round_to(what, "fp16")


def test_a_wrong_word_is_answered_with_the_right_ones():
    with pytest.raises(ValueError, match="no number format 'fp61': use one of fp64, fp32"):
        round_to(1.0, "fp61")
    with pytest.raises(ValueError, match="no rounding 'up': use 'nearest' or 'stochastic'"):
        round_to(1.0, "fp16", rounding="up")
    with pytest.raises(ValueError, match="neither infinity nor NaN"):
        round_to(1.0, "fp4_e2m1", saturate=False)
    for e, m in ((1, 3), (12, 3), (4, 0), (4, 53), (4.0, 3), (True, 3)):
        with pytest.raises(ValueError, match="must be a whole number from"):
            Float(e, m)


def test_formats_are_values():
    assert Float(4, 3) == Float(4, 3)
    assert len({Float(4, 3), Float(4, 3), Float(3, 4)}) == 2
    assert facts("fp8_e4m3fn") == facts("fp8_e4m3")


def test_rounding_an_array_loads_no_torch():
    code = ("import sys, numpy as np; from gdlab import formats, clipping;"
            "formats.round_to(np.ones(3), 'bf16'); clipping.clip_by_norm(np.ones(3), 1.0);"
            "assert 'torch' not in sys.modules and 'scipy' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


# --- stochastic rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1", Float(3, 5)], ids=str)
@pytest.mark.parametrize("x", [0.7003, -1.3, 2.9, 1e-3, 0.0])
def test_stochastic_rounding_is_unbiased_and_takes_only_the_neighbours(format, x):
    n = 40_000
    rounded = round_to(np.full(n, x), format, "stochastic", seed=7)
    gap = ulp(x, format)
    below = math.floor(x / gap) * gap
    assert set(np.unique(rounded)) <= {below, below + gap}
    p = (x - below) / gap
    assert abs(rounded.mean() - x) <= 4 * gap * math.sqrt(p * (1 - p) / n)


def test_stochastic_rounding_leaves_what_is_representable(carrier):
    for format in ("fp16", "fp8_e4m3", Float(6, 3)):
        on_grid = [0.0, -0.0, 1.0, -1.5, facts(format).max, facts(format).min_subnormal]
        for seed in range(20):
            assert bits(carrier(on_grid, format, rounding="stochastic", seed=seed)) == bits(on_grid)


def test_the_same_seed_rounds_the_same_way_in_arrays_and_tensors():
    x = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
    one = round_to(x, "bf16", "stochastic", seed=3)
    assert one.tolist() == round_to(torch.from_numpy(x), "bf16", "stochastic", seed=3).tolist()
    assert one.tolist() == round_to(x.astype(np.float64), "bf16", "stochastic", seed=3).tolist()
    assert one.tolist() != round_to(x, "bf16", "stochastic", seed=4).tolist()
    generator = np.random.Generator(np.random.Philox(key=3))
    assert one.tolist() == round_to(x, "bf16", "stochastic", seed=generator).tolist()
    assert one.tolist() != round_to(x, "bf16", "stochastic", seed=generator).tolist()  # it has moved on


def test_stochastic_rounding_near_the_maximum_overflows_in_proportion():
    x = np.full(4000, 65504.0 + 8.0)  # a quarter of the way to 65536
    rounded = round_to(x, "fp16", "stochastic", seed=1)
    assert set(np.unique(rounded)) == {65504.0, INF}
    assert abs(np.isinf(rounded).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4000)
    assert set(round_to(x, "fp16", "stochastic", seed=1, saturate=True)) == {65504.0}
    assert bits(round_to(np.array([INF, -INF, NAN]), "fp16", "stochastic")) == bits([INF, -INF, NAN])


# --- what it does to sums and to descent -----------------------------------------------------------------------------


@pytest.mark.parametrize(("format", "start", "stuck"), [
    ("fp16", 0, 2048), ("bf16", 0, 256), ("fp8_e4m3", 0, 16), ("fp8_e5m2", 0, 8),
    ("fp32", 16777000, 16777216), ("fp64", 9007199254740900, 9007199254740992)])
def test_counting_by_one_stops_at_two_to_the_precision(format, start, stuck, hold):
    w = round_to(hold(start), format)
    while (nxt := round_to(w + 1.0, format)) != w:
        w = nxt
    assert w == stuck


@pytest.mark.parametrize(("format", "final", "moved"), [
    ("fp32", 1.0000004768371582, 136), ("fp16", 1.00390625, 51), ("bf16", 1.03125, 31), ("fp8_e4m3", 1.5, 4),
    ("fp8_e5m2", 2.0, 0)])
def test_descent_stops_short_of_the_optimum_by_its_format(format, final, moved, hold):
    # f = (w - 1)^2 / 2 from 2 with rate 0.1, every operation rounded; the rate is a number of the format too.
    def r(x):
        return round_to(x, format)
    w, lr, steps = hold(2.0), r(hold(0.1)), 0
    for _ in range(300):
        new = r(w - r(lr * r(w - 1)))
        steps, w = steps + bool(new != w), new
    assert (w, steps) == (final, moved)


@pytest.mark.parametrize(("w", "u", "after"), [  # "lost if |w| >= 2048 |u|" (Micikevicius et al. 2018) is only a bound
    (1.0, -(2.0**-11), 0.99951171875), (1.0, -1.5 * 2**-12, 0.99951171875), (1.0, -(2.0**-12), 1.0),
    (1.0, 2.0**-11, 1.0), (1.9990234375, -(2.0**-11) * 0.99, 1.9990234375)])
def test_an_update_is_lost_if_it_is_at_most_half_the_gap_it_travels(w, u, after, hold):
    assert round_to(hold(w) + u, "fp16") == after


def test_stochastic_rounding_does_not_lose_small_updates_on_average():
    lost, kept = np.ones(2000), np.ones(2000)
    for step in range(64):
        lost = round_to(lost - 2.0**-12, "fp16")
        kept = round_to(kept - 2.0**-12, "fp16", "stochastic", seed=step)
    assert (lost == 1.0).all()
    assert abs(kept.mean() - (1 - 64 * 2**-12)) < 4 * kept.std() / math.sqrt(2000)


def test_compensated_sums_keep_what_plain_sums_lose():  # Kahan 1965
    tenth = round_to(0.1, "fp32")
    for dtype in (np.float32, torch.float32):  # 100 sums side by side, of 1,000 tenths each
        new = np.full if dtype is np.float32 else lambda shape, value, dtype: torch.full((shape,), value, dtype=dtype)
        total, lost, term = new(100, 0.0, dtype), new(100, 0.0, dtype), new(100, tenth, dtype)
        for _ in range(1_000):
            total, lost = compensated_add(total, lost, term, "fp32")
        assert set(total.tolist()) == {100.0}
    total, lost = 0.0, 0.0
    for _ in range(100_000):
        total, lost = compensated_add(total, lost, tenth, "fp32")
    assert total == 10000.0
    plain = np.cumsum(np.full(10_000_000, tenth, np.float32))  # sequential, unlike sum()
    assert float(plain[99_999]) == 9998.556640625
    assert float(plain[-1]) == 1087937.0


def test_compensated_sums_rescue_fp16(hold):
    term = round_to(hold(1e-4), "fp16")
    plain, total, lost = hold(0.0), hold(0.0), hold(0.0)
    for _ in range(10_000):
        plain = round_to(plain + term, "fp16")
        total, lost = compensated_add(total, lost, term, "fp16")
    assert (plain, total) == (0.25, 1.0)


def test_compensated_sums_are_alike_in_arrays_and_tensors():
    array, a_lost = np.ones(3, np.float32), np.zeros(3, np.float32)
    tensor, t_lost = torch.ones(3), torch.zeros(3)
    for term in np.random.default_rng(0).normal(scale=1e-3, size=(200, 3)).astype(np.float32):
        array, a_lost = compensated_add(array, a_lost, term, "bf16")
        tensor, t_lost = compensated_add(tensor, t_lost, torch.from_numpy(term), "bf16")
    assert array.tolist() == tensor.tolist()
    assert a_lost.tolist() == t_lost.tolist()


def test_the_order_of_a_sum_decides_its_value(hold):
    def add(a, b):
        return round_to(a + b, "fp32")
    a, b, c, d = map(hold, (1e8, 1.0, -1e8, 1.0))
    assert add(add(add(a, b), c), d) == 1.0
    assert add(add(a, b), add(c, d)) == 0.0
    assert add(add(a, c), add(b, d)) == 2.0


@pytest.mark.parametrize(("chunk", "total"), [(1, 2048.0), (16, 32768.0), (64, 32768.0), (256, 32768.0)])
def test_summing_in_chunks_avoids_swamping(chunk, total):  # Wang et al. 2018: 32,768 ones in fp16
    partial, n = 0.0, 32768
    for _ in range(chunk if chunk > 1 else n):
        partial = round_to(partial + 1.0, "fp16")
    whole = partial
    for _ in range(n // chunk - 1 if chunk > 1 else 0):
        whole = round_to(whole + partial, "fp16")
    assert whole == total


@pytest.mark.parametrize(("sigma", "scale", "zeroed"), [  # erf(2^-25 / (scale sigma sqrt 2))
    (2**-20, 1, 0.024929834868754254), (2**-20, 8, 0.0031167286393833644), (2**-20, 1024, 2.4349504415253212e-05),
    (2**-24, 1, 0.3829249225480262), (2**-24, 8, 0.04983533805849444), (2**-24, 1024, 0.0003895920552235266),
    (2**-26, 1, 0.9544997361036416), (2**-26, 8, 0.19741265136584743), (2**-26, 1024, 0.001558367292034792),
    (2**-28, 1, 0.9999999999999988), (2**-28, 8, 0.6826894921370859), (2**-28, 1024, 0.00623340972168516)])
def test_a_loss_scale_keeps_small_gradients_from_vanishing_in_fp16(sigma, scale, zeroed):  # Micikevicius et al. 2018
    gradients = np.random.default_rng(12).normal(0.0, sigma, 600_000)
    for held in (gradients, torch.from_numpy(gradients), torch.from_numpy(gradients).float()):
        assert abs(float((round_to(held * scale, "fp16") == 0).sum()) / 600_000 - zeroed) < 0.002
