"""Name runs by what differs between their experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LEFT_OUT = ("kind",)
_MAX_CHARS = 44


def what_differs(experiments: Sequence[Any], clocks: Sequence[str] = ()) -> list[str]:
    """Return one short name a run: the fields whose values are not the same in all experiments.

    `clocks`: each run's "virtual" or "wall", told apart as well. Runs that are equal are numbered.
    """
    if len(experiments) < 2:
        return ["" for _ in experiments]
    words: list[list[str]] = [[] for _ in experiments]
    for name in type(experiments[0]).model_fields:
        values = [getattr(experiment, name, None) for experiment in experiments]
        if name in _LEFT_OUT or all(value == values[0] for value in values):
            continue
        for word, text in zip(words, _difference(experiments[0], name, values), strict=True):
            word += [text] if text else []
    if len(set(clocks)) > 1:
        for word, clock in zip(words, clocks, strict=True):
            word.append("simulated" if clock == "virtual" else "measured")
    names = [_shorten(", ".join(word)) for word in words]
    seen: dict[str, int] = {}
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if names.count(name) > 1 or not name:
            names[index] = f"{name} (run {seen[name]})" if name else f"run {index + 1}"
    return names


def _difference(part: Any, name: str, values: Sequence[Any]) -> list[str]:
    """Return a text for each value of one field; parts of one class are compared field by field."""
    classes = {type(value) for value in values}
    if len(classes) == 1 and hasattr(type(values[0]), "model_fields") and not getattr(values[0], "name", None):
        cls = classes.pop()
        fields = [f for f in cls.model_fields if any(getattr(v, f) != getattr(values[0], f) for v in values)]
        texts = [_difference(values[0], f, [getattr(v, f) for v in values]) for f in fields if f not in _LEFT_OUT]
        return [", ".join(text for text in row if text) for row in zip(*texts, strict=True)]
    label = _label(part, name)
    if name in ("strategy", "problem", "optimizer", "precision"):
        return [_short(value) for value in values]
    if name == "workers":
        return [f"{value} worker{'s' * (value != 1)}" for value in values]
    return [_with_label(label, value) for value in values]


def _with_label(label: str, value: Any) -> str:
    if value is None:
        return f"no {label}"
    return _short(value) if hasattr(type(value), "model_fields") else f"{label} {_short(value)}"


def _label(part: Any, name: str) -> str:
    extra = type(part).model_fields[name].json_schema_extra
    return str((extra or {}).get("label", name)) if isinstance(extra, dict) else name


def _short(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_short(item) for item in value[:6]) + (", …)" if len(value) > 6 else ")")
    if getattr(value, "name", None) and isinstance(value.name, str):
        return value.name
    fields = getattr(type(value), "model_fields", None)
    if fields is None:
        return str(value)
    set_ = [(f, getattr(value, f)) for f in fields if f not in _LEFT_OUT and getattr(value, f) != fields[f].default]
    inside = ", ".join(f"{_label(value, field)} {_short(inner)}" for field, inner in set_)
    return type(value).__name__ + (f" ({inside})" if inside else "")


def _shorten(text: str) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    head = text[:_MAX_CHARS]
    return (head[: head.rindex(", ")] if ", " in head else head) + ", …"
