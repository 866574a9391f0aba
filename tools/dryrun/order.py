"""This module checks whether the compiled ranks can run together: the ranks of every group must call the same
collectives in the same order, and no ranks may wait for each other in a cycle.

A collective starts when all its members have called it. Ranks that call a group's collectives in different orders, or
whose Sends have no matching Receives, wait for ever; on thousands of devices this is seen as a time-out without a
reason. This module compares the programs of the compiled ranks with each other. Ranks that were not compiled are
assumed to arrive when they are needed.

If the two ends of a pipeline link were not both compiled, the ranks that represent these ends are compared: the Sends
of the first rank to its next stage must match the Receives of the second rank from its previous stage, and vice versa.
Tags contain the numbers of the stages and are not compared. With zero_bubble_v each stage has its own order of a link's
chunks, so no stage can represent another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tools.dryrun.compiles import source_key
from tools.dryrun.plan import Plan

_KEY = "parallel.pipeline_config.pipeline_scheduler"


@dataclass(frozen=True)
class Call:
    """A `Call` is the call of one collective by one rank."""

    op: str  # the operator; "p2p" for a Send and its Receive
    members: tuple[int, ...]  # the ranks of its group, or (source, destination)
    what: str  # must be equal in the calls of all members: shape, type, tag
    where: str  # a place for error messages

    @property
    def key(self) -> str:
        """Return the recipe's key that makes the graph contain this collective."""
        return _KEY if self.op == "p2p" else source_key(self.where) or "parallel"

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.op} of {self.what}{place}"


def programs_of(reports: Sequence[Mapping]) -> dict[int, list[Call]]:
    """Return a dictionary rank -> collectives that the rank calls, in order, from the results of the compiles."""
    return {report["rank"]: [_call(report, item) for item in report["graph"]["collectives"]] for report in reports}


def _call(report: Mapping, item: Mapping) -> Call:
    if item["op"] in ("Send", "Receive"):
        ends = (report["rank"], item["peer"]) if item["op"] == "Send" else (item["peer"], report["rank"])
        return Call("p2p", ends, f"{_tensor(item)}, tag {item['tag']}, micro-batch {item['micro']}", item["op"])
    return Call(item["op"], tuple(report["graph"]["groups"][item["group"]]), _tensor(item), item["source"])


def _tensor(item: Mapping) -> str:
    return f"{'x'.join(map(str, item['shape'])) or 'one number'} {item['dtype']}"


def check_order(programs: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return one line for each error that would make the run hang or deliver messages to the wrong receiver; return []
    if the ranks can run together.
    """
    found: list[str] = []
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, list[Call]]] = {}
    for rank, program in programs.items():
        for call in program:
            key = ("p2p" if call.op == "p2p" else "group", call.members)
            by_group.setdefault(key, {}).setdefault(rank, []).append(call)
    for (_, members), calls in by_group.items():
        compiled = [rank for rank in members if rank in programs]
        first, *others = compiled
        lines = (_difference(first, calls.get(first, []), other, calls.get(other, []), members) for other in others)
        found += filter(None, lines)
    return found or _play(programs)


def count_groups(programs: Mapping[int, Sequence[Call]]) -> dict[str, int]:
    """Return the number of communication groups of the compiled ranks ("all"), and the number of groups that contain at
    least two compiled ranks ("compared").
    """
    groups = {call.members for program in programs.values() for call in program if call.op != "p2p"}
    return {"all": len(groups), "compared": sum(len(programs.keys() & set(members)) > 1 for members in groups)}


def _difference(first: int, ours: list[Call], other: int, theirs: list[Call], members: tuple[int, ...]) -> str:
    """Return a line about the first call in which two members of a group differ; "" if they do not differ."""
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
    stuck = [(rank, call) for rank in programs if (call := current(rank)) is not None]
    if not stuck:
        return []
    waits = "; ".join(f"rank {rank} waits in {call} ({_name(call.members)})" for rank, call in stuck[:4])
    keys = ", ".join(dict.fromkeys(call.key for _, call in stuck))
    return [f"{keys}: these calls wait for each other forever: {waits}"]


def _other(call: Call | None, wanted: Call) -> bool:
    """Return whether a member is in another call than the wanted one."""
    return call is None or (call.members, call.op == "p2p") != (wanted.members, wanted.op == "p2p")


def _name(members: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, members[:4])) + (f", ... {members[-1]}" if len(members) > 4 else "")
    return f"group of {len(members)} ({shown})"


@dataclass(frozen=True)
class Links:
    """A `Links` holds the result of comparing the Sends and Receives between pairs of stages. A pair of stages was
    compared directly (`exact`), by other stages with the same layers (`alike`), or not at all (`unknown`). The field
    `problems` has a line for each Send or Receive that has no match on the other stage.
    """

    exact: list[tuple[int, int]]
    alike: list[tuple[int, int]]
    unknown: list[tuple[int, int]]
    problems: list[str]

    def as_json(self) -> dict[str, int]:
        """Return as a dictionary for `--json` how many pairs of stages were compared directly, by other stages with the
        same layers, and not at all.
        """
        return {"exact": len(self.exact), "alike": len(self.alike), "unknown": len(self.unknown)}


class _Rank:
    """A `_Rank` holds the Sends and Receives of a compiled rank, by the distance of the peer in stages."""

    def __init__(self, result: Mapping[str, Any], per_stage: int):
        self.rank = result["rank"]
        self.stage, self.place = divmod(self.rank, per_stage)
        self.calls: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for item in result["graph"]["collectives"]:
            if "peer" in item:
                key = item["op"], item["peer"] // per_stage - self.stage
                self.calls.setdefault(key, []).append(item)

    def stream(self, op: str, distance: int, with_chunk: bool) -> list[str]:
        """Return one line of text for each Send (or each Receive, as `op` says) between this stage and the stage at the
        given `distance`. The lines for the Sends of one stage can be compared with the lines for the Receives of the
        other stage.
        """
        return [_text(item, with_chunk) for item in self.calls.get((op, distance), ())]


def check_links(plan: Plan, results: Sequence[Mapping[str, Any]], per_stage: int, alike: bool) -> Links:
    """Compare the Sends and Receives at both ends of each pipeline link, in the compiled ranks of the link's two
    stages. If `alike` is True, a stage that was not compiled is represented by a compiled stage with the same layers.
    No link is compared after a quick dry run, because a quick dry run does not compile the real stages.
    """
    ranks = [_Rank(result, per_stage) for result in results] if plan.job_of else []
    links = Links([], [], [], [])
    found: dict[tuple[_Rank, _Rank], list[tuple[int, int]]] = {}
    for ends in _links(len(plan.stages), ranks):
        own = _own(ends, ranks)
        jobs = [plan.job_of[stage] for stage in ends] if alike and ranks else [-1]
        if own:
            links.exact.append(ends)
            found.setdefault(own, []).append(ends)
        elif min(jobs) >= 0:
            links.alike.append(ends)
            found.setdefault((ranks[jobs[0]], ranks[jobs[1]]), []).append(ends)
        else:
            links.unknown.append(ends)
    for pair, stood in found.items():
        links.problems.extend(_differences(*pair, stood, len(plan.stages)))
    return links


def _links(stages: int, ranks: Sequence[_Rank]) -> list[tuple[int, int]]:
    """Return the pairs of stages that send to each other: neighbours, and the first and last where a rank says so."""
    ends = (sorted((rank.stage, rank.stage + distance)) for rank in ranks for _, distance in rank.calls)
    far = {(first, last) for first, last in ends if last - first > 1}
    return [(stage, stage + 1) for stage in range(stages - 1)] + sorted(far)


def _own(ends: tuple[int, int], ranks: Sequence[_Rank]) -> tuple[_Rank, _Rank] | None:
    """Return two compiled ranks of exactly these stages that are each other's peers; None if there are none."""
    pairs = ((one, other) for one in ranks for other in ranks if (one.stage, other.stage) == ends)
    return next((pair for pair in pairs if pair[0].place == pair[1].place), None)


def _differences(one: _Rank, other: _Rank, stood: Sequence[tuple[int, int]], stages: int) -> list[str]:
    """Return a line for each difference between the ends of a link, or of links that the same ranks represent."""
    distance = stood[0][1] - stood[0][0]
    # between the last stage and the first, which are neighbours in a pipeline of two, a Send's chunk is not its
    # Receive's: activations go on to the next chunk
    with_chunk = distance == 1 and stages > 2
    names = ", ".join(f"{first} and {second}" for first, second in stood)
    lines = []
    for sender, receiver, away in ((one, other, distance), (other, one, -distance)):
        sent, taken = sender.stream("Send", away, with_chunk), receiver.stream("Receive", -away, with_chunk)
        line = _link_difference(sender.rank, sent, receiver.rank, taken)
        if not line and not sent:
            line = f"rank {sender.rank} sends nothing"
        if line:
            lines.append(f"{_KEY}: between stages {names}, as compiled for ranks {one.rank} and {other.rank}: {line}")
    return lines


def _link_difference(sender: int, sent: Sequence[str], receiver: int, taken: Sequence[str]) -> str:
    """Return the first Send that meets no equal Receive, or the first Receive without a Send."""
    for place, (ours, theirs) in enumerate(zip_longest(sent, taken), 1):
        if ours != theirs:
            ours, theirs = ours or "not there", theirs or "not there"
            return f"rank {sender}'s Send {place} is {ours}, rank {receiver}'s Receive {place} is {theirs}"
    return ""


def _text(item: Mapping[str, Any], with_chunk: bool) -> str:
    """Return as text the properties in which a Send and its Receive must agree, whatever their stages."""
    chunk = f", chunk {item['chunk']}" if with_chunk else ""
    return f"{_tensor(item)}, micro-batch {item['micro']}{chunk}"
