"""The objective on a grid around a path: the plane itself for two parameters, else the path's principal plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gdlab import parts
from gdlab.trace import write_surface

if TYPE_CHECKING:
    from gdlab.descent.problems import Problem
    from gdlab.experiment import Experiment

POINTS = 61
"""Points along each side of the grid over two parameters."""
PLANE_POINTS = 31
"""Points along each side of the grid over a plane, once the run has ended."""
LIVE_POINTS = 15
"""The same while the run goes on, and the least ever."""
FINISH_S = 1.0
"""About as long as the last grid over a plane may take: where the objective is slow it gets fewer points."""
FIT_ROWS = 256
"""Most rows of the path that the plane is fitted to."""
REFRESH_S = 1.5
SHARE = 0.25
"""Largest share of the time that surfaces take while the run goes on."""
MARGIN = 0.2
FARTHEST = 10.0
"""How many times the first box's size the box may reach to each side: a path that diverges leaves the picture."""

Busy = Callable[[], bool]


class Surface:
    """Write the grids of one run to its folder; the last one counts."""

    def __init__(self, exp: Experiment, folder: str | Path, problem: Problem):
        self._folder = folder
        self._problem = problem
        self._landmarks = landmarks(exp)
        self._index = 0
        self._next = 0.0
        self._rows_seen = 0
        self._box: np.ndarray | None = None
        self._farthest: np.ndarray | None = None
        self._basis: np.ndarray | None = None

    def refresh(self, rows: np.ndarray, busy: Busy) -> None:
        """Write a better surface if one is due; give up as soon as `busy` says so."""
        began = time.monotonic()
        if began < self._next or len(rows) == self._rows_seen:
            return
        self._rows_seen = len(rows)
        wrote = self._write(rows, LIVE_POINTS, busy)
        if wrote:
            now = time.monotonic()
            self._next = now + max(REFRESH_S, (now - began) * (1 / SHARE - 1))

    def finish(self, rows: np.ndarray, busy: Busy, within_s: float = FINISH_S) -> None:
        """Write the surface of the whole path, or none where `within_s` seconds are too short for one."""
        began = time.monotonic()
        self._problem.objective(torch.from_numpy(np.array(rows["x"][-1])))
        affordable = int((min(within_s, FINISH_S) / max(time.monotonic() - began, 1e-6)) ** 0.5)
        if affordable >= LIVE_POINTS or within_s >= FINISH_S:
            self._write(rows, min(max(affordable, LIVE_POINTS), PLANE_POINTS), busy)

    def _write(self, rows: np.ndarray, points: int, busy: Busy) -> bool:
        if self._problem.size == 2:
            return self._over_parameters(rows, busy)
        return self._problem.size > 2 and len(rows) > 2 and self._over_plane(rows, points, busy)

    def _over_parameters(self, rows: np.ndarray, busy: Busy) -> bool:
        """Draw the parameters' own plane again if the path has left the box."""
        x = rows["x"].astype(np.float64)
        around = np.array([x[0], *self._landmarks])
        if self._farthest is None:
            first = _box(around)
            size = first[1] - first[0]
            self._farthest = np.array([first[0] - FARTHEST * size, first[1] + FARTHEST * size])
        x = np.clip(x[np.isfinite(x).all(axis=1)], *self._farthest)
        if self._box is not None and np.all(x >= self._box[0]) and np.all(x <= self._box[1]):
            return False
        box = _box(np.concatenate([around, x]))
        axes = np.linspace(*box, POINTS)
        grid = np.stack(np.meshgrid(axes[:, 0], axes[:, 1]), axis=-1)
        loss = self._objectives((row.astype(rows["x"].dtype) for row in grid), busy)
        if loss is None:
            return False
        self._box = box
        self._save(kind="parameters", x=axes[:, 0], y=axes[:, 1], loss=loss)
        return True

    def _over_plane(self, rows: np.ndarray, points: int, busy: Busy) -> bool:
        """Draw the plane through the newest point that holds as much as possible of the path's way to it.

        Li et al. 2018, section 7.2: principal directions of the differences to the last parameters.
        """
        kept = rows["x"][np.unique(np.linspace(0, len(rows) - 1, FIT_ROWS).astype(int))].astype(np.float64)
        kept = kept[np.isfinite(kept).all(axis=1)]
        if len(kept) < 3:
            return False
        origin = kept[-1]
        basis, explained = principal_plane(kept - origin)
        if self._basis is not None:
            # A principal direction has no sign of its own: the picture must not flip from one look to the next.
            turn = np.sign(np.sum(basis * self._basis, axis=1, keepdims=True))
            basis = basis * np.where(turn == 0, 1.0, turn)
        shadow = (kept - origin) @ basis.T
        axes = np.linspace(*_box(shadow), points)
        grid = np.stack(np.meshgrid(axes[:, 0], axes[:, 1]), axis=-1)
        loss = self._objectives(((origin + row @ basis).astype(rows["x"].dtype) for row in grid), busy)
        if loss is None:
            return False
        self._basis = basis
        self._save(kind="pca", x=axes[:, 0], y=axes[:, 1], loss=loss, origin=origin, basis=basis, explained=explained)
        return True

    def _objectives(self, grid: Iterable[np.ndarray], busy: Busy) -> np.ndarray | None:
        """Return the objective over a grid given row by row, NaN where not finite; None if there was no time."""
        values = []
        for row in grid:
            if not busy():
                return None
            values.append(self._problem.objectives(torch.from_numpy(row)))
        loss = np.array(values)
        loss[~np.isfinite(loss)] = np.nan
        return loss

    def _save(self, **arrays: Any) -> None:
        write_surface(self._folder, self._index, **arrays)
        self._index += 1


def landmarks(exp: Experiment) -> list[tuple[float, ...]]:
    """Return the known minima of a problem of two parameters, which belong into its picture."""
    spec = exp.problem
    if isinstance(spec, parts.Ravine):
        return [(1.0, 1.0)]
    if isinstance(spec, parts.Saddle):
        return [(0.0, -1.0), (0.0, 1.0)]
    if isinstance(spec, parts.Cliff):
        return [(0.94, 0.0)]
    if isinstance(spec, parts.Quadratic) and len(spec.start) == 2:
        curvature = np.array(spec.eigenvalue_rows or (spec.eigenvalues,), dtype=float)
        centers = np.array(spec.centers or ((0.0, 0.0),), dtype=float)
        total = np.broadcast_to(curvature, np.broadcast_shapes(curvature.shape, centers.shape)).sum(axis=0)
        weighted = (curvature * centers).sum(axis=0)
        return [tuple(np.divide(weighted, total, out=np.zeros(2), where=total != 0))]
    return []


def principal_plane(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the orthonormal basis (2, n) of the plane that holds most of the rows (k, n), and its two shares (2,).

    Through the k x k matrix of inner products, since k is far below n. Rows along one line get any second direction.
    """
    strengths, mixes = np.linalg.eigh(differences @ differences.T)
    total = max(strengths.sum(), np.finfo(float).tiny)
    basis = np.zeros((2, differences.shape[1]))
    for axis in (0, 1):
        strength = strengths[-1 - axis]
        if strength > 1e-12 * total:
            basis[axis] = mixes[:, -1 - axis] @ differences
        else:
            basis[axis, np.argmin(np.abs(basis[0]))] = 1.0
        if axis:
            basis[1] -= (basis[1] @ basis[0]) * basis[0]
        basis[axis] /= np.linalg.norm(basis[axis])
    return basis, np.clip(strengths[[-1, -2]] / total, 0.0, 1.0)


def _box(points: np.ndarray) -> np.ndarray:
    """Return the corners (2, dimensions) of a box around points (k, dimensions), with a margin."""
    low, high = points.min(axis=0), points.max(axis=0)
    extent = high - low
    # Points on a line along an axis still get a box with an inside.
    extent = np.maximum(extent, np.maximum(0.1 * extent.max(), 1e-6 * max(1.0, np.abs(points).max())))
    middle = (low + high) / 2
    return np.array([middle - (0.5 + MARGIN) * extent, middle + (0.5 + MARGIN) * extent])
