"""A rank that counts what its sockets carry: a connection's writes and reads, and the kernel's own count of TCP's.

Left as `counted-<rank>.json` in the run's folder.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gdlab.backends import rank as real

TCP_INFO_BYTES_SENT = 200
"""Where linux/tcp.h has tcpi_bytes_sent and tcpi_bytes_retrans, 8 bytes each, in `struct tcp_info`."""
PATIENCE_S = 30.0


def rank(job: Any) -> None:
    """Be a rank, and write down what was sent and read."""
    counted: dict[str, Any] = {"sent": 0, "read": 0, "messages_sent": 0, "messages_read": 0}
    send_bytes, recv_into = Connection.send_bytes, Connection.recv_bytes_into

    def send(self: Connection, buf: Any) -> None:
        rest = memoryview(buf)
        while rest:
            done = os.write(self.fileno(), rest)
            counted["sent"] += done
            rest = rest[done:]

    receive = Connection._recv

    def recv(self: Connection, size: int) -> Any:
        got = receive(self, size)
        counted["read"] += got.tell()
        return got

    def sends(self: Connection, *arguments: Any) -> None:
        counted["messages_sent"] += 1
        send_bytes(self, *arguments)

    def receives(self: Connection, *arguments: Any) -> int:
        counted["messages_read"] += 1
        return recv_into(self, *arguments)

    Connection._send, Connection._recv = send, recv
    Connection.send_bytes, Connection.recv_bytes_into = sends, receives
    real.main(job)
    counted["tcp"] = sent_over_tcp(job.port)
    Path(job.folder, f"counted-{job.index}.json").write_text(json.dumps(counted))
    # Whoever leaves closes the others' sockets, which they may not have looked at yet.
    until = time.monotonic() + PATIENCE_S
    while len(list(Path(job.folder).glob("counted-*.json"))) < job.options["ranks"] and time.monotonic() < until:
        time.sleep(0.01)


def sent_over_tcp(store_port: int | None) -> int | None:
    """Return the bytes sent over this process's TCP sockets but those to the ranks' store; None: they are not counted.

    Bytes that were sent twice count once.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with one:
            if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                continue
            try:
                ports = one.getsockname()[1], one.getpeername()[1]
            except OSError:
                continue  # It listens.
            if store_port not in ports:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) < TCP_INFO_BYTES_SENT + 16:
                    return None
                sent, again = struct.unpack_from("<QQ", info, TCP_INFO_BYTES_SENT)
                found += sent - again
    return found
