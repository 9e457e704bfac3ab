"""Gradients that are not what one thinks: each trap is run as it stands, by torch, and so is what mends it."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from gdlab.autodiff.process import ask

TIMES, THREADS = 20, 2
"""How often, and on how many threads, a gradient is computed that may differ from run to run."""


@dataclass(frozen=True)
class Outcome:
    """Hold the gradient that a code leaves, or the `error` that torch raises, and in how many runs how many differ."""

    gradient: tuple[float, ...] | None
    error: str
    runs: int
    different: int

    def __str__(self) -> str:
        if self.gradient is None:
            return f"error: {self.error}"
        how = f"{self.different} different ones in" if self.different > 1 else "the same in all"
        return shown(self.gradient) + f", {how} {self.runs} runs" * (self.runs > 1)


@dataclass(frozen=True)
class Trap:
    """Hold a trap: what its `code` at x = `at` `becomes`, what the `mended` one does, what is `right`, and `why`."""

    title: str
    at: str
    loss: str
    code: str
    mended: str
    why: str
    becomes: Outcome
    mends: Outcome
    right: tuple[float, ...]


@functools.cache
def cases() -> dict[str, dict[str, str]]:
    """Return each trap's name -> its title, point, loss, code, mended code and explanation."""
    return tomllib.loads(files("gdlab").joinpath("data/traps.toml").read_text(encoding="utf-8"))


def trap(name: str) -> Trap:
    """Run a trap and what mends it by torch; raises ValueError for a name that `cases` does not have."""
    if name not in cases():
        raise ValueError(f"There is no trap {name!r}: there are {', '.join(cases())}.")
    found = ask("run", name=name)
    becomes, mends = (Outcome(one["gradient"] and tuple(one["gradient"]), one["error"], one["runs"], one["different"])
                      for one in (found["code"], found["mended"]))
    return Trap(**cases()[name], becomes=becomes, mends=mends, right=tuple(found["right"]))


def shown(gradient: tuple[float, ...]) -> str:
    """Return a gradient's first numbers."""
    return f"({', '.join(f'{value + 0.0:.8g}' for value in gradient[:3])}{', ...' * (len(gradient) > 3)})"


def run(name: str) -> dict[str, Any]:
    """Run both codes of a trap, in the helper process; what is right is found by central differences of its loss."""
    import torch

    case, repeats = cases()[name], TIMES if name == "order" else 1
    draws = torch.Generator().manual_seed(0)
    i, w = torch.randint(0, 8, (200_000,), generator=draws), torch.randn(200_000, generator=draws)

    def outcome(code: str) -> dict[str, Any]:
        found = []
        for _ in range(repeats):
            x = torch.tensor(eval(case["at"]), dtype=torch.float32 if repeats > 1 else None, requires_grad=True)
            try:
                exec(code, {"torch": torch, "x": x, "i": i, "w": w.to(x.dtype)})
            except RuntimeError as error:
                return {"gradient": None, "error": str(error).split(". ")[0][:300], "runs": 1, "different": 1}
            found.append(tuple(x.grad.tolist()))
        return {"gradient": found[0], "error": "", "runs": repeats, "different": len(set(found))}

    x, step = torch.tensor(eval(case["at"])), 2.0**-17
    values = [eval(case["loss"], {"torch": torch, "i": i, "w": w, "x": x + way * one}).item()
              for one in torch.eye(len(x)) for way in (step, -step)]
    torch.set_num_threads(THREADS if repeats > 1 else 1)
    try:
        return {"code": outcome(case["code"]), "mended": outcome(case["mended"]),
                "right": [(above - below) / (2 * step) for above, below in zip(values[::2], values[1::2], strict=True)]}
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
