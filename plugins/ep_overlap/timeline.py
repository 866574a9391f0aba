"""This module computes when each operator runs on a device's streams, which run operators in order. The module needs
only the standard library. The streams are those of figure 5 of the TeleChat3-MoE report.

A device has three streams: `compute`, and one for each class of links, `inter` (between nodes, RoCE) and `intra`
(inside a node, HCCS). A stream runs what was issued to it strictly in the order of issue. An operator starts when it is
the next operator of its stream, its stream is free, and all operators on which it depends have ended. A collective over
both classes of links (`both`) needs and occupies both streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STREAMS = ("compute", "inter", "intra")
Key = tuple[int, str]  # chunk and name


@dataclass(frozen=True)
class Op:
    """An `Op` is one operator: its name, its chunk, its streams, its duration, and the operators after which it
    runs.
    """

    name: str
    chunk: int
    stream: str  # one of STREAMS, or "both"
    seconds: float
    after: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        """Return the operator's unique name in a timeline, by which other operators refer to it in `after`."""
        return self.chunk, self.name

    @property
    def streams(self) -> tuple[str, ...]:
        """Return the streams on which the operator runs."""
        return ("inter", "intra") if self.stream == "both" else (self.stream,)


@dataclass(frozen=True)
class Span:
    """A `Span` is an operator with its start and its end, in seconds from the start of the timeline."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A `Timeline` holds the spans of all operators, in order of issue."""

    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Return the seconds until the last operator of the timeline ends."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, stream: str) -> float:
        """Return the seconds in which `stream` runs an operator."""
        return sum(span.op.seconds for span in self.on(stream))

    def on(self, stream: str) -> list[Span]:
        """Return the spans of operators on `stream`, in order."""
        return [span for span in self.spans if stream in span.op.streams]


def simulate(ops: Sequence[Op]) -> Timeline:
    """Return the time at which each of `ops`, given in the order of issue, starts and ends.

    An operator starts when the operator before it on each of its streams, and all operators on which it depends, have
    ended. The operators are placed in the order of issue; an operator that waits for an operator which is issued later
    is tried again.

    Raises:
        ValueError: a stream is unknown, a key occurs twice, a dependency does not exist, or the order makes streams
            wait for each other for ever. On a device the last of these hangs.
    """
    _check(ops)
    free = dict.fromkeys(STREAMS, 0.0)
    starts: dict[Key, float] = {}
    ends: dict[Key, float] = {}
    waiting = list(ops)
    while waiting:
        later: list[Op] = []
        blocked: set[str] = set()
        for op in waiting:
            if blocked.isdisjoint(op.streams) and all(key in ends for key in op.after):
                start = max([*(free[stream] for stream in op.streams), *(ends[key] for key in op.after)])
                starts[op.key], ends[op.key] = start, start + op.seconds
                free.update(dict.fromkeys(op.streams, start + op.seconds))
            else:
                blocked.update(op.streams)
                later.append(op)
        if len(later) == len(waiting):
            heads = {stream: next(op.key for op in later if stream in op.streams) for stream in sorted(blocked)}
            raise ValueError(f"these operations are never issued, because their streams wait for each other: {heads}")
        waiting = later
    return Timeline(tuple(Span(op, starts[op.key], ends[op.key]) for op in ops))


def _check(ops: Iterable[Op]) -> None:
    keys: set[Key] = set()
    for op in ops:
        if not set(op.streams) <= set(STREAMS):
            raise ValueError(
                f"{op.key}: stream {op.stream!r} does not exist; the streams are {', '.join(STREAMS)} and both"
            )
        if op.key in keys:
            raise ValueError(f"{op.key}: the operation is issued twice")
        keys.add(op.key)
    for op in ops:
        for key in op.after:
            if key not in keys:
                raise ValueError(f"{op.key}: the operation depends on {key}, which is never issued")
