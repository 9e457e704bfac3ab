"""The dynamic loss scale does what torch.amp.GradScaler does."""

import math

import numpy as np
import pytest
import torch

from gdlab.formats import LossScaler


def grad_scaler(**settings):
    scaler = torch.amp.GradScaler("cpu", **settings)
    scaler.scale(torch.ones(()))  # it makes its scale on first use
    return scaler


def torch_scales(scaler, pattern):
    """The scale after each update, and how many steps were taken."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scales, taken = [], 0
    for overflow in pattern:
        weight.grad = torch.full((1,), math.inf if overflow else scaler.get_scale())
        before = weight.item()
        scaler.step(optimizer)
        scaler.update()
        taken += weight.item() != before
        scales.append(scaler.get_scale())
    return scales, taken


def scales_of(scaler, pattern):
    scales = []
    for overflow in pattern:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
    return scales


PATTERN = [0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0]


def test_the_scale_grows_after_clean_steps_and_backs_off_at_once():  # torch.amp.GradScaler, torch 2.13
    scaler = LossScaler(65536.0, growth_interval=3)
    assert scales_of(scaler, PATTERN) == [
        65536.0, 65536.0, 131072.0, 65536.0, 65536.0, 65536.0, 131072.0, 131072.0, 65536.0, 32768.0, 32768.0, 32768.0,
        65536.0, 65536.0, 65536.0, 131072.0, 131072.0]
    _, taken = torch_scales(grad_scaler(init_scale=65536.0, growth_interval=3), PATTERN)
    assert len(PATTERN) - taken == 3


def test_it_is_grad_scaler_over_200_random_patterns_of_overflow():
    rng = np.random.default_rng(5)
    for case in range(200):
        settings = {
            "init_scale": float(2.0 ** rng.integers(-20, 127) * rng.choice([1.0, rng.uniform(1, 2)])),
            "growth_factor": float(rng.choice([2.0, 1.1, rng.uniform(1.01, 8)])),
            "backoff_factor": float(rng.choice([0.5, 0.9, rng.uniform(0.05, 0.99)])),
            "growth_interval": int(rng.integers(1, 6)),
        }
        pattern = (rng.random(30) < rng.choice([0.02, 0.2, 0.6])).tolist()
        wanted, _ = torch_scales(grad_scaler(**settings), pattern)
        assert scales_of(LossScaler(**settings), pattern) == wanted, (case, settings)


def test_the_scale_never_becomes_infinite():
    scaler = LossScaler(2.0**126, growth_interval=1)
    assert scales_of(scaler, [0, 0, 0, 1]) == [2.0**127, 2.0**127, 2.0**127, 2.0**126]
    assert torch_scales(grad_scaler(init_scale=2.0**126, growth_interval=1), [0, 0, 0, 1])[0][:2] == [2.0**127] * 2


def test_the_defaults_are_torchs():
    assert LossScaler().state_dict() == grad_scaler().state_dict()


def test_its_state_carries_over_to_another_one_and_to_torch():
    first = LossScaler(1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=4)
    scales_of(first, PATTERN[:9])
    second, theirs = LossScaler(), grad_scaler()
    second.load_state_dict(first.state_dict())
    theirs.load_state_dict(first.state_dict())
    rest = scales_of(first, PATTERN)
    assert scales_of(second, PATTERN) == rest == torch_scales(theirs, PATTERN)[0]
    second.load_state_dict(theirs.state_dict())
    assert second.scale == theirs.get_scale()


@pytest.mark.parametrize("settings", [
    {"init_scale": 0.0}, {"init_scale": math.inf}, {"init_scale": math.nan}, {"growth_factor": 1.0},
    {"backoff_factor": 1.0}, {"backoff_factor": 0.0}, {"growth_interval": 0}])
def test_a_scaler_that_could_not_work_is_refused(settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))} = .* cannot be"):
        LossScaler(**settings)
