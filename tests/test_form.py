"""The controls: made from the Experiment's fields, judged in Python, losing nothing that was typed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdlab as gd
from gdlab.panel import fields
from gdlab.panel.form import Form

EXPERIMENTS = [
    gd.Experiment(),
    gd.Experiment(problem=gd.Ravine(), optimizer=gd.AdamW(lr=0.01), precision="mixed_fp16", clip=1.0),
    gd.Experiment(problem=gd.Quadratic(centers=((1.0, 2.0), (0.0, -1.0))), workers=2, strategy=gd.Async(3)),
    gd.Experiment(problem=gd.Quadratic(eigenvalues=((1.0, 2.0),), centers=((1.0, 2.0),)), workers=1),
    gd.Experiment(workers=3, speeds=(1, 0.5, 0.25), shards=(0.5, 0.25, 0.25), strategy=gd.LocalSGD(4)),
    gd.Experiment(speeds=(1, 1, 1, 1 / 3), compute_time=gd.ShiftedExponential(0.04, 0.02), updates=None, seconds=3.5),
    gd.Experiment(clip=gd.Clip(adaptive=0.02, where="average"), precision=gd.Precision(loss_scale=128.0)),
    gd.Experiment(problem=gd.LinearRegression(features=3), network=gd.Network(0.001, 1e-9), global_batch=64),
    gd.Experiment(compression=gd.Compression("sign", error_feedback=False, scale="mean")),
    gd.Experiment(problem=gd.Torch("package.module:function"), batch_size=None, target_loss=0.1, seed=7),
]


def shown(form: Form) -> dict[str, fields.Row]:
    return {row.path: row for row in form.rows}


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.to_query()[:40])
def test_an_experiment_survives_the_form(experiment: gd.Experiment) -> None:
    assert Form(experiment).experiment == experiment
    again = gd.Experiment(**fields.data_of(fields.draft_of(experiment)))
    assert again == experiment


def test_every_field_has_a_control_with_a_label_and_help() -> None:
    paths = {row.path.partition(".")[0] for row in Form(gd.Experiment()).rows}
    assert paths >= set(gd.Experiment.model_fields) - {"faults"}
    for experiment in EXPERIMENTS:
        for row in Form(experiment).rows:
            assert row.label and row.help and row.label[0].isupper(), row.path


def test_the_basic_controls_come_first_and_the_rest_is_folded_away() -> None:
    rows = Form(gd.Experiment()).rows
    basic = [row.path for row in rows if row.basic]
    assert [row.path for row in rows[: len(basic)]] == basic
    assert {"workers", "slow", "strategy", "precision", "clip", "optimizer.lr"} <= set(basic) and len(basic) <= 13


def test_bounds_are_written_in_full() -> None:
    rows = shown(Form(gd.Experiment(strategy=gd.Async(3))))
    assert "(from 1 to 1,000,000)" in rows["updates"].help and not any("e+" in row.help for row in rows.values())
    assert rows["strategy.staleness_bound"].label == "Steps ahead of the slowest, at most"


@pytest.mark.parametrize("path, text, said", [
    ("workers", "abc", "whole number from 1 to 100,000"), ("workers", "-1", "whole number from 1 to 100,000"),
    ("workers", "0", "from 1"), ("workers", "1.5", "whole number"), ("workers", "1000000000", "100,000"),
    ("workers", "", "whole number"), ("optimizer.lr", "nan", "finite number"), ("optimizer.lr", "inf", "finite number"),
    ("optimizer.lr", "-1", "from 0"), ("optimizer.lr", "fast", "number"), ("slow", "x", "from 1 to 1,000"),
    ("slow", "0.5", "from 1 to 1,000"), ("slow", "nan", "from 1 to 1,000"), ("speeds", "1, 2", "one a worker"),
    ("speeds", "1, 2, x, 4", "number"), ("updates", "0", "from 1"), ("precision.loss_scale", "big", "dynamic"),
])  # fmt: skip
def test_a_bad_text_gives_one_sentence_at_its_control_and_loses_nothing(path: str, text: str, said: str) -> None:
    form = Form(gd.Experiment(seed=3))
    before = shown(form)
    form.set(path, text)
    after = shown(form)
    assert after[path].text == text and said in form.error
    assert form.error.endswith(".") and "\n" not in form.error and "Traceback" not in form.error
    if path != "speeds":
        assert after[path].error == form.error
    assert {p: row.text for p, row in after.items() if p not in (path, "slow", "precision")} == {
        p: row.text for p, row in before.items() if p not in (path, "slow", "precision")}  # fmt: skip
    with pytest.raises(gd.ExperimentError):
        _ = form.experiment
    form.set(path, before[path].text)
    assert form.experiment == gd.Experiment(seed=3)


def test_each_of_several_bad_texts_is_marked_with_its_own_sentence() -> None:
    form = Form(gd.Experiment())
    bad = {"workers": "0", "optimizer.lr": "-1", "optimizer.momentum": "much", "slow": "0", "updates": "",
           "batch_size": "1.5", "seed": "x"}
    for path, text in bad.items():
        form.set(path, text)
    form.set("updates", "0")
    errors = {path: row.error for path, row in shown(form).items() if row.error}
    assert set(errors) == set(bad) and len(set(errors.values())) == len(bad)
    assert errors["workers"] == "workers = 0 cannot be: it must be a whole number from 1 to 100,000."
    assert errors["slow"] == "The last worker cannot be 0 times slower: it must be a number from 1 to 1,000."
    assert errors["optimizer.momentum"].startswith("optimizer: momentum = 'much' cannot be")
    assert form.error == f"{errors['slow']} (6 more fields are wrong too.)"
    for path in bad:
        form.set(path, shown(Form(gd.Experiment()))[path].text)
    assert form.error == "" and not any(row.error for row in form.rows)


def test_an_empty_text_is_called_empty() -> None:
    form = Form(gd.Experiment())
    form.set("workers", " ")
    assert form.error == "workers is empty: it must be a whole number from 1 to 100,000."


@given(st.sampled_from([row.path for row in Form(gd.Experiment()).rows]), st.text(max_size=12))
def test_no_text_whatever_breaks_the_form(path: str, text: str) -> None:
    form = Form(gd.Experiment())
    form._got({"set": path, "text": text})
    assert form.error == "" or form.error.strip().endswith((".", ")"))
    form.reset()
    assert form.experiment == gd.Experiment()


@pytest.mark.parametrize("message", [
    {}, {"set": 3, "text": "4"}, {"set": "workers", "text": 4}, {"set": "no", "text": ""},
    {"set": "workers.x", "text": "1"}, {"set": "strategy", "text": "Magic"}, {"set": "precision", "text": "fp7"},
    {"set": "clip", "text": "scissors"}, {"set": "compression", "text": "zip"},
])  # fmt: skip
def test_a_message_that_no_control_sends_changes_nothing(message: dict[str, Any]) -> None:
    form = Form(gd.Experiment())
    form._got(message)
    assert form.experiment == gd.Experiment()


def test_changing_the_workers_repeats_what_is_per_worker_and_returning_restores_it() -> None:
    start = gd.Experiment(workers=3, speeds=(1, 0.5, 0.25), shards=(0.5, 0.25, 0.25),
                          problem=gd.Quadratic(centers=((1.0, 0.0), (2.0, 0.0), (3.0, 0.0))))  # fmt: skip
    form = Form(start)
    form.set("workers", "5")
    longer = form.experiment
    assert longer.speeds == (1, 0.5, 0.25, 1, 0.5)
    assert [center[0] for center in longer.problem.centers] == [1, 2, 3, 1, 2]
    assert sum(longer.shards) == pytest.approx(1)
    form.set("workers", "1")
    assert form.experiment.speeds == (1.0,) and form.experiment.problem.centers == ((1.0, 0.0),)
    form.set("workers", "3")
    assert form.experiment == start


def test_one_slow_worker_stays_one_slow_worker() -> None:
    form = Form(gd.Experiment())
    form.set("slow", "4")
    assert form.experiment.speeds == (1, 1, 1, 0.25)
    form.set("workers", "6")
    assert form.experiment.speeds == (1, 1, 1, 1, 1, 0.25)
    form.set("slow", "1")
    assert form.experiment.speeds is None
    form.set("speeds", "1, 1, 1, 1, 1, 0.5")
    assert shown(form)["slow"].text == "2"


def test_backup_workers_bring_the_exchange_that_they_need() -> None:
    form = Form(gd.Experiment())
    form.set("strategy.backups", "1")
    assert form.experiment.strategy == gd.Sync(backups=1, exchange="server") and "server" in form.note


def test_a_choice_brings_its_own_controls_and_going_back_brings_the_old_texts() -> None:
    form = Form(gd.Experiment())
    form.set("strategy", "Async")
    form.set("strategy.staleness_bound", "5")
    form.set("strategy", "LocalSGD")
    assert "strategy.period" in shown(form) and "strategy.staleness_bound" not in shown(form)
    form.set("strategy", "Async")
    assert form.experiment.strategy == gd.Async(staleness_bound=5)


def test_clipping_goes_on_and_off_without_forgetting_its_threshold() -> None:
    form = Form(gd.Experiment())
    form.set("clip", "norm")
    form.set("clip.norm", "0.5")
    form.set("clip", "value")
    assert form.experiment.clip == gd.Clip(value=1.0)
    form.set("clip", "")
    assert form.experiment.clip is None
    form.set("clip", "norm")
    assert form.experiment.clip == gd.Clip(norm=0.5)


def test_a_precision_preset_sets_its_parts_and_a_changed_part_is_an_own_mix() -> None:
    form = Form(gd.Experiment())
    form.set("precision", "mixed_fp16")
    assert form.experiment.precision == gd.Precision.named("mixed_fp16")
    form.set("precision.rounding", "stochastic")
    assert shown(form)["precision"].text == "" and form.experiment.precision.rounding == "stochastic"


def test_the_ravine_gets_settings_that_suit_it_unless_some_were_chosen() -> None:
    form = Form(gd.Experiment())
    form.set("problem", "Ravine")
    assert form.experiment.optimizer == gd.SGD(lr=0.001, momentum=0.9) and "0.001" in form.note
    form.set("problem", "Digits")
    assert form.experiment.optimizer == gd.SGD()
    form.set("optimizer.lr", "0.03")
    form.set("problem", "Ravine")
    assert form.experiment.optimizer == gd.SGD(lr=0.03) and form.note == ""


def test_show_leaves_only_the_controls_that_a_lesson_needs() -> None:
    form = Form(gd.Experiment(), show=["workers", "strategy", "optimizer.lr"])
    assert [row.path for row in form.rows] == ["workers", "strategy", "optimizer.lr"]
    assert all(row.basic for row in form.rows)
    form.set("strategy", "Async")
    assert "strategy.staleness_bound" in shown(form)
    with pytest.raises(gd.ExperimentError, match="wrokers"):
        Form(gd.Experiment(), show=["wrokers"])


def test_a_function_from_a_cell_stays_in_the_experiment() -> None:
    form = Form(gd.Experiment(problem=gd.Torch(lambda: None)))
    form.set("workers", "2")
    assert form.experiment.payload is not None and form.experiment.workers == 2


def test_watchers_are_told_of_every_change() -> None:
    form, told = Form(gd.Experiment()), []
    form.on_change.append(lambda: told.append(form.error))
    form.set("workers", "8")
    form.set("workers", "none")
    assert told[0] == "" and "none" in told[1]


def test_a_compression_shows_only_the_settings_of_its_method_and_keeps_what_was_typed() -> None:
    form = Form(gd.Experiment())
    row = shown(form)["compression"]
    assert row.text == "" and row.group == "network" and [option["value"] for option in row.options] == [
        "", "topk", "sign", "fp8", "bf16"]
    form.set("compression", "topk")
    form.set("compression.fraction", "0.05")
    form.set("compression.error_feedback", "false")
    own = {path: row for path, row in shown(form).items() if path.startswith("compression.")}
    assert set(own) == {"compression.fraction", "compression.error_feedback"} and own["compression.fraction"].scale
    assert all(row.nested and row.group == "network" for row in own.values())
    assert own["compression.error_feedback"].type == "switch"
    form.set("compression", "sign")
    assert {path for path in shown(form) if path.startswith("compression.")} == {
        "compression.scale", "compression.error_feedback"}
    form.set("compression", "")
    assert form.experiment == gd.Experiment()
    form.set("compression", "topk")
    assert form.experiment.compression == gd.Compression("topk", 0.05, error_feedback=False)
    form.set("compression.fraction", "2")
    assert shown(form)["compression.fraction"].error and "from 0 (itself excluded) to 1" in form.error


def test_a_lesson_that_shows_the_compression_shows_its_settings_too() -> None:
    form = Form(gd.Experiment(compression="topk"), show=("compression",))
    assert [row.path for row in form.rows] == ["compression", "compression.fraction", "compression.error_feedback"]
    assert all(row.basic for row in form.rows)
