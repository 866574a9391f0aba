"""Which part of the model an operator belongs to: a layer by its number, MTP layers, the embedding, the head.

MindSpore keeps the path of cells on most operators, and the names of parameters on those that read them. An operator
that has neither belongs to what it takes from, else to what stands in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tools.dryrun.graph.text import Node

EMBEDDING, HEAD, MTP, COMMON = "embedding", "head", "mtp", "other"
_LAYER = re.compile(r"decoder-\w+/layers-CellList/(\d+)-|(?<![A-Za-z])decoder\.layers\.(\d+)\.")
_WORDS = (
    (MTP, re.compile(r"/mtp-\w+/|(?<![A-Za-z])mtp\.")),
    (EMBEDDING, re.compile(r"/embedding-\w+|(?<![A-Za-z])embedding\.\w")),
    (HEAD, re.compile(r"/output_layer-\w+|/final_layernorm-|(?<![A-Za-z])(?:output_layer|decoder\.final_layernorm)\.|/loss-\w+")),
)


def parts_of(nodes: Sequence[Node]) -> list[str]:
    """For each operator of a subgraph "0", "1", ... of a layer, or one of the names above."""
    found: list[str] = []
    for node in nodes:
        own = _written(node.scope) or _written(node.head)
        taken = (found[place] for place in node.operands if found[place] != COMMON)
        found.append(own or next(taken, found[-1] if found else COMMON))
    return found


def _written(text: str) -> str:
    """The part that a path of cells or a parameter's name says."""
    for part, pattern in _WORDS[:1]:
        if pattern.search(text):
            return part
    if layer := _LAYER.search(text):
        return layer[1] or layer[2]
    return next((part for part, pattern in _WORDS[1:] if pattern.search(text)), "")
