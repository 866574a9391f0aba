"""What a compiled graph says of its rank, as plain data that a process can hand over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.dryrun.graph.activations import activations_of, kept_bytes, routed_rows, tensor_bytes
from tools.dryrun.graph.collectives import Collective, read_collectives
from tools.dryrun.graph.flops import flops_of
from tools.dryrun.graph.passes import passes_of
from tools.dryrun.graph.text import GraphText

_LARGER_SIDE = {"AllGather": "outputs", "AllGatherV": "outputs", "Receive": "outputs", "Broadcast": "outputs"}


def report_graph(
    graph: GraphText, rank: int, ranks_of: Callable[[str], tuple[int, ...] | None], even_rows: int
) -> dict[str, Any]:
    """Collectives in program order, order of the passes, activations and FLOPs of each chunk, what all passes share.

    "groups" are lists of ranks; a collective names its group by place. "routed" marks bytes that depend on routing and
    stand for an even one. "after" are places of those, of the same subgraph, whose results a collective needs: no
    backend can swap these.

    Args:
        even_rows: tokens x top-k of a rank.
    """
    rows = routed_rows(graph, even_rows)
    groups: dict[tuple[int, ...], int] = {}
    found = read_collectives(graph, ranks_of)
    collectives = [_plain(item, rank, groups, rows) | {"after": _direct(item, found)} for item in found]
    passes = passes_of(graph)
    return {
        "groups": [list(ranks) for ranks in groups],
        "collectives": collectives,
        "passes": [list(item) for item in passes],
        "kept": kept_bytes(graph, rows),
        "activations": activations_of(graph, rows),
        "flops": flops_of(graph, rows),
    }


def _direct(item: Collective, every: Sequence[Collective]) -> list[int]:
    """Places of the collectives whose results this one needs, without those that these need themselves."""
    direct: list[int] = []
    implied: set[int] = set()
    for place in reversed(item.after):
        if place not in implied:
            direct.append(place)
            implied.update(every[place].after)
    return direct


def _plain(item: Collective, rank: int, groups: dict[tuple[int, ...], int], rows: int) -> dict[str, Any]:
    """One collective; `bytes` is what one rank's tensor holds on its larger side."""
    side = getattr(item, _LARGER_SIDE.get(item.op, "inputs"))[:1]
    block = item.attributes.get("block_size", 1)
    routed = any(size < 0 for tensor in side for size in tensor.shape)
    plain = {
        "op": item.op,
        "group": groups.setdefault(item.ranks, len(groups)),
        "role": item.role,
        "bytes": sum(tensor_bytes(tensor, rows * (block if isinstance(block, int) else 1)) for tensor in side),
        "shape": list(side[0].shape) if side else [],
        "dtype": side[0].dtype if side else "",
        "source": item.source,
    }
    if routed:
        plain["routed"] = True
    for name in ("dst_global_rank", "src_global_rank"):
        if name in item.attributes:
            plain |= {"me": rank, "peer": item.attributes[name], "tag": item.attributes.get("sr_tag")}
            plain |= {key: item.attributes.get(key) for key in ("micro", "chunk")}
    return plain
