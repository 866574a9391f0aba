"""What travels on a socket of `transport.Mesh`: a header of fixed size, a note, then the raw bytes of one array.

Nothing is pickled: a header holds numbers and the name of a dtype, so a stranger's bytes can only be refused.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

import numpy as np

MAGIC = b"tc3f"
MAX_AXES = 8
MAX_NOTE = 4096
# magic, tag, number, name of the dtype, bytes of note and of payload, axes, the shape padded with zeros; little-endian
HEADER = struct.Struct(f"<4sqq24sHqB{MAX_AXES}q")
# magic, rank, size: the first bytes of whoever opens a connection
HELLO = struct.Struct("<4sii")


class Disconnected(OSError):
    """The other side closed the connection, or what it sends is not ours."""


@dataclass(frozen=True)
class Frame:
    """One part of an exchange.

    Attributes:
        tag: which conversation; number: which exchange of that conversation, from 0;
        dtype: NumPy's name of it ("float32", "bfloat16"), native byte order;
        shape: of the array, at most `MAX_AXES` axes;
        payload: [nbytes] uint8, the array in C order;
        note: what the sender calls it, for messages and to compare; at most `MAX_NOTE` bytes.
    """

    tag: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    payload: np.ndarray
    note: str = ""

    def array(self, dtype: np.dtype) -> np.ndarray:
        """The payload as an array, without a copy; `dtype` is the one that `self.dtype` names."""
        return self.payload.view(dtype).reshape(self.shape)


def pack(tag: int, number: int, part: np.ndarray, note: str = "") -> Frame:
    """A frame of `part`; copies only if it is not contiguous."""
    assert part.ndim <= MAX_AXES and part.dtype.isnative and not part.dtype.hasobject
    return Frame(tag, number, part.dtype.name, part.shape, np.ascontiguousarray(part).reshape(-1).view(np.uint8), note)


def send(connection: socket.socket, frame: Frame) -> None:
    """Write one frame; blocks until the kernel has taken all of it.

    Raises:
        OSError: when the connection is gone.
    """
    shape = frame.shape + (0,) * (MAX_AXES - len(frame.shape))
    size, note = frame.payload.nbytes, frame.note.encode()[:MAX_NOTE]
    numbers = frame.tag, frame.number, frame.dtype.encode(), len(note), size, len(frame.shape), *shape
    # MSG_MORE keeps the header from leaving as a packet of its own
    connection.sendall(HEADER.pack(MAGIC, *numbers) + note, socket.MSG_MORE if size else 0)
    if size:
        connection.sendall(frame.payload.data)


def receive(connection: socket.socket) -> Frame:
    """Read one frame into a buffer of its own; blocks until it is complete.

    Raises:
        Disconnected: when the other side closed, or when the bytes are not a frame;
        OSError: when the connection broke.
    """
    header = bytearray(HEADER.size)
    fill(connection, memoryview(header))
    magic, tag, number, dtype, letters, size, axes, *shape = HEADER.unpack(header)
    if magic != MAGIC:
        raise Disconnected("sent bytes that are not a frame")
    note, payload = bytearray(letters), np.empty(size, np.uint8)
    fill(connection, memoryview(note))
    fill(connection, payload.data)
    name = dtype.rstrip(b"\0").decode()
    return Frame(tag, number, name, tuple(shape[:axes]), payload, note.decode(errors="replace"))


def greet(connection: socket.socket, rank: int, size: int) -> None:
    """Say first who calls: `rank` of `size`. Raises OSError when the connection is gone."""
    connection.sendall(HELLO.pack(MAGIC, rank, size))


def greeting(connection: socket.socket) -> tuple[int, int]:
    """Who calls: (rank, size). Raises as `receive` does."""
    hello = bytearray(HELLO.size)
    fill(connection, memoryview(hello))
    magic, rank, size = HELLO.unpack(hello)
    if magic != MAGIC:
        raise Disconnected("sent bytes that are not a greeting")
    return rank, size


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Read exactly as many bytes as `buffer` holds. Raises as `receive` does."""
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise Disconnected("closed its connection")
        buffer = buffer[count:]
