"""A live chart: any Plotly figure on a page, changed by small binary messages, whole again after every reload.

The kernel and the page hold the same state (data, layout) under a sequence number. A change is sent with the number
that it applies to; a page that has another number asks for the whole state. A page that falls behind is sent nothing
until it has drawn what it has, and then the whole: so the messages on their way are bounded, whatever the page's speed.
"""

from __future__ import annotations

import base64
import functools
import gzip
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import anywidget
import numpy as np
import plotly
import plotly.graph_objects as go
import traitlets

from gdlab.panel.widget import LISTEN_JS, ReliableWidget
from gdlab.views.style import DARK, HEAD_PX, LINE_PX

MAX_AHEAD = 4
"""Changes that may be on their way to the page before the kernel waits for its answer."""

_JS = "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("theme.js", "chart.js"))
_GATE = "const gate = (globalThis.__gdlabPlotly ??= (() => { let open; const ready = new Promise((r) => (open = r)); "
_GATE += "return { ready, open }; })());\n"
_SIZES = f"const HEAD_PX = {HEAD_PX}, LINE_PX = {LINE_PX};\n"
_DTYPES = {"float64", "float32", "int32", "uint32", "int16", "uint16", "int8", "uint8"}


@functools.cache
def _plotly_gz() -> bytes:
    source = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    return gzip.compress(source.read_bytes(), 3, mtime=0)


class PlotlySource(anywidget.AnyWidget):
    """Bring plotly.js to the page, once, whatever the number of charts; each chart waits at the gate until it is there.

    It is started by the first chart that is on the page: before that, running it would hold up the other widgets,
    which anywidget gives two seconds to start.
    """

    _esm = (
        _GATE
        + """
export default {
  initialize({ model }) {
    const source = model.get("_gz");
    if (!source?.byteLength || gate.load) return;
    gate.load = async () => {
      gate.load = () => {};
      const body = new Blob([source]).stream().pipeThrough(new DecompressionStream("gzip"));
      const text = await new Response(body).blob();
      const script = document.createElement("script");
      script.onload = () => gate.open(globalThis.Plotly);
      script.src = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
      document.head.append(script);
    };
    if (gate.wanted) gate.load();
  },
};
"""
    )
    _gz = traitlets.Bytes(b"").tag(sync=True)
    _one: ClassVar[PlotlySource | None] = None

    @classmethod
    def ensure(cls) -> None:
        """Make sure that this kernel's page has plotly.js."""
        if cls._one is None or cls._one.comm is None:
            cls._one = cls(_gz=_plotly_gz())


class Chart(ReliableWidget):
    """Show a Plotly figure and keep it up to date: `show(figure)` replaces it, `apply(operations)` changes it.

    May be called from any thread, before a page is there and while pages come and go; see `gdlab.views.live` for the
    operations.
    """

    _esm = _GATE + LISTEN_JS + _SIZES + _JS
    _state = traitlets.Dict().tag(sync=True)
    _dark = traitlets.Dict(DARK).tag(sync=True)

    def __init__(self, figure: go.Figure | Mapping[str, Any] | None = None, title: str = "", **traits: Any) -> None:
        PlotlySource.ensure()
        self._lock = threading.RLock()
        self._title = title
        self._figure = _plain(figure if figure is not None else go.Figure())
        self._seq, self._seen, self._page, self._behind, self._live = 0, 0, False, False, False
        super().__init__(**traits)
        self.layout.min_width, self.layout.width = "0", "100%"
        self.on_msg(self._from_page)

    @property
    def figure(self) -> dict[str, Any]:
        """The figure as it is now: {"data": [...], "layout": {...}}, with numpy arrays."""
        with self._lock:
            return self._figure

    @property
    def sequence(self) -> int:
        """The number of the latest state; the page's is `seen` when it has drawn everything."""
        return self._seq

    @property
    def seen(self) -> int:
        """The number of the latest state that a page has said it has."""
        return self._seen

    def show(self, figure: go.Figure | Mapping[str, Any], title: str | None = None) -> None:
        """Show another figure; it always reaches the page."""
        plain = _plain(figure)
        with self._lock:
            self._title = self._title if title is None else title
            self._figure = plain
            self._seq, self._live = self._seq + 1, False
            if self._page:
                self._send_whole()

    def apply(self, operations: Iterable[Mapping[str, Any]]) -> None:
        """Change the figure by operations, in order; raises ValueError for one that is not known."""
        operations = list(operations)
        if not operations:
            return
        with self._lock:
            for operation in operations:
                change(self._figure, operation)
            before, self._seq, self._live = self._seq, self._seq + 1, True
            if not self._page:
                return
            if self._behind or before - self._seen >= MAX_AHEAD:
                self._behind = True
                return
            put, buffers = _collector()
            encoded = [encode(_sendable(operation), put) for operation in operations]
            self.send({"op": "change", "from": before, "seq": self._seq, "operations": encoded}, buffers)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> dict[str, Any]:
        """Return the widget's state; whoever asks for it (a page that was loaded anew) gets the figure of now."""
        state = super().get_state(key, drop_defaults)
        if "_state" in state:
            with self._lock:
                state["_state"] = self._whole(lambda data: data)
        return state

    def _whole(self, put: Callable[[bytes], Any]) -> dict[str, Any]:
        figure = encode(self._figure, put)
        return {"seq": self._seq, "live": self._live, "title": self._title, **figure}

    def _send_whole(self) -> None:
        put, buffers = _collector()
        self._behind = False
        self.send({"op": "whole", "state": self._whole(put)}, buffers)

    def _from_page(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        seq = message.get("seq")
        if not isinstance(seq, int):
            return
        with self._lock:
            if message.get("op") == "ready":
                self._page, self._seen = True, self._seq
                self._behind = False
                if seq != self._seq:
                    self._send_whole()
            elif message.get("op") == "seen":
                self._seen = max(self._seen, min(seq, self._seq))
                if self._behind:
                    self._send_whole()


def change(figure: dict[str, Any], operation: Mapping[str, Any]) -> None:
    """Apply one operation to {"data", "layout"}; the page does the same to its copy."""
    kind = operation["op"]
    if kind == "figure":
        figure.update(_plain(operation["figure"]))
    elif kind == "relayout":
        _merge(figure["layout"], _plain_value(operation["layout"]))
    elif kind in ("extend", "replace"):
        trace = figure["data"][operation["trace"]]
        for key, value in operation.items():
            if key in ("op", "trace"):
                continue
            if kind == "extend":
                trace[key] = np.concatenate([np.asarray(trace.get(key, ()), np.float64), np.asarray(value, np.float64)])
            else:
                _merge(trace, {key: _plain_value(value)})
    else:
        raise ValueError(f"{kind!r} is no chart operation: it must be extend, replace, relayout or figure.")


def _merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _sendable(operation: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(operation)
    if plain["op"] == "figure":
        plain["figure"] = _plain(plain["figure"])
    elif plain["op"] == "extend":
        points = {key: np.asarray(value, np.float64) for key, value in plain.items() if key not in ("op", "trace")}
        plain.update(points)
    return plain


def _plain(figure: go.Figure | Mapping[str, Any]) -> dict[str, Any]:
    """Return a figure as dicts, lists and numpy arrays of its own."""
    source = figure.to_plotly_json() if hasattr(figure, "to_plotly_json") else figure
    return {"data": [_plain_value(trace) for trace in source.get("data", ())],
            "layout": _plain_value(source.get("layout", {}))}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "bdata" in value and "dtype" in value:  # Plotly's own form of an array
            array = np.frombuffer(base64.b64decode(value["bdata"]), np.dtype(value["dtype"]))
            shape = [int(size) for size in str(value["shape"]).split(",")] if "shape" in value else [-1]
            return array.reshape(shape)
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value


def _collector() -> tuple[Callable[[bytes], int], list[bytes]]:
    buffers: list[bytes] = []

    def put(data: bytes) -> int:
        buffers.append(data)
        return len(buffers) - 1

    return put, buffers


def encode(value: Any, put: Callable[[bytes], Any]) -> Any:
    """Return a value for a message: arrays become {"dtype", "shape", "bytes": put(their bytes)}, NaN becomes None."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "fiub":
            return [encode(item, put) for item in value.tolist()]
        if value.dtype.name not in _DTYPES:
            value = value.astype(np.float64)
        little = np.ascontiguousarray(value, value.dtype.newbyteorder("<"))
        return {"dtype": value.dtype.name, "shape": list(value.shape), "bytes": put(little.tobytes())}
    if isinstance(value, Mapping):
        return {key: encode(item, put) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item, put) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value
