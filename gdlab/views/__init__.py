"""Pictures of a run: pure functions from a Trace to a Plotly figure, one question each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gdlab.views.bytes_sent import bytes_sent
from gdlab.views.clip import clip, clip_vectors
from gdlab.views.efficiency import efficiency
from gdlab.views.exponents import exponents
from gdlab.views.formats import formats
from gdlab.views.grad_norm import grad_norm
from gdlab.views.loss import loss
from gdlab.views.loss_scale import loss_scale
from gdlab.views.lost_updates import lost_updates
from gdlab.views.naming import what_differs
from gdlab.views.number_line import number_line
from gdlab.views.round_time import round_time
from gdlab.views.stability import stability
from gdlab.views.staleness import staleness
from gdlab.views.style import themed
from gdlab.views.timeline import timeline
from gdlab.views.trajectory import trajectory

VIEWS: dict[str, Callable[..., Any]] = {
    "trajectory": trajectory,
    "loss": loss,
    "loss_seconds": partial(loss, clock="seconds"),
    "timeline": timeline,
    "staleness": staleness,
    "grad_norm": grad_norm,
    "round_time": round_time,
    "stability": stability,
    "efficiency": efficiency,
    "number_line": number_line,
    "lost_updates": lost_updates,
    "exponents": exponents,
    "loss_scale": loss_scale,
    "formats": formats,
    "clip": clip,
    "clip_vectors": clip_vectors,
    "bytes_sent": bytes_sent,
}
"""Each view's name -> the function that draws it from a trace."""

__all__ = ["VIEWS", "bytes_sent", "clip", "clip_vectors", "efficiency", "exponents", "formats", "grad_norm", "loss",
           "loss_scale", "lost_updates", "number_line", "round_time", "stability", "staleness", "themed", "timeline",
           "trajectory", "what_differs"]
