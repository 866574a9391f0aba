"""What a slice of the new layout takes from slices of the old one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np

from tools.weights.reshard.layout import Shape


@dataclass(frozen=True)
class Piece:
    """A box of numbers that goes from one slice to another.

    Args:
        place: of the old slice, in row-major order. source, target: where the box begins in either slice; size: of it.
    """

    place: int
    source: Shape
    target: Shape
    size: Shape


@lru_cache(maxsize=65536)
def pieces(shape: Shape, old: Shape, new: Shape, place: int) -> tuple[Piece, ...]:
    """The boxes that make up slice `place` of a tensor cut into `new` parts, from one cut into `old`: each number once.

    Args:
        shape: of the whole tensor; old, new: into how many equal parts each axis is cut; place: in row-major order.
    """
    index = np.unravel_index(place, new) if new else ()
    by_axis = [_spans(*axis) for axis in zip(shape, old, new, map(int, index), strict=True)]
    found = []
    for spans in product(*by_axis):
        numbers, source, target, size = zip(*spans, strict=True) if spans else ((), (), (), ())
        number = int(np.ravel_multi_index(numbers, old)) if old else 0
        found.append(Piece(number, source, target, size))
    return tuple(found)


def overlap(shape: Shape, old: Shape, new: Shape, old_place: int, new_place: int) -> int:
    """How many numbers an old slice and a new one have in common."""
    found = (math.prod(piece.size) for piece in pieces(shape, old, new, new_place) if piece.place == old_place)
    return next(found, 0)


def _spans(length: int, old: int, new: int, index: int) -> list[tuple[int, int, int, int]]:
    """Along one axis: (number of the old part, begin in it, begin in the new part, length)."""
    before, after = length // old, length // new
    begin, end = index * after, (index + 1) * after
    found = []
    for number in range(begin // before, -(-end // before)):
        low, high = max(begin, number * before), min(end, (number + 1) * before)
        found.append((number, low - number * before, low - begin, high - low))
    return found
