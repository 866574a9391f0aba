"""This module applies the rule of an operator to values with loose pieces. The rule is a function from how the
operator's arguments are spread over the ranks to how its result is spread; a loose piece is a piece of a tensor of
which it is not known yet in which dimension the tensor is cut. The module tries every dimension in which a loose piece
may lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

from tools.prove.spread import Contradiction, NotKnown, Spread, Uncertain, placements

TRIED = 1_000  # places of loose pieces; of many values, there are too many for all
_INWARDS = ("dp", "cp", "tp")  # the outermost axis of the mesh first


def outside(axis: str, other: str) -> bool:
    """Return whether an axis of the device mesh lies outside another axis (dp is outside cp, and cp is outside tp).
    MindSpore cuts each dimension over outer axes first. Therefore, if a list of cuts names an outer axis after an inner
    axis, the outer axis most likely cuts the next dimension.
    """
    names = (axis.split("."), other.split("."))  # a part of an axis, such as cp.2, may be divided again: cp.2.1
    places = [(-_INWARDS.index(kind), *map(int, parts)) for kind, *parts in names if kind in _INWARDS]
    return len(places) == 2 and places[0] > places[1]


def wherever(move: Callable[[Spread], Spread], x: Spread) -> Spread:
    """Apply `move` to a value with loose pieces (pieces whose dimension is not known yet). Return the result for the
    first possible placement of the loose pieces for which `move` raises no error.
    """
    return next(wherever_all(move, x))


def wherever_all(move: Callable[[Spread], Spread], x: Spread) -> Iterator[Spread]:
    """Apply `move` to a value with loose pieces (pieces whose dimension is not known yet). Yield the result for each
    possible placement of the loose pieces for which `move` raises no error.
    """
    first: Contradiction | None = None
    right = False
    for given in placements(x):
        try:
            found = move(given)
        except Contradiction as error:
            first = first or error
            continue
        right = True
        yield found
    if not right:
        assert first
        raise first


def wherever_they_fit(move: Callable[[Sequence[Spread]], Spread], given: Sequence[Spread]) -> Spread:
    """Apply `move` to several values with loose pieces (pieces whose dimension is not known yet). Return the result for
    the first possible placement of the loose pieces for which `move` raises no error.
    """
    first: Contradiction | None = None
    for each in chain([given], _equal_placements(given), islice(product(*map(placements, given)), TRIED)):
        try:
            return move(each)
        except Contradiction as error:
            first = first or error
    assert first
    raise first


def in_common(given: Iterable[Spread]) -> Spread | None:
    """Return the spread that several values have in common, for some possible places of their loose pieces (pieces
    whose dimension is not known yet). Return None if the values are distributed differently for every possible
    placement of the loose pieces.
    """
    first, *others = sorted(given, key=lambda x: (len(x.loose), str(x)))
    if any(replace(x, dims=first.dims, loose=first.loose) != first for x in others):
        return None
    ways = [{one.dims for one in islice(placements(x), TRIED)} for x in others]
    return next((one for one in islice(placements(first), TRIED) if all(one.dims in own for own in ways)), None)


def total_of(given: Sequence[Any]) -> Spread:
    """Return the spread (the distribution over the ranks) of a sum to which each micro-batch adds one value.

    Raises:
        Contradiction: the values are distributed differently.
        NotKnown: the values are not tensors, or it depends on the places of loose pieces whether they are distributed
            differently.
    """
    if not all(isinstance(x, Spread) for x in given):
        raise NotKnown("micro-batches add values that are not tensors")
    if found := in_common(given):
        return found
    wrong = f"micro-batches add {' and '.join(sorted(map(str, given)))}"
    loose = frozenset[str]().union(*(x.loose for x in given))
    raise Uncertain(wrong, loose) if loose else Contradiction(wrong)


def _equal_placements(given: Sequence[Spread]) -> Iterator[Sequence[Spread]]:
    """Yield the placements of values of equally many dimensions, all cut by the same axes, in which each axis cuts the
    same dimension of all values, beginning with those that move the fewest pieces. There are far fewer of these than
    of all placements.
    """
    if len({len(x.dims) for x in given}) > 1:
        return
    ways = [list(islice(placements(x), TRIED)) for x in given]
    by_axes = [{tuple(sorted(_cut_by(one).items())): one for one in reversed(own)} for own in ways[1:]]
    before = _cut_by(given[0])
    for first in sorted(ways[0], key=lambda one: sum(before[axis] != now for axis, now in _cut_by(one).items())):
        place = tuple(sorted(_cut_by(first).items()))
        if all(place in own for own in by_axes):
            yield [first, *(own[place] for own in by_axes)]


def _cut_by(x: Spread) -> dict[str, int]:
    """Return the dimension that each axis cuts."""
    return {atom: number for number, dim in enumerate(x.dims) for atom in dim if isinstance(atom, str)}
