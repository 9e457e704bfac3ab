"""The parameter server's process: takes pushes in order of arrival and does what the strategy's machine decides."""

from __future__ import annotations

import math
import select
import time

from gdlab.backends.costs import Costs
from gdlab.backends.failures import PeerLost
from gdlab.backends.job import Job, experiment_of, path_format
from gdlab.backends.limits import Limits
from gdlab.backends.messages import CANCEL, DROPPED, READY, STOP, Channel, Message
from gdlab.backends.pace import SLICE_S
from gdlab.backends.shared_state import SharedState
from gdlab.descent.compression import compressor_of
from gdlab.descent.problems import build
from gdlab.descent.store import Applied, Store
from gdlab.descent.strategies import Decision, PushKey, machine
from gdlab.descent.worker import Push
from gdlab.trace import EventWriter, PathWriter, UpdateWriter

WAIT_MS = 50
LAST_WORDS_S = 0.4
"""How long the server waits, at the end, for what the workers were computing."""


class Step:
    """A step of a worker as the server knows it: when it was computed, and what came of it."""

    __slots__ = ("bytes_sent", "computed_s", "push", "released_s", "start_s", "written")

    def __init__(self, push: Push, start_s: float, computed_s: float, bytes_sent: int):
        self.push, self.start_s, self.computed_s, self.bytes_sent = push, start_s, computed_s, bytes_sent
        self.released_s = math.nan
        self.written = False


class Server:
    """The shared parameters of one run and the connections to its workers."""

    def __init__(self, job: Job):
        self.shared = SharedState(job.folder)
        self.slot = self.shared.slot(job.slot)
        self.slot.enter("starting")
        self.experiment = experiment = experiment_of(job.folder)
        self.problem = build(experiment)
        self.store = Store(experiment, self.problem)
        self.machine = machine(experiment.strategy, experiment.workers)
        self.events = EventWriter(job.folder, "server")
        self.path = PathWriter(job.folder, self.problem.size, path_format(experiment), experiment.updates)
        self.store.watch = self.updates = UpdateWriter(job.folder, self.problem.size, experiment.updates)
        self.channels = [Channel(job.links[f"rank{rank}"], f"rank {rank}", self.problem.size)
                         for rank in range(experiment.workers)]
        self._ranks = {channel.connection.fileno(): rank for rank, channel in enumerate(self.channels)}
        self._poll = select.poll()
        for descriptor in self._ranks:
            self._poll.register(descriptor, select.POLLIN)
        self.limits = Limits.of(experiment)
        self._costs = Costs.of(experiment, self.problem.size)
        self._compressor = compressor_of(experiment, self.problem.size)
        self._bytes_read = self.store.params.nbytes
        self._received: dict[PushKey, Step] = {}
        self._last: list[Step | None] = [None] * experiment.workers
        self._busy = [False] * experiment.workers
        self._cancelled = [False] * experiment.workers
        self._owed = [False] * experiment.workers
        self.t0 = 0.0
        self.reason = ""

    def serve(self) -> None:
        """Serve until the run's end."""
        self.path.append(0, self.store.params)
        self._meet()
        for rank in self.machine.start():
            self._let_read(rank)
        while not self.reason:
            self.slot.enter("waiting", version=self.store.version)
            ready = self._poll.poll(WAIT_MS)
            self.slot.enter("computing", self.store.version, self.store.version)
            self._look()
            # At one instant: in rank order, and whoever a push releases reads before the next is served.
            for rank in sorted(self._ranks[descriptor] for descriptor, _ in ready):
                if not self.reason:
                    self._take(rank, self._receive(rank))
        self._leave()

    def _meet(self) -> None:
        """Wait for every worker; the last one's moment is the start of the run's clock."""
        ready = []
        self.slot.enter("ready")
        for rank, channel in enumerate(self.channels):
            while not channel.poll(WAIT_MS / 1000):
                self.slot.beat()
            message = self._receive(rank)
            assert message.kind == READY
            ready.append(message.start)
        self.t0 = max(*ready, time.monotonic())
        self.shared.t0 = self.t0

    def _look(self) -> None:
        if self.shared.stop:
            self.reason = "stop"
        elif self.shared.target_reached:
            self.reason = "target_loss"
        elif time.monotonic() - self.t0 >= self.limits.seconds:
            self.reason = "seconds"

    def _receive(self, rank: int) -> Message:
        channel = self.channels[rank]
        return channel.receive(channel.buffer())

    def _take(self, rank: int, message: Message) -> None:
        """Take a worker's answer to its read: a push, or a step that it gave up."""
        self._busy[rank] = False
        step = self._step(rank, message)
        self._last[rank] = step
        if self._cancelled[rank] or message.kind == DROPPED:
            self._cancelled[rank] = False
            if self._owed[rank]:
                self._let_read(rank)
                step.released_s = time.monotonic() - self.t0
            self._write(step)
            return
        key = (rank, message.step)
        self._received[key] = step
        self._work(self._costs.server_s)
        if self.reason:
            return  # While it was being served.
        decision = self.machine.push(rank, message.step, message.version)
        applied = self._apply(decision) if decision.apply else None
        for dropped in decision.dropped:
            self._write(self._received.pop(dropped))
        if not self.reason:
            self._release(decision)
        if applied is not None:
            for key, staleness in zip(decision.apply, decision.staleness, strict=True):
                self._write(self._received.pop(key), applied, staleness)

    def _work(self, seconds: float) -> None:
        """Let the time of serving a push go by, alive and open to the run's end."""
        until = time.monotonic() + seconds
        while not self.reason and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))
            self.slot.beat()
            self._look()

    def _step(self, rank: int, message: Message) -> Step:
        received = message.tensor
        bytes_sent = 0 if received is None else received.nbytes
        if self._compressor is not None and received is not None:
            received = self._compressor.decode(received)
        push = Push(rank, message.step, message.version, received, message.loss, message.grad_norm,
                    message.clip_scale, message.nonfinite, message.loss_scale)
        return Step(push, message.start - self.t0, message.computed - self.t0, bytes_sent)

    def _apply(self, decision: Decision) -> tuple[Applied, float]:
        pushes = [self._received[key].push for key in decision.apply]
        applied = self.store.apply(pushes, list(decision.staleness))
        self.path.append(applied.version, self.store.params)
        now = time.monotonic() - self.t0
        if applied.skipped and self.experiment.nonfinite_rule == "stop":
            self.reason = "nonfinite"
        elif applied.version >= self.limits.updates:
            self.reason = "updates"
        return applied, now

    def _release(self, decision: Decision) -> None:
        """Let the released workers read; the cancelled ones first give up what they are doing."""
        for rank in decision.cancelled:
            if self._busy[rank] and not self._cancelled[rank]:
                self._cancelled[rank] = True
                self.channels[rank].send(CANCEL)
        for rank in decision.released:
            last = self._last[rank]
            if last is not None and not self._busy[rank]:
                last.released_s = time.monotonic() - self.t0
                if last.written:
                    self.events.release(rank, last.push.step, last.released_s)
            self._let_read(rank)

    def _let_read(self, rank: int) -> None:
        """Send the newest parameters to a worker, or owe them to one that is still busy with a cancelled step."""
        if self._busy[rank]:
            # It may be in the middle of a large push: two that only send would wait for each other for ever.
            self._owed[rank] = True
            return
        self._owed[rank] = False
        self._busy[rank] = True
        self.channels[rank].send_read(self.store.read(rank))

    def _write(self, step: Step, applied: tuple[Applied, float] | None = None, staleness: int = 0) -> None:
        push, step.written = step.push, True
        version, applied_s, clip_scale, lost_fraction = -1, math.nan, 1.0, math.nan
        if applied is not None:
            version, clip_scale, lost_fraction = applied[0].version, applied[0].clip_scale, applied[0].lost_fraction
            applied_s = applied[1]
        self.events.push(
            worker=push.worker, step=push.step, read_version=push.read_version, version=version, staleness=staleness,
            start_s=step.start_s, computed_s=step.computed_s, applied_s=applied_s, released_s=step.released_s,
            loss=push.loss, grad_norm=push.grad_norm, clip_scale=push.clip_scale * clip_scale,
            nonfinite=push.nonfinite, loss_scale=push.loss_scale, lost_fraction=lost_fraction,
            bytes_sent=step.bytes_sent, bytes_read=self._bytes_read)

    def _leave(self) -> None:
        """Send everybody home, record what was never applied, and close the files."""
        self.slot.enter("finishing", version=self.store.version)
        for channel in self.channels:
            channel.send(STOP)
        for step in self._received.values():
            self._write(step)
        until = time.monotonic() + LAST_WORDS_S
        while any(self._busy) and time.monotonic() < until and not self.shared.stop:
            for descriptor, _ in self._poll.poll(WAIT_MS):
                rank = self._ranks[descriptor]
                try:
                    message = self._receive(rank)
                except PeerLost:
                    self._poll.unregister(descriptor)
                    self._busy[rank] = False
                    continue
                self._busy[rank] = False
                self._write(self._step(rank, message))
        self.events.close()
        self.updates.close()
        self.path.finish(self.store.version, self.store.params)
        self.shared.reason = self.reason


def main(job: Job) -> None:
    """Be the parameter server."""
    Server(job).serve()
