"""Send and Receive of pipelines: a Send leaves its tensor behind and goes on, a Receive waits for it.

Messages of one pair of ranks, group and `sr_tag` are matched by order, so that micro-batches that share a tag arrive
as they were sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import ClusterError
from plugins.semi_auto_cpu.exchange.meeting import describe, tag_of

Attrs = Mapping[str, str]


class PointToPoint:
    """The Sends and Receives of one rank.

    Args:
        synchronous: a Send waits for its Receive, as `tc3 dryrun`'s deadlock check assumes; the same on all ranks.
    """

    def __init__(self, mesh: Mesh, synchronous: bool = False):
        self.mesh, self.synchronous = mesh, synchronous
        self._numbers: defaultdict[int, int] = defaultdict(int)

    def send(self, attrs: Attrs, peer: int, members: tuple[int, ...], x: np.ndarray, dropped: bool = False) -> None:
        """Leave `x` for a peer; `dropped` is for tests: it is never sent.

        Raises:
            ClusterError: only where it is synchronous: the peer is lost or late.
        """
        tag, name = self._next(attrs, self.mesh.rank, peer, members)
        if not dropped:
            self.mesh.send(peer, tag, x, f"Send {name}: {describe(x)}")
        if self.synchronous:
            where = f"rank {self.mesh.rank}, Send {name}{_micro(attrs)}: {describe(x)}"
            self.mesh.receive(peer, tag_of("taken", tag), where)

    def receive(self, attrs: Attrs, peer: int, members: tuple[int, ...], out: np.ndarray) -> None:
        """Wait for what a peer sends, and write it to `out`.

        Raises:
            ClusterError: the peer is lost, late or sends another type or shape.
        """
        tag, name = self._next(attrs, peer, self.mesh.rank, members)
        where = f"rank {self.mesh.rank}, Receive {name}{_micro(attrs)}: {describe(out)}"
        frame = self.mesh.receive(peer, tag, where)
        if frame.note != f"Send {name}: {describe(out)}":
            raise ClusterError(f"{where} is due, and arrived is {frame.note}")
        out[...] = frame.array(out.dtype)
        if self.synchronous:
            self.mesh.send(peer, tag_of("taken", tag), np.empty(0, np.uint8), f"Receive {name}")

    def _next(self, attrs: Attrs, source: int, target: int, members: tuple[int, ...]) -> tuple[int, str]:
        """Tag of this message's stream, and how messages name it."""
        sr_tag = attrs.get("sr_tag", "0")
        tag = tag_of("send", source, target, sorted(members), sr_tag)
        number = self._numbers[tag]
        self._numbers[tag] += 1
        return tag, f"{number} of sr_tag {sr_tag} from rank {source} to rank {target}"


def _micro(attrs: Attrs) -> str:
    return f" of micro-batch {attrs['micro']}" if "micro" in attrs else ""
