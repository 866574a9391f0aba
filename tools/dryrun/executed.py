"""Whether the collectives that a rank executed are those that its compile reported: names, groups, bytes and order.

Executed graphs keep operators that MindSpore's last passes for Ascend rename, and they give routed rows their real
number: neither is a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from plugins.semi_auto_cpu.exchange.calls import CallRecord

# operator -> what it is in the graph that the dry run reads
_RENAMED = {"_MiniStepAllGather": "AllGather", "_MicroStepAllGather": "AllGather", "AllToAll": "AlltoAll"}
_RENAMED |= {"AllToAllV": "AlltoAllV"}


@dataclass(frozen=True)
class _Call:
    """One collective; shape and bytes are None where routing decides."""

    op: str
    ranks: tuple[int, ...]
    dtype: str
    shape: tuple[int, ...] | None
    bytes: int | None
    tag: int | None

    @property
    def stream(self) -> tuple:
        """What is ordered among itself on any machine: a group's collectives, or one direction of a link."""
        link = self.op in ("Send", "Receive")
        return self.op if link else "", self.ranks if link else tuple(sorted(self.ranks))

    def __str__(self) -> str:
        shape = "routed rows" if self.shape is None else "x".join(map(str, self.shape)) or "one number"
        tag = "" if self.tag is None else f", sr_tag {self.tag}"
        return f"{self.op} of {shape} {self.dtype}{tag}"


@dataclass(frozen=True)
class Comparison:
    """What differs, one line each.

    Args:
        calls: calls of a group, or Sends of a link, that one side has not, or has as another.
        order: where the same calls stand in another order across groups; "" where they do not. Only calls that no
            data joins can: MindSpore's backend may swap those.
    """

    calls: list[str]
    order: str


def compare_calls(graph: Mapping[str, Any], executed: Sequence[CallRecord]) -> Comparison:
    """Compare what the dry run reports for a rank's step with what that rank executed in one.

    Args:
        graph: "graph" of a compile's result, with as many micro-batches as the step had.
        executed: `Collectives.recorded(step)` of that rank, or the same as lists.
    """
    reported = [_reported(graph["groups"], item) for item in graph["collectives"]]
    done = [_executed(CallRecord(*record)) for record in executed]
    reported, done = ([call for call in calls if len(call.ranks) > 1] for calls in (reported, done))
    streams = dict.fromkeys(call.stream for call in (*reported, *done))
    lines = [
        _difference(stream, *([call for call in calls if call.stream == stream] for calls in (reported, done)))
        for stream in streams
    ]
    lines = list(filter(None, lines))
    return Comparison(lines, "" if lines else _other_order(reported, done))


def _reported(groups: Sequence[Sequence[int]], item: Mapping[str, Any]) -> _Call:
    ranks = (item["me"], item["peer"]) if "peer" in item else tuple(groups[item["group"]])
    routed = item.get("routed", False)
    shape = None if routed else tuple(item["shape"])
    return _Call(item["op"], ranks, item["dtype"].lower(), shape, None if routed else item["bytes"], item.get("tag"))


def _executed(record: CallRecord) -> _Call:
    ranks = tuple(record.ranks)
    if record.peer is not None:
        me = next(rank for rank in ranks if rank != record.peer)
        ranks = me, record.peer
    op = _RENAMED.get(record.op, record.op)
    return _Call(op, ranks, record.dtype, tuple(record.shape), record.bytes, record.sr_tag)


def _same(reported: _Call | None, done: _Call | None) -> bool:
    if reported is None or done is None:
        return False
    if (reported.op, reported.ranks, reported.dtype, reported.tag) != (done.op, done.ranks, done.dtype, done.tag):
        return False
    return reported.shape is None or (reported.shape, reported.bytes) == (done.shape, done.bytes)


def _difference(stream: tuple, reported: Sequence[_Call], done: Sequence[_Call]) -> str:
    """The first call of a stream in which the two part."""
    name = f"group of ranks {_names(stream[1])}" if not stream[0] else f"link of ranks {_names(stream[1])}"
    counts = f" (of {len(reported)} reported and {len(done)} executed)" if len(reported) != len(done) else ""
    for place, (one, other) in enumerate(zip_longest(reported, done), 1):
        if not _same(one, other):
            return (
                f"{name}: call {place} is {one or 'not there'} as reported, {other or 'not there'} as executed{counts}"
            )
    return ""


def _other_order(reported: Sequence[_Call], done: Sequence[_Call]) -> str:
    for place, (one, other) in enumerate(zip(reported, done, strict=True), 1):
        if one.stream != other.stream:
            ours, theirs = (f"{call} of ranks {_names(call.ranks)}" for call in (one, other))
            return f"call {place} is {ours} as reported, {theirs} as executed"
    return ""


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
