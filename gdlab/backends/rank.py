"""What one rank's process does: compute, last as long as drawn, exchange, apply, until all leave together."""

from __future__ import annotations

import math
import time

import torch

from gdlab.backends.costs import Costs
from gdlab.backends.exchange import exchange_of
from gdlab.backends.failures import PeerLost
from gdlab.backends.group import Group
from gdlab.backends.job import Job, experiment_of, path_format
from gdlab.backends.limits import Limits
from gdlab.backends.messages import CANCEL, DROPPED, PUSH, READY, STOP, Channel
from gdlab.backends.pace import Pace
from gdlab.backends.shared_state import SharedState, Slot
from gdlab.descent.problems import build
from gdlab.descent.store import Store
from gdlab.descent.worker import Push, Read, Worker
from gdlab.parts import LocalSGD
from gdlab.trace import EventWriter, ExponentWriter, LocalPathWriter, PathWriter, UpdateWriter

VOTES = ("stop", "seconds", "target_loss", "nonfinite")
"""The flags that travel with a push: whether a rank wants to leave and why, or its push is not finite."""

WAIT_S = 0.1


class Rank:
    """One worker on the wall's clock."""

    def __init__(self, job: Job):
        self.job = job
        self.shared = SharedState(job.folder)
        self.slot: Slot = self.shared.slot(job.slot)
        self.slot.enter("starting")
        self.experiment = experiment_of(job.folder)
        self.device = job.options["devices"][job.index]
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        self.problem = build(self.experiment, self.device)
        self.worker = Worker(self.experiment, self.problem, job.index)
        self.pace = Pace(self.experiment, job.index, self.shared, self.slot)
        self.costs = Costs.of(self.experiment, self.problem.size)
        self.exponents = ExponentWriter(job.folder, f"rank{job.index}", self.experiment.updates)
        self.worker.watch = self.exponents.due
        self.local_path: LocalPathWriter | None = None
        if isinstance(self.experiment.strategy, LocalSGD):
            steps = self.experiment.updates and self.experiment.updates * self.experiment.strategy.period
            self.local_path = LocalPathWriter(job.folder, job.index, self.problem.size, path_format(self.experiment),
                                              steps)

    def compute(self, read: Read, step: int) -> Push:
        """Return the push of one step, or of one round of local SGD."""
        self.slot.enter("computing", step, read.version)
        if self.local_path:
            return self.worker.local_round(read, step, self._visit)
        return self.worker.gradient(read, step)

    def record(self, push: Push) -> None:
        """Record the push's gradient, if its step is one of those; outside of what is timed as computing."""
        if sample := self.worker.sample(push, self.exponents.thorough(push.step)):
            self.exponents.append(push.worker, push.step, push.loss_scale, *sample)

    def _visit(self, steps: int, params: torch.Tensor) -> None:
        self.slot.beat()
        assert self.local_path is not None
        self.local_path.append(steps, params)

    # ---- over an all-reduce ----

    def descend(self) -> None:
        """Descend on a replica of the parameters: every rank applies the same pushes, so all stay equal."""
        experiment, index = self.experiment, self.job.index
        store = Store(experiment, self.problem)
        group = Group(self.job, self.slot, self.device)
        events = EventWriter(self.job.folder, f"rank{index}")
        path = None
        if index == 0:
            path = PathWriter(self.job.folder, self.problem.size, path_format(experiment), experiment.updates)
            path.append(0, store.params)
            store.watch = UpdateWriter(self.job.folder, self.problem.size, experiment.updates)
        self.slot.enter("ready")
        t0 = group.latest(time.monotonic())
        self.shared.t0 = t0
        limits = Limits.of(experiment)
        limit = t0 + limits.seconds
        reason, step = "", 0
        exchange = exchange_of(experiment, group, store, self.problem.size)
        while not reason:
            read = store.read(index)
            start = time.monotonic()
            push = self.compute(read, step)
            self.pace.sleep(self.pace.due(step, start), step)
            computed = time.monotonic()
            votes = exchange.meet(push, [self.shared.stop, computed >= limit, self.shared.target_reached,
                                         push.nonfinite > 0])
            self.pace.pass_time(self.costs.allreduce_s, step)
            reason, found_inf = _count(votes)
            if reason:
                _write(events, push, exchange.bytes_sent, start - t0, computed - t0)
                break
            applied = exchange.apply(read, found_inf)
            if path:
                path.append(applied.version, store.params)
            now = time.monotonic() - t0
            if applied.skipped and experiment.nonfinite_rule == "stop":
                reason = "nonfinite"
            elif applied.version >= limits.updates:
                reason = "updates"
            _write(events, push, exchange.bytes_sent, start - t0, computed - t0, applied.version, now,
                   math.nan if reason else now, applied.clip_scale, applied.lost_fraction)
            self.record(push)
            step += 1
        self.slot.enter("finishing", step, store.version)
        events.close()
        if self.local_path:
            self.local_path.close()
        if path:
            path.finish(store.version, store.params)
            self.shared.reason = reason

    # ---- over the parameter server ----

    def work(self) -> None:
        """Compute for the parameter server until it says stop."""
        channel = Channel(self.job.links["server0"], "the server", self.problem.size)
        buffer, step = channel.buffer(), 0
        self.slot.enter("ready")
        channel.send(READY, start=time.monotonic())
        while True:
            self.slot.enter("waiting", step)
            while not channel.poll(WAIT_S):
                self.slot.beat()
            message = channel.receive(buffer)
            if message.kind == STOP:
                return
            if message.kind == CANCEL:
                self.worker.take_back()
                continue  # For the last step, whose push was on its way already, or was not sent.
            self.pace.pass_time(self.costs.answer_s, step)
            start = time.monotonic()
            assert message.tensor is not None
            read = Read(message.tensor.to(self.device), message.version, message.loss_scale)
            push = self.compute(read, step)
            # Whatever the server says now ends this step: that it is cancelled, or that the run is over.
            woken = self.pace.sleep(self.pace.due(step, start), step, channel.poll) or channel.poll(0)
            computed = time.monotonic()
            if not woken:
                self.pace.pass_time(self.costs.message_s, step)
            self.slot.enter("waiting", step)
            channel.send_push(push, start, computed, DROPPED if woken else PUSH)
            self.record(push)
            step += 1


def _count(votes: list[float]) -> tuple[str, bool]:
    """Return why all leave now (empty: they go on), and whether anybody saw inf or NaN."""
    reason = next((name for name, count in zip(VOTES[:-1], votes, strict=False) if count > 0), "")
    return reason, votes[-1] > 0


def _write(events: EventWriter, push: Push, bytes_sent: float, start_s: float, computed_s: float, version: int = -1,
           applied_s: float = math.nan, released_s: float = math.nan, clip_scale: float = 1.0,
           lost_fraction: float = math.nan) -> None:
    events.push(worker=push.worker, step=push.step, read_version=push.read_version, version=version,
                start_s=start_s, computed_s=computed_s, applied_s=applied_s, released_s=released_s,
                loss=push.loss, grad_norm=push.grad_norm, clip_scale=push.clip_scale * clip_scale,
                nonfinite=push.nonfinite, loss_scale=push.loss_scale, lost_fraction=lost_fraction,
                bytes_sent=bytes_sent, bytes_read=0.0)


def main(job: Job) -> None:
    """Be one rank."""
    rank = Rank(job)
    if job.options["server"]:
        try:
            rank.work()
        except PeerLost:
            if not rank.shared.reason:
                raise  # Else the server has ended the run and did not wait for a long gradient.
    else:
        rank.descend()
