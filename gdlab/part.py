"""The base of everything that describes an experiment: frozen, checked, explained in one sentence."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping
from typing import Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo


class ExperimentError(ValueError):
    """Say in one sentence which field of an experiment cannot be, what was given, and what is allowed.

    `faults` has such a sentence for each wrong field, by its name ("workers", "optimizer.lr").
    """

    def __init__(self, message: str = "", faults: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.faults = dict(faults or {})


def knob(default: Any = ..., *, label: str, help: str, unit: str = "", group: str = "more", **bounds: Any) -> Any:
    """Declare a field once: its bounds, unit and words feed validation, widgets, command-line flags and docs."""
    extra: dict[str, Any] = {"label": label, "unit": unit, "group": group}
    return Field(default, description=help, json_schema_extra=extra, **bounds)


def bounds_of(field: FieldInfo) -> dict[str, float]:
    """Return the declared bounds of a field as a dict with any of `ge`, `gt`, `le`, `lt`."""
    found: dict[str, float] = {}
    for item in field.metadata:
        for kind, name in ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt")):
            if isinstance(item, kind):
                found[name] = getattr(item, name)
    return found


class Part(BaseModel):
    """Hold one checked, immutable piece of an experiment; positional arguments follow the order of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def __init__(self, /, *args: Any, **data: Any) -> None:
        names = [name for name in type(self).model_fields if name != "kind"]
        if len(args) > len(names):
            raise ExperimentError(f"{type(self).__name__} takes at most {len(names)} values ({', '.join(names)}), "
                                  f"{len(args)} were given.")
        for name, value in zip(names, args, strict=False):
            key = type(self).model_fields[name].alias or name
            if name in data or key in data:
                raise ExperimentError(f"{type(self).__name__}: {key} was given twice.")
            data[key] = value
        for name, value in data.items():
            # True would be taken for 1: a switch in place of a number is a slip, not a value.
            field = type(self).model_fields.get(name)
            if isinstance(value, bool) and field and "bool" not in str(field.annotation):
                raise ExperimentError(f"{name} = {value} cannot be: a value is needed, not a switch.")
        try:
            super().__init__(**data)
        except ValidationError as error:
            faults = explain(error, type(self))
            raise ExperimentError(summed_up(faults), faults) from None
        except RecursionError:
            raise ExperimentError(f"{type(self).__name__}: a value is nested too deeply to be read.") from None

    # Parts are equal by their fields: what rides along outside the JSON (a pickled function) does not count.
    def _values(self) -> tuple[Any, ...]:
        return tuple(self.__dict__[name] for name in type(self).model_fields)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._values()))

    def __repr_args__(self) -> Any:
        return [(name, value) for name, value in super().__repr_args__() if name != "kind"]

    def __str__(self) -> str:
        return repr(self)

    def replace(self, /, **changes: Any) -> typing.Self:
        """Return a copy with some fields changed, checked like a new one."""
        unknown = set(changes) - set(type(self).model_fields)
        if unknown:
            raise ExperimentError(_unknown(sorted(unknown)[0], type(self)))
        data = {(field.alias or name): getattr(self, name) for name, field in type(self).model_fields.items()}
        data.update({(type(self).model_fields[name].alias or name): value for name, value in changes.items()})
        return type(self)(**data)


def _unknown(name: str, cls: type[BaseModel]) -> str:
    names = [name for name in cls.model_fields if name != "kind"]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}."
    return f"{cls.__name__} has no field {name}: {hint}"


def number(value: float) -> str:
    """Return a bound as a person writes it: whole numbers in full, with commas."""
    whole = isinstance(value, int) or (value.is_integer() and 1000 <= abs(value) < 1e15)
    return f"{int(value):,}" if whole else f"{value:g}"


def _allowed(field: FieldInfo | None) -> str:
    if field is None:
        return ""
    bounds = bounds_of(field)
    what = "a whole number" if "int" in str(field.annotation) else "a number"
    low = bounds.get("ge", bounds.get("gt"))
    high = bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        strict = " (itself excluded)" if "gt" in bounds else ""
        return f"it must be {what} from {number(low)}{strict} to {number(high)}"
    if low is not None:
        return f"it must be {what} {'of at least' if 'ge' in bounds else 'above'} {number(low)}"
    if high is not None:
        return f"it must be {what} of at most {number(high)}"
    return f"it must be {what}"


def shown(value: Any) -> str:
    """Return a value as a sentence has it: numbers, also those that were typed, without quotes."""
    try:
        text = str(value) if _is_number(value) else repr(value)
    except RecursionError:
        return "..."
    return text if len(text) <= 60 else text[:57] + "..."


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, str) and float(value) is not None
    except ValueError:
        return False


def _cannot_be(where: str, value: Any) -> str:
    empty = isinstance(value, str) and not value.strip()
    return f"{where} is empty" if empty else f"{where} = {shown(value)} cannot be"


def summed_up(faults: Mapping[str, str]) -> str:
    """Return the first fault's sentence and how many others there are."""
    first, others = next(iter(faults.values()), ""), len(faults) - 1
    return first + (f" ({others} more {'field is' if others == 1 else 'fields are'} wrong too.)" if others > 0 else "")


def explain(error: ValidationError, cls: type[BaseModel]) -> dict[str, str]:
    """Turn pydantic's report into one sentence a field that names the field, the value and what is allowed."""
    faults: dict[str, str] = {}
    for found in error.errors(include_url=False):
        name = str(found["loc"][0]) if found["loc"] else ""
        inner = getattr(found.get("ctx", {}).get("error"), "faults", None)
        if inner:  # of a part of the experiment, which has judged itself
            for field, sentence in inner.items():
                faults.setdefault(f"{name}.{field}" if name else field, f"{name}: {sentence}" if name else sentence)
        else:
            faults.setdefault(name, _explain(found, cls))
    return faults


def _explain(found: Any, cls: type[BaseModel]) -> str:
    steps = list(found["loc"])
    field = cls.model_fields.get(str(steps[0])) if steps else None
    if field is None and steps:
        field = next((f for f in cls.model_fields.values() if f.alias == steps[0]), None)
    where = ".".join(str(step) for step in steps if isinstance(step, int) or (str(step).isidentifier()
                     and not str(step)[0].isupper() and str(step) not in ("int", "float", "str", "bool")))
    kind, given = found["type"], found.get("input")
    if kind == "extra_forbidden":
        return _unknown(str(steps[-1]), cls)
    if kind == "missing":
        return f"{cls.__name__} needs a value for {where}."
    if kind == "value_error":
        message = str(found["ctx"]["error"])
        return (f"{where}: {message}" if where else message).rstrip(".") + "."
    if kind.startswith("union_tag"):
        tags = found["ctx"].get("expected_tags", "") if "ctx" in found else ""
        return f"{where} = {shown(given)} is not known: it must be one of {tags or 'the known kinds'}."
    if kind == "literal_error":
        return f"{where} = {shown(given)} is not known: it must be {found['ctx']['expected']}."
    numeric = ("greater_than", "less_than", "int_", "float_", "finite_number")
    if kind.startswith(numeric):
        allowed = _allowed(field) if len(steps) <= 2 else found["msg"].lower()
        if kind == "finite_number":
            allowed = allowed.replace("a number", "a finite number")
        return f"{_cannot_be(where, given)}: {allowed}."
    return f"{_cannot_be(where, given)}: {found['msg'][0].lower()}{found['msg'][1:]}."
