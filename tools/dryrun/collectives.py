"""The collectives of one rank, in program order, from the text of MindSpore's final graph.

The text lists each subgraph's operators topologically and names what a subgraph calls; the root is walked and its
calls are expanded. MindSpore's backend may swap collectives that no edge orders, so each carries which earlier ones
it waits for, and whether that takes a `Depend`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from plugins.errors import ClusterError

Attribute = int | bool | str | tuple[int, ...]

_COLLECTIVE = re.compile(
    r"(?:PrimFunc_)?(AllReduce|AllGatherV?|ReduceScatterV?|All[tT]oAll(?:V|VC)?|Send|Receive|Broadcast|Barrier"
    r"|NeighborExchange(?:V2)?|CollectiveScatter|CollectiveGather)\("
)
_ROOT = re.compile(r"# IR entry: @(\S+)")
_GRAPH = re.compile(r"subgraph @([^\s(]+)\(")
_NODE = re.compile(r"  %(\d+)\([^)]*\) = (.*)")
_TYPES = re.compile(r"      : \((<.*)\) -> \((<.*)\)")
_TENSOR = re.compile(r"Tensor\[(\w+)\]\]?, \(([-\d, ]*)\)")
_SCOPE = re.compile(r"      # Fullname with scope: \((.*)\)")
_FILE = re.compile(r"      # In file (\S+?):(\d+)")
_CALL = re.compile(r"call @|%\d+\[")  # a call by name, or of a value whose graphs stand in brackets
_SECTION = re.compile(r" \{instance name:| (?:primitive_attrs|cnode_attrs|cnode_primal_attrs): \{")
_ATTRIBUTE = re.compile(r'(\w+): (?:I64\((-?\d+)\)|Bool\((\d)\)|"([^"]*)"|\(([-\d, ]*)\))')
# rank_list and group_rank_ids are wrong for groups created in Python (they say the world)
_NOT_KEPT = ("group", "group_ranks", "rank_list", "group_rank_ids", "rank_size")


class TensorType(NamedTuple):
    """What travels: MindSpore's name of the type, and the shape on one rank (-1: known at run time only)."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Collective:
    """One collective of one rank's step.

    `role` is forward, recompute (a forward one, repeated in the backward), gradient or step (around them: weights
    gathered before the forward, gradients reduced, norms, the optimizer). `after` and `after_depend` hold places in the
    list: collectives of the same subgraph that must end before this one starts, by the data that flows and,
    additionally, by `Depend`. `source` is the line of Python that stands for it, of the forward for a gradient, and
    `scope` the path of cells. MindSpore keeps both as well as it can: either may be empty, and inside a Morph the scope
    is often cut short. What is always there is the group.
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


@dataclass
class _Node:
    """One operator: its text, and what follows below it."""

    text: str
    operands: list[int]
    collective: Collective | None = None
    calls: list[str] = field(default_factory=list)


def read_collectives(graph: Path, ranks_of: Callable[[str], tuple[int, ...] | None]) -> list[Collective]:
    """The collectives of the text `graph`, in program order; a subgraph called twice counts twice.

    Args:
        graph: the dump that `virtual_cluster.final_graph` finds.
        ranks_of: global ranks of a group, None for those that C++ made up: `VirtualCluster.ranks_of`.

    Both branches of a condition are listed (in training steps, only the one that updates has any).

    Raises:
        ClusterError: the text is no such graph, or a collective's group is unknown.
    """
    with graph.open(encoding="utf-8", errors="replace") as lines:
        root, graphs = _parse(lines)
    if root not in graphs:
        raise ClusterError(f"{graph}: this is not the text of a graph that MindSpore compiled")
    found: list[Collective] = []
    _expand(root, {name: _ordered(nodes) for name, nodes in graphs.items()}, found)
    generated = _generated_groups(graphs)
    return [replace(item, ranks=_ranks(item, ranks_of(item.group), generated)) for item in found]


def _parse(lines: Iterable[str]) -> tuple[str, dict[str, list[_Node]]]:
    """Name of the root graph, and the operators of each graph."""
    root = name = ""
    graphs: dict[str, list[_Node]] = {}
    nodes: list[_Node] = []
    for line in lines:
        if match := _NODE.match(line):
            assert int(match[1]) == len(nodes), "operators are numbered from 0 in each graph"
            nodes.append(_node(match[2], name))
        elif match := _GRAPH.match(line):
            name = match[1]
            nodes = graphs[name] = []
        elif match := _ROOT.match(line):
            root = match[1]
        elif nodes and (collective := nodes[-1].collective):
            nodes[-1].collective = _completed(collective, line)
    for nodes in graphs.values():
        for node in nodes:
            node.calls = [called for called in node.calls if called in graphs]
    return root, graphs


def _node(text: str, graph: str) -> _Node:
    """An operator from the text right of its '='."""
    head = _SECTION.split(text, maxsplit=1)[0]
    node = _Node(head, [int(number) for number in re.findall(r"%(\d+)\b", head)])
    if match := _COLLECTIVE.match(text):
        attributes = _attributes(text, "primitive_attrs")
        node.collective = Collective(
            op=match[1],
            group=str(attributes.get("group", "")),
            ranks=(),
            role=_role(text, graph),
            inputs=(),
            outputs=(),
            attributes=attributes,
        )
    elif _CALL.match(head):
        node.calls = re.findall(r"@([^\s(),\[\]]+)", head)
    return node


def _completed(collective: Collective, line: str) -> Collective:
    """A collective with what one of the lines below it says."""
    if match := _TYPES.match(line):
        return replace(collective, inputs=_tensors(match[1]), outputs=_tensors(match[2]))
    if match := _SCOPE.match(line):
        return replace(collective, scope=match[1])
    if match := _FILE.match(line):  # the last one is the innermost, and the forward's
        in_bprop = collective.role == "recompute" and "def bprop(" in line  # a gradient that a plugin wrote by hand
        return replace(
            collective,
            source=f"{'/'.join(Path(match[1]).parts[-2:])}:{match[2]}",
            role="gradient" if in_bprop else collective.role,
        )
    return collective


def _role(text: str, graph: str) -> str:
    """See `Collective`. MindSpore marks the graphs that it derives, and the gradients that it derives in them."""
    if "▸" in graph:
        return "forward"
    if "◂" in graph:
        return "gradient" if "forward_node_name:" in text else "recompute"
    return "step"


def _attributes(text: str, section: str) -> dict[str, Attribute]:
    """One `section: {...}` of an operator's text as plain values."""
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


def _tensors(text: str) -> tuple[TensorType, ...]:
    """`<Tensor[BFloat16], (256, -1)>, ...` as types."""
    return tuple(
        TensorType(dtype, tuple(map(int, re.findall(r"-?\d+", shape)))) for dtype, shape in _TENSOR.findall(text)
    )


def _ordered(nodes: list[_Node]) -> list[_Node]:
    """The graph's collectives and calls, in order; `after` counts within the graph's collectives.

    Numbers are sets as bits: bit i is the graph's i-th collective, and a node waits for what its operands wait for.
    """
    by_data: list[int] = []
    by_any: list[int] = []
    kept, collectives = [], 0
    for node in nodes:
        data, control = _operands(node, nodes)
        waits_data = _union(by_data, data)
        waits_any = _union(by_any, data + control)
        if node.collective:
            after, extra = _bits(waits_data), _bits(waits_any & ~waits_data)
            node.collective = replace(node.collective, after=after, after_depend=extra)
            waits_data |= 1 << collectives
            waits_any |= 1 << collectives
            collectives += 1
        if node.collective or node.calls:
            kept.append(node)
        by_data.append(waits_data)
        by_any.append(waits_any)
    return kept


def _operands(node: _Node, nodes: list[_Node]) -> tuple[list[int], list[int]]:
    """Operands whose value a node uses, and those that it only waits for."""
    if node.text.startswith("Depend("):
        value = re.match(r"Depend\(%(\d+)\b", node.text)  # its value may be a parameter or a constant
        data = [int(value[1])] if value else []
        return data, node.operands[len(data) :]
    member = re.match(r"TupleGetItem\(%(\d+), I64\((\d+)\)", node.text)
    made = member and re.fullmatch(r"MakeTuple\(((?:%[^ ,()]+(?:, )?)+)\)", nodes[int(member[1])].text)
    if member and made:  # one part of the tuple, not all
        part = made[1].split(", ")[int(member[2])]
        return [int(number) for number in re.findall(r"^%(\d+)$", part)], []
    return node.operands, []


def _union(waits: list[int], nodes: list[int]) -> int:
    """The bits of several nodes together."""
    result = 0
    for node in nodes:
        result |= waits[node]
    return result


def _bits(number: int) -> tuple[int, ...]:
    """Places of the bits that are set."""
    return tuple(place for place in range(number.bit_length()) if number >> place & 1)


def _expand(name: str, graphs: dict[str, list[_Node]], found: list[Collective]) -> None:
    """Append the collectives of a graph to `found`, calls in their place."""
    places: list[int] = []  # of this graph's collectives in `found`
    for node in graphs[name]:
        for called in node.calls:
            _expand(called, graphs, found)
        if item := node.collective:
            places.append(len(found))
            after, extra = (tuple(places[index] for index in waits) for waits in (item.after, item.after_depend))
            found.append(replace(item, after=after, after_depend=extra))


def _generated_groups(graphs: dict[str, list[_Node]]) -> dict[str, tuple[int, ...]]:
    """Ranks of the groups that C++ made up, which only some of their collectives state."""
    groups = {}
    for nodes in graphs.values():
        for item in filter(None, (node.collective for node in nodes)):
            stated = str(item.attributes.get("group_ranks", ""))
            if re.fullmatch(r"\d+(-\d+)*", stated):
                groups[item.group] = tuple(map(int, stated.split("-")))
    return groups


def _ranks(item: Collective, created: tuple[int, ...] | None, generated: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Global ranks of a collective's group."""
    ranks = created or generated.get(item.group)
    if ranks is None:
        raise ClusterError(f"{item.op} at {item.source or item.scope} uses group {item.group!r}, which nobody created")
    return ranks
