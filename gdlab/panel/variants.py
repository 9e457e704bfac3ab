"""Runs that go on at once, held as if they were one: variants of an experiment, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gdlab.trace import Trace
from gdlab.views import what_differs

ENDED = ("done", "stopped", "failed")


class VariantRuns:
    """Hold several runs with the members of one; what there is only one of is the first run's."""

    def __init__(self, runs: Sequence[Any]) -> None:
        self.runs = tuple(runs)
        self._names = what_differs([run.experiment for run in runs])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runs[0], name)

    @property
    def state(self) -> str:
        """The state that says most: one that goes on, else one that failed, else one that was stopped, else done."""
        states = [run.state for run in self.runs]
        going = [state for state in states if state not in ENDED]
        return going[-1] if going else next((state for state in ("failed", "stopped") if state in states), "done")

    @property
    def progress(self) -> float | None:
        """The share that is done of the run that is least far; None where one does not know."""
        shares = [1.0 if run.state in ENDED else run.progress for run in self.runs]
        return None if None in shares else min(shares)

    @property
    def message(self) -> str:
        """How many go on, what one of them says and what has failed; at the end what each has to say."""
        said = {name: run.message for name, run in zip(self._names, self.runs, strict=True)}
        going = [run for run in self.runs if run.state not in ENDED]
        if going:
            broken = [f". {name}: {said[name]}" for name, run in zip(self._names, self.runs, strict=True)
                      if run.state == "failed"]
            return f"{self.ended}: {going[0].message}{''.join(broken)}"
        if len(set(said.values())) == 1:
            return f"All {len(self.runs)} runs: {self.runs[0].message}"
        return "; ".join(f"{name}: {message}" for name, message in said.items())

    @property
    def ended(self) -> str:
        """How many of the runs have ended, in words."""
        return f"{sum(run.state in ENDED for run in self.runs)} of {len(self.runs)} runs have ended"

    def stop(self) -> None:
        """Stop every run."""
        for run in self.runs:
            run.stop()

    def wait(self, timeout: float | None = None) -> Trace:
        """Wait for every run and return the first one's trace; raises what the first failed one raises."""
        first, *_ = [run.wait(timeout) for run in self.runs]
        return first


def members(run: Any) -> tuple[Any, ...]:
    """Return the runs that are held as one."""
    return run.runs if isinstance(run, VariantRuns) else (run,)
