"""Who waits for whom: each strategy as a pure state machine at the parameter store.

A machine is told of every push and answers with what happens now: which pushes become one new version, which are
dropped, and which workers may read and go on. It knows no clock, no tensor and no process, so the virtual backend's
event heap, the parameter server's messages and a recorded order all drive the same one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from gdlab.parts import Async, LocalSGD, Sync

PushKey = tuple[int, int]
"""A push by name: (worker, step)."""


class Decision(NamedTuple):
    """What the store does on one push."""

    apply: tuple[PushKey, ...]
    """Pushes combined, in this order, into one new version; empty: none yet."""
    staleness: tuple[int, ...]
    """Other updates applied between read and write, one for each of `apply`."""
    dropped: tuple[PushKey, ...]
    """Pushes that will never be applied."""
    cancelled: tuple[int, ...]
    """Workers whose step in progress is given up; its number is used up."""
    released: tuple[int, ...]
    """Workers that now read `version` and start their next step, in rank order."""
    version: int
    """The newest version after this push."""


class Machine(Protocol):
    """The interface that all strategies share."""

    workers: int
    version: int

    def start(self) -> tuple[int, ...]:
        """Return the workers that read version 0 and start, in rank order."""

    def push(self, worker: int, step: int, read_version: int) -> Decision:
        """Take a push computed from `read_version`; raise ValueError for one that cannot have happened."""

    @property
    def pending(self) -> tuple[PushKey, ...]:
        """Pushes received and not yet applied, in order of arrival."""


class Barrier:
    """Synchronous descent: one version from the first N - b pushes of a round, then everybody starts together.

    The b late workers (backup workers, Chen et al. 2016, arXiv:1604.00981) give up their step. Pushes are combined in
    rank order, so that the sum does not depend on who was faster.
    """

    def __init__(self, workers: int, backups: int = 0):
        if not 0 <= backups < workers:
            raise ValueError(f"{backups} backups leave none of {workers} workers to wait for: use 0 to {workers - 1}.")
        self.workers = workers
        self.version = 0
        self._needed = workers - backups
        self._received: dict[int, int] = {}
        self._everybody = tuple(range(workers))
        self._wait = Decision((), (), (), (), (), 0)

    def start(self) -> tuple[int, ...]:
        """Return all the workers."""
        return self._everybody

    def push(self, worker: int, step: int, read_version: int) -> Decision:
        """Take a push of this round, or drop one of an earlier round."""
        if read_version != self.version:
            _check_version(worker, step, read_version, self.version)
            return self._wait._replace(dropped=((worker, step),))
        received = self._received
        if worker in received:
            raise ValueError(f"Worker {worker} pushed step {step} after step {received[worker]} of the same round.")
        received[worker] = step
        if len(received) < self._needed:
            return self._wait
        apply = tuple(sorted(received.items()))
        cancelled = tuple(w for w in self._everybody if w not in received) if len(received) < self.workers else ()
        received.clear()
        self.version += 1
        self._wait = Decision((), (), (), (), (), self.version)
        return Decision(apply, (0,) * len(apply), (), cancelled, self._everybody, self.version)

    @property
    def pending(self) -> tuple[PushKey, ...]:
        """Pushes of the round so far."""
        return tuple(self._received.items())


class Free:
    """Asynchronous descent: who has pushed goes on with the newest version, unless too far ahead of the slowest.

    `batch` pushes make one version, combined in order of arrival. With a `staleness_bound` s a worker starts a step
    iff its clock (finished pushes) is at most s ahead of the slowest one's: stale synchronous parallel (Ho et al.
    2013), in the form that starts from clocks and not from versions.
    """

    def __init__(self, workers: int, staleness_bound: int | None = None, batch: int = 1):
        if workers < 1 or batch < 1 or (staleness_bound is not None and staleness_bound < 0):
            raise ValueError(
                f"Workers and batch are at least 1 and the staleness bound at least 0, "
                f"got {workers}, {batch} and {staleness_bound}."
            )
        self.workers = workers
        self.version = 0
        self._batch = batch
        self._bound = staleness_bound
        self._reading: list[int | None] = [0] * workers
        self._buffer: list[tuple[PushKey, int]] = []
        self._clock = [0] * workers
        self._slowest = 0
        self._at_slowest = workers
        self._blocked: list[int] = []

    def start(self) -> tuple[int, ...]:
        """Return all the workers."""
        return tuple(range(self.workers))

    def push(self, worker: int, step: int, read_version: int) -> Decision:
        """Take a push; apply it with the batch it completes; release whoever may go on."""
        if read_version != self._reading[worker]:
            _check_version(worker, step, read_version, self.version)
            raise ValueError(
                f"Worker {worker} pushed step {step} from version {read_version}, "
                f"but {'is not computing' if self._reading[worker] is None else f'read {self._reading[worker]}'}."
            )
        self._buffer.append(((worker, step), read_version))
        apply: tuple[PushKey, ...] = ()
        staleness: tuple[int, ...] = ()
        if len(self._buffer) == self._batch:
            apply = tuple(key for key, _ in self._buffer)
            staleness = tuple(self.version - read for _, read in self._buffer)
            self._buffer.clear()
            self.version += 1
        released = (worker,) if self._bound is None else self._release(worker)
        for w in released:
            self._reading[w] = self.version
        return Decision(apply, staleness, (), (), released, self.version)

    def _release(self, worker: int) -> tuple[int, ...]:
        """Advance the worker's clock and return who may start a step now."""
        clock = self._clock[worker]
        self._clock[worker] = clock + 1
        if clock == self._slowest:
            self._at_slowest -= 1
            if self._at_slowest == 0:
                # Clocks are whole numbers and this worker was the last at the slowest, so the slowest grows by
                # exactly one; whoever is blocked was ahead by exactly bound + 1, so all may go on.
                self._slowest += 1
                self._at_slowest = self._clock.count(self._slowest)
                released = tuple(sorted([*self._blocked, worker]))
                self._blocked.clear()
                return released
        if clock + 1 - self._slowest <= self._bound:
            return (worker,)
        self._blocked.append(worker)
        self._reading[worker] = None
        return ()

    @property
    def pending(self) -> tuple[PushKey, ...]:
        """Pushes of the incomplete batch."""
        return tuple(key for key, _ in self._buffer)


def machine(strategy: Sync | Async | LocalSGD, workers: int) -> Machine:
    """Build the state machine of a strategy for `workers` workers.

    Local SGD is a barrier too: at the store it differs only in what a push contains.
    """
    if isinstance(strategy, Sync):
        return Barrier(workers, strategy.backups)
    if isinstance(strategy, Async):
        return Free(workers, strategy.staleness_bound, strategy.batch)
    if isinstance(strategy, LocalSGD):
        return Barrier(workers)
    raise TypeError(f"No machine for a {type(strategy).__name__}: use Sync, Async or LocalSGD.")


def _check_version(worker: int, step: int, read_version: int, newest: int) -> None:
    """Raise ValueError for a push from a version that does not exist."""
    if not 0 <= read_version <= newest:
        raise ValueError(
            f"Worker {worker} pushed step {step} from version {read_version}, but there are only 0 to {newest}."
        )
