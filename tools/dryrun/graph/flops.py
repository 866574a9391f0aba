"""Floating-point operations of one micro-batch, by what the compiled graph multiplies: products and attention only."""

from __future__ import annotations

import math
import re

from tools.dryrun.graph.collectives import role_of
from tools.dryrun.graph.passes import chunks_of
from tools.dryrun.graph.text import GraphText, Node, TensorType

_PRODUCTS = frozenset(
    ("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Dense", "GroupedMatmul", "InplaceGroupedMatmulAdd", "Mm",
     "Bmm")
)  # fmt: skip
_ATTENTION = {"FlashAttentionScore": (1, 1), "FlashAttentionScoreGrad": (3, 2)}  # products of d_qk and of d_v
MULTIPLY = _PRODUCTS | _ATTENTION.keys()  # operators that `node_flops` knows
# the last arguments: heads, kept share, scale, tokens before and behind, precision, layout, kind of mask
_ARGUMENTS = re.compile(r"I64\((\d+)\), F32\(\S+\), F32\(\S+\)(?:, I64\(-?\d+\)){3}, I64\((\d)\), I64\(\d+\)\)$")
_LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")  # MindSpore's numbers of them


def flops_of(graph: GraphText, rows: int) -> list[dict[str, int]]:
    """For each chunk: FLOPs of one micro-batch on this rank, "forward", "recompute" and "gradient".

    Args:
        rows: what stands for dimensions that only routing decides.
    """
    found = []
    for names in chunks_of(graph):
        counts = {"forward": 0, "recompute": 0, "gradient": 0}
        for name in filter(None, names):
            for node in graph.graphs[name]:
                if number := node_flops(node, rows):
                    counts[role_of(node, name)] += number
        found.append(counts)
    return found


def node_flops(node: Node, rows: int) -> int:
    """FLOPs of one operator: 2 for each multiply-add; attention is causal, its documents are not known."""
    if node.op in _PRODUCTS:
        taken, given = node.inputs[0], node.outputs[0]
        return 2 * _size(taken, rows) * _size(TensorType("", given.shape[-1:]), rows)
    return _attention(node) if node.op in _ATTENTION else 0


def _attention(node: Node) -> int:
    """FLOPs of an attention or its gradient, in each layout: B(atch), S(equence), N heads, D (width), H = N x D."""
    written = _ARGUMENTS.search(node.head)
    assert written, f"no heads and layout in {node.head}"
    heads, layout = int(written[1]), _LAYOUTS[int(written[2])]
    query, key, value = (dict(zip(layout, item.shape, strict=True)) for item in node.inputs[:3])
    if "H" in layout:
        of_qk = query["H"] // heads
        of_v = value["H"] // (key["H"] // of_qk)  # keys and values may have fewer heads
    else:
        heads, of_qk, of_v = query["N"], query["D"], value["D"]
    tokens = "T" if "T" in layout else "S"  # T: those of all sequences
    pairs = query.get("B", 1) * heads * query[tokens] * key[tokens]
    over_qk, over_v = _ATTENTION[node.op]
    return pairs * (over_qk * of_qk + over_v * of_v)  # x 2 for multiply-add, x 1/2 for causal


def _size(item: TensorType, rows: int) -> int:
    return math.prod(rows if size < 0 else size for size in item.shape)
