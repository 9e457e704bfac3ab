"""The sockets of one run, made before its processes so that each inherits its own."""

from __future__ import annotations

import socket
from typing import Any


class Sockets:
    """A pair of sockets for each link of a run, and the socket on which its ranks' store listens."""

    def __init__(self, request: dict[str, Any]):
        self._sockets: list[tuple[str, str, socket.socket]] = []
        for one, other in request.get("links", ()):
            near, far = socket.socketpair()
            self._sockets += [(one, other, near), (other, one, far)]
        self._owner = request.get("listen")
        self._listener: socket.socket | None = None
        if self._owner:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)

    def of(self, name: str) -> dict[str, Any]:
        """Return what one process inherits, as the last words of its `Job`."""
        listener = self._listener
        return {
            "links": {other: end.fileno() for one, other, end in self._sockets if one == name},
            "listen": listener.fileno() if listener and name == self._owner else None,
            "port": listener.getsockname()[1] if listener else None,
        }

    def keep_only(self, name: str) -> None:
        """Close, in the process of this name, all that belongs to others."""
        for one, _, end in self._sockets:
            end.detach() if one == name else end.close()
        if self._listener:
            self._listener.detach() if name == self._owner else self._listener.close()

    def close(self) -> None:
        for _, _, end in self._sockets:
            end.close()
        if self._listener:
            self._listener.close()
