"""Numbers over a socket."""

from __future__ import annotations

import socket
import struct

NUMBER = struct.Struct("!d")


def receive(connection: socket.socket) -> float:
    """The next number of a connection."""
    data = b""
    while len(data) < NUMBER.size:
        part = connection.recv(NUMBER.size - len(data))
        if not part:
            raise ConnectionError("the other end has gone")
        data += part
    return float(NUMBER.unpack(data)[0])
