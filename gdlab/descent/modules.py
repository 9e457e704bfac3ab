"""The networks that come with the package, and the reader's own, loaded from a factory."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from gdlab import laws, parts
from gdlab.experiment import Experiment
from gdlab.part import ExperimentError


def digits_model(name: str, seed: int) -> nn.Module:
    """Return "logistic" (650 parameters), "mlp" (64-32-10, tanh; 2,410) or "cnn" (1,898) with its seeded start."""
    layers: list[nn.Module]
    with torch.random.fork_rng(devices=[]):  # layers draw a start of their own, which is not used
        if name == "logistic":
            layers = [nn.Linear(64, 10)]
        elif name == "mlp":
            layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)]
        else:
            layers = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)]
    model = nn.Sequential(*layers).double()
    _draw(model, laws.generator(seed, 0, 0, laws.INIT))
    return model


def _draw(model: nn.Module, draws: np.random.Generator) -> None:
    with torch.no_grad():
        for layer in model.children():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                bound = 1 / math.sqrt(layer.weight[0].numel())  # 1 / sqrt(fan in), for weights and biases alike
                for parameter in (layer.weight, layer.bias):
                    parameter.copy_(torch.from_numpy(draws.uniform(-bound, bound, tuple(parameter.shape))))


class Recurrent(nn.Module):
    """h_t = W h_(t-1) + U x_t + b, and v . h_T + c at the end; W starts as `radius` times an orthogonal matrix."""

    def __init__(self, spec: parts.Sequence, seed: int) -> None:
        super().__init__()
        draws = laws.generator(seed, 0, 0, laws.INIT)
        with torch.random.fork_rng(devices=[]):
            self.enter, self.leave = nn.Linear(1, spec.hidden).double(), nn.Linear(spec.hidden, 1).double()
        _draw(self, draws)
        turn, _ = np.linalg.qr(draws.standard_normal((spec.hidden, spec.hidden)))
        self.again = nn.Parameter(torch.from_numpy(np.ascontiguousarray(turn.T * spec.radius)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the recalled number (batch,) of each sequence (batch, length)."""
        inputs = self.enter(x[..., None])
        memory = inputs[:, 0]
        for step in range(1, x.shape[1]):
            memory = inputs[:, step] + memory @ self.again
        return self.leave(memory)[:, 0]


def sequences(spec: parts.Sequence, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences (samples, length) and what is to be recalled (samples,), in float64."""
    x = laws.generator(seed, 0, 2, laws.INIT).standard_normal((spec.samples, spec.length))
    x[:, 1:] /= 10
    return torch.from_numpy(x), torch.from_numpy(x[:, 0].copy())


def from_factory(exp: Experiment) -> tuple[nn.Module, Callable[..., Any], Any]:
    """Call the reader's factory, under the experiment's seed, and return its (model, loss, data).

    Raises ExperimentError for a factory that is not there, fails, or returns something else.
    """
    name, factory = _factory(exp)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(exp.seed % 2**63)
            made = factory()
    except Exception as error:  # the reader's own code: anything may be raised
        raise ExperimentError(f"The factory {name} failed with {type(error).__name__}: {error}") from error
    if not isinstance(made, tuple | list) or len(made) != 3:
        got = f"{len(made)} values" if isinstance(made, tuple | list) else f"a {type(made).__name__}"
        raise ExperimentError(f"The factory {name} returned {got}: it must return (model, loss, data).")
    model, loss, data = made
    if not isinstance(model, nn.Module):
        raise ExperimentError(f"The factory {name} returned a {type(model).__name__} as the model: it must be a "
                              "torch.nn.Module.")
    if not callable(loss):
        raise ExperimentError(f"The factory {name} returned a {type(loss).__name__} as the loss: it must be a function "
                              "of the model's output and the target.")
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable or not all(parameter.is_floating_point() for parameter in trainable):
        raise ExperimentError(f"The model of {name} needs at least one trainable parameter, and only real ones.")
    return model, loss, data


def _factory(exp: Experiment) -> tuple[str, Callable[[], Any]]:
    if isinstance(exp.problem, parts.Opaque):
        return exp.problem.name, _unpacked(exp)
    spec = exp.problem.factory
    if spec.startswith("cell:"):
        raise ExperimentError(f"The function {spec[5:]} lives in a notebook's cell, not in this experiment: give it to "
                              "Experiment(problem=...) again.")
    module_name, _, function_name = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ExperimentError(f"The factory {spec} cannot be imported: there is no module {error.name}; is its folder "
                              "on Python's path?") from error
    except Exception as error:  # the reader's own code: anything may be raised
        raise ExperimentError(f"The factory {spec} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ExperimentError(f"The module {module_name} has no function {function_name}: check the factory's name.")
    return spec, function


def _unpacked(exp: Experiment) -> Callable[[], Any]:
    import hashlib

    import cloudpickle

    name, payload = exp.problem.name, exp.payload
    if payload is None:
        raise ExperimentError(f"The function {name} came from a notebook's cell and is not in this experiment: give it "
                              "to Experiment(problem=...) again.")
    if hashlib.sha256(payload).hexdigest() != exp.problem.payload_sha256:
        raise ExperimentError(f"The function {name} is not the one this experiment was made with: its hash differs.")
    try:
        return cloudpickle.loads(payload)
    except Exception as error:  # the reader's own code: anything may be raised
        raise ExperimentError(f"The function {name} cannot be loaded here: {type(error).__name__}: {error}") from error
