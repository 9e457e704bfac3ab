"""Follow a run's folder while it grows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdlab.reading import ascending, numbered, read_events, read_shape, read_surface, split, tail, workers_of
from gdlab.records import LOSS, path_dtype


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

    def _new_events(self, name: str) -> np.ndarray:
        records, self._offsets[name] = read_events(self.folder / name, self._offsets.get(name, 0))
        return records

    def read(self) -> Chunk:
        """Return what was appended since the last call."""
        files = sorted(file.name for file in self.folder.glob("events-*.bin"))
        self._workers = self._workers or workers_of(self.folder)
        records = [self._new_events(name) for name in files]
        pushes, releases, _ = split(records, self._workers, self._records)
        self._records += sum(map(len, records))
        shape = read_shape(self.folder / "path.json")
        path = ascending(self._new("path.bin", path_dtype(*shape)), self._version) if shape else None
        if path is not None and len(path):
            self._version = int(path["version"][-1])
        return Chunk(
            pushes=pushes,
            releases=releases,
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
