"""This module defines what shape operators, slices, look-ups and collectives make of a `tools.prove.spread.Spread`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from tools.prove.spread import (
    Atom,
    Block,
    Contradiction,
    Dim,
    NotKnown,
    Spread,
    by_element,
    checked,
    extent,
    joined,
    logical,
    placements,
    refusal,
    require_home,
    scaled,
    tidy,
)


def _flat(x: Spread) -> list[tuple[int, Atom]]:
    """(dimension, atom) in the order of the elements, blocks as extents."""
    home = [(number, atom) for number, dim in enumerate(logical(x.dims)) for atom in dim]
    lies = [atom for dim in x.dims for atom in dim if not isinstance(atom, str)]
    if any(isinstance(atom, Block) for atom in lies) and lies != [a for _, a in home if not isinstance(a, str)]:
        raise NotKnown(f"{x}: gathered pieces are reshaped before they are where they belong")
    plain_atoms = ((number, atom.count if isinstance(atom, Block) else atom) for number, atom in home)
    return [(number, atom) for number, atom in plain_atoms if atom != 1]


def reshape(x: Spread, shape: Sequence[int], firm: bool = False) -> Spread:
    """Return the spread of the same elements in another shape on the rank.

    A piece stays between the extents around it. If these come into different dimensions, it stays in front of the
    extent behind it if both shared a dimension, because a layout cuts dimensions into whole pieces. Otherwise it goes
    to that dimension of one element between them which it had before, or to the end of the one before. Its place is a
    guess (`loose`) where a dimension of one element could have it as well, unless the places are `firm`.
    """
    atoms = _flat(x)
    placed: list[tuple[int, Atom]] = []  # (new dimension, atom), -1 for pieces
    shared: list[tuple[bool, bool, int, int]] = []  # of pieces: see `_with_pieces`
    number, need = -1, 1
    for place, (own, atom) in enumerate(atoms):
        if isinstance(atom, str):
            sides = (atoms[:place][::-1], atoms[place + 1 :])
            extents = [next((at for at, each in side if isinstance(each, int)), None) for side in sides]
            placed.append((-1, atom))
            before = -1 if extents[0] is None else extents[0]
            behind = len(x.dims) if extents[1] is None else extents[1]
            shared.append((before == own, behind == own, own - before - 1, behind - before - 1))
            continue
        assert isinstance(atom, int)
        while atom > 1:
            while need == 1 and number + 1 < len(shape):
                number, need = number + 1, shape[number + 1]
            part = math.gcd(atom, need)
            if part == 1 or part not in (atom, need):
                raise NotKnown(f"{x}: reshape to {tuple(shape)} cuts across its extents")
            placed.append((number, part))
            shared.append((False, False, 0, 0))
            atom, need = atom // part, need // part
    if math.prod(size for _, size in placed if isinstance(size, int)) != math.prod(shape):
        raise NotKnown(f"{x}: reshape to {tuple(shape)} has another number of elements")
    return _with_pieces(x, placed, shared, shape, firm)


def _with_pieces(
    x: Spread,
    placed: list[tuple[int, Atom]],
    shared: list[tuple[bool, bool, int, int]],
    shape: Sequence[int],
    firm: bool,
) -> Spread:
    """The reshaped spread, with each piece in a dimension between those of the extents around it.

    Args:
        shared: of each piece whether the extents before and behind it stood in its dimension, and which one of how many
            dimensions of one element between them it had.
    """
    found: list[list[Atom]] = [[] for _ in shape]
    loose = set(x.loose)
    last = 0
    for place, (number, atom) in enumerate(placed):
        if isinstance(atom, str):
            behind = next((at for at, each in placed[place:] if not isinstance(each, str)), len(shape) - 1)
            between = [n for n in range(last, behind + 1) if shape[n] == 1]
            before, after, which, units = shared[place]
            number = behind if after else between[min(which, len(between) - 1)] if between else last
            if last == behind:
                loose.discard(atom)
            elif not firm and (bool(between) if before or after else len(between) != units or not between):
                loose.add(atom)
        if number < 0 or number >= len(shape):
            raise NotKnown(f"{x}: reshape to {tuple(shape)} leaves no dimension for the pieces over {atom}")
        found[number].append(atom)
        last = number
    return replace(x, dims=tuple(map(tidy, found)), loose=frozenset(loose))


def transpose(x: Spread, order: Sequence[int]) -> Spread:
    """Return the spread with the dimensions in another order."""
    require_home(x)
    return replace(x, dims=tuple(x.dims[axis] for axis in order))


def expand(x: Spread, axis: int) -> Spread:
    """Return the spread with a new dimension of one element."""
    axis %= len(x.dims) + 1
    require_home(x)
    return replace(x, dims=(*x.dims[:axis], (), *x.dims[axis:]))


def tile(x: Spread, counts: Sequence[int]) -> Spread:
    """Return the spread of a value repeated along dimensions, which is a repeated value only along whole ones."""
    require_home(x)
    dims = ((),) * (len(counts) - len(x.dims)) + x.dims
    for dim, count in zip(dims, counts, strict=True):
        if count > 1 and any(not isinstance(atom, int) for atom in dim):
            raise refusal((x,), "a cut dimension is repeated on each rank")
    return replace(x, dims=tuple(tidy((count, *dim)) for dim, count in zip(dims, counts, strict=True)))


def broadcast(x: Spread, shape: Sequence[int]) -> Spread:
    """Return the spread of a value repeated to a shape on the rank; -1 keeps a dimension."""
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    counts = [1 if size in (-1, extent(dim)) else size for dim, size in zip(dims, shape, strict=True)]
    return tile(x, counts)


def split(x: Spread, axis: int, sizes: Sequence[int]) -> list[Spread]:
    """Return the spreads of parts of a dimension that is whole on each rank."""
    require_home(x)
    axis %= len(x.dims)
    if any(not isinstance(atom, int) for atom in x.dims[axis]):
        raise refusal((x,), f"dimension {axis} is split on each rank, and is cut over the ranks")
    return [replace(x, dims=(*x.dims[:axis], tidy((size,)), *x.dims[axis + 1 :])) for size in sizes]


def rejoin(x: Spread, axis: int, parts: int, to: int) -> Spread:
    """Return the spread of a value whose dimension was split into equal parts that were joined along another one.

    By this, gathered pieces come to where they belong, or pieces go in front of where they will be scattered.
    """
    axis, to = axis % len(x.dims), to % len(x.dims)
    if axis == to:
        return x
    dims = list(x.dims)
    rest = list(dims[axis])
    blocks: list[Block] = []
    while rest and isinstance(rest[0], Block) and math.prod(block.count for block in blocks) < parts:
        blocks.append(rest[0])
        rest.pop(0)
    if not blocks:
        first = next((place for place, atom in enumerate(rest) if isinstance(atom, int)), len(rest))
        outer = rest[first] if first < len(rest) else 1
        if not isinstance(outer, int) or outer % parts or any(isinstance(atom, Block) for atom in (*rest, *dims[to])):
            raise NotKnown(f"{x}: dimension {axis} is split into {parts} parts across its extents")
        dims[axis] = tidy((*rest[:first], outer // parts, *rest[first + 1 :]))
        dims[to] = (Block(axis, parts, first), *dims[to])
        return replace(x, dims=tuple(dims))
    home = list(dims[to])
    for block in blocks:
        home.insert(block.at, block)
    lie: list[Atom] = [atom for atom in home if not isinstance(atom, str)]
    if math.prod(block.count for block in blocks) != parts:
        raise NotKnown(f"{x}: dimension {axis} is split into {parts} parts, which are not the gathered pieces")
    if any(block.home != to for block in blocks):
        raise NotKnown(f"{x}: gathered pieces are joined along dimension {to}, to which they do not seem to belong")
    if lie[: len(blocks)] != blocks:
        raise refusal((x,), "gathered pieces are joined in another order than that in which they lie")
    dims[axis] = tuple(rest)
    dims[to] = tidy(atom.count if isinstance(atom, Block) else atom for atom in home)
    return replace(x, dims=tuple(dims))


def concat(given: Sequence[Spread], axis: int) -> Spread:
    """Return the spread of values joined along a dimension that is whole on each rank."""
    require_home(*given)
    first = given[0]
    axis %= len(first.dims)
    total = 0
    for x in given:
        if (x.partial, x.powers) != (first.partial, first.powers):
            raise refusal((first, x), "values that are spread differently are joined")
        if any(not isinstance(atom, int) for atom in x.dims[axis]):
            raise refusal((x,), f"dimension {axis} is joined on each rank, and is cut over the ranks")
        total += extent(x.dims[axis])
        apart = [replace(v, dims=(*v.dims[:axis], (), *v.dims[axis + 1 :])) for v in (first, x)]
        first = replace(first, dims=joined(*apart).dims, loose=first.loose | x.loose)
    return replace(first, dims=(*first.dims[:axis], tidy((total,)), *first.dims[axis + 1 :]))


def all_reduce(x: Spread, axes: Iterable[str]) -> Spread:
    """Return the spread of a sum over the ranks along axes."""
    for axis in axes:
        if axis in x.holes:
            raise refusal((x,), f"a sum over {axis} adds different pieces")
        if axis in x.greatest | x.shifted:
            raise refusal((x,), f"a sum over {axis} adds what are not parts of a sum")
        x = replace(x, partial=x.partial - {axis}) if axis in x.partial else scaled(x, (axis,), 1)
    return x


def all_largest(x: Spread, axes: Iterable[str]) -> Spread:
    """Return the spread of the largest value over the ranks along axes."""
    for axis in axes:
        if axis in x.holes | x.partial | x.shifted or x.powers:
            raise refusal((x,), f"the largest over {axis} is not taken of a plain value")
    return replace(x, greatest=x.greatest - frozenset(axes))


def all_gather(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread:
    """Return the spread of a value whose pieces are put one behind the other in dimension 0.

    Args:
        axes: of the group, the one along which neighbouring ranks of the group lie last.
    """
    for axis in reversed(axes):
        if axis not in x.holes:
            how = "partial over it" if axis in x.partial else "the same on its ranks"
            raise refusal((x,), f"pieces over {axis} are gathered, but the value is {how}")
        dims = list(x.dims)
        home = next(number for number, dim in enumerate(dims) if axis in dim)
        at = dims[home].index(axis)
        if any(not isinstance(atom, str) for atom in dims[home][:at]):
            raise refusal((x,), f"pieces over {axis} are gathered in another order than that in which they lie")
        rest = tuple(atom for atom in dims[home] if atom != axis)
        if home == 0:
            dims[0] = tidy((*rest[:at], sizes[axis], *rest[at:]))
        else:
            dims[home] = rest
            dims[0] = (Block(home, sizes[axis], at), *dims[0])
        x = replace(x, dims=tuple(dims))
    return x


def reduce_scatter(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread:
    """Return the spread of a sum over the ranks along axes, of which each keeps its piece of dimension 0.

    Args:
        axes: as those of `all_gather`.
    """
    x = all_reduce(x, axes)
    for axis in axes:
        count = sizes[axis]
        dims = list(x.dims)
        lead = dims[0][0] if dims[0] else None
        if isinstance(lead, Block):
            if lead.count % count:
                raise NotKnown(f"{x}: {lead.count} parts in front of dimension 0 are scattered over {count} ranks")
            left = (Block(lead.home, lead.count // count, lead.at + 1),) if lead.count > count else ()
            home = dims[lead.home]
            dims[0] = (*left, *dims[0][1:])
            dims[lead.home] = (*home[: lead.at], axis, *home[lead.at :])
        else:
            dims[0] = _cut(x, dims[0], axis, count)
        x = replace(x, dims=tuple(dims))
    return x


def _cut(x: Spread, dim: Dim, axis: str, count: int) -> Dim:
    """A dimension of which the ranks along an axis keep a piece each."""
    first = next((place for place, atom in enumerate(dim) if not isinstance(atom, str)), len(dim))
    outer = dim[first] if first < len(dim) else 1
    if not isinstance(outer, int) or outer % count:
        raise NotKnown(f"{x}: {'*'.join(map(str, dim)) or 1} elements are cut into {count} pieces across their extents")
    return tidy((*dim[:first], axis, outer // count, *dim[first + 1 :]))


def all_to_all(x: Spread, axis: str, cut: int, whole: int, sizes: Mapping[str, int]) -> Spread:
    """Return the spread of a value that is cut along dimension `cut` instead of `whole`, over the ranks of an axis."""
    require_home(x)
    dims = list(x.dims)
    if axis not in dims[whole]:
        raise refusal((x,), f"dimension {whole} is not cut over {axis}")
    at = dims[whole].index(axis)
    if any(not isinstance(atom, str) for atom in dims[whole][:at]) or cut == whole:
        raise NotKnown(f"{x}: pieces over {axis} are exchanged inside of others")
    dims[whole] = tidy(sizes[axis] if atom == axis else atom for atom in dims[whole])
    dims[cut] = _cut(x, dims[cut], axis, sizes[axis])
    return replace(x, dims=tuple(dims), loose=x.loose - {axis})


def wherever(move: Callable[[Spread], Spread], x: Spread) -> Spread:
    """Return what a move makes of a value, for the first places of its loose pieces for which the move is right."""
    first: Contradiction | None = None
    for given in placements(x):
        try:
            return move(given)
        except Contradiction as error:
            first = first or error
    assert first
    raise first


def take(x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]], sizes: Mapping[str, int]) -> Spread:
    """Return the spread of a slice of each dimension.

    Args:
        shape: of the slice on the rank.
        by: dimension -> the axes along which the slice starts elsewhere on each rank, outermost first.
    """
    require_home(x)
    dims = list(x.dims)
    for number, size in enumerate(shape):
        axes = by.get(number, ())
        if not axes and extent(dims[number]) != size:
            if any(not isinstance(atom, int) for atom in dims[number]):
                raise refusal((x,), f"each rank takes the same part of dimension {number}, which is cut over them")
            dims[number] = tidy((size,))
        for axis in axes:
            if axis in x.holes | x.partial:
                raise refusal((x,), f"each rank along {axis} takes another part of a value that differs along it")
            dims[number] = _cut(x, dims[number], axis, sizes[axis])
        if axes and extent(dims[number]) != size:
            raise NotKnown(f"{x}: {size} elements of dimension {number} are no piece over {', '.join(axes)}")
    return replace(x, dims=tuple(dims))


def pad(x: Spread, shape: Sequence[int], by: Mapping[int, Sequence[str]]) -> Spread:
    """Return the spread of zeros around a value: the gradient of `take`.

    Args:
        shape, by: of the padded value, as those of `take`.
    """
    require_home(x)
    dims, partial = list(x.dims), set(x.partial)
    for number, size in enumerate(shape):
        axes = by.get(number, ())
        if not axes and extent(dims[number]) != size and any(not isinstance(atom, int) for atom in dims[number]):
            raise refusal((x,), f"each rank pads dimension {number} alike, which is cut over them")
        if missing := [axis for axis in axes if axis not in dims[number]]:
            raise refusal((x,), f"each rank along {missing[0]} pads another part, but is not cut along it")
        if axes or extent(dims[number]) != size:
            dims[number] = tidy((*(a for a in dims[number] if isinstance(a, str) and a not in axes), size))
        partial |= set(axes)
    return replace(x, dims=tuple(dims), partial=frozenset(partial), loose=x.loose - partial)


def look_up(indices: Spread, table: Spread) -> Spread:
    """Return the spread of rows of a table. Where the table's rows are cut, indices must count from the rank's own."""
    require_home(indices, table)
    by_element(table)
    cut = frozenset(atom for atom in table.dims[0] if isinstance(atom, str))
    if cut != indices.shifted:
        raise refusal((indices, table), "the indices do not count from where the rank's rows of the table start")
    dims = checked((*indices.dims, *table.dims[1:]), indices, table)
    return Spread(dims, shifted=indices.shifted, loose=indices.loose)


def add_rows(gradient: Spread, indices: Spread, rows: int) -> Spread:
    """Return the spread of the gradient of `look_up`: a sum for each row of the table."""
    require_home(gradient, indices)
    if indices.shifted - gradient.shifted:
        raise refusal((gradient, indices), "rows of other ranks are added to a rank's own: the gradient has no mask")
    count = len(indices.dims)
    if tuple(map(tidy, gradient.dims[:count])) != tuple(map(tidy, indices.dims)):
        raise refusal((gradient, indices), "the gradient and the indices are not cut alike")
    cut = frozenset(atom for dim in indices.dims for atom in dim if isinstance(atom, str))
    dims = (tidy((*sorted(indices.shifted), rows)), *gradient.dims[count:])
    return Spread(dims, gradient.partial | cut, gradient.powers)


def one_hot(indices: Spread, classes: int) -> Spread:
    """Return the spread of rows of zeros with a one at each index; shifted indices make pieces of the rows."""
    require_home(indices)
    by_element(indices)
    return Spread((*indices.dims, tidy((*sorted(indices.shifted), classes))), loose=indices.loose)
