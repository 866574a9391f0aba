"""In which order a stage runs its micro-batches, forward and backward, as MindSpore put it into the graph."""

from __future__ import annotations

from typing import NamedTuple

from tools.dryrun.graph_text import GraphText


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


def in_flight(passes: list[Pass]) -> dict[int, int]:
    """Chunk -> how many of its micro-batches wait for their backward, where all chunks together hold the most."""
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for item in passes:
        now[item.chunk] = now.get(item.chunk, 0) + (1 if item.kind == "F" else -1)
        if sum(now.values()) > sum(most.values()):
            most = dict(now)
    return most
