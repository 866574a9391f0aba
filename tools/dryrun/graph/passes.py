"""In which order a stage runs its micro-batches, forward and backward, as MindSpore put it into the graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tools.dryrun.graph.text import GraphText


class Pass(NamedTuple):
    """One forward ("F") or backward ("B") of a micro-batch through a chunk of the stage's layers."""

    kind: str
    micro_batch: int
    chunk: int


def passes_of(graph: GraphText) -> list[Pass]:
    """The passes in the order of the root graph.

    A chunk has one forward and one backward subgraph (lazy inline), called once for each micro-batch in their order;
    chunks are numbered by their first forward.
    """
    chunks = chunks_of(graph)
    place = {name: (kind, chunk) for chunk, pair in enumerate(chunks) for kind, name in zip("FB", pair, strict=True)}
    seen: dict[str, int] = {}
    found = []
    for node in graph.graphs[graph.root]:
        for name in node.calls:
            if name in place:
                kind, chunk = place[name]
                found.append(Pass(kind, seen.setdefault(name, 0), chunk))
                seen[name] += 1
    return found


def chunks_of(graph: GraphText) -> list[tuple[str, str]]:
    """Names of the forward and backward subgraph of each chunk, by first forward."""
    backward = {}
    for name, nodes in graph.graphs.items():
        if "▸" in name:
            backward[name] = next((node.binds for node in nodes if node.binds in graph.graphs), "")
    called = [name for node in graph.graphs[graph.root] for name in node.calls if name in backward]
    return [(name, backward[name]) for name in dict.fromkeys(called)]


def most_saved(passes: Sequence[Pass], sizes: Sequence[int]) -> int:
    """Bytes that wait for their backward at the fullest moment, when a micro-batch leaves `sizes[chunk]` in a chunk."""
    own = ((sizes[item.chunk] if item.kind == "F" else 0) for item in passes)
    return max(map(sum, zip(waiting(passes, sizes), own, strict=True)), default=0)


def waiting(passes: Sequence[Pass], sizes: Sequence[int]) -> list[int]:
    """Bytes that wait for their backward in front of each pass.

    Where the gradients of weights are a pass of their own ("W"), they are the last to need what is kept.
    """
    split = {item[1:] for item in passes if item.kind == "W"}
    now, found = 0, []
    for item in passes:
        found.append(now)
        if item.kind == "F":
            now += sizes[item.chunk]
        elif item.kind == "W" or item[1:] not in split:
            now -= sizes[item.chunk]
    return found
