"""Goals: a reader designs a run, and the trace of each run grades it; the one-worker baseline runs beside."""

from __future__ import annotations

from typing import Any

import pytest

import gdlab as gd
from gdlab.panel.playground import Playground, alone
from gdlab.panel.question import AnswerError

SMALL = gd.Experiment(problem=gd.Quadratic(), workers=2, updates=30)


def test_a_goal_is_graded_by_each_run_of_its_panel_and_stays_met() -> None:
    panel = Playground(SMALL, backend="virtual")
    goal = gd.goal("Get below 1e-3 with two workers.", panel, ["final_loss < 0.001", "workers == 2"], because="So.")
    assert not goal.right and goal.widget.view["conditions"][0]["met"] is None
    panel.form.set("optimizer.lr", "0.0001")
    panel.run_once()
    assert (goal.right, goal.attempts) == (False, 1) and goal.widget.view["because"] == ""
    assert [row["met"] for row in goal.widget.view["conditions"]] == [False, True]
    assert "1 of 2 conditions" in goal.widget.view["message"]
    panel.form.set("optimizer.lr", "0.15")
    panel.form.set("updates", "300")
    panel.run_once()
    assert goal.right and goal.widget.view["because"] == "So." and goal.widget.view["tone"] == "good"
    panel.form.set("workers", "3")
    panel.run_once()
    assert goal.right and [row["met"] for row in goal.widget.view["conditions"]] == [True, False]


@pytest.mark.parametrize("condition, met, was", [
    ("strategy == sync", True, "Sync"), ("strategy != Sync", False, "Sync"), ("optimizer.lr <= 0.1", True, "0.1"),
    ("updates >= 31", False, "30"), ("clip.norm > 1", False, "none"), ("seconds_to_target < 1", False, "none"),
    ("mean_staleness < 1e-3", True, "0"), ("lost_fraction > 0", False, "0"),
])  # fmt: skip
def test_a_condition_names_what_a_run_had(condition: str, met: bool, was: str) -> None:
    panel = Playground(SMALL, backend="virtual")
    goal = gd.goal("?", panel, [condition])
    if condition.startswith("clip"):
        with_clip = SMALL.replace(clip=gd.Clip(value=1.0))
        panel.form.load(with_clip)
    panel.run_once()
    assert [(row["met"], row["was"]) for row in goal.widget.view["conditions"]] == [(met, was)]


@pytest.mark.parametrize("conditions, why", [
    ([], "at least one"), (["final loss < 1"], "no condition"), (["loss"], "no condition"),
    (["strategy < Sync"], "no number"),
])  # fmt: skip
def test_what_is_no_condition_is_refused_in_one_sentence(conditions: list[str], why: str) -> None:
    with pytest.raises(AnswerError, match=why):
        gd.goal("?", Playground(SMALL), conditions)


def test_a_name_that_no_run_has_is_named_on_the_page() -> None:
    panel = Playground(SMALL, backend="virtual")
    goal = gd.goal("?", panel, ["final_los < 1"])
    panel.run_once()
    assert "final_los is neither" in goal.widget.view["message"] and not goal.right


def test_the_baseline_runs_beside_with_one_worker_and_is_not_graded() -> None:
    panel = Playground(SMALL, backend="virtual", baseline=True)
    seen: list[Any] = []
    panel.on_run.append(seen.extend)
    panel.run_once()
    assert [trace.experiment.workers for trace in seen] == [2, 1] and panel.trace.experiment.workers == 2
    panel.form.set("workers", "1")
    panel.run_once()
    assert [trace.experiment.workers for trace in seen[2:]] == [1], "one worker is its own baseline"


def test_the_baseline_of_workers_that_disagree_has_the_mean_of_their_minima() -> None:
    centers = ((1.0, 0.0), (3.0, 4.0))
    exp = gd.Experiment(problem=gd.Quadratic(centers=centers), workers=2, speeds=(1, 0.5), shards=(0.5, 0.5),
                        strategy="async", updates=50)
    one = alone(exp)
    assert one.workers == 1 and one.speeds is None and one.problem.centers == ((2.0, 2.0),)
    both = [gd.run(e.replace(strategy="sync"), backend="virtual") for e in (exp, one)]
    assert both[0].path[-1] == pytest.approx(both[1].path[-1], abs=1e-6)
