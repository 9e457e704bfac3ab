"""Small losses as a reader types them: read by Python's own parser, and never evaluated as Python.

What is typed is checked before it is parsed (its length, its letters) and after (only the kinds of node that are named
here, no deeper and no larger than they may be); what comes out is a tree of lists, which any process can compute with
its own numbers.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_LETTERS, MAX_NODES, MAX_DEPTH, MAX_NAME = 2000, 600, 40, 20
MAX_POWER, MAX_CONSTANT = 64, 1e9
MAX_NAMES, MAX_NUMBERS = 8, 256
"""Variables of an expression, and the numbers that each of them may hold."""

FUNCTIONS = {"exp": 1, "log": 1, "sin": 1, "cos": 1, "tanh": 1, "atan": 1, "relu": 1, "sqrt": 1, "where": 3, "sum": 1,
             "dot": 2, "matmul": 2}
"""Each function's name -> how many arguments it takes."""
SIGNS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.USub: "neg",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
}
OPERATORS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "**": operator.pow,
    "neg": operator.neg, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
    "!=": operator.ne,
}
"""Each sign -> what numpy and torch do at it; functions go by the same names in both, but for relu."""
ALLOWED = f"numbers, names, + - * / **, comparisons inside where, and {', '.join(FUNCTIONS)}"
_WRONG = re.compile(r"[^A-Za-z0-9\s.+\-*/(),<>=!\[\]]")


class ExpressionError(ValueError):
    """Say in one sentence why an expression, or a value for it, cannot be."""


class Expression:
    """Hold a checked expression: `.text`, `.names` of its variables in their order, and `.tree`.

    A node of the tree is [operation, text, *arguments], ["number", text, value] or ["name", text].
    """

    def __init__(self, text: Any) -> None:
        if not isinstance(text, str) or not text.strip():
            given = "nothing" if isinstance(text, str) else type(text).__name__
            raise ExpressionError(f'An expression is a text like "(w*x - 1)**2"; {given} was given.')
        if len(text) <= MAX_LETTERS:
            text = " ".join(text.split())  # on one line
        body = parsed(text, "An expression", "(w*x - 1)**2")
        if sum(1 for _ in ast.walk(body)) > MAX_NODES:
            raise ExpressionError(f"{shortened(text)} has too many parts, more than {MAX_NODES}: take it apart.")
        self.text = text
        self.names: list[str] = []
        self.tree = self._read(body, 0)

    def compute(self, **values: Any) -> Any:
        """Return the expression's value by numpy, at float64 values; what is undefined is NaN or infinite."""
        with np.errstate(all="ignore"):
            return compute(self.tree, values)

    def _read(self, node: ast.AST, depth: int, condition: bool = False) -> list[Any]:
        text = ast.get_source_segment(self.text, node) or ""
        if depth > MAX_DEPTH:
            raise ExpressionError(f"The expression is nested more than {MAX_DEPTH} deep: take it apart.")
        if condition:
            if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in SIGNS:
                raise ExpressionError(f"{shortened(text)} is no condition: the first argument of where is one "
                                      "comparison, like x > 0.")
            sides = [self._read(side, depth + 1) for side in (node.left, *node.comparators)]
            return [SIGNS[type(node.ops[0])], text, *sides]
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and text[0] in "0123456789.":
            if abs(node.value) > MAX_CONSTANT:
                raise ExpressionError(f"The number {shortened(text)} is too large: at most {MAX_CONSTANT:g} is read.")
            return ["number", text, float(node.value)]
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS and len(node.id) <= MAX_NAME:
            if node.id not in self.names:
                self.names.append(node.id)
            if len(self.names) > MAX_NAMES:
                raise ExpressionError(f"The expression has more than {MAX_NAMES} variables: use fewer, or a list.")
            return ["name", text]
        if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
            return ["neg", text, self._read(node.operand, depth + 1)]
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            if isinstance(node.op, ast.Pow):
                self._check_power(node.right)
            return [SIGNS[type(node.op)], text, *(self._read(side, depth + 1) for side in (node.left, node.right))]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node.func.id, text, node.args, depth)
        raise ExpressionError(f"{shortened(text)} is not understood: an expression holds {ALLOWED}.")

    def _call(self, name: str, text: str, given: list[ast.expr], depth: int) -> list[Any]:
        if name not in FUNCTIONS:
            raise ExpressionError(f"There is no function {name}: an expression holds {ALLOWED}.")
        if len(given) != FUNCTIONS[name]:
            raise ExpressionError(f"{name} takes {FUNCTIONS[name]} arguments, and {shortened(text)} gives it "
                                  f"{len(given)}.")
        return [name, text, *(self._read(argument, depth + 1, name == "where" and place == 0)
                              for place, argument in enumerate(given))]

    def _check_power(self, exponent: ast.AST) -> None:
        """Let an exponent without a variable be one number, and no giant."""
        if any(isinstance(node, ast.Name) and node.id not in FUNCTIONS for node in ast.walk(exponent)):
            return
        plain = exponent.operand if isinstance(exponent, ast.UnaryOp) else exponent
        if not isinstance(plain, ast.Constant) or not -MAX_POWER <= float(str(plain.value)) <= MAX_POWER:
            raise ExpressionError(f"The power {shortened(ast.get_source_segment(self.text, exponent) or '')} is too "
                                  f"much: an exponent is a number from -{MAX_POWER} to {MAX_POWER}, or has a variable.")


def parsed(text: str, what: str, example: str) -> ast.expr:
    """Return Python's syntax tree of a text that is short, and made of nothing but what may stand in an expression."""
    if len(text) > MAX_LETTERS:
        raise ExpressionError(f"{what} of {len(text):,} letters is too long: at most {MAX_LETTERS:,} are read.")
    if wrong := _WRONG.search(text):
        raise ExpressionError(f"{wrong[0]!a} has no place here: {what.lower()} holds {ALLOWED}.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # 1if, for one, is only warned of
            return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExpressionError(f"{shortened(text)} cannot be read: write {what.lower()} like {example}, with every "
                              "bracket closed.") from None


def read_values(text: str) -> dict[str, Any]:
    """Return the values that a reader types as "x = 1.5, w = [1, -2]"; raises ExpressionError for what is none."""
    call = parsed(f"f({text})", "A list of values", "x = 1.5, w = [1, 2]")
    try:
        if isinstance(call, ast.Call) and not call.args:
            return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, RecursionError):
        pass
    raise ExpressionError(f"{shortened(text)} gives no values: write them as in x = 1.5, w = [1, 2].")


def checked_values(names: list[str], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the variables' values as float64 arrays of 0, 1 or 2 dimensions; raises ExpressionError for others."""
    for name in (*names, *values):
        if (name in names) != (name in values):
            wrong = f"needs a value for {name}" if name in names else f"has no variable {shortened(name)}"
            raise ExpressionError(f"The expression {wrong}: its variables are {', '.join(names) or 'none'}.")
    found = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except ValueError:  # lists of unequal length
            array = np.array(None)
        array = array.astype(np.float64) if array.dtype.kind in "iuf" else np.array(np.nan)
        if not np.isfinite(array).all() or array.ndim > 2 or not 0 < array.size <= MAX_NUMBERS:
            raise ExpressionError(f"{name} cannot be that: a value is a finite number, a list of them, or a list of "
                                  f"equal lists, of at most {MAX_NUMBERS} numbers in all.")
        found[name] = array
    return found


def compute(tree: list[Any], values: Mapping[str, Any]) -> Any:
    """Return a tree's value by numpy."""
    kind, text, *given = tree
    if kind in ("number", "name"):
        return np.float64(given[0]) if given else values[text]
    return apply(kind, [compute(argument, values) for argument in given])


def apply(kind: str, inputs: Sequence[Any]) -> Any:
    """Do one operation by numpy."""
    if kind == "relu":
        return np.maximum(inputs[0], 0.0)
    return (OPERATORS.get(kind) or getattr(np, kind))(*inputs)


def shortened(text: str) -> str:
    """Return a text as a sentence can hold it."""
    return text if len(text) <= 40 else f"{text[:37]}..."
