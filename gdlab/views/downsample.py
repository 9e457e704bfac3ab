"""Keep the number of drawn points bounded: extremes-preserving for a finished line, prefix-stable for a live one."""

from __future__ import annotations

import numpy as np

MAX_POINTS = 1500
"""Points of one finished line: more cannot be told apart on a chart some 1,000 pixels wide."""


def line(x: np.ndarray, y: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `points` of the finite points of a line, sorted by x, keeping its extremes (MinMaxLTTB)."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    keep = np.isfinite(x) & np.isfinite(y)
    x, y = x[keep], y[keep]
    if x.size and np.any(np.diff(x) < 0.0):
        order = np.argsort(x, kind="stable")
        x, y = x[order], y[order]
    if x.size <= points:
        return x, y
    from tsdownsample import MinMaxLTTBDownsampler

    index = np.asarray(MinMaxLTTBDownsampler().downsample(x, np.ascontiguousarray(y), n_out=points), np.int64)
    return x[index], y[index]


def every(count: int, points: int = MAX_POINTS) -> np.ndarray:
    """Return at most `points` + 1 indices into `count` rows: every 2^k-th, and the last one always."""
    stride = 1
    while count > points * stride:
        stride *= 2
    index = np.arange(0, count, stride)
    if count and index[-1] != count - 1:
        index = np.append(index, count - 1)
    return index


class Thinned:
    """Hold a bounded part of a growing line: one point of each 2^k, the first, or the largest where spikes matter.

    A prefix of what is kept stays as it is until k grows, so a chart needs only what is new.
    """

    def __init__(self, columns: int = 2, limit: int = 1000, largest: bool = False) -> None:
        self.limit, self.largest, self.stride = limit, largest, 1
        self.kept = np.empty((columns, 0))
        self._open = np.empty((columns, 0))  # the representative of the group that is not complete yet
        self._open_count = 0

    def add(self, *columns: np.ndarray) -> tuple[bool, np.ndarray]:
        """Take new points and return (is it the whole line?, columns x points): all that a chart has to be sent."""
        new = np.array([np.asarray(column, np.float64) for column in columns]).reshape(len(columns), -1)
        done = self._group(new)
        self.kept = np.concatenate([self.kept, done], axis=1)
        whole = self.kept.shape[1] > self.limit
        while self.kept.shape[1] > self.limit:
            self._double()
        return whole, self.kept if whole else done

    @property
    def pending(self) -> np.ndarray:
        """The first column of the point that the group in progress would give."""
        return self._open[0]

    def _pick(self, groups: np.ndarray) -> np.ndarray:
        """Choose one point of each group; `groups` has the shape (columns, groups, points of a group)."""
        if not self.largest:
            return groups[:, :, 0]
        index = np.argmax(groups[1], axis=1)
        return groups[:, np.arange(groups.shape[1]), index]

    def _group(self, new: np.ndarray) -> np.ndarray:
        done = []
        if self._open_count:
            room = self.stride - self._open_count
            self._join(new[:, :room])
            new = new[:, room:]
            if self._open_count == self.stride:
                done.append(self._open)
                self._open, self._open_count = self._open[:, :0], 0
        groups = new.shape[1] // self.stride
        used = groups * self.stride
        if groups:
            done.append(self._pick(new[:, :used].reshape(len(new), groups, self.stride)))
        self._join(new[:, used:])
        return np.concatenate(done, axis=1) if done else new[:, :0]

    def _join(self, points: np.ndarray) -> None:
        """Put points into the group that is not complete yet."""
        if points.shape[1]:
            self._open = self._pick(np.concatenate([self._open, points], axis=1)[:, None, :])
            self._open_count += points.shape[1]

    def _double(self) -> None:
        if self.kept.shape[1] % 2:  # half of a group of the new size: it goes back to the open one, in front
            first, self._open = self._open, self.kept[:, -1:]
            self._open_count += self.stride
            if first.shape[1]:
                self._open = self._pick(np.concatenate([self._open, first], axis=1)[:, None, :])
            self.kept = self.kept[:, :-1]
        self.kept = self._pick(self.kept.reshape(len(self.kept), -1, 2))
        self.stride *= 2
