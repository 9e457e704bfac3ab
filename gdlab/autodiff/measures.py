"""Derivatives beside each other: finite differences and their errors, forward mode and reverse mode and their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from gdlab.autodiff.expression import Expression, checked_values
from gdlab.autodiff.process import ask
from gdlab.autodiff.recording import plain

EPS = float(np.finfo(np.float64).eps)
PAIRS = ((64, 1), (16, 4), (8, 8), (4, 16), (1, 64))
"""Inputs and outputs of the functions whose Jacobians are compared."""


@dataclass(frozen=True)
class FiniteDifferences:
    """Hold what finite differences give at each of `steps`, and what theory says of their errors.

    `derivatives`: f, f', f'' and f''' along the direction, by nested forward mode. Errors are those of
    (f(x + h) - f(x)) / h and (f(x + h) - f(x - h)) / 2h. `truncation` is h^2 |f'''| / 6, the first term that the
    central one leaves out; `rounding` eps |f| / h, since each f carries a relative error of about eps / 2.
    """

    text: str
    derivatives: tuple[float, float, float, float]
    steps: np.ndarray
    forward_error: np.ndarray
    central_error: np.ndarray

    @property
    def truncation(self) -> np.ndarray:
        return self.steps**2 * abs(self.derivatives[3]) / 6

    @property
    def rounding(self) -> np.ndarray:
        return EPS * abs(self.derivatives[0]) / self.steps

    @property
    def best_step(self) -> float:
        """The step at which the sum of both is least: (3 eps |f| / |f'''|)^(1/3); infinite where f''' is 0."""
        value, _, _, third = map(abs, self.derivatives)
        return float(np.cbrt(3 * EPS * value / third)) if third else np.inf

    def figure(self) -> go.Figure:
        """Draw the errors over the step, with both limbs of the V."""
        from gdlab.autodiff.figures import v_curve

        return v_curve(self)


def finite_differences(expression: str, /, direction: Mapping[str, Any] | None = None,
                       **values: Any) -> FiniteDifferences:
    """Compare finite differences of a loss with its derivative along a direction (default: 1 for every variable).

    The steps are powers of two, from 1/2 to 2^-48, so that they are exact. Raises ExpressionError for what cannot be.
    """
    read = Expression(expression)
    arrays = checked_values(read.names, values)
    given = {name: np.ones_like(array) if direction is None else np.zeros_like(array) for name, array in arrays.items()}
    ways = checked_values(read.names, given | dict(direction or {}))
    steps = 0.5 ** np.arange(1, 49)
    found = ask("along", tree=read.tree, values=plain(arrays), direction=plain(ways),
                steps=[*steps.tolist(), *(-steps).tolist()])
    value, slope, *more = found["derivatives"]
    above, below = np.split(np.array(found["values"]), 2)
    return FiniteDifferences(read.text, (value, slope, *more), steps, np.abs((above - value) / steps - slope),
                             np.abs((above - below) / (2 * steps) - slope))


@dataclass(frozen=True)
class Costs:
    """Hold what Jacobians cost: `rows` of inputs, outputs and, of each mode, passes, evaluations and times.

    `times` is the Jacobian's time over that of one evaluation of the function, measured on this machine.
    """

    rows: tuple[dict[str, Any], ...]

    def figure(self) -> go.Figure:
        """Draw the times of both modes beside each other."""
        from gdlab.autodiff.figures import cost_bars

        return cost_bars(self)


def costs(pairs: Sequence[tuple[int, int]] = PAIRS, repeats: int = 5) -> Costs:
    """Measure the Jacobian of a net of n inputs and m outputs, by forward and by reverse mode.

    Forward mode takes a pass (and an evaluation) an input, reverse mode one evaluation and a pass an output; Griewank
    and Walther 2008, chapter 3. Raises ValueError for sizes outside of 1 to 256.
    """
    for pair in pairs:
        if not all(isinstance(size, int) and 1 <= size <= 256 for size in pair):
            raise ValueError(f"{pair} cannot be: inputs and outputs are whole numbers from 1 to 256.")
    return Costs(tuple({"inputs": n, "outputs": m} | ask("costs", inputs=n, outputs=m, repeats=repeats)
                       for n, m in pairs))
