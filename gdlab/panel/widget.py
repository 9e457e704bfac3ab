"""What the panel's own widgets share: a script beside the Python file, and messages that arrive where they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gdlab.panel.hearing import HEARING_JS, HearingWidget

_HELLO_JS = """
// What the kernel said before this page could hear is asked for once more.
const hello = ({ model }) => void listenForGood(model).then(() => model.send({ hello: true }));
"""


def script(name: str) -> str:
    """Return the text of a script in this folder; it may use `make`, and `hello` as a widget's `initialize`."""
    make, own = (Path(__file__).with_name(file).read_text(encoding="utf-8") for file in ("make.js", name))
    return HEARING_JS + _HELLO_JS + make + own


def at_once(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function here and now."""
    return function(*args)


class PanelWidget(HearingWidget):
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
