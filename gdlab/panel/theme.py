"""Whether the page is dark: charts follow it in the page itself, the kernel needs it only for pictures to be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

THEME_JS = Path(__file__).with_name("theme.js").read_text(encoding="utf-8")
"""Defines isDark() and watchTheme(callback) for a widget's own script."""


class ThemeWatch(anywidget.AnyWidget):
    """Know whether the page that shows this widget is dark; observe the trait `dark` for changes."""

    _esm = (
        THEME_JS
        + """
export default {
  initialize({ model }) {
    const tell = () => model.send({ dark: isDark() });
    tell();
    return watchTheme(tell);
  },
};
"""
    )
    dark = traitlets.Bool(False)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._got)

    def _got(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        if isinstance(message.get("dark"), bool):
            self.dark = message["dark"]
