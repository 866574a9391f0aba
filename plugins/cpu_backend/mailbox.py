"""This module defines the messages between two ranks of a `transport.Mesh`, keeps the messages that have arrived, and
lets a call wait for the messages that the call needs.

A `Frame` on a socket is a header of fixed size, a note, then the raw bytes of one array. Nothing is pickled: a header
holds only numbers and the name of a dtype, so bytes from another program are refused and never executed.

The `Mailbox` of a rank holds the messages that have arrived and that no call has requested yet. The error of a call
that cannot end says all that is known: for which rank the call waits, why that rank is lost, which message that rank
sent instead, and in which call that rank waits itself.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from plugins.errors import CLOSED, OUT_OF_REACH, ClusterError

MAGIC = b"tc3f"
MAX_AXES = 8
MAX_NOTE = 4096
# magic, tag, number, name of the dtype, bytes of note and of payload, axes, the shape padded with zeros; little-endian
HEADER = struct.Struct(f"<4sqq24sHqB{MAX_AXES}q")
# magic, rank, size: the first bytes of whoever opens a connection
HELLO = struct.Struct("<4sii")
# tag of frames that carry no data but say, in their note, what a rank waits in
STATUS = -1
# seconds after which a rank that waits tells the others, unless it gives up soon
PATIENCE = 5.0
# seconds that the end of a rank waits until what it has sent has left, which takes long on a busy machine; it does not
# wait for a peer that is gone
LEAVING = 60.0


class Disconnected(OSError):
    """This error says that the rank at the other end of a connection closed the connection, or sent bytes that are not
    a message of this module.
    """


@dataclass(frozen=True)
class Frame:
    """A `Frame` is one message of an exchange: the array that one rank sends to another rank.

    Attributes:
        tag: the number of the conversation.
        number: the number of the exchange in this conversation, from 0.
        dtype: NumPy's name of it ("float32", "bfloat16"), native byte order.
        shape: the shape of the array, at most `MAX_AXES` axes.
        payload: [nbytes] uint8, the array in C order.
        note: the sender's name of the exchange, for messages and for comparison; at most `MAX_NOTE` bytes.
    """

    tag: int
    number: int
    dtype: str
    shape: tuple[int, ...]
    payload: np.ndarray
    note: str = ""

    def array(self, dtype: np.dtype) -> np.ndarray:
        """Return the payload as an array, without a copy; `dtype` is the NumPy type that `self.dtype` names."""
        return self.payload.view(dtype).reshape(self.shape)


def pack(tag: int, number: int, part: np.ndarray, note: str = "") -> Frame:
    """Return a `Frame` that holds the array `part`; the array is copied only if it is not contiguous."""
    assert part.ndim <= MAX_AXES and part.dtype.isnative and not part.dtype.hasobject
    return Frame(tag, number, part.dtype.name, part.shape, np.ascontiguousarray(part).reshape(-1).view(np.uint8), note)


def send(connection: socket.socket, frame: Frame) -> None:
    """Write one frame to the connection; the call blocks until the kernel has taken the whole frame.

    Raises:
        OSError: the connection is lost.
    """
    shape = frame.shape + (0,) * (MAX_AXES - len(frame.shape))
    size, note = frame.payload.nbytes, frame.note.encode()[:MAX_NOTE]
    numbers = frame.tag, frame.number, frame.dtype.encode(), len(note), size, len(frame.shape), *shape
    # MSG_MORE keeps the header from leaving as a packet of its own
    connection.sendall(HEADER.pack(MAGIC, *numbers) + note, socket.MSG_MORE if size else 0)
    if size:
        connection.sendall(frame.payload.data)


def receive(connection: socket.socket) -> Frame:
    """Read one frame from the connection into a new buffer, and return the frame; the call blocks until the frame is
    complete.

    Raises:
        Disconnected: the other side closed the connection, or the bytes are not a frame;
        OSError: the connection broke.
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
    """Send the greeting by which the rank at the other end of a connection learns the number of this rank and the
    number of ranks. The function raises OSError if the connection is closed.
    """
    connection.sendall(HELLO.pack(MAGIC, rank, size))


def greeting(connection: socket.socket) -> tuple[int, int]:
    """Read the greeting from the rank at the other end of a connection; return the number of that rank and the number
    of ranks. The function raises Disconnected or OSError if the connection breaks, or if the bytes are not a greeting.
    """
    hello = bytearray(HELLO.size)
    fill(connection, memoryview(hello))
    magic, rank, size = HELLO.unpack(hello)
    if magic != MAGIC:
        raise Disconnected("sent bytes that are not a greeting")
    return rank, size


def fill(connection: socket.socket, buffer: memoryview) -> None:
    """Read bytes from the connection until `buffer` is full. The function raises Disconnected or OSError if the
    connection closes before the buffer is full.
    """
    while buffer:
        count = connection.recv_into(buffer)
        if count == 0:
            raise Disconnected(CLOSED)
        buffer = buffer[count:]


@dataclass
class Call:
    """A `Call` records the frames for which one call of an exchange on this rank still waits.

    Attributes:
        where: the name of the call in messages.
        tag: its conversation.
        named: whether other ranks use the same name.
        numbers: peer -> the number of the frame that is due from it.
        unsent, missing: the peers to which the frame has not been sent, and the peers from which no frame has arrived.
        arrived: the parts that have arrived.
    """

    where: str
    tag: int
    named: bool
    numbers: dict[int, int]
    unsent: set[int]
    missing: set[int]
    arrived: dict[int, Frame] = field(default_factory=dict)


class Mailbox:
    """A `Mailbox` holds the frames that have arrived at this rank, by sender and tag, and records which other ranks are
    lost or waiting.

    Args:
        rank: the rank that owns the mailbox.
        timeout: the seconds that a call may wait.
        tell: a function that sends a text to all other ranks, which says where this rank waits.
    """

    def __init__(self, rank: int, timeout: float, tell: Callable[[str], None]):
        self.rank, self.timeout = rank, timeout
        self._tell = tell
        self.closing = False
        # one condition guards all that follows; whoever changes any of it wakes every waiting call
        self.changed = threading.Condition()
        self._inbox: defaultdict[tuple[int, int], deque[Frame]] = defaultdict(deque)
        self._said: dict[int, str] = {}
        # rank -> why it is lost; in the order of the losses, because the first one is the cause
        self._lost: dict[int, str] = {}
        # rank -> why nothing can be sent to it. A peer that got all its parts may close first and be lost, but no harm
        self.unreachable: dict[int, OSError] = {}
        # peer -> frames that nobody waits for and that have not left yet
        self.buffered: defaultdict[int, int] = defaultdict(int)

    def put(self, peer: int, frame: Frame) -> None:
        """Store a frame (a message) that has arrived from another rank."""
        with self.changed:
            if frame.tag == STATUS:
                self._said[peer] = frame.note
                return
            self._inbox[peer, frame.tag].append(frame)
            self.changed.notify_all()

    def sent(self, peer: int, call: Call | None) -> None:
        """Record that a frame for this peer was written to the peer's socket; the frame belongs to `call` or, if `call`
        is None, to a buffered send.
        """
        with self.changed:
            if call is None:
                self.buffered[peer] -= 1
            else:
                call.unsent.discard(peer)
            self.changed.notify_all()

    def lose(self, peer: int, error: OSError) -> None:
        """Record that this peer will not send any more frames. A process that ends before it has read everything resets
        its connections, so a reset is treated like an orderly end.
        """
        with self.changed:
            error = self.unreachable.get(peer, error)
            closed = isinstance(error, ConnectionResetError | BrokenPipeError)
            told = str(error) if isinstance(error, Disconnected) else f"{OUT_OF_REACH}: {error}"
            self._lost.setdefault(peer, CLOSED if closed else told)
            self.changed.notify_all()

    def unreach(self, peer: int, error: OSError) -> None:
        """Record that nothing can be sent to this peer any more; frames that the peer sent before may still arrive."""
        with self.changed:
            self.unreachable[peer] = error
            self.changed.notify_all()

    def close(self) -> None:
        """Make every waiting call raise ClusterError, and wait up to a minute until buffered frames are sent."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
            self.changed.wait_for(
                lambda: not any(count for peer, count in self.buffered.items() if peer not in self.unreachable),
                min(LEAVING, self.timeout),
            )

    def wait(self, call: Call) -> None:
        """Wait until all frames of the call have been sent and received, then return.

        Raises:
            ClusterError: a peer cannot send, or does not send in time.
        """
        begin = time.monotonic()
        untold = begin + min(PATIENCE, self.timeout / 4) if call.named else None
        with self.changed:
            while not self._complete(call):
                gone = (call.missing | (call.unsent & self.unreachable.keys())) & self._lost.keys()
                if gone or self.closing:
                    raise ClusterError(self._tell_lost(call, gone))
                now = time.monotonic()
                if now >= begin + self.timeout:
                    raise ClusterError(self._tell_late(call))
                if untold is not None and now >= untold:
                    self._tell(f"waits in {call.where.removeprefix(f'rank {self.rank}, ')}")
                    untold = None
                ends = begin + self.timeout
                self.changed.wait((ends if untold is None else untold) - now)
        if call.named and untold is None:
            self._tell("")

    def _complete(self, call: Call) -> bool:
        for peer in list(call.missing):
            if arrived := self._inbox[peer, call.tag]:
                call.arrived[peer] = arrived.popleft()
                call.missing.discard(peer)
        return not call.missing and not call.unsent

    def _tell_lost(self, call: Call, gone: set[int]) -> str:
        if self.closing:
            return f"{call.where}: the mesh of this rank was closed"
        order = list(self._lost)
        peer = min(gone, key=order.index)
        told = f"{call.where}: rank {peer} {self._lost[peer]}{self._elsewhere(peer) if call.named else ''}"
        if peer == order[0]:
            return told
        cause = f"rank {order[0]}, which {self._lost[order[0]]}{self._elsewhere(order[0]) if call.named else ''}"
        return f"{told} (lost before it: {cause})"

    def _tell_late(self, call: Call) -> str:
        told = [f"{call.where}: no end after {self.timeout:g} s"]
        for peer in sorted(call.missing | call.unsent):
            if peer not in call.missing:
                told.append(f"rank {peer} does not take what is sent to it")
            elif call.named:
                told.append(f"rank {peer} has not come{self._elsewhere(peer)}")
            else:
                other = [tag for tag, _ in self._waiting(peer)]
                told.append(f"rank {peer} sent nothing" + (f" of this tag, but of tags {other}" if other else ""))
        return "; ".join(told)

    def _elsewhere(self, peer: int) -> str:
        """Return in words what a rank last reported about its state, and the calls that it has made and this rank has
        not made.
        """
        said = [f"it {self._said[peer]}"] if self._said.get(peer) else []
        came = ", ".join(frame.note or f"tag {tag}" for tag, frame in self._waiting(peer)[:4])
        said += [f"what it sent and nobody took: {came}"] if came else []
        return f" ({'; '.join(said)})" if said else ""

    def _waiting(self, peer: int) -> list[tuple[int, Frame]]:
        """Return (tag, first frame) for each tag under which frames have arrived from a peer that no call has asked
        for.
        """
        return sorted((tag, waiting[0]) for (rank, tag), waiting in self._inbox.items() if rank == peer and waiting)
