"""Read a run's folder, which may be anybody's: what cannot have been written by a run is left out or refused."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.experiment import MAX_WORKERS, Experiment
from gdlab.records import (
    EXPONENTS,
    KIND_PUSH,
    KIND_RELEASE,
    LOSS,
    OLD_KINDS,
    PATH_LIMIT_BYTES,
    PUSH,
    RECORD,
    RECORD_WITHOUT_BYTES,
    path_dtype,
    updates_dtype,
)

MOST_STEPS = 2**40
"""A run's steps and versions stay below."""
MOST_SECONDS = 1e9
MOST_BYTES = 2.0**60
SLACK = 100_000
"""Versions cannot outnumber pushes; so many are let pass all the same, where a file is still behind another."""

_PUSH_IN_RECORD = np.dtype([("kind", "<i4"), ("push", f"V{PUSH.itemsize}")])
_MACHINE_COUNTS = ("cores", "ranks", "workers", "threads", "attempt", "beside")
_FLOATS = ("float32", "float64", "<f4", "<f8")


class TraceError(ValueError):
    """Say in one sentence why a folder cannot be read as a run."""


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return the content of `run.json`; raises TraceError where there is none or it cannot be read."""
    file = Path(folder) / "run.json"
    if not file.is_file():
        raise TraceError(f"{folder} holds no run: it has no run.json.")
    try:
        run = json.loads(file.read_text())
    except (ValueError, OSError, RecursionError) as error:
        raise TraceError(f"{file} is damaged ({error}): the run cannot be opened.") from None
    if not isinstance(run, dict):
        raise TraceError(f"{file} is damaged (it is no JSON object): the run cannot be opened.")
    environment, ended = run.get("environment"), run.get("ended")
    known = environment.items() if isinstance(environment, dict) else ()
    return run | {"environment": {name: value for name, value in known if _of_machine(name, value)},
                  "ended": ended if isinstance(ended, dict) else None}


def _of_machine(name: str, value: Any) -> bool:
    if name in _MACHINE_COUNTS:
        return type(value) is int
    plain = value.values() if isinstance(value, dict) else [value]
    return all(item is None or isinstance(item, str | int | float) for item in plain)


def read_json(file: Path) -> dict[str, Any] | None:
    """Return the object in a small JSON file; None where there is none, or none that can be read."""
    try:
        held = json.loads(file.read_text()) if file.is_file() else None
    except (ValueError, OSError, RecursionError):
        return None
    return held if isinstance(held, dict) else None


def workers_of(folder: Path) -> int:
    """Return how many workers a run says that it has; the most that can be where it says nothing that can be read."""
    experiment = (read_json(folder / "run.json") or {}).get("experiment")
    default = Experiment.model_fields["workers"].default
    workers = experiment.get("workers", default) if isinstance(experiment, dict) else None
    return int(workers) if isinstance(workers, int | float) and 1 <= workers <= MAX_WORKERS else MAX_WORKERS


def read_shape(file: Path) -> tuple[int, str] | None:
    """Return (parameters, dtype) of a path from the JSON file beside it; None where there is no such file.

    Raises TraceError for what cannot be.
    """
    if not file.exists():
        return None
    held = read_json(file) or {}
    size, dtype = held.get("parameters"), held.get("dtype")
    if type(size) is not int or not 1 <= size <= PATH_LIMIT_BYTES or dtype not in _FLOATS:
        raise TraceError(f"{file} is damaged ({size!r:.40} parameters in {dtype!r:.40}): the path cannot be read.")
    return size, dtype


def tail(file: Path, offset: int, itemsize: int) -> bytes:
    """Return the whole records of a file from `offset` on; none where there is no file."""
    if not file.is_file():  # A device would have no end.
        return b""
    with open(file, "rb") as opened:
        opened.seek(offset)
        data = opened.read()
    return data[: len(data) - len(data) % itemsize]


def event_record(file: Path) -> np.dtype:
    """Return the record that a file of events holds: RECORD, or the one of the time before bytes were counted."""
    first = b""
    if file.is_file():
        with open(file, "rb") as opened:
            first = opened.read(4)
    return RECORD_WITHOUT_BYTES if int.from_bytes(first, "little") in OLD_KINDS else RECORD


def read_events(file: Path, offset: int = 0) -> tuple[np.ndarray, int]:
    """Return the whole records of a file of events from `offset` on, as RECORD, and where the next one begins."""
    dtype = event_record(file)
    data = tail(file, offset, dtype.itemsize)
    records = np.frombuffer(data, dtype)
    if dtype == RECORD_WITHOUT_BYTES:
        old, records = records, np.zeros(len(records), RECORD)
        records["bytes_sent"] = records["bytes_read"] = np.nan
        for name in dtype.names or ():
            records[name] = old[name]
        records["kind"] = np.select([old["kind"] == kind for kind in OLD_KINDS], [*OLD_KINDS.values()], 0)
    return records, offset + len(data)


def numbered(folder: Path, name: str) -> dict[int, Path]:
    """Return a folder's files by the number in the place of the star of `name`, in the order of the numbers."""
    start, suffix = name.split("*")
    wanted = re.compile(re.escape(start) + r"(\d{1,9})" + re.escape(suffix), re.ASCII)
    found = {int(match[1]): file for file in folder.glob(name) if (match := wanted.fullmatch(file.name))}
    return dict(sorted(found.items()))


def as_pushes(records: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the records of an events file that a mask names as rows of dtype PUSH, in one copy."""
    return np.ascontiguousarray(records.view(_PUSH_IN_RECORD)["push"][wanted]).view(PUSH)


def possible(pushes: np.ndarray, workers: int, records: int) -> np.ndarray:
    """Tell of each row whether a run of so many workers can have written it, among `records` others: shape (rows,)."""
    limit = max(records, SLACK)
    good = (pushes["worker"] >= 0) & (pushes["worker"] < workers)
    good &= (pushes["step"] >= 0) & (pushes["step"] < MOST_STEPS)
    for name, least in (("read_version", -1), ("version", -1), ("staleness", 0)):
        good &= (pushes[name] >= least) & (pushes[name] <= limit)
    for name in ("start_s", "computed_s", "applied_s", "released_s"):
        good &= ~(np.abs(pushes[name]) > MOST_SECONDS)  # NaN, where it is not known
    for name in ("bytes_sent", "bytes_read"):
        good &= ~((pushes[name] < 0) | (pushes[name] > MOST_BYTES))
    return good


def ascending(records: np.ndarray, last: int = -1) -> np.ndarray:
    """Return the records whose version is above all before it, `last` included."""
    versions = records["version"]
    if not len(versions):
        return records
    before = np.maximum.accumulate(np.concatenate([[last], versions[:-1]]))
    good = (versions > before) & (versions < MOST_STEPS)
    return records if good.all() else records[good]


def read_path(folder: Path, name: str) -> np.ndarray | None:
    """Return the records of `<name>.bin`, by the shape in `<name>.json`; None where there is none."""
    shape = read_shape(folder / f"{name}.json")
    if shape is None:
        return None
    dtype = path_dtype(*shape)
    return ascending(np.frombuffer(tail(folder / f"{name}.bin", 0, dtype.itemsize), dtype))


def read_losses(folder: Path) -> np.ndarray:
    """Return the objective where it was evaluated: records of dtype LOSS."""
    return np.frombuffer(tail(folder / "losses.bin", 0, LOSS.itemsize), LOSS)


def read_surface(file: Path) -> dict[str, Any] | None:
    """Return the arrays of one surface; None for a file that holds none."""
    try:
        if not file.is_file():
            return None
        with zipfile.ZipFile(file) as packed:
            if sum(item.file_size for item in packed.infolist()) > PATH_LIMIT_BYTES:
                return None
        with np.load(file, allow_pickle=False) as held:
            arrays = {name: held[name].item() if held[name].ndim == 0 else held[name] for name in held.files}
    except Exception:  # zip, zlib and NumPy's own parser raise whatever a damaged file makes of them
        return None
    return arrays if _drawable(arrays) else None


def _drawable(arrays: dict[str, Any]) -> bool:
    kind, numbers = arrays.get("kind"), {name: held for name, held in arrays.items() if isinstance(held, np.ndarray)}
    shapes = {name: held.shape for name, held in numbers.items() if held.dtype.kind in "fiu"}
    if kind not in ("parameters", "pca") or len(shapes) < len(numbers) or not {"x", "y", "loss"} <= set(shapes):
        return False
    wanted = {"loss": (*shapes["y"], *shapes["x"])}
    if kind == "pca":
        wanted |= {"basis": (2, *shapes.get("origin", ())), "explained": (2,)}
    return len(wanted["loss"]) == 2 and all(wanted["loss"]) and all(
        shapes.get(name) == shape for name, shape in wanted.items()) and len(shapes.get("basis", (0, 0))) == 2


def read_exponents(folder: Path) -> np.ndarray:
    """Return the sampled gradients' exponents of a run, in order of (step, worker)."""
    files = sorted(folder.glob("exponents-*.bin"))
    rows = np.frombuffer(b"".join(tail(file, 0, EXPONENTS.itemsize) for file in files), EXPONENTS)
    good = (rows["worker"] >= 0) & (rows["step"] >= 0) & (rows["step"] < MOST_STEPS) & (rows["underflow"] >= -1)
    for name in ("zeros", "nonfinite"):
        good &= (rows[name] >= 0) & (rows[name] < MOST_STEPS)
    good &= np.maximum(rows["underflow"], 1) <= rows["counts"].sum(-1, dtype="i8") + rows["zeros"] + rows["nonfinite"]
    rows = rows[good]
    return rows[np.lexsort((rows["worker"], rows["step"]))]


def read_updates(folder: Path) -> np.ndarray:
    """Return the sampled updates of a run, in order of version."""
    shape = read_shape(folder / "path.json")
    dtype = updates_dtype(shape[0] if shape else 0)
    return ascending(np.frombuffer(tail(folder / "updates.bin", 0, dtype.itemsize) if shape else b"", dtype))


def split(parts: list[np.ndarray], workers: int, before: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the pushes and the releases among records of events files, and how many records cannot be; see possible.

    `before`: how many records had been read earlier.
    """
    records = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, RECORD)])
    kept = []
    for kind in (KIND_PUSH, KIND_RELEASE):
        rows = as_pushes(records, records["kind"] == kind)
        good = possible(rows, workers, before + len(records))
        kept.append(rows if good.all() else rows[good])
    pushes, releases = kept
    return pushes, releases, len(records) - len(pushes) - len(releases)
