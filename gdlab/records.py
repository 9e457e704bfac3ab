"""The files of a run's folder: append-only fixed-size records, one file a writer, never rewritten.

A record goes out in one os.write, so a killed process loses nothing that it had written; a torn tail is dropped by the
reader and counted. The small JSON files are replaced atomically.
"""

from __future__ import annotations

import json
import math
import os
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

PUSH = np.dtype([
    ("worker", "<i4"), ("step", "<i8"), ("read_version", "<i8"), ("version", "<i8"), ("staleness", "<i8"),
    ("start_s", "<f8"), ("computed_s", "<f8"), ("applied_s", "<f8"), ("released_s", "<f8"),
    ("loss", "<f8"), ("grad_norm", "<f8"), ("clip_scale", "<f8"), ("nonfinite", "<i8"),
    ("loss_scale", "<f8"), ("lost_fraction", "<f8"), ("bytes_sent", "<f8"), ("bytes_read", "<f8"),
])
"""One row a push, its whole life. Times in seconds since the last rank was ready; version -1: never applied.

`bytes_sent`: what the worker sent for it, `bytes_read`: what it had received of the parameters before (0 over an
all-reduce, where the others' pushes have rows of their own); without headers and flags; in virtual time what is charged
for. Of a ring all-reduce 2 (N - 1) / N times the push, the mean of all ranks. NaN in a trace of the time before bytes
were counted.
"""

RECORD = np.dtype([("kind", "<i4"), *PUSH.descr])
KIND_PUSH, KIND_RELEASE = 3, 4
RECORD_WITHOUT_BYTES = np.dtype(RECORD.descr[:-2])
"""The record of the time before bytes were counted; its kinds are 1 and 2, by which a file is known."""
OLD_KINDS = {1: KIND_PUSH, 2: KIND_RELEASE}
LOSS = np.dtype([("version", "<i8"), ("loss", "<f8")])

SAMPLES = 256
"""About so many versions, or steps of a worker, are looked at more closely in a run."""
COORDINATES = 128
LOWEST_EXPONENT, HIGHEST_EXPONENT = -160, 130
EXPONENT_BINS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
EXPONENTS = np.dtype([
    ("worker", "<i4"), ("step", "<i8"), ("loss_scale", "<f8"), ("zeros", "<i8"), ("nonfinite", "<i8"),
    ("underflow", "<i8"), ("first", "<f8", (2,)), ("counts", "<u4", (EXPONENT_BINS,)),
])
"""A worker's gradient as the backward pass gave it, still times loss_scale: counts[k] values have floor(log2|g|) =
LOWEST_EXPONENT + k (the ends hold what lies beyond). `underflow`: how many values were pushed as 0 though wider
arithmetic finds them not 0; -1 where that was not looked for. `first`: the first two values, NaN beyond: of two
parameters the whole vector."""

PATH_LIMIT_BYTES = 64 * 2**20
FLUSH_EVERY_S = 0.1

_pack = struct.Struct("<ii4q7dq4d").pack
_pack_loss = struct.Struct("<qd").pack
_NAN = math.nan


class Appender:
    """Append bytes to one file; with `buffer` > 0, in batches of that many bytes or every 0.1 s."""

    def __init__(self, file: Path, buffer: int = 0) -> None:
        self._fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._limit, self._held, self._size = buffer, [], 0
        self._flushed = time.monotonic()

    def append(self, data: bytes) -> None:
        """Add one record."""
        if not self._limit:
            os.write(self._fd, data)
            return
        self._held.append(data)
        self._size += len(data)
        if self._size >= self._limit or time.monotonic() - self._flushed > FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Write what is held back."""
        if self._held:
            rest = memoryview(b"".join(self._held))
            while rest:
                rest = rest[os.write(self._fd, rest):]
        self._held, self._size, self._flushed = [], 0, time.monotonic()

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._fd >= 0:
            self.flush()
            os.close(self._fd)
            self._fd = -1


class EventWriter(Appender):
    """Write the pushes that one process knows of to `events-<writer>.bin`."""

    def __init__(self, folder: str | Path, writer: str, buffer: int = 0) -> None:
        super().__init__(Path(folder) / f"events-{writer}.bin", buffer)

    def push(self, *, worker: int, step: int, read_version: int, version: int, staleness: int = 0, start_s: float,
             computed_s: float = _NAN, applied_s: float = _NAN, released_s: float = _NAN, loss: float = _NAN,
             grad_norm: float = _NAN, clip_scale: float = 1.0, nonfinite: int = 0, loss_scale: float = 1.0,
             lost_fraction: float = _NAN, bytes_sent: float = _NAN, bytes_read: float = _NAN) -> None:
        """Add one push: applied as `version`, or never (version -1)."""
        self.append(_pack(KIND_PUSH, worker, step, read_version, version, staleness, start_s, computed_s, applied_s,
                          released_s, loss, grad_norm, clip_scale, nonfinite, loss_scale, lost_fraction, bytes_sent,
                          bytes_read))

    def release(self, worker: int, step: int, released_s: float) -> None:
        """Add the moment at which the worker of an earlier push could go on."""
        self.append(_pack(KIND_RELEASE, worker, step, 0, 0, 0, _NAN, _NAN, _NAN, released_s, _NAN, _NAN, 1.0, 0, 1.0,
                          _NAN, 0.0, 0.0))


def path_dtype(parameters: int, dtype: str) -> np.dtype:
    """Return the record of one version of the shared parameters."""
    return np.dtype([("version", "<i8"), ("x", np.dtype(dtype).newbyteorder("<"), (parameters,))])


def updates_dtype(parameters: int) -> np.dtype:
    """Return the record of one sampled update, of at most COORDINATES evenly spaced coordinates.

    `version`: the one that it starts from; `weight`: as stored there; `update`: what the optimizer wants to add to it,
    in float64; `lost_fraction`: over all coordinates, NaN where the step was skipped.
    """
    kept = (min(parameters, COORDINATES),)
    return np.dtype([("version", "<i8"), ("index", "<u4", kept), ("weight", "<f8", kept), ("update", "<f8", kept),
                     ("lost_fraction", "<f8")])


def sampled(number: int, updates: int | None) -> bool:
    """Tell whether a version or a step is looked at more closely: 0, and about SAMPLES of a run of `updates`.

    The stride is a power of two; where `updates` is not known it grows on the way.
    """
    return number % (1 << (((updates or number) - 1) // SAMPLES).bit_length()) == 0


MOST_UPDATES = 1_000_000
"""Of a run whose updates are not known beforehand."""


def path_stride(parameters: int, dtype: str, updates: int) -> int:
    """Return the power of two at which a path of `updates` versions stays within 64 MB; chosen beforehand."""
    size = path_dtype(parameters, dtype).itemsize
    stride = 1
    while (updates // stride + 2) * size > PATH_LIMIT_BYTES:
        stride *= 2
    return stride


def path_stage(parameters: int, dtype: str) -> int:
    """Return how many versions of a path are kept before each doubling of its stride, where its end is not known.

    Chosen beforehand so that MOST_UPDATES versions stay within 64 MB: the beginning is whole, as most runs end soon.
    0 where so few fit that one stride has to do for all.
    """
    rows = PATH_LIMIT_BYTES // path_dtype(parameters, dtype).itemsize - 2
    enough = (rows // stages for stages in range(1, 21) if rows // stages * (2**stages - 1) > MOST_UPDATES)
    return max(enough, default=0)


class PathWriter(Appender):
    """Write the shared parameters, version 0 first, to `path.bin`: every `stride`-th version and the last one.

    Where `updates` is not known the stride doubles after each `path_stage` of versions that were kept.
    """

    def __init__(self, folder: str | Path, parameters: int, dtype: str, updates: int | None, buffer: int = 0,
                 name: str = "path") -> None:
        self._stage = 0 if updates else path_stage(parameters, dtype)
        self.stride = 1 if self._stage else path_stride(parameters, dtype, updates or MOST_UPDATES)
        self._next, self._kept = 0, 0
        self._dtype, self._last = np.dtype(dtype), -1
        write_json(folder, f"{name}.json", {"parameters": parameters, "dtype": dtype, "stride": self.stride})
        super().__init__(Path(folder) / f"{name}.bin", buffer)

    def append(self, version: int, x: Any) -> None:  # type: ignore[override]
        """Add the parameters of one version (array or tensor); versions off the stride are passed over."""
        if version < self._next:
            return
        self._add(version, x)
        self._next, self._kept = self._next + self.stride, self._kept + 1
        if self._stage and self._kept == self._stage:
            self.stride, self._kept = 2 * self.stride, 0

    def finish(self, version: int, x: Any) -> None:
        """Add the last version if it is not there yet, and close."""
        if version > self._last:
            self._add(version, x)
        self.close()

    def _add(self, version: int, x: Any) -> None:
        super().append(struct.pack("<q", version) + _array(x, self._dtype).tobytes())
        self._last = version


class LocalPathWriter(PathWriter):
    """Write one worker's own iterates to `local-<rank>.bin`; `version` counts its local steps."""

    def __init__(self, folder: str | Path, rank: int, parameters: int, dtype: str, steps: int | None,
                 buffer: int = 0) -> None:
        super().__init__(folder, parameters, dtype, steps, buffer, name=f"local-{rank}")


class LossWriter(Appender):
    """Write the full objective at path versions to `losses.bin`."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(Path(folder) / "losses.bin")

    def append(self, version: int, loss: float) -> None:  # type: ignore[override]
        """Add the objective at one version."""
        super().append(_pack_loss(version, loss))


class ExponentWriter(Appender):
    """Write the exponents of sampled gradients to `exponents-<writer>.bin`, records of dtype EXPONENTS."""

    def __init__(self, folder: str | Path, writer: str, updates: int | None, buffer: int = 0) -> None:
        super().__init__(Path(folder) / f"exponents-{writer}.bin", buffer)
        self.due, self._updates = partial(sampled, updates=updates), updates

    def thorough(self, step: int) -> bool:
        """Tell whether what costs a gradient may be spent too: every eighth time."""
        return sampled(step, 8 * (self._updates or step))

    def append(self, worker: int, step: int, loss_scale: float, gradient: Any,  # type: ignore[override]
               underflow: int = -1) -> None:
        """Add one gradient (array or tensor)."""
        values = _array(gradient, np.dtype("f8"))
        by_exponent = np.bincount((values.view("i8") >> 52) & 0x7FF, minlength=2048)  # the exponent bits of float64
        zeros = values.size - int(np.count_nonzero(values))
        counts = by_exponent[1023 + LOWEST_EXPONENT : 1024 + HIGHEST_EXPONENT].copy()
        counts[0] += by_exponent[: 1023 + LOWEST_EXPONENT].sum() - zeros
        counts[-1] += by_exponent[1024 + HIGHEST_EXPONENT : -1].sum()
        row = (worker, step, loss_scale, zeros, by_exponent[-1], underflow, [*values[:2], _NAN, _NAN][:2], counts)
        super().append(np.array(row, EXPONENTS).tobytes())


class UpdateWriter(Appender):
    """Write sampled updates of `index`, evenly spaced coordinates, to `updates.bin`; see updates_dtype."""

    def __init__(self, folder: str | Path, parameters: int, updates: int | None, buffer: int = 0) -> None:
        super().__init__(Path(folder) / "updates.bin", buffer)
        self.due = partial(sampled, updates=updates)
        kept = min(parameters, COORDINATES)
        self.index, self._dtype = np.arange(kept) * parameters // kept, updates_dtype(parameters)

    def append(self, version: int, weight: Any, update: Any, lost_fraction: float) -> None:  # type: ignore[override]
        """Add the update that starts from a version (arrays or tensors, of the coordinates in `index`)."""
        row = (version, self.index, *(_array(x, np.dtype("f8")) for x in (weight, update)), lost_fraction)
        super().append(np.array(row, self._dtype).tobytes())


def _array(x: Any, dtype: np.dtype) -> np.ndarray:
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x.double() if dtype.itemsize == 8 else x.float()).numpy()
    return np.ascontiguousarray(x, dtype=dtype)


def underflow_share(exponents: np.ndarray) -> float:
    """Return the share of gradient values that a narrow format took to 0; NaN where that was not looked for."""
    rows = exponents[exponents["underflow"] >= 0]
    values = rows["counts"].sum(-1, dtype="i8") + rows["zeros"] + rows["nonfinite"]
    return float((rows["underflow"] / values).mean()) if len(rows) else math.nan


def write_json(folder: str | Path, name: str, data: dict[str, Any]) -> None:
    """Write one small JSON file by atomic replacement."""
    _replace(Path(folder) / name, json.dumps(data, indent=1).encode())


def write_run(folder: str | Path, data: dict[str, Any]) -> None:
    """Write `run.json`: experiment, environment, how it ended."""
    write_json(folder, "run.json", data)


def write_surface(folder: str | Path, index: int, **arrays: Any) -> None:
    """Write the surface of the objective as `surface-<index>.npz`; the highest index counts."""
    import io

    held = io.BytesIO()
    np.savez(held, **arrays)
    _replace(Path(folder) / f"surface-{index:03d}.npz", held.getvalue())


def _replace(file: Path, data: bytes) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_bytes(data)
    os.replace(part, file)
