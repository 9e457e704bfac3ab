"""Widgets that hear the kernel also on a page so slow that anywidget has given up on them."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import anywidget
import traitlets

HEARING_JS = Path(__file__).with_name("hearing.js").read_text(encoding="utf-8")
"""Defines listenForGood(model), which a widget's own script calls when it starts."""


class HearingWidget(anywidget.AnyWidget):
    """An anywidget whose script can find its model, and so its channel to the kernel; see hearing.js."""

    _id = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        name = uuid.uuid4().hex
        super().__init__(model_id=name, _id=name, **traits)
