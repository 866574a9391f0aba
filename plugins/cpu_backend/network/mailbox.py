"""What has arrived at one rank of a `transport.Mesh` and was not asked for yet, and how a call waits for its part.

A call that cannot end is told with all that is known: whom it waits for, why that rank is lost, what it sent instead,
and what it says that it waits in itself.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

from plugins.cpu_backend.network import frames
from plugins.cpu_backend.network.frames import Frame
from plugins.errors import ClusterError

# tag of frames that carry no data but say, in their note, what a rank waits in
STATUS = -1
# seconds after which a rank that waits tells the others, unless it gives up soon
PATIENCE = 5.0


@dataclass
class Call:
    """What one call of this rank still waits for.

    Attributes:
        where: how messages name it; tag: its conversation; named: whether it has a name that others understand;
        numbers: peer -> which frame of the conversation is due from it;
        unsent, missing: peers to which its frame has not left, from which none has come;
        arrived: what has come.
    """

    where: str
    tag: int
    named: bool
    numbers: dict[int, int]
    unsent: set[int]
    missing: set[int]
    arrived: dict[int, Frame] = field(default_factory=dict)


class Mailbox:
    """Frames by sender and tag, and what is known of the senders.

    Args:
        rank: whose it is.
        timeout: seconds that a call may wait.
        tell: sends a text to all other ranks: what this rank waits in.
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
        # ranks to which nothing can be sent. A peer that got all its parts may close first and be lost, but no harm
        self.unreachable: set[int] = set()
        # peer -> frames that nobody waits for and that have not left yet
        self.buffered: defaultdict[int, int] = defaultdict(int)

    def put(self, peer: int, frame: Frame) -> None:
        """Keep what has arrived."""
        with self.changed:
            if frame.tag == STATUS:
                self._said[peer] = frame.note
                return
            self._inbox[peer, frame.tag].append(frame)
            self.changed.notify_all()

    def sent(self, peer: int, call: Call | None) -> None:
        """The frame of a call, or a buffered one, has left for this peer."""
        with self.changed:
            if call is None:
                self.buffered[peer] -= 1
            else:
                call.unsent.discard(peer)
            self.changed.notify_all()

    def lose(self, peer: int, error: OSError, unreachable: Set[int] = frozenset()) -> None:
        """A connection ended."""
        reason = str(error) if isinstance(error, frames.Disconnected) else f"is out of reach: {error}"
        with self.changed:
            self._lost.setdefault(peer, reason)
            self.unreachable |= unreachable
            self.changed.notify_all()

    def close(self) -> None:
        """Calls that wait raise; buffered frames are given a few seconds to leave."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
            self.changed.wait_for(self._all_left, min(PATIENCE, self.timeout))

    def _all_left(self) -> bool:
        return not any(count for peer, count in self.buffered.items() if peer not in self.unreachable)

    def wait(self, call: Call) -> None:
        """Return when all frames of the call have left and arrived.

        Raises:
            ClusterError: when one of them cannot, or not in time.
        """
        begin = time.monotonic()
        untold = begin + min(PATIENCE, self.timeout / 4) if call.named else None
        with self.changed:
            while not self._complete(call):
                gone = (call.missing & self._lost.keys()) | (call.unsent & self.unreachable)
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
        """What a rank said last of itself, and to which calls it came that this rank did not."""
        said = [f"it {self._said[peer]}"] if self._said.get(peer) else []
        came = ", ".join(frame.note or f"tag {tag}" for tag, frame in self._waiting(peer)[:4])
        said += [f"what it sent and nobody took: {came}"] if came else []
        return f" ({'; '.join(said)})" if said else ""

    def _waiting(self, peer: int) -> list[tuple[int, Frame]]:
        """(tag, first frame) of what arrived from a peer and was not asked for."""
        return sorted((tag, waiting[0]) for (rank, tag), waiting in self._inbox.items() if rank == peer and waiting)
