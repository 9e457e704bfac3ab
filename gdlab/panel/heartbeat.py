"""The page and the kernel notice each other's end: a closed or crashed page stops the workers, a dead kernel shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import traitlets

from gdlab.panel.widget import PanelWidget, script

VISIBLE_DEADLINE_S = 30.0
"""A page in front beats each second: so long a silence means that its tab, browser or network has gone."""

HIDDEN_DEADLINE_S = 180.0
"""Browsers let a page in the background run its timers only once a minute."""


class Heartbeat(PanelWidget):
    """Call `on_found` when a first page shows this panel, `on_lost` when the last has gone (closed, crashed)."""

    _esm = script("heartbeat.js")
    answer_within_s = traitlets.Float(12.0).tag(sync=True)

    def __init__(self, on_lost: Callable[[], None], on_found: Callable[[], None] = lambda: None,
                 clock: Callable[[], float] = time.monotonic, **traits: Any) -> None:
        super().__init__(self._got, **traits)
        self._on_lost, self._on_found, self._clock = on_lost, on_found, clock
        self._pages: dict[str, tuple[float, bool]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def pages(self) -> int:
        """Number of pages that are known to be open."""
        return len(self._pages)

    def watch(self, period_s: float = 1.0) -> None:
        """Watch the pages in a task of the running loop; without a loop (a plain script) there is no page to watch."""
        try:
            self._task = asyncio.get_running_loop().create_task(self._watch(period_s))
        except RuntimeError:
            self._task = None

    def _got(self, message: dict[str, Any]) -> None:
        page = message.get("beat")
        if not isinstance(page, str):
            return
        if message.get("bye"):
            if self._pages.pop(page, None) is not None and not self._pages:
                self._on_lost()
            return
        first = not self._pages
        self._pages[page] = (self._clock(), bool(message.get("hidden")))
        self.send({"reply": page})
        if first:
            self._on_found()

    async def _watch(self, period_s: float) -> None:
        while True:
            before = self._clock()
            await asyncio.sleep(period_s)
            self.check(late_s=self._clock() - before - period_s)

    def check(self, late_s: float = 0.0) -> None:
        """Forget pages that have been silent too long; `late_s` is how long the kernel itself was held up."""
        now = self._clock()
        for page, (seen, hidden) in list(self._pages.items()):
            seen += max(late_s, 0.0)  # beats wait in the queue while a cell runs: that silence is the kernel's own
            deadline = HIDDEN_DEADLINE_S if hidden else VISIBLE_DEADLINE_S
            if late_s > 0.0:
                self._pages[page] = (seen, hidden)
            if now - seen > deadline:
                del self._pages[page]
                if not self._pages:
                    self._on_lost()
