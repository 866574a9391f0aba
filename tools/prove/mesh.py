"""This module finds the axes of the device mesh of a pipeline stage: the mesh has as few axes as possible, but every
communication group of the graph and every layout is a product of axes.

Redistribution sums or gathers over a part of data or tensor parallelism; therefore `dp` may be two axes, `dp.1` (whose
ranks are closer to each other) and `dp.2`.

Redistribution starts slices at offsets that depend on the rank, and the graph of one rank does not say on which axis
they depend: `Peers` compares the constants with those of the graph of one more rank for each axis.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from tools.dryrun.graph_text import GraphText, Node, arguments_of, listed
from tools.prove.spread import NotKnown, Spread, tidy

_ADDRESS = re.compile(r"ref_key=0x\w+")  # it is another one in each compile
_WHOLE = re.compile(r"^(?:[IU]\d+\(|Tensor\(shape=\[1?\], dtype=U?Int\d+, value=\s*\[?\s*)(-?\d+)\s*\]?\)$")


@dataclass(frozen=True)
class Mesh:
    """A `Mesh` holds the axes along which the devices of one pipeline stage are arranged.

    Args:
        strides: axis -> the difference between the numbers of neighbouring ranks along it; smallest first.
        sizes: axis -> the number of ranks along it.
    """

    strides: Mapping[str, int]
    sizes: Mapping[str, int]

    @property
    def devices(self) -> int:
        """Return the number of devices of the pipeline stage."""
        return math.prod(self.sizes.values())

    def over(self, stride: int, count: int) -> tuple[str, ...]:
        """Return the axes of the mesh that together contain `count` ranks at distances of `stride`, the outermost axis
        first.
        """
        found = [axis for axis, own in self.strides.items() if stride <= own < stride * count]
        if math.prod(self.sizes[axis] for axis in found) != count:
            raise NotKnown(f"{count} ranks at distances of {stride} are not a product of axes of the mesh")
        return tuple(reversed(found))

    def of_group(self, ranks: Sequence[int]) -> tuple[str, ...]:
        """Return the axes of the mesh that make up a communication group; the last of them is the axis along which
        neighbouring ranks of the group lie.
        """
        if list(ranks) != sorted(ranks):
            raise NotKnown(f"the ranks of a group are not in order: {tuple(ranks)[:4]} ...")
        return tuple(axis for stride, count in reversed(runs(ranks)) for axis in self.over(stride, count))

    def of_layout(self, layout: Mapping[str, Any], sharded: Sequence[int] = ()) -> Spread:
        """Return how a parameter with this layout lies on the ranks (its spread).

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


def runs(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the ranks of a communication group as pairs (distance, count), smallest distance first: ranks 0, 1, 4, 5
    are 2 ranks at a distance of 1, and 2 such pairs at a distance of 4.

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


class Peers:
    """A `Peers` holds for each axis of the mesh the graph of a neighbouring rank, to compare its operators with the
    rank's.

    Args:
        graphs: axis -> the graph of the next rank along it, or of the one before (`signs`).
        at: the position of the rank along each axis; 0 for axes that are missing.
    """

    def __init__(self, graph: GraphText, graphs: Mapping[str, GraphText], at: Mapping[str, int] | None = None):
        self.at, self.signs = at or {}, dict[str, int]()  # -1: the graph is that of the rank before, not of the next
        self.own = list(graph.graphs.values())
        self.names = {name: place for place, name in enumerate(graph.graphs)}
        self.others = {axis: list(other.graphs.values()) for axis, other in graphs.items()}
        self.places: dict[tuple[str, int], dict[tuple[Any, ...], list[int]]] = {}

    def differs(self, name: str, number: int) -> dict[tuple[int, int], frozenset[str]]:
        """Return which constants of an operator differ between ranks: for each (argument, place in the argument's
        tuple), the axes of the mesh along which the constant's value differs.

        Raises:
            NotKnown: a peer has no such operator.
        """
        return {key: frozenset(others) for key, (_, others) in self._differing(name, number).items()}

    def offsets(self, name: str, number: int) -> dict[tuple[int, int], tuple[int, dict[str, int]]]:
        """Return how an operator's integer constants grow from rank to rank, in the form of `Call.offsets`.

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

    def _differing(self, name: str, number: int) -> dict[tuple[int, int], tuple[str, dict[str, str]]]:
        """Return the constants that differ: on the rank, and on the next rank along each axis along which they do."""
        place = self.names[name]
        node = self.own[place][number]
        own = _constants(node.head)
        if not own:
            return {}
        found: dict[tuple[int, int], tuple[str, dict[str, str]]] = {}
        for axis, graphs in self.others.items():
            other = _constants(self.counterpart(axis, place, number, node).head) if place < len(graphs) else {}
            if own.keys() != other.keys():
                raise NotKnown(f"the graph of the next rank along {axis} has no such operator")
            for key in own:
                if own[key] != other[key]:
                    found.setdefault(key, (own[key], {}))[1][axis] = other[key]
        return found

    def counterpart(self, axis: str, place: int, number: int, node: Node) -> Node:
        """Return the operator of a neighbouring rank's graph that has the same position among operators of one kind and
        scope.
        """
        own, other = (self._index(which, place)[_kind(node)] for which in ("", axis))
        if len(own) != len(other):
            raise NotKnown(
                f"the graph of the next rank along {axis} has {len(other)} such operators instead of {len(own)}"
            )
        return self.others[axis][place][other[own.index(number)]]

    def _index(self, axis: str, place: int) -> dict[tuple[Any, ...], list[int]]:
        if (axis, place) not in self.places:
            found = self.places[axis, place] = defaultdict(list)
            for number, node in enumerate(self.others[axis][place] if axis else self.own[place]):
                found[_kind(node)].append(number)
        return self.places[axis, place]


def _kind(node: Node) -> tuple[Any, ...]:
    return node.op, node.scope, _ADDRESS.sub("", node.types[1])


def _constants(head: str) -> dict[tuple[int, int], str]:
    """Return the arguments that are written out, those of a tuple one by one."""
    found: dict[tuple[int, int], str] = {}
    for place, text in enumerate(arguments_of(head)):
        if text[:1] in ("%", "@", "") or text.startswith("UMonad"):
            continue
        parts = listed(text[1:-1]) if text[0] in "([" else [text]
        found |= {(place, number): part for number, part in enumerate(parts)}
    return found
