"""What the panel's own widgets share: a script beside the Python file, and messages that arrive where they should."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import traitlets

LISTEN_JS = Path(__file__).with_name("listen.js").read_text(encoding="utf-8")
"""Defines listenForGood(model), which a widget's own script calls when it starts."""

_HELLO_JS = """
// What the kernel said before this page could hear is asked for once more.
const hello = ({ model }) => void listenForGood(model).then(() => model.send({ hello: true }));
"""


def script(name: str) -> str:
    """Return the text of a script in this folder; it may use `make`, and `hello` as a widget's `initialize`."""
    make, own = (Path(__file__).with_name(file).read_text(encoding="utf-8") for file in ("make.js", name))
    return LISTEN_JS + _HELLO_JS + make + own


def at_once(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function here and now."""
    return function(*args)


class ReliableWidget(anywidget.AnyWidget):
    """An anywidget that hears the kernel also on a page so slow that anywidget has given up on it; see listen.js."""

    _id = traitlets.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        name = uuid.uuid4().hex
        super().__init__(model_id=name, _id=name, **traits)


class PanelWidget(ReliableWidget):
    """Hand each message of the page to `got`, by way of `call`: messages may come in on any thread."""

    def __init__(self, got: Callable[[dict[str, Any]], None], call: Callable[..., Any] = at_once,
                 **traits: Any) -> None:
        super().__init__(**traits)

        def hear(_widget: Any, message: Any, _buffers: Any) -> None:
            if not isinstance(message, dict):
                return
            if message.get("hello"):
                self.send_state(list(type(self).class_own_traits(sync=True)))
            else:
                call(got, message)

        self.on_msg(hear)
