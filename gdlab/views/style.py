"""How every figure looks: one template, one palette with its dark twin, and the line that says what was measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

# Okabe and Ito (2008), "Color Universal Design", without black and yellow, which vanish on a dark and on a light page.
BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"
WORKERS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)
DASHES = ("solid", "dash", "dot")
MAX_WORKERS = 8
"""Workers that get a line of their own; more cannot be told apart."""

INK, MUTED, GRID, PAPER = "#1f2430", "#5b6472", "#dde1e8", "#ffffff"
SURFACE = ("#fbfcfd", "#e3e8ee", "#c8d0d9", "#acb7c3", "#8f9cab")
"""Low loss to high loss: greys, so that the workers' colours stand out."""

DARK = {
    INK: "#e9ebf0", MUTED: "#a9b1be", GRID: "#343a45", PAPER: "#111418", BLUE: "#2b8cd3",
    **dict(zip(SURFACE, ("#667180", "#505a67", "#3c444f", "#2a3038", "#1b1f25"), strict=True)),
}
"""What each colour of the light theme becomes in the dark one; a page swaps them without asking the kernel."""

HEIGHT = 400
CAPTION_COLUMNS = 60
"""Letters of a caption's line on a narrow chart; a page wraps the captions again by the chart's true width."""
HEAD_PX, LINE_PX = 46, 15
"""Height of the question above a plot, and of each line of the captions."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_AXIS = dict(
    automargin=True, gridcolor=GRID, zerolinecolor=GRID, linecolor=MUTED, tickfont_color=MUTED,
    title=dict(standoff=6, font=dict(size=12, color=INK)), exponentformat="power", minexponent=4,
)
TEMPLATE = go.layout.Template(
    layout=dict(
        font=dict(family=FONT, size=12, color=INK),
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        colorway=list(WORKERS),
        xaxis=_AXIS,
        yaxis=_AXIS,
        title=dict(
            x=0, xref="container", xanchor="left", y=1, yref="container", yanchor="top", pad=dict(l=10, t=12),
            font=dict(size=15, color=INK), subtitle_font=dict(size=11, color=MUTED),
        ),
        legend=dict(
            orientation="h", x=0.01, xref="container", xanchor="left", y=0, yref="container", yanchor="bottom",
            bgcolor="rgba(0,0,0,0)", itemwidth=30, tracegroupgap=0, traceorder="normal", font_size=11,
        ),
        hoverlabel=dict(font_size=12),
        modebar=dict(bgcolor="rgba(0,0,0,0)", color=MUTED, activecolor=INK, orientation="v"),
        uirevision="gdlab",
        bargap=0.25,
        hovermode="closest",
    )
)


def worker_line(worker: int, **more: Any) -> dict[str, Any]:
    """Return a worker's own colour and dash as Plotly's `line`."""
    return dict(color=worker_colour(worker), dash=DASHES[worker // len(WORKERS) % len(DASHES)], **more)


def worker_colour(worker: int) -> str:
    """Return a worker's own colour."""
    return WORKERS[worker % len(WORKERS)]


def caption(environment: Mapping[str, Any] | None) -> str:
    """Say whether it was simulated or measured, and on what; `environment` is the machine's part of a run."""
    env = dict(environment or {})
    if not env.get("clock"):
        return "No run yet."
    ranks = env.get("ranks") or env.get("workers")
    if env["clock"] == "virtual":
        return "Simulated (virtual time)" + (f": {_count(ranks, 'worker')}." if ranks else ".")
    cores, threads, device = env.get("cores"), env.get("threads"), str(env.get("device") or "cpu")
    device = "cpu" if device == "auto" else device
    words = [_count(ranks, "rank") if ranks else "ranks"]
    if cores:
        words[0] += f" on {_count(cores, 'core')}"
    beside = env.get("beside") or 0
    if beside:
        words.append(f"{_count(beside, 'process')} of other runs beside")
    if ranks and cores and ranks + beside > cores and device == "cpu":
        words.append("oversubscribed")
    if threads:
        words.append(f"{_count(threads, 'thread')} each")
    if device != "cpu":
        words.append(device)
    if env.get("group_backend") not in (None, "", "none"):
        words.append(str(env["group_backend"]))
    note = str(env.get("note") or "").strip().rstrip(".")
    return f"Measured: {', '.join(words)}, wall clock." + (f" {note[0].upper()}{note[1:]}." if note else "")


def captions(names: Sequence[str], environments: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Return the captions of runs that are compared: one if it holds for all, else each with the runs' names."""
    runs: dict[str, list[str]] = {}
    for name, environment in zip(names, environments, strict=True):
        runs.setdefault(caption(environment), []).append(name)
    if len(runs) < 2:
        return list(runs)
    of = {text: whose[0] + (f" and {len(whose) - 1} more" if len(whose) > 1 else "") for text, whose in runs.items()}
    return [f"{whose} – {text}" for text, whose in of.items()]


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("s") else "s")


def headline(question: str, *captions: str) -> dict[str, Any]:
    """Return the layout's title (the question, the captions below it, wrapped for a narrow chart) and its margin."""
    captions = tuple(dict.fromkeys(text for text in captions if text))
    lines = [line for text in captions for line in textwrap.wrap(text, CAPTION_COLUMNS)]
    return dict(
        title=dict(text=question, subtitle=dict(text="<br>".join(lines))),
        margin=dict(l=52, r=14, t=HEAD_PX + LINE_PX * len(lines), b=44, pad=0),
        meta=dict(captions=captions),
    )


def figure(question: str, x: str, y: str, *captions: str, height: int = HEIGHT) -> go.Figure:
    """Return an empty figure that asks one question; `x` and `y` name the axes with their units."""
    fig = go.Figure(layout=dict(template=TEMPLATE, height=height, autosize=True, **headline(question, *captions)))
    fig.update_xaxes(title_text=x).update_yaxes(title_text=y)
    return describe(fig, f"{question} No data yet.")


def describe(fig: go.Figure, sentence: str) -> go.Figure:
    """Attach a sentence that says what the figure shows, for people who cannot see it."""
    fig.layout.meta = {**fig.layout.meta, "description": sentence}
    return fig


def remark(fig: go.Figure, *texts: str) -> dict[str, Any]:
    """Return the layout of the figure's headline with more lines: what a reader must know to read it."""
    return headline(fig.layout.title.text, *fig.layout.meta["captions"], *texts)


def empty(fig: go.Figure, text: str) -> go.Figure:
    """Say in the middle of the figure why it has nothing to draw, and hide the numbers at its axes."""
    note = dict(
        name="message", text="<br>".join(textwrap.wrap(text, 42)), showarrow=False, font=dict(size=13, color=MUTED),
        xref="paper", yref="paper", x=0.5, y=0.5,
    )
    fig.layout.annotations = [*fig.layout.annotations, note]
    return fig.update_xaxes(showticklabels=False, ticks="").update_yaxes(showticklabels=False, ticks="")


def filled(annotations: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the layout that undoes `empty`; `annotations` are those that the figure has otherwise."""
    shown = dict(showticklabels=True)
    return dict(annotations=list(annotations), xaxis=shown, yaxis=dict(shown))


def workers_legend() -> dict[str, Any]:
    """Return a legend whose entries are the workers' numbers: short enough for a narrow chart."""
    return dict(title=dict(text="worker", side="left", font=dict(size=11, color=MUTED)))


def log_axis(*values: Any) -> dict[str, Any]:
    """Return a logarithmic axis with tick labels of one size, at least two where it spans the given values."""
    low = min((float(np.min(array)) for array in values if np.size(array)), default=1.0)
    high = max((float(np.max(array)) for array in values if np.size(array)), default=1.0)
    # So few that 1, 2 and 5 are chosen rather than 1 to 9; over more decades three would make only every second one.
    return dict(type="log", tickformat="~g", nticks=4 if 0.0 < low and high > 300.0 * low else 3)


def recolour(value: Any, colours: Mapping[str, str]) -> Any:
    """Return a figure's JSON with every colour replaced that `colours` names."""
    if isinstance(value, str):
        return colours.get(value, value)
    if isinstance(value, dict):
        return {key: recolour(item, colours) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [recolour(item, colours) for item in value]
    return value


def themed(fig: go.Figure, dark: bool = True) -> go.Figure:
    """Return the figure in the dark theme (or back in the light one), for a picture to be saved."""
    colours = DARK if dark else {value: key for key, value in DARK.items()}
    return go.Figure(recolour(fig.to_dict(), colours))
