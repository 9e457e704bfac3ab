"""What communication costs: the bytes of each push, and the seconds that the experiment's network gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gdlab import formats, theory
from gdlab.backends.topology import gathers, needs_server
from gdlab.descent.compression import compressor_of

if TYPE_CHECKING:
    from gdlab.experiment import Experiment


def message_bytes(format: str) -> float:
    """Return the bytes of one number on the wire."""
    # A tf32 number is an fp32 word with some of its bits unused.
    return 4.0 if format == "tf32" else formats.facts(format).bits / 8


class Costs(NamedTuple):
    """What communication takes, in virtual seconds and in bytes; nothing for one worker."""

    message_s: float
    """One push from a worker to the server."""
    answer_s: float
    """The parameters from the server to a worker; they are never compressed."""
    server_s: float
    """Serial work of the server on one push."""
    allreduce_s: float
    """Summing over all ranks, after the last one is ready; or handing everybody's message to everybody."""
    bytes_sent: float
    """What a worker sends for one push, without headers."""
    bytes_read: float
    """What it reads of the parameters before it computes one."""

    @classmethod
    def of(cls, exp: Experiment, parameters: int) -> Costs:
        """Work out the costs of an experiment with that many parameters."""
        if exp.workers == 1:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        latency_s, byte_s, ranks = exp.network.latency_s, exp.network.seconds_per_byte, exp.workers
        whole, compressor = parameters * message_bytes(exp.precision.reduce), compressor_of(exp, parameters)
        nbytes = whole if compressor is None else float(compressor.nbytes)
        if needs_server(exp):
            return cls(latency_s + nbytes * byte_s, latency_s + whole * byte_s, exp.network.server_s, 0.0, nbytes,
                       whole)
        if gathers(exp):
            gather_s = (ranks - 1) * (latency_s + nbytes * byte_s)
            return cls(0.0, 0.0, 0.0, gather_s, theory.gathered_bytes(nbytes, ranks), 0.0)
        ring_s = theory.allreduce_time(nbytes, ranks, latency_s, byte_s)
        return cls(0.0, 0.0, 0.0, ring_s, theory.ring_bytes(nbytes, ranks), 0.0)
