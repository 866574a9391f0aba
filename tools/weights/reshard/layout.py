"""Where the slices of a tensor lie: by rank in general, and by a matrix of devices as MindSpore says it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lying:
    """A tensor cut into equal slices, which are counted in row-major order.

    Args:
        shape: of the whole; cuts: into how many parts each axis is cut; holders: by slice, the ranks that have it.
    """

    shape: Shape
    cuts: Shape
    holders: tuple[tuple[int, ...], ...]

    @property
    def part(self) -> Shape:
        """The shape of a slice."""
        return tuple(length // count for length, count in zip(self.shape, self.cuts, strict=True))

    @property
    def ranks(self) -> tuple[int, ...]:
        """All that hold a slice."""
        return tuple(sorted({rank for ranks in self.holders for rank in ranks}))


@dataclass(frozen=True)
class Layout:
    """How ranks share a tensor, in MindSpore's words.

    Args:
        devices: the ranks of a pipeline stage as a matrix, in row-major order: its shape.
        axes: for each axis of the tensor, the axes of that matrix that cut it, the outermost first.
        first: the first rank of that stage.
    """

    devices: Shape
    axes: tuple[tuple[int, ...], ...]
    first: int

    @property
    def cuts(self) -> Shape:
        """Into how many parts each axis of the tensor is cut."""
        return tuple(math.prod(self.devices[axis] for axis in own) for own in self.axes)

    def places(self) -> np.ndarray:
        """int [ranks of a stage], which slice each rank has."""
        return _places(self.devices, self.axes)

    def lying(self, shape: Shape) -> Lying:
        """The slices of a tensor of `shape`."""
        return Lying(shape, self.cuts, _holders(self.devices, self.axes, self.first))

    def as_metadata(self) -> dict[str, Any]:
        """As MindFormers 1.9.0 writes it (`checkpoint/metadata.py`)."""
        count = len(self.devices)
        maps: list[Any] = [[count - 1 - axis for axis in own] for own in self.axes]
        ranks = math.prod(self.devices)
        return {
            "device_matrix": list(self.devices),
            "tensor_map": [own if len(own) > 1 else own[0] if own else -1 for own in maps],
            "interleaved_parallel": False,
            "alias_name": [chr(ord("a") + axis) for axis in range(count)],
            "rank_list": list(range(self.first, self.first + ranks)),
        }


@lru_cache(maxsize=4096)
def _places(devices: Shape, axes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    index = np.unravel_index(np.arange(math.prod(devices)), devices)
    place = np.zeros(math.prod(devices), np.int64)
    for own in axes:
        for axis in own:
            place = place * devices[axis] + index[axis]
    return place


@lru_cache(maxsize=4096)
def _holders(devices: Shape, axes: tuple[tuple[int, ...], ...], first: int) -> tuple[tuple[int, ...], ...]:
    places = _places(devices, axes)
    found: list[list[int]] = [[] for _ in range(int(places.max()) + 1)]
    for rank, place in enumerate(places.tolist(), start=first):
        found[place].append(rank)
    return tuple(map(tuple, found))
