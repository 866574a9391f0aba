"""This module defines the class `Call`: an operator of the graph, with the spread of each input (how the input is
distributed over the ranks). A `Call` is the argument of the rules in `tools.prove.rules`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from tools.dryrun.graph_text import Node, TensorType, arguments_of, listed
from tools.prove import moves, places
from tools.prove.places import TRIED
from tools.prove.spread import Alike, Certain, Dim, NotKnown, Spread, Zeros, placements, plain

WAITS = frozenset(("UpdateState",))  # operators without a value
_SUMS = ("ReduceMean", "ReduceSum", "MeanExt", "SumExt")
_STRATEGY = re.compile(r"in_strategy: \((.*?\))\)")  # of each argument, over how many ranks each dimension is cut


@dataclass(frozen=True)
class Part:
    """A `Part` is one of the parts (of equal or unequal sizes) into which a rank splits a dimension of a tensor."""

    whole: Spread
    axis: int
    sizes: tuple[int, ...]
    number: int
    source: int

    @property
    def spread(self) -> Spread:
        """Return how this part of a split value is distributed over the ranks (its spread)."""
        return places.wherever(lambda x: moves.split(x, self.axis, self.sizes)[self.number], self.whole)


# a Spread, a Part, an Order, a list of values (a tuple of the graph), or a number, text or tuple that is written out
Value = Any


@dataclass(frozen=True)
class Order:
    """An `Order` stands for integers that expert routing computes at run time: an order of token rows, or the number of
    rows for each expert or rank.

    Args:
        key: the source of the integers (see `tools.prove.experts`); equal keys mean equal integers on each rank.
    """

    key: tuple[Any, ...]


@dataclass(frozen=True)
class Call:
    """A `Call` is one operator of the graph, with the spread of each of its arguments (how the argument is distributed
    over the ranks).

    Args:
        node: the operator's node in the graph.
        number: an identifier of the result; equal operators with equal arguments have the same identifier.
        values: the values of the operator's arguments.
        sizes: the number of ranks along each axis of the mesh.
        differs: for each constant with different values, given as (argument, index in its tuple or 0), the axes along
            which its value differs.
        axes: the axes of a collective's group; the last one is the axis along which neighbouring ranks lie.
        repeats: for the operators that sum the loss, the axes over which the forward pass sums (see `_scale`).
        offsets: for each integer constant of `differs`, its value on the stage's first rank, and its increase from one
            rank to the next along each axis along which the value differs.
        names: the identifiers of the operator's arguments, in the form of `number`.
    """

    node: Node
    number: int
    values: Sequence[Value]
    sizes: Mapping[str, int]
    differs: Mapping[tuple[int, int], frozenset[str]] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    repeats: frozenset[str] = frozenset()
    offsets: Mapping[tuple[int, int], tuple[int, Mapping[str, int]]] = field(default_factory=dict)
    names: tuple[int, ...] = ()

    def spread(self, place: int) -> Spread:
        """Return how the operator's argument number `place` is distributed over the ranks (its spread)."""
        value = self.values[place]
        if isinstance(value, Part):
            return value.spread
        if isinstance(value, (int, float)):
            return plain(())
        if not isinstance(value, Spread):
            raise NotKnown(f"its argument {place} is not a tensor")
        return value

    def in_its_layout(self, place: int) -> Spread:
        """Place the loose pieces of an argument (pieces whose dimension is not known yet) in the dimensions that
        MindSpore's layout of the operator (`in_strategy`) cuts, and return the argument's spread. If the layout is
        unknown or fits several placements, return the spread unchanged.
        """
        x, text = self.spread(place), _STRATEGY.search(self.node.text)
        if not x.loose or not text:
            return x
        wanted = [tuple(map(int, re.findall(r"\d+", each))) for each in re.findall(r"\(([\d, ]*)\)", text[1])]
        fit = [
            each
            for each in islice(placements(x), TRIED)
            if place < len(wanted) and tuple(self._ranks(dim) for dim in each.dims) == wanted[place]
        ]
        return replace(fit[0], loose=frozenset()) if len({each.dims for each in fit}) == 1 else x

    def states_another_cut(self, place: int) -> bool:
        """Return whether `in_strategy`, MindSpore's layout of the operator, cuts the dimensions of argument `place`
        (counted from 0) over other numbers of ranks than the spread that was found for this argument.
        """
        dims, text = self.spread(place).dims, _STRATEGY.search(self.node.text)
        wanted = re.findall(r"\(([\d, ]*)\)", text[1])[place : place + 1] if text else []
        return any(tuple(map(int, re.findall(r"\d+", each))) != tuple(map(self._ranks, dims)) for each in wanted)

    def _ranks(self, dim: Dim) -> int:
        """Return over how many ranks a dimension is cut."""
        return math.prod(self.sizes[atom] for atom in dim if isinstance(atom, str))

    @property
    def outputs(self) -> tuple[TensorType, ...]:
        """Return the shape and the data type of each result of the operator."""
        return self.node.outputs

    @property
    def counts(self) -> bool:
        """Return whether the operator returns integers or truth values."""
        return not self.outputs or not re.match(r"B?Float|Complex", self.outputs[0].dtype)

    def require_sum(self) -> None:
        """Raise an error if a collective does not compute the sum of the ranks' values.

        Raises:
            NotKnown: the collective does not add, or it is unknown whether it does.
        """
        if not re.search(r'\bop: "sum"', self.node.text):
            raise NotKnown("there is a rule only for collectives that add")

    def shifts(self) -> frozenset[str]:
        """Return the axes of the device mesh along which a constant argument of the operator differs from rank to
        rank.
        """
        return frozenset().union(*self.differs.values())

    def own_pieces(self, key: tuple[int, int], size: int = 0) -> tuple[str, ...]:
        """Return the axes of the device mesh along which a constant argument differs from rank to rank, outermost
        first. Raise an error unless the constant is the index at which the rank's own piece of a cut dimension starts.

        Args:
            key: a key of `differs`.
            size: the number of elements of a piece; 0 if the steps of the constant determine it.

        Raises:
            Certain: a rank takes the piece of another rank.
            NotKnown: the constant is not a multiple of the size of a piece.
        """
        if key not in self.offsets:
            raise NotKnown(f"its constants differ along {', '.join(sorted(self.shifts()))}, and are not whole numbers")
        first, steps = self.offsets[key]
        axes = tuple(sorted(steps, key=lambda axis: -steps[axis]))
        size = size or abs(steps[axes[-1]])
        if any(number % size for number in (first, *steps.values())):
            raise NotKnown(f"it starts at {first}, and {steps} further on the next ranks: no pieces of {size} elements")
        if first:
            raise Certain(f"the first rank starts at {first}, which is not where its own piece starts")
        wanted = size
        for axis in reversed(axes):
            if steps[axis] != wanted:
                raise Certain(
                    f"the next rank along {axis} starts {steps[axis]} elements further, but its own piece {wanted}"
                )
            wanted *= self.sizes[axis]
        return axes

    def pieces_in_rank_order(self, key: tuple[int, int], size: int = 0) -> frozenset[str]:
        """Return the axes that `own_pieces` returns, and raise an error unless the pieces lie in the order of the
        device mesh. In the order of the device mesh, the outermost axis is the axis whose ranks lie farthest apart.

        Raises:
            Certain: as for `own_pieces`.
            NotKnown: as for `own_pieces`, or the pieces follow each other in another order.
        """
        axes = self.own_pieces(key, size)
        if axes != tuple(axis for axis in reversed(list(self.sizes)) if axis in axes):
            raise NotKnown(f"pieces follow each other along {', '.join(axes)}, which is not the order of the ranks")
        return frozenset(axes)


_NUMBER = re.compile(r"([IUF]\d+|BF16|Bool)\((\S+)\)")
_TENSOR = re.compile(r"Tensor\(shape=\[([\d, ]*)\], dtype=\w+, value=\s*(.*)\)", re.DOTALL)
_ZERO = re.compile(r"(?:[\[\],\s]*0(?:\.0*(?:e[+-]\d+)?)?[\[\],\s]*)+")
_ELEMENT = re.compile(r"[^\[\],\s]+")


def literal(text: str) -> Value:
    """Return the value of an operator's argument that the text of the graph gives as a literal."""
    if number := _NUMBER.fullmatch(text):
        if number[1] == "Bool":
            return number[2] == "1"
        return int(number[2]) if number[1][0] in "IU" else float(number[2])
    if tensor := _TENSOR.fullmatch(text):
        found = plain(int(size) for size in re.findall(r"\d+", tensor[1]))
        if _ZERO.fullmatch(tensor[2]):
            return Zeros(found.dims)
        return Alike(found.dims) if len(set(_ELEMENT.findall(tensor[2]))) == 1 and "..." not in tensor[2] else found
    if text[:1] in "([" and text:
        return tuple(literal(part) for part in listed(text[1:-1]) if part)
    return None


def operands_of(node: Node) -> Sequence[int]:
    """Return the operators whose results an operator uses, without the operators for which it only waits."""
    if node.op == "Depend":
        return () if node.value is None else (node.value,)
    return () if node.op in (*WAITS, "Receive") else node.operands


def is_only_averaged(nodes: Sequence[Node], number: int) -> bool:
    """Return whether an AllGather takes one element of dimension 0 from each rank, and all operators that use its
    result only add these elements up or average them. If so, the order of the ranks in the AllGather's group does not
    matter.
    """
    gather, todo, summed = nodes[number], [number], False
    if not gather.inputs or gather.inputs[0].shape[:1] != (1,):
        return False
    while todo:
        own = todo.pop()
        shape = nodes[own].outputs[0].shape
        place = next((at for at, size in enumerate(shape) if size != 1), 0)
        for user, node in enumerate(nodes):
            if own not in operands_of(node):
                continue
            if node.op in ("Reshape", "Depend"):
                sizes = [size for size in node.outputs[0].shape if size != 1]
                if sizes != [size for size in shape if size != 1]:
                    return False
                todo.append(user)
                continue
            over = literal(arguments_of(node.head)[1]) if node.op in _SUMS else ()
            if place not in (over if isinstance(over, tuple) else (over,)):
                return False
            summed = True
    return summed


class Rule(NamedTuple):
    """A `Rule` finds how the results of some operators are distributed over the ranks; `says` describes the rule for
    docs/prove.md.
    """

    operators: tuple[str, ...]
    says: str
    of: Callable[[Call], Value]
    takes_differing: bool


TABLE: list[Rule] = []


def rule(*operators: str, says: str, takes_differing: bool = False) -> Callable[[Callable[[Call], Value]], Any]:
    """Return a decorator that adds a function to `TABLE` as the rule for the operators with these names.

    Args:
        takes_differing: whether the function handles constants that are not the same on all ranks.
    """

    def enter(of: Callable[[Call], Value]) -> Callable[[Call], Value]:
        TABLE.append(Rule(operators, says, of, takes_differing))
        return of

    return enter
