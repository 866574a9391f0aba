"""This module sends arrays from rank to rank over TCP: All-to-All of unequal parts, exchanges of named arrays, and
buffered sends.

MindSpore's CPU backend has no collective but AllReduce, which moves as many bytes as an All-to-All times the size of
the group. This module sends exactly the planned bytes. Each pair of ranks shares one connection; each of the two ranks
has a sender thread and a receiver thread for it. A receiver always reads its socket into memory, so a sender never has
to wait until its peer has time: exchanges with several tags can be in progress at once, from several threads, in any
order on each rank, without a deadlock.

The workers of a run share one `mesh()`; `connect` makes it, and exchanges the addresses by MindSpore's own AllReduce.
MindSpore is imported only in `connect`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from plugins.cpu_backend import mailbox
from plugins.cpu_backend.mailbox import STATUS, Call, Frame, Mailbox
from plugins.errors import ClusterError

Address = tuple[str, int]
SLOWEST = 600.0  # seconds that a rank waits for another: one may compile, or save, while the other waits already
_open: list[Mesh] = []


class Mesh:
    """A `Mesh` holds the connections of one rank to all other ranks.

    The order of calls is: `listen`, tell every rank every address (the caller does this), `connect`, exchange, `close`.
    A `Mesh` is also a context manager that calls `close` at the end. Its threads are daemon threads, so a process that
    exits without `close` does not hang.

    Attributes:
        rank, size: this rank, and the number of ranks;
        timeout: the seconds that one exchange may take;
        sent_bytes: [size], the payload bytes that were sent to each rank since `connect`; the entry of this rank stays
            0.
    """

    def __init__(self, rank: int, size: int, timeout: float = SLOWEST):
        assert 0 <= rank < size
        self.rank, self.size, self.timeout = rank, size, timeout
        self.sent_bytes = [0] * size
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._outboxes: dict[int, queue.SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._mail = Mailbox(rank, timeout, self.tell)
        # (peer, tag) -> how many frames were sent to it and asked for from it
        self._sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._taken: defaultdict[tuple[int, int], int] = defaultdict(int)

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, host: str = "127.0.0.1") -> Address:
        """Open an ephemeral port on the interface of `host`; return the address to which other ranks connect."""
        try:
            self._listener = socket.create_server((host, 0), backlog=self.size)
        except OSError as error:
            raise ClusterError(f"rank {self.rank} cannot listen on {host}: {error}") from None
        return self._listener.getsockname()[:2]

    def connect(self, addresses: Sequence[Address], timeout: float = 60.0) -> None:
        """Connect to every other rank: this rank opens the connections to lower ranks and accepts the connections from
        higher ranks.

        Args:
            addresses: [size] the results of `listen`, by rank.
            timeout: the seconds within which all ranks must be connected.

        Raises:
            ClusterError: a rank cannot be reached, does not call in time or belongs to another run. This mesh is then
                closed.
        """
        assert self._listener is not None and len(addresses) == self.size
        deadline = time.monotonic() + timeout
        try:
            for peer in range(self.rank):
                self._connections[peer] = self._call(peer, addresses[peer], deadline)
            while len(self._connections) < self.size - 1:
                self._answer(self._listener, deadline)
        except ClusterError:
            self.close()
            raise
        self._listener.close()
        for peer, connection in self._connections.items():
            connection.settimeout(None)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._outboxes[peer] = queue.SimpleQueue()
            for job in (self._send_loop, self._receive_loop):
                name = f"mesh rank {self.rank} {job.__name__.split('_')[1]} {peer}"
                self._threads.append(threading.Thread(target=job, args=(peer, connection), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def all_to_all_v(
        self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray], rows: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Send part j to rank group[j]; return the arrays that the members of the group sent to this rank, in group
        order.

        Two ranks match the exchanges of one tag by their order, so only one thread at a time may use a tag. This rank's
        own part is returned unchanged and without a copy. The call returns after the kernel has taken every part, so
        the caller may then change the parts.

        Args:
            group: ranks that take part, this one among them; the same on each of them.
            tag: the number of the conversation, any int64 from 0.
            parts: [len(group)] arrays [any rows, ...] of one dtype and one trailing shape.
            rows: [len(group)] the number of rows that each member must send to this rank, if the caller knows it.

        Raises:
            ClusterError: a rank is lost or late, sends another dtype, trailing shape or number of rows, or is at
                another exchange of this tag. The message names the rank. The mesh cannot be used afterwards.
        """
        if self.rank not in group or len(set(group)) != len(group):
            raise ClusterError(
                f"rank {self.rank} exchanges data in the group {list(group)}, but a group must contain this rank, "
                "and each rank only once"
            )
        own = parts[group.index(self.rank)]
        assert len(parts) == len(group) and all(part.dtype == own.dtype for part in parts)
        assert all(part.ndim and part.shape[1:] == own.shape[1:] for part in parts)
        others = {peer: part for peer, part in zip(group, parts, strict=True) if peer != self.rank}
        call = self._exchange(tag, others, "", f"rank {self.rank}, tag {tag}")
        results = []
        for peer in group:
            if peer == self.rank:
                results.append(own)
                continue
            frame = call.arrived[peer]
            self._check(frame, peer, call.numbers[peer], own)
            results.append(frame.array(own.dtype))
        if rows is not None and [len(result) for result in results] != list(rows):
            wrong = [(peer, n, len(r)) for peer, n, r in zip(group, rows, results, strict=True) if n != len(r)]
            told = "; ".join(f"rank {peer} sent {got} rows where {due} were planned" for peer, due, got in wrong)
            raise ClusterError(
                f"rank {self.rank}, exchange with tag {tag}: other ranks sent wrong numbers of rows: {told}"
            )
        return results

    def exchange(self, tag: int, parts: Mapping[int, np.ndarray], note: str, where: str) -> dict[int, Frame]:
        """Send each peer its part of `parts`; return a dictionary peer -> the frame that this peer sent, without
        checking what the frame contains.

        This method works as `all_to_all_v`, but does not check dtype, shape and number of rows of a frame. The call
        returns after the kernel has taken every part.

        Args:
            parts: peer -> its part; the part is empty if this rank only waits for the peer.
            note: the name of this exchange on every rank.
            where: its name in messages of this rank.

        Raises:
            ClusterError: a peer is lost or late; the message says in which call the peer waits, or what it sent
                instead.
        """
        return self._exchange(tag, parts, note, where).arrived

    def send(self, peer: int, tag: int, part: np.ndarray, note: str) -> None:
        """Send a copy of `part` to a peer in the background, and return immediately; the peer may call `receive` for it
        at any time.

        `close` waits until the copy has been sent.
        """
        copied = np.array(part, order="C")
        with self._mail.changed:
            number = self._sent[peer, tag]
            self._sent[peer, tag] += 1
            self._mail.buffered[peer] += 1
        self._outboxes[peer].put((None, mailbox.pack(tag, number, copied, note)))

    def receive(self, peer: int, tag: int, where: str) -> Frame:
        """Return the next frame with this tag from a peer, and wait for it if necessary; this raises the errors of
        `exchange`.
        """
        with self._mail.changed:
            number = self._taken[peer, tag]
            self._taken[peer, tag] += 1
        call = Call(where, tag, True, {peer: number}, unsent=set(), missing={peer})
        self._mail.wait(call)
        return call.arrived[peer]

    def tell(self, text: str) -> None:
        """Tell all other ranks in which call this rank waits, so that their error messages can name the call; "" means
        that this rank waits in no call.
        """
        for peer, outbox in self._outboxes.items():
            with self._mail.changed:
                self._mail.buffered[peer] += 1
            outbox.put((None, Frame(STATUS, 0, "uint8", (0,), np.empty(0, np.uint8), text)))

    def close(self) -> None:
        """End all threads and close all sockets; exchanges that are in progress raise ClusterError. This method may be
        called twice.
        """
        self._mail.close()
        if self._listener is not None:
            self._listener.close()
        for outbox in self._outboxes.values():
            outbox.put(None)
        for connection in self._connections.values():
            # an error says that the other side was faster
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._threads.clear()

    def _call(self, peer: int, address: Address, deadline: float) -> socket.socket:
        """Connect to a lower rank, which has been listening since before its address was published."""
        try:
            connection = socket.create_connection(address, max(deadline - time.monotonic(), 0.001))
            mailbox.greet(connection, self.rank, self.size)
        except OSError as error:
            host, port = address
            raise ClusterError(f"rank {self.rank} cannot connect to rank {peer} at {host}:{port}: {error}") from None
        return connection

    def _answer(self, listener: socket.socket, deadline: float) -> None:
        """Accept one connection of a higher rank; close the connections of other programs."""
        try:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
        except TimeoutError:
            absent = [peer for peer in range(self.rank + 1, self.size) if peer not in self._connections]
            raise ClusterError(f"rank {self.rank}: ranks {absent} did not connect in time") from None
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            peer, size = mailbox.greeting(connection)
        except OSError:
            connection.close()
            return
        if size != self.size or not self.rank < peer < size or peer in self._connections:
            connection.close()
            told = f"rank {peer} of {size} connected to rank {self.rank} of {self.size}"
            raise ClusterError(f"{told}: the ranks do not belong to one run, or one of them was started twice")
        self._connections[peer] = connection

    def _exchange(self, tag: int, parts: Mapping[int, np.ndarray], note: str, where: str) -> Call:
        """Number this exchange, hand its frames to the senders, and wait for those of the peers."""
        if self._mail.closing:
            raise ClusterError(f"{where}: this rank has already closed its connections to the other ranks")
        with self._mail.changed:
            due = {peer: self._taken[peer, tag] for peer in parts}
            sent = {peer: self._sent[peer, tag] for peer in parts}
            for peer in parts:
                self._taken[peer, tag] += 1
                self._sent[peer, tag] += 1
        call = Call(where, tag, bool(note), due, unsent=set(parts), missing=set(parts))
        for peer, part in parts.items():
            self._outboxes[peer].put((call, mailbox.pack(tag, sent[peer], part, note)))
        self._mail.wait(call)
        return call

    def _check(self, frame: Frame, peer: int, number: int, own: np.ndarray) -> None:
        where = f"rank {self.rank}, tag {frame.tag}: rank {peer}"
        if frame.number != number:
            raise ClusterError(
                f"{where} sent its exchange number {frame.number} with this tag, but number {number} was expected"
            )
        if frame.dtype != own.dtype.name or frame.shape[1:] != own.shape[1:]:
            sent, due = (", ".join(["rows", *map(str, shape[1:])]) for shape in (frame.shape, own.shape))
            raise ClusterError(f"{where} sent {frame.dtype} [{sent}], but {own.dtype.name} [{due}] was expected")

    def _send_loop(self, peer: int, connection: socket.socket) -> None:
        outbox = self._outboxes[peer]
        while (job := outbox.get()) is not None:
            call, frame = job
            try:
                mailbox.send(connection, frame)
            except OSError as error:
                self._mail.unreach(peer, error)
                with contextlib.suppress(OSError):  # the receiver reads what has arrived, and then says why this ended
                    connection.shutdown(socket.SHUT_RD)
                return
            self.sent_bytes[peer] += frame.payload.nbytes  # by this thread only
            self._mail.sent(peer, call)

    def _receive_loop(self, peer: int, connection: socket.socket) -> None:
        while True:
            try:
                frame = mailbox.receive(connection)
            except OSError as error:
                self._mail.lose(peer, error)
                return
            self._mail.put(peer, frame)


def mesh() -> Mesh:
    """Return this process's connections to all other ranks (a `Mesh`); call `connect` first."""
    return _open[0]


def connect(timeout: float = SLOWEST) -> None:
    """Connect all ranks to each other, once; every rank must call this function.

    Args:
        timeout: the seconds that one exchange may take; this also limits how much longer one rank may compile than
            another.

    Raises ClusterError where a rank cannot be reached.
    """
    if _open:
        return
    from mindspore import Tensor, ops
    from mindspore.communication import get_group_size, get_rank

    rank, size = get_rank(), get_group_size()
    new = Mesh(rank, size, timeout)
    host, port = new.listen(_own_address())
    table = np.zeros((size, 5), np.float32)  # octets and port: exact in float32
    table[rank] = [*map(int, host.split(".")), port]
    table = ops.AllReduce()(Tensor(table)).asnumpy().astype(int)
    new.connect([(".".join(map(str, row[:4])), int(row[4])) for row in table])
    _open.append(new)
    atexit.register(new.close)


def _own_address() -> str:
    """Return the address at which other workers reach this worker: that of the network interface that leads to msrun's
    scheduler.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a datagram socket sends nothing
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 9))
        return probe.getsockname()[0]
