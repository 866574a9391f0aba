"""This module says how tokens are distributed over the ranks by operators that prepare them for the dispatch to
experts, and by operators that undo this preparation. To prepare tokens, operators group them by rank, add constant
rows, and reorder them.

The shapes do not distinguish such a reshape or concatenation from any other; only its counterpart after the experts
puts the tokens back in their original positions. `tools.prove.experts` holds the rules of the steps in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tools.prove.call import Value
from tools.prove.spread import Dim, NotKnown, Rows, Spread, extent, refusal


def rows_in(dim: Dim) -> tuple[int, Rows] | None:
    """Return the token rows (in an order that routing decides) that are a factor of a dimension, with the position of
    this factor. Return None if the dimension has no such rows.
    """
    return next(((place, atom) for place, atom in enumerate(dim) if isinstance(atom, Rows)), None)


def dispatched(dim: Dim) -> tuple[int, Rows] | None:
    """A dimension is a product of factors. If one factor is token rows (`Rows`) that were dispatched to experts, return
    its position and the rows. Return None if the dimension has no such rows, or only rows that `by_rank` has reordered.
    """
    found = rows_in(dim)
    return None if found is None or found[1].path == (("flat",),) else found


def by_rank(x: Spread, axes: Iterable[str]) -> Spread:
    """Return the spread of a vector that is cut over ranks, with the elements in the order in which an AllGather joins
    the ranks' pieces. If the elements of the vector are already in the order of the ranks, the spread is unchanged.

    A gather puts the ranks' elements one after another, which is not the order of the whole value.
    """
    if len(x.dims) != 1 or any(not isinstance(atom, (int, str)) for atom in x.dims[0]):
        return x
    own = tuple(atom for atom in x.dims[0] if isinstance(atom, str))
    if x.dims[0][: len(own)] == own or not set(axes) <= set(own):
        return x
    return replace(x, dims=((*own, Rows((x.dims[0],), (("flat",),), extent(x.dims[0]))),))


def by_place(x: Spread) -> Spread:
    """Undo `by_rank`: return the spread of a vector with the elements in their original order. If the ranks do not hold
    their own elements again, return the spread unchanged.
    """
    rows = x.dims[0][-1] if len(x.dims) == 1 and x.dims[0] else None
    if not isinstance(rows, Rows) or rows.path != (("flat",),):
        return x
    own = tuple(atom for atom in rows.origin[0] if isinstance(atom, str))
    return replace(x, dims=rows.origin) if x.dims[0][:-1] == own else x


def equal_rows(x: Spread, numbers: Iterable[int]) -> Spread:
    """Return the spread of a value whose elements are equal along the given dimensions. Along dimensions of equal
    elements, the value can be combined with rows in any order.
    """
    dims = list(x.dims)
    for number in numbers:
        dims[number] = (Rows((), (("equal",),), extent(dims[number])),)
    return replace(x, dims=tuple(dims))


def grouped(x: Spread, shape: Sequence[int]) -> Spread | None:
    """Return how tokens are distributed over the ranks after MindFormers has grouped them by rank for its router.
    Grouping reshapes [batch, sequence, width] to [ranks, tokens, width].

    The reshape moves each rank's own tokens to other positions of the whole value; only the later reshape that undoes
    it puts them back. Return None for any other reshape.
    """
    if len(x.dims) != 3 or len(shape) != 3 or extent(x.dims[2]) != shape[2] or any(map(rows_in, x.dims)):
        return None
    own = x.dims[:2]
    if shape[0] != 1 or extent(own[1]) == 1 or math.prod(map(extent, own)) != shape[1] or not x.holes:
        return None
    axes: Dim = tuple(atom for dim in own for atom in dim if isinstance(atom, str))
    rows = Rows(own, (("group",),), shape[1])
    return replace(x, dims=(axes, (rows,), x.dims[2]), loose=x.loose - set(axes))


def ungrouped(x: Spread, shape: Sequence[int]) -> Spread | None:
    """Return how tokens are distributed over the ranks after a reshape that undoes `grouped`; return None if the
    reshape does not undo it.
    """
    if len(x.dims) != 3 or len(shape) != 3 or len(x.dims[1]) != 1 or not isinstance(rows := x.dims[1][0], Rows):
        return None
    if rows.path != (("group",),) or tuple(map(extent, rows.origin)) != tuple(shape[:2]):
        return None
    return replace(x, dims=(*rows.origin, x.dims[2]))


def grouped_rows(x: Spread) -> Spread | None:
    """Return a matrix of tokens with its rows in the order that `grouped` gives to tokens; return None for any other
    matrix.

    If the compiler has merged two reshapes into one, the graph does not show the grouped tokens between them.
    """
    if len(x.dims) != 2 or tuple(atom for dim in x.merged for atom in dim) != x.dims[0]:
        return None
    tokens = replace(x, dims=(*x.merged, x.dims[1]))
    found = grouped(tokens, (1, *x.shape))
    return found and replace(found, dims=((*found.dims[0], *found.dims[1]), found.dims[2]))


def ungrouped_rows(x: Spread, shape: Sequence[int]) -> Spread | None:
    """Return how tokens are distributed over the ranks after a reshape that undoes `grouped_rows`; return None for any
    other reshape.

    If a rank has one sample, [1, tokens, width] is treated as grouped tokens, which the next Transpose ungroups.
    """
    if len(x.dims) != 2 or len(shape) != 3 or shape[0] == 1 or not rows_in(x.dims[0]):
        return None
    return ungrouped(replace(x, dims=(x.dims[0][:-1], x.dims[0][-1:], x.dims[1])), shape)


def padded(members: Sequence[Value], axis: int) -> Spread | None:
    """Return how grouped tokens are distributed over the ranks after constant rows were put in front of them; return
    None if the tokens are not grouped.
    """
    if len(members) != 2 or not all(isinstance(each, Spread) for each in members):
        return None
    first, x = members
    axis %= len(x.dims)
    if first.holes or first.partial or first.powers or x.partial or x.powers or not rows_in(x.dims[axis]):
        return None
    return _with_pad(x, axis, extent(first.dims[axis]))


def padded_back(x: Spread, begin: Sequence[int], shape: Sequence[int]) -> Spread | None:
    """Return how grouped tokens are distributed over the ranks after zeros were put in front of them, which is the
    gradient of `unpadded`; return None if the tokens are not grouped.
    """
    moved = [place for place, at in enumerate(begin) if at and rows_in(x.dims[place])]
    if len(moved) != 1 or shape[moved[0]] != begin[moved[0]] + extent(x.dims[moved[0]]):
        return None
    return _with_pad(x, moved[0], begin[moved[0]])


def _with_pad(x: Spread, axis: int, pad: int) -> Spread:
    found = rows_in(x.dims[axis])
    assert found
    place, rows = found
    return _with(x, axis, place, Rows(rows.origin, (*rows.path, ("pad", pad)), rows.count + pad))


def _with(x: Spread, axis: int, place: int, rows: Rows) -> Spread:
    dim = (*x.dims[axis][:place], rows, *x.dims[axis][place + 1 :])
    return replace(x, dims=(*x.dims[:axis], dim, *x.dims[axis + 1 :]))


def unpadded(x: Spread, begin: Sequence[int], shape: Sequence[int]) -> Spread | None:
    """Return how grouped tokens are distributed over the ranks after the constant rows in front of them were removed;
    return None if the tokens are not grouped.
    """
    for place, dim in enumerate(x.dims):
        found = rows_in(dim)
        if found is None:
            continue
        at, rows = found
        if not begin[place] and extent(dim) == shape[place]:
            continue
        if rows.path[-1][0] != "pad":
            raise NotKnown(f"{x}: a part of unknown rows is selected")
        if rows.path[-1] != ("pad", begin[place]) or rows.count != begin[place] + shape[place]:
            raise refusal((x,), "the removed rows are not the rows that were put in front of the tokens")
        return _with(x, place, at, Rows(rows.origin, rows.path[:-1], shape[place]))
    return None
