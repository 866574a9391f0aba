"""This module reads from MindSpore's final graph how each weight's gradient is summed over ranks, and judges whether
this sum is right.

Every rank that holds the same slice of a weight computes a part of that weight's gradient. These parts must be added
over exactly those ranks, once: if a sum is missing, made twice or made over other ranks, the weights are trained
wrongly, and the loss does not show it at once. `_Walk` follows the graph backwards from the optimizer's update of each
weight, through clipping, scaling and the sums over micro-batches, to the operators that make the gradient, and collects
the collectives on this path. `judge` compares them with the ranks that the weight's layout names (`copies_of`).

MindSpore starts the backward pass with 1 / (devices of a stage) and then sums over all copies, even if they are equal,
so the ranks of the sum follow only from the weight's layout. `tools.dryrun.scale` judges the factors on this path.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from plugins.errors import ClusterError
from plugins.sealed_checkpoint.router_state import ADAM, MUON_MOMENT
from tools.dryrun.collectives import attributes_of, generated_groups, name_ranks
from tools.dryrun.graph_text import GraphText, Node, arguments_of, listed, tensors
from tools.dryrun.scale import SCALED, Numbers, Scale, number_of

RIGHT, WRONG, UNKNOWN = "right", "wrong", "unknown"

_SUMS = ("AllReduce", "ReduceScatter")
_MOVES = ("AllGather", "AlltoAll", "AlltoAllV", "Broadcast")  # collectives that add nothing
_SAME = frozenset(  # operators that hand on their first argument
    ("Cast", "Depend", "ExpandDims", "Load", "Neg", "Reshape", "Send", "Squeeze", "TensorMove", "Transpose")
)
_PADS = "StridedSliceGrad"  # puts zeros around its first argument: a rank's part of a slice is a part of the weight
_ADDED = frozenset(("Add", "AddExt", "Sub", "SubExt"))
_MAKES = frozenset(  # operators that make the gradient of a weight out of activations and their gradients
    ("BatchMatMul", "BatchMatMulExt", "BiasAddGrad", "Dense", "EmbeddingDenseBackward", "GroupedMatmul")
    + ("InplaceGroupedMatmulAdd", "LayerNormGrad", "MatMul", "MatMulExt", "Mm", "ReduceSum", "RmsNormGrad", "SumExt")
)
_OF_THE_NORM = frozenset(  # operators between the square of a gradient and the root of the global norm
    ("AddN", "AllReduce", "Div", "Divs", "ExpandDims", "MakeTuple", "RealDiv", "ReduceSum", "Reshape", "Sqrt", "SumExt")
)
_PARAMETER = re.compile(r"%(para\d+)_(\S+)")
_KEY = re.compile(r"ref_key=([^,>]+)")
_RECEIVED = "received from rank "
_CHECKED = "MatMul"  # what makes it is judged elsewhere
_CONSTANT = "a constant"
_MOMENTS = (ADAM[0], MUON_MOMENT)  # before a weight's name: what an optimizer keeps that is linear in the gradient
_SUMMED = "accu_grads."
# the size of every group without devices; MindSpore asks for it where the optimizer shards over only some of the copies
NO_SIZE = 2048


class Way(NamedTuple):
    """A `Way` is one path that a gradient takes in the graph, from the operator that computes it to the optimizer."""

    collectives: tuple[tuple[str, tuple[int, ...]], ...]  # (operator, ranks) of each, the last one first
    start: str  # the operator that computes the gradient, or at which the walk ends because it has no rule for it
    scale: Scale = Scale()  # the factor of the gradient on this path, without clipping


def copies_of(layout: Sequence[Any], rank: int) -> tuple[int, ...]:
    """Return the global ranks that hold the slice of a weight that `rank` holds, before the optimizer shards it.

    Args:
        layout: an entry of MindSpore's `parameter_layout_dict`: [0] the mesh of a stage's devices, [1] for each axis of
            the weight the axes of the mesh that cut it, counted from the last, or -1.
    """
    mesh = tuple(layout[0])
    cuts = {axis for axes in layout[1] for axis in (axes if isinstance(axes, (list, tuple)) else (axes,))} - {-1}
    first = rank // math.prod(mesh) * math.prod(mesh)
    here = np.unravel_index(rank - first, mesh)
    at = tuple(int(here[axis]) if len(mesh) - 1 - axis in cuts else slice(None) for axis in range(len(mesh)))
    return tuple(int(first + place) for place in np.ravel(np.arange(math.prod(mesh)).reshape(mesh)[at]))


def judge_gradients(
    graph: GraphText, ranks_of: Callable[[str], tuple[int, ...] | None], copies: Mapping[str, Sequence[int]], rank: int
) -> dict[str, dict[str, Any]]:
    """Judge for each weight that the optimizer of `rank` updates whether its gradient is summed rightly. The result for
    a weight has the keys "verdict", "why", "copies", "scales" and "norm". The result for a copy of another stage's
    weight has the keys "copy_of" (a rank of that stage), "summed" and "norm". The value of the key "scales" is judged
    by `tools.dryrun.scale.judge_scale`.

    A weight that two stages hold (the embedding, which MTP layers use again on the last stage) is sent from one to the
    other at the start of each step, and the gradient of the copy is sent back. The optimizer's update of the copy is
    overwritten. The sum over ranks is made before the gradient is sent ("summed" of the copy), or after it ("received"
    of the updated weight: the sending rank, and whether the sums follow); `gradients_report` compares these keys.

    Args:
        ranks_of: function from a group to its global ranks, None if unknown: `VirtualCluster.ranks_of`.
        copies: weight -> the ranks of the stage that hold the same slice of the weight as `rank`, see `copies_of`.

    Raises:
        ClusterError: a collective's group is unknown.
    """
    walk = _Walk(graph, ranks_of)
    found: dict[str, dict[str, Any]] = {}
    for name, own in copies.items():
        sent, received = walk.sent(name), walk.received(name)
        if not received:
            ways, others = sorted(walk.of_weight(name)), [other for other, _ in sent]
            verdict, why = judge(ways, own, rank, others)
            norm = _with_sizes(walk.norm_of(name), ways)
            found[name] = {"verdict": verdict, "why": why, "copies": list(own), "norm": norm}
            found[name]["scales"] = sorted({way.scale for way in ways if way.start != _CONSTANT})
            if others:
                after = {way.start: bool(way.collectives) for way in ways}
                found[name]["received"] = {other: after.get(f"{_RECEIVED}{other}", False) for other in others}
            continue
        back = [way for other, way in walk.sent(_SUMMED + name) if other in received]
        if not back:
            where = name_ranks(received)
            found[name] = {"verdict": WRONG, "why": f"it is a copy from {where}, to which its gradient is not sent"}
            continue
        verdict, why = judge([way._replace(start=_CHECKED) for way in back if way.collectives], own, rank)
        if any(way.collectives for way in back) and verdict != RIGHT:
            found[name] = {"verdict": verdict, "why": why}
        else:
            summed = any(way.collectives for way in back)
            zeros = {way.start for way in walk.of_weight(name)} <= {_CONSTANT}  # of a gradient that was sent
            norm = [] if zeros else walk.norm_of(name)
            found[name] = {"copy_of": received[0], "summed": summed, "norm": norm}
    return found


def _with_sizes(norm: Sequence[Mapping[str, Any]], ways: Iterable[Way]) -> list[dict[str, Any]]:
    """Return the contribution of a weight to the global norm, with the divisor that MindSpore uses on devices.
    MindSpore divides by the size of the group over which an AllReduce sums the weight's gradient. Where the optimizer
    shards the weight over only some of its copies, MindSpore asks the devices for this size, and reads `NO_SIZE` here.
    """
    sums = {step for way in ways for step in way.collectives}
    sizes = [len(ranks) for operator, ranks in sums if operator == "AllReduce"]
    known = sizes[0] if len(sizes) == 1 and len(sums) > 1 else NO_SIZE
    return [{**each, "divisor": known if each["divisor"] == NO_SIZE else each["divisor"]} for each in norm]


def seeds_of(graph: GraphText, ranks_of: Callable[[str], tuple[int, ...] | None]) -> list[Scale]:
    """Return the values (such as the loss scale) with which the backward passes start on a stage that computes a
    loss.
    """
    return _Walk(graph, ranks_of).numbers.seeds()


def last_sums(
    graph: GraphText, ranks_of: Callable[[str], tuple[int, ...] | None], weights: Iterable[str]
) -> dict[str, list[tuple[str, int]]]:
    """Return, for each weight, the last operator that sums the weight's gradient over ranks, or the operator that
    computes the gradient if none sums it. Each path to the optimizer gives one pair (subgraph, operator).
    """
    walk = _Walk(graph, ranks_of)
    passing = _SAME | SCALED | _ADDED
    return {
        name: [(at, number) for at, number in walk.taken(name) if graph.graphs[at][number].op not in passing]
        for name in weights
    }


class _Walk:
    """A `_Walk` goes back through the subgraphs of one graph; each value is visited once."""

    def __init__(self, graph: GraphText, ranks_of: Callable[[str], tuple[int, ...] | None]):
        self.graph, self.ranks_of = graph, ranks_of
        self.generated = generated_groups(graph)
        self.numbers = Numbers(graph, self.bound_to)
        self.used: dict[str, dict[int, list[int]]] = {}
        self.known: dict[tuple[str, int, tuple[int, ...]], frozenset[Way]] = {}
        self.writers: dict[str, list[tuple[str, Node]]] = defaultdict(list)
        self.bound: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)  # arguments that a Partial binds
        self.called: dict[str, list[tuple[str, list[str]]]] = defaultdict(list)
        for name, nodes in graph.graphs.items():
            for node in nodes:
                if node.op.startswith(("Assign", "Inplace")) and (key := _KEY.search(node.types[1])):
                    self.writers[key[1]].append((name, node))
                if node.binds:
                    self.bound[node.binds].append((name, arguments_of(node.head)[1:]))
                for called in node.calls:
                    direct = re.match(r"\s*call @", node.head)
                    inside = node.head.partition("(")[2] if direct else node.head.rpartition("](")[2]
                    self.called[called].append((name, listed(inside.rpartition(")")[0])))

    def of_weight(self, name: str) -> frozenset[Way]:
        """Return the paths in the graph on which a weight's gradient reaches the optimizer's first moment, which is
        linear in the gradient. AdamW adds the gradient times 1 - beta to the first moment; Muon adds the whole
        gradient, and orthogonalizes the moment later.
        """
        found: set[Way] = set()
        for prefix in _MOMENTS:
            into: set[Way] = set()
            for graph, node in self.writers[prefix + name]:
                into |= self.value(graph, arguments_of(node.head)[1], ())
            moment = f"parameter {prefix}{name}"
            decays = {way.scale.by for way in into if way.start == moment}
            known = Scale(1.0 if prefix == MUON_MOMENT else 1 - min(decays)) if len(decays) == 1 else None
            taken = known or Scale(unread="the optimizer's update")
            found |= {way._replace(scale=way.scale.over(taken)) for way in into if way.start not in ("", moment)}
        return frozenset(found)

    def squares(self, name: str) -> list[tuple[str, int]]:
        """Return the operators that square a weight's gradient after its last sum over ranks."""
        found: dict[tuple[str, int], None] = {}
        for graph, number in self.taken(name):
            users = self.users(graph, number)
            found |= dict.fromkeys((graph, each) for each in users if self.graph.graphs[graph][each].op == "Square")
        return list(found)

    def taken(self, name: str) -> list[tuple[str, int]]:
        """Return the operators from the last sum of a weight's gradient over ranks to the optimizer's update."""
        todo = [(at, arguments_of(node.head)[1]) for prefix in _MOMENTS for at, node in self.writers[prefix + name]]
        found: list[tuple[str, int]] = []
        seen: set[tuple[str, str]] = set()
        while todo:
            graph, text = todo.pop()
            if (graph, text) in seen:
                continue
            seen.add((graph, text))
            if number := re.fullmatch(r"%(\d+)", text):
                found.append((graph, int(number[1])))
                node = self.graph.graphs[graph][int(number[1])]
                arguments = arguments_of(node.head)
                if node.op in _SAME:
                    todo.append((graph, arguments[0]))
                elif node.op in SCALED or node.op in _ADDED:
                    todo += [(graph, each) for each in self.as_large(node, arguments)]
            elif (parameter := _PARAMETER.fullmatch(text)) and graph != self.graph.root:
                todo += self.bound_to(graph, parameter[1])
        return found

    def users(self, graph: str, number: int) -> list[int]:
        """Return the operators of a subgraph that read the result of the subgraph's operator `number`."""
        if graph not in self.used:
            self.used[graph] = defaultdict(list)
            for place, node in enumerate(self.graph.graphs[graph]):
                for operand in dict.fromkeys(node.operands):
                    self.used[graph][operand].append(place)
        return self.used[graph][number]

    def norm_of(self, name: str) -> list[dict[str, Any]]:
        """Return how the squares of a weight's gradient enter the global gradient norm. For each sum of squares, the
        result holds a "divisor", and the "ranks" of each AllReduce of the sum.
        """
        found = []
        for graph, number in self.squares(name):
            nodes = self.graph.graphs[graph]
            todo: list[tuple[int, float, list[list[int]]]] = [(number, 1.0, [])]
            while todo:
                place, divisor, groups = todo.pop()
                node = nodes[place]
                if node.op == "Sqrt":
                    found.append({"divisor": divisor, "ranks": groups})
                    break
                if node.op == "AllReduce":
                    groups = [*groups, list(self.collective(node)[1])]
                elif node.op in SCALED:
                    by = number_of(arguments_of(node.head)[1])
                    divisor *= math.nan if by is None else by
                after = (each for each in self.users(graph, place) if nodes[each].op in _OF_THE_NORM)
                todo += [(each, divisor, groups) for each in after]
        return found

    def sent(self, name: str) -> list[tuple[int, Way]]:
        """Return the global ranks to which this rank sends the parameter `name` outside of the forward and backward
        passes. For each receiving rank, the result holds the operators between the parameter and the Send.
        """
        return [(peer, way) for peer, way in self.transfers("Send") if way.start == name]

    def received(self, name: str) -> list[int]:
        """Return the global ranks from which this rank receives the parameter `name` outside of the forward and
        backward passes.
        """
        return [peer for peer, way in self.transfers("Receive") if way.start == name]

    def transfers(self, op: str) -> list[tuple[int, Way]]:
        """Find each Send or Receive (`op`) that transfers a parameter outside of the forward and backward passes.
        Return for each of them the global rank of its peer, and a `Way` with the collectives from it to the parameter.
        """
        nodes = self.graph.graphs[self.graph.root]
        found = []
        for node in nodes:
            if node.op != op:
                continue
            steps: list[tuple[str, tuple[int, ...]]] = []
            text = arguments_of(node.head)[0]
            while (number := re.fullmatch(r"%(\d+)", text)) and nodes[int(number[1])].op in _SAME.union(_SUMS):
                step = nodes[int(number[1])]
                steps += [self.collective(step)] if step.op in _SUMS else []
                text = arguments_of(step.head)[0]
            if parameter := _PARAMETER.fullmatch(text):
                peer = attributes_of(node.text).get(f"{'dst' if op == 'Send' else 'src'}_global_rank")
                found.append((int(str(peer)), Way(tuple(steps), parameter[2])))
        return found

    def value(self, graph: str, text: str, members: tuple[int, ...], reader: Node | None = None) -> frozenset[Way]:
        """Return the paths on which a gradient reaches an argument of the operator `reader`. If the argument is a
        nested tuple, `members` are the positions of the gradient in the tuples, innermost first.
        """
        if number := re.fullmatch(r"%(\d+)", text):
            return self.node(graph, int(number[1]), members)
        if parameter := _PARAMETER.fullmatch(text):
            if graph == self.graph.root and parameter[2].startswith(_SUMMED):
                return self.summed(parameter[2], reader)
            return self.parameter(graph, parameter[1], parameter[2], members)
        zero = re.search(r"value=\[?\s*0(?:\.0*(?:e[+-]\d+)?)?\s*\]?\)$", text)
        return frozenset((Way((), "" if zero else _CONSTANT),))

    def parameter(self, graph: str, place: str, name: str, members: tuple[int, ...]) -> frozenset[Way]:
        """Return the gradient's paths that end in a parameter of a subgraph. The gradient's paths continue from the
        arguments with which the subgraph is called.
        """
        bound = [] if graph == self.graph.root else self.bound_to(graph, place)
        found = frozenset(way for at, text in bound for way in self.value(at, text, members))
        return found or frozenset((Way((), f"parameter {name}"),))

    def bound_to(self, graph: str, place: str) -> list[tuple[str, str]]:
        """Return the arguments that callers pass for a subgraph's parameter, each with the calling subgraph."""
        number = self.graph.parameters[graph].index(place)
        found = []
        for caller, arguments in [item for item in self.bound[graph] if item[0] != graph] or [("", [])]:
            if number < len(arguments):
                found.append((caller, arguments[number]))
                continue
            rest = number - len(arguments)
            found += [(at, given[rest]) for at, given in self.called[graph] if rest < len(given)]
        return found

    def summed(self, name: str, reader: Node | None) -> frozenset[Way]:
        """Return the gradient's paths that end in the accumulated gradient (the sum over micro-batches) that `reader`
        reads. The operator that sets the accumulated gradient to zero is left out. If the optimizer is not sharded, the
        graph sums the accumulated gradient over ranks and assigns the result to the same parameter, which `reader` may
        read before or after this assignment.
        """
        found: set[Way] = set()
        for graph, node in self.writers[name]:
            if not node.op.startswith("Assign"):
                found.add(Way((), node.op))
                continue
            ways = {way for way in self.value(graph, arguments_of(node.head)[1], (), node) if way.start}
            if node.op != "Assign" or graph != self.graph.root:
                found |= ways
            elif ways and (reader is None or self.behind(reader, node)):
                return frozenset(ways) if reader else frozenset((Way((), "a sum that it may or may not have"),))
        return frozenset(found)

    def behind(self, node: Node, other: Node) -> bool:
        """Return whether one operator of the root graph must run after another operator."""
        nodes = self.graph.graphs[self.graph.root]
        last = next(place for place, each in enumerate(nodes) if each is other)
        todo, seen = list(node.operands), set[int]()
        while todo:
            if (place := todo.pop()) >= last and place not in seen:
                seen.add(place)
                todo += nodes[place].operands
        return last in seen

    def node(self, graph: str, number: int, members: tuple[int, ...]) -> frozenset[Way]:
        """Return the gradient's paths that end in the result of one operator."""
        key = graph, number, members
        if key not in self.known:
            self.known[key] = frozenset()  # a circle adds nothing
            self.known[key] = self._node(graph, self.graph.graphs[graph][number], members)
        return self.known[key]

    def _node(self, graph: str, node: Node, members: tuple[int, ...]) -> frozenset[Way]:
        nodes = self.graph.graphs[graph]
        arguments = arguments_of(node.head)
        while node.op in _SAME and (number := re.fullmatch(r"%(\d+)", arguments[0])):  # chains of thousands of Depend
            node = nodes[int(number[1])]
            arguments = arguments_of(node.head)
        if node.calls:
            ends = (self.node(name, len(self.graph.graphs[name]) - 1, members) for name in node.calls)
            return frozenset(way for ways in ends for way in ways)
        if node.op == "TupleGetItem" and (member := re.fullmatch(r"I64\((\d+)\)", arguments[1])):
            return self.value(graph, arguments[0], (int(member[1]), *members))
        if node.op == "MakeTuple" and members:
            return self.value(graph, arguments[members[0]], members[1:], node)
        if node.op == "Receive":
            return frozenset((Way((), f"{_RECEIVED}{attributes_of(node.text).get('src_global_rank')}"),))
        if node.op in _SUMS or node.op in _MOVES:
            step = self.collective(node)
            ways = self.value(graph, arguments[0], members, node)
            return frozenset(way._replace(collectives=(step, *way.collectives)) for way in ways)
        if node.op in _SAME or node.op == _PADS:
            return self.value(graph, arguments[0], members, node)
        if node.op == "AddN":
            return self.tuple_members(graph, arguments[0])
        if node.op == "Select":
            return self.value(graph, arguments[1], (), node) | self.value(graph, arguments[2], (), node)
        if node.op in SCALED or node.op in _ADDED:
            return self.arithmetic(graph, node, arguments)
        return frozenset((Way((), node.op),))

    def tuple_members(self, graph: str, text: str) -> frozenset[Way]:
        """Return the paths by which a gradient reaches any member of a tuple."""
        number = re.fullmatch(r"%(\d+)", text)
        made = self.graph.graphs[graph][int(number[1])] if number else None
        if made is None or made.op != "MakeTuple":
            return frozenset((Way((), "AddN"),))
        parts = (self.value(graph, argument, (), made) for argument in arguments_of(made.head))
        return frozenset(way for ways in parts for way in ways)

    def arithmetic(self, graph: str, node: Node, arguments: list[str]) -> frozenset[Way]:
        """Return the ways in which gradients reach the result of an addition or a multiplication. Only arguments with
        as many elements as the result are followed.
        """
        if node.op in SCALED and any(re.search(r"value=0\)$", argument) for argument in arguments):
            return frozenset((Way((), ""),))
        whole = self.as_large(node, arguments)
        if node.op in SCALED and len(whole) > 1 and math.prod(node.outputs[0].shape) > 1:
            return frozenset((Way((), node.op),))
        if node.op in SCALED:
            scale = self.numbers.factor(graph, node, whole[0])
            return frozenset(
                way._replace(scale=way.scale.times(scale)) for way in self.value(graph, whole[0], (), node)
            )
        return frozenset(way for text in whole for way in self.value(graph, text, (), node))

    @staticmethod
    def as_large(node: Node, arguments: list[str]) -> list[str]:
        """Return the arguments of an operator that have as many elements as its result; constants are left out unless
        all of these arguments are constants.
        """
        size = math.prod(node.outputs[0].shape)
        types = listed(node.types[0][1:-1], "<([{", ">)]}")
        sizes = [math.prod(found[0].shape) if (found := tensors(text)) else 0 for text in types]
        whole = [text for text, own in zip(arguments, sizes, strict=False) if own == size]
        return [text for text in whole if text.startswith("%")] or whole

    def collective(self, node: Node) -> tuple[str, tuple[int, ...]]:
        """Return the name and the ranks of a collective; the name includes the reduction (such as max) if it is not a
        sum.
        """
        attributes = attributes_of(node.text)
        group = str(attributes.get("group", ""))
        ranks = self.ranks_of(group) or self.generated.get(group)
        if ranks is None:
            raise ClusterError(
                f"{node.op} at {node.source or node.scope} uses group {group!r}, which was never created"
            )
        adds = node.op not in _SUMS or attributes.get("op", "sum") == "sum"
        return node.op if adds else f"{node.op} ({attributes['op']})", tuple(ranks)


def judge(ways: Sequence[Way], copies: Sequence[int], rank: int, elsewhere: Sequence[int] = ()) -> tuple[str, str]:
    """Return whether a weight's gradient is summed exactly once over exactly the ranks that hold a copy of the weight,
    and the reason if it is not.

    Args:
        ways: the paths of the gradient on `rank`, as `_Walk.of_weight` returns them.
        copies: the ranks of a stage that hold the same slice of the weight, `rank` among them.
        elsewhere: one rank for each other stage that holds the weight and must send its gradient here.

    Returns:
        (`RIGHT`, ""), or `WRONG` or `UNKNOWN` and the reason.
    """
    if not ways:
        return UNKNOWN, "the optimizer's update of it was not found in the graph"
    findings = [_judge_way(way, copies, rank, elsewhere) for way in ways]
    missing = {f"{_RECEIVED}{other}" for other in elsewhere} - {way.start for way in ways}
    findings += [(WRONG, f"the gradient of its copy on another stage is not {start}") for start in sorted(missing)]
    return next((found for verdict in (WRONG, UNKNOWN) for found in findings if found[0] == verdict), (RIGHT, ""))


def _judge_way(way: Way, copies: Sequence[int], rank: int, elsewhere: Sequence[int]) -> tuple[str, str]:
    if way.start == _CONSTANT:
        return WRONG, "its gradient is a constant in the graph"
    received = way.start.startswith(_RECEIVED)
    if received and way.start not in {f"{_RECEIVED}{other}" for other in elsewhere}:
        return UNKNOWN, f"a part of its gradient is {way.start}, and nothing says that this rank holds a copy of it"
    if not received and way.start not in _MAKES:
        return UNKNOWN, f"its gradient comes from {way.start}, of which nothing is known here"
    if received and not way.collectives:
        return RIGHT, ""  # the other stage has to sum it, see `tools.dryrun.report`
    for operator, _ in way.collectives:
        if operator.startswith(_SUMS) and operator not in _SUMS:
            return WRONG, f"its gradient is reduced by {operator}, which does not add"
        if operator not in _SUMS:
            return UNKNOWN, f"its gradient goes through {operator}, of which nothing is known here"
    reached = reached_by([ranks for _, ranks in way.collectives], rank)
    over = ", then ".join(f"{name_ranks(ranks)} ({operator})" for operator, ranks in way.collectives) or "no ranks"
    wanted = name_ranks(copies)
    if len(set(reached)) < len(reached):
        return WRONG, f"its gradient is summed over {over}, some of these twice; {wanted} hold a copy of it"
    if set(reached) != set(copies):
        return WRONG, f"its gradient is summed over {over}, but {wanted} hold a copy of it"
    return RIGHT, ""


def reached_by(groups: Iterable[Sequence[int]], rank: int) -> list[int]:
    """Return the ranks whose gradients are in the sum that `rank` holds after AllReduces over the given groups. A rank
    whose gradient was added twice occurs twice in the result. The function assumes that the groups of the other ranks
    have the same form, as on a mesh of devices.
    """
    reached = [rank]
    for ranks in groups:
        reached = [first + other - rank for first, other in product(reached, ranks)]
    return reached
