"""This module estimates activation memory from the graph, layer by layer: it finds the tensors that the forward pass
keeps for the backward pass, and the tensors that are in memory at one moment.

MindSpore's forward subgraph passes a list of tensors to its backward: the tensors that are kept after recomputation and
all other changes. The bytes of these tensors are exact, except for tensors that share memory. Tensors that are alive
inside a subgraph are counted in the order of the graph's text; a device runs the operators in another order, and reuses
and fragments memory, so the bytes of these tensors are an estimate.

A pass is also divided into layers, so that stages with other layers can be composed from the parts. MindSpore writes a
pass in the order of its layers and keeps the path of cells on most operators. The part before the first layer (the
embedding) is `FRONT`, the part after the last one (the head, MTP layers, the loss) is `BACK`, and the tensors that
several layers read and none of them computes (the angles of rotary positions) are `COMMON`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from tools.dryrun.collectives import attributes_of
from tools.dryrun.graph_text import GraphText, Node, TensorType, arguments_of, chunks_of
from tools.dryrun.memory import BYTES
from tools.estimate.memory.training_graph import LAYER_INPUT, module_of_path

FRONT, BACK, COMMON = "front", "back", "common"
_LAYER = re.compile(r"decoder-\w+/layers-CellList/(\d+)-")
_CELL = re.compile(r"-\w+Model/(\w+)-\w+/(\w+)")
_BEFORE = ("embedding", "rotary_pos_emb")
_PARAMETER_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
_OF_HEAD = re.compile(r"accu_grads\.(?!decoder\.layers\.|embedding\.)")
_FIRST, _LAST = -1, 1 << 30  # of `FRONT` and `BACK` among numbers of layers


class Moment(NamedTuple):
    """A `Moment` holds the bytes in memory while an operator runs, and the bytes that remain afterwards, when tensors
    that no later operator reads have been freed.
    """

    most: int
    left: int


def name_of(place: int) -> str:
    """Return the report's key for a part of the forward or backward pass: the number of a layer, or "front" or "back"
    for the operators before the first or after the last layer.
    """
    return {_FIRST: FRONT, _LAST: BACK}.get(place, str(place))


def places_of(nodes: list[Node]) -> list[int]:
    """Return the layer of each operator of a forward pass, read from the operator's module path. An operator without a
    layer in its module path belongs to the layer of the operator before it.
    """
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
    """Return the part of the model (such as a layer) to which the memory of a kept tensor is assigned. The memory is
    assigned to the part that computes the tensor (`own`), or to a later part if only that part reads the tensor.
    """
    others = set(readers)
    later = {place for place in others if place > own}
    if later and later == others:
        return name_of(min(later)) if len(later) == 1 else COMMON
    return COMMON if later else name_of(own)


def forward_segments(nodes: list[Node]) -> list[tuple[str, int]]:
    """Return a pair (part, position after the part's last operator) for each part of a forward pass, in order; a part
    is a layer, or the operators before or after all layers.
    """
    found: list[tuple[str, int]] = []
    current = _FIRST
    for number, node in enumerate(nodes):
        place = _place(node)
        if place is not None and place > current:
            found.append((name_of(current), number))
            current = place
    return [*found, (name_of(current), len(nodes))]


def backward_segments(nodes: list[Node]) -> list[tuple[str, int]]:
    """Return a pair (part, position after the part's last operator) for each part of a backward pass. The part of a
    layer ends with the operator that accumulates the last gradient of the layer's weights.
    """
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
    saved: Mapping[str, int], forward: list[Node], backward: list[Node], seen: tuple[list[Moment], list[Moment]]
) -> dict[str, dict[str, int]]:
    """Return the memory of each part of the model (such as a layer): the bytes kept for its backward pass ("saved"),
    and the peak bytes during its "forward" and "backward" passes. The peak of the "forward" pass does not include the
    bytes at the start of the pass. The argument `seen` holds a `Moment` (the bytes in memory) for each operator of the
    forward and the backward pass.
    """
    found = {name: {"saved": size, "forward": 0, "backward": 0} for name, size in saved.items()}
    segments = forward_segments(forward), backward_segments(backward)
    for key, parts, moments in zip(("forward", "backward"), segments, seen, strict=True):
        first, start = 0, 0
        for name, end in parts:
            if end > first:
                inside = moments[first:end]
                part = found.setdefault(name, {"saved": 0, "forward": 0, "backward": 0})
                part[key] = max(item.most for item in inside) - (start if key == "forward" else 0)
                first, start = end, inside[-1].left
    return found


def curves_of(parts: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the peak memory in bytes during each layer (or other part), for a forward pass ("F") and a backward pass
    ("B"), in the order in which the pass runs the layers.
    """
    alive, forward = 0, []
    for part in parts:
        forward.append(alive + part["forward"])
        alive += part["saved"]
    return {"F": forward, "B": [part["backward"] for part in reversed(parts)]}


def put_together(parts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes "saved", "forward" and "backward" of a pipeline chunk that consists of the given layers and
    other parts, in the order of the forward pass. In a forward pass, the tensors that the layers keep for the backward
    pass add up. A backward pass frees the kept tensors layer by layer, so the peak of the pass is the largest peak of
    any layer.
    """
    most = alive = 0
    for part in parts:
        most = max(most, alive + part["forward"])
        alive += part["saved"]
    return {"saved": alive, "forward": most, "backward": max((part["backward"] for part in parts), default=0)}


POINTS = 16  # of a curve
_PARAMETER = re.compile(r"%(para\d+)_")
VIEWS = frozenset(("Reshape", "TupleGetItem", "Depend", "ExpandDims", "Squeeze", "Load"))  # of their first argument


def activations_of(graph: GraphText, rows: int) -> list[dict[str, Any]]:
    """Return for each pipeline chunk the bytes "saved" for the backward pass of a micro-batch, and the peak memory in
    bytes during the "forward" and the "backward" pass. A tensor dimension that depends on routing is assumed to have
    the size `rows`.

    The key "parts" holds the same bytes by layer (see `FRONT`), "modules" holds the saved bytes by module, and "curves"
    holds the largest number of bytes alive in each of at most `POINTS` sections of a pass. Without pipeline parallelism
    the whole step counts as one "backward" pass.
    """
    found = []
    for name, behind in chunks_of(graph):
        forward, backward = graph.graphs[name], graph.graphs.get(behind, [])
        modules = saved_modules(forward, behind, rows)
        for place, size in received_bytes(graph, name, behind, rows).items():
            modules.setdefault(place, Counter())[LAYER_INPUT] += size
        saved = {place: sum(own.values()) for place, own in modules.items()}
        seen = moments_of(forward, rows), moments_of(backward, rows)
        parts = parts_of(saved, forward, backward, seen)
        found.append(
            {
                "saved": sum(saved.values()),
                "forward": peak_bytes(seen[0]),
                "backward": peak_bytes(seen[1]),
                "parts": {place: part | {"modules": modules.get(place, {})} for place, part in parts.items()},
                "modules": added(modules.values()),
                "curves": dict(zip("FB", map(curve_of, seen), strict=True)),
            }
        )
    if not found:  # without a pipeline MindSpore leaves no passes in subgraphs of their own
        step = moments_of(graph.graphs[graph.root], rows)
        whole = {"saved": 0, "forward": 0, "backward": peak_bytes(step), "parts": {}, "modules": {}}
        found.append(whole | {"curves": {"F": [], "B": curve_of(step)}})
    return found


def added(modules: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up mappings from a name (such as that of a module) to a number, name by name, and return the sums."""
    found: Counter[str] = Counter()
    for own in modules:
        found.update(own)
    return dict(found)


def curve_of(moments: Sequence[Moment]) -> list[int]:
    """Return the memory over the course of a pass. The operators of the pass are divided into at most `POINTS` equal
    sections, and each section gives its peak memory in bytes.
    """
    most = [moment.most for moment in moments]
    ends = [len(most) * point // POINTS for point in range(POINTS + 1)]
    return [max(most[first:end]) for first, end in pairwise(ends) if end > first]


def routed_rows(graph: GraphText, even: int) -> int:
    """Return the number of token rows that a rank dispatches to experts: the padded number of rows if the graph pads
    them, and `even` otherwise. The argument `even` is a rank's number of tokens x top-k, which is the number of rows of
    each rank if routing is even.
    """
    rows = even
    for node in (node for nodes in graph.graphs.values() for node in nodes if node.op in ("AlltoAllV", "AllToAllV")):
        block = attributes_of(node.text).get("block_size", 1)
        taken = node.inputs[0] if node.inputs else TensorType("", (-1,))
        if -1 not in taken.shape and isinstance(block, int):
            rows = max(rows, math.prod(taken.shape) // block)
    return rows


def saved_modules(nodes: list[Node], backward: str, rows: int) -> dict[str, Counter[str]]:
    """Return the bytes of activations that are kept for the backward pass, as a nested dictionary layer (or other part)
    -> module -> bytes.
    """
    bound = next((node for node in nodes if node.binds == backward), None)
    if bound is None:
        return {}
    kept = set()
    for number in bound.operands:
        kept |= _owners(number, nodes)
    places = places_of(nodes)
    readers: dict[int, set[int]] = {number: set() for number in kept}
    for place, node in zip(places, nodes, strict=True):
        if node.op in VIEWS or node.op in ("MakeTuple", "Partial", "Return", "UpdateState"):
            continue
        for number in node.operands:
            for owner in _owners(number, nodes) & kept:
                readers[owner].add(place)
    found: dict[str, Counter[str]] = {}
    for number in kept:
        own = found.setdefault(owner_place(places[number], readers[number]), Counter())
        own[module_of_path(nodes[number].scope)] += output_bytes(nodes[number], rows)
    return found


def received_bytes(graph: GraphText, forward: str, backward: str, rows: int) -> dict[str, int]:
    """Return the bytes that a pipeline chunk receives from the previous stage and keeps for its backward pass, as a
    dictionary layer -> bytes. The received tensors are arguments of the forward subgraph, and recomputation of a layer
    starts from them.
    """
    nodes, root = graph.graphs[forward], graph.graphs[graph.root]
    bound = next((node for node in nodes if node.binds == backward), None)
    calls = [node for node in root if forward in node.calls]
    if bound is None or not calls:
        return {}
    arguments = [arguments_of(node.head) for node in calls[:2]]
    kept = set(_PARAMETER.findall(bound.head))
    places = places_of(nodes)
    found: Counter[str] = Counter()
    for index, parameter in enumerate(graph.parameters.get(forward, ())):
        taken = [row[index] for row in arguments if index < len(row)]
        if parameter not in kept or not taken or len(set(taken)) < len(taken) or not taken[0][1:].isdecimal():
            continue  # not kept, or the same for every micro-batch
        owners = [root[owner] for owner in _owners(int(taken[0][1:]), root)]
        size = sum(output_bytes(node, rows) for node in owners if node.op == "Receive")
        if size:
            reader = f"%{parameter}_"
            place = min((place for place, node in zip(places, nodes, strict=True) if reader in node.head), default=0)
            found[name_of(place)] += size
    return dict(found)


def kept_bytes(graph: GraphText, rows: int) -> dict[str, int]:
    """Return for each weight the bytes of tensors that are computed from the weight once in a step, and that all
    micro-batches use. For example, the copy of a weight in compute precision is counted, which stays in memory for the
    whole step.
    """
    nodes = graph.graphs[graph.root]
    forward = {name for name, _ in chunks_of(graph)}
    taken: Counter[int] = Counter()
    for node in nodes:
        if forward.intersection(node.calls):
            taken.update({owner for operand in node.operands for owner in _owners(operand, nodes)})
    shared = [owner for owner, times in taken.items() if times > 1]
    return added({_weight(nodes[owner], nodes): output_bytes(nodes[owner], rows)} for owner in shared)


def _weight(node: Node, nodes: list[Node]) -> str:
    """Return the parameter that a node is computed from, by its first arguments; "" when it has none."""
    while node.value is not None:
        node = nodes[node.value]
    match = re.search(r"%para\d+_([^\s,()]+)", node.head)
    return match[1] if match else ""


def peak_bytes(moments: Sequence[Moment]) -> int:
    """Return the peak memory in bytes during a forward or backward pass."""
    return max((moment.most for moment in moments), default=0)


def moments_of(nodes: list[Node], rows: int) -> list[Moment]:
    """Return for each operator the bytes in memory while it runs and after it, in the order of the graph's text; views
    need no memory.
    """
    last = {
        owner: place
        for place, node in enumerate(nodes)
        for operand in node.operands
        for owner in _owners(operand, nodes)
    }
    ends: dict[int, list[int]] = {}
    for owner, place in last.items():
        ends.setdefault(place, []).append(owner)
    alive, found = 0, []
    for place, node in enumerate(nodes):
        if node.op not in VIEWS and node.op != "MakeTuple" and place in last:
            alive += output_bytes(node, rows)
        most = alive
        alive -= sum(output_bytes(nodes[owner], rows) for owner in ends.get(place, ()))
        found.append(Moment(most, alive))
    return found


def output_bytes(node: Node, rows: int) -> int:
    """Return the number of bytes of an operator's output tensors."""
    block = attributes_of(node.text).get("block_size", 1) if -1 in {d for t in node.outputs for d in t.shape} else 1
    return sum(tensor_bytes(item, rows * (block if isinstance(block, int) else 1)) for item in node.outputs)


def tensor_bytes(item: TensorType, rows: int) -> int:
    """Return the bytes of a tensor; a dimension of -1, whose size depends on routing, is assumed to have the size
    `rows`.
    """
    return BYTES.get(item.dtype, 4) * math.prod(rows if size < 0 else size for size in item.shape)


def _owners(number: int, nodes: list[Node]) -> set[int]:
    """Return the operators whose memory node `number` is, or is a view of."""
    found, waiting = set(), [number]
    while waiting:
        node = nodes[waiting[-1]]
        current = waiting.pop()
        if node.op == "MakeTuple":
            waiting.extend(node.operands)
        elif node.op not in VIEWS:
            found.add(current)
        elif node.value is None:
            continue  # a view of a parameter, which is counted elsewhere
        elif node.op == "TupleGetItem" and nodes[node.value].op == "MakeTuple":
            waiting.extend(_member(node, nodes[node.value]))
        else:
            waiting.append(node.value)
    return found


def _member(node: Node, made: Node) -> list[int]:
    """Return the one element of a MakeTuple that a TupleGetItem takes, if it is a node of this graph."""
    parts = made.head.partition("(")[2].rstrip(")").split(", ")
    index = int(node.head.rpartition("I64(")[2].partition(")")[0])
    part = parts[index]
    return [int(part[1:])] if part[1:].isdecimal() and part[0] == "%" else []
