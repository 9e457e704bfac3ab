"""Variants of an experiment run at once and are drawn side by side while they go on; a panel shows any view."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_playground import SMALL, in_loop, press, until

import gdlab as gd
from gdlab import backends
from gdlab.panel.chart import change
from gdlab.panel.export import file_of
from gdlab.panel.fields import SLOW
from gdlab.panel.playground import Playground
from gdlab.panel.variants import VariantRuns
from gdlab.part import ExperimentError
from gdlab.trace import Trace
from gdlab.views import VIEWS, live, style
from gdlab.views.redrawn import LEAST_PAUSE_S, REDRAWN, SHARE, Redrawn

CLIPS = [{"clip": None}, {"clip": 1.0}, {"clip": gd.Clip(value=1.0)}, {"clip": gd.Clip(normalised=1.0)}]
LONG = SMALL.replace(updates=1_000_000, compute_time=gd.Constant(0.01))


def fake(state: str, message: str = "", lr: float = 0.1, progress: float | None = 0.5) -> Any:
    return SimpleNamespace(state=state, message=message or state, progress=progress, stop=lambda: None,
                           experiment=SMALL.replace(optimizer=gd.SGD(lr=lr)))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    exp = gd.Experiment(gd.Quadratic((1.0, 4.0)), workers=2, updates=40, precision="mixed_fp16", clip=1.0)
    return gd.run(exp, backend="virtual", folder=tmp_path_factory.mktemp("narrow") / "run")


def broken(layout: dict) -> bool:
    """Tell whether a figure says that it could not be drawn."""
    return "be drawn: " in str(layout.get("annotations", "")).replace("<br>", " ")


# ---- several runs held as one ----

@pytest.mark.parametrize("states, together", [
    (("done", "done"), "done"), (("done", "running"), "running"), (("failed", "running"), "running"),
    (("done", "failed"), "failed"), (("stopped", "done"), "stopped"), (("stopped", "failed"), "failed"),
    (("starting", "starting"), "starting"), (("done", "starting", "running"), "running"),
])  # fmt: skip
def test_runs_held_as_one_go_on_until_the_last_has_ended_and_a_failure_is_not_hidden(
        states: tuple[str, ...], together: str) -> None:  # fmt: skip
    assert VariantRuns([fake(state) for state in states]).state == together


def test_the_message_counts_the_runs_and_names_the_one_that_failed_at_once_and_at_the_end() -> None:
    runs = [fake("done", "done after 5 updates"), fake("running", "update 3", 0.2), fake("running", "update 4", 0.3)]
    assert VariantRuns(runs).message == "1 of 3 runs have ended: update 3"
    runs[2] = fake("failed", "Rank 1 was killed", 0.3)
    assert VariantRuns(runs).message == "2 of 3 runs have ended: update 3. learning rate 0.3: Rank 1 was killed"
    runs[1] = fake("done", "done after 9 updates", 0.2)
    assert VariantRuns(runs).message == (
        "learning rate 0.1: done after 5 updates; learning rate 0.2: done after 9 updates; "
        "learning rate 0.3: Rank 1 was killed")
    assert VariantRuns([fake("done", "done after 5 updates", lr) for lr in (0.1, 0.2)]).message == (
        "All 2 runs: done after 5 updates")


def test_the_progress_is_that_of_the_run_that_is_least_far() -> None:
    assert VariantRuns([fake("running", progress=0.7), fake("running", progress=0.2)]).progress == 0.2
    assert VariantRuns([fake("running", progress=0.7), fake("failed", progress=0.2)]).progress == 0.7
    assert VariantRuns([fake("running", progress=None), fake("running")]).progress is None


def test_where_one_cannot_be_launched_those_before_it_are_stopped(monkeypatch: Any, tmp_path: Path) -> None:
    begun, real = [], backends.launch

    def launch(experiment: gd.Experiment, backend: str) -> Any:
        if len(begun) == 2:
            raise OSError("no room")
        begun.append(real(experiment, backend))
        return begun[-1]

    monkeypatch.setattr(backends, "launch", launch)
    with pytest.raises(OSError, match="no room"):
        backends.launch_all([LONG, LONG, LONG])
    for run in begun:
        run.wait()
    assert [run.state for run in begun] == ["stopped", "stopped"]


def test_a_run_whose_folder_has_gone_does_not_end_the_one_that_is_started_beside_it(tmp_path: Path) -> None:
    lost = gd.launch(LONG, folder=tmp_path / "lost")
    deadline = time.monotonic() + 40
    while lost.state == "starting" and time.monotonic() < deadline:
        time.sleep(0.02)
    shutil.rmtree(tmp_path / "lost")
    try:
        assert gd.run(SMALL, folder=tmp_path / "good").summary()["updates"] == 30
    finally:
        lost.stop()


def test_too_many_ranks_together_or_alone_are_refused_before_anything_is_started(tmp_path: Path) -> None:
    for workers in ([2, 31], [2, 33], [40]):
        with pytest.raises(ExperimentError, match=f"{max(workers)}.* at most 32"):
            backends.launch_all([SMALL.replace(workers=count) for count in workers])
    assert not list((tmp_path / "runs").glob("*"))


# ---- the panel ----

def test_one_press_runs_every_variant_and_compares_them(tmp_path: Path) -> None:
    playground = Playground(SMALL, backend="virtual", figures=["clip", "loss"], variants=CLIPS)
    assert "4 runs at once, with 8 workers on a simulated clock" in playground.controls.message
    trace = playground.run_once()
    entries = playground.history.entries
    assert [entry.experiment.clip for entry in entries] == [SMALL.replace(**variant).clip for variant in CLIPS]
    assert trace.folder == entries[0].trace.folder == playground.trace.folder
    alone = [gd.run(SMALL.replace(**variant), backend="virtual") for variant in CLIPS]
    for entry, run in zip(entries, alone, strict=True):
        assert entry.trace.path.tobytes() == run.path.tobytes(), "beside others a run does what it does alone"
    panels = [line for line in playground.figures.charts["clip"].figure["data"] if line["name"] == "loss"]
    assert len(panels) == 4 and all(len(panel["y"]) == 31 for panel in panels)
    assert len(playground.figures.charts["loss"].figure["data"]) >= 4


def test_real_variants_are_drawn_while_they_go_on_and_stop_together(tmp_path: Path) -> None:
    async def body() -> None:
        playground = Playground(LONG, figures=["clip"], variants=CLIPS[:2])
        press(playground, "run")

        def points() -> list[int]:
            data = playground.figures.charts["clip"].figure["data"]
            return [len(line["x"]) for line in data if line["name"] == "loss"]

        await until(lambda: len(points()) == 2 and min(points()) > 5, "both are drawn live")
        first = points()
        await until(lambda: min(points()) > max(first), "both go on")
        assert "0 of 2 runs have ended: running" in playground.controls.message.lower()
        runs = playground.runner.run.runs
        assert all(len(run.pids) == 2 for run in runs) and not set(runs[0].pids) & set(runs[1].pids)
        press(playground, "stop")
        await until(lambda: not playground.controls.busy, "they have stopped")
        assert [run.state for run in runs] == ["stopped", "stopped"] and len(playground.history.entries) == 2
        assert all("2 processes of other runs beside, oversubscribed" in style.caption(run.environment) for run in runs)

    in_loop(body)


def test_a_variant_that_cannot_be_is_refused_before_anything_is_shown_or_started() -> None:
    with pytest.raises(ExperimentError, match="workers"):
        Playground(SMALL, variants=[{"workers": 0}])
    with pytest.raises(ExperimentError, match="magic"):
        Playground(SMALL, variants=[{"magic": 1}])

    async def body() -> None:
        playground = Playground(SMALL, variants=[{"strategy": gd.Sync(backups=1, exchange="server")}, {}])
        playground.form.set("workers", "1")
        assert playground.controls.tone == "error" and "backups" in playground.controls.message
        press(playground, "run")
        assert "Not started" in playground.controls.message and not playground.controls.busy

    in_loop(body)


@pytest.mark.parametrize("show", [None, ["clip", "optimizer.lr"]])
def test_what_the_variants_set_has_no_control_and_all_else_stays(show: Any) -> None:
    whole, varied = Playground(SMALL, show=show).form.rows, Playground(SMALL, show=show, variants=CLIPS).form.rows
    assert varied == [row for row in whole if not row.path.startswith("clip")] and len(varied) < len(whole)
    assert [row.to_dict() for row in varied] == Playground(SMALL, show=show, variants=CLIPS).form.widget.rows
    paths = [row.path for row in Playground(SMALL, variants=[{"speeds": (1, 2)}]).form.rows]
    assert "workers" in paths and not {"speeds", SLOW} & set(paths)


def test_what_the_variants_set_comes_from_the_page_alone(monkeypatch: Any) -> None:
    monkeypatch.setenv("QUERY_STRING", SMALL.replace(clip=0.5, workers=3).to_query())
    playground = Playground(SMALL, variants=[{"clip": 0.01}, {}])
    for _ in range(2):
        assert [exp.clip for exp in playground._each(playground.experiment)] == [gd.Clip(norm=0.01), None]
        assert playground.experiment.workers == 3
        playground._use(SMALL.replace(clip=0.01, workers=3))


@pytest.mark.parametrize("variants", [{"clip": 1.0}, ["clip"], [1], 3])
def test_what_is_no_list_of_settings_is_refused_in_one_sentence(variants: Any) -> None:
    with pytest.raises(ExperimentError, match=r"variants = .* give a list of mappings"):
        Playground(SMALL, variants=variants)
    assert Playground(SMALL, variants=None)._each(SMALL) == [SMALL]


def test_figures_go_on_after_the_first_variant_has_ended_and_one_that_is_lost_loses_no_other(tmp_path: Path) -> None:
    async def body() -> None:
        variants = [{"updates": 10}, {}, {"seed": 1}]
        playground = Playground(LONG, figures=["clip", "timeline"], variants=variants)
        press(playground, "run")
        await until(lambda: playground.runner.run is not None, "they were launched")
        first, second, third = playground.runner.run.runs
        await until(lambda: first.state == "done", "the first has ended")

        def points() -> int:
            return max((np.size(line["x"]) for line in playground.figures.charts["clip"].figure["data"]), default=0)

        before = points()
        await until(lambda: points() > max(before, 20), "the others are still drawn")
        assert playground.controls.fraction < 0.1 and playground.controls.count == "1 of 3 runs have ended"
        os.kill(third.pids[1], signal.SIGKILL)
        await until(lambda: "rank 1" in playground.controls.message.lower(), "the failure is named while one goes on")
        shutil.rmtree(first.folder)
        await until(lambda: broken(playground.figures.charts["clip"].figure["layout"]), "the figure says so")
        assert second.state == "running"
        press(playground, "stop")
        await until(lambda: not playground.controls.busy, "all have ended")
        assert playground.controls.tone == "error" and "rank 1" in playground.controls.message.lower()
        assert [entry.trace.folder for entry in playground.history.entries] == [second.folder, third.folder]
        caption = playground.figures.charts["timeline"].figure["layout"]["title"]["subtitle"]["text"]
        assert "Shown: " in caption

    in_loop(body)


def test_ticks_choose_among_the_variants_what_is_drawn_side_by_side() -> None:
    playground = Playground(SMALL, backend="virtual", figures=["clip", "timeline"], variants=CLIPS)
    playground.run_once()

    def panels() -> int:
        return sum(line["name"] == "loss" for line in playground.figures.charts["clip"].figure["data"])

    assert panels() == 4
    playground.history._got({"show": playground.history.entries[1].id, "on": False})
    assert panels() == 3
    playground.history._got({"show": playground.history.entries[0].id, "on": False})
    assert panels() == 2
    playground.history._got({"show": playground.history.entries[1].id, "on": True})
    assert panels() == 3
    playground.history._got({"forget": playground.history.entries[3].id})
    assert panels() == 2


def test_any_number_of_panels_have_room(narrow: Trace) -> None:
    for count in (1, 2, 3, 12, 13, 40):
        fig = gd.views.clip(*[narrow] * count) if count > 1 else gd.views.formats(narrow)
        shares = [axis.domain[1] - axis.domain[0] for axis in fig.select_yaxes(secondary_y=False)]
        assert min(shares) * fig.layout.height > 75, count


def test_a_run_that_made_no_update_gives_no_answer_away() -> None:
    async def body() -> None:
        asked = gd.predict("How far?", answer=1.0)
        playground = Playground(LONG, figures=["loss"], predict=asked)
        asked.commit(1.0)
        playground._end(SimpleNamespace(state="stopped", message="stopped"), {}, None)
        assert asked.waits_for_run
        playground._end(SimpleNamespace(state="stopped", message="stopped", folder=Path("run")),
                        {"loss": gd.views.loss()}, None)
        assert not asked.waits_for_run

    in_loop(body)


# ---- views that are drawn anew ----

def test_every_view_can_be_a_panel_s_figure_and_ends_as_the_finished_one(tmp_path: Path) -> None:
    exp = SMALL.replace(precision="mixed_fp16", clip=1.0)
    playground = Playground(exp, backend="virtual", figures=list(VIEWS))
    for name, chart in playground.figures.charts.items():
        assert any(note["name"] == "message" for note in chart.figure["layout"]["annotations"]), name
    trace = playground.run_once()
    for name in REDRAWN:
        drawn, final = playground.figures.charts[name].figure["data"], VIEWS[name](trace).data
        assert [np.size(line.get("x", ())) for line in drawn] == [np.size(line.x) for line in final], name
        assert any(np.size(line.get("x", ())) for line in drawn), name


@pytest.mark.parametrize("name", REDRAWN)
def test_a_run_s_files_may_end_anywhere_while_it_is_drawn(name: str, narrow: Trace, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for attempt in range(12):
        folder = Path(shutil.copytree(narrow.folder, tmp_path / str(attempt)))
        for file in folder.glob("*.bin"):
            size = file.stat().st_size
            with file.open("r+b") as opened:
                opened.truncate(int(rng.integers(0, size + 1)) if rng.random() < 0.7 else size)
        (operation,) = Redrawn(name, [Trace(folder)]).update([1])
        state: dict[str, Any] = {"data": [], "layout": {}}
        change(state, operation)
        assert state["layout"]["title"]["text"] == REDRAWN[name][1] and not broken(state["layout"])


def test_drawing_anew_takes_a_quarter_of_the_time_and_leaves_nothing_out(monkeypatch: Any, narrow: Trace) -> None:
    now, drawn = [0.0], []

    def draw(*traces: Trace) -> Any:
        drawn.append(now[0])
        now[0] += 0.5
        return gd.views.loss(*traces)

    monkeypatch.setitem(REDRAWN, "clip", (draw, "?"))
    view = Redrawn("clip", [narrow], lambda: now[0])
    while now[0] < 60.0:
        view.update([1])
        now[0] += 0.1
    assert len(drawn) >= 20 and len(drawn) * 0.5 <= SHARE * 60.0 + 0.5 and min(np.diff(drawn)) >= LEAST_PAUSE_S
    view.update([1])  # within the pause: kept in mind
    before = len(drawn)
    now[0] += 10.0
    assert view.update([]) and len(drawn) == before + 1, "what came within the pause is drawn after it"
    now[0] += 10.0
    assert not view.update([]), "nothing new: nothing drawn"


def test_views_of_one_run_show_the_first_of_several(narrow: Trace) -> None:
    made = live.make(["exponents", "clip"], narrow.experiment, narrow.environment, [narrow, narrow])
    exponents, clip = (view.update([1])[0]["figure"] for view in made.values())
    assert len(exponents.data) == len(gd.views.exponents(narrow).data)
    assert len(clip.data) == len(gd.views.clip(narrow, narrow).data) > len(gd.views.clip(narrow).data) - 1


def test_a_run_that_goes_on_is_drawn_by_every_view(tmp_path: Path) -> None:
    run = gd.launch(LONG.replace(precision="mixed_fp16", clip=1.0), folder=tmp_path / "run")
    try:
        views = {name: Redrawn(name, [run.trace]) for name in REDRAWN}
        drawn: list[dict] = []
        deadline = time.monotonic() + 4.0
        while time.monotonic() < deadline:
            for view in views.values():
                drawn += [operation["figure"].layout.to_plotly_json() for operation in view.update([1])]
            time.sleep(0.02)
        assert run.state == "running" and len(drawn) > len(REDRAWN) and not any(map(broken, drawn))
    finally:
        run.stop()
        run.wait()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_file_of_variants_has_every_push_of_every_run_and_says_whose(kind: str, tmp_path: Path) -> None:
    import pandas

    traces = [gd.run(SMALL.replace(**variant), backend="virtual") for variant in CLIPS[:2]]
    (tmp_path / "file").write_bytes(file_of(kind, traces, []))
    table = getattr(pandas, f"read_{kind}")(tmp_path / "file")
    assert list(table)[:2] == ["run", "worker"]
    for name, trace in zip(("no clipping", "Clip (norm 1)"), traces, strict=True):
        own = table[table["run"] == name]
        np.testing.assert_allclose(own["grad_norm"], trace.pushes["grad_norm"])
        assert (own["clip_scale"] < 1).any() == (name != "no clipping")
        if kind == "parquet":
            assert gd.Experiment.from_json(table.attrs["gdlab.experiments"][name]) == trace.experiment
