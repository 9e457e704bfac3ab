"""Small losses as a reader types them: read by Python's own parser, and never evaluated as Python.

What is typed is checked before it is parsed (its length, its signs, its nesting) and after (only the kinds of node that
are named here); what comes out is a tree of lists, which any process can compute with its own numbers.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

MAX_LETTERS, MAX_SIGNS, MAX_DEPTH, MAX_NAME = 2000, 600, 40, 20
MAX_POWER, MAX_CONSTANT = 64, 1e9
MAX_NAMES, MAX_NUMBERS = 8, 256
"""Variables of an expression, and the numbers that each of them may hold."""

FUNCTIONS = {"exp": 1, "log": 1, "sin": 1, "cos": 1, "tanh": 1, "atan": 1, "relu": 1, "sqrt": 1, "where": 3, "sum": 1,
             "dot": 2, "matmul": 2}
"""Each function's name -> how many arguments it takes."""
OPERATORS: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.USub: "neg"}
COMPARISONS: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
ALLOWED = f"numbers, names, + - * / **, comparisons inside where, and {', '.join(FUNCTIONS)}"
IN_EXPRESSIONS, IN_VALUES = {"+", "-", "*", "/", "**", "(", ")", ",", *COMPARISONS.values()}, {"-", "=", "[", "]", ","}

COMPUTE: dict[str, Callable[..., Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide, "**": np.power, "neg": np.negative, "exp": np.exp,
    "log": np.log, "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "atan": np.arctan, "sqrt": np.sqrt, "sum": np.sum,
    "relu": lambda a: np.maximum(a, 0.0), "where": np.where, "dot": np.dot, "matmul": np.matmul, "<": np.less,
    "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}
"""Each operation -> how numpy computes it."""

_SIGNS = re.compile(r"\s*(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|([A-Za-z]\w*)|(\*\*|[<>=!]=|[-+*/()<>,=\[\]]))",
                    re.ASCII)


class ExpressionError(ValueError):
    """Say in one sentence why an expression, or a value for it, cannot be."""


class Expression:
    """Hold a checked expression: `.text`, `.names` of its variables in their order, and `.tree`.

    A node of the tree is [operation, text, *arguments], ["number", text, value] or ["name", text].
    """

    def __init__(self, text: Any) -> None:
        self.text = check(text, IN_EXPRESSIONS, "An expression", ALLOWED, '"(w*x - 1)**2"')
        try:
            body = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise ExpressionError(f"{shortened(self.text)} cannot be read: see that every bracket is closed and that "
                                  "an operator stands between two values.") from None
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
            if not isinstance(node, ast.Compare) or len(node.ops) != 1 or type(node.ops[0]) not in COMPARISONS:
                raise ExpressionError(f"{shortened(text)} is no condition: the first argument of where is one "
                                      "comparison, like x > 0.")
            sides = [self._read(side, depth + 1) for side in (node.left, *node.comparators)]
            return [COMPARISONS[type(node.ops[0])], text, *sides]
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            if abs(node.value) > MAX_CONSTANT:
                raise ExpressionError(f"The number {shortened(text)} is too large: at most {MAX_CONSTANT:g} is read.")
            return ["number", text, float(node.value)]
        if isinstance(node, ast.Name) and node.id not in FUNCTIONS:
            if node.id not in self.names:
                self.names.append(node.id)
            if len(self.names) > MAX_NAMES:
                raise ExpressionError(f"The expression has more than {MAX_NAMES} variables: use fewer, or a list.")
            return ["name", text]
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return ["neg", text, self._read(node.operand, depth + 1)]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            if isinstance(node.op, ast.Pow):
                self._check_power(node.right)
            return [OPERATORS[type(node.op)], text, *(self._read(side, depth + 1) for side in (node.left, node.right))]
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
        if not isinstance(plain, ast.Constant) or abs(plain.value) > MAX_POWER:
            raise ExpressionError(f"The power {shortened(ast.get_source_segment(self.text, exponent) or '')} is too "
                                  f"much: an exponent is a number from -{MAX_POWER} to {MAX_POWER}, or has a variable.")


def check(text: Any, signs: set[str], what: str, allowed: str, example: str) -> str:
    """Return what was typed on one line, if parsing it can do no harm; raises ExpressionError for all else."""
    if not isinstance(text, str) or not text.strip():
        given = "nothing" if isinstance(text, str) else type(text).__name__
        raise ExpressionError(f"{what} is a text like {example}; {given} was given.")
    if len(text) > MAX_LETTERS:
        raise ExpressionError(f"{what} of {len(text):,} letters is too long: at most {MAX_LETTERS:,} are read.")
    text = " ".join(text.split())
    at, depth, count, after_number = 0, 0, 0, False
    while at < len(text):
        found = _SIGNS.match(text, at)
        if found is None or (found[3] and found[3] not in signs):
            wrong = text[at:].strip()[0]
            raise ExpressionError(f"{wrong!a} has no place here: {what.lower()} holds {allowed}.")
        number, name, sign = found.groups()
        count, depth = count + 1, depth + (sign in ("(", "[")) - (sign in (")", "]"))
        if count > MAX_SIGNS or depth > MAX_DEPTH:
            raise ExpressionError(f"{what} of more than {MAX_SIGNS} signs, or {MAX_DEPTH} brackets inside each other, "
                                  "is too much: take it apart.")
        if name and (keyword.iskeyword(name) or len(name) > MAX_NAME or (after_number and found[0] == name)):
            raise ExpressionError(f"{shortened(name)} is no name for a variable: take a letter or a short word, and "
                                  "write * between a number and a name.")
        at, after_number = found.end(), bool(number)
    return text


def read_values(text: Any) -> dict[str, Any]:
    """Return the values that a reader types as "x = 1.5, w = [1, -2]"; raises ExpressionError for what is none."""
    text = check(text, IN_VALUES, "A list of values", "names, = and numbers", '"x = 1.5, w = [1, 2]"')
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        assert isinstance(call, ast.Call) and not call.args
        return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        raise ExpressionError(f'{shortened(text)} gives no values: write them as in "x = 1.5, w = [1, 2]".') from None


def checked_values(names: list[str], values: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the variables' values as float64 arrays of 0, 1 or 2 dimensions; raises ExpressionError for others."""
    for name in (*names, *values):
        if (name in names) != (name in values):
            wrong = f"needs a value for {name}" if name in names else f"has no variable {shortened(name)}"
            raise ExpressionError(f"The expression {wrong}: its variables are {', '.join(names) or 'none'}.")
    found = {}
    for name, value in values.items():
        try:
            array = np.array(value, np.float64)
        except (TypeError, ValueError):
            array = np.array(np.nan)
        if not np.isfinite(array).all() or array.ndim > 2 or not 0 < array.size <= MAX_NUMBERS:
            raise ExpressionError(f"{name} cannot be that: a value is a finite number, a list of them, or a list of "
                                  f"equal lists, of at most {MAX_NUMBERS} numbers in all.")
        found[name] = array
    return found


def compute(tree: list[Any], values: Mapping[str, Any]) -> Any:
    """Return a tree's value by numpy."""
    kind, text, *given = tree
    if kind == "number":
        return given[0]
    return values[text] if kind == "name" else COMPUTE[kind](*(compute(argument, values) for argument in given))


def shortened(text: str) -> str:
    """Return a text as a sentence can hold it."""
    return text if len(text) <= 40 else f"{text[:37]}..."
