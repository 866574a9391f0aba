"""This module is step 1 of operator fusion: it gathers the operators that DVM (the library that makes fused kernels)
supports into convex clusters, in MindSpore's greedy order. A cluster is convex if no path in the graph between two of
its operators leaves the cluster.

From the last operator back to the first, each operator that is in no cluster yet gathers the connected operators before
it that DVM supports. If a path through an operator outside the cluster also leads to a gathered operator, this operator
and all operators on which it depends are dropped again, because otherwise the fused kernel and the operator outside
would wait for each other. Sources in MindSpore: GraphKernelCluster of graph_kernel_cluster.cc, and, for the operators
that DVM supports (by name and types), DvmSupportChecker of graph_kernel_cluster_cloud.cc; where MindSpore 2.9.0 differs
from the public sources (it mixes types), the compiler passes of 2.9.0 were run to find the rules.

`operators` returns the form of a graph that both steps use: operators in an order in which they can run, with their
types and edges. `Rules` holds the rules of both steps with their limits, so that a test can switch one rule off and
show its effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from plugins.operator_fusion.plan import CUBE, VECTOR
from tools.dryrun.graph_text import Node, TensorType


@dataclass(frozen=True)
class Rules:
    """A `Rules` holds the limits and choices of operator fusion: which operators are gathered into a cluster, and how a
    cluster is cut into kernels.

    Args:
        convex: whether a path between two operators of a cluster must not leave the cluster.
        types: whether DVM refuses operators because of their types (`refusal`).
        reduce_depth: the largest number of operators of a kernel that may still be merged into a kernel with a
            reduction.
        broadcast_depth: the largest number of operators of a kernel with a broadcast that may still be merged into the
            kernels that use its result.
        broadcast_into_reduce: whether kernels with broadcasts may also be merged into a kernel with a reduction, as in
            MindSpore's split model for Ascend.
        largest: the largest number of operators of a kernel (`composite_op_limit_size`).
        chains_of_a_size: whether chains of kernels whose results have the same number of elements are joined before
            other neighbours whose results have the same number of elements.
        chains_of_users: whether a kernel with a single user, which uses no other kernel's result, is joined to this
            user before kernels with several users are joined.
    """

    convex: bool = True
    types: bool = True
    reduce_depth: int = 10
    broadcast_depth: int = 6
    broadcast_into_reduce: bool = True
    largest: int = 200
    chains_of_a_size: bool = True
    chains_of_users: bool = True


# split_model_ascend.cc and split_model_cpu.cc. A CPU wheel runs the second, whatever the generator: so the first shares
# all but these numbers with what was compared with MindSpore, and these numbers were not.
DVM = Rules()
CPU = replace(DVM, reduce_depth=20, broadcast_depth=20, broadcast_into_reduce=False)


VIRTUAL = ("Return", "MakeTuple", "TupleGetItem")  # bind and take apart tuples; nothing is computed


@dataclass(frozen=True)
class Operator:
    """An `Operator` holds the properties of an operator of a graph that decide how the operator is fused.

    Args:
        name: the name of the operator's primitive; "" for an operator that is `opened`.
        output: the type and shape of the operator's first output.
        inputs: the positions of the operators whose results the operator uses, each position once, in order.
        takes: the types and shapes of all tensors that the operator uses, including parameters and constants.
        opened: whether the operator is a composite operator that MindSpore's expander has replaced by a small graph.
    """

    name: str
    output: TensorType
    inputs: tuple[int, ...] = ()
    takes: tuple[TensorType, ...] = ()
    opened: bool = False

    @property
    def virtual(self) -> bool:
        """Return whether the operator computes nothing and only makes or unpacks tuples."""
        return self.name in VIRTUAL


NOTHING = TensorType("", ())


def operators(nodes: Sequence[Node]) -> list[Operator]:
    """Convert the nodes of a subgraph, parsed from a graph that MindSpore wrote as text, to `Operator` objects."""
    return [of_node(node, node.op, bool(node.calls)) for node in nodes]


def of_node(node: Node, name: str, opened: bool = False) -> Operator:
    """Return an `Operator` with the given name that has the inputs and outputs of a node of the graph."""
    output = node.outputs[0] if node.outputs else NOTHING
    return Operator(name, output, tuple(dict.fromkeys(node.operands)), node.inputs, opened)


FLOATS = frozenset(("Float16", "Float32", "BFloat16"))
_NUMBERS = FLOATS | {"Int32"}
_CASTS = _NUMBERS | {"Bool"}
_WHOLE = frozenset(("Add", "Sub", "Mul", "Maximum", "Minimum", "Neg", "Abs", "Assign", "BroadcastTo"))  # int32, too
_COMPARISONS = frozenset(("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual", "IsFinite"))
_PRODUCTS = frozenset(CUBE) - {"Reshape"}


def refusal(operator: Operator, listed: Collection[str] = VECTOR, rules: Rules = DVM) -> str:
    """Return the reason why DVM cannot fuse an operator with others; return "" if DVM can fuse it.

    Args:
        listed: the names of the operators that are fused at the chosen level, without those that a recipe disables.
    """
    if operator.opened:
        return ""
    if operator.name not in listed:
        return f"{operator.name} is not fused at this level"
    return _type(operator) if rules.types else ""


def _type(operator: Operator) -> str:
    """Return in words which data type keeps an operator out of fusion; "" if none does."""
    name, result, taken = operator.name, operator.output.dtype, [tensor.dtype for tensor in operator.takes]
    first = taken[0] if taken else ""
    if name == "Cast":
        return _wants(first, _CASTS, "takes") or _wants(result, _CASTS, "gives")
    if name in _COMPARISONS:
        return _wants(first, FLOATS if name == "IsFinite" else _NUMBERS, "takes")
    if name == "Select":
        other = next((dtype for dtype in taken[1:] if dtype != result), "")
        return _wants(result, FLOATS, "gives") or (f"mixes {other} and {result}" if other else "")
    if name == "ReduceSum":
        return _wants(result, FLOATS, "gives") or (f"takes {first} and gives {result}" if first != result else "")
    if name == "Transpose":
        return _wants(result, FLOATS - {"BFloat16"}, "gives")
    if name in _PRODUCTS:
        return _wants(result, FLOATS - {"Float32"}, "gives")
    if name == "Reshape":
        return ""
    wrong = _wants(result, _NUMBERS if name in _WHOLE else FLOATS, "gives")
    return wrong or next(filter(None, (_wants(dtype, _CASTS, "takes") for dtype in taken)), "")


def _wants(dtype: str, known: Collection[str], verb: str) -> str:
    return "" if dtype in known else f"{verb} {dtype or 'no tensor'}"


class Merged:
    """A `Merged` joins operators into groups step by step; each group is identified by the position of its first
    operator.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._head = list(range(len(operators)))
        self._inputs = [set(operator.inputs) for operator in operators]
        self.size = [1] * len(operators)
        self.last = list(range(len(operators)))

    def find(self, place: int) -> int:
        """Return the group to which an operator belongs, given as the position of the group's first operator."""
        while self._head[place] != place:
            self._head[place] = self._head[self._head[place]]
            place = self._head[place]
        return place

    def inputs(self, group: int) -> list[int]:
        """Return the groups of operators whose results are inputs of the given group, in reverse order of the graph."""
        self._inputs[group] = {self.find(place) for place in self._inputs[group]} - {group}
        return sorted(self._inputs[group], reverse=True)

    def merge(self, groups: Iterable[int]) -> None:
        """Join several groups of operators into one group."""
        first, *others = sorted(groups)
        for group in others:
            self._head[group] = first
            self._inputs[first] |= self._inputs[group]
            self.size[first] += self.size[group]
            self.last[first] = max(self.last[first], self.last[group])

    def walk(self, start: int, follow: Callable[[int], bool]) -> None:
        """Visit groups of operators depth first, from a group to the groups that produce its inputs. The walk goes no
        further from a group for which `follow` returns False, and visits no group twice.
        """
        seen: set[int] = set()
        stack = [self.find(start)]
        while stack:
            group = stack.pop()
            if group not in seen:
                seen.add(group)
                if follow(group):
                    stack += reversed(self.inputs(group))


def clusters(operators: Sequence[Operator], taken: Sequence[bool], rules: Rules = DVM) -> list[list[int]]:
    """Return the indices of the operators of each cluster, in order. A single operator can be a cluster only if DVM
    supports it. An Assign, or a composite operator that was expanded before, cannot be a cluster by itself.

    Args:
        taken: for each operator whether DVM supports it (`refusal`).
    """
    merged = Merged(operators)
    for base in reversed(range(len(operators))):
        if merged.size[merged.find(base)] > 1:
            continue
        chosen = _gathered(merged, operators, taken, base)
        if rules.convex:
            _drop_circles(merged, chosen)
        _drop_wild_items(merged, operators, chosen)
        if len(chosen) > 1:
            merged.merge(chosen)
    groups: dict[int, list[int]] = {}
    for place in range(len(operators)):
        groups.setdefault(merged.find(place), []).append(place)
    return [group for group in groups.values() if _is_cluster(group, operators, taken)]


def _gathered(merged: Merged, operators: Sequence[Operator], taken: Sequence[bool], base: int) -> list[int]:
    """Return the groups that are connected with `base` through inputs, the farthest first; the search does not go
    beyond a group of several operators.
    """
    found: list[int] = []

    def follow(group: int) -> bool:
        if not taken[group] and operators[group].name != "TupleGetItem":
            return False
        found.append(group)
        return merged.size[group] == 1

    merged.walk(base, follow)
    return found[::-1]


def _drop_circles(merged: Merged, chosen: list[int]) -> None:
    """Remove from `chosen` the groups to which a path through other groups leads back, together with the groups on
    which these groups depend.
    """
    left = set(chosen)
    free: set[int] = set()  # groups outside from which no path comes back
    for group in chosen:
        if group not in left:
            continue
        first = min(left)
        met: list[int] = []
        for start in merged.inputs(group):
            if start not in left and start not in free:
                _look(merged, start, left, free, first, met)
        for start in met:
            merged.walk(start, partial(_drop, left))
    chosen[:] = [group for group in chosen if group in left]


def _drop(left: set[int], group: int) -> bool:
    """Remove a group from `left`; return whether the group was in `left`."""
    there = group in left
    left.discard(group)
    return there


def _look(merged: Merged, start: int, left: set[int], free: set[int], first: int, met: list[int]) -> None:
    """Add to `met` the groups of `left` that can be reached from `start`; outside groups from which none can be reached
    are recorded in `free`.
    """
    outside: list[int] = []
    before = len(met)

    def follow(group: int) -> bool:
        if group in free or merged.last[group] < first:
            return False
        if group in left:
            met.append(group)
            return False
        outside.append(group)
        return True

    merged.walk(start, follow)
    if len(met) == before:
        free.update(outside)


def _drop_wild_items(merged: Merged, operators: Sequence[Operator], chosen: list[int]) -> None:
    """Drop members of tuples: a member stays with the operator that gives the tuple, or is left out."""
    left = set(chosen)
    for group in sorted(chosen):
        if operators[group].name == "TupleGetItem" and merged.size[group] == 1 and not left & set(merged.inputs(group)):
            left.discard(group)
    chosen[:] = [group for group in chosen if group in left]


def _is_cluster(group: list[int], operators: Sequence[Operator], taken: Sequence[bool]) -> bool:
    """Return whether a group becomes a cluster; a single Assign does not, and neither does an operator that was
    expanded before, because it is already a kernel.
    """
    computing = [place for place in group if not operators[place].virtual]
    if len(computing) == 1:
        alone = operators[computing[0]]
        return taken[computing[0]] and not alone.opened and alone.name != "Assign"
    return len(computing) > 1
