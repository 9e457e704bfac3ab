"""Follow a run's folder while it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.reading import as_pushes, ascending, numbered, possible, read_shape, read_surface, tail, workers_of
from gdlab.records import KIND_PUSH, KIND_RELEASE, LOSS, RECORD, path_dtype


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
        self._surface, self._version, self._records, self._workers = "", -1, 0, 0

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
        self._records += len(rows)
        shape = read_shape(self.folder / "path.json")
        path = ascending(self._new("path.bin", path_dtype(*shape)), self._version) if shape else None
        if path is not None and len(path):
            self._version = int(path["version"][-1])
        pushes, releases = (as_pushes(rows, rows["kind"] == kind) for kind in (KIND_PUSH, KIND_RELEASE))
        self._workers = workers = self._workers or workers_of(self.folder)
        return Chunk(
            pushes=pushes[possible(pushes, workers, self._records)],
            releases=releases[possible(releases, workers, self._records)],
            path_versions=path["version"] if path is not None else np.empty(0, "<i8"),
            path=path["x"] if path is not None else np.empty((0, 0)),
            losses=self._new("losses.bin", LOSS),
            surface=self._new_surface(),
        )

    def _new_surface(self) -> dict[str, Any] | None:
        files = list(numbered(self.folder, "surface-*.npz").values())
        if not files or files[-1].name == self._surface:
            return None
        self._surface = files[-1].name
        return read_surface(files[-1])
