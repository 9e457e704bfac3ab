"""What crosses the network: what a message costs, and what a push is compressed to. Declarations only."""

from __future__ import annotations

from typing import Any, Literal

from gdlab.part import Part, knob

METHODS = ("topk", "sign", "fp8", "bf16")


class Network(Part):
    """Say what a message costs: latency_s + bytes * seconds_per_byte each way, and server_s per push at the server."""

    latency_s: float = knob(0.0, label="latency", help="Time of an empty one", unit="s", group="network", ge=0, le=60)
    seconds_per_byte: float = knob(0.0, label="time per byte", help="Inverse of the bandwidth", unit="s/byte",
                                   group="network", ge=0, le=1)
    server_s: float = knob(0.0, label="server time", help="Serial work of the server per push", unit="s",
                           group="network", ge=0, le=60)
    kind: Literal["Network"] = "Network"


class Compression(Part):
    """Send less of each push. What the server sends back, the parameters, is not compressed.

    A push is a worker's gradient, unscaled and clipped, before the optimizer; under LocalSGD it is the change of its
    parameters over the round (Basu et al. 2019, arXiv:1906.02367).

    "topk": the largest `fraction` of the values (one at least) in the push's format, each with an index of 4 bytes; of
    equal ones the lowest index goes first. "sign": one bit a value (0 counts as +), times a scale of 4 bytes.
    "fp8": e4m3, times a scale of 4 bytes, the least power of two at which no value saturates. "bf16": 2 bytes a value.
    (A scale has 8 bytes where gradients are reduced in fp64.) A server takes such messages as they are. Without one,
    bf16 is summed in bf16 by the all-reduce itself; no all-reduce can sum the others, so each rank sends its message to
    all others (an all-gather), and all sum in rank order: what is sent then grows with the workers.

    `error_feedback`: what was not sent is kept by the worker and added to its next push before that is compressed
    (Seide et al. 2014; for signs Karimireddy et al. 2019, arXiv:1901.09847, algorithm 1). What is kept is a gradient:
    a learning rate that changes in between applies to it as it is then. A push that is dropped (backup workers) is
    lost with its gradient, as without compression, and what the worker keeps stays as it was before; so does what it
    keeps where a push is not finite, which is sent so that it is seen: top-k sends NaN and infinity first, the others
    become NaN or infinite as a whole. What went out in a step that is then skipped is lost.

    `scale` of a sign: "mean" (mean |value|, so that it is as long as what it stands for), "one" (the values +-1:
    signSGD, a step of lr each), or "auto": "mean" with error feedback, "one" without.
    """

    method: Literal["topk", "sign", "fp8", "bf16"] = knob(
        "topk", label="method", help="What is sent of each push", group="network")
    fraction: float = knob(0.01, label="fraction kept", help="Share of the values that top-k sends", group="network",
                           gt=0, le=1)
    error_feedback: bool = knob(True, label="error feedback", group="network",
                                help="Add what was not sent to the next push")
    scale: Literal["auto", "mean", "one"] = knob(
        "auto", label="scale of a sign", group="network",
        help="mean |value|, or one (a fixed step); auto: mean with error feedback, one without")
    kind: Literal["Compression"] = "Compression"

    @property
    def scaled(self) -> bool:
        """Whether a sign is multiplied by the mean |value|."""
        return self.scale == "mean" or (self.scale == "auto" and self.error_feedback)

    @property
    def name(self) -> str:
        """A short name: the method, and what differs from its usual settings."""
        text = f"top-k {100 * self.fraction:.3g}%" if self.method == "topk" else self.method
        if self.method == "sign" and self.scaled != self.error_feedback:
            text += " times the mean" if self.scaled else " of step 1"
        return text + ("" if self.error_feedback else " without feedback")


def summed_in_bf16(compression: Compression | None, strategy: Any) -> bool:
    """Tell whether the all-reduce itself sums what was compressed: bf16 gradients, which it has an addition for."""
    bf16 = compression is not None and compression.method == "bf16"
    return bf16 and strategy.kind == "Sync" and strategy.exchange == "allreduce"


def compression_of(value: Any) -> Any:
    """Take a method's name for its compression; raises ValueError for an unknown one."""
    if isinstance(value, str) and value != "none":
        if value.lower() not in METHODS:
            raise ValueError(f"{value!r} is not known: a compression must be one of {', '.join(METHODS)}, or "
                             "gd.Compression(...)")
        return Compression(method=value.lower())
    return None if value is False or value == "none" else value
