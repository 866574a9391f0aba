"""Activations of one pass taken apart by layer, so that stages of other layers can be put together from the parts.

MindSpore writes a pass in the order of its layers and keeps the path of cells on most operators. What comes before the
first layer (the embedding) is `FRONT`, what comes behind the last one (the head, MTP layers, the loss) is `BACK`, and
what several layers read but none makes for itself (the angles of rotary positions) is `COMMON`. A part says what it
leaves for the backward, and how much is alive while it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tools.dryrun.graph.text import Node

FRONT, BACK, COMMON = "front", "back", "common"
_LAYER = re.compile(r"decoder-\w+/layers-CellList/(\d+)-")
_CELL = re.compile(r"-\w+Model/(\w+)-\w+/(\w+)")
_BEFORE = ("embedding", "rotary_pos_emb")
_PARAMETER_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
_OF_HEAD = re.compile(r"accu_grads\.(?!decoder\.layers\.|embedding\.)")
_FIRST, _LAST = -1, 1 << 30  # of `FRONT` and `BACK` among numbers of layers


class Moment(NamedTuple):
    """Bytes alive while an operator runs, and after what it was the last to read is gone."""

    most: int
    left: int


def name_of(place: int) -> str:
    """A part's key in a report."""
    return {_FIRST: FRONT, _LAST: BACK}.get(place, str(place))


def places_of(nodes: list[Node]) -> list[int]:
    """For each operator of a forward its layer, by its path of cells, else that of the operators in front of it."""
    found, current = [], _FIRST
    for node in nodes:
        place = _place(node)
        if place is not None:
            current = max(current, place)
        found.append(current if place is None else place)
    return found


def _place(node: Node) -> int | None:
    layer = _LAYER.search(node.scope)
    if layer:
        return int(layer[1])
    cell = _CELL.search(node.scope)
    if cell is None:
        return None
    if cell[1] == "decoder":
        return _LAST if cell[2] == "final_layernorm" else None
    return _FIRST if cell[1] in _BEFORE else _LAST


def owner_place(own: int, readers: Iterable[int]) -> str:
    """The part to which a kept tensor belongs: what only a later layer reads is that layer's input.

    Args:
        own: place of the operator that makes it.
        readers: places of those that read it in the forward.
    """
    others = set(readers)
    later = {place for place in others if place > own}
    if later and later == others:
        return name_of(min(later)) if len(later) == 1 else COMMON
    return COMMON if later else name_of(own)


def forward_segments(nodes: list[Node]) -> list[tuple[str, int]]:
    """(part, place behind its last operator) in the order in which a forward runs them."""
    found: list[tuple[str, int]] = []
    current = _FIRST
    for number, node in enumerate(nodes):
        place = _place(node)
        if place is not None and place > current:
            found.append((name_of(current), number))
            current = place
    return [*found, (name_of(current), len(nodes))]


def backward_segments(nodes: list[Node]) -> list[tuple[str, int]]:
    """(part, place behind its last operator): a layer's backward ends with the last gradient that it adds up."""
    ends: dict[int, int] = {}
    head = 0
    for number, node in enumerate(nodes):
        if layer := _PARAMETER_LAYER.search(node.head):
            ends[int(layer[1])] = number + 1
        elif not ends and _OF_HEAD.search(node.head):
            head = number + 1
    found = [(BACK, head)] + [(str(layer), end) for layer, end in sorted(ends.items(), key=lambda item: item[1])]
    return [*found, (FRONT, len(nodes))]


def parts_of(
    saved: Mapping[str, int], forward: list[Node], backward: list[Node], moments: Callable[[list[Node]], list[Moment]]
) -> dict[str, dict[str, int]]:
    """Part -> what it leaves ("saved"), and the most alive in its "forward", above its start, and in its "backward"."""
    found = {name: {"saved": size, "forward": 0, "backward": 0} for name, size in saved.items()}
    for key, segments, seen in (
        ("forward", forward_segments(forward), moments(forward)),
        ("backward", backward_segments(backward), moments(backward)),
    ):
        first, start = 0, 0
        for name, end in segments:
            if end > first:
                inside = seen[first:end]
                part = found.setdefault(name, {"saved": 0, "forward": 0, "backward": 0})
                part[key] = max(item.most for item in inside) - (start if key == "forward" else 0)
                first, start = end, inside[-1].left
    return found


def curves_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Most bytes alive in each part of a forward ("F") and, from the last part to the first, of a backward ("B")."""
    alive, forward = 0, []
    for part in parts:
        forward.append(alive + part["forward"])
        alive += part["saved"]
    return {"F": forward, "B": [part["backward"] for part in reversed(parts)]}


def put_together(parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """ "saved", "forward" and "backward" of a chunk of such parts, in the order of its forward.

    A forward piles up what its parts leave; a backward hands back what it took and adds its gradients up as it goes,
    so that its fullest part counts.
    """
    most = alive = 0
    for part in parts:
        most = max(most, alive + part["forward"])
        alive += part["saved"]
    return {"saved": alive, "forward": most, "backward": max((part["backward"] for part in parts), default=0)}
