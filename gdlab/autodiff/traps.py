"""Gradients that are not what one thinks: each trap is run as it stands, by torch, and so is what mends it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gdlab.autodiff.process import ask

THREADS = 2
"""Of the helper process while it adds in no fixed order; in all else it has one."""
TIMES = 20
"""How often a gradient that may differ from run to run is computed."""


@dataclass(frozen=True)
class Case:
    """Hold one trap: `at` the point, the loss as a function of x, the code that fails and the code that does not.

    Either code leaves the gradient in `x.grad`; what is right is found by central differences of the loss.
    """

    title: str
    at: str
    loss: str
    code: str
    mended: str
    why: str


CASES = {
    "where": Case(
        "NaN from the branch not taken", "[-1., 4.]", "torch.where(x > 0, x.sqrt(), 0.).sum()",
        "torch.where(x > 0, x.sqrt(), 0.).sum().backward()",
        "safe = torch.where(x > 0, x, 1.)\ntorch.where(x > 0, safe.sqrt(), 0.).sum().backward()",
        "Both branches are differentiated; where multiplies the gradient of the one not taken by 0, and 0 times NaN is "
        "NaN. Keep the forbidden value out of the branch with a first where."),
    "sqrt": Case(
        "The square root at 0", "[0., 0.]", "(x * x).sum().sqrt()",
        "(x * x).sum().sqrt().backward()",
        "torch.linalg.vector_norm(x).backward()",
        "The root's slope at 0 is infinite and the square's is 0: infinity times 0 is NaN. The length of a vector has no "
        "slope at 0 (finite differences see both sides and give 0); vector_norm gives a subgradient, 0."),
    "in_place": Case(
        "Changed in place after it was saved", "[1., 2.]", "(x.exp() * 2).sum()",
        "y = x.exp()\ny.mul_(2)\ny.sum().backward()",
        "y = x.exp()\ny = y * 2\ny.sum().backward()",
        "exp keeps its result, since that is its derivative. torch counts the changes of each tensor, finds that this one "
        "is not what was saved, and refuses."),
    "data": Case(
        "Changed through .data", "[1., 2.]", "(x.exp() * x.exp()).sum()",
        "y = x.exp()\nz = y * y\ny.data.zero_()\nz.sum().backward()",
        "y = x.exp()\nz = y * y\ny = torch.zeros_like(y)\nz.sum().backward()",
        "The same as in place, but .data is not counted, so nobody refuses: the gradient is wrong in silence."),
    "detach": Case(
        "A factor that was detached", "[3.]", "(x * x).sum()",
        "(x * x.detach()).sum().backward()",
        "(x * x).sum().backward()",
        "detach cuts the graph: the value is that of x squared, but one of the two paths to x is gone. That is what one "
        "wants of a target, and a mistake in a loss."),
    "twice": Case(
        "backward called twice", "[3.]", "(x * x).sum()",
        "y = (x * x).sum()\ny.backward(retain_graph=True)\ny.backward()",
        "y = (x * x).sum()\ny.backward(retain_graph=True)\nx.grad = None\ny.backward()",
        "backward adds to .grad, so that the gradients of several losses can be summed: set it to None in between. "
        "(Without retain_graph the second call fails: what was saved has been freed.)"),
    "double_backward": Case(
        "A gradient's own gradient", "[3.]", "(3 * x**2).sum()",
        "g, = torch.autograd.grad((x**3).sum(), x)\ng.sum().backward()",
        "g, = torch.autograd.grad((x**3).sum(), x, create_graph=True)\ng.sum().backward()",
        "The backward pass is not recorded by itself, so its result has no graph to go back through. create_graph=True "
        "records it."),
    "order": Case(
        "Sums in no fixed order", "[1.]*8", "(x[i] * w).sum()",
        "(x[i] * w).sum().backward()",
        "torch.use_deterministic_algorithms(True)\n(x[i] * w).sum().backward()",
        "Here x is fp32, and 200,000 numbers w go to 8 places i: two threads add them as they come, and rounding depends "
        "on the order. A fixed order gives the same bits every time; it may still be off by rounding."),
}
"""Each trap's name -> the trap."""


@dataclass(frozen=True)
class Outcome:
    """Hold the gradient that a code leaves, or the `error` that torch raises, and how many different ones there were."""

    gradient: tuple[float, ...] | None
    error: str
    different: int

    def __str__(self) -> str:
        if self.gradient is None:
            return f"error: {self.error}"
        shown = ", ".join(f"{value:.8g}" for value in self.gradient[:3]) + ", ..." * (len(self.gradient) > 3)
        how = f", {self.different} different ones in {TIMES} runs" if self.different > 1 else f", in all {TIMES} runs"
        return f"({shown})" + how * (self.different > 0)


@dataclass(frozen=True)
class Trap:
    """Hold what a trap does: `becomes` of its code, `mended` of the other, `right` by finite differences, and `why`."""

    name: str
    case: Case
    becomes: Outcome
    mended: Outcome
    right: tuple[float, ...]

    @property
    def why(self) -> str:
        return self.case.why


def trap(name: str) -> Trap:
    """Run a trap and what mends it by torch; raises ValueError for a name that is not in CASES."""
    if name not in CASES:
        raise ValueError(f"There is no trap {name!r}: there are {', '.join(CASES)}.")
    case = CASES[name]
    found = ask("run", **{key: value for key, value in asdict(case).items() if key not in ("title", "why")},
                repeat=name == "order")
    becomes, mended = (Outcome(one["gradient"] and tuple(one["gradient"]), one["error"], one["different"])
                       for one in (found["code"], found["mended"]))
    return Trap(name, case, becomes, mended, tuple(found["right"]))


def run(at: str, loss: str, code: str, mended: str, repeat: bool) -> dict[str, Any]:
    """Run both codes and find what is right; in the helper process, on the texts above and no others."""
    import torch

    if not any((case.at, case.loss, case.code, case.mended) == (at, loss, code, mended) for case in CASES.values()):
        raise ValueError("Only the traps that gdlab ships are run.")
    draws = torch.Generator().manual_seed(0)
    names = {"torch": torch, "i": torch.randint(0, 8, (200_000,), generator=draws),
             "w": torch.randn(200_000, generator=draws)}

    def value(x: torch.Tensor) -> float:
        return eval(loss, names | {"x": x})

    def outcome(code: str) -> dict[str, Any]:
        gradients = []
        for _ in range(TIMES if repeat else 1):
            x = torch.tensor(eval(at), dtype=torch.float32 if repeat else None, requires_grad=True)
            try:
                exec(code, names | {"x": x, "w": names["w"].to(x.dtype)})
            except RuntimeError as error:
                return {"gradient": None, "error": str(error).splitlines()[0][:120], "different": 0}
            gradients.append(tuple(x.grad.tolist()))
        return {"gradient": gradients[0], "error": "", "different": len(set(gradients)) if repeat else 0}

    x, step = torch.tensor(eval(at)), 2.0**-17
    right = [(value(x + step * one) - value(x - step * one)).item() / (2 * step) for one in torch.eye(len(x))]
    torch.set_num_threads(THREADS if repeat else 1)
    try:
        return {"code": outcome(code), "mended": outcome(mended), "right": right}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
