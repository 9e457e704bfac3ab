"""The whole panel in one cell: settings on the left, figures on the right, one button that runs it for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import ipywidgets

from gdlab.backends import warm
from gdlab.experiment import Experiment
from gdlab.panel import controls, export, runner
from gdlab.panel.figures import Figures
from gdlab.panel.form import Form
from gdlab.panel.heartbeat import Heartbeat
from gdlab.panel.history import History
from gdlab.panel.variants import VariantRuns, members
from gdlab.part import ExperimentError
from gdlab.trace import Trace, TraceError

FIRST = "first commit to a prediction above; then Run shows what happens."


class Playground:
    """Show an experiment's controls and figures; `show` names the only settings, `figures` the only figures wanted.

    `backend` is where Run computes: "local" (real worker processes, the default) or "virtual". A link opened in Voila
    sets the experiment in place of `exp`. Nothing runs before a person presses Run or code calls `run_once`;
    Run waits until each prediction of `predict` (one or several of gd.predict), shown above, is committed.
    With `variants`, each a mapping of settings to their values ({"clip": 1.0}), Run starts one run of each at once;
    with `baseline` also one of a single worker. `on_run` is called with the traces of each run that has ended.
    """

    def __init__(self, exp: Experiment | None = None, show: Iterable[str] | None = None,
                 backend: str | None = None, figures: Iterable[str] | None = None, predict: Any = (),
                 variants: Sequence[Mapping[str, Any]] = (), baseline: bool = False) -> None:
        if backend is not None and backend not in controls.BACKENDS:
            raise ExperimentError(f"backend = {backend!r} is not known: it must be one of "
                                  f"{', '.join(controls.BACKENDS)}.")
        start = exp or Experiment()
        linked, self._link_error = export.from_link(start)
        self._updates, self._seconds = 0, 0.0
        self._environment: dict[str, Any] = {}
        self._latest: list[Trace] = []
        self._start, self._variants, self._baseline = start, _settings(variants), baseline
        self.on_run: list[Callable[[list[Trace]], None]] = []
        self._varied = {name for variant in self._variants for name in variant}
        self._each(start)
        self._warmed = False
        self._predictions = (predict,) if hasattr(predict, "commit") else tuple(predict)
        self.runner = runner.Runner(self._begin, self._make, self._frame, self._finish, self._end)
        call = self.runner.call
        self.heartbeat = Heartbeat(self._page_lost, self._page_found)
        self.controls = controls.Controls(self._press, self._choose, call, backend=backend or "local")
        self.form = Form(start, show, call, self._varied)
        self.figures = Figures(figures)
        self.history = History(self._compare, self._use, call)
        self.export = export.Export(self._wanted, call)
        self.form.on_change.append(self._changed)
        if linked is not None:
            self.form.load(linked)
        for prediction in self._predictions:
            prediction.waits_for_run = True
            prediction.on_change.append(self._changed)
        self._changed()
        self.widget = self._layout()
        self.heartbeat.watch()

    def _each(self, experiment: Experiment) -> list[Experiment]:
        """Return the variants; what they set and leave is the page's own, whatever a link or an earlier run brought."""
        own = {name: getattr(self._start, name) for name in self._varied & set(Experiment.model_fields)}
        each = [experiment.replace(**own | variant) for variant in self._variants]
        one = alone(each[0]) if self._baseline else None
        return each if one is None or one in each else [*each, one]

    def _layout(self) -> Any:
        box = ipywidgets.Box
        left = box([self.controls, self.form.widget], _dom_classes=("gd-left",))
        right = box([self.figures.widget, self.history.widget, self.export], _dom_classes=("gd-right",))
        columns = box([left, right], _dom_classes=("gd-columns",))
        asked = [prediction.asked() for prediction in self._predictions if not prediction.shown]
        return box([self.heartbeat, *asked, columns], _dom_classes=("gd-panel",))

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    @property
    def experiment(self) -> Experiment:
        """The experiment that the controls describe; raises ExperimentError where they describe none."""
        return self.form.experiment

    @property
    def trace(self) -> Trace | None:
        """The trace of the last run (of variants the first one's), or None."""
        return self._latest[0] if self._latest else None

    def run_once(self, backend: str | None = None) -> Trace:
        """Run the experiment of the controls to its end, with the figures following, and return its trace.

        Of variants, all run and the first one's trace is returned.
        Interrupting the cell stops the workers. Raises RankFailed if a process failed, RuntimeError while another run
        goes on.
        """
        if self.runner.busy:
            raise RuntimeError("A run is going on in this panel: wait for it, or press Stop first.")
        experiments = self._each(self.form.experiment)
        self.controls.busy = True
        try:
            run = self.runner.follow(experiments, backend or self.controls.backend)
            self._end(run, self._finish(run), None)
        except BaseException as error:
            self.controls.say(_sentence(str(error) or "the cell was interrupted, and the workers stopped"), "error")
            raise
        finally:
            self.controls.busy = False
        return run.wait()

    # ---- what the page asks for ----

    def _press(self, name: str) -> None:
        if name == "run":
            self._run()
        elif name == "stop":
            if self.controls.busy:
                self.controls.say("Stopping …")
            self.runner.stop()
        else:
            if not self.runner.busy:
                self.controls.fraction, self.controls.count = 0.0, ""
            self.form.reset()

    def _run(self) -> None:
        if not all(prediction.committed for prediction in self._predictions):
            self.controls.say(f"Not started: {FIRST}", "error")
            return
        try:
            experiments = self._each(self.form.experiment)
        except ExperimentError as error:
            self.controls.say(f"Not started: {error}", "error")
            return
        if self.runner.start(experiments, self.controls.backend):
            self.controls.busy, self.controls.fraction, self.controls.count = True, 0.0, ""
            self.controls.say(f"Starting {_workers_in_words(experiments, self.controls.backend)} …")
        elif not self.runner.busy:
            self.controls.say("There is no event loop here to follow a run in: call run_once() instead.", "error")

    def _choose(self, backend: str) -> None:
        if not self.runner.busy:
            self.controls.backend = backend
            self._changed()

    def _changed(self) -> None:
        try:
            experiment = self.form.experiment
            experiments = self._each(experiment)
        except ExperimentError as error:
            self.controls.say(str(error), "error")
            return
        self.export.query = experiment.to_query()
        if self.runner.busy:
            if self.form.note:
                self.controls.say(self.form.note)
            return
        sentence = f"Run starts {_workers_in_words(experiments, self.controls.backend)}."
        if not all(prediction.committed for prediction in self._predictions):
            sentence = FIRST[:1].upper() + FIRST[1:]
        if self._link_error:
            self.controls.say(self._link_error, "error")
            self._link_error = ""
        else:
            self.controls.say(f"{self.form.note} {sentence}".strip())

    def _use(self, experiment: Experiment) -> None:
        self.form.load(experiment)

    def _page_found(self) -> None:
        if not self._warmed:
            self._warmed = True
            warm(0.0)

    def _page_lost(self) -> None:
        self.runner.call(self.runner.stop)

    # ---- what a run brings ----

    def _begin(self, run: Any) -> None:
        self._updates, self._seconds, self._environment = 0, 0.0, {}

    def _make(self, run: Any, chunk: Any) -> Any:
        """Say what is new to the charts (called in a thread, as charts allow)."""
        if not self._updates and self._environment != run.environment:  # the ranks add what only they know
            self._environment = run.environment
            self.figures.begin(run.experiment, self._environment, [one.trace for one in members(run)])
        return self.figures.make(chunk)

    def _frame(self, frame: runner.Frame) -> None:
        run, pushes = frame.run, frame.chunk.pushes
        if len(pushes):
            self._updates = max(self._updates, int(pushes["version"].max()))
            applied = pushes["applied_s"][pushes["version"] > 0]
            self._seconds = max(self._seconds, float(applied.max(initial=0.0)))
        self.figures.apply(frame.made)
        if isinstance(run, VariantRuns):
            self.controls.fraction, self.controls.count = -1.0 if run.progress is None else run.progress, run.ended
        else:
            self.controls.fraction = controls.progress(run.experiment, self._updates, self._seconds)
            self.controls.count = controls.counted(run.experiment, self._updates, self._seconds,
                                                   run.backend == "virtual")
        if not frame.last:
            self.controls.say(_sentence(run.message))

    def _finish(self, run: Any) -> dict[str, Any]:
        """Draw the figures of the whole run (called in a thread: it may take a second)."""
        traces = [trace for one in members(run) if (trace := _readable(one)) is not None]
        if not traces:
            return {}
        for trace in traces:
            self.history.add(trace, run.backend)
        self._latest = traces
        return self.figures.drawn(traces, [entry.trace for entry in self.history.shown])

    def _end(self, run: Any, figures: dict[str, Any] | None, error: BaseException | None) -> None:
        self.controls.busy = False
        if run is None or error is not None:
            self.controls.say(_sentence(str(error) or type(error).__name__), "error")
            return
        if figures:
            self.figures.show(figures)
            self.export.ready = True
            self.export.name = run.folder.name
            for prediction in self._predictions:
                prediction.ran()
            for told in self.on_run:
                told(self._latest)
        if run.state == "done":
            self.controls.fraction = 1.0
        self.controls.say(_sentence(run.message), "error" if run.state == "failed" else "info")

    def _compare(self) -> None:
        shown = [entry.trace for entry in self.history.shown]
        ticked = [trace for trace in self._latest if any(trace is one for one in shown)]
        if self._latest and not self.runner.busy:
            beside = ticked if len(self._latest) > 1 else []
            self.runner.later(lambda: self.figures.compared(beside, shown or self._latest), self.figures.show)

    def _wanted(self, kind: str) -> None:
        latest = self._latest
        if not latest:
            return
        shown = [entry.trace for entry in self.history.shown]

        def make() -> bytes:
            figures = list(self.figures.drawn(latest, shown).values()) if kind == "html" else []
            return export.file_of(kind, latest, figures)

        self.runner.later(make, lambda data: self.export.hand_over(kind, data, latest[0].folder),
                        lambda error: self.controls.say(f"No {kind} file: {error}", "error"))


def alone(experiment: Experiment) -> Experiment | None:
    """Return the baseline of an experiment: one worker, whose steps take as long, with nobody to wait for.

    Where each worker has a minimum of its own, the one worker has their mean; None where curvatures differ too.
    """
    problem = experiment.problem
    if len(rows := getattr(problem, "centers", None) or ()) > 1:
        if problem.eigenvalue_rows is not None:
            return None
        center = tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
        problem = problem.replace(centers=(center,))
    return experiment.replace(problem=problem, workers=1, strategy="sync", speeds=None, shards=None)


def _settings(variants: Any) -> list[dict[str, Any]]:
    """Return the variants as dicts, at least one; raises ExperimentError for what is no list of settings."""
    try:
        return [dict(variant) for variant in ([None] if isinstance(variants, Mapping) else variants or ())] or [{}]
    except (TypeError, ValueError):
        raise ExperimentError(f"variants = {variants!r} cannot be: give a list of mappings of settings to values, "
                              'like [{"clip": None}, {"clip": 1.0}].') from None


def _readable(run: Any) -> Trace | None:
    """Return what a run has done; None where that is nothing, or where its folder has gone beside others."""
    try:
        return run.trace if len(run.trace.pushes) else None
    except TraceError:
        return None


def _workers_in_words(experiments: Sequence[Experiment], backend: str) -> str:
    count = sum(experiment.workers for experiment in experiments)
    noun = ("worker", "s") if backend == "virtual" else ("real worker process", "es")
    workers = f"{count:,} {noun[0]}{noun[1] * (count > 1)}" + " on a simulated clock" * (backend == "virtual")
    return workers if len(experiments) == 1 else f"{len(experiments)} runs at once, with {workers}"


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".!?…" else f"{text[:1].upper()}{text[1:]}."
