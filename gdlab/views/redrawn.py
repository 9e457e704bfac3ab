"""The views without a form of their own for a run that goes on: drawn anew from what it has written, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from gdlab.views import style
from gdlab.views.bytes_sent import QUESTION as BYTES_SENT
from gdlab.views.bytes_sent import bytes_sent
from gdlab.views.clip import QUESTION as CLIP
from gdlab.views.clip import VECTORS, clip, clip_vectors
from gdlab.views.efficiency import QUESTION as EFFICIENCY
from gdlab.views.efficiency import efficiency
from gdlab.views.exponents import QUESTION as EXPONENTS
from gdlab.views.exponents import exponents
from gdlab.views.formats import QUESTION as FORMATS
from gdlab.views.formats import formats
from gdlab.views.loss_scale import QUESTION as LOSS_SCALE
from gdlab.views.loss_scale import loss_scale
from gdlab.views.lost_updates import QUESTION as LOST_UPDATES
from gdlab.views.lost_updates import lost_updates
from gdlab.views.number_line import NOTHING, number_line
from gdlab.views.number_line import QUESTION as NUMBER_LINE
from gdlab.views.round_time import QUESTION as ROUND_TIME
from gdlab.views.round_time import round_time
from gdlab.views.stability import QUESTION as STABILITY
from gdlab.views.stability import stability

if TYPE_CHECKING:
    from gdlab.trace import Trace

REDRAWN: dict[str, tuple[Callable[..., go.Figure], str]] = {
    "number_line": (number_line, NUMBER_LINE),
    "lost_updates": (lost_updates, LOST_UPDATES),
    "exponents": (exponents, EXPONENTS),
    "loss_scale": (loss_scale, LOSS_SCALE),
    "formats": (formats, FORMATS),
    "clip": (clip, CLIP),
    "clip_vectors": (clip_vectors, VECTORS),
    "round_time": (round_time, ROUND_TIME),
    "stability": (stability, STABILITY),
    "efficiency": (efficiency, EFFICIENCY),
    "bytes_sent": (bytes_sent, BYTES_SENT),
}
"""Each such view's name -> the function that draws it, and the question that it answers."""

SEVERAL = ("lost_updates", "formats", "clip", "round_time", "stability", "efficiency", "bytes_sent")
"""Those that show runs side by side; the others show the first."""

LEAST_PAUSE_S, SHARE = 0.5, 0.25


class Redrawn:
    """A view drawn anew while a run goes on, twice a second at most and in a quarter of the time at most."""

    def __init__(self, name: str, traces: Sequence[Trace] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._draw, self._question = REDRAWN[name]
        self._traces = traces if name in SEVERAL else traces[:1]
        self._clock, self._due, self._next_s = clock, False, 0.0

    def figure(self, why: str = NOTHING) -> go.Figure:
        """Return the figure before anything has happened, or one that says why there is nothing to see."""
        return style.empty(style.figure(self._question, "", "", style.caption(None)), why)

    def update(self, chunk: Any) -> list[dict[str, Any]]:
        """Return the chart operations for what is new."""
        now = self._clock()
        self._due = self._due or bool(chunk) or len(self._traces) > 1  # the chunk tells of the first run only
        if not self._due or now < self._next_s or not self._traces:
            return []
        try:
            figure = self._draw(*self._traces)
        except Exception as error:  # the runs go on, whatever one of the figures cannot show
            figure = self.figure(f"It could not be drawn: {type(error).__name__}: {error}")
        self._next_s, self._due = self._clock() + max(LEAST_PAUSE_S, (self._clock() - now) / SHARE), False
        return [{"op": "figure", "figure": figure}]
