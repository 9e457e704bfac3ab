"""From a run to the page: one task follows the run's files and hands over what is new, at most ten times a second."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gdlab.backends import launch, launch_all
from gdlab.experiment import Experiment
from gdlab.panel.variants import ENDED, VariantRuns
from gdlab.trace import Chunk, Follower

FRAME_S = 0.1
"""Ten frames a second: more is not seen, and each costs the page a redraw."""


@dataclass(frozen=True)
class Frame:
    """Hold what one look at a run brought: what is new, what the views made of it, and whether it was the last."""

    run: Any
    chunk: Chunk
    made: Any
    last: bool


def _launch(experiments: Sequence[Experiment], backend: str) -> Any:
    if len(experiments) == 1:
        return launch(experiments[0], backend)
    return VariantRuns(launch_all(experiments, backend))


class Watch:
    """Look at one run again and again; `make` turns a chunk into what the page is sent (it may take its time)."""

    def __init__(self, run: Any, make: Callable[[Any, Chunk], Any]) -> None:
        self.run, self._make = run, make
        self._follower: Follower | None = None

    def look(self) -> Frame:
        """Return what is new; a run that has ended is read once more after its end, so that nothing is missed."""
        last = self.run.state in ENDED  # asked before reading: what was written until then is in this frame
        if self._follower is None:
            self._follower = Follower(self.run.folder)
        chunk = self._follower.read()
        return Frame(self.run, chunk, self._make(self.run, chunk), last)


async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a thread of its own and wait for it without holding up the loop (or the kernel's exit)."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        try:
            result, error = function(*args), None
        except BaseException as raised:  # it travels to whoever waits
            result, error = None, raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            pass  # the loop has gone, and with it whoever waited

    threading.Thread(target=work, name="gdlab-panel", daemon=True).start()
    return await future


class Runner:
    """Own the page's run: start, follow, stop. One run at a time; every callback is called on the loop, one by one.

    `begin(run)`, `frame(Frame)` and `end(run or None, finished or None, error or None)` are called in this order;
    `make(run, chunk)` and, after the last frame, `finish(run)` are called in a thread: they may take their time.
    """

    def __init__(self, begin: Callable[[Any], None], make: Callable[[Any, Chunk], Any],
                 frame: Callable[[Frame], None], finish: Callable[[Any], Any],
                 end: Callable[[Any, Any, BaseException | None], None]) -> None:
        self._begin, self._make, self._frame, self._finish, self._end = begin, make, frame, finish, end
        self._errands: set[asyncio.Task[None]] = set()
        self.run: Any = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    @property
    def busy(self) -> bool:
        """Whether a run is going on."""
        return self._task is not None and not self._task.done()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function where the page's state lives, whatever thread this is."""
        try:
            here: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._loop is None or here is self._loop:
            function(*args)
        else:
            self._loop.call_soon_threadsafe(function, *args)

    def start(self, experiments: Sequence[Experiment], backend: str) -> bool:
        """Start a run of each experiment, all at once; the first one's frames are followed.

        False where one is going on, or where there is no loop to follow it in (a plain script).
        """
        if self.busy or self._loop is None:
            return False
        self._stopping = False
        self._task = self._loop.create_task(self._follow(experiments, backend))
        return True

    def stop(self) -> None:
        """Stop the run, if there is one; what it did so far is kept. May be called from any thread."""
        self._stopping = True
        run = self.run
        if run is not None:
            run.stop()

    def follow(self, experiments: Sequence[Experiment], backend: str) -> Any:
        """Run to the end in the calling thread, with the same frames, and return the Run: for a cell that waits."""
        self._stopping = False
        run = self.run = _launch(experiments, backend)
        try:
            self._begin(run)
            watch = Watch(run, self._make)
            while not self._shown(watch.look()):
                time.sleep(FRAME_S)
        except BaseException:
            run.stop()
            raise
        finally:
            self.run = None
        return run

    def _shown(self, frame: Frame) -> bool:
        self._frame(frame)
        return frame.last

    def later(self, work: Callable[[], Any], then: Callable[[Any], None],
              failed: Callable[[BaseException], None] = lambda error: None) -> None:
        """Do something slow in a thread and hand its result to `then` on the loop (at once where there is no loop)."""
        if self._loop is None:
            then(work())
            return

        async def errand() -> None:
            try:
                then(await in_thread(work))
            except Exception as error:
                failed(error)

        task = self._loop.create_task(errand())
        self._errands.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._errands.discard)

    async def _follow(self, experiments: Sequence[Experiment], backend: str) -> None:
        run, finished, failure = None, None, None
        try:
            run = self.run = await in_thread(_launch, experiments, backend)
            if self._stopping:
                run.stop()
            self._begin(run)
            watch = Watch(run, self._make)
            last = False
            while not last:
                began = time.monotonic()
                last = self._shown(await in_thread(watch.look))
                # A frame that took long is followed by as long a pause: the page and the kernel get their turn.
                await asyncio.sleep(0 if last else max(FRAME_S, 2 * (time.monotonic() - began)))
            finished = await in_thread(self._finish, run)
        except Exception as error:  # nobody awaits this task: what went wrong belongs on the page
            failure = error
            if run is not None:
                run.stop()
                while run.state not in ENDED:  # only then may the next one start
                    await asyncio.sleep(FRAME_S)
        finally:
            self.run = None
        self._end(run, finished, failure)
