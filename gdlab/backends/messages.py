"""What a worker and the parameter server say to each other: raw bytes, a fixed header and one flat tensor.

Never pickle: a message is bounded, cheap, and cannot run anything.
"""

from __future__ import annotations

import math
import struct
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from gdlab.backends.failures import PeerLost
from gdlab.descent.worker import Push, Read

READY, PUSH, DROPPED, READ, CANCEL, STOP = range(1, 7)

_HEADER = struct.Struct("<4q7d")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class Message(NamedTuple):
    """A header and its tensor, which lies in the receiver's buffer until the next message."""

    kind: int
    step: int
    version: int
    nonfinite: int
    start: float
    """Seconds of CLOCK_MONOTONIC, as is `computed`."""
    computed: float
    loss: float
    grad_norm: float
    clip_scale: float
    loss_scale: float
    dtype: float
    tensor: torch.Tensor | None


class Channel:
    """One end of a connection between a worker and the server."""

    def __init__(self, descriptor: int, peer: str, size: int):
        self.connection = Connection(descriptor)
        self._peer = peer
        # The longest message: all values in fp64, each with an index of top-k, or one value and a scale.
        self._out = bytearray(_HEADER.size + size * 12 + 8)

    def send(self, kind: int, step: int = 0, version: int = 0, nonfinite: int = 0, start: float = 0.0,
             computed: float = 0.0, loss: float = math.nan, grad_norm: float = math.nan, clip_scale: float = 1.0,
             loss_scale: float = 1.0, tensor: torch.Tensor | None = None) -> None:
        """Send one message; raises PeerLost if the other end is gone."""
        length, code = _HEADER.size, -1
        if tensor is not None:
            code = _DTYPES.index(tensor.dtype)
            length += tensor.numel() * tensor.element_size()
            torch.frombuffer(self._out, dtype=tensor.dtype, count=tensor.numel(), offset=_HEADER.size).copy_(tensor)
        _HEADER.pack_into(self._out, 0, kind, step, version, nonfinite, start, computed, loss, grad_norm, clip_scale,
                          loss_scale, code)
        try:
            self.connection.send_bytes(self._out, 0, length)
        except OSError as error:
            raise PeerLost(f"{self._peer} closed its connection") from error

    def send_push(self, push: Push, start: float, computed: float, kind: int = PUSH) -> None:
        """Send a push, whole or compressed, or as DROPPED only its numbers."""
        tensor = push.grad if push.message is None else push.message
        self.send(kind, push.step, push.read_version, push.nonfinite, start, computed, push.loss, push.grad_norm,
                  push.clip_scale, push.loss_scale, tensor if kind == PUSH else None)

    def send_read(self, read: Read) -> None:
        self.send(READ, version=read.version, loss_scale=read.loss_scale, tensor=read.params)

    def poll(self, seconds: float) -> bool:
        """Wait for a message for at most so long."""
        try:
            return self.connection.poll(seconds)
        except OSError as error:
            raise PeerLost(f"{self._peer} closed its connection") from error

    def receive(self, into: bytearray) -> Message:
        """Receive one message into a buffer that its tensor then lies in; raises PeerLost if the other end is gone."""
        try:
            length = self.connection.recv_bytes_into(into)
        except (EOFError, OSError) as error:
            raise PeerLost(f"{self._peer} closed its connection") from error
        header = _HEADER.unpack_from(into)
        tensor = None
        if length > _HEADER.size:
            tensor = torch.frombuffer(into, dtype=_DTYPES[int(header[-1])], offset=_HEADER.size,
                                      count=(length - _HEADER.size) // _DTYPES[int(header[-1])].itemsize)
        return Message(*header, tensor)  # type: ignore[call-arg]

    def buffer(self) -> bytearray:
        """Return a new buffer that any message fits in."""
        return bytearray(len(self._out))
