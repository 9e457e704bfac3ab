"""The Trace: what happened in a run, read from its folder while it grows or long after; and its exports."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.experiment import Experiment
from gdlab.part import ExperimentError
from gdlab.records import (
    EXPONENTS,
    KIND_PUSH,
    LOSS,
    PUSH,
    RECORD,
    EventWriter,
    ExponentWriter,
    LocalPathWriter,
    LossWriter,
    PathWriter,
    UpdateWriter,
    as_pushes,
    path_dtype,
    read_exponents,
    read_json,
    read_surface,
    read_updates,
    tail,
    underflow_share,
    write_json,
    write_run,
    write_surface,
)

__all__ = ["EXPONENTS", "PUSH", "Chunk", "EventWriter", "ExponentWriter", "Follower", "LocalPathWriter", "LossWriter",
           "PathWriter", "Trace", "TraceError", "UpdateWriter", "open_trace", "read_run", "write_json", "write_run",
           "write_surface"]


class TraceError(ValueError):
    """Say in one sentence why a folder cannot be read as a run."""


def read_run(folder: str | Path) -> dict[str, Any]:
    """Return the content of `run.json`; raises TraceError where there is none or it cannot be read."""
    file = Path(folder) / "run.json"
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        raise TraceError(f"{folder} holds no run: it has no run.json.") from None
    except ValueError as error:
        raise TraceError(f"{file} is damaged ({error}): the run cannot be opened.") from None


@dataclass
class Chunk:
    """Hold what is new since the last look: pushes and releases in order of arrival, path rows, losses, a surface."""

    pushes: np.ndarray
    releases: np.ndarray
    path_versions: np.ndarray
    path: np.ndarray
    losses: np.ndarray
    surface: dict[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(len(self.pushes) or len(self.releases) or len(self.path_versions) or len(self.losses)
                    or self.surface)


class Follower:
    """Follow the files of a run and hand over only what is new; costs as much as is new, however long the run."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._offsets: dict[str, int] = {}
        self._surface = ""

    def _new(self, name: str, dtype: np.dtype) -> np.ndarray:
        offset = self._offsets.get(name, 0)
        data = tail(self.folder / name, offset, dtype.itemsize)
        self._offsets[name] = offset + len(data)
        return np.frombuffer(data, dtype)

    def read(self) -> Chunk:
        """Return what was appended since the last call."""
        files = sorted(file.name for file in self.folder.glob("events-*.bin"))
        records = [self._new(name, RECORD) for name in files]
        rows = np.concatenate(records) if records else np.empty(0, RECORD)
        shape = read_json(self.folder / "path.json")
        path = self._new("path.bin", path_dtype(shape["parameters"], shape["dtype"])) if shape else None
        pushed = rows["kind"] == KIND_PUSH
        return Chunk(
            pushes=as_pushes(rows[pushed]),
            releases=as_pushes(rows[~pushed]),
            path_versions=path["version"] if path is not None else np.empty(0, "<i8"),
            path=path["x"] if path is not None else np.empty((0, 0)),
            losses=self._new("losses.bin", LOSS),
            surface=self._new_surface(),
        )

    def _new_surface(self) -> dict[str, Any] | None:
        files = sorted(file.name for file in self.folder.glob("surface-*.npz"))
        if not files or files[-1] == self._surface:
            return None
        self._surface = files[-1]
        return read_surface(self.folder / files[-1])


@dataclass
class Trace:
    """Hold what happened in one run: its pushes, the path of the shared parameters, the objective along it.

    Reads the run's folder on access, so it is current while the run goes on. Raises TraceError for no run.
    """

    folder: Path
    payload: bytes | None = field(default=None, repr=False)
    _kept: dict[str, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)
        if not self.folder.is_dir():
            raise TraceError(f"There is no run at {self.folder}: give the folder that holds its run.json.")

    def _cached(self, name: str, files: list[Path], make: Any) -> Any:
        key = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists())
        if name not in self._kept or self._kept[name][0] != key:
            self._kept[name] = (key, make())
        return self._kept[name][1]

    def refresh(self) -> Trace:
        """Forget what was read; returns the trace itself."""
        self._kept.clear()
        return self

    # ---- what it was ----

    @property
    def _run(self) -> dict[str, Any]:
        return self._cached("run", [self.folder / "run.json"], lambda: read_run(self.folder))

    @property
    def experiment(self) -> Experiment:
        """The experiment that was run; a function from a cell is in it only if the run is this session's own.

        For loading a pickled function runs whatever is in it, and a folder may be anybody's.
        """
        try:
            return self._cached("experiment", [self.folder / "run.json"], lambda: Experiment.from_json(
                json.dumps(self._run["experiment"]), self.payload))
        except (KeyError, ExperimentError) as error:
            raise TraceError(f"{self.folder}/run.json holds no experiment that can be read: {error}") from None

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran: backend, clock ("virtual" or "wall"), cores, ranks, threads, device, group backend."""
        return self._run.get("environment", {})

    @property
    def ended(self) -> dict[str, Any] | None:
        """How it ended: `how` (done, stopped, failed), `reason`, counts; None while it runs or if it was killed."""
        return self._run.get("ended")

    # ---- what happened ----

    @property
    def _events(self) -> list[Path]:
        return sorted(self.folder.glob("events-*.bin"))

    @property
    def pushes(self) -> np.ndarray:
        """One row a push (dtype PUSH) in order of version; pushes that were never applied (version -1) come last."""
        return self._cached("pushes", self._events, self._read_pushes)

    def _read_pushes(self) -> np.ndarray:
        parts = [np.frombuffer(tail(file, 0, RECORD.itemsize), RECORD) for file in self._events]
        rows = np.concatenate(parts) if parts else np.empty(0, RECORD)
        pushed = rows["kind"] == KIND_PUSH
        pushes, releases = as_pushes(rows[pushed]), rows[~pushed]
        if len(releases) and len(pushes):
            keys = pushes["worker"].astype("i8") << 40 | pushes["step"]
            wanted = releases["worker"].astype("i8") << 40 | releases["step"]
            order = np.argsort(keys, kind="stable")
            at = np.clip(np.searchsorted(keys, wanted, sorter=order), 0, len(keys) - 1)
            hit = keys[order[at]] == wanted
            pushes["released_s"][order[at[hit]]] = releases["released_s"][hit]
        version = np.where(pushes["version"] < 0, np.iinfo("i8").max, pushes["version"])
        # One file holds the order of arrival; several (one a rank) have only the order of ranks.
        order = np.argsort(version, kind="stable") if len(parts) < 2 else np.lexsort((pushes["worker"], version))
        return pushes[order]

    @property
    def applied(self) -> np.ndarray:
        """The pushes that were applied (version > 0)."""
        rows = self.pushes  # Read once: the run may go on.
        return rows[rows["version"] > 0]

    @property
    def torn(self) -> int:
        """How many files end in the middle of a record: the mark of a process that was killed while it wrote."""
        return sum(file.stat().st_size % RECORD.itemsize > 0 for file in self._events)

    def _records(self, name: str) -> np.ndarray | None:
        shape = read_json(self.folder / f"{name}.json")
        if shape is None:
            return None
        dtype = path_dtype(shape["parameters"], shape["dtype"])
        return np.frombuffer(tail(self.folder / f"{name}.bin", 0, dtype.itemsize), dtype)

    @property
    def _path(self) -> np.ndarray | None:
        return self._cached("path", [self.folder / "path.json", self.folder / "path.bin"],
                            lambda: self._records("path"))

    @property
    def path(self) -> np.ndarray:
        """The shared parameters, one row a kept version: shape (versions, parameters)."""
        return np.empty((0, 0)) if self._path is None else self._path["x"]

    @property
    def path_versions(self) -> np.ndarray:
        """The versions of the rows of `path`, from 0 (the start) to the last."""
        return np.empty(0, "<i8") if self._path is None else self._path["version"]

    @property
    def path_seconds(self) -> np.ndarray:
        """The time in seconds at which each row of `path` came to be; 0 for the start."""
        rows, versions = self.applied, self.path_versions
        last = int(max(rows["version"].max(initial=0), versions.max(initial=0)))
        when = np.full(last + 1, -np.inf)
        np.maximum.at(when, rows["version"], rows["applied_s"])
        when[0] = 0.0
        when[np.isinf(when)] = np.nan
        return when[versions]

    @property
    def local_path(self) -> dict[int, np.ndarray]:
        """Under LocalSGD each worker's own iterates: worker -> records with fields `version` (local step) and `x`."""
        found = {int(file.stem.split("-")[1]): self._records(file.stem) for file in self.folder.glob("local-*.bin")}
        return {worker: records for worker, records in sorted(found.items()) if records is not None}

    @property
    def exponents(self) -> np.ndarray:
        """The exponents of sampled gradients, in order of (step, worker): records of dtype EXPONENTS."""
        return read_exponents(self.folder)

    @property
    def updates(self) -> np.ndarray:
        """Sampled updates of some coordinates, in order of version: see `records.updates_dtype`."""
        return read_updates(self.folder)

    @property
    def losses(self) -> np.ndarray:
        """The full objective at each row of `path`; NaN where it was not evaluated."""
        values = np.full(len(self.path_versions), np.nan)
        seen = np.frombuffer(tail(self.folder / "losses.bin", 0, LOSS.itemsize), LOSS)
        at = np.searchsorted(self.path_versions, seen["version"])
        good = at < len(values)
        values[at[good]] = seen["loss"][good]
        return values

    @property
    def surface(self) -> dict[str, Any] | None:
        """The objective on a grid: `x`, `y`, `loss` and `kind`; for more than two parameters also the plane."""
        files = sorted(self.folder.glob("surface-*.npz"))
        return self._cached("surface", files[-1:], lambda: read_surface(files[-1])) if files else None

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run as a dict; times in seconds, NaN or None where there is nothing to say.

        `underflow`: the share of gradient values that a narrow format took to 0 (NaN where none was looked for);
        `lost_fraction`: the share of updates that did not reach the weights, by underflow or by rounding.
        """
        rows, experiment = self.applied, self.experiment
        final = read_json(self.folder / "final.json") or {}
        losses, seconds = self.losses, float(rows["applied_s"].max(initial=0.0))
        known = losses[~np.isnan(losses)]
        gradients = len(rows) * getattr(experiment.strategy, "period", 1)
        whole = rows[np.isfinite(rows["released_s"])]
        busy = float((whole["released_s"] - whole["start_s"]).sum())
        to_target = None
        if experiment.target_loss is not None:
            hit = np.flatnonzero(losses <= experiment.target_loss)
            to_target = float(self.path_seconds[hit[0]]) if len(hit) else None
        skipped = np.isnan(rows["lost_fraction"])
        lost = float(rows["lost_fraction"][~skipped].mean()) if not skipped.all() else float("nan")
        underflow = underflow_share(self.exponents)
        if underflow == underflow:  # What underflowed was lost too, and rounding had the rest.
            lost = underflow + (1 - underflow) * (lost if lost == lost else 0.0)
        return {
            "updates": int(rows["version"].max(initial=0)),
            "gradients": gradients,
            "dropped": int((self.pushes["version"] < 0).sum()),
            "seconds": seconds,
            "seconds_to_target": to_target,
            "final_loss": final.get("final_loss", float(known[-1]) if len(known) else float("nan")),
            "accuracy": final.get("accuracy"),
            "mean_staleness": float(rows["staleness"].mean()) if len(rows) else float("nan"),
            "throughput": gradients / seconds if seconds > 0 else float("nan"),
            "wait_fraction": float((whole["released_s"] - whole["computed_s"]).sum()) / busy if busy > 0 else 0.0,
            "nonfinite": int((rows["nonfinite"] > 0).sum()),
            "clipped": int((rows["clip_scale"] < 1).sum()),
            "skipped": len(np.unique(rows["version"][skipped])),
            "underflow": underflow,
            "lost_fraction": lost,
        }

    # ---- exports ----

    def to_pandas(self) -> Any:
        """Return the pushes as a pandas.DataFrame, one row a push."""
        import pandas

        return pandas.DataFrame(self.pushes)

    def to_parquet(self, file: str | Path) -> Path:
        """Write the pushes as Parquet, with the experiment and the environment in the file's metadata."""
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({name: np.ascontiguousarray(self.pushes[name]) for name in PUSH.names or ()})
        table = table.replace_schema_metadata({"gdlab.experiment": self.experiment.to_json(),
                                               "gdlab.environment": json.dumps(self.environment)})
        parquet.write_table(table, file)
        return Path(file)

    def to_csv(self, file: str | Path) -> Path:
        """Write the pushes as CSV, one row a push."""
        self.to_pandas().to_csv(file, index=False)
        return Path(file)

    def save(self, folder: str | Path) -> Path:
        """Copy the run to a new folder; raises TraceError where that exists."""
        if Path(folder).exists():
            raise TraceError(f"{folder} exists already: nothing was written, give a new name.")
        return Path(shutil.copytree(self.folder, folder))


def open_trace(folder: str | Path) -> Trace:
    """Open a recorded run; raises TraceError where the folder holds none."""
    trace = Trace(Path(folder))
    trace.experiment  # noqa: B018 - reading it now makes a bad folder fail here
    return trace
