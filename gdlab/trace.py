"""The Trace: what happened in a run, read from its folder while it grows or long after; and its exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.experiment import Experiment
from gdlab.following import Chunk, Follower
from gdlab.part import ExperimentError
from gdlab.reading import (
    TraceError,
    event_record,
    numbered,
    read_events,
    read_exponents,
    read_json,
    read_losses,
    read_path,
    read_run,
    read_shape,
    read_surface,
    read_updates,
    split,
    workers_of,
)
from gdlab.records import (
    EXPONENTS,
    PUSH,
    EventWriter,
    ExponentWriter,
    LocalPathWriter,
    LossWriter,
    PathWriter,
    UpdateWriter,
    underflow_share,
    write_json,
    write_run,
    write_surface,
)

__all__ = ["EXPONENTS", "PUSH", "Chunk", "EventWriter", "ExponentWriter", "Follower", "LocalPathWriter", "LossWriter",
           "PathWriter", "Trace", "TraceError", "UpdateWriter", "open_trace", "read_run", "table_of", "write_json",
           "write_run", "write_surface"]


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
                json.dumps(self._run.get("experiment")), self.payload))
        except (ExperimentError, RecursionError) as error:
            raise TraceError(f"{self.folder}/run.json holds no experiment that can be read: {error}") from None

    @property
    def environment(self) -> dict[str, Any]:
        """Where it ran: backend, clock ("virtual" or "wall"), cores, ranks, threads, device, group backend."""
        return self._run["environment"]

    @property
    def ended(self) -> dict[str, Any] | None:
        """How it ended: `how` (done, stopped, failed), `reason`, counts; None while it runs or if it was killed."""
        return self._run["ended"]

    # ---- what happened ----

    @property
    def _events(self) -> list[Path]:
        return sorted(file for file in self.folder.glob("events-*.bin") if file.is_file())

    @property
    def pushes(self) -> np.ndarray:
        """One row a push (dtype PUSH) in order of version; pushes that were never applied (version -1) come last."""
        return self._cached("pushes", self._events, self._read_pushes)[0]

    @property
    def impossible(self) -> int:
        """How many records of the events were left out because no run can have written them."""
        return self._cached("pushes", self._events, self._read_pushes)[1]

    def _read_pushes(self) -> tuple[np.ndarray, int]:
        files = self._events
        records = [read_events(file)[0] for file in files]
        pushes, releases, left_out = split(records, workers_of(self.folder))
        if len(releases) and len(pushes):
            keys, wanted = (rows["worker"].astype("i8") << 40 | rows["step"] for rows in (pushes, releases))
            order, place = np.argsort(keys, kind="stable"), np.argsort(wanted, kind="stable")
            keys, wanted = keys[order], wanted[place]  # Both in order: a search then runs along, and not to and fro.
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            hit = keys[at] == wanted
            pushes["released_s"][order[at[hit]]] = releases["released_s"][place[hit]]
        version = np.where(pushes["version"] < 0, np.iinfo("i8").max, pushes["version"])
        if len(files) > 1:  # One file holds the order of arrival; several (one a rank) have only the order of ranks.
            return pushes[np.lexsort((pushes["worker"], version))], left_out
        return pushes if (version[1:] >= version[:-1]).all() else pushes[np.argsort(version, kind="stable")], left_out

    @property
    def applied(self) -> np.ndarray:
        """The pushes that were applied (version > 0)."""
        rows = self.pushes  # Read once: the run may go on.
        return rows[rows["version"] > 0]

    @property
    def torn(self) -> int:
        """How many files end in the middle of a record: the mark of a process that was killed while it wrote."""
        return sum(file.stat().st_size % event_record(file).itemsize > 0 for file in self._events)

    @property
    def _path(self) -> np.ndarray | None:
        return self._cached("path", [self.folder / "path.json", self.folder / "path.bin"],
                            lambda: read_path(self.folder, "path"))

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
        if not len(rows):
            return np.where(versions == 0, 0.0, np.nan)
        first = np.flatnonzero(np.diff(rows["version"], prepend=-1))
        made, when = rows["version"][first], np.fmax.reduceat(rows["applied_s"], first)
        at = np.minimum(np.searchsorted(made, versions), len(made) - 1)
        return np.where(versions == 0, 0.0, np.where(made[at] == versions, when[at], np.nan))

    @property
    def local_path(self) -> dict[int, np.ndarray]:
        """Under LocalSGD each worker's own iterates: worker -> records with fields `version` (local step) and `x`."""
        workers = workers_of(self.folder)
        found = {worker: read_path(self.folder, file.stem)
                 for worker, file in numbered(self.folder, "local-*.bin").items() if worker < workers}
        return {worker: records for worker, records in found.items() if records is not None}

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
        versions, seen = self.path_versions, read_losses(self.folder)
        values = np.full(len(versions), np.nan)
        at = np.searchsorted(versions, seen["version"])
        good = at < len(values)
        good[good] = versions[at[good]] == seen["version"][good]
        values[at[good]] = seen["loss"][good]
        return values

    @property
    def surface(self) -> dict[str, Any] | None:
        """The objective on a grid: `x`, `y`, `loss` and `kind`; for more than two parameters also the plane."""
        files = list(numbered(self.folder, "surface-*.npz").values())
        return self._cached("surface", files[-1:], lambda: read_surface(files[-1])) if files else None

    def summary(self) -> dict[str, Any]:
        """Return the figures of the run as a dict; times in seconds, NaN or None where there is nothing to say.

        `underflow`: the share of gradient values that a narrow format took to 0 (NaN where none was looked for);
        `lost_fraction`: the share of updates that did not reach the weights, by underflow or by rounding;
        `bytes`: what all workers sent for their pushes, the dropped ones too; `bytes_read`: the parameters that a
        server sent back (NaN for a trace of the time before bytes were counted).
        """
        rows, experiment = self.applied, self.experiment
        final = {name: value for name, value in (read_json(self.folder / "final.json") or {}).items()
                 if isinstance(value, int | float)}
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
            "bytes": float(self.pushes["bytes_sent"].sum()),
            "bytes_read": float(self.pushes["bytes_read"].sum()),
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


def table_of(traces: Sequence[Trace], names: Sequence[str]) -> Any:
    """Return the pushes of several runs as one pandas.DataFrame, each one's run (`run`) in front, by its name.

    `.attrs["gdlab.experiments"]`: name -> the experiment as JSON.
    """
    import pandas

    table = pandas.concat(dict(zip(names, (trace.to_pandas() for trace in traces), strict=True)), names=["run"])
    table.attrs["gdlab.experiments"] = {name: trace.experiment.to_json()
                                        for name, trace in zip(names, traces, strict=True)}
    return table.reset_index("run")


def open_trace(folder: str | Path) -> Trace:
    """Open a recorded run; raises TraceError where the folder holds none."""
    trace = Trace(Path(folder))
    trace.experiment  # noqa: B018 - reading it now makes a bad folder fail here
    for name in ("path", *(file.stem for file in numbered(trace.folder, "local-*.bin").values())):
        read_shape(trace.folder / f"{name}.json")
    return trace
