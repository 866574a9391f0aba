"""What a device sends in a step: collectives by kind of group and of link, from its compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INSIDE, BETWEEN = "inside a node", "between nodes"
Stream = tuple[str, int, tuple[int, ...], str, int]  # operator, peer, shape, type and chunk of a Send or Receive


def traffic_of(graph: Mapping[str, Any], step: int, compiled: int, node: int) -> list[dict[str, Any]]:
    """Calls and bytes of a step, largest first, by operator, role, size of group and link.

    "bytes" is what leaves the device, by the textbook volume of each operator: for a tensor of B bytes on its larger
    side and n ranks, AllGather and ReduceScatter B (n - 1) / n, AllReduce twice that, All-to-All B (n - 1) / n,
    Send B. "routed" says that some sizes are those of an even routing.

    Args:
        step, compiled: micro-batches of a step, and those of the graph: what each of them repeats is multiplied.
        node: devices of a node: a group of ranks of one node uses its links only.
    """
    found: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    micros = _micros(graph["collectives"])
    for item in graph["collectives"]:
        ranks = _ranks(item, graph["groups"])
        link = INSIDE if len({rank // node for rank in ranks}) == 1 else BETWEEN
        key = item["op"], item["role"], len(ranks), link
        line = found.setdefault(
            key, dict(zip(("op", "role", "ranks", "link"), key, strict=True)) | {"calls": 0.0, "bytes": 0.0}
        )
        times = step / compiled if _repeats(item, micros, compiled) else 1.0
        line["calls"] += times
        line["bytes"] += times * item["bytes"] * _share(item["op"], len(ranks))
        if item.get("routed"):
            line["routed"] = True
    for line in found.values():
        line["calls"], line["bytes"] = round(line["calls"]), round(line["bytes"])
    return sorted(found.values(), key=lambda line: -line["bytes"])


def _ranks(item: Mapping[str, Any], groups: Sequence[Sequence[int]]) -> list[int]:
    """Whom a call concerns: a group, or for Send and Receive this rank's place and its peer's."""
    group = list(groups[item["group"]])
    if "peer" not in item:
        return group
    return [item["me"], item["peer"]]


def _micros(collectives: Sequence[Mapping[str, Any]]) -> dict[Stream, set[int]]:
    """The micro-batches of which equal Sends, or Receives, are."""
    found: dict[Stream, set[int]] = {}
    for item in collectives:
        if item.get("micro") is not None:
            found.setdefault(_stream(item), set()).add(item["micro"])
    return found


def _stream(item: Mapping[str, Any]) -> Stream:
    return item["op"], item["peer"], tuple(item["shape"]), item["dtype"], item["chunk"]


def _repeats(item: Mapping[str, Any], micros: Mapping[Stream, set[int]], compiled: int) -> bool:
    """Whether each micro-batch does it again.

    An embedding that the first and the last stage share goes between them once a step, and carries micro-batch 0.
    """
    if item.get("micro") is None:
        return item["role"] != "step"
    return len(micros[_stream(item)]) == compiled


def _share(op: str, ranks: int) -> float:
    if op in ("Send", "Broadcast"):
        return 1.0
    if op in ("Receive", "Barrier"):
        return 0.0
    return (2.0 if op == "AllReduce" else 1.0) * (ranks - 1) / ranks
