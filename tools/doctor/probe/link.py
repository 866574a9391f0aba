"""A link between two workers: TCP, a connection for each round."""

from __future__ import annotations

import socket
import time

MESSAGE = 1 << 20  # bytes: more than the bucket of a shaped link usually lets pass at once
_PINGS = 100
_PATIENCE = 5.0  # seconds for one message or connection: below some 2 Mbit/s a link counts as broken


def listen(address: str) -> socket.socket:
    """A socket at a free port of `address`."""
    return socket.create_server((address, 0))


def serve(listener: socket.socket) -> None:
    """Take one connection, and answer each of its messages with a byte until it ends.

    A message is its length in 8 bytes, and as many bytes. A connection without one was given up by a round before.
    Raises OSError (a time-out is one).
    """
    listener.settimeout(_PATIENCE)
    while not _answer(listener.accept()[0]):
        pass


def _answer(connection: socket.socket) -> int:
    """How many messages came."""
    buffer, count = memoryview(bytearray(MESSAGE)), 0
    with connection:
        _prepare(connection)
        while head := connection.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "big")
            while left:
                received = connection.recv_into(buffer[:left])
                if not received:
                    return count
                left -= received
            connection.sendall(b"1")
            count += 1
    return count


def measure(address: str, port: int, seconds: float) -> tuple[float, float]:
    """(GB/s, microseconds one way) to whoever serves there.

    Messages of 1 MiB follow each other for `seconds`, at least three of them. The fastest counts: other processes on
    the cores of either end delay some, a slow link delays all. Raises OSError.
    """
    content = bytes(MESSAGE)
    with socket.create_connection((address, port), _PATIENCE) as connection:
        _prepare(connection)
        pings = [_send(connection, b"1") for _ in range(_PINGS)]
        _send(connection, content)  # the window of TCP opens
        took: list[float] = []
        while len(took) < 3 or sum(took) < seconds:
            took.append(_send(connection, content))
    return MESSAGE / 1e9 / min(took), min(pings) / 2 * 1e6


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(_PATIENCE)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send(connection: socket.socket, content: bytes) -> float:
    """Seconds until it is acknowledged."""
    began = time.perf_counter()
    connection.sendall(len(content).to_bytes(8, "big") + content)
    if not connection.recv(1):
        raise ConnectionResetError("the other worker has ended")
    return time.perf_counter() - began
