"""Virtual time: one process does everybody's arithmetic, and an event heap decides who is when."""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gdlab.backends.costs import Costs
from gdlab.backends.job import Job, experiment_of
from gdlab.backends.limits import Limits
from gdlab.backends.shared_state import SharedState
from gdlab.backends.topology import needs_server
from gdlab.descent.problems import build
from gdlab.descent.store import Store
from gdlab.descent.strategies import Decision, PushKey, machine
from gdlab.descent.worker import Worker
from gdlab.parts import LocalSGD
from gdlab.trace import EventWriter, ExponentWriter, LocalPathWriter, PathWriter, Trace, UpdateWriter, write_run

if TYPE_CHECKING:
    from gdlab.descent.store import Applied
    from gdlab.descent.worker import Push, Read
    from gdlab.experiment import Experiment

BUFFER = 1 << 16

LOCAL_PATHS = 16
"""Of so many workers sampled gradients are recorded, and under local SGD the iterates, in a file each."""

LOOK_S = 0.05
"""Wall seconds between two looks at the stop flag; also the longest time that a row waits in a buffer."""


LOOK_EVERY = 1000
"""So many steps begin, at most, between two looks: where many workers are released at once."""


class Step:
    """One step of one worker, from its read to its release."""

    __slots__ = ("cancelled", "computed_s", "number", "push", "read", "released_s", "start_s", "worker", "written")

    def __init__(self, worker: int, number: int, start_s: float, computed_s: float, read: Read):
        self.worker = worker
        self.number = number
        self.start_s = start_s
        self.computed_s = computed_s
        self.read = read
        self.push: Push | None = None
        self.released_s = math.nan
        self.cancelled = False
        self.written = False


class Simulation:
    """One experiment in virtual seconds.

    The heap holds one event a worker: the moment at which its gradient is ready, in the total order (time, priority,
    rank). From then on nothing can overtake, since all pushes cost the same and the server serves in order of
    arrival: so a push is served as soon as it is popped, at the moment that the queue gives. Priority is 0, except
    that a step which takes no time at all comes after everybody else of its instant, or nobody else would ever move.
    """

    def __init__(self, exp: Experiment, folder: str | Path, stop: Callable[[], bool] = lambda: False):
        self.exp = exp
        self.stop = stop
        self.problem = build(exp)
        self.store = Store(exp, self.problem)
        self.workers = [Worker(exp, self.problem, rank) for rank in range(exp.workers)]
        self.machine = machine(exp.strategy, exp.workers)
        self.costs, self.over_server = Costs.of(exp, self.problem.size), needs_server(exp)
        self.local_steps = exp.strategy.period if isinstance(exp.strategy, LocalSGD) else 0
        self.limits = Limits.of(exp)
        self.limit_s = self.limits.seconds
        self.events = EventWriter(folder, "virtual", buffer=BUFFER)
        dtype = "float64" if exp.precision.weights == "fp64" else "float32"
        self.path = PathWriter(folder, self.problem.size, dtype, exp.updates, buffer=BUFFER)
        kept = min(exp.workers, LOCAL_PATHS) if self.local_steps else 0
        steps = exp.updates and exp.updates * self.local_steps
        self.local_paths = [LocalPathWriter(folder, rank, self.problem.size, dtype, steps, buffer=BUFFER)
                            for rank in range(kept)]
        self.exponents = ExponentWriter(folder, "virtual", exp.updates, BUFFER)
        for worker in self.workers[:LOCAL_PATHS]:
            worker.watch = self.exponents.due
        self.store.watch = self.updates = UpdateWriter(folder, self.problem.size, exp.updates, BUFFER)
        self.now_s = 0.0
        """When the last push was served."""
        self.reason = ""
        """Why the run ended: updates, seconds, target_loss, nonfinite or stop."""
        self._draw = exp.times.draw
        self._heap: list[tuple[float, int, int, int, Step]] = []
        self._count = [0] * exp.workers
        self._current: list[Step | None] = [None] * exp.workers
        self._received: dict[PushKey, Step] = {}
        self._begun = 0
        self._instant = (0.0, 0)
        self._server_free_s = 0.0
        self._next_look = 0.0

    def run(self) -> str:
        """Run to whatever ends it first and return the reason: updates, seconds, target_loss, nonfinite or stop."""
        self.path.append(0, self.store.params)
        if self._on_target():
            self.reason = "target_loss"
        for rank in self.machine.start():
            self._begin(rank, 0.0)
        while not self.reason:
            time_s, priority, _, _, step = self._heap[0]
            if step.cancelled:
                heapq.heappop(self._heap)
                continue
            served_s = max(step.computed_s + self.costs.message_s, self._server_free_s) + self.costs.server_s
            if served_s > self.limit_s:
                self.reason = "seconds"
                break
            heapq.heappop(self._heap)
            self._instant = (time_s, priority)
            self._server_free_s = served_s
            self._serve(step, served_s)
            self._look()
        self._leave()
        return self.reason

    def _begin(self, rank: int, start_s: float) -> None:
        """Let a worker read the newest parameters and start its next step."""
        number = self._count[rank]
        self._count[rank] = number + 1
        computed_s = start_s
        if self.local_steps:
            for local in range(number * self.local_steps, (number + 1) * self.local_steps):
                computed_s += self._draw(rank, local)
        else:
            computed_s += self._draw(rank, number)
        step = self._current[rank] = Step(rank, number, start_s, computed_s, self.store.read(rank))
        instant, priority = self._instant
        heapq.heappush(self._heap, (computed_s, priority + 1 if computed_s == instant else 0, rank, number, step))
        self._begun += 1
        if self._begun % LOOK_EVERY == 0:
            self._look()

    def _serve(self, step: Step, served_s: float) -> None:
        """Hand a push to the strategy and do what it decides."""
        self._compute(step)
        self._received[step.worker, step.number] = step
        decision = self.machine.push(step.worker, step.number, step.read.version)
        self.now_s = served_s
        if not decision.apply:
            self._release(decision, served_s + self.costs.answer_s)
            return
        applied_s = served_s + self.costs.allreduce_s
        if applied_s > self.limit_s:
            self.reason = "seconds"
            return
        self.now_s = applied_s
        steps = [self._received.pop(key) for key in decision.apply]
        applied = self.store.apply([step.push for step in steps], list(decision.staleness))
        self.path.append(applied.version, self.store.params)
        self._end(applied)
        if not self.reason:
            self._release(decision, applied_s + self.costs.answer_s)
        for step, staleness in zip(steps, decision.staleness, strict=True):
            self._write(step, applied.version, staleness, applied_s, applied.clip_scale, applied.lost_fraction)

    def _end(self, applied: Applied) -> None:
        """Note whether the run has reached its number of updates or its target, or must not go on."""
        exp = self.exp
        if applied.skipped and exp.nonfinite_rule == "stop":
            self.reason = "nonfinite"
        elif self._on_target():
            self.reason = "target_loss"
        elif applied.version >= self.limits.updates:
            self.reason = "updates"

    def _on_target(self) -> bool:
        target = self.exp.target_loss
        return target is not None and self.problem.objective(self.store.params) <= target

    def _release(self, decision: Decision, go_s: float) -> None:
        """Let the released workers go on at `go_s`; the cancelled ones give up what they are doing."""
        for rank in decision.cancelled:
            step = self._current[rank]
            step.cancelled, step.released_s = True, go_s
            if step.computed_s > go_s:
                step.computed_s = math.nan
            self._write(step)
        for rank in decision.released:
            step = self._current[rank]
            step.released_s = go_s
            if step.written and not step.cancelled:
                self.events.release(rank, step.number, go_s)
            self._begin(rank, go_s)

    def _compute(self, step: Step) -> None:
        """Compute a step's push from what it read."""
        worker = self.workers[step.worker]
        if self.local_steps:
            visit = self.local_paths[step.worker].append if step.worker < len(self.local_paths) else None
            step.push = worker.local_round(step.read, step.number, visit)
        else:
            step.push = worker.gradient(step.read, step.number)
        if sample := worker.sample(step.push, self.exponents.thorough(step.number)):
            self.exponents.append(step.worker, step.number, step.push.loss_scale, *sample)

    def _write(self, step: Step, version: int = -1, staleness: int = 0, applied_s: float = math.nan,
               clip_scale: float = 1.0, lost_fraction: float = math.nan) -> None:
        """Record a step whose fate is known."""
        step.written = True
        push = step.push
        if push is None:
            self.events.push(worker=step.worker, step=step.number, read_version=step.read.version, version=-1,
                             start_s=step.start_s, computed_s=step.computed_s, released_s=step.released_s,
                             bytes_sent=0.0, bytes_read=self.costs.bytes_read)
            return
        self.events.push(
            worker=step.worker, step=step.number, read_version=step.read.version, version=version, staleness=staleness,
            start_s=step.start_s, computed_s=step.computed_s, applied_s=applied_s, released_s=step.released_s,
            loss=push.loss, grad_norm=push.grad_norm, clip_scale=push.clip_scale * clip_scale,
            nonfinite=push.nonfinite, loss_scale=push.loss_scale, lost_fraction=lost_fraction,
            bytes_sent=self.costs.bytes_sent if version > 0 or self.over_server else 0.0,
            bytes_read=self.costs.bytes_read,
        )
        # A blocked worker's last step lives on until its release; its tensors need not.
        step.push = None

    def _look(self) -> None:
        """Now and then, see whether to stop, and write what has waited."""
        wall = time.monotonic()
        if wall < self._next_look:
            return
        self._next_look = wall + LOOK_S
        for writer in (self.events, self.path, self.exponents, self.updates, *self.local_paths):
            writer.flush()
        if self.stop() and not self.reason:
            self.reason = "stop"

    def _leave(self) -> None:
        """Record what was received or computed but never applied, and close the files."""
        end_s = self.limit_s if self.reason == "seconds" else self.now_s
        for step in self._received.values():
            self._write(step)
        # Whoever stops a run wants no more of its arithmetic.
        if self.reason != "stop":
            for event in sorted(self._heap, key=lambda event: event[:4]):
                step = event[-1]
                if step.computed_s <= end_s and not step.cancelled:
                    self._compute(step)
                    self._write(step)
                    self._look()
        for writer in (self.events, self.exponents, self.updates, *self.local_paths):
            writer.close()
        self.path.finish(self.store.version, self.store.params)


def simulate(exp: Experiment, folder: str | Path, stop: Callable[[], bool] = lambda: False) -> Trace:
    """Run an experiment in virtual time inside this process and return its trace.

    The same experiment writes the same bytes, whatever the machine is busy with. `stop` is asked several times a
    second. The folder is created; a `run.json` that is there already is left alone.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = {"experiment": json.loads(exp.to_json()), "environment": {"backend": "virtual", "clock": "virtual"}}
    ours = not (folder / "run.json").exists()
    if ours:
        write_run(folder, run)
    reason = Simulation(exp, folder, stop).run()
    if ours:
        how = "stopped" if reason in ("stop", "nonfinite") else "done"
        write_run(folder, run | {"ended": {"how": how, "reason": reason}})
    return Trace(folder, exp.payload)


def main(job: Job) -> None:
    """Be the process of a virtual run."""
    shared = SharedState(job.folder)
    slot = shared.slot(job.slot)
    simulation: Simulation | None = None

    def look() -> bool:
        slot.enter("computing", version=simulation.store.version if simulation else 0)
        return shared.stop

    slot.enter("starting")
    simulation = Simulation(experiment_of(job.folder), job.folder, look)
    shared.t0 = time.monotonic()
    look()
    reason = simulation.run()
    look()
    shared.reason = reason
