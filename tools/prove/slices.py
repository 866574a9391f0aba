"""This module computes how a value is distributed over the ranks (its `tools.prove.spread.Spread`) after each rank has
taken a slice, padded its part with zeros, or looked up rows of a table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tools.prove import moves
from tools.prove.spread import (
    Alike,
    Block,
    Dim,
    NotKnown,
    Spread,
    as_tensor,
    by_element,
    checked,
    extent,
    refusal,
    require_home,
    tidy,
)


def take(x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after each rank has taken a slice of its part.

    Args:
        shape: the shape of the slice on the rank.
        by: dimension -> the axes along which each rank's slice starts at a different offset, outermost first.
    """
    block = _taken_block(x, shape, by, sizes)
    if block is None and not by and (same := _same_piece(x, shape)) is not None:
        return same
    if block is None:
        require_home(x)
    elif block.others:  # the pieces may belong to another dimension
        x = replace(x, loose=x.loose.union(*by.values()))
    for number, size in enumerate(shape):
        axes = by.get(number, ())
        if not axes and extent(x.dims[number]) != size:
            if any(not isinstance(atom, int) for atom in x.dims[number]):
                raise refusal((x,), f"each rank takes the same part of dimension {number}, which is cut over them")
            x = replace(x, dims=(*x.dims[:number], tidy((size,)), *x.dims[number + 1 :]))
        for axis in axes:
            if axis in x.holes | x.partial:
                raise refusal((x,), f"each rank along {axis} takes another part of a value that differs along it")
            x = replace(x, dims=moves.cut(x, number, axis, sizes[axis]))
        if axes and extent(x.dims[number]) != size:
            raise NotKnown(
                f"{x}: a slice of {size} elements of dimension {number} is not one rank's piece over {', '.join(axes)}"
            )
    return x


def _taken_block(
    x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]], sizes: Mapping[str, int]
) -> Block | None:
    """Return the gathered pieces in front of the only dimension that a slice changes, if the slice divides exactly
    these pieces among the ranks along axes; None for any other slice.
    """
    if len(by) != 1:
        return None
    ((number, axes),) = by.items()
    blocks = [(place, atom) for place, dim in enumerate(x.dims) for atom in dim if isinstance(atom, Block)]
    others = all(
        extent(dim) == size for place, (dim, size) in enumerate(zip(x.dims, shape, strict=True)) if place != number
    )
    whole = [block for place, block in blocks if place == number and x.dims[number][0] is block]
    divided = len(blocks) == 1 and whole and whole[0].count == math.prod(sizes[axis] for axis in axes)
    return whole[0] if divided and others else None


def _same_piece(x: Spread, shape: Sequence[int]) -> Spread | None:
    """Return the gathered piece in front of dimension 0 that all ranks take alike; None if this takes no piece."""
    lead, *rest = x.dims[0] or (1,)
    if not isinstance(lead, Block) or any(
        isinstance(atom, Block) for dim in (tuple(rest), *x.dims[1:]) for atom in dim
    ):
        return None
    found = replace(x, dims=(tuple(rest), *x.dims[1:]))
    return found if found.shape == tuple(shape) else None


def pad(x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after each rank has padded its part with zeros, as
    in the gradient of a slice (`take`).

    Args:
        shape, by, sizes: the same as in `take`, for the padded value.
    """
    require_home(x)
    x = as_tensor(x) if isinstance(x, Alike) else x  # beside zeros its elements are not equal any more
    if set(by) == {0} and (found := stacked(x, shape, by, sizes)) is not None:
        return found
    x = x if by else _added_up(x, shape)
    dims, partial = list(x.dims), set(x.partial)
    for number, size in enumerate(shape):
        axes = by.get(number, ())
        if not axes and extent(dims[number]) != size and any(not isinstance(atom, int) for atom in dims[number]):
            # a gradient that was to be added up over a dimension of 1 on each rank looks cut over it, too
            raise NotKnown(
                f"{x}: each rank pads dimension {number} equally, although it is cut over these ranks or still a "
                "partial sum"
            )
        if missing := [axis for axis in axes if axis not in dims[number]]:
            raise refusal(
                (x,), f"each rank along {missing[0]} pads a different part, but the value is not cut along this axis"
            )
        if axes or extent(dims[number]) != size:
            dims[number] = tidy((*(a for a in dims[number] if isinstance(a, str) and a not in axes), size))
        partial |= set(axes)
    return replace(x, dims=tuple(dims), partial=frozenset(partial), loose=x.loose - partial)


def _added_up(x: Spread, shape: Sequence[int]) -> Spread:
    """Return the gradient of a part of a vector; axes that cut a dimension of one element count as axes of a sum over
    it.

    Where a rank has one sample, the graph does not show the sum over the samples. The vector itself is not cut, because
    `take` refuses to take the same part of each rank's piece.
    """
    if len(x.dims) != 1 or x.shape == tuple(shape):
        return x
    cuts = frozenset(atom for atom in x.dims[0] if isinstance(atom, str))
    return moves.added_up(x, cuts if x.shape == (1,) else cuts & x.dropped)


def stacked(
    x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]], sizes: Mapping[str, int]
) -> Spread | None:
    """Return how a tensor that was padded with zeros is distributed over the ranks (its spread). Return None unless the
    tensor was padded with zeros along one dimension of one element, with each rank's element at the rank's own index.

    This is the gradient of a slice that divides gathered pieces among ranks. A dimension other than the first one may
    also be the dimension of these pieces, which `pad` tries before.
    """
    if len(by) != 1:
        return None
    x = as_tensor(x) if isinstance(x, Alike) else x  # beside zeros its elements are not equal any more
    ((number, axes),) = by.items()
    parts = math.prod(sizes[axis] for axis in axes)
    others = all(
        extent(dim) == size for place, (dim, size) in enumerate(zip(x.dims, shape, strict=True)) if place != number
    )
    if x.dims[number] or not others or shape[number] != parts or not set(axes) <= x.holes:
        return None
    found = moves.all_gather(x, axes, sizes)
    if number:
        lead, *rest = found.dims[0] or (1,)
        if not isinstance(lead, Block) or lead.count != parts:
            return None  # pieces of dimension 0 are in their final place, not in the padded dimension
        dims = [tuple(rest), *found.dims[1:]]
        dims[number] = (lead,)
        found = replace(found, dims=tuple(dims))
    return replace(found, partial=x.partial | set(axes), loose=x.loose.difference(axes))


def _outermost_first(axes: frozenset[str], sizes: Mapping[str, int]) -> Dim:
    """Return the axes over which ranks count from their own pieces; `sizes` names those first whose ranks lie
    closest.
    """
    return tuple(axis for axis in reversed(list(sizes)) if axis in axes)


def look_up(indices: Spread, table: Spread, sizes: Mapping[str, int]) -> Spread:
    """Return how the rows that are looked up in an embedding table are distributed over the ranks (their spread). If
    the rows of the table are cut over ranks, the indices must count from the first row of the rank's own piece.
    """
    require_home(indices, table)
    by_element(table)
    cut = tuple(atom for atom in table.dims[0] if isinstance(atom, str))
    if cut != _outermost_first(indices.shifted, sizes):
        raise refusal((indices, table), "the indices do not count from where the rank's rows of the table start")
    dims = checked((*indices.dims, *table.dims[1:]), indices, table)
    return Spread(dims, shifted=indices.shifted, loose=indices.loose)


def add_rows(gradient: Spread, indices: Spread, rows: int, sizes: Mapping[str, int]) -> Spread:
    """Return how the gradient of an embedding table is distributed over the ranks (its spread). The gradients of all
    lookups of the same row (see `look_up`) are added.
    """
    require_home(gradient, indices)
    if indices.shifted - gradient.shifted:
        raise refusal((gradient, indices), "rows of other ranks are added to a rank's own: the gradient has no mask")
    count = len(indices.dims)
    if tuple(map(tidy, gradient.dims[:count])) != tuple(map(tidy, indices.dims)):
        raise refusal((gradient, indices), "the gradient and the indices are not cut equally")
    cut = frozenset(atom for dim in indices.dims for atom in dim if isinstance(atom, str))
    dims = (tidy((*_outermost_first(indices.shifted, sizes), rows)), *gradient.dims[count:])
    return Spread(dims, gradient.partial | cut, gradient.powers)


def one_hot(indices: Spread, classes: int, sizes: Mapping[str, int]) -> Spread:
    """Return how one-hot rows (zeros, and a one at each index) are distributed over the ranks (their spread). If each
    rank has subtracted the start of its own piece from the indices, the rows are cut over ranks.
    """
    require_home(indices)
    by_element(indices)
    own = tidy((*_outermost_first(indices.shifted, sizes), classes))
    return Spread(checked((*indices.dims, own), indices), loose=indices.loose)
