"""What runs when: a device's in-order streams, event by event. Standard library only. Report figure 5.

A device has three streams: `compute`, and one for each class of links, `inter` (between nodes, RoCE) and `intra`
(inside a node, HCCS). A stream runs what was issued to it strictly in the order of issue. An operator starts when it is
the next of its stream, its stream is free and all that it depends on has ended. A collective over both classes of links
(`both`) needs and holds both streams.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

STREAMS = ("compute", "inter", "intra")
Key = tuple[int, str]  # chunk and name


@dataclass(frozen=True)
class Op:
    """One operator: what it is called, which chunk it works on, where it runs, for how long, and after which others."""

    name: str
    chunk: int
    stream: str  # one of STREAMS, or "both"
    seconds: float
    after: tuple[Key, ...] = ()

    @property
    def key(self) -> Key:
        """Its name in `after`; unique in a timeline."""
        return self.chunk, self.name

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams it occupies."""
        return ("inter", "intra") if self.stream == "both" else (self.stream,)


@dataclass(frozen=True)
class Span:
    """An operator in time, seconds from the start of the timeline."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Spans in order of issue."""

    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last operator ends."""
        return max((span.end for span in self.spans), default=0.0)

    def busy(self, stream: str) -> float:
        """Seconds in which `stream` runs something."""
        return sum(span.op.seconds for span in self.on(stream))

    def on(self, stream: str) -> list[Span]:
        """What runs on `stream`, in order."""
        return [span for span in self.spans if stream in span.op.streams]


def simulate(ops: Sequence[Op]) -> Timeline:
    """When each of `ops`, given in order of issue, starts and ends.

    1. Start whatever stands at the head of all its streams, finds them free and has its dependencies behind it.
    2. When nothing more can start, go to the next moment at which something ends.

    Raises:
        ValueError: an unknown stream, a key twice, a dependency that does not exist, or an order in which streams wait
            for each other for ever. On a device the last of these hangs.
    """
    _check(ops)
    queues = {stream: deque(op for op in ops if stream in op.streams) for stream in STREAMS}
    free = dict.fromkeys(STREAMS, True)
    done: set[Key] = set()
    started: dict[Key, float] = {}
    ends: dict[Key, float] = {}
    running: list[tuple[float, int, Op]] = []  # heap by end; the number only breaks ties
    now = 0.0
    while len(started) < len(ops) or running:
        ready = _next_ready(queues, free, done)
        if ready is not None:
            for stream in ready.streams:
                queues[stream].popleft()
                free[stream] = False
            started[ready.key], ends[ready.key] = now, now + ready.seconds
            heapq.heappush(running, (ends[ready.key], len(started), ready))
        elif running:
            now, _, ended = heapq.heappop(running)
            done.add(ended.key)
            free.update(dict.fromkeys(ended.streams, True))
        else:
            heads = {stream: queue[0].key for stream, queue in queues.items() if queue}
            raise ValueError(f"the order of issue never ends: streams wait for each other at {heads}")
    return Timeline(tuple(Span(op, started[op.key], ends[op.key]) for op in ops))


def _next_ready(queues: dict[str, deque[Op]], free: dict[str, bool], done: set[Key]) -> Op | None:
    """An operator that can start now."""
    for stream in STREAMS:
        if not queues[stream] or not free[stream]:
            continue
        op = queues[stream][0]
        if all(free[other] and queues[other][0] is op for other in op.streams) and done.issuperset(op.after):
            return op
    return None


def _check(ops: Iterable[Op]) -> None:
    """Raise ValueError for what `simulate` cannot run."""
    keys: set[Key] = set()
    for op in ops:
        if not set(op.streams) <= set(STREAMS):
            raise ValueError(f"{op.key}: no stream {op.stream!r}; there are {', '.join(STREAMS)} and both")
        if op.key in keys:
            raise ValueError(f"{op.key}: issued twice")
        keys.add(op.key)
    for op in ops:
        for key in op.after:
            if key not in keys:
                raise ValueError(f"{op.key}: depends on {key}, which is never issued")
