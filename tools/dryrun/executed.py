"""This module checks whether a rank executed the collectives that its compile reported: names, groups, bytes and order.

MindSpore's backend may swap collectives that do not depend on each other, so the order is checked only between
dependent collectives, and between the messages of each pipeline link. Executed graphs keep the names of operators that
the last compiler passes for Ascend rename, and have the real number of routed rows; neither of the two counts as a
difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.semi_auto_cpu.collectives import CallRecord
from plugins.semi_auto_cpu.ranks import made_up_name

# operator -> what it is in the graph that the dry run reads
_RENAMED = {"_MiniStepAllGather": "AllGather", "_MicroStepAllGather": "AllGather", "AllToAll": "AlltoAll"}
_RENAMED |= {"AllToAllV": "AlltoAllV"}


@dataclass(frozen=True)
class _Call:
    """A `_Call` is one collective; its shape is None where routing decides."""

    op: str
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...] | None
    tag: int | None

    @property
    def kind(self) -> tuple:
        """Return the operator, ranks, type and tag of a collective, which must be the same in the compile's report and
        in the run.
        """
        return self.op, self.ranks, self.dtype, self.tag

    def fits(self, executed: _Call) -> bool:
        """Return whether this collective, which the compile reported, can be the same as `executed`, which the rank
        executed.
        """
        return self.kind == executed.kind and self.shape in (None, executed.shape)

    def __str__(self) -> str:
        shape = "routed rows" if self.shape is None else "x".join(map(str, self.shape)) or "one number"
        tag = "" if self.tag is None else f", sr_tag {self.tag}"
        return f"{self.op} of {shape} {self.dtype}{tag} between ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Comparison:
    """A `Comparison` holds one line for each difference between the reported and the executed collectives. The field
    `calls` lists missing and additional collectives. If no collective is missing or additional, the field `order` lists
    dependent collectives and pipeline messages in a wrong order.
    """

    calls: list[str]
    order: list[str]


def calls_file(run_dir: str | Path, rank: int) -> Path:
    """Return the path of the file into which rank `rank` of a sharded CPU run writes the collectives of its first step.
    The file is JSON and has the keys "step", "calls" (the collectives) and "places" (the rank's index in each group, as
    passed to MindSpore).
    """
    return Path(run_dir) / "metrics" / f"collectives_rank_{rank}.json"


def wrong_places(graph: Mapping[str, Any], rank: int, places: Mapping[str, int]) -> list[str]:
    """Return a line for each communication group in which MindSpore used a wrong index for the rank. With a wrong index
    in the group, the rank slices weights wrongly.
    """
    told = [(ranks, places.get(made_up_name(tuple(ranks)))) for ranks in graph["groups"]]
    return [
        f"cuts weights as place {place} of ranks {', '.join(map(str, ranks))}, of which it is place {ranks.index(rank)}"
        for ranks, place in told
        if place is not None and ranks[place : place + 1] != [rank]
    ]


def compare_calls(graph: Mapping[str, Any], executed: Sequence[CallRecord]) -> Comparison:
    """Compare the collectives that the dry run reports for a rank's step with the collectives that the rank executed in
    one step.

    Args:
        graph: "graph" of a compile's result, with as many micro-batches as the step had.
        executed: the calls of that rank in one step, as `Collectives.end_recording` gives them, or the same as lists.
    """
    reported = [_reported(graph["groups"], item) for item in graph["collectives"]]
    done = [_executed(CallRecord(*record)) for record in executed]
    lines = _differences(reported, done)
    if lines:
        return Comparison(lines, [])
    after = [item.get("after", []) for item in graph["collectives"]]
    return Comparison([], _too_early(reported, after, done) + _swapped(reported, done))


def _reported(groups: Sequence[Sequence[int]], item: Mapping[str, Any]) -> _Call:
    ranks = (item["me"], item["peer"]) if "peer" in item else tuple(groups[item["group"]])
    shape = None if item.get("routed") else tuple(item["shape"])
    return _Call(item["op"], ranks, item["dtype"].lower(), shape, item.get("tag"))


def _executed(record: CallRecord) -> _Call:
    ranks = tuple(record.ranks)
    if record.peer is not None:
        me = next(rank for rank in ranks if rank != record.peer)
        ranks = me, record.peer
    return _Call(_RENAMED.get(record.op, record.op), ranks, record.dtype, tuple(record.shape), record.sr_tag)


def _differences(reported: Sequence[_Call], done: Sequence[_Call]) -> list[str]:
    """Return calls by how often they are there; what is left of an operator may be its routed ones."""
    missing, more = Counter(reported), Counter(done)
    for call in sorted(missing, key=lambda call: call.shape is None):
        for other in [other for other in more if call.fits(other)]:
            both = min(missing[call], more[other])
            missing[call] -= both
            more[other] -= both
    sides = (("reported, not executed", missing), ("executed, not reported", more))
    return [
        f"{words}: {call}{f' ({count} times)' if count > 1 else ''}"
        for words, calls in sides
        for call, count in calls.items()
        if count
    ]


def _too_early(reported: Sequence[_Call], after: Sequence[Sequence[int]], done: Sequence[_Call]) -> list[str]:
    """Return executed calls that stand before one that they need; each is the first that fits and may start."""
    lines: list[str] = []
    left, over = dict(enumerate(reported)), set[int]()
    for call in done:
        fitting = [place for place, other in left.items() if other.fits(call)]
        ready = [place for place in fitting if over.issuperset(after[place])]
        place = min(ready or fitting, key=lambda place: (left[place].shape is None, place))
        if not ready:
            needed = reported[next(need for need in after[place] if need not in over)]
            lines.append(f"executed before what it needs: {call}, which needs the result of {needed}")
        over.add(place)
        del left[place]
    return lines


def _swapped(reported: Sequence[_Call], done: Sequence[_Call]) -> list[str]:
    """Return the first message of each link and direction that comes in another order."""
    lines = []
    for op, ranks in dict.fromkeys((call.op, call.ranks) for call in reported if call.op in ("Send", "Receive")):
        streams = ([call for call in calls if (call.op, call.ranks) == (op, ranks)] for calls in (reported, done))
        for place, (one, other) in enumerate(zip(*streams, strict=True), 1):
            if not one.fits(other):
                lines.append(f"message {place} is {one} as reported, {other} as executed")
                break
    return lines
