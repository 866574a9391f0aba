"""Whether the compiled ranks can run together: the same calls in the same order on every group, and no circle of waits.

A collective starts when all its members have come to it. Ranks that call a group's collectives in different orders, or
that pass each other Sends without Receives, wait for ever: on thousands of devices this shows as a time-out without a
reason. Here the programs of the compiled ranks are laid side by side. Ranks that were not compiled are taken to come
when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tools.dryrun.diagnose import source_key

_P2P = ("Send", "Receive")


@dataclass(frozen=True)
class Call:
    """One collective of one rank.

    Args:
        op: "AllGather"...; "p2p" for a Send and its Receive.
        members: the group's ranks; (source, destination) of a p2p.
        what: that in which the members' calls must agree: shape, type, tag.
        where: for messages.
    """

    op: str
    members: tuple[int, ...]
    what: str
    where: str

    @property
    def key(self) -> str:
        """The key of the recipe that put it into the graph; a plugin's, where it comes from one."""
        if self.op == "p2p":
            return "parallel.pipeline_config.pipeline_scheduler"
        return source_key(self.where) or "parallel"

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.op} of {self.what}{place}"


def programs_of(reports: Sequence[Mapping]) -> dict[int, list[Call]]:
    """Rank -> its calls, from what the compiles report."""
    return {report["rank"]: [_call(report, item) for item in report["graph"]["collectives"]] for report in reports}


def _call(report: Mapping, item: Mapping) -> Call:
    shape = "x".join(map(str, item["shape"])) or "one number"
    if item["op"] in _P2P:
        ends = (report["rank"], item["peer"]) if item["op"] == "Send" else (item["peer"], report["rank"])
        what = f"{shape} {item['dtype']}, tag {item['tag']}, micro-batch {item['micro']}"
        return Call("p2p", ends, what, item["op"])
    members = tuple(report["graph"]["groups"][item["group"]])
    return Call(item["op"], members, f"{shape} {item['dtype']}", item["source"])


def check_order(programs: Mapping[int, Sequence[Call]]) -> list[str]:
    """What would hang or mix up messages, one line each; empty when the compiled ranks run through together."""
    found = []
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = {}
    for rank, program in programs.items():
        for call in program:
            key = ("p2p" if call.op == "p2p" else "group", call.members)
            by_group.setdefault(key, {}).setdefault(rank, []).append(call)
    for (_, members), calls in by_group.items():
        compiled = [rank for rank in members if rank in programs]
        first, *others = compiled
        for other in others:
            line = _difference(first, calls.get(first, []), other, calls.get(other, []), members)
            if line:
                found.append(line)
    return found or _play(programs)


def count_groups(programs: Mapping[int, Sequence[Call]]) -> dict[str, int]:
    """Groups that the compiled ranks call ("all"), and those with more than one of them as members ("compared")."""
    groups = {call.members for program in programs.values() for call in program if call.op != "p2p"}
    return {"all": len(groups), "compared": sum(len(programs.keys() & set(members)) > 1 for members in groups)}


def _difference(first: int, ours: list[Call], other: int, theirs: list[Call], members: tuple[int, ...]) -> str:
    """The first call in which two members of a group part."""
    name = _name(members)
    for place, (mine, yours) in enumerate(zip_longest(ours, theirs), 1):
        if mine is None or yours is None:
            rank, call, silent = (first, mine, other) if yours is None else (other, yours, first)
            alone = f"rank {rank}'s call {place}, {call}, has no partner"
            return f"{call.key}: {name}: {alone}: rank {silent} makes {place - 1} calls"
        if (mine.op, mine.what) != (yours.op, yours.what):
            return f"{mine.key}: {name}: call {place} is {mine} on rank {first} and {yours} on rank {other}"
    return ""


def _play(programs: Mapping[int, Sequence[Call]]) -> list[str]:
    """Run the programs side by side, each rank waiting in a call until its compiled members have come."""
    at = dict.fromkeys(programs, 0)

    def current(rank: int) -> Call | None:
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    ready = list(programs)
    while ready:
        rank = ready.pop()
        call = current(rank)
        if call is None:
            continue
        members = [member for member in call.members if member in programs]
        if any(_other(current(member), call) for member in members):
            continue
        for member in members:
            at[member] += 1
        ready.extend(members)
    stuck = [rank for rank in programs if current(rank) is not None]
    if not stuck:
        return []
    waits = "; ".join(f"rank {rank} waits in {current(rank)} ({_name(_of(current(rank)))})" for rank in stuck[:4])
    keys = ", ".join(dict.fromkeys(call.key for rank in stuck if (call := current(rank))))
    return [f"{keys}: these calls wait for each other for ever: {waits}"]


def _of(call: Call | None) -> tuple[int, ...]:
    return call.members if call else ()


def _other(call: Call | None, wanted: Call) -> bool:
    """Whether a member stands in another call than the wanted one."""
    return call is None or (call.members, call.op == "p2p") != (wanted.members, wanted.op == "p2p")


def _name(members: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, members[:4])) + (f", ... {members[-1]}" if len(members) > 4 else "")
    return f"group of {len(members)} ({shown})"
