"""Every collective of MindSpore's sharded graph, between processes over `plugins.cpu_backend.network`.

    collectives = Collectives(mesh, ranks)
    collectives.run("AllReduce", {"group": "2-77", "op": "sum", "group_rank_ids": "(0, 1)"}, [x], [out])

Results are the same whatever comes first. Members of a group that are not at the same call, a Send without its Receive
and ranks that wait for each other are errors that name operator, group and ranks (ClusterError).
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import ClusterError
from plugins.semi_auto_cpu.exchange.calls import CallRecord, Calls
from plugins.semi_auto_cpu.exchange.disturbance import VARIABLE, Disturbance
from plugins.semi_auto_cpu.exchange.groups import Groups
from plugins.semi_auto_cpu.exchange.meeting import Meeting
from plugins.semi_auto_cpu.exchange.operators import OPERATORS
from plugins.semi_auto_cpu.exchange.point_to_point import PointToPoint
from plugins.semi_auto_cpu.ranks import Ranks

# what `run` knows
NAMES = (*OPERATORS, "Send", "Receive")

Attrs = Mapping[str, str]
Arrays = Sequence[np.ndarray]


class Collectives:
    """The collectives of one rank.

    Args:
        mesh: connected to all ranks.
        ranks: who this is, and the groups that Python created so far; read at each call.
        test: delays and faults (see `disturbance`); from the environment where it is None.

    Attributes:
        groups: which ranks an operator concerns.
    """

    def __init__(self, mesh: Mesh, ranks: Ranks, test: str | None = None):
        self.mesh, self.groups = mesh, Groups(ranks)
        self._test = Disturbance(os.environ.get(VARIABLE, "") if test is None else test, mesh.rank)
        self._links = PointToPoint(mesh, self._test.synchronous)
        self._calls = Calls()
        # sorted members -> how many collectives they had; a lock each, because kernels may run on several threads
        self._numbers: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._locks: dict[tuple[int, ...], threading.Lock] = {}

    def run(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool = True) -> None:
        """Take part in one collective.

        Args:
            name: one of `NAMES`.
            attrs: MindSpore's attributes as text: group, op, rank_list, sr_tag, ...
            inputs, outputs: arrays in the operator's order; counts of an AlltoAllV may be any numbers. Outputs are
                written in place.
            record: whether `end_recording` lists it: not what runs outside the graph.

        Raises:
            ClusterError: the group is unknown, a member is lost, late or somewhere else, or what it sends does not fit.
                The other ranks are told; nothing goes on after it.
        """
        try:
            if not attrs.get("group"):  # of one member
                _copy(inputs, outputs)
            elif name in ("Send", "Receive"):
                self._send_or_receive(name, attrs, inputs, outputs, record)
            elif name in OPERATORS:
                self._meet(name, attrs, inputs, outputs, record)
            else:
                raise ClusterError(f"no collective {name!r} between CPU processes: there are {', '.join(NAMES)}")
        except ClusterError as error:
            self.mesh.tell(f"failed: {error}")
            raise

    def begin_recording(self) -> None:
        """Keep a record of the calls from here on; nothing is recorded otherwise."""
        self._calls.begin()

    def end_recording(self) -> list[CallRecord]:
        """The calls since `begin_recording`, in order."""
        return self._calls.end()

    def _meet(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool) -> None:
        """A collective of a whole group."""
        members = self.groups.members(name, attrs)
        fault = self._test.begin(name)
        if record:
            self._calls.add(name, members, inputs, outputs)
        if fault == "skip" or len(members) == 1:
            _copy(inputs, outputs)
            return
        if fault == "reverse":
            members = members[::-1]
        with self._alone(members):
            key = tuple(sorted(members))
            meeting = Meeting(self.mesh, name, attrs["group"], members, self._numbers[key])
            self._numbers[key] += 1
            OPERATORS[name](meeting, attrs, inputs, outputs)

    def _send_or_receive(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool) -> None:
        """A message between two members of a group; their places in it are attributes."""
        members = self.groups.members(name, attrs)
        place = int(attrs["dest_rank" if name == "Send" else "src_rank"])
        if not 0 <= place < len(members) or members[place] == self.mesh.rank:
            told = f"rank {self.mesh.rank}, {name} in group {attrs['group']!r} of ranks {list(members)}"
            raise ClusterError(f"{told}: place {place} is no other member")
        peer = members[place]
        fault = self._test.begin(name)
        if record:
            self._calls.add(name, members, inputs, outputs, peer, int(attrs.get("sr_tag", 0)))
        if name == "Receive" and fault == "skip":
            outputs[0][...] = 0
            return
        if name == "Receive":
            self._links.receive(attrs, peer, members, outputs[0])
            return
        self._links.send(attrs, peer, members, inputs[0], dropped=fault == "drop")
        if outputs and outputs[0].size == inputs[0].size:  # something to depend on
            _copy(inputs, outputs)

    def _alone(self, members: tuple[int, ...]) -> AbstractContextManager:
        """One thread at a time is at a group's calls."""
        return self._locks.setdefault(tuple(sorted(members)), threading.Lock())


def _copy(inputs: Arrays, outputs: Arrays) -> None:
    for x, out in zip(inputs, outputs, strict=False):
        size = min(x.size, out.size)
        out.reshape(-1)[:size] = x.reshape(-1)[:size]
