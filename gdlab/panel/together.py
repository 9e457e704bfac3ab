"""Runs that go on at once, held as if they were one: variants of an experiment, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gdlab.experiment import Experiment
from gdlab.trace import Trace

ENDED = ("done", "stopped", "failed")


class Together:
    """Hold several runs with the members of one; what there is only one of is the first run's."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self.runs = tuple(runs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runs[0], name)

    @property
    def state(self) -> str:
        """The state that says most: one that goes on, else one that failed, else one that was stopped, else done."""
        states = [run.state for run in self.runs]
        going = [state for state in states if state not in ENDED]
        return going[-1] if going else next((state for state in ("failed", "stopped") if state in states), "done")

    @property
    def message(self) -> str:
        """How many go on and what one of them says; at the end what the run says that `state` speaks of."""
        going = [run for run in self.runs if run.state not in ENDED]
        if going:
            return f"{len(going)} of {len(self.runs)} runs go on at once: {going[0].message}"
        state = self.state
        told = next(run for run in self.runs if run.state == state)
        return f"{len(self.runs)} runs at once: {told.message}"

    def stop(self) -> None:
        """Stop every run."""
        for run in self.runs:
            run.stop()

    def wait(self, timeout: float | None = None) -> Trace:
        """Wait for every run and return the first one's trace; raises what the first failed one raises."""
        first, *_ = [run.wait(timeout) for run in self.runs]
        return first


def launch_all(launch: Callable[[Experiment, str], Any], experiments: Sequence[Experiment], backend: str) -> Any:
    """Launch one experiment, or several at once; where one cannot be launched, those before it are stopped."""
    runs: list[Any] = []
    try:
        for experiment in experiments:
            runs.append(launch(experiment, backend))
    except BaseException:
        Together(runs).stop()
        raise
    return runs[0] if len(runs) == 1 else Together(runs)


def members(run: Any) -> tuple[Any, ...]:
    """Return the runs that are held as one."""
    return run.runs if isinstance(run, Together) else (run,)
