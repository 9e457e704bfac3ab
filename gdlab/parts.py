"""The parts of an experiment: what is minimised, by which strategy, in which arithmetic. Declarations only."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from gdlab.part import ExperimentError, Part, knob

Vector = tuple[float, ...]
Rows = tuple[Vector, ...]


# ---- problems ------------------------------------------------------------------------------------------------------
def _noise() -> Any:
    return knob(0.0, label="gradient noise", group="problem", ge=0, le=1e6,
                help="Standard deviation of the normal noise added to each coordinate of each gradient")


class Quadratic(Part):
    """Minimise sum of eigenvalue * (x - center)^2 / 2; `centers` (one point a worker) makes workers that disagree.

    `eigenvalues`: one row for all, or one row a worker. `start` and every row must have the same length.
    """

    eigenvalues: Vector | Rows = knob((1.0, 10.0), label="eigenvalues", help="Curvature along each axis",
                                      group="problem")
    start: Vector = knob((3.0, 1.0), label="start", help="Where the descent starts", group="problem")
    noise: float = _noise()
    centers: Rows | None = knob(None, label="centers", help="Each worker's own minimum", group="problem")
    kind: Literal["Quadratic"] = "Quadratic"

    @model_validator(mode="after")
    def _shapes_agree(self) -> Quadratic:
        size = len(self.start)
        if not 1 <= size <= 10_000:
            raise ValueError(f"start has {size} coordinates: 1 to 10,000 are possible")
        rows = {"eigenvalues": self.eigenvalue_rows or (self.eigenvalues,), "centers": self.centers or ()}
        for name, table in rows.items():
            for row in table:
                if len(row) != size:
                    raise ValueError(f"{name} has a row of {len(row)} numbers but start has {size}: they must agree")
        return self

    @property
    def eigenvalue_rows(self) -> Rows | None:
        """The rows of eigenvalues, one a worker, or None where all workers share one row."""
        return self.eigenvalues if self.eigenvalues and isinstance(self.eigenvalues[0], tuple) else None


class Ravine(Part):
    """Minimise Rosenbrock's (1 - x)^2 + 100 (y - x^2)^2: a bent, narrow valley."""

    start: tuple[float, float] = knob((-1.2, 1.0), label="start", help="Where the descent starts", group="problem")
    noise: float = _noise()
    kind: Literal["Ravine"] = "Ravine"


class Saddle(Part):
    """Minimise x^2/2 - y^2/2 + y^4/4: a saddle at the origin between two minima at y = -1 and 1."""

    start: tuple[float, float] = knob((2.0, 0.001), label="start", help="Where the descent starts", group="problem")
    noise: float = _noise()
    kind: Literal["Saddle"] = "Saddle"


class Cliff(Part):
    """Minimise a gentle slope that ends in a cliff, where the gradient explodes (after Pascanu et al. 2013, fig. 6)."""

    start: tuple[float, float] = knob((-1.0, 1.0), label="start", help="Where the descent starts", group="problem")
    noise: float = _noise()
    kind: Literal["Cliff"] = "Cliff"


class LinearRegression(Part):
    """Minimise the mean of (X theta - y)^2 / 2; `feature_scale` stretches the last feature and so the conditioning."""

    features: int = knob(5, label="features", help="Columns of X", group="problem", ge=1, le=1000)
    samples: int = knob(200, label="samples", help="Rows of X", group="problem", ge=1, le=100_000)
    noise: float = knob(0.1, label="label noise", help="Standard deviation of the noise in y", group="problem",
                        ge=0, le=1e6)
    feature_scale: float = knob(1.0, label="feature scale", help="Factor on the last feature", group="problem",
                                gt=0, le=1e6)
    kind: Literal["LinearRegression"] = "LinearRegression"


class Digits(Part):
    """Recognise 1,797 real handwritten digits (8 x 8 grey levels, 10 classes) by cross-entropy."""

    model: Literal["logistic", "mlp", "cnn"] = knob("mlp", label="model", group="problem",
                                                    help="Linear, one hidden layer, or convolutional")
    kind: Literal["Digits"] = "Digits"


class Sequence(Part):
    """Recall the first number of each sequence of random ones, by a linear recurrent net whose gradients explode.

    Going back through a sequence multiplies a gradient by up to radius^(length - 1) (Pascanu et al. 2013, 2.1).
    """

    length: int = knob(20, label="length", help="Numbers in a sequence", group="problem", ge=2, le=200)
    hidden: int = knob(16, label="hidden units", group="problem", ge=1, le=256, help="Size of the net's memory")
    samples: int = knob(256, label="samples", help="Sequences in all", group="problem", ge=1, le=10_000)
    radius: float = knob(1.2, label="spectral radius", group="problem", gt=0, le=4,
                         help="Size of the recurrent matrix's eigenvalues at the start: above 1, gradients explode")
    kind: Literal["Sequence"] = "Sequence"


class Torch(Part):
    """Train the reader's own model: `factory` names a function that returns (model, loss, data)."""

    factory: str = knob(label="factory", help='"package.module:function" that returns (model, loss, data)',
                        group="problem")
    shuffle: bool = knob(True, label="shuffle", help="Permute the data before it is shared out", group="problem")
    kind: Literal["Torch"] = "Torch"
    _payload: bytes | None = PrivateAttr(None)

    def __init__(self, /, *args: Any, **data: Any) -> None:
        given = args[0] if args else data.get("factory")
        if not callable(given):
            super().__init__(*args, **data)
            return
        name, payload = _opaque(given)
        super().__init__(f"cell:{name}", *args[1:], **{k: v for k, v in data.items() if k != "factory"})
        self._payload = payload

    @field_validator("factory")
    @classmethod
    def _names_a_function(cls, value: str) -> str:
        if not re.fullmatch(r"(cell:.+|[A-Za-z_][\w.]*:[A-Za-z_]\w*)", value):
            raise ValueError(f'{value!r} names no function: write "package.module:function"')
        return value


class Opaque(Part):
    """Stand for a function handed over from a cell: its name and the hash of its bytes; the bytes stay outside JSON."""

    name: str = knob(label="function", help="The function's name", group="problem")
    payload_sha256: str = knob(label="hash", help="SHA-256 of the pickled function", group="problem")
    shuffle: bool = knob(True, label="shuffle", help="Permute the data before it is shared out", group="problem")
    kind: Literal["Opaque"] = "Opaque"
    _payload: bytes | None = PrivateAttr(None)

    @classmethod
    def of(cls, function: Any) -> Opaque:
        """Pack a function (or a Torch that holds one) with cloudpickle."""
        import hashlib

        shuffle = True
        if isinstance(function, Torch):
            name, payload, shuffle = function.factory.removeprefix("cell:"), function._payload, function.shuffle
        else:
            name, payload = _opaque(function)
        made = cls(name=name, payload_sha256=hashlib.sha256(payload).hexdigest(), shuffle=shuffle)
        made._payload = payload
        return made


def _opaque(function: Any) -> tuple[str, bytes]:
    import cloudpickle

    name = getattr(function, "__name__", type(function).__name__)
    try:
        return name, cloudpickle.dumps(function)
    except Exception as error:  # whatever a reader's object raises while it is packed
        raise ExperimentError(f"The function {name} cannot be sent to worker processes ({error}): "
                              "keep open files, locks and modules out of it.") from None


PROBLEMS = (Quadratic, Ravine, Saddle, Cliff, LinearRegression, Digits, Sequence, Torch, Opaque)


# ---- strategies ----------------------------------------------------------------------------------------------------
class Sync(Part):
    """Wait for all workers (all but the `backups` slowest), average, step: synchronous SGD (Chen et al. 2016)."""

    backups: int = knob(0, label="backup workers", help="The slowest workers of a round that are not waited for",
                        group="strategy", ge=0, le=99_999)
    exchange: Literal["allreduce", "server"] = knob(
        "allreduce", label="exchange", help="How gradients meet: all-reduce, or a parameter server", group="strategy")
    kind: Literal["Sync"] = "Sync"


class Async(Part):
    """Apply every gradient when it arrives, at the full learning rate, however stale (Hogwild-style server).

    With batch = 1 a clip of the average is one at the worker, before delay compensation; else it comes after that.
    """

    staleness_bound: int | None = knob(
        None, label="steps ahead of the slowest, at most", group="strategy", ge=0, le=1_000_000,
        help="Bounds the workers' step counts (Ho et al. 2013), not the staleness that is drawn; none: any")
    batch: int = knob(1, label="gradients per update", help="Gradients that are averaged into one update",
                      group="strategy", ge=1, le=100_000)
    correction: Literal["none", "inverse", "delay_compensation"] = knob(
        "none", label="staleness correction", group="strategy",
        help="lr / max(1, staleness), or delay compensation (Zheng et al. 2017)")
    delay_compensation_strength: float = knob(1.0, label="compensation strength", group="strategy", ge=0, le=1e6,
                                              help="lambda of delay compensation")
    kind: Literal["Async"] = "Async"


class LocalSGD(Part):
    """Take `period` steps alone, then average the parameters (Stich 2019).

    Each round starts anew from rounded parameters: compensated updates carry nothing over, with period = 1 nothing.
    """

    period: int = knob(8, label="local steps", help="Steps between two averagings", group="strategy", ge=1, le=10_000)
    kind: Literal["LocalSGD"] = "LocalSGD"


STRATEGIES = (Sync, Async, LocalSGD)


# ---- arithmetic ----------------------------------------------------------------------------------------------------
FORMATS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8_e5m2", "fp8_e4m3", "fp4_e2m1")
NAMED_PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "mixed_fp16", "mixed_bf16")
_WRITTEN_FLOAT = re.compile(r"Float\(([2-9]|1[01]), ?([1-9]|[1-4]\d|5[0-2])\)")


def _format_name(value: Any) -> Any:
    if hasattr(value, "exponent_bits") and hasattr(value, "mantissa_bits"):
        return f"Float({value.exponent_bits}, {value.mantissa_bits})"
    if isinstance(value, str) and value not in FORMATS and not _WRITTEN_FLOAT.fullmatch(value):
        raise ValueError(f"{value!r} is no number format: it must be one of {', '.join(FORMATS)}, "
                         "or gd.Float(exponent_bits, mantissa_bits) with 2 to 11 and 1 to 52 bits")
    return value


Format = Annotated[str, BeforeValidator(_format_name)]


def _loss_scale(value: Any) -> Any:
    if isinstance(value, str) and value not in ("dynamic", "none"):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f'{value!r} is no loss scale: it must be a positive number, "dynamic" or none') from None
    return None if value == "none" else value


class Precision(Part):
    """Say in which number format a step computes, the weights are kept, and gradients travel and are summed."""

    compute: Format = knob("fp32", label="compute", help="Forward and backward", group="precision")
    weights: Format = knob("fp32", label="weights", help="What the shared parameters are stored in", group="precision")
    reduce: Format = knob("fp32", label="reduce", help="Each push and the running sum", group="precision")
    rounding: Literal["nearest", "stochastic"] = knob("nearest", label="rounding", group="precision",
                                                      help="How an updated weight is rounded")
    loss_scale: Annotated[float | Literal["dynamic"] | None, BeforeValidator(_loss_scale)] = knob(
        None, label="loss scale", help="Factor on the loss before the backward pass", group="precision")
    compensated: bool = knob(False, label="compensated", help="Kahan-compensated updates", group="precision")
    kind: Literal["Precision"] = "Precision"

    @field_validator("loss_scale")
    @classmethod
    def _positive(cls, value: Any) -> Any:
        if isinstance(value, float) and not 0 < value <= 2.0**60:
            raise ValueError(f"{value!r} is no loss scale: it must be a number above 0 and at most 2^60")
        return value

    @model_validator(mode="after")
    def _one_remedy(self) -> Precision:
        if self.compensated and self.rounding == "stochastic":
            raise ValueError("compensated updates carry over what rounding to nearest loses, so they do not go "
                             "together with stochastic rounding: choose one of the two")
        return self

    @classmethod
    def named(cls, name: str) -> Precision:
        """Return the precision of a short name; raises ExperimentError for an unknown one."""
        if name not in NAMED_PRECISIONS:
            raise ExperimentError(f"precision = {name!r} is not known: it must be one of "
                                  f"{', '.join(NAMED_PRECISIONS)}, or gd.Precision(...).")
        mixed = {"mixed_fp16": {"compute": "fp16", "loss_scale": "dynamic"}, "mixed_bf16": {"compute": "bf16"}}
        return cls(**mixed.get(name, {"compute": name, "weights": name, "reduce": name}))

    @property
    def name(self) -> str | None:
        """The short name of this precision, or None if it has none."""
        return next((name for name in NAMED_PRECISIONS if Precision.named(name) == self), None)

    def __str__(self) -> str:
        return self.name or repr(self)


class Clip(Part):
    """Bound each gradient by its norm, by value or adaptively (Brock et al. 2021), or give each the same norm."""

    norm: float | None = knob(None, label="norm", help="Largest norm that is left alone", group="clipping",
                              gt=0, le=1e30)
    value: float | None = knob(None, label="value", help="Largest absolute value of a coordinate", group="clipping",
                               gt=0, le=1e30)
    adaptive: float | None = knob(None, label="adaptive", group="clipping", gt=0, le=1e30,
                                  help="Largest ratio of gradient norm to weight norm")
    where: Literal["worker", "average"] = knob("worker", label="where", group="clipping",
                                               help="Each worker's gradient, or their average")
    before_unscale: bool = knob(False, label="before unscaling", group="clipping",
                                help="Clip the scaled gradient: the classic mistake")
    normalised: float | None = knob(None, label="normalised", group="clipping", gt=0, le=1e30,
                                    help="The norm that every gradient is given, shortened or lengthened")
    kind: Literal["Clip"] = "Clip"

    @model_validator(mode="after")
    def _one_rule(self) -> Clip:
        if sum(rule is not None for rule in (self.norm, self.value, self.adaptive, self.normalised)) != 1:
            raise ValueError("a clip needs exactly one of norm, value, adaptive and normalised")
        return self


class SGD(Part):
    """Stochastic gradient descent as in torch.optim.SGD."""

    lr: float = knob(0.1, label="learning rate", help="Step per unit of gradient", group="optimizer", ge=0, le=1e6)
    momentum: float = knob(0.0, label="momentum", help="Share of the last step kept", group="optimizer", ge=0, lt=1)
    weight_decay: float = knob(0.0, label="weight decay", help="Pull of the weights to 0", group="optimizer",
                               ge=0, le=1e6)
    kind: Literal["SGD"] = "SGD"


class AdamW(Part):
    """Adam with decoupled weight decay as in torch.optim.AdamW."""

    lr: float = knob(0.001, label="learning rate", help="Size of a step", group="optimizer", ge=0, le=1e6)
    beta1: float = knob(0.9, label="beta 1", help="Decay of the mean", group="optimizer", ge=0, lt=1)
    beta2: float = knob(0.999, label="beta 2", help="Decay of the mean square", group="optimizer", ge=0, lt=1)
    weight_decay: float = knob(0.01, label="weight decay", help="Pull of the weights to 0", group="optimizer",
                               ge=0, le=1e6)
    kind: Literal["AdamW"] = "AdamW"


AnyProblem = Annotated[
    Quadratic | Ravine | Saddle | Cliff | LinearRegression | Digits | Sequence | Torch | Opaque,
    Field(discriminator="kind")]
AnyStrategy = Annotated[Sync | Async | LocalSGD, Field(discriminator="kind")]
AnyOptimizer = Annotated[SGD | AdamW, Field(discriminator="kind")]
