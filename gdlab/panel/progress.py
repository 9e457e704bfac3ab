"""How far a reader is: every prediction and check, kept in memory and in a file of the reader's own."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import ipywidgets

from gdlab.panel.question import QuestionView

EMPTY = "Nothing to answer yet: predictions and checks appear here as you meet them."


def file() -> Path | None:
    """Return where progress is kept: progress.json in $GDLAB_RUNS, else in ./runs.

    A dashboard's readers share the folder, so each has a file of their own there, under the name that their browser
    keeps; None until the page has told it.
    """
    folder = Path(os.environ.get("GDLAB_RUNS") or "runs").absolute()
    if not os.environ.get("VOILA_REQUEST_URL"):
        return folder / "progress.json"
    return folder / f"progress-{Progress.reader}.json" if Progress.reader else None


def lab() -> str:
    """Return the name of the notebook that this kernel belongs to, where it was told, else "notebook"."""
    place = os.environ.get("JPY_SESSION_NAME") or os.environ.get("VOILA_REQUEST_URL") or "notebook"
    return Path(place.partition("?")[0]).stem


class Progress:
    """Hold what the reader has answered: question -> kind, lab, answer, right (None: not known yet), attempts, time."""

    here: ClassVar[dict[str, dict[str, Any]]] = {}
    reader: ClassVar[str] = ""
    _shown: ClassVar[list[Progress]] = []

    def __init__(self, pieces: Iterable[Any]) -> None:
        self._view = QuestionView(self._meet, mode="progress")
        self.widget = ipywidgets.Box([*(piece.widget for piece in pieces), self._view], _dom_classes=("gd-compared",))
        self._draw()
        Progress._shown.append(self)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def _meet(self, reader: Any) -> None:
        """Take the name under which a page's browser knows its reader; what was answered until then is kept."""
        if isinstance(reader, str) and re.fullmatch("[0-9a-f]{32}", reader) and reader != Progress.reader:
            Progress.reader = reader
            _keep()

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        """Everything that is known of this reader: answers of earlier sessions, then those of this one."""
        return {**_read(), **_given()}

    def to_json(self) -> str:
        """Return it all as JSON text."""
        return json.dumps({"format": 1, "pieces": self.entries}, indent=1, ensure_ascii=False)

    def _draw(self) -> None:
        rows = [{"question": question, "answer": entry["answer"] or "–", "right": entry["right"],
                 "done": bool(entry["attempts"])} for question, entry in Progress.here.items()]
        done, right = sum(row["done"] for row in rows), sum(row["right"] is True for row in rows)
        earlier = len(self.entries) - done
        said = f"{done} of {len(rows)} answered on this page, {right} right." if rows else EMPTY
        more = f" {earlier} more from before are in the export." if earlier else ""
        self._view.change(rows=rows, message=said + more, file=self.to_json())


def progress(*pieces: Any) -> Progress:
    """Show how far the reader is, below the last pieces, with a button that saves it as JSON.

    `.entries` and `.to_json()` are the same for code.
    """
    return Progress(pieces)


def record(question: str, kind: str, answer: str = "", right: bool | None = None, attempts: int = 0) -> None:
    """Note where a piece stands; what cannot be written to the file stays in memory."""
    entry = {"kind": kind, "lab": lab(), "answer": answer, "right": right, "attempts": attempts}
    Progress.here[question] = entry | {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    _keep()


def _given() -> dict[str, dict[str, Any]]:
    return {question: entry for question, entry in Progress.here.items() if entry["attempts"]}


def _keep() -> None:
    """Write the file, if there is anything to write, and draw the tables anew."""
    path, given = file(), _given()
    if path is not None and given:
        beside = path.with_suffix(f".{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({**_read(), **given}, indent=1), encoding="utf-8")
            beside.replace(path)  # a reader of the file sees the old text or the new one, never half of it
        except OSError:
            pass
    for shown in Progress._shown:
        shown._draw()


def _read() -> dict[str, Any]:
    path = file()
    if path is None:
        return {}
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
