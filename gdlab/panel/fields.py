"""An Experiment as the texts of a form and back: which controls there are follows from its own fields."""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from typing import Any, Literal

from pydantic.fields import FieldInfo

from gdlab.communication import METHODS
from gdlab.experiment import Experiment
from gdlab.part import Part, bounds_of, number
from gdlab.parts import FORMATS, NAMED_PRECISIONS, Opaque, Precision, Torch

Draft = dict[str, Any]
"""One text a field, nested like the experiment; a part that is absent is an empty dict."""

CLIP_RULES = ("norm", "value", "adaptive", "normalised")
SLOW = "slow"
"""A control of the form alone: how many times slower the last worker is than the others (it writes `speeds`)."""

BASIC = (
    "problem", "problem.model", "workers", SLOW, "compute_time", "strategy", "strategy.staleness_bound",
    "strategy.period", "precision", "clip", "clip.norm", "clip.value", "clip.adaptive", "clip.normalised",
    "optimizer.lr", "updates",
)
"""What a newcomer sees, in this order; everything else waits under "More settings"."""

# What a slider spans: (least, most, logarithmic, step); validation knows nothing of it and allows more.
_SCALES = {
    "workers": (1, 16, False, 1), SLOW: (1, 10, False, 0.5), "optimizer.lr": (1e-4, 10, True, None),
    "optimizer.momentum": (0, 0.99, False, 0.01), "strategy.staleness_bound": (0, 16, False, 1),
    "strategy.period": (1, 64, False, 1), "strategy.batch": (1, 16, False, 1), "strategy.backups": (0, 8, False, 1),
    "batch_size": (1, 512, True, 1), "updates": (10, 5000, True, 10), "clip.norm": (0.01, 100, True, None),
    "clip.value": (0.001, 10, True, None), "clip.adaptive": (0.001, 1, True, None),
    "clip.normalised": (0.01, 100, True, None),
    "compute_time.mean": (0.001, 1, True, None), "compute_time.value": (0.001, 1, True, None),
    "problem.noise": (0, 5, False, 0.1), "network.latency_s": (0, 0.1, False, 0.001),
    "compression.fraction": (0.001, 1, True, None),
}

_WORDS = {
    "Sync": "Synchronous: wait for everyone", "Async": "Asynchronous: never wait",
    "LocalSGD": "Local steps, then average",
    "Digits": "Handwritten digits (real data)", "Ravine": "Ravine (Rosenbrock)", "Quadratic": "Quadratic bowl",
    "Saddle": "Saddle", "Cliff": "Cliff", "LinearRegression": "Linear regression",
    "Sequence": "Sequence (a recurrent network)",
    "logistic": "linear", "mlp": "one hidden layer (mlp)", "cnn": "convolutional (cnn)",
    "Constant": "always the same", "Exponential": "memoryless (exponential)", "Gamma": "gamma",
    "ShiftedExponential": "least time + exponential", "Uniform": "between two times", "LogNormal": "log-normal",
    "Pareto": "heavy tail (Pareto)", "Spike": "now and then a hiccup",
    "fp64": "fp64: 64-bit floats", "fp32": "fp32: 32-bit floats", "bf16": "bf16: 16 bits, wide range",
    "fp16": "fp16: 16 bits, narrow range", "fp8_e4m3": "fp8 e4m3", "fp8_e5m2": "fp8 e5m2",
    "mixed_fp16": "mixed fp16: fp32 weights, loss scaling", "mixed_bf16": "mixed bf16: fp32 weights",
    "norm": "by norm", "value": "by value", "adaptive": "adaptive: relative to the weights",
    "normalised": "normalised: all of one norm",
    "topk": "top-k: the largest values", "sign": "signs: one bit a value", "fp8": "fp8: 8 bits a value",
    "allreduce": "all-reduce", "server": "parameter server", "worker": "each worker's gradient",
    "average": "the average", "delay_compensation": "delay compensation", "inverse": "lr / staleness",
}
_WHEN_OFF = {
    "compute_time": "as long as it really takes", "strategy.staleness_bound": "no bound", "batch_size": "all data",
    "seconds": "no limit", "updates": "no limit", "target_loss": "none", "clip": "no clipping", "speeds": "all equal",
    "compression": "nothing is left out",
}
_WHEN_ON = {
    "strategy.staleness_bound": "3", "batch_size": "32", "seconds": "10", "updates": "200", "target_loss": "0.1",
    "global_batch": "128",
}
_ONLY_FOR = {"fraction": "topk", "scale": "sign"}
"""Settings of a compression that matter for one method."""
_CHOICES = {f"precision.{name}": FORMATS for name in ("compute", "weights", "reduce")}


@dataclass(frozen=True)
class Row:
    """One control, as the page draws it."""

    path: str
    label: str
    type: str
    text: str
    help: str = ""
    unit: str = ""
    group: str = "more"
    basic: bool = False
    nested: bool = False
    options: tuple[dict[str, str], ...] = ()
    scale: dict[str, Any] | None = None
    optional: bool = False
    when_on: str = ""
    when_off: str = "none"
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return asdict(self) | {"options": list(self.options)}


def leaves(annotation: Any) -> list[Any]:
    """Return the plain types behind unions, Optional and Annotated."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return leaves(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [leaf for item in typing.get_args(annotation) for leaf in leaves(item)]
    return [annotation]


def kinds(annotation: Any) -> dict[str, type[Part]]:
    """Return the parts that a field may hold, by name."""
    return {t.__name__: t for t in leaves(annotation) if isinstance(t, type) and issubclass(t, Part)}


def key(name: str, field: FieldInfo) -> str:
    """Return the name that a field goes by outside Python."""
    return field.alias or name


def text_of(value: Any) -> str:
    """Return a value as a person would type it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return "; ".join(text_of(row) for row in value) + ";" * (len(value) == 1)
    if isinstance(value, tuple):
        return ", ".join(text_of(item) for item in value)
    return str(value)


def draft_of(part: Part) -> Draft:
    """Return the texts of a part's fields."""
    draft: Draft = {"kind": type(part).__name__}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if name in ("kind", "faults"):
            continue
        if kinds(field.annotation):
            draft[key(name, field)] = draft_of(value) if value is not None else {}
        else:
            draft[key(name, field)] = text_of(value)
    if isinstance(part, Experiment):
        draft[SLOW] = slow_of(part.speeds)
        del draft["kind"]
    return draft


def slow_of(speeds: tuple[float, ...] | None) -> str:
    """Return how many times slower the last worker is, or "" where the speeds say something else."""
    if speeds is None:
        return "1"
    if all(speed == 1 for speed in speeds[:-1]) and 0 < speeds[-1] <= 1:
        return text_of(float(f"{1 / speeds[-1]:.12g}"))
    return ""


def _value(text: Any, annotation: Any) -> Any:
    types_ = leaves(annotation)
    if text.strip() == "" and type(None) in types_:
        return None
    if any(typing.get_origin(t) is tuple for t in types_):
        text = text.strip().strip("()[]")
        if ";" in text:
            return tuple(tuple(_items(row)) for row in text.split(";") if row.strip())
        return tuple(_items(text))
    return text.strip()


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.replace(" ", ",").split(",") if item.strip()]


def data_of(draft: Draft, cls: type[Part] = Experiment) -> dict[str, Any]:
    """Return the texts as data that the experiment's own validation judges."""
    data: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        name = key(name, field)
        if name not in draft or name == "kind":
            continue
        inner, possible = draft[name], kinds(field.annotation)
        if not possible:
            data[name] = _value(inner, field.annotation)
        elif not inner:
            data[name] = None
        else:
            data[name] = {"kind": inner["kind"], **data_of(inner, possible[inner["kind"]])}
    return data


def cycled(text: str, workers: int, shares: bool = False) -> str:
    """Return per-worker values repeated (or cut) to the number of workers; shares are made to sum to 1 again."""
    if not text.strip():
        return text
    if ";" in text:
        rows = [row.strip() for row in text.split(";") if row.strip()]
        return "; ".join(islice(cycle(rows), workers)) + ";" * (workers == 1)
    items = list(islice(cycle(_items(text)), workers))
    if shares:
        try:
            total = sum(map(float, items))
            items = [repr(float(item) / total) for item in items]
        except (ValueError, ZeroDivisionError):
            pass
    return ", ".join(items)


def rows_of(draft: Draft, show: tuple[str, ...] | None = None, errors: dict[str, str] | None = None) -> list[Row]:
    """Return the controls for a draft, basic ones first in the order of BASIC; `show` names the only ones wanted."""
    rows = [row for name, field in Experiment.model_fields.items() if name != "faults"
            for row in _field_rows(name, field, draft[name], name, errors or {})]
    rows.insert(1, Row(
        SLOW, "Last worker is slower", "number", draft[SLOW], unit="times", group="stragglers", basic=True,
        help="How many times slower the last worker computes than the others: a straggler",
        scale=_scale(SLOW), error=(errors or {}).get(SLOW, "")))
    if show is not None:
        rows = [row for row in rows if _wanted(row.path, show)]
    place = {path: number for number, path in enumerate(BASIC)}

    def order(row: Row) -> float:
        # A part's own fields follow it, whether or not they have a place of their own.
        return place.get(row.path, place.get(row.path.partition(".")[0], 0) + 0.5)

    basic = sorted((row for row in rows if row.basic or show is not None), key=order)
    more = [row for row in rows if not (row.basic or show is not None)]
    return [replace(row, basic=True, nested=_below(row, basic)) for row in basic] + [
        replace(row, nested=_below(row, more)) for row in more]


def _below(row: Row, rows: list[Row]) -> bool:
    """Tell whether the part that a row belongs to has a control of its own in the same place."""
    parent = row.path.rpartition(".")[0]
    return any(other.path == parent for other in rows)


def _wanted(path: str, show: tuple[str, ...]) -> bool:
    if path in show or (path == SLOW and "speeds" in show):
        return path != "speeds" or SLOW not in show
    basic = path in BASIC or path.startswith(("compute_time.", "compression."))
    return basic and any(path.startswith(f"{name}.") for name in show)


def _scale(path: str) -> dict[str, Any] | None:
    if path not in _SCALES:
        return None
    low, high, log, step = _SCALES[path]
    return {"min": low, "max": high, "log": log, "step": step}


def _say(label: str) -> str:
    return label[:1].upper() + label[1:]


def _options(values: Any) -> tuple[dict[str, str], ...]:
    return tuple({"value": value, "label": _WORDS.get(value, value)} for value in values)


def _field_rows(path: str, field: FieldInfo, text: Any, top: str, errors: dict[str, str]) -> list[Row]:
    extra = typing.cast(dict[str, str], field.json_schema_extra or {})
    possible = kinds(field.annotation)
    types_ = leaves(field.annotation)
    bounds = bounds_of(field)
    limits = " ".join(f"{word} {number(bounds[name])}" for name, word in
                      (("ge", "from"), ("gt", "above"), ("le", "to"), ("lt", "below")) if name in bounds)
    base: dict[str, Any] = {
        "path": path, "label": _say(extra.get("label", path)), "unit": extra.get("unit", ""),
        "help": (field.description or "") + (f" ({limits})" if limits else ""),
        "group": extra.get("group", "more"), "basic": path in BASIC or path.startswith("compute_time."),
        "error": errors.get(path, ""), "when_off": _WHEN_OFF.get(path, "none"),
    }
    if possible:
        return _part_rows(path, possible, type(None) in types_, text, base, errors)
    base["text"] = text
    if path in _CHOICES:
        known = [*_CHOICES[path]] + [text] * (text not in _CHOICES[path])
        return [Row(**base, type="choice", options=_options(known))]
    literals = [t for t in types_ if typing.get_origin(t) is Literal]
    if literals and len(types_) == 1:
        return [Row(**base, type="choice", options=_options(typing.get_args(literals[0])))]
    if types_ == [bool]:
        return [Row(**base, type="switch")]
    if all(t in (int, float, type(None)) for t in types_):
        optional = type(None) in types_
        return [Row(**base, type="number", scale=_scale(path), optional=optional,
                    when_on=_WHEN_ON.get(path, "1") if optional else "")]
    return [Row(**base, type="text")]


def _part_rows(path: str, possible: dict[str, type[Part]], optional: bool, draft: Draft, base: dict[str, Any],
               errors: dict[str, str]) -> list[Row]:
    kind = draft.get("kind", "")
    rows: list[Row] = []
    if path == "precision":
        name = preset_of(draft)
        options = _options(NAMED_PRECISIONS) + (({"value": "", "label": "own mix"},) if not name else ())
        rows.append(Row(**base, type="choice", text=name, options=options))
    elif path == "clip":
        rule = next((name for name in CLIP_RULES if draft.get(name, "") != "" or draft.get("rule") == name), "")
        options = ({"value": "", "label": base["when_off"]}, *_options(CLIP_RULES))
        rows.append(Row(**base, type="choice", text=rule, options=options))
        draft = {name: text for name, text in draft.items() if name not in CLIP_RULES or name == rule}
    elif path == "compression":
        method = draft.get("method", "")
        options = ({"value": "", "label": base["when_off"]}, *_options(METHODS))
        rows.append(Row(**base, type="choice", text=method, options=options))
        draft = {name: text for name, text in draft.items()
                 if name != "method" and _ONLY_FOR.get(name, method) == method}
    elif len(possible) > 1:
        offered = [name for name, cls in possible.items() if cls not in (Torch, Opaque) or name == kind]
        none = ({"value": "", "label": base["when_off"]},) if optional else ()
        rows.append(Row(**base, type="choice", text=kind, options=none + _options(offered)))
    if not kind:
        return rows
    for name, field in possible[kind].model_fields.items():
        name = key(name, field)
        if name == "kind" or name not in draft:
            continue
        for row in _field_rows(f"{path}.{name}", field, draft[name], path, errors):
            if path == "clip" and name in CLIP_RULES:
                row = replace(row, label="Threshold", optional=False)
            rows.append(row)
    return rows


def preset_of(draft: Draft) -> str:
    """Return the short name of the precision that the texts describe, or ""."""
    return next((name for name in NAMED_PRECISIONS if draft_of(Precision.named(name)) == draft), "")
