"""Problems that are a torch module and data: the digits, and the reader's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.modules.batchnorm import _BatchNorm

from gdlab import laws, parts
from gdlab.descent.arithmetic import HALF, NATIVE
from gdlab.descent.data import Batch, Batches, Samples, digits
from gdlab.descent.modules import Recurrent, digits_model, from_factory, sequences
from gdlab.descent.problem import Problem
from gdlab.experiment import Experiment

CHUNK = 4096
"""Samples per forward pass where the whole data set is evaluated."""


def build(exp: Experiment, device: str = "cpu") -> Problem:
    """Make the digits' or the reader's own problem; raises ExperimentError where it is not what it should be."""
    if isinstance(exp.problem, parts.Digits):
        model = digits_model(exp.problem.model, exp.seed)
        return Network(exp, model, cross_entropy, Samples(digits(), exp.seed, True, device), device)
    if isinstance(exp.problem, parts.Sequence):
        data = Samples(sequences(exp.problem, exp.seed), exp.seed, False, device)
        return Network(exp, Recurrent(exp.problem, exp.seed), mse_loss, data, device)
    model, loss, data = from_factory(exp)
    problem = Network(exp, model, loss, Samples(data, exp.seed, exp.problem.shuffle, device), device)
    precision = exp.precision
    if precision.compute in ("fp16", "bf16") and precision.weights in ("fp32", "fp64"):
        problem.autocast, problem.repeatable = NATIVE[precision.compute], False
    return problem


class FlatModule:
    """A copy of a module in one dtype, whose parameters are views into one flat tensor."""

    def __init__(self, module: nn.Module, dtype: torch.dtype, device: str) -> None:
        self.module = copy.deepcopy(module).to(device, dtype)
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*named, strict=True)
        self.flat = torch.cat([p.detach().reshape(-1) for p in self.parameters])
        ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self.groups = tuple(slice(end - p.numel(), end) for p, end in zip(self.parameters, ends, strict=True))
        for parameter, group in zip(self.parameters, self.groups, strict=True):
            parameter.data = self.flat[group].view(parameter.shape)
        self.has_batch_norm = any(isinstance(part, _BatchNorm) for part in self.module.modules())

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a flat tensor as the module's parameters, by name."""
        shapes = (parameter.shape for parameter in self.parameters)
        cut = zip(self.names, self.groups, shapes, strict=True)
        return {name: flat[group].view(shape) for name, group, shape in cut}

    def train(self, training: bool) -> None:
        """Switch to training or evaluation; batch norm uses the batch's statistics in both."""
        self.module.train(training)
        if self.has_batch_norm and not training:
            for part in self.module.modules():
                if isinstance(part, _BatchNorm):
                    part.train()


class Network(Problem):
    """A module's loss over data, `loss(module(*inputs), target)`, or `loss(module(input))` where data is one tensor.

    The module's output is handed to the loss in fp32 where it is half precision, as torch.amp does. Buffers (running
    statistics) stay with each worker. What is random in the module (dropout) draws by (seed, worker, step).
    """

    def __init__(self, exp: Experiment, module: nn.Module, loss: Callable[..., Any], data: Samples,
                 device: str) -> None:
        super().__init__(exp, device)
        self._module, self._loss, self._data = module, loss, data
        self._batches = Batches(exp, data.total, device)
        self.samples = self._batches.sizes
        self._made: dict[torch.dtype, FlatModule] = {}
        first = self._in(torch.float32)
        self.size, self.groups = first.flat.numel(), first.groups
        self._own = isinstance(exp.problem, parts.Digits | parts.Sequence)
        self._buffers: dict[int, list[torch.Tensor]] | None = {} if list(module.buffers()) else None
        self.repeatable = self._buffers is None

    def _start(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self._module.parameters() if p.requires_grad])

    def _in(self, dtype: torch.dtype) -> FlatModule:
        if dtype not in self._made:
            self._made[dtype] = FlatModule(self._module, dtype, self.device)
            self._made[dtype].train(True)
        return self._made[dtype]

    def _output(self, call: Callable[..., Any], batch: Batch, dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
        *inputs, last = self._data.take(batch, dtype)
        targets: tuple[torch.Tensor, ...] = (last,) if inputs else ()
        if self.autocast is None:
            output = call(*(inputs or (last,)))
        else:
            with torch.autocast(torch.device(self.device).type, self.autocast):
                output = call(*(inputs or (last,)))
        if isinstance(output, torch.Tensor) and output.dtype in HALF:
            output = output.float()
            targets = tuple(t.float() if t.dtype in HALF else t for t in targets)
        return output, targets

    def _evaluate(self, call: Callable[..., Any], batch: Batch, dtype: torch.dtype) -> torch.Tensor:
        output, targets = self._output(call, batch, dtype)
        return self._loss(output, *targets)

    def loss(self, flat: torch.Tensor, worker: int, step: int) -> torch.Tensor:
        made = self._in(flat.dtype)
        with self._private(made, worker, step, keep=False):
            return self._evaluate(lambda *inputs: functional_call(made.module, made.views(flat), inputs),
                                  self._batches.of(worker, step), flat.dtype)

    def gradient(self, flat: torch.Tensor, worker: int, step: int, loss_scale: float = 1.0
                 ) -> tuple[float, torch.Tensor]:
        made = self._in(flat.dtype)
        made.flat.copy_(flat)
        batch = self._batches.of(worker, step)
        if self._own:
            loss = self._evaluate(made.module, batch, flat.dtype)
        else:
            with self._private(made, worker, step, keep=True):
                loss = self._evaluate(made.module, batch, flat.dtype)
        scaled = loss if loss_scale == 1.0 else loss * loss_scale
        slopes = torch.autograd.grad(scaled, made.parameters, materialize_grads=True)
        return loss.item(), torch.cat([slope.reshape(-1) for slope in slopes])

    def objective(self, flat: torch.Tensor) -> float:
        return sum(loss * count for loss, count, _ in self._over_all(flat)) / self._data.total

    def accuracy(self, flat: torch.Tensor) -> float | None:
        right = [hits for _, _, hits in self._over_all(flat)]
        return None if None in right else sum(right) / self._data.total

    def _over_all(self, flat: torch.Tensor) -> list[tuple[float, int, int | None]]:
        """Return (loss, samples, rightly classified or None) of each chunk of the data, by the module in evaluation."""
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        made = self._in(dtype)
        made.flat.copy_(flat)
        made.train(False)
        rows = []
        with torch.no_grad(), self._private(made, -1, 0, keep=False):
            for first in range(0, self._data.total, CHUNK):
                batch = slice(first, min(first + CHUNK, self._data.total))
                output, targets = self._output(made.module, batch, dtype)
                rows.append((float(self._loss(output, *targets)), batch.stop - batch.start, _hits(output, targets)))
        made.train(True)
        return rows

    def _private(self, made: FlatModule, worker: int, step: int, keep: bool) -> _Private:
        return _Private(self, made, worker, step, keep)


class _Private:
    """Give a module the buffers and the random state of one worker's step, and take them away again."""

    def __init__(self, problem: Network, made: FlatModule, worker: int, step: int, keep: bool) -> None:
        self._kept, self._made, self._worker, self._keep = problem._buffers, made, worker, keep
        self._random = torch.random.fork_rng(devices=[] if problem.device == "cpu" else [problem.device])
        self._key = problem._seed, max(worker, 0), step
        if self._kept is not None and worker not in self._kept:
            self._kept[worker] = [buffer.clone() for buffer in problem._module.buffers()]

    def __enter__(self) -> None:
        self._random.__enter__()
        torch.manual_seed(int(laws.generator(*self._key, laws.NOISE).integers(2**62)))
        if self._kept is not None:
            for buffer, own in zip(self._made.module.buffers(), self._kept[self._worker], strict=True):
                buffer.copy_(own)

    def __exit__(self, *error: Any) -> None:
        if self._kept is not None and self._keep:
            for buffer, own in zip(self._made.module.buffers(), self._kept[self._worker], strict=True):
                own.copy_(buffer)
        self._random.__exit__(*error)


def _hits(output: Any, targets: tuple[Any, ...]) -> int | None:
    """Return how many outputs are largest at their class, or None where this is no classification."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2 or len(targets) != 1:
        return None
    target = targets[0]
    if target.is_floating_point() or target.shape != output.shape[:1]:
        return None
    return int((output.argmax(1) == target).sum())
