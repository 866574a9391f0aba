"""Which part of the model an operator belongs to: a layer by its number, MTP layers, the embedding, the head.

MindSpore keeps the path of cells on most operators, and the names of parameters on those that read them. In a
backward a gradient belongs to the layer whose gradients of weights are added up next, whatever its path: what several
layers share (the angles of rotary positions) has the path of the first. An operator that says nothing belongs to what
it takes from, else to what stands in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.dryrun.graph.by_layer import backward_segments
from tools.dryrun.graph.text import Node

EMBEDDING, HEAD, MTP, COMMON = "embedding", "head", "mtp", "other"
_LAYER = re.compile(r"decoder-\w+/layers-CellList/(\d+)-|(?<![A-Za-z])decoder\.layers\.(\d+)\.")
_WORDS = (
    (MTP, re.compile(r"/mtp-\w+/|(?<![A-Za-z])mtp\.")),
    (EMBEDDING, re.compile(r"/embedding-\w+|(?<![A-Za-z])embedding\.\w")),
    (
        HEAD,
        re.compile(
            r"/output_layer-\w+|/final_layernorm-|(?<![A-Za-z])(?:output_layer|decoder\.final_layernorm)\.|/loss-\w+"
        ),
    ),
)


def parts_of(nodes: Sequence[Node], backward: bool = False) -> list[str]:
    """For each operator of a subgraph "0", "1", ... of a layer, or one of the names above."""
    found: list[str] = []
    segments = backward_segments(list(nodes)) if backward else []
    for place, node in enumerate(nodes):
        own = next(filter(None, map(_written, (node.scope, node.head, *node.types))), "")
        if (not own or own.isdecimal()) and not node.scope.startswith("recompute_"):
            own = _layer_behind(segments, place) or own
        taken = (found[place] for place in node.operands if found[place] != COMMON)
        found.append(own or next(taken, found[-1] if found else COMMON))
    return found


def _layer_behind(segments: Sequence[tuple[str, int]], place: int) -> str:
    """The layer in whose stretch of the backward an operator stands; "" of the head's and the embedding's."""
    part = next((part for part, end in segments if place < end), "")
    return part if part.isdecimal() else ""


def _written(text: str) -> str:
    """The part that a path of cells or a parameter's name says."""
    for part, pattern in _WORDS[:1]:
        if pattern.search(text):
            return part
    if layer := _LAYER.search(text):
        return layer[1] or layer[2]
    return next((part for part, pattern in _WORDS[1:] if pattern.search(text)), "")
