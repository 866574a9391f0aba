"""This module runs every collective of MindSpore's sharded graph between processes, over
`plugins.cpu_backend.transport`.

    collectives = Collectives(mesh, ranks)
    collectives.run("AllReduce", {"group": "2-77", "op": "sum", "group_rank_ids": "(0, 1)"}, [x], [out])

Results do not depend on the order of arrival. A ClusterError names operator, group and ranks if members of a group are
not at the same call, if a Send has no Receive, or if ranks wait for each other. The module has these parts:

* `Calls` records which collectives a rank called in a step, in order, so that they can be compared with the prediction
  of `tc3 dryrun`.
* `Disturbance`, for tests only, inserts delays before collectives, and faults that a run must notice. The environment
  variable `TC3_COLLECTIVES_TEST` names the delays and faults. "delay=20 seed=3" waits up to 20 ms before each call, for
  a different time on each rank. "drop:Send:2@0" never sends the third Send of rank 0; "skip:AllReduce" leaves out every
  AllReduce on all ranks (each rank returns its own input); "skip:Receive:0@1" leaves out the first Receive of rank 1,
  which gets zeros, so that its next Receive takes the tensor that was sent to the first; "reverse:AllGather:0@1" runs
  the first AllGather of rank 1 with its group in reverse order. Only calls of a graph are counted and changed.
  "synchronous" makes each Send wait for its Receive. "@FILE" stands for the words in a file, because the value of a
  variable may have at most 128 KiB.
* `Groups` finds which ranks take part in a collective, from the groups that Python created and from the operator's own
  attributes.
* `PointToPoint` runs Send and Receive of pipelines. A Send stores its tensor and returns at once; a Receive waits for
  the tensor. Messages with the same pair of ranks, group and `sr_tag` are matched by order, so that micro-batches that
  share a tag arrive in the order in which they were sent.
* `Collectives` combines these parts for one rank; `exchange.py` computes each collective.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from plugins.cpu_backend.transport import Mesh
from plugins.errors import ClusterError
from plugins.semi_auto_cpu.exchange import OPERATORS, Meeting, describe, tag_of
from plugins.semi_auto_cpu.ranks import MADE_UP, Ranks, made_up_name

# the side of an operator that is as large as what all members hold together; the inputs of all others
_FROM_OUTPUT = ("AllGather", "_MiniStepAllGather", "_MicroStepAllGather", "Receive", "Broadcast")
VARIABLE = "TC3_COLLECTIVES_TEST"
_FAULT = re.compile(r"(drop|skip|reverse):(\w+)(?::(\d+))?(?:@(\d+))?")
WORLDS = ("hccl_world_group", "mccl_world_group", "nccl_world_group")
# MindSpore states the ranks of groups that C++ made up in one of these: "(0, 4)", "[0, 4]" or "0-4". Of groups that
# Python created they may say the world, which is wrong
STATED = ("rank_list", "group_rank_ids", "group_ranks")
Attrs = Mapping[str, str]
# what `run` knows
NAMES = (*OPERATORS, "Send", "Receive")
Arrays = Sequence[np.ndarray]


class CallRecord(NamedTuple):
    """A `CallRecord` describes one collective that a rank called in a step.

    Attributes:
        op: MindSpore's name of the operator.
        ranks: the ranks of its group in their order.
        bytes, shape, dtype: those of its tensor on the larger side (for several tensors, the bytes of all, and shape
            and dtype of the first).
        peer, sr_tag: the peer and the tag of a Send or Receive.
    """

    op: str
    ranks: tuple[int, ...]
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    peer: int | None = None
    sr_tag: int | None = None


@dataclass(frozen=True)
class Fault:
    """A `Fault` is a fault that a test inserts into a collective on this rank: its `kind`, and the number `call` of the
    operator's call at which it happens (None: every call).
    """

    kind: str
    operator: str
    call: int | None = None
    rank: int | None = None


class Disturbance:
    """A `Disturbance` holds the delays and faults that a test inserts into the collectives of one rank.

    Args:
        text: the text that the module describes; "" means none.

    Raises:
        ClusterError: the text has an unknown word, or names a file that cannot be read.
    """

    def __init__(self, text: str, rank: int):
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text("utf-8")
            except OSError as error:
                raise ClusterError(f"{VARIABLE}={text}: the file cannot be read ({error.strerror})") from None
        words = dict.fromkeys(text.split())
        settings = dict(word.split("=", 1) for word in words if re.fullmatch(r"(delay|seed)=\d+", word))
        self.synchronous = "synchronous" in words
        faults = [match for word in words if (match := _FAULT.fullmatch(word))]
        if len(settings) + len(faults) + self.synchronous != len(words):
            raise ClusterError(
                f"{VARIABLE}={text!r}: the value must be words separated by spaces: delay=MS, seed=N, synchronous, "
                "drop:OP, skip:OP or reverse:OP; :CALL or @RANK after OP chooses only one call or one rank"
            )
        self._most = int(settings.get("delay", 0)) / 1000
        self._random = random.Random(f"{settings.get('seed', 0)} {rank}")
        self._faults = [_fault(match) for match in faults]
        self._faults = [fault for fault in self._faults if fault.rank in (None, rank)]
        self._calls: defaultdict[str, int] = defaultdict(int)

    def begin(self, operator: str) -> str:
        """Wait for the delay that the test has set; return the kind of fault to insert into this call of the operator,
        or "" for none.
        """
        if self._most:
            time.sleep(self._random.uniform(0, self._most))
        if not self._faults:
            return ""
        number = self._calls[operator]
        self._calls[operator] += 1
        hits = (fault.kind for fault in self._faults if fault.operator == operator and fault.call in (None, number))
        return next(hits, "")


def _fault(match: re.Match[str]) -> Fault:
    kind, operator, call, rank = match.groups()
    return Fault(kind, operator, None if call is None else int(call), None if rank is None else int(rank))


class Groups:
    """A `Groups` finds the communication group of each operator on one rank; `ranks` describes the cluster from that
    rank's point of view.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self._known: dict[tuple[str, ...], tuple[int, ...]] = {}

    def members(self, operator: str, attrs: Mapping[str, str]) -> tuple[int, ...]:
        """Return the global ranks of an operator's group, in the order of the group.

        Raises:
            ClusterError: the group's ranks are not known, or this rank is not one of them.
        """
        name = attrs.get("group", "")
        created = self.ranks.groups.get(name)
        if created is not None:
            return self._with_me(operator, name, created)
        key = name, *(attrs.get(stated, "") for stated in STATED)
        if key not in self._known:
            members = self._with_me(operator, name, self._stated(operator, name, attrs))
            if MADE_UP.fullmatch(name) and name != made_up_name(members):  # weights are cut by this name
                raise ClusterError(
                    f"rank {self.ranks.rank}: the attributes of {operator} say that group {name!r} has ranks "
                    f"{list(members)}, but MindSpore would name a group of these ranks {made_up_name(members)!r}"
                )
            self._known[key] = members
        return self._known[key]

    def _stated(self, operator: str, name: str, attrs: Mapping[str, str]) -> tuple[int, ...]:
        """Return the ranks that the operator's attributes list; of several lists, return the one with this rank. If the
        attributes list no ranks, return all ranks of the run for the world group, and raise ClusterError for any other
        group.
        """
        lists = [tuple(map(int, re.findall(r"\d+", attrs.get(stated, "")))) for stated in STATED]
        found = sorted(filter(None, lists), key=lambda ranks: self.ranks.rank not in ranks)
        if found:
            return found[0]
        if name in WORLDS:
            return tuple(range(self.ranks.devices))
        known = [*self.ranks.groups, *WORLDS]
        raise ClusterError(
            f"rank {self.ranks.rank}: {operator} uses group {name!r}, whose ranks are unknown: the group was never "
            f"created, and the operator's attributes ({', '.join(STATED)}) do not list them; known groups are "
            f"{', '.join(known)}"
        )

    def _with_me(self, operator: str, name: str, members: tuple[int, ...]) -> tuple[int, ...]:
        if self.ranks.rank not in members:
            raise ClusterError(
                f"rank {self.ranks.rank} runs {operator} in group {name!r} of ranks {list(members)}, "
                "but is not one of them"
            )
        if len(set(members)) != len(members) or max(members) >= self.ranks.devices:
            raise ClusterError(
                f"{operator}: group {name!r} of ranks {list(members)} is not possible: a rank is listed twice or is "
                f"not one of the {self.ranks.devices} processes"
            )
        return members


class PointToPoint:
    """A `PointToPoint` runs the Send and Receive operators of one rank.

    Args:
        synchronous: whether a Send waits for its Receive, as the deadlock check of `tc3 dryrun` assumes; the same on
            all ranks.
    """

    def __init__(self, mesh: Mesh, synchronous: bool = False):
        self.mesh, self.synchronous = mesh, synchronous
        self._numbers: defaultdict[int, int] = defaultdict(int)

    def send(self, attrs: Attrs, peer: int, members: tuple[int, ...], x: np.ndarray, dropped: bool = False) -> None:
        """Send `x` to a peer; if `dropped` is true, which only tests set, send nothing.

        Raises:
            ClusterError: the peer is lost or late (only if Sends are synchronous).
        """
        tag, name = self._next(attrs, self.mesh.rank, peer, members)
        if not dropped:
            self.mesh.send(peer, tag, x, f"Send {name}: {describe(x)}")
        if self.synchronous:
            where = f"rank {self.mesh.rank}, Send {name}{_micro(attrs)}: {describe(x)}"
            self.mesh.receive(peer, tag_of("taken", tag), where)

    def receive(self, attrs: Attrs, peer: int, members: tuple[int, ...], out: np.ndarray) -> None:
        """Wait for the tensor that a peer sends, and write it to `out`.

        Raises:
            ClusterError: the peer is lost, late or sends another type or shape.
        """
        tag, name = self._next(attrs, peer, self.mesh.rank, members)
        where = f"rank {self.mesh.rank}, Receive {name}{_micro(attrs)}: {describe(out)}"
        frame = self.mesh.receive(peer, tag, where)
        if frame.note != f"Send {name}: {describe(out)}":
            raise ClusterError(f"{where} was expected, but this message arrived: {frame.note}")
        out[...] = frame.array(out.dtype)
        if self.synchronous:
            self.mesh.send(peer, tag_of("taken", tag), np.empty(0, np.uint8), f"Receive {name}")

    def _next(self, attrs: Attrs, source: int, target: int, members: tuple[int, ...]) -> tuple[int, str]:
        """Return the tag of this message's stream, and the name of the message in error messages."""
        sr_tag = attrs.get("sr_tag", "0")
        tag = tag_of("send", source, target, sorted(members), sr_tag)
        number = self._numbers[tag]
        self._numbers[tag] += 1
        return tag, f"{number} of sr_tag {sr_tag} from rank {source} to rank {target}"


def _micro(attrs: Attrs) -> str:
    return f" of micro-batch {attrs['micro']}" if "micro" in attrs else ""


class Collectives:
    """A `Collectives` runs the collectives of the sharded graph on one rank.

    Args:
        mesh: connected to all ranks.
        ranks: this rank, and the groups that Python has created so far; they are read at each call.
        test: delays and faults (see `disturbance`); None: those of the environment.

    Attributes:
        groups: the ranks of each group.
    """

    def __init__(self, mesh: Mesh, ranks: Ranks, test: str | None = None):
        self.mesh, self.groups = mesh, Groups(ranks)
        self._test = Disturbance(os.environ.get(VARIABLE, "") if test is None else test, mesh.rank)
        self._links = PointToPoint(mesh, self._test.synchronous)
        self._calls: list[CallRecord] | None = None  # while they are recorded
        # sorted members -> how many collectives they had; a lock each, because kernels may run on several threads
        self._numbers: defaultdict[tuple[int, ...], int] = defaultdict(int)
        self._locks: dict[tuple[int, ...], threading.Lock] = {}

    def run(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool = True) -> None:
        """Run one collective as this rank, together with the other ranks of its group.

        Args:
            name: one of `NAMES`.
            attrs: MindSpore's attributes as text: group, op, rank_list, sr_tag, ...
            inputs, outputs: arrays in the operator's order; the counts of an AlltoAllV may have any type. Outputs are
                written in place.
            record: whether `end_recording` lists the call; False for calls outside of the graph.

        Raises:
            ClusterError: the group is unknown, a member is lost, late or at another call, or its data does not fit. The
                other ranks are informed, and the run cannot continue.
        """
        try:
            if not attrs.get("group"):  # of one member
                _copy(inputs, outputs)
            elif name in ("Send", "Receive"):
                self._send_or_receive(name, attrs, inputs, outputs, record)
            elif name in OPERATORS:
                self._meet(name, attrs, inputs, outputs, record)
            else:
                raise ClusterError(
                    f"collective {name!r} does not exist between CPU processes; choose one of {', '.join(NAMES)}"
                )
        except ClusterError as error:
            self.mesh.tell(f"failed: {error}")
            raise

    def begin_recording(self) -> None:
        """Record the calls of collectives from now on; without this call nothing is recorded."""
        self._calls = []

    def end_recording(self) -> list[CallRecord]:
        """Return the recorded calls of collectives since `begin_recording`, in order."""
        calls, self._calls = self._calls or [], None
        return calls

    def _record(
        self, op: str, ranks: tuple[int, ...], inputs: Arrays, outputs: Arrays, peer: int | None, sr_tag: int | None
    ) -> None:
        if self._calls is None:
            return
        side = outputs if op in _FROM_OUTPUT else inputs
        side = side[:1] if op.endswith("V") else side[: len(outputs) or 1]
        size = sum(tensor.nbytes for tensor in side)
        shape, dtype = (side[0].shape, side[0].dtype.name) if side else ((), "")
        self._calls.append(CallRecord(op, ranks, size, shape, dtype, peer, sr_tag))

    def _meet(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool) -> None:
        """Run a collective of all members of a group."""
        members = self.groups.members(name, attrs)
        fault = self._test.begin(name) if record else ""
        if record:
            self._record(name, members, inputs, outputs, None, None)
        if fault == "skip" or len(members) == 1:
            _copy(inputs, outputs)
            return
        if fault == "reverse":
            members = members[::-1]
        key = tuple(sorted(members))
        with self._locks.setdefault(key, threading.Lock()):  # one thread at a time makes calls of a group
            meeting = Meeting(self.mesh, name, attrs["group"], members, self._numbers[key])
            self._numbers[key] += 1
            OPERATORS[name](meeting, attrs, inputs, outputs)

    def _send_or_receive(self, name: str, attrs: Attrs, inputs: Arrays, outputs: Arrays, record: bool) -> None:
        """Send or receive a message between two members of a group; the operator's attributes give the index of the
        other member.
        """
        members = self.groups.members(name, attrs)
        index = int(attrs["dest_rank" if name == "Send" else "src_rank"])
        if not 0 <= index < len(members) or members[index] == self.mesh.rank:
            told = f"rank {self.mesh.rank}, {name} in group {attrs['group']!r} of ranks {list(members)}"
            raise ClusterError(
                f"{told}: index {index} does not name another member of the group with which this rank could exchange "
                "a message"
            )
        peer = members[index]
        fault = self._test.begin(name)
        if record:
            self._record(name, members, inputs, outputs, peer, int(attrs.get("sr_tag", 0)))
        if name == "Receive":
            if fault == "skip":
                outputs[0][...] = 0
            else:
                self._links.receive(attrs, peer, members, outputs[0])
            return
        self._links.send(attrs, peer, members, inputs[0], dropped=fault == "drop")
        if outputs and outputs[0].size == inputs[0].size:  # something to depend on
            _copy(inputs, outputs)


def _copy(inputs: Arrays, outputs: Arrays) -> None:
    for x, out in zip(inputs, outputs, strict=False):
        size = min(x.size, out.size)
        out.reshape(-1)[:size] = x.reshape(-1)[:size]
