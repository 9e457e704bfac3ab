"""Name runs by what differs between their experiments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_LEFT_OUT = ("kind",)
_MAX_CHARS = 44
_SHORT_LABELS = {"staleness_bound": "bound"}
"""Labels too long for a name that tells runs apart."""


def what_differs(experiments: Sequence[Any], clocks: Sequence[str] = (), whole: bool = False) -> list[str]:
    """Return one name a run: the fields whose values are not the same in all experiments, short unless `whole`.

    `clocks`: each run's "virtual" or "wall", told apart as well. Runs that are equal are numbered. Where names have to
    be shortened, what was changed last comes first, as that is what the reader has just compared.
    """
    if len(experiments) < 2:
        return ["" for _ in experiments]
    columns: list[list[str]] = []
    changed: list[int] = []
    for name in type(experiments[0]).model_fields:
        values = [getattr(experiment, name, None) for experiment in experiments]
        if name not in _LEFT_OUT and any(value != values[0] for value in values):
            for inner, texts in _differences(experiments[0], name, values):
                columns.append(texts)
                changed.append(_last_change(inner))
    if len(set(clocks)) > 1:
        columns.append(["simulated" if clock == "virtual" else "measured" for clock in clocks])
        changed.append(_last_change(clocks))
    names = _joined(columns, len(experiments))
    if not whole and any(len(name) > _MAX_CHARS for name in names):
        newest = sorted(range(len(columns)), key=lambda at: -changed[at])
        names = [_shorten(name) for name in _joined([columns[at] for at in newest], len(experiments))]
    seen: dict[str, int] = {}
    named = list(names)
    for index, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        if names.count(name) > 1 or not name:
            named[index] = f"{name} (run {seen[name]})" if name else f"run {index + 1}"
    return named


def _joined(columns: Sequence[Sequence[str]], count: int) -> list[str]:
    return [", ".join(column[run] for column in columns if column[run]) for run in range(count)]


def _last_change(values: Sequence[Any]) -> int:
    return max((at for at in range(1, len(values)) if values[at] != values[at - 1]), default=0)


def _differences(part: Any, name: str, values: Sequence[Any]) -> list[tuple[Sequence[Any], list[str]]]:
    """Return (values, texts) of a field, or of each differing field within where the values are parts of one class."""
    classes = {type(value) for value in values}
    if len(classes) == 1 and hasattr(type(values[0]), "model_fields") and not getattr(values[0], "name", None):
        inner = [(f, [getattr(value, f) for value in values]) for f in classes.pop().model_fields if f not in _LEFT_OUT]
        return [found for f, column in inner if any(value != column[0] for value in column)
                for found in _differences(values[0], f, column)]
    label = _label(part, name)
    if name in ("strategy", "problem", "optimizer", "precision"):
        return [(values, [_short(value) for value in values])]
    if name == "workers":
        return [(values, [f"{value} worker{'s' * (value != 1)}" for value in values])]
    return [(values, [_with_label(label, value) for value in values])]


def _with_label(label: str, value: Any) -> str:
    if value is None:
        return f"no {label}"
    return _short(value) if hasattr(type(value), "model_fields") else f"{label} {_short(value)}"


def _label(part: Any, name: str) -> str:
    if name in _SHORT_LABELS:
        return _SHORT_LABELS[name]
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
