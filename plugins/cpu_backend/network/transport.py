"""All-to-All of unequal parts between processes over TCP: what expert parallelism on CPU moves its tokens with.

MindSpore's CPU backend has AllReduce only, which moves group-size times what an All-to-All needs. Here exactly the
planned bytes travel. Each pair of ranks shares one connection; each end of it has a sender and a receiver thread.
A receiver always drains its socket into memory, so a sender never waits for what its peer is busy with: exchanges of
several tags can be in flight at once, from several threads, in any order on each rank, without a deadlock.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from plugins.cpu_backend.network import frames
from plugins.cpu_backend.network.frames import Frame
from plugins.errors import ClusterError

Address = tuple[str, int]


@dataclass
class _Exchange:
    """One all_to_all_v in flight: what this rank still waits for."""

    tag: int
    numbers: dict[int, int]
    unsent: set[int]
    missing: set[int]
    arrived: dict[int, Frame] = field(default_factory=dict)


class Mesh:
    """Connections of one rank to all others.

    The order is: `listen`, tell every rank every address (the caller's business), `connect`, exchange, `close`.
    Also a context manager, which closes. Its threads are daemons: an exit without `close` does not hang.

    Attributes:
        rank, size: who this is, of how many;
        timeout: seconds that one exchange may take;
        sent_bytes: [size], payload bytes sent to each rank since `connect`; the own entry stays 0.
    """

    def __init__(self, rank: int, size: int, timeout: float = 120.0):
        assert 0 <= rank < size
        self.rank, self.size, self.timeout = rank, size, timeout
        self.sent_bytes = [0] * size
        self._listener: socket.socket | None = None
        self._connections: dict[int, socket.socket] = {}
        self._outboxes: dict[int, queue.SimpleQueue] = {}
        self._threads: list[threading.Thread] = []
        self._closing = False
        # one condition guards all that follows; whoever changes any of it wakes every waiting exchange
        self._changed = threading.Condition()
        self._inbox: defaultdict[tuple[int, int], deque[Frame]] = defaultdict(deque)
        self._numbers: defaultdict[tuple[int, int], int] = defaultdict(int)
        # rank -> why it is lost; in the order of the losses, because the first one is the cause
        self._lost: dict[int, str] = {}
        # ranks to which nothing can be sent. A peer that got all its parts may close first and be lost, but no harm
        self._unreachable: set[int] = set()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def listen(self, host: str = "127.0.0.1") -> Address:
        """Open an ephemeral port on the interface of `host`; returns the address that other ranks connect to."""
        try:
            self._listener = socket.create_server((host, 0), backlog=self.size)
        except OSError as error:
            raise ClusterError(f"rank {self.rank} cannot listen on {host}: {error}") from None
        return self._listener.getsockname()[:2]

    def connect(self, addresses: Sequence[Address], timeout: float = 60.0) -> None:
        """Connect to every rank: calls the lower ones, answers the higher ones.

        Args:
            addresses: [size] what `listen` returned, by rank.
            timeout: seconds until all must be there.

        Raises:
            ClusterError: when a rank cannot be reached, does not call in time or belongs to another run. This mesh
                is then closed.
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
        """Send part j to group[j]; return what each member sent here, in group order.

        Exchanges of one tag between two ranks are matched by order, so one thread at a time may use a tag. The own
        part is returned as it is, not copied. Returns after the kernel took every part: they may change then.

        Args:
            group: ranks that take part, this one among them; the same on each of them.
            tag: names the conversation, any int64.
            parts: [len(group)] arrays [any rows, ...] of one dtype and one trailing shape.
            rows: [len(group)] how many rows each member must send here, where the caller knows.

        Raises:
            ClusterError: a rank is lost, late, sends another dtype, trailing shape or number of rows, or is at
                another exchange of this tag. The message names the rank. The mesh is then of no further use.
        """
        if self.rank not in group or len(set(group)) != len(group):
            raise ClusterError(f"rank {self.rank} exchanges in the group {list(group)}: it must be there exactly once")
        own = parts[group.index(self.rank)]
        assert len(parts) == len(group) and all(part.dtype == own.dtype for part in parts)
        assert all(part.ndim and part.shape[1:] == own.shape[1:] for part in parts)
        if self._closing:
            raise ClusterError(f"rank {self.rank}, tag {tag}: the mesh of this rank is closed")
        exchange = self._start(group, tag, parts)
        self._wait(exchange)
        results = []
        for peer in group:
            if peer == self.rank:
                results.append(own)
                continue
            frame = exchange.arrived[peer]
            self._check(frame, peer, exchange.numbers[peer], own)
            results.append(frame.array(own.dtype))
        if rows is not None and [len(result) for result in results] != list(rows):
            wrong = [(peer, n, len(r)) for peer, n, r in zip(group, rows, results, strict=True) if n != len(r)]
            told = "; ".join(f"rank {peer} sent {got} rows where {due} were planned" for peer, due, got in wrong)
            raise ClusterError(f"rank {self.rank}, tag {tag}: {told}")
        return results

    def close(self) -> None:
        """End all threads and close all sockets; exchanges in flight raise. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
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
        """Connect to a lower rank; it has listened since before its address was told."""
        try:
            connection = socket.create_connection(address, max(deadline - time.monotonic(), 0.001))
            frames.greet(connection, self.rank, self.size)
        except OSError as error:
            host, port = address
            raise ClusterError(f"rank {self.rank} cannot connect to rank {peer} at {host}:{port}: {error}") from None
        return connection

    def _answer(self, listener: socket.socket, deadline: float) -> None:
        """Take one connection of a higher rank; hang up on whoever is not of our kind."""
        try:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
        except TimeoutError:
            absent = [peer for peer in range(self.rank + 1, self.size) if peer not in self._connections]
            raise ClusterError(f"rank {self.rank}: ranks {absent} did not connect in time") from None
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            peer, size = frames.greeting(connection)
        except OSError:
            connection.close()
            return
        if size != self.size or not self.rank < peer < size or peer in self._connections:
            connection.close()
            told = f"rank {peer} of {size} connected to rank {self.rank} of {self.size}"
            raise ClusterError(f"{told}: the ranks do not belong to one run, or one of them was started twice")
        self._connections[peer] = connection

    def _start(self, group: Sequence[int], tag: int, parts: Sequence[np.ndarray]) -> _Exchange:
        """Number this exchange and hand its frames to the senders."""
        peers = [peer for peer in group if peer != self.rank]
        with self._changed:
            numbers = {peer: self._numbers[peer, tag] for peer in peers}
            for peer in peers:
                self._numbers[peer, tag] += 1
        exchange = _Exchange(tag, numbers, unsent=set(peers), missing=set(peers))
        for peer, part in zip(group, parts, strict=True):
            if peer != self.rank:
                self._outboxes[peer].put((exchange, frames.pack(tag, numbers[peer], part)))
        return exchange

    def _wait(self, exchange: _Exchange) -> None:
        """Return when all frames of the exchange have left and arrived; raise when one of them cannot."""
        deadline = time.monotonic() + self.timeout
        with self._changed:
            while True:
                for peer in list(exchange.missing):
                    if arrived := self._inbox[peer, exchange.tag]:
                        exchange.arrived[peer] = arrived.popleft()
                        exchange.missing.discard(peer)
                if not exchange.missing and not exchange.unsent:
                    return
                gone = (exchange.missing & self._lost.keys()) | (exchange.unsent & self._unreachable)
                if gone or self._closing:
                    raise ClusterError(self._tell_lost(exchange.tag, gone))
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise ClusterError(self._tell_late(exchange))
                self._changed.wait(remaining)

    def _tell_lost(self, tag: int, gone: set[int]) -> str:
        where = f"rank {self.rank}, tag {tag}"
        if self._closing:
            return f"{where}: the mesh of this rank was closed"
        order = list(self._lost)
        peer = min(gone, key=order.index)
        told = f"{where}: rank {peer} {self._lost[peer]}"
        return told if peer == order[0] else f"{told} (lost before it: rank {order[0]}, which {self._lost[order[0]]})"

    def _tell_late(self, exchange: _Exchange) -> str:
        told = [f"rank {self.rank}, tag {exchange.tag}: no end after {self.timeout:g} s"]
        for peer in sorted(exchange.missing | exchange.unsent):
            if peer in exchange.missing:
                other = sorted(tag for (rank, tag), waiting in self._inbox.items() if rank == peer and waiting)
                told.append(f"rank {peer} sent nothing" + (f" of this tag, but of tags {other}" if other else ""))
            else:
                told.append(f"rank {peer} does not take what is sent to it")
        return "; ".join(told)

    def _check(self, frame: Frame, peer: int, number: int, own: np.ndarray) -> None:
        where = f"rank {self.rank}, tag {frame.tag}: rank {peer}"
        if frame.number != number:
            raise ClusterError(f"{where} is at exchange {frame.number} of this tag where {number} is due")
        if frame.dtype != own.dtype.name or frame.shape[1:] != own.shape[1:]:
            sent, due = (", ".join(["rows", *map(str, shape[1:])]) for shape in (frame.shape, own.shape))
            raise ClusterError(f"{where} sent {frame.dtype} [{sent}] where {own.dtype.name} [{due}] is due")

    def _lose(self, peer: int, error: OSError, unreachable: Set[int] = frozenset()) -> None:
        reason = str(error) if isinstance(error, frames.Disconnected) else f"is out of reach: {error}"
        with self._changed:
            self._lost.setdefault(peer, reason)
            self._unreachable |= unreachable
            self._changed.notify_all()

    def _send_loop(self, peer: int, connection: socket.socket) -> None:
        outbox = self._outboxes[peer]
        while (job := outbox.get()) is not None:
            exchange, frame = job
            try:
                frames.send(connection, frame)
            except OSError as error:
                self._lose(peer, error, unreachable={peer})
                return
            with self._changed:
                self.sent_bytes[peer] += frame.payload.nbytes
                exchange.unsent.discard(peer)
                self._changed.notify_all()

    def _receive_loop(self, peer: int, connection: socket.socket) -> None:
        while True:
            try:
                frame = frames.receive(connection)
            except OSError as error:
                self._lose(peer, error)
                return
            with self._changed:
                self._inbox[peer, frame.tag].append(frame)
                self._changed.notify_all()
