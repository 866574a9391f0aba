"""This module reads the communication and computation of one rank from MindSpore's final graph: collectives in program
order, and FLOPs.

The module goes through the root of the graph and expands its calls. MindSpore's backend may swap collectives without an
edge between them, so each collective lists the earlier collectives for which it waits, through data or only through a
`Depend`. FLOPs are those of the matrix products and the attention of one micro-batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.ranks import made_up_name
from tools.dryrun.graph_text import GraphText, Node, TensorType, chunks_of

Attribute = int | bool | str | tuple[int, ...]

COLLECTIVES = frozenset(
    ("AllReduce", "AllGather", "AllGatherV", "ReduceScatter", "ReduceScatterV", "Send", "Receive", "Broadcast")
    + ("AlltoAll", "AllToAll", "AlltoAllV", "AllToAllV", "AlltoAllVC", "AllToAllVC", "Barrier")
    + ("NeighborExchange", "NeighborExchangeV2", "CollectiveScatter", "CollectiveGather")
)
_ATTRIBUTE = re.compile(r'(\w+): (?:I64\((-?\d+)\)|Bool\((\d)\)|"([^"]*)"|[(\[]([-\d, ]*)[)\]])')
# rank_list and group_rank_ids are wrong for groups created in Python (they say the world)
_NOT_KEPT = ("group", "group_ranks", "rank_list", "group_rank_ids", "rank_size")


@dataclass(frozen=True)
class Collective:
    """A `Collective` describes one collective operation that one rank executes in a step.

    `role` is forward, recompute (one of the forward pass that is repeated in the backward pass), gradient, or step
    (outside of the passes: weights gathered before the forward pass, gradients reduced, norms, the optimizer). `after`
    and `after_depend` hold indices of collectives of the same subgraph that must end before this collective starts:
    `after` because of data, and `after_depend` because of a `Depend` only. `source` is the line of Python that made the
    collective (for a gradient, the line of the forward pass), and `scope` is the path of cells. MindSpore does not
    always keep `source` and `scope`: either may be empty, and inside a Morph cell `scope` is often truncated. The group
    is always known.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    role: str
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    attributes: dict[str, Attribute]
    source: str = ""
    scope: str = ""
    after: tuple[int, ...] = ()
    after_depend: tuple[int, ...] = ()


def read_collectives(graph: GraphText, ranks_of: Callable[[str], tuple[int, ...] | None]) -> list[Collective]:
    """Return the collectives of a graph in program order; both branches of a condition are included, and a subgraph
    that is called twice counts twice. The argument `ranks_of` is a function that returns the ranks of a group.

    Raises:
        ClusterError: a collective's group is unknown.
    """
    generated = generated_groups(graph)
    bodies = {name: _ordered(nodes, name, ranks_of, generated) for name, nodes in graph.graphs.items()}
    found: list[Collective] = []
    _expand(graph.root, bodies, found)
    return found


def attributes_of(text: str, section: str = "primitive_attrs") -> dict[str, Attribute]:
    """Return the values in one section, such as `section: {...}`, of an operator's text as plain Python values."""
    inside = text.partition(f"{section}: {{")[2].partition("}")[0]
    values: dict[str, Attribute] = {}
    for name, integer, flag, word, several in _ATTRIBUTE.findall(inside):
        if integer:
            values[name] = int(integer)
        elif flag:
            values[name] = flag == "1"
        else:
            values[name] = tuple(map(int, re.findall(r"-?\d+", several))) if several else word
    return values


def role_of(node: Node, graph: str) -> str:
    """Return the role of an operator (forward, recompute, gradient or step), read from MindSpore's marks in the name of
    the subgraph and in the operator's text.
    """
    if "▸" in graph:
        return "forward"
    if "◂" in graph:
        return "gradient" if "forward_node_name:" in node.text or node.hand_written else "recompute"
    return "step"


def _collective(node: Node, graph: str, ranks_of: Callable, generated: dict[str, tuple[int, ...]]) -> Collective:
    attributes = attributes_of(node.text)
    group = str(attributes.get("group", ""))
    ranks = ranks_of(group) or generated.get(group)
    if node.op in ("Send", "Receive"):  # of a pipeline: the group is MindSpore's own, and stated rightly
        ranks = ranks or attributes.get("group_rank_ids")
    if ranks is None:
        raise ClusterError(f"{node.op} at {node.source or node.scope} uses group {group!r}, which was never created")
    kept = {name: value for name, value in attributes.items() if name not in _NOT_KEPT}
    if node.op in ("Send", "Receive"):
        derived = attributes_of(node.text, "cnode_primal_attrs")
        kept |= {name: derived[name] for name in ("micro", "chunk") if name in derived}
    role = role_of(node, graph)
    return Collective(node.op, group, ranks, role, node.inputs, node.outputs, kept, node.source, node.scope)


def _ordered(nodes: list[Node], graph: str, ranks_of: Callable, generated: dict) -> list[Collective | list[str]]:
    """Return the graph's collectives and (as lists of names) its calls, in order; `after` counts its collectives.
    Numbers are sets as bits: bit i is the graph's i-th collective, and a node waits for what its operands wait for.
    """
    by_data: list[int] = []
    by_any: list[int] = []
    kept: list[Collective | list[str]] = []
    collectives = 0
    for node in nodes:
        data, control = _operands(node, nodes)
        waits_data, waits_any = _union(by_data, data), _union(by_any, data + control)
        if node.op in COLLECTIVES:
            after, extra = _bits(waits_data), _bits(waits_any & ~waits_data)
            kept.append(replace(_collective(node, graph, ranks_of, generated), after=after, after_depend=extra))
            waits_data |= 1 << collectives
            waits_any |= 1 << collectives
            collectives += 1
        elif node.calls:
            kept.append(node.calls)
        by_data.append(waits_data)
        by_any.append(waits_any)
    return kept


def _operands(node: Node, nodes: list[Node]) -> tuple[list[int], list[int]]:
    """Return operands whose value a node uses, and those that it only waits for."""
    if node.op == "Depend":
        value = re.match(r"Depend\(%(\d+)\b", node.head)  # its value may be a parameter or a constant
        data = [int(value[1])] if value else []
        return data, node.operands[len(data) :]
    member = re.match(r"TupleGetItem\(%(\d+), I64\((\d+)\)", node.head)
    made = member and re.fullmatch(r"MakeTuple\(((?:%[^ ,()]+(?:, )?)+)\)", nodes[int(member[1])].head)
    if member and made:  # one part of the tuple, not all
        part = made[1].split(", ")[int(member[2])]
        return [int(number) for number in re.findall(r"^%(\d+)$", part)], []
    return node.operands, []


def _union(waits: list[int], nodes: list[int]) -> int:
    return reduce(or_, (waits[node] for node in nodes), 0)


def _bits(number: int) -> tuple[int, ...]:
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)


def _expand(name: str, bodies: dict[str, list[Collective | list[str]]], found: list[Collective]) -> None:
    """Append the collectives of a graph to `found`, calls in their place."""
    places: list[int] = []  # of this graph's collectives in `found`
    for item in bodies[name]:
        if isinstance(item, list):
            for called in item:
                _expand(called, bodies, found)
            continue
        places.append(len(found))
        after, extra = (tuple(places[index] for index in waits) for waits in (item.after, item.after_depend))
        found.append(replace(item, after=after, after_depend=extra))


def generated_groups(graph: GraphText) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each communication group that MindSpore's C++ code created. In the graph's text, only some
    collectives of a group state the ranks of the group. MindSpore names a group that it created by a hash of the
    group's ranks, which shows whether the stated ranks are right.
    """
    found: dict[str, tuple[int, ...]] = {}
    for node in (node for nodes in graph.graphs.values() for node in nodes if node.op in COLLECTIVES):
        attributes = attributes_of(node.text)
        group, members = str(attributes.get("group", "")), attributes.get("group_rank_ids")
        if re.fullmatch(r"\d+(-\d+)*", ranks := str(attributes.get("group_ranks", ""))):
            found[group] = tuple(map(int, ranks.split("-")))
        elif isinstance(members, tuple) and made_up_name(members) == group:
            found.setdefault(group, members)
    return found


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
    """Return for each pipeline chunk the FLOPs of a micro-batch: "forward", "recompute" and "gradient". A tensor
    dimension that depends on routing is assumed to have the size `rows`.
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
    """Return the FLOPs of an operator. A multiply-add counts as 2 FLOPs, and attention counts as causal attention over
    the whole sample.
    """
    if node.op in _PRODUCTS:
        taken, given = node.inputs[0], node.outputs[0]
        return 2 * _size(taken, rows) * _size(TensorType("", given.shape[-1:]), rows)
    return _attention(node) if node.op in _ATTENTION else 0


def _attention(node: Node) -> int:
    """Return the FLOPs of an attention operator or of its gradient. The letters of a layout are B (batch), S
    (sequence), N (heads), D (width of a head) and H = N x D.
    """
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


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `4 ranks 0, 2, 4, 6`; if there are many ranks, the text lists only some of them."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]} only"
    shown = [str(rank) for rank in (ordered if len(ordered) <= 4 else ordered[:3])]
    return f"{len(ordered)} ranks {', '.join(shown)}" + (f" ... {ordered[-1]}" if len(ordered) > 4 else "")
