"""Floating-point operations of one micro-batch, by what the compiled graph multiplies: products and attention only."""

from __future__ import annotations

import math

from tools.dryrun.collectives import role_of
from tools.dryrun.graph_text import GraphText, Node, TensorType
from tools.dryrun.passes import chunks_of

_PRODUCTS = frozenset(("MatMul", "MatMulExt", "BatchMatMul", "BatchMatMulExt", "Dense", "GroupedMatmul", "Mm", "Bmm"))
_ATTENTION = {"FlashAttentionScore": (1, 1), "FlashAttentionScoreGrad": (3, 2)}  # products of d_qk and of d_v


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
    if node.op in _ATTENTION:
        query, key, value = (item.shape for item in node.inputs[:3])
        over_qk, over_v = _ATTENTION[node.op]
        if len(query) == 4:  # batch, heads, tokens, width
            pairs = query[0] * query[1] * query[2] * key[2]
        else:  # tokens, heads, width
            pairs = query[0] * query[1] * key[0]
        return pairs * (over_qk * query[-1] + over_v * value[-1])  # x 2 for multiply-add, x 1/2 for causal
    return 0


def _size(item: TensorType, rows: int) -> int:
    return math.prod(rows if size < 0 else size for size in item.shape)
