"""This module finds the axes of the device mesh of a pipeline stage: the mesh has as few axes as possible, but every
communication group of the graph and every layout is a product of axes.

Redistribution sums or gathers over a part of data or tensor parallelism; therefore `dp` may be two axes, `dp.1` (whose
ranks are closer to each other) and `dp.2`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from tools.prove.spread import NotKnown, Spread, tidy


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
