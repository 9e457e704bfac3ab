"""What torch says of an expression: the graph that it builds, what it saves, and what its backward pass does to both.

Everything here runs in the helper process, in float64 with one thread, and takes and returns what JSON can hold.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from gdlab.autodiff.expression import MAX_NUMBERS, OPERATORS, shortened

MAX_LOCAL = 1024
"""Numbers of one local derivative; a larger one is left out."""
HIDDEN = 400
"""Width of the net whose Jacobian is timed: wide enough that its arithmetic, not Python, takes the time."""
CAN_BE = (RuntimeError, IndexError, TypeError, ValueError)

Emit = Callable[[str, torch.Tensor], torch.Tensor]

NOT_ELEMENTWISE = ("Sum", "Dot", "Mv", "Mm", "TB")


class EngineError(ValueError):
    """Say in one sentence why an expression cannot be computed at these values."""


def evaluate(tree: list[Any], values: dict[str, torch.Tensor], emit: Emit = lambda text, result: result) -> Any:
    """Compute a tree as Python would with torch's tensors; every operation of torch is told to `emit`."""
    kind, text, *given = tree
    if kind == "number":
        return given[0]
    if kind == "name":
        return values[text]
    inputs = [evaluate(argument, values, emit) for argument in given]
    if all(isinstance(one, float) for one in inputs):
        inputs[0] = torch.tensor(inputs[0])
    try:
        if kind == "/" and isinstance(inputs[0], float):  # as torch does it
            kind, inputs = "*", [emit(f"1/{shortened(given[1][1])}", inputs[1].reciprocal()), inputs[0]]
        elif kind == "matmul" and [one.ndim for one in inputs] == [1, 2]:
            inputs = [emit(f"{shortened(given[1][1])} transposed", inputs[1].t()), inputs[0]]
        result = (OPERATORS.get(kind) or getattr(torch, kind))(*inputs)
    except CAN_BE:
        sizes = " and ".join(_size(one) for one in inputs)
        raise EngineError(f"{shortened(text)} cannot be computed: {kind} does not go with {sizes}.") from None
    if result.numel() > MAX_NUMBERS:
        raise EngineError(f"{shortened(text)} has {result.numel():,} numbers: at most {MAX_NUMBERS} are computed.")
    return result if result.dtype == torch.bool else emit(text, result)


def _size(one: Any) -> str:
    shape = list(getattr(one, "shape", ()))
    return "one number" if not shape else f"a list of {shape[0]}" if len(shape) == 1 else f"{shape[0]} x {shape[1]}"


def loss_of(tree: list[Any], values: dict[str, torch.Tensor], emit: Emit = lambda text, result: result) -> torch.Tensor:
    """Return the value of a tree that is one number."""
    loss = torch.as_tensor(evaluate(tree, values, emit))
    if loss.numel() != 1:
        raise EngineError(f"A loss is one number, and {shortened(tree[1])} is {_size(loss)}: put sum(...) around it.")
    return loss


def tensors(values: dict[str, Any], **more: Any) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value, **more) for name, value in values.items()}


class Saved:
    """Look at what the nodes of a graph hold for their backward pass."""

    def __init__(self) -> None:
        self._of: list[tuple[Any, list[str]]] = []

    def add(self, node: Any) -> dict[str, Any]:
        """Watch one more node; return what it has saved: tensors as their bytes, all else as it is."""
        names = [name for name in dir(node) if name.startswith("_saved_") and "_sym_" not in name]
        self._of.append((node, names))
        saved = {name.removeprefix("_saved_"): getattr(node, name) for name in names}
        return {name: _bytes(one) if isinstance(one, torch.Tensor) else None for name, one in saved.items()}

    def held(self) -> int:
        """Return the bytes that are held now, what two nodes share counted once; a node that has let go raises."""
        storages = {}
        for node, names in self._of:
            for name in names:
                try:
                    saved = getattr(node, name)
                except RuntimeError:
                    break
                if isinstance(saved, torch.Tensor):
                    storages[saved.untyped_storage().data_ptr()] = _bytes(saved)
        return sum(storages.values())


def _bytes(saved: torch.Tensor) -> int:
    return saved.untyped_storage().nbytes()


def record(tree: list[Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the graph that torch builds, node by node, and what each step forward and backward does."""
    leaves, saved = tensors(values, requires_grad=True), Saved()
    nodes: list[dict[str, Any]] = []
    functions: dict[Any, int] = {}
    held: list[int] = []
    emitted: list[torch.Tensor] = []  # kept, and their nodes with them

    def enter(function: Any, text: str, value: torch.Tensor, at: int = -1) -> None:
        functions[function] = len(nodes)
        before = [next_function for next_function, _ in function.next_functions]
        nodes.append({"name": function.name().rpartition(":")[2], "text": text, "value": value.tolist(),
                      "inputs": [functions.get(one, -1) for one in before],
                      "saved": saved.add(function), "gradient": None, "local": [], "tangents": {}, "at": at})
        held.append(saved.held())

    def emit(text: str, result: torch.Tensor) -> torch.Tensor:
        emitted.append(result)
        if result.grad_fn is not None:
            enter(result.grad_fn, text, result, len(emitted) - 1)
        return result

    for name, leaf in leaves.items():
        enter(get_gradient_edge(leaf).node, name, leaf)
    loss = loss_of(tree, leaves, emit)
    for function, at in functions.items():
        if nodes[at]["at"] >= 0:
            nodes[at]["local"] = _locals(function, nodes[at])
    order: list[int] = []
    back: list[int] = []

    def visited(at: int, gradients: tuple[Any, ...]) -> None:
        order.append(at)
        back.append(saved.held())
        nodes[at]["gradient"] = None if gradients[0] is None else gradients[0].tolist()

    for function, at in functions.items():
        function.register_prehook(lambda gradients, at=at: visited(at, gradients))
    if loss.requires_grad:
        loss.backward()
    gradient = {name: (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad).tolist()
                for name, leaf in leaves.items()}
    forward_held = max([_tangents(tree, values, name, nodes) for name in values], default=0)
    return {"value": loss.item(), "gradient": gradient, "nodes": nodes, "order": order, "held": held,
            "freed": [*back[1:], saved.held()][:len(order)], "forward_held": forward_held}


def _locals(function: Any, node: dict[str, Any]) -> list[Any]:
    """Return a node's derivative by each input: one number, one a place, or the whole (outputs x inputs)."""
    shape = np.shape(node["value"])
    with torch.no_grad():
        rows = [function(one.reshape(shape)) for one in torch.eye(math.prod(shape))]
    found: list[Any] = []
    for columns in zip(*((row if isinstance(row, tuple) else (row,)) for row in rows), strict=True):
        if columns[0] is None or len(columns) * columns[0].numel() > MAX_LOCAL:
            found.append(None)
            continue
        whole = torch.stack(columns).reshape((*shape, *columns[0].shape))
        places = columns[0].shape == shape and not node["name"].startswith(NOT_ELEMENTWISE)
        found.append((whole.reshape(len(columns), -1).diagonal().reshape(shape) if places else whole).tolist())
    return found


def _tangents(tree: list[Any], values: dict[str, Any], seed: str, nodes: list[dict[str, Any]]) -> int:
    """Go through the expression once in forward mode, note how each node changes with one variable, and return the
    bytes that are saved on the way."""
    found: list[torch.Tensor] = []
    saved = Saved()
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(one, torch.full_like(one, float(name == seed)))
                 for name, one in tensors(values).items()}

        def emit(text: str, result: torch.Tensor) -> torch.Tensor:
            tangent = forward_ad.unpack_dual(result).tangent
            if result.grad_fn is not None:
                saved.add(result.grad_fn)
            found.append(torch.zeros_like(result) if tangent is None else tangent)
            return result

        loss_of(tree, duals, emit)
        for node in nodes:
            dual = forward_ad.unpack_dual(duals[node["text"]]).tangent if node["at"] < 0 else found[node["at"]]
            node["tangents"][seed] = dual.tolist()
    return saved.held()


def jvp(tree: list[Any], values: dict[str, Any], direction: dict[str, Any]) -> float:
    """Return the loss's derivative along a direction, by forward mode."""
    names, points = list(values), tensors(values)
    ways = tuple(torch.tensor(direction[name]).expand_as(points[name]).clone() for name in names)
    return torch.func.jvp(lambda *given: loss_of(tree, dict(zip(names, given, strict=True))),
                          tuple(points.values()), ways)[1].item()


def along(tree: list[Any], values: dict[str, Any], direction: dict[str, Any], steps: list[float]) -> dict[str, Any]:
    """Return g(0), g'(0), g''(0), g'''(0) of g(t) = loss(values + t direction), and g at each of `steps`."""
    points, ways = tensors(values), tensors(direction)

    def g(t: torch.Tensor) -> torch.Tensor:
        return loss_of(tree, {name: point + t * ways[name] for name, point in points.items()}).reshape(())

    def slope(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda t: torch.func.jvp(function, (t,), (torch.ones(()),))[1]

    derivatives: list[Callable[[torch.Tensor], torch.Tensor]] = [g]
    for _ in range(3):
        derivatives.append(slope(derivatives[-1]))
    return {"derivatives": [one(torch.zeros(())).item() for one in derivatives],
            "values": [g(torch.tensor(step)).item() for step in steps]}


def costs(inputs: int, outputs: int, repeats: int) -> dict[str, Any]:
    """Count and time what the Jacobian of a net with two hidden layers takes, by forward and by reverse mode.

    Times are this thread's own, so that other work on the machine counts little: the least of `repeats`, over the
    least of one evaluation.
    """
    draws = torch.Generator().manual_seed(0)
    sizes = (inputs, HIDDEN, HIDDEN, outputs)
    layers = [torch.randn(m, n, generator=draws) / n**0.5 for n, m in itertools.pairwise(sizes)]
    start = torch.randn(inputs, generator=draws)
    counted = {"evaluations": 0, "passes": 0}

    def f(x: torch.Tensor) -> torch.Tensor:
        counted["evaluations"] += 1
        for layer in layers:
            x = torch.tanh(torch.mv(layer, x))
        return x

    def forward() -> torch.Tensor:
        columns = []
        with forward_ad.dual_level(), torch.no_grad():
            for one in torch.eye(inputs):
                counted["passes"] += 1
                columns.append(forward_ad.unpack_dual(f(forward_ad.make_dual(start, one))).tangent)
        return torch.stack(columns, 1)

    def reverse() -> torch.Tensor:
        at = start.clone().requires_grad_()
        y = f(at)
        y.grad_fn.register_prehook(lambda gradients: counted.update(passes=counted["passes"] + 1))
        return torch.stack([torch.autograd.grad(y, at, one, retain_graph=True)[0] for one in torch.eye(outputs)])

    found: dict[str, Any] = {}
    one_s, jacobians = _least_s(lambda: f(start), repeats), []
    for name, mode in (("forward", forward), ("reverse", reverse)):
        counted.update(evaluations=0, passes=0)
        jacobians.append(mode())
        found[name] = dict(counted) | {"times": _least_s(mode, repeats) / one_s}
    return found | {"difference": (jacobians[0] - jacobians[1]).abs().max().item()}


def _least_s(act: Callable[[], Any], repeats: int) -> float:
    spent = []
    for _ in range(repeats):
        start = time.thread_time()
        act()
        spent.append(time.thread_time() - start)
    return min(spent)
