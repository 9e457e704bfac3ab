"""What leaves the page: a link to these settings, and the last run as a table or a page of figures."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import traitlets

from gdlab.experiment import Experiment
from gdlab.panel.widget import PanelWidget, at_once, script
from gdlab.part import ExperimentError
from gdlab.trace import Trace, table_of
from gdlab.views import what_differs

MAX_BYTES = 50_000_000
"""What is sent to the page at most: a larger file is found in the run's folder instead."""

TYPES = {"csv": "text/csv", "parquet": "application/vnd.apache.parquet", "html": "text/html"}


class Export(PanelWidget):
    """Draw the buttons; `wanted(kind)` is called for "csv", "parquet" and "html", and answered with `hand_over`."""

    _esm = script("export.js")
    query = traitlets.Unicode("").tag(sync=True)
    path = traitlets.Unicode("").tag(sync=True)
    name = traitlets.Unicode("gdlab").tag(sync=True)
    ready = traitlets.Bool(False).tag(sync=True)

    def __init__(self, wanted: Callable[[str], None], call: Callable[..., Any] = at_once, **traits: Any) -> None:
        def got(message: dict[str, Any]) -> None:
            if message.get("make") in TYPES:
                wanted(message["make"])

        super().__init__(got, call, path=_own_path(), **traits)

    def hand_over(self, kind: str, data: bytes, folder: Path) -> None:
        """Let the page save a file; one that is too large for a page is named instead."""
        if len(data) > MAX_BYTES:
            note = f"The file has {len(data) / 1e6:.0f} MB, too much for a page: the run itself is in {folder}."
            self.send({"note": note})
            return
        self.send({"file": f"{self.name}.{kind}", "type": TYPES[kind], "note": f"{self.name}.{kind} was saved."},
                  buffers=[data])


def file_of(kind: str, traces: Sequence[Trace], figures: list[Any]) -> bytes:
    """Return a run as the bytes of a CSV or Parquet table of its pushes, or of a page with its figures.

    Of several runs the table has the pushes one after another, with each one's run (`run`) in front, named by what
    differs; Parquet's metadata (pandas' attrs) has the experiments.
    """
    trace = traces[0]
    if kind == "html":
        from plotly.offline import get_plotlyjs

        parts = [figure.to_html(full_html=False, include_plotlyjs=False) for figure in figures]
        head = f"<meta charset='utf-8'><title>{trace.experiment.label}</title><script>{get_plotlyjs()}</script>"
        return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>".encode()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"pushes.{kind}")
        if len(traces) == 1:
            getattr(trace, f"to_{kind}")(file)
            return file.read_bytes()
        names = what_differs([trace.experiment for trace in traces], whole=True)
        getattr(table_of(traces, names), f"to_{kind}")(file, index=False)
        return file.read_bytes()


def from_link(own: Experiment, query: str | None = None) -> tuple[Experiment | None, str]:
    """Return the experiment of the page's own link (None: the link names none), and what is wrong with the link.

    `own`: the page's own settings. A run calls its factory, so a link may name only the one that the page has itself.
    """
    query = os.environ.get("QUERY_STRING", "") if query is None else query
    ours = "&".join(pair for pair in query.lstrip("?").split("&")
                    if pair.partition("=")[0].partition(".")[0] in Experiment.model_fields)
    foreign = sorted({pair.partition("=")[0] for pair in query.lstrip("?").split("&") if pair} -
                     {pair.partition("=")[0] for pair in ours.split("&")})
    unknown = [name for name in foreign if not name.startswith(("voila-", "theme", "token", "reset", "_"))]
    if unknown:
        return None, f"The link sets {unknown[0]}, which is no setting here: this page starts with its own settings."
    if not ours:
        return None, ""
    try:
        linked = Experiment.from_query(ours)
        factory = getattr(linked.problem, "factory", None)
        if factory is not None and factory != getattr(own.problem, "factory", None):
            return None, (f"The link names the function {factory} as its problem, which this page does not have: "
                          "it starts with its own settings.")
        return linked, ""
    except ExperimentError as error:
        return None, f"The link cannot be followed, so this page starts with its own settings: {error}"


def _own_path() -> str:
    """Return the notebook's path below the server's root where the kernel was told it, else ""."""
    session = os.environ.get("JPY_SESSION_NAME", "")
    return session if session.endswith(".ipynb") and not os.path.isabs(session) else ""
