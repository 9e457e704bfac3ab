"""The Experiment: one frozen, checked description of a run, with JSON and URL-query round trips."""

from __future__ import annotations

import json
from functools import cached_property
from numbers import Real
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode

import numpy as np
from pydantic import BeforeValidator, PrivateAttr, model_validator

from gdlab.communication import Compression, Network, compression_of
from gdlab.laws import BLOCK, LAWS, AnyLaw, Constant
from gdlab.part import ExperimentError, Part, knob
from gdlab.parts import (
    PROBLEMS,
    SGD,
    STRATEGIES,
    AdamW,
    AnyOptimizer,
    AnyProblem,
    AnyStrategy,
    Async,
    Clip,
    Digits,
    Opaque,
    Precision,
    Sync,
    Torch,
)

MAX_WORKERS = 100_000
MAX_WORKER_PARAMETERS = 50_000_000
"""Workers times parameters: each worker of a run may hold a version, and a gradient, of its own."""
MAX_UPDATES = 1_000_000
MAX_SECONDS = 3600.0
VIRTUAL_STEP_S = 0.01
"""What a gradient takes in virtual time where no law is given."""

_SHORT_AS_NUMBER = ("clip", "compute_time")
_IN_LINK_BUT_NOT_OURS = ("theme", "template", "voila-theme", "voila-template", "classic-tree", "token")


def _by_name(parts: tuple[type[Part], ...], what: str, short: dict[str, Any] | None = None) -> BeforeValidator:
    kinds = {part.__name__.lower(): part for part in parts}

    def pick(value: Any) -> Any:
        if isinstance(value, str):
            if value.lower() in kinds:
                return kinds[value.lower()]()
            names = ", ".join(part.__name__ for part in parts)
            raise ValueError(f"{value!r} is not known: {what} must be one of {names}")
        for kind, make in (short or {}).items():
            if kind == "number" and isinstance(value, Real) and not isinstance(value, bool):
                return make(float(value))
            if kind == "callable" and callable(value) and not isinstance(value, Part):
                return make(value)
        if not isinstance(value, Part | dict) and value is not None:
            names = ", ".join(f"gd.{part.__name__}(...)" for part in parts)
            raise ValueError(f"{value!r} cannot be {what}: it must be one of {names}")
        return value

    return BeforeValidator(pick)


def _precision(value: Any) -> Any:
    return Precision.named(value) if isinstance(value, str) else value


def _clip(value: Any) -> Any:
    if isinstance(value, Real) and not isinstance(value, bool):
        return Clip(norm=float(value))
    return None if value is False or (isinstance(value, str) and value == "none") else value


class Experiment(Part):
    """Describe one run: the problem, the workers, their timing, the arithmetic, the end. Frozen and checked.

    Times are in seconds. Raises ExperimentError (a ValueError) with one sentence for anything that cannot be.
    """

    problem: Annotated[AnyProblem, _by_name(PROBLEMS, "a problem", {"callable": Opaque.of})] = knob(
        Digits(), label="problem", help="What is minimised", group="problem")
    workers: int = knob(4, label="workers", help="How many workers compute gradients", group="workers",
                        ge=1, le=MAX_WORKERS)
    strategy: Annotated[AnyStrategy, _by_name(STRATEGIES, "a strategy")] = knob(
        Sync(), label="strategy", help="How the workers' gradients meet", group="strategy")
    compute_time: Annotated[AnyLaw | None, _by_name(LAWS, "a law", {"number": Constant})] = knob(
        None, label="step time", help="How long a gradient takes; none: as long as it really takes",
        group="stragglers")
    speeds: tuple[float, ...] | None = knob(None, label="speeds", group="stragglers",
                                            help="One relative speed a worker: 0.25 is four times slower")
    network: Network = knob(Network(), label="network", help="What a message costs", group="network")
    compression: Annotated[Compression | None, BeforeValidator(compression_of)] = knob(
        None, label="compression", help="What is sent of each push: all of it, or less", group="network")
    precision: Annotated[Precision, BeforeValidator(_precision)] = knob(
        Precision(), label="precision", help="In which number formats the run computes", group="precision")
    clip: Annotated[Clip | None, BeforeValidator(_clip)] = knob(
        None, label="clipping", help="How large a gradient may be", group="clipping")
    optimizer: Annotated[AnyOptimizer, _by_name((SGD, AdamW), "an optimizer")] = knob(
        SGD(), label="optimizer", help="The rule of descent", group="optimizer")
    batch_size: int | None = knob(32, label="batch size", help="Samples per gradient and worker; none: all its data",
                                  group="data", ge=1, le=100_000)
    global_batch: int | None = knob(None, label="global batch", group="data", ge=1, le=10_000_000,
                                    help="Samples per round, shared out over the workers")
    shards: tuple[float, ...] | None = knob(None, label="shards", help="Each worker's share of the data", group="data")
    reduce_order: Literal["sequential", "ring", "tree"] = knob(
        "sequential", label="reduce order", group="precision",
        help="In which order gradients are summed; a real all-reduce keeps its library's")
    on_nonfinite: Literal["apply", "skip", "stop"] = knob(
        "apply", label="not finite", group="precision",
        help="What a gradient with infinity or NaN does: apply, skip the step (as any loss scale does), stop the run")
    combine: Literal["mean", "weighted", "sum"] = knob("mean", label="combine", group="data",
                                                           help="mean, weighted (by shard size) or sum")
    updates: int | None = knob(200, label="updates", help="Stop after this many updates", group="end",
                               ge=1, le=MAX_UPDATES)
    seconds: float | None = knob(None, label="seconds", help="Stop after this long, on the run's own clock", unit="s",
                                 group="end", gt=0, le=MAX_SECONDS)
    target_loss: float | None = knob(None, label="target loss", help="Stop when the full loss is at most this",
                                     group="end")
    seed: int = knob(0, label="seed", help="Which random draws", group="end", ge=0, le=2**63 - 1)
    faults: tuple[()] = knob((), label="faults", help="Faults to inject", group="more")
    device: Literal["auto", "cpu", "cuda"] = knob("auto", label="device", help="auto, cpu or cuda", group="more")
    _payload: bytes | None = PrivateAttr(None)

    def __init__(self, /, *args: Any, **data: Any) -> None:
        problem = data.get("problem")
        if isinstance(problem, Torch) and problem._payload is not None:
            data["problem"] = Opaque.of(problem)
        super().__init__(*args, **data)
        if isinstance(self.problem, Opaque):
            self._payload = self.problem._payload

    @model_validator(mode="after")
    def _consistent(self) -> Experiment:
        n = self.workers
        if self.speeds is not None:
            _one_each("speeds", len(self.speeds), n)
            if not all(0 < speed <= 1e6 for speed in self.speeds):
                raise ValueError(f"speeds = {self.speeds} cannot be: each must be a number above 0")
        if self.shards is not None:
            _one_each("shards", len(self.shards), n)
            if not all(share > 0 for share in self.shards) or abs(sum(self.shards) - 1) > 1e-6:
                raise ValueError(f"shards = {self.shards} cannot be: each must be above 0 and their sum 1")
        size = len(getattr(self.problem, "start", ())) or getattr(self.problem, "features", 1)
        if n * size > MAX_WORKER_PARAMETERS:
            raise ValueError(f"workers = {n:,} with {size:,} parameters each are too many: workers times parameters "
                             f"must be at most {MAX_WORKER_PARAMETERS:,}")
        for name in ("centers", "eigenvalue_rows"):
            rows = getattr(self.problem, name, None)
            if rows is not None:
                _one_each("centers" if name == "centers" else "rows of eigenvalues", len(rows), n)
        if self.global_batch is not None and self.global_batch < n:
            raise ValueError(f"global_batch = {self.global_batch} cannot be shared out over workers = {n}: "
                             "it must be at least one sample a worker")
        if self.updates is None and self.seconds is None and self.target_loss is None:
            raise ValueError("a run needs an end: set at least one of updates, seconds and target_loss")
        if isinstance(self.strategy, Sync) and self.strategy.backups:
            if self.strategy.exchange == "allreduce":
                raise ValueError("an all-reduce needs every worker, so it has no backup workers: "
                                 'use Sync(backups=..., exchange="server")')
            if self.strategy.backups >= n:
                raise ValueError(f"strategy.backups = {self.strategy.backups} leaves nobody of workers = {n} to wait "
                                 f"for: it must be at most {n - 1}")
        return self

    # ---- derived ----

    @property
    def payload(self) -> bytes | None:
        """The pickled function of an Opaque problem, or None; never part of the JSON."""
        return self._payload

    @property
    def batch_sizes(self) -> tuple[int | None, ...]:
        """Samples per gradient of each worker; None: all the worker's data."""
        if self.global_batch is None:
            return (self.batch_size,) * self.workers
        least, rest = divmod(self.global_batch, self.workers)
        return tuple(least + (worker < rest) for worker in range(self.workers))

    def speed(self, worker: int) -> float:
        """Return the relative speed of a worker."""
        return 1.0 if self.speeds is None else self.speeds[worker]

    @property
    def nonfinite_rule(self) -> str:
        """What becomes of a gradient that is not finite: under a loss scale its step is always skipped."""
        return self.on_nonfinite if self.precision.loss_scale is None else "skip"

    @property
    def clips_at(self) -> str | None:
        """Where gradients are clipped, "worker" or "average": one that is applied alone is its own average."""
        alone = isinstance(self.strategy, Async) and self.strategy.batch == 1
        return None if self.clip is None else "worker" if alone else self.clip.where

    @cached_property
    def times(self) -> Times:
        """The time that each step of each worker takes, in seconds."""
        return Times(self)

    @property
    def label(self) -> str:
        """A short name: problem, workers, strategy, precision, compression, clip."""
        text = f"{type(self.problem).__name__}, {self.workers} workers, {self.strategy!r}, {self.precision}"
        text += f", {self.compression.name}" if self.compression else ""
        return text + (f", {self.clip!r}" if self.clip else "")

    # ---- round trips ----

    def to_json(self) -> str:
        """Return the experiment as JSON text."""
        return self.model_dump_json(by_alias=True)

    @classmethod
    def from_json(cls, text: str | bytes, payload: bytes | None = None) -> Experiment:
        """Read an experiment from JSON text; `payload` gives an Opaque problem its function back.

        Raises ExperimentError for text that is no experiment.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ExperimentError(f"This is no JSON text: {error}.") from None
        except RecursionError:
            raise ExperimentError("This JSON text is nested too deeply to be an experiment.") from None
        if not isinstance(data, dict):
            raise ExperimentError(f"An experiment is a JSON object with named fields, not {type(data).__name__}.")
        made = cls(**data)
        made._payload = payload
        if isinstance(made.problem, Opaque):
            made.problem._payload = payload
        return made

    def to_query(self) -> str:
        """Return the experiment as a URL query that holds only what differs from the defaults."""
        pairs: dict[str, str] = {}
        default = Experiment()
        for name in type(self).model_fields:
            value = getattr(self, name)
            if name != "kind" and value != getattr(default, name):
                _flatten(pairs, name, value)
        return urlencode(pairs, safe=",;")

    @classmethod
    def from_query(cls, query: str) -> Experiment:
        """Read an experiment from a URL query, missing fields by default; raises ExperimentError for unknown ones."""
        data: dict[str, Any] = {}
        for key, text in parse_qsl(query.lstrip("?"), keep_blank_values=True):
            if key in _IN_LINK_BUT_NOT_OURS:
                continue
            name, _, field = key.partition(".")
            value = _parse(text)
            if not field and name in _SHORT_AS_NUMBER:
                value = _number_if_one(value)
            if not field:
                if name in data and isinstance(data[name], dict) and isinstance(value, str):
                    data[name] = {_chosen_by(name): value, **data[name]}
                else:
                    data[name] = value
                continue
            part = data.get(name, {})
            if isinstance(part, str):
                part = {_chosen_by(name): part}
            if not isinstance(part, dict):
                raise ExperimentError(f"The link sets {name} and {key}, which do not go together.")
            data[name] = {**part, field: value}
        for name, value in data.items():
            if isinstance(value, dict) and "kind" not in value and name in cls.model_fields:
                default: Any = {"clip": Clip, "compression": Compression}.get(name)
                default = default or type(cls.model_fields[name].default)
                data[name] = {"kind": default.__name__, **value}
        return cls(**data)


class Times:
    """Give the time in seconds of each step of each worker: the law's draw divided by the worker's speed."""

    def __init__(self, experiment: Experiment) -> None:
        self._law = experiment.compute_time or Constant(value=VIRTUAL_STEP_S)
        self._seed, self._speed = experiment.seed, experiment.speed
        self._blocks: dict[int, tuple[int, np.ndarray]] = {}

    def draw(self, worker: int, step: int) -> float:
        """Return the seconds of one step of one worker."""
        block, offset = divmod(step, BLOCK)
        kept = self._blocks.get(worker)
        if kept is None or kept[0] != block:
            kept = (block, self._law.block(self._seed, worker, block) / self._speed(worker))
            self._blocks[worker] = kept
        return float(kept[1][offset])


def _one_each(name: str, count: int, workers: int) -> None:
    if count != workers:
        raise ValueError(f"there are {count} {name} but workers = {workers}: one a worker is needed")


def _flatten(pairs: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, Precision) and value.name:
        pairs[name] = value.name
    elif isinstance(value, Part):
        pairs[name] = value.method if isinstance(value, Compression) else type(value).__name__
        for field, info in type(value).model_fields.items():
            inner = getattr(value, field)
            if field not in ("kind", "method") and inner != info.default:
                pairs[f"{name}.{info.alias or field}"] = _text(inner)
    else:
        pairs[name] = _text(value)


def _chosen_by(name: str) -> str:
    return "method" if name == "compression" else "kind"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        if value and isinstance(value[0], tuple):
            return ";".join(_text(row) for row in value) + (";" if len(value) == 1 else "")
        return ",".join(_text(item) for item in value) + ("," if len(value) == 1 else "")
    return repr(value) if isinstance(value, float) else str(value)


def _number_if_one(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def _parse(text: str) -> Any:
    if text == "none":
        return None
    if "(" in text:  # a format such as Float(5, 2)
        return text
    if ";" in text:
        return tuple(_parse(row) for row in text.split(";") if row)
    if "," in text:
        return tuple(item for item in text.split(",") if item)
    return text
