"""This module finds the device mesh of a pipeline stage from its compiled graph. The mesh has as few axes as possible,
and every communication group of the graph spans some of these axes completely.

Redistribution of tensors sums or gathers over a part of the data-parallel or tensor-parallel ranks; therefore data
parallelism may be two axes of the mesh, `dp.1` (whose ranks are closer to each other) and `dp.2`.

Redistribution takes slices at offsets that depend on the rank, and the graph of one rank does not show on which axis an
offset depends: `Peers` compares the constants with those in the graph of one more rank for each axis. From one rank to
the next along an axis a constant must always grow by the same number; the graph of the last rank along all axes shows
whether this is the case. If it is not, a dimension may be cut unevenly along an axis, and `Mesh.refined` divides, for
example, an axis of 4 ranks into two axes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

from tools.dryrun.graph_text import GraphText, Node, arguments_of, listed
from tools.prove.spread import NotKnown, Spread, tidy

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AlltoAllV")
FAR = "every axis"  # the key of the rank at the other end of every axis, mostly the last one of its stage
_ADDRESS = re.compile(r"ref_key=0x\w+")  # it is another one in each compile
_WHOLE = re.compile(r"^(?:[IU]\d+\(|Tensor\(shape=\[1?\], dtype=U?Int\d+, value=\s*\[?\s*)(-?\d+)\s*\]?\)$")


@dataclass(frozen=True)
class Mesh:
    """A `Mesh` holds the axes along which the devices of one pipeline stage are arranged.

    Args:
        strides: axis -> the difference between the numbers of neighbouring ranks along the axis; the smallest first.
        sizes: axis -> the number of ranks along the axis.
    """

    strides: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def devices(self) -> int:
        """Return the number of devices of the pipeline stage."""
        return math.prod(self.sizes.values())

    @property
    def is_finest(self) -> bool:
        """Return whether the number of ranks along each axis is a prime number, so that no axis can be divided."""
        return all(smallest_factor(size) == size for size in self.sizes.values())

    def refined(self, axes: Iterable[str]) -> Mesh:
        """Return the mesh with some axes divided into axes of a prime number of ranks. An axis is divided only if its
        size is a power of a prime number, because for any other size the order of the prime factors is unknown.
        """
        strides, sizes = {}, {}
        for axis, size in self.sizes.items():
            factor = smallest_factor(size)
            count = next(power for power in range(1, size + 1) if factor**power >= size)
            if axis not in axes or factor**count != size or count == 1:
                strides[axis], sizes[axis] = self.strides[axis], size
                continue
            for number in range(count):
                part = f"{axis}.{number + 1}"
                strides[part], sizes[part] = self.strides[axis] * factor**number, factor
        return Mesh(strides, sizes)

    def places(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis of the mesh."""
        return {axis: rank % self.devices // far % self.sizes[axis] for axis, far in self.strides.items()}

    def neighbours(self, rank: int) -> dict[str, int]:
        """Return for each axis of the mesh a neighbour of the rank: the next rank along the axis, or the previous rank
        if the rank is the last. The key `FAR` of the result holds the rank at the other end of all axes, unless this
        rank is one of the neighbours.
        """
        found, end = {}, rank
        for axis, place in self.places(rank).items():
            last, stride = self.sizes[axis] - 1, self.strides[axis]
            found[axis] = rank + (stride if place < last else -stride)
            end += stride * (last - place if place < last else -last)
        return found if end in (rank, *found.values()) else {**found, FAR: end}

    def over(self, stride: int, count: int) -> tuple[str, ...]:
        """Return the axes of the device mesh that together contain `count` ranks, each `stride` ranks after the
        previous rank; the outermost axis comes first.
        """
        found = [axis for axis, own in self.strides.items() if stride <= own < stride * count]
        if math.prod(self.sizes[axis] for axis in found) != count:
            raise NotKnown(f"{count} ranks at distances of {stride} are not a product of axes of the mesh")
        return tuple(reversed(found))

    def of_group(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the axes of the mesh that make up a communication group. Neighbouring ranks of the group lie along the
        last axis of the result.
        """
        if list(ranks) != sorted(ranks):
            raise NotKnown(f"the ranks of a group are not in order: {tuple(ranks)[:4]} ...")
        return tuple(axis for stride, count in reversed(runs(ranks)) for axis in self.over(stride, count))

    def of_layout(self, layout: Mapping[str, Any], sharded: Sequence[int] = ()) -> Spread:
        """Return how a parameter with MindSpore's layout `layout` is distributed over the ranks (its spread).

        Args:
            layout: as `tools.dryrun.rank` reports it: the mesh of the stage's devices, for each dimension the axes that
                cut it (counted from the last) or -1, and the slice of a rank.
            sharded: the ranks over which the optimizer cuts dimension 0 further.
        """
        dims = []
        for own, size in zip(layout["map"], layout["slice"], strict=True):
            axes = [axis for axis in (own if isinstance(own, list) else [own]) if axis >= 0]
            cuts = [cut for axis in axes for cut in self._of_mesh(layout["mesh"], axis)]
            dims.append((*cuts, size))
        if len(sharded) > 1:
            *cuts, size = dims[0]
            dims[0] = (*cuts, *self.of_group(sharded), size // len(sharded))
        return Spread(tuple(map(tidy, dims)))

    def _of_mesh(self, mesh: Sequence[int], axis: int) -> tuple[str, ...]:
        place = len(mesh) - 1 - axis
        return self.over(math.prod(mesh[place + 1 :]), mesh[place]) if mesh[place] > 1 else ()


def smallest_factor(size: int) -> int:
    """Return the smallest prime factor of a number greater than 1."""
    return next(factor for factor in range(2, size + 1) if size % factor == 0)


def runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Describe the ranks of a communication group by pairs (distance, count), the smallest distance first. For the
    ranks 0, 1, 4 and 5 the result is (1, 2) and (4, 2): 2 ranks at a distance of 1, repeated 2 times at a distance of
    4.

    Raises:
        NotKnown: the group cannot be written in this way.
    """
    rest, found = sorted(ranks), []
    while len(rest) > 1:
        stride = rest[1] - rest[0]
        count = next((n for n in range(1, len(rest)) if rest[n] - rest[n - 1] != stride), len(rest))
        if len(rest) % count or rest != [base + k * stride for base in rest[::count] for k in range(count)]:
            raise NotKnown(f"ranks {rest[:4]} ... do not form a mesh")
        found.append((stride, count))
        rest = rest[::count]
    return found


def mesh_of(
    degrees: Sequence[tuple[str, int]], groups: Iterable[Sequence[int]], meshes: Iterable[Sequence[int]] = ()
) -> Mesh:
    """Return the device mesh of one pipeline stage.

    Args:
        degrees: (name, number of ranks) of the recipe's kinds of parallelism, those with the closest ranks first.
        groups: all communication groups of the graph, as numbers of ranks within a stage.
        meshes: the device matrices of all layouts.

    Raises:
        NotKnown: the groups overlap in a way that no mesh has.
    """
    devices = math.prod(size for _, size in degrees)
    ends = {1, *accumulate((size for _, size in degrees), mul)}
    for ranks in groups:
        ends |= {end for stride, count in runs(ranks) for end in (stride, stride * count)}
    for mesh in meshes:
        ends |= {math.prod(mesh[place:]) for place in range(len(mesh) + 1)}
    ordered = sorted(end for end in ends if end <= devices)
    if any(high % low for low, high in pairwise(ordered)):
        raise NotKnown(f"the groups cut the {devices} devices of a stage at {ordered}, which is not a mesh")
    strides, sizes, start = {}, {}, 1
    for name, size in degrees:
        own = [(low, high // low) for low, high in pairwise(ordered) if start <= low < start * size]
        for number, (low, count) in enumerate(own, 1):
            axis = name if len(own) == 1 else f"{name}.{number}"
            strides[axis], sizes[axis] = low, count
        start *= size
    return Mesh(strides, sizes)


class Uneven(NamedTuple):
    """An `Uneven` describes constants of an operator (such as the starts of slices) that do not grow by equal steps
    from rank to rank.

    Args:
        says: a sentence about the first of these constants.
        over: the axes along which these constants grow.
        counts: whether all of these constants are integers.
    """

    says: str
    over: frozenset[str]
    counts: bool


class Peers:
    """A `Peers` holds the graphs of other ranks of a stage, and compares their operators with the operators of one
    rank.

    Args:
        graph: the graph of the rank that is examined.
        graphs: for each key of `Mesh.neighbours` the graph of this neighbour.
        mesh, rank: the mesh of the stage, and the examined rank.
    """

    def __init__(self, graph: GraphText, graphs: Mapping[str, GraphText], mesh: Mesh | None = None, rank: int = 0):
        self.mesh = mesh or Mesh({}, {})
        self.at, self.ranks = self.mesh.places(rank), self.mesh.neighbours(rank)
        self.signs = {axis: 1 if self.ranks[axis] > rank else -1 for axis in self.at}  # -1: of the rank before
        self.far = self.mesh.places(self.ranks[FAR]) if FAR in self.ranks else {}
        self.own = list(graph.graphs.values())
        self.names = {name: place for place, name in enumerate(graph.graphs)}
        self.others = {axis: list(other.graphs.values()) for axis, other in graphs.items()}
        self.places: dict[tuple[str, int], dict[tuple[Any, ...], list[int]]] = {}

    def differs(self, name: str, number: int) -> dict[tuple[int, int], frozenset[str]]:
        """Return the constants of an operator that differ between ranks, as a dictionary (number of the argument, index
        in the argument's tuple) -> axes of the device mesh along which the constant differs.

        Raises:
            NotKnown: a peer has no such operator.
        """
        return {key: frozenset(others) for key, (_, others) in self._differing(name, number).items()}

    def offsets(self, name: str, number: int) -> dict[tuple[int, int], tuple[int, dict[str, int]]]:
        """Return how the integer constants of an operator grow from rank to rank: for each constant its value on the
        first rank, and its increase along each axis of the device mesh.

        Raises:
            NotKnown: a peer has no such operator.
        """
        found = {}
        for key, (text, others) in self._differing(name, number).items():
            own, next_ = _WHOLE.search(text), {axis: _WHOLE.search(other) for axis, other in others.items()}
            steps = {a: self.signs.get(a, 1) * (int(b[1]) - int(own[1])) for a, b in next_.items() if own and b}
            if own and steps.keys() == others.keys():
                found[key] = int(own[1]) - sum(self.at.get(axis, 0) * step for axis, step in steps.items()), steps
        return found

    def unevenness(self, name: str, number: int) -> Uneven | None:
        """Return a description of an operator's constants (such as the starts of slices) that do not grow by equal
        steps from rank to rank. Return None if all constants grow by equal steps along each axis, if the operator
        has no constants, or if there is no graph of the rank at the other end of all axes (`FAR`) to compare with.

        Texts that differ between neighbours are not compared, because no rule computes with them.

        Raises:
            NotKnown: the rank has no such operator.
        """
        place = self.names[name]
        node = self.own[place][number]
        if FAR not in self.others:
            return None
        if node.op in COLLECTIVES:
            self.counterpart(FAR, place, number, node)
        if not (own := _constants(node.head)):
            return None
        last = self._constants_of(FAR, place, number, node)
        differing, offsets = self.differs(name, number), self.offsets(name, number)
        wrong: list[Uneven] = []
        for key, text in own.items():
            if key in differing and key not in offsets:
                continue
            implied, steps = offsets.get(key, (_number(text), {}))
            if isinstance(implied, int):
                implied += sum(self.far[axis] * step for axis, step in steps.items())
            if (found := _number(last[key])) != implied:
                along = ", ".join(steps or self.mesh.sizes)
                says = (
                    f"its constant is {found} on rank {self.ranks[FAR]}, but {implied} by the next ranks along {along}"
                )
                wrong.append(Uneven(says, frozenset(steps), isinstance(found, int) and isinstance(implied, int)))
        if not wrong:
            return None
        over = frozenset[str]().union(*(each.over for each in wrong))
        return Uneven(wrong[0].says, over, all(each.counts for each in wrong))

    def _differing(self, name: str, number: int) -> dict[tuple[int, int], tuple[str, dict[str, str]]]:
        """Return the constants that differ: on the rank, and on the next rank along each axis along which they do."""
        place = self.names[name]
        node = self.own[place][number]
        own = _constants(node.head)
        found: dict[tuple[int, int], tuple[str, dict[str, str]]] = {}
        for axis in self.others if own else ():
            if axis == FAR:
                continue
            other = self._constants_of(axis, place, number, node)
            for key in own:
                if own[key] != other[key]:
                    found.setdefault(key, (own[key], {}))[1][axis] = other[key]
        return found

    def _constants_of(self, axis: str, place: int, number: int, node: Node) -> dict[tuple[int, int], str]:
        """Return the constants that another rank has where the rank has some.

        Raises:
            NotKnown: that rank has no such operator.
        """
        graphs = self.others[axis]
        other = _constants(self.counterpart(axis, place, number, node).head) if place < len(graphs) else {}
        if _constants(node.head).keys() != other.keys():
            raise NotKnown(f"the graph of the {_next(axis)} has no such operator")
        return other

    def counterpart(self, axis: str, place: int, number: int, node: Node) -> Node:
        """Return the operator of a neighbouring rank's graph that corresponds to a given operator. Operators correspond
        if they have the same position among the operators of the same kind and scope.
        """
        own, other = (self._index(which, place)[_kind(node)] for which in ("", axis))
        if len(own) != len(other):
            raise NotKnown(f"the graph of the {_next(axis)} has {len(other)} such operators instead of {len(own)}")
        return self.others[axis][place][other[own.index(number)]]

    def _index(self, axis: str, place: int) -> dict[tuple[Any, ...], list[int]]:
        if (axis, place) not in self.places:
            found = self.places[axis, place] = defaultdict(list)
            for number, node in enumerate(self.others[axis][place] if axis else self.own[place]):
                found[_kind(node)].append(number)
        return self.places[axis, place]


def _number(text: str) -> int | str:
    """Return the whole number that a text writes out, or any other text itself."""
    return int(whole[1]) if (whole := _WHOLE.search(text)) else text


def _next(axis: str) -> str:
    return f"{'last' if axis == FAR else 'next'} rank along {axis}"


def _kind(node: Node) -> tuple[Any, ...]:
    return node.op, node.scope, _ADDRESS.sub("", node.types[1])


@cache
def _constants(head: str) -> dict[tuple[int, int], str]:
    """Return the arguments that are written out, those of a tuple one by one."""
    found: dict[tuple[int, int], str] = {}
    for place, text in enumerate(arguments_of(head)):
        if text[:1] in ("%", "@", "") or text.startswith("UMonad"):
            continue
        parts = listed(text[1:-1]) if text[0] in "([" else [text]
        found |= {(place, number): part for number, part in enumerate(parts)}
    return found
