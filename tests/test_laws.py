"""The laws of step time agree with their own mean and distribution, and a draw depends on its key alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

import gdlab as gd
from gdlab import laws

LAWS = [
    gd.Constant(0.05), gd.Exponential(0.05), gd.ShiftedExponential(0.04, 0.01), gd.Gamma(0.05, 0.5),
    gd.Gamma(1.0, 0.1), gd.Uniform(0.5, 1.5), gd.LogNormal(1.0, 0.5), gd.Pareto(1.0, 3.0), gd.Spike(1.0, 5.0, 0.02),
    gd.Spike(2.0, 1.0, 0.3),
]
CONTINUOUS = [law for law in LAWS if not isinstance(law, gd.Constant | gd.Spike)]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_the_mean_is_the_integral_of_the_quantiles(law):
    # E[T] = integral of ppf(u) over (0, 1): independent of how .mean is written.
    points = [1 - law.probability, law.probability] if isinstance(law, gd.Spike) else None
    value, _ = integrate.quad(lambda u: float(law.ppf(u)), 0, 1, limit=200, points=points)
    assert value == pytest.approx(law.mean, rel=2e-4)


@pytest.mark.parametrize("law", CONTINUOUS, ids=repr)
@given(u=st.floats(0.001, 0.999))
def test_the_distribution_function_undoes_the_quantile(law, u):
    assert float(law.cdf(law.ppf(u))) == pytest.approx(u, abs=1e-9)


@pytest.mark.parametrize("law", CONTINUOUS, ids=repr)
def test_draws_follow_the_distribution_function(law):
    draws = [law.draw(7, worker, step) for worker in range(20) for step in range(100)]
    assert stats.kstest(draws, law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_the_distribution_function_goes_from_zero_to_one(law):
    x = np.linspace(-1, 1000, 2001)
    values = law.cdf(x)
    assert values.shape == x.shape and values[0] == 0 and values[-1] > 0.999 and np.all(np.diff(values) >= -1e-15)


def test_two_constructions_of_the_same_law_agree():
    # Gamma with cv 1 is exponential; a spike between equal times is constant.
    for step in range(50):
        assert gd.Gamma(0.3, 1.0).draw(1, 2, step) == pytest.approx(gd.Exponential(0.3).draw(1, 2, step), rel=1e-9)
        assert gd.Spike(0.2, 0.2, 0.5).draw(1, 2, step) == gd.Constant(0.2).draw(1, 2, step) == 0.2


def test_the_shape_of_a_gamma_is_one_over_the_squared_variation():
    # Ali et al. 2000: V is the coefficient of variation, so the standard deviation is mean * V.
    draws = np.array([gd.Gamma(1.0, 0.5).draw(3, w, s) for w in range(100) for s in range(100)])
    assert draws.std() == pytest.approx(0.5, abs=0.02)


def test_a_heavy_tail_has_an_infinite_mean():
    assert gd.Pareto(1.0, 1.0).mean == math.inf
    assert gd.Pareto(1.0, 2.0).mean == 2.0


@given(seed=st.integers(0, 2**63 - 1), worker=st.integers(0, 100_000), step=st.integers(0, 1_000_000))
def test_a_draw_depends_on_its_key_alone(seed, worker, step):
    first = laws.uniform(seed, worker, step)
    laws.uniform(seed, worker + 1, step)
    laws.uniforms.cache_clear()
    assert laws.uniform(seed, worker, step) == first and 0 < first < 1


def test_different_keys_give_different_draws():
    keys = [(s, w, k, stream) for s in (0, 1) for w in (0, 1, 2) for k in range(70) for stream in range(5)]
    assert len({laws.uniform(*key) for key in keys}) == len(keys)


def test_scaled_laws_draw_scaled_times():
    for step in range(100):
        assert gd.Exponential(0.5).draw(0, 1, step) == pytest.approx(10 * gd.Exponential(0.05).draw(0, 1, step))
