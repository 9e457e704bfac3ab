"""The controls: texts on the page, judged here by the Experiment's own validation; a bad text is kept and explained."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import traitlets

from gdlab.communication import METHODS, Compression
from gdlab.experiment import MAX_WORKERS, Experiment
from gdlab.panel import fields
from gdlab.panel.widget import PanelWidget, at_once, script
from gdlab.part import ExperimentError, shown, summed_up
from gdlab.parts import Clip, Precision

MAX_SLOWDOWN = 1000.0

SUITABLE = {"Ravine": {"lr": "0.001", "momentum": "0.9"}}
"""First settings of SGD where the defaults diverge: the curvature at the ravine's start is 1,330, so lr < 0.0015."""

USUAL = {"lr": "0.1", "momentum": "0"}


class FormView(PanelWidget):
    """Draw rows of controls; each edit comes back as a message {set: path, text: ...}."""

    _esm = script("form.js")
    rows = traitlets.List().tag(sync=True)


class Form:
    """Hold the texts of an Experiment's controls; `show` (names, dotted ones too) restricts which there are.

    `hide` names those that there is no control for, whatever `show` says.
    `call` runs a function where the widgets' state may be touched (the link's loop); plain call by default.
    """

    def __init__(self, experiment: Experiment, show: Iterable[str] | None = None,
                 call: Callable[..., Any] = at_once, hide: Iterable[str] = ()) -> None:
        self.on_change: list[Callable[[], None]] = []
        self.note = ""
        self._show, self._hide = self._checked(show), frozenset(hide)
        self._start = experiment
        self.widget = FormView(self._got, call)
        self.load(experiment)

    @staticmethod
    def _checked(show: Iterable[str] | None) -> tuple[str, ...] | None:
        if show is None:
            return None
        names = (show,) if isinstance(show, str) else tuple(show)
        known = [*Experiment.model_fields, fields.SLOW]
        for name in names:
            if name.partition(".")[0] not in known:
                raise ExperimentError(f"show = {name!r} is no setting: it must be among {', '.join(known)}.")
        return names

    @property
    def experiment(self) -> Experiment:
        """The experiment that the controls describe; raises ExperimentError with the sentence that is on the page."""
        if self._errors:
            raise ExperimentError(self.error, self._errors)
        return self._experiment

    @property
    def error(self) -> str:
        """Why the controls describe no experiment, or ""."""
        return summed_up(self._errors)

    @property
    def rows(self) -> list[fields.Row]:
        """The controls that are on the page."""
        rows = fields.rows_of(self._draft, self._show, self._errors)
        hidden = self._hide | ({fields.SLOW} if "speeds" in self._hide else set())
        return [row for row in rows if row.path.partition(".")[0] not in hidden]

    def load(self, experiment: Experiment) -> None:
        """Show the settings of an experiment."""
        self._base = self._experiment = experiment
        self._draft = fields.draft_of(experiment)
        self._kept: dict[tuple[str, str], fields.Draft] = {}
        self._patterns = self._per_worker()
        self._errors: dict[str, str] = {}
        self.note = ""
        self._publish()

    def reset(self) -> None:
        """Go back to the settings that the form started with."""
        self.load(self._start)

    def set(self, path: str, text: Any) -> None:
        """Take the text of one control, whatever it is; unknown paths are refused with ExperimentError."""
        text = str(text)[:10_000]
        top, _, rest = path.partition(".")
        if top not in self._draft or (rest and rest not in self._draft[top]):
            raise ExperimentError(f"{path} is no setting of this form.")
        self.note = ""
        if rest:
            self._draft[top][rest] = text
        elif path == "precision":
            if text:
                self._draft[path] = fields.draft_of(Precision.named(text))
        elif path == "clip":
            self._choose_clip(text)
        elif path == "compression":
            self._choose_method(text)
        elif isinstance(self._draft[path], dict):
            self._choose(path, text)
        else:
            self._draft[path] = text
        self._follow(path)
        self._judge()
        self._publish()

    def _got(self, message: dict[str, Any]) -> None:
        if isinstance(message.get("set"), str) and isinstance(message.get("text"), str):
            try:
                self.set(message["set"], message["text"])
            except ExperimentError as error:
                self.note = str(error)
                self._publish()

    # ---- what one change does to the other texts ----

    def _choose(self, path: str, kind: str) -> None:
        before = self._draft[path]
        annotation = Experiment.model_fields[path].annotation
        possible = fields.kinds(annotation)
        if kind not in possible and (kind or type(None) not in fields.leaves(annotation)):
            raise ExperimentError(f"{path} = {kind!r} is not known: it must be one of {', '.join(possible)}.")
        if before:
            self._kept[path, before["kind"]] = before
        if not kind:
            self._draft[path] = {}
        elif (path, kind) in self._kept:
            self._draft[path] = self._kept[path, kind]
        elif getattr(self._base, path) is not None and type(getattr(self._base, path)).__name__ == kind:
            self._draft[path] = fields.draft_of(getattr(self._base, path))
        else:
            self._draft[path] = fields.draft_of(possible[kind]())
        if path == "problem" and before:
            self._suit(before["kind"], kind)

    def _suit(self, before: str, after: str) -> None:
        optimizer = self._draft["optimizer"]
        old, new = (SUITABLE.get(kind, USUAL) for kind in (before, after))
        if optimizer["kind"] == "SGD" and old != new and old.items() <= optimizer.items():
            optimizer.update(new)
            self.note = f"Learning rate {new['lr']} and momentum {new['momentum']} were set, which suit this problem."

    def _choose_clip(self, rule: str) -> None:
        if rule and rule not in fields.CLIP_RULES:
            raise ExperimentError(f"clip = {rule!r} is not known: it must be one of {', '.join(fields.CLIP_RULES)}.")
        before = self._draft["clip"]
        for name in fields.CLIP_RULES:
            if before.get(name):
                self._kept["clip", name] = {name: before[name]}
        if not rule:
            self._kept["clip", ""] = before
            self._draft["clip"] = {}
            return
        start = before or self._kept.get(("clip", "")) or fields.draft_of(Clip(norm=1.0))
        kept = self._kept.get(("clip", rule), {rule: "0.01" if rule == "adaptive" else "1"})
        self._draft["clip"] = start | dict.fromkeys(fields.CLIP_RULES, "") | kept | {"rule": rule}

    def _choose_method(self, method: str) -> None:
        if method and method not in METHODS:
            raise ExperimentError(f"compression = {method!r} is not known: it must be one of {', '.join(METHODS)}.")
        known = self._draft["compression"] or self._kept.get(("compression", "")) or fields.draft_of(Compression())
        self._kept["compression", ""] = known
        self._draft["compression"] = known | {"method": method} if method else {}

    def _per_worker(self) -> dict[str, str]:
        problem = self._draft["problem"]
        found = {"speeds": self._draft["speeds"], "shards": self._draft["shards"]}
        rows = [name for name in ("centers", "eigenvalues") if ";" in problem.get(name, "")]
        return found | {f"problem.{name}": problem[name] for name in rows}

    def _follow(self, path: str) -> None:
        if path == "workers":
            self._follow_workers()
        elif path == fields.SLOW:
            self._follow_slow()
        elif path == "strategy.backups":
            self._follow_backups()
        elif path == "speeds":
            speeds = fields.data_of({"speeds": self._draft["speeds"]})["speeds"]
            try:
                self._draft[fields.SLOW] = fields.slow_of(None if speeds is None else tuple(map(float, speeds)))
            except (ValueError, IndexError):
                self._draft[fields.SLOW] = ""
        if path != "workers":
            self._patterns = self._per_worker()

    def _follow_backups(self) -> None:
        strategy = self._draft["strategy"]
        if strategy["backups"].strip() not in ("", "0") and strategy["exchange"] == "allreduce":
            strategy["exchange"] = "server"
            self.note = "The exchange was set to the parameter server: an all-reduce cannot leave anybody out."

    def _workers(self) -> int | None:
        text = self._draft["workers"].strip()
        return int(text) if text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_WORKERS else None

    def _follow_workers(self) -> None:
        workers = self._workers()
        if workers is None:
            return
        for path, pattern in self._patterns.items():
            if path.startswith("problem."):
                name = path.partition(".")[2]
                if ";" in self._draft["problem"].get(name, ""):
                    self._draft["problem"][name] = fields.cycled(pattern, workers)
            elif path != "speeds" or self._draft[fields.SLOW] in ("", "1"):
                self._draft[path] = fields.cycled(pattern, workers, shares=path == "shards")
        if self._draft[fields.SLOW] not in ("", "1"):
            self._follow_slow()

    def _follow_slow(self) -> None:
        workers, slow = self._workers(), self._slowdown()
        if workers is not None and slow is not None:
            speeds = (1.0,) * (workers - 1) + (1 / slow,)
            self._draft["speeds"] = "" if slow == 1 else fields.text_of(speeds)

    def _slowdown(self) -> float | None:
        try:
            slow = float(self._draft[fields.SLOW])
        except ValueError:
            return None
        return slow if 1 <= slow <= MAX_SLOWDOWN else None

    # ---- judging ----

    def _judge(self) -> None:
        self._errors = {}
        if self._draft[fields.SLOW].strip() and self._slowdown() is None:
            self._errors[fields.SLOW] = (f"The last worker cannot be {shown(self._draft[fields.SLOW])} times slower: "
                                         f"it must be a number from 1 to {MAX_SLOWDOWN:,.0f}.")
        try:
            data: dict[str, Any] = fields.data_of(self._draft)
            same = self._draft["problem"]["kind"] == type(self._base.problem).__name__
            if same and fields.draft_of(self._base.problem) == self._draft["problem"]:
                data["problem"] = self._base.problem  # a function from a cell lives in the object, not in its texts
            self._experiment = Experiment(**data, faults=self._base.faults)
        except ExperimentError as error:
            for name, sentence in (error.faults or {"": str(error)}).items():
                self._errors.setdefault(self._place(name, sentence) or name, sentence)

    def _place(self, name: str, sentence: str) -> str:
        found = re.match(r"(\w+)(?:(?:\.|: )([a-z]\w*))?", sentence)
        names = [] if found is None else [f"{found.group(1)}.{found.group(2)}", found.group(1)]
        names = [name] * ("." in name) + names + [name.partition(".")[0]]
        return next((name for name in names if any(row.path == name for row in self.rows)), "")

    def _publish(self) -> None:
        self.widget.rows = [row.to_dict() for row in self.rows]
        for told in self.on_change:
            told()
