"""The graph that torch has built of an expression: values, local derivatives, gradients, and the memory it holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdlab.autodiff.expression import Expression, ExpressionError, checked_values
from gdlab.autodiff.process import ask

Number = float | np.ndarray


@dataclass(frozen=True)
class Node:
    """Hold one node of torch's graph.

    `name`: torch's own; `text`: the part of the expression; `inputs`: the indices of the nodes that it takes its values
    from, -1 for a constant; `local`: its derivative by each of these (one number; one a place for what works place by
    place; else outputs x inputs); `gradient`: the loss's derivative by it; `tangents`: its own by each variable, whose
    places all move alike; `saved`: bytes of each tensor kept for the backward pass.
    """

    index: int
    name: str
    text: str
    value: Number
    inputs: tuple[int, ...]
    local: tuple[Number | None, ...]
    gradient: Number | None
    tangents: dict[str, Number]
    saved: dict[str, int]

    @property
    def is_variable(self) -> bool:
        """Whether this is one of the expression's variables."""
        return self.name == "AccumulateGrad"


@dataclass(frozen=True)
class Recording:
    """Hold what `record` has found.

    `steps` are the nodes in the order in which the backward pass visits them; `held[k]` the bytes saved for it after
    node k was made, `freed[k]` those that are left after the k-th of `steps`, `forward_held` those of forward mode.
    """

    expression: Expression
    values: dict[str, np.ndarray]
    value: float
    gradient: dict[str, Number]
    nodes: tuple[Node, ...]
    steps: tuple[Node, ...]
    held: tuple[int, ...]
    freed: tuple[int, ...]
    forward_held: int

    def forward(self, direction: Mapping[str, Any]) -> float:
        """Return the loss's derivative along a direction (values by name; a name left out stays), by forward mode.

        Raises ExpressionError for a direction that does not fit the variables.
        """
        given = {name: np.zeros_like(value) for name, value in self.values.items()} | dict(direction)
        found = checked_values(list(self.values), given)
        for name, value in self.values.items():
            if found[name].shape not in (value.shape, ()):
                raise ExpressionError(f"The direction of {name} has another size than {name}: give {value.size} "
                                      "numbers, or one for all.")
        return ask("jvp", tree=self.expression.tree, values=plain(self.values), direction=plain(found))


def record(expression: str, /, **values: Any) -> Recording:
    """Compute a small loss by torch, in float64 and in a process of its own, and return the graph that torch builds.

    `values`: a number, a list or a list of equal lists for each variable. Raises ExpressionError (a ValueError) for an
    expression or a value that cannot be, HelperError where the process has failed.
    """
    read = Expression(expression)
    arrays = checked_values(read.names, values)
    found = ask("record", tree=read.tree, values=plain(arrays))
    nodes = tuple(_node(index, node) for index, node in enumerate(found["nodes"]))
    return Recording(read, arrays, found["value"], {name: number(one) for name, one in found["gradient"].items()},
                     nodes, tuple(nodes[at] for at in found["order"]), tuple(found["held"]), tuple(found["freed"]),
                     found["forward_held"])


def _node(index: int, found: dict[str, Any]) -> Node:
    saved = {name: size for name, size in found["saved"].items() if size is not None}
    return Node(index, found["name"], found["text"], number(found["value"]), tuple(found["inputs"]),
                tuple(map(number, found["local"])), number(found["gradient"]),
                {name: number(one) for name, one in found["tangents"].items()}, saved)


def number(value: Any) -> Any:
    """Return a float, an array for a list, or None."""
    return np.array(value) if isinstance(value, list) else value


def plain(values: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return arrays as lists."""
    return {name: value.tolist() for name, value in values.items()}
