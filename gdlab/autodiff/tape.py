"""The lesson's tape: reverse mode in forty lines of plain Python, with its local derivatives left to the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gdlab.autodiff.expression import Expression, ExpressionError, apply
from gdlab.autodiff.recording import record

RULES = {
    "+": ("1", "1"), "-": ("1", "-1"), "*": ("b", "a"), "/": ("1/b", "-out/b"), "**": ("b*a**(b - 1)", "out*log(a)"),
    "neg": ("-1",), "exp": ("out",), "log": ("1/a",), "sin": ("cos(a)",), "cos": ("-sin(a)",),
    "tanh": ("1 - out**2",), "atan": ("1/(1 + a**2)",), "sqrt": ("1/(2*out)",), "relu": ("where(a > 0, 1, 0)",),
}
"""Each operation's derivative by a and by b, its arguments; `out` is its result."""
BLANKS = (("-", 1), ("*", 0), ("*", 1), ("/", 1), ("**", 0), ("exp", 0), ("tanh", 0))
"""The rules that a reader fills in: operation and argument."""
POINTS = 8
"""At how many random places each rule is compared with torch."""


class Tape:
    """Write down what is computed, a row each, and go back over it for the gradient."""

    def __init__(self, rules: Mapping[str, tuple[str, ...]] = RULES, adds: bool = True) -> None:
        self.rules = {kind: [Expression(rule) for rule in row] for kind, row in rules.items()}
        self.adds = adds
        self.rows: list[tuple[str, list[int], Any]] = []

    def write(self, kind: str, inputs: list[int], value: Any) -> int:
        """Write a row: what was done, the rows that it was done to, and the result. Return its number."""
        self.rows.append((kind, inputs, value))
        return len(self.rows) - 1

    def forward(self, tree: list[Any], variables: Mapping[str, int]) -> int:
        """Compute an expression, its parts first; return the row of its result."""
        kind, text, *parts = tree
        if kind == "number":
            return self.write(kind, [], np.float64(parts[0]))
        if kind == "name":
            return variables[text]
        if kind not in self.rules:
            raise ExpressionError(f"The tape has no rule for {kind}: it knows {', '.join(self.rules)}.")
        inputs = [self.forward(part, variables) for part in parts]
        return self.write(kind, inputs, apply(kind, [self.rows[row][2] for row in inputs]))

    def backward(self, last: int) -> list[Any]:
        """Hand each row's gradient on to the rows that it was made from, the last row first."""
        gradients: list[Any] = [0.0] * len(self.rows)
        gradients[last] = 1.0
        for row in reversed(range(last + 1)):
            kind, inputs, out = self.rows[row]
            known = dict(zip("ab", (self.rows[source][2] for source in inputs), strict=False)) | {"out": out}
            for source, rule in zip(inputs, self.rules.get(kind, ()), strict=True):
                passed_on = gradients[row] * rule.compute(**known)
                gradients[source] = gradients[source] + passed_on if self.adds else passed_on
        return gradients

    def gradient(self, loss: Expression, **values: float) -> dict[str, Any]:
        """Return the loss's derivative by each variable: one way forward, one way back."""
        self.rows = []
        variables = {name: self.write("variable", [], np.float64(value)) for name, value in values.items()}
        with np.errstate(all="ignore"):
            gradients = self.backward(self.forward(loss.tree, variables))
        return {name: gradients[row] for name, row in variables.items()}


def train(tape: Tape, loss: str, start: Mapping[str, float], lr: float, updates: int) -> np.ndarray:
    """Minimise a loss by plain gradient descent with the tape's gradients; return the path (updates + 1, variables)."""
    read, at = Expression(loss), {name: float(value) for name, value in start.items()}
    path = [list(at.values())]
    for _ in range(updates):
        gradient = tape.gradient(read, **at)
        at = {name: value - lr * gradient[name] for name, value in at.items()}
        path.append(list(at.values()))
    return np.array(path)


def as_text(kind: str) -> str:
    """Return an operation as it is written, with the arguments a and b."""
    if len(RULES[kind]) == 2:
        return f"a {kind} b"
    return "-a" if kind == "neg" else f"{kind}(a)"


def faults(rules: Mapping[str, tuple[str, ...]], adds: bool) -> dict[Any, str]:
    """Return what is wrong with a reader's rules, by (operation, argument) or "adds", beside torch at random points."""
    found: dict[Any, str] = {}
    draws = np.random.default_rng()
    for kind, place in BLANKS:
        given = dict(zip("ab"[: len(RULES[kind])], draws.uniform(0.5, 2.0, (2, POINTS)), strict=False))
        theirs = np.asarray(record(f"sum({as_text(kind)})", **given).gradient["ab"[place]])
        known = given | {"out": apply(kind, list(given.values()))}
        if not rules[kind][place].strip():
            found[kind, place] = "Not filled in yet."
            continue
        try:
            rule = Expression(rules[kind][place])
            if unknown := set(rule.names) - set(known):
                raise ExpressionError(f"There is no {unknown.pop()} here: a rule is made of {', '.join(known)}.")
            ours = np.broadcast_to(rule.compute(**known), theirs.shape)
            off = np.argmax(np.abs(ours - theirs))
        except (ExpressionError, ValueError) as error:
            found[kind, place] = str(error)
            continue
        if not np.allclose(ours, theirs, rtol=1e-12, atol=0.0):
            where = ", ".join(f"{name} = {value[off]:.3g}" for name, value in given.items())
            found[kind, place] = f"At {where} it gives {ours[off]:.4g}; torch, {theirs[off]:.4g}."
    x = float(draws.uniform(0.5, 2.0))
    mine, right = Tape(RULES, adds).gradient(Expression("x*x"), x=x)["x"], record("x*x", x=x).gradient["x"]
    if not np.isclose(mine, right, rtol=1e-12):
        found["adds"] = f"Of x*x at x = {x:.3g} the tape then gives {mine:.4g}; torch, {right:.4g}."
    return found
