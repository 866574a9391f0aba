"""This module computes how a value is distributed over the ranks (its `tools.prove.spread.Spread`) after a collective,
or after an operator that reshapes, reduces, splits or joins dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from tools.prove.places import outside, wherever_all
from tools.prove.spread import (
    Atom,
    Block,
    Dim,
    NotKnown,
    Rows,
    Spread,
    Zeros,
    alike,
    as_partial,
    as_tensor,
    by_element,
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
    """Return (dimension, atom) in the order of the elements, blocks as extents."""
    home = [(number, atom) for number, dim in enumerate(logical(x.dims)) for atom in dim]
    lies = [atom for dim in x.dims for atom in dim if not isinstance(atom, str)]
    if any(isinstance(atom, Block) for atom in lies) and lies != [a for _, a in home if not isinstance(a, str)]:
        raise NotKnown(f"{x}: gathered pieces are reshaped before they are in their final place")
    plain_atoms = ((number, atom.count if isinstance(atom, Block) else atom) for number, atom in home)
    return [(number, atom) for number, atom in plain_atoms if atom != 1]


_OF_SAMPLES = "dp"  # pieces over these axes are rather of the batch than of the sequence
_OF_TOKENS = ("dp", "cp")  # pieces over these axes are of the batch or of the sequence, and not of heads
_BY_DATA = 1_000_003  # stands for a number of rows that the data decide; a prime, so that no reshape divides it


def _count(atom: Atom) -> int:
    """Return the elements of an atom on a rank, with a stand-in where the data decide."""
    size = extent((atom,))
    return _BY_DATA if size == -1 else size


def reshape(x: Spread, shape: Sequence[int], firm: bool = False, ranks_first: bool = False) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after each rank has reshaped its part to another
    shape.

    The pieces of an axis stay between the extents (sizes on a rank) around them. If these two extents come into
    different dimensions, the pieces stay in front of the second extent if the pieces and this extent shared a
    dimension, because a layout cuts dimensions into whole pieces. Otherwise the pieces go to the dimension of one
    element between the two extents in which they were before, or to the end of the dimension before. The place of the
    pieces is a guess (`loose`) if a dimension of one element could have the pieces as well, unless the places are
    `firm`. If dimension 0 is that of the ranks (`ranks_first`), pieces in front of all extents go to dimension 0.
    """
    atoms = _flat(x)
    if -1 not in shape:  # now it is known how many rows there are
        others = math.prod(_count(atom) for _, atom in atoms if not isinstance(atom, Rows))
        size = math.prod(shape) // others
        atoms = [(n, replace(a, count=size) if isinstance(a, Rows) and a.count == -1 else a) for n, a in atoms]
    total = math.prod(_count(atom) for _, atom in atoms)
    rest = math.prod(size for size in shape if size != -1)
    shape = [total // rest if size == -1 else size for size in shape]
    placed: list[tuple[int, Atom]] = []  # (new dimension, atom), -1 for pieces
    shared: list[tuple[bool, bool, int, int, int]] = []  # of pieces: see `_with_pieces`
    number, need = -1, 1
    for place, (own, atom) in enumerate(atoms):
        if isinstance(atom, str):
            sides = (atoms[:place][::-1], atoms[place + 1 :])
            extents = [next((at for at, each in side if not isinstance(each, str)), None) for side in sides]
            placed.append((-1, atom))
            before = -1 if extents[0] is None else extents[0]
            behind = len(x.dims) if extents[1] is None else extents[1]
            shared.append((before == own, behind == own, own - before - 1, behind - before - 1, own))
            continue
        left = _count(atom)
        while left > 1:
            while need == 1 and number + 1 < len(shape):
                number, need = number + 1, shape[number + 1]
            part = math.gcd(left, need)
            if part == 1 or part not in (left, need) or (isinstance(atom, Rows) and part != left):
                raise NotKnown(f"{x}: reshape to {tuple(shape)} cuts across its extents")
            placed.append((number, atom if isinstance(atom, Rows) else part))
            shared.append((False, False, 0, 0, 0))
            left, need = left // part, need // part
    if math.prod(_count(size) for _, size in placed) != math.prod(shape):
        raise NotKnown(f"{x}: reshape to {tuple(shape)} has another number of elements")
    found = _with_pieces(x, placed, shared, shape, firm)
    return _ranks_in_front(found) if ranks_first and shape[0] == 1 else found


def _ranks_in_front(x: Spread) -> Spread:
    """Return a spread whose pieces in front of all extents are in dimension 0 for certain, if nothing else is there."""
    place = next((number for number, dim in enumerate(x.dims) if dim), 0)
    if not place:  # they are there already
        return replace(x, loose=x.loose.difference(atom for atom in x.dims[0] if isinstance(atom, str)))
    first = next((at for at, atom in enumerate(x.dims[place]) if not isinstance(atom, str)), 0)
    axes, rest = x.dims[place][:first], x.dims[place][first:]
    dims = (axes, *x.dims[1:place], rest, *x.dims[place + 1 :])
    return replace(x, dims=dims, loose=x.loose.difference(axis for axis in axes if isinstance(axis, str)))


def _with_pieces(
    x: Spread,
    placed: list[tuple[int, Atom]],
    shared: list[tuple[bool, bool, int, int, int]],
    shape: Sequence[int],
    firm: bool,
) -> Spread:
    """Return the reshaped spread, with each piece in a dimension between those of the extents around it.

    Args:
        shared: of each piece whether the extents before and behind it stood in its dimension, and which one of how many
            dimensions of one element between them it had, and the number of its dimension.
    """
    found: list[list[Atom]] = [[] for _ in shape]
    loose, dropped = set(x.loose), set(x.dropped)
    last = firmly = 0  # the dimension of the last part, and of the last one whose place is no guess
    for place, (number, atom) in enumerate(placed):
        if isinstance(atom, str):
            behind = next((at for at, each in placed[place:] if not isinstance(each, str)), len(shape) - 1)
            between = [n for n in range(last, behind + 1) if shape[n] == 1]
            before, after, which, units, own = shared[place]
            number = behind if after else between[max(0, min(which, len(between) - 1))] if between else behind
            of_samples, of_tokens = atom.startswith(_OF_SAMPLES), atom.startswith(_OF_TOKENS)
            if of_tokens and not after and not between and behind == len(shape) - 1:
                number = last  # tokens become one dimension, and their width stays; one head's width has its piece
            if after and between and between[0] == 0 and of_samples:
                number = 0
            inner = placed[place - 1][1] if place else 1
            if number < behind and isinstance(inner, str) and outside(atom, inner):
                number = behind
            if not before and not after and 0 < len(between) < units and which == units - 1 and not of_tokens:
                number = behind  # groups of heads become heads, and the batch of one sample in front of them stays
            if firm and len(shape) == 2 * len(x.dims):
                number = 2 * own + 1
            if len(shape) == 1 and not before and not after and not between:
                dropped.add(atom)
            follows = next((each for _, each in placed[place:] if not isinstance(each, str)), None)
            if isinstance(follows, Rows):  # grouped tokens: the ranks' dimension stands in front of theirs
                number = between[0] if between else behind
            guessed = place > 0 and placed[place - 1][1] in loose  # `last` is then a guess, too
            if (last == behind and not guessed) or isinstance(follows, Rows):
                loose.discard(atom)
            elif not firm and (
                1 in shape[firmly : behind + 1] if before or after else len(between) != units or not between
            ):
                loose.add(atom)
        if number < 0 or number >= len(shape):
            raise NotKnown(f"{x}: reshape to {tuple(shape)} leaves no dimension for the pieces over {atom}")
        found[number].append(atom)
        last, firmly = number, firmly if atom in loose else number
    return replace(x, dims=tuple(map(tidy, found)), loose=frozenset(loose), dropped=frozenset(dropped))


def with_dims(x: Spread, dims: tuple[Dim, ...]) -> Spread:
    """Replace the dimensions of a spread by `dims` if each rank then holds the same elements as before, and return the
    spread. Pieces that move to another dimension become loose (their dimension counts as unknown).
    """
    own, other = ([(atom, number) for number, dim in enumerate(each) for atom in dim] for each in (x.dims, dims))
    if [atom for atom, _ in own] != [atom for atom, _ in other] or x.shape != tuple(map(extent, dims)):
        return x
    moved = {atom for (atom, before), (_, now) in zip(own, other, strict=True) if before != now}
    return replace(x, dims=dims, loose=x.loose | {atom for atom in moved if isinstance(atom, str)})


def reduce_sum(x: Spread, axes: Iterable[int] | None, keep: bool) -> Spread:
    """Return the spread (the distribution over ranks) of the sum of a value over its dimensions `axes` (None: all)."""
    require_home(x)
    if over := ", ".join(sorted(x.greatest)):
        raise refusal((x,), f"the maximum of only a rank's own piece over {over} is added up")
    gone = set(range(len(x.dims))) if axes is None else {axis % len(x.dims) for axis in axes}

    def reduced(given: Spread) -> Spread:
        cuts = frozenset(atom for number in gone for atom in given.dims[number] if isinstance(atom, str))
        left = ((number, dim) for number, dim in enumerate(given.dims) if keep or number not in gone)
        dims = tuple(() if number in gone else dim for number, dim in left)
        return Spread(dims, x.partial | cuts, x.powers, x.shifted, x.loose - cuts)

    found = {reduced(given).partial for given in placements(x)}
    unsure = frozenset().union(*found) - frozenset.intersection(*found)  # these axes may be summed over, or not
    return replace(reduced(x), loose=reduced(x).loose | unsure)


def reduce_mean(x: Spread, axes: Iterable[int] | None, keep: bool) -> Spread:
    """Return how the mean of a value over some dimensions is distributed over the ranks (its spread); if one of these
    dimensions is cut over ranks, each rank divides by too few elements.
    """
    found = reduce_sum(x, axes, keep)
    return scaled(found, found.partial - x.partial, 1)


def reduce_largest(x: Spread, axes: Iterable[int] | None, keep: bool) -> Spread:
    """Return how the maximum of a value over some dimensions is distributed over the ranks (its spread); if one of
    these dimensions is cut over ranks, each rank finds the maximum of only its own piece.
    """
    by_element(x)
    found = reduce_sum(x, axes, keep)
    return replace(found, partial=frozenset(), greatest=found.partial)


def transpose(x: Spread, order: Sequence[int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after its dimensions were put in another order."""
    require_home(x)
    return replace(x, dims=tuple(x.dims[axis] for axis in order))


def expand(x: Spread, axis: int) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after a dimension of one element was inserted."""
    axis %= len(x.dims) + 1
    require_home(x)
    return replace(x, dims=(*x.dims[:axis], (), *x.dims[axis:]))


def tile(x: Spread, counts: Sequence[int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after each rank has repeated its part along some
    dimensions. A repeated dimension must not be cut over ranks.
    """
    require_home(x)
    dims = ((),) * (len(counts) - len(x.dims)) + x.dims
    for dim, count in zip(dims, counts, strict=True):
        if count > 1 and any(not isinstance(atom, int) for atom in dim):
            raise refusal((x,), "a cut dimension is repeated on each rank")
    return replace(x, dims=tuple(tidy((count, *dim)) for dim, count in zip(dims, counts, strict=True)))


def broadcast(x: Spread, shape: Sequence[int]) -> Spread:
    """Return a value's spread over ranks after each rank has broadcast its part to `shape` (-1: unchanged)."""
    dims = ((),) * (len(shape) - len(x.dims)) + x.dims
    counts = [1 if size in (-1, extent(dim)) else size for dim, size in zip(dims, shape, strict=True)]
    return tile(x, counts)


def split(x: Spread, axis: int, sizes: Sequence[int]) -> list[Spread]:
    """Return the spread of each result of splitting a value along a dimension that is not cut over ranks."""
    require_home(x)
    axis %= len(x.dims)
    if any(not isinstance(atom, int) for atom in x.dims[axis]):
        raise refusal((x,), f"dimension {axis} is split on each rank, although it is cut over the ranks")
    return [replace(x, dims=(*x.dims[:axis], tidy((size,)), *x.dims[axis + 1 :])) for size in sizes]


def rejoin(x: Spread, axis: int, parts: int, to: int) -> Spread:
    """Return the spread of a value (its distribution over the ranks) after each rank has split dimension `axis` into
    equal parts and has concatenated these parts along dimension `to`.

    MindSpore moves pieces in this way: after a gather to the dimension to which they belong, and before a scatter to
    the first dimension.
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
    blocks = [_at_home(block, to) for block in blocks]
    home = list(dims[to])
    for block in blocks:
        home.insert(block.at, block)
    lie: list[Atom] = [atom for atom in home if not isinstance(atom, str)]
    if math.prod(block.count for block in blocks) != parts:
        raise NotKnown(f"{x}: dimension {axis} is split into {parts} parts, which are not the gathered pieces")
    if any(block.home != to for block in blocks):
        raise NotKnown(
            f"{x}: gathered pieces are joined along dimension {to}, which does not seem to be their dimension"
        )
    if lie[: len(blocks)] != blocks:
        raise refusal((x,), "gathered pieces are joined in an order that differs from the order of the ranks")
    dims[axis] = tuple(rest)
    dims[to] = tidy(atom.count if isinstance(atom, Block) else atom for atom in home)
    return replace(x, dims=tuple(dims))


def _at_home(block: Block, to: int) -> Block:
    """Return gathered pieces as of another dimension, if they may belong to it."""
    at = dict(((block.home, block.at), *block.others)).get(to)
    return block if at is None else Block(to, block.count, at)


def concat(given: Sequence[Spread], axis: int) -> Spread:
    """Return how the concatenation of values along a dimension is distributed over the ranks (its spread). The
    dimension of the concatenation must not be cut over ranks.
    """
    require_home(*given)
    both = frozenset[str]().union(*(x.partial for x in given))
    equal = [all(dict(x.powers).get(axis) == -1 for axis in both - x.partial) for x in given]
    given = [as_partial(x, both) if parts else x for x, parts in zip(given, equal, strict=True)]
    first = next((x for x in given if x.holes), given[0])
    axis %= len(first.dims)
    given = [alike(x, replace(first, dims=(*first.dims[:axis], x.dims[axis], *first.dims[axis + 1 :]))) for x in given]
    if not all(isinstance(x, Zeros) for x in given):  # zeros beside a value are a value
        given = [as_tensor(x) for x in given]
    first = given[0]
    plain_too = all(
        (x.partial, x.powers) == (first.partial, first.powers) and not x.shifted | x.greatest for x in given
    )
    if (
        any(isinstance(atom, str) for atom in first.dims[axis])
        and all(x.dims == first.dims for x in given)
        and plain_too
    ):
        stacked = tidy((len(given), *first.dims[axis]))  # each rank stacks its own pieces
        return replace(first, dims=(*first.dims[:axis], stacked, *first.dims[axis + 1 :]))
    total = 0
    for x in given:
        if (x.partial, x.powers) != (first.partial, first.powers):
            raise refusal((first, x), "values with different types are joined")
        if any(not isinstance(atom, int) for atom in x.dims[axis]):
            raise refusal((x,), f"dimension {axis} is joined on each rank, although it is cut over the ranks")
        total += extent(x.dims[axis])
        apart = [replace(v, dims=(*v.dims[:axis], (), *v.dims[axis + 1 :])) for v in (first, x)]
        first = replace(first, dims=joined(*apart).dims, loose=first.loose | x.loose)
    return replace(first, dims=(*first.dims[:axis], tidy((total,)), *first.dims[axis + 1 :]))


def all_reduce(x: Spread, axes: Iterable[str]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after a sum over the ranks along some axes. If a
    reshape to a vector has removed a dimension of one element that was cut over ranks, the ranks' pieces are added as
    partial sums. For example, this happens to the gradient of a bias if each rank has one sample.
    """
    for axis in axes:
        x = added_up(x, x.dropped & {axis})
        if axis in x.holes:
            raise refusal((x,), f"a sum over {axis} adds different pieces", {axis})
        if axis in x.greatest | x.shifted:
            raise refusal((x,), f"a sum over {axis} adds values that are not partial sums")
        x = replace(x, partial=x.partial - {axis}) if axis in x.partial else scaled(x, (axis,), 1)
    return x


def added_up(x: Spread, axes: frozenset[str]) -> Spread:
    """Return how a vector is distributed over the ranks if the pieces of its dimension along some mesh axes are treated
    as partial sums.
    """
    if not axes:
        return x
    rest = tuple(atom for atom in x.dims[0] if atom not in axes)
    return replace(x, dims=(rest,), partial=x.partial | axes, loose=x.loose - axes, dropped=x.dropped - axes)


def all_largest(x: Spread, axes: Iterable[str]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after an AllReduce along some axes that takes the
    maximum.
    """
    for axis in axes:
        if axis in x.holes | x.partial | x.shifted or x.powers:
            raise refusal((x,), f"the maximum over {axis} is computed from a value that is not plain")
    return replace(x, greatest=x.greatest - frozenset(axes))


def all_gather(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after an AllGather, which concatenates the pieces
    of all ranks along dimension 0.

    Args:
        axes: the axes of the group; the last one is the axis along which neighbouring ranks of the group lie.
    """
    inner: Block | None = None  # the pieces that are gathered already
    for axis in reversed(axes):
        if axis not in x.holes:
            how = "partial over it" if axis in x.partial else "the same on its ranks"
            raise refusal((x,), f"pieces over {axis} are gathered, but the value is {how}")
        dims = list(x.dims)
        home = next(number for number, dim in enumerate(dims) if axis in dim)
        at = dims[home].index(axis)
        if any(not isinstance(atom, str) for atom in dims[home][:at]):
            raise refusal((x,), f"pieces over {axis} are gathered in an order that differs from the order of the ranks")
        rest = tuple(atom for atom in dims[home] if atom != axis)
        if home == 0:
            dims[0] = tidy((*rest[:at], sizes[axis], *rest[at:]))
        else:
            dims[home] = rest
            block = Block(home, sizes[axis], at)
            if inner and (inner.home, inner.at) == (home, at + 1):  # one block, which may be divided in another way
                block, dims[0] = replace(block, count=block.count * inner.count), dims[0][1:]
            dims[0], inner = (block, *dims[0]), block
        x = replace(x, dims=tuple(dims), dropped=x.dropped - {axis})
    return x


def all_gather_loose(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread:
    """Return the result of `all_gather`; if it is uncertain to which dimension a gathered piece belongs, the result
    lists all possible dimensions.
    """
    first, *others = wherever_all(lambda given: all_gather(given, axes, sizes), x)
    lead = [atom for atom in first.dims[0] if isinstance(atom, Block)]
    same = [each for each in others if _without_blocks(each) == _without_blocks(first)]
    if lead and same:
        told = [[atom for atom in each.dims[0] if isinstance(atom, Block)] for each in same]
        told = [each for each in told if [b.count for b in each] == [b.count for b in lead]]
        blocks = [
            replace(block, others=tuple(dict.fromkeys((each[n].home, each[n].at) for each in told)))
            for n, block in enumerate(lead)
        ]
        first = replace(first, dims=((*blocks, *first.dims[0][len(lead) :]), *first.dims[1:]))
    return first


def _without_blocks(x: Spread) -> tuple[Dim, ...]:
    return tuple(tuple(atom for atom in dim if not isinstance(atom, Block)) for dim in x.dims)


def reduce_scatter(x: Spread, axes: Sequence[str], sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after a ReduceScatter, which sums over the ranks
    and leaves each rank its own piece of dimension 0.

    Args:
        axes: the axes of the group, as in `all_gather`.
    """
    x = all_reduce(x, axes)
    for axis in axes:
        inner = any(isinstance(atom, Block) for atom in x.dims[0][:1])
        x = replace(x, dims=cut(x, 0, axis, sizes[axis]))
        if inner:  # such a redistribution may end with a Reshape that MindSpore leaves out
            x = replace(x, loose=x.loose | _next_to_units(x))
    return x


def _next_to_units(x: Spread) -> frozenset[str]:
    """Return the axes that cut neighbouring dimensions of one element on a rank: a Reshape may move them."""
    pairs = [pair for pair in pairwise(x.dims) if extent(pair[0]) == extent(pair[1]) == 1]
    return frozenset(atom for pair in pairs for dim in pair for atom in dim if isinstance(atom, str))


def cut(x: Spread, number: int, axis: str, count: int) -> tuple[Dim, ...]:
    """Return the dimensions of a value after each rank along a mesh axis has kept only its own piece of dimension
    `number`. If dimension `number` begins with gathered pieces of another dimension, this function cuts the other
    dimension instead.
    """
    dims = list(x.dims)
    if not dims[number] or not isinstance(lead := dims[number][0], Block):
        dims[number] = _cut(x, dims[number], axis, count)
        return tuple(dims)
    if lead.count % count:
        raise NotKnown(f"{x}: {lead.count} parts in front of dimension {number} are scattered over {count} ranks")
    left = (Block(lead.home, lead.count // count, lead.at + 1),) if lead.count > count else ()
    home = dims[lead.home]
    dims[number] = (*left, *dims[number][1:])
    dims[lead.home] = (*home[: lead.at], axis, *home[lead.at :])
    return tuple(dims)


def _cut(x: Spread, dim: Dim, axis: str, count: int) -> Dim:
    """Return a dimension of which the ranks along an axis keep a piece each."""
    first = next((place for place, atom in enumerate(dim) if not isinstance(atom, str)), len(dim))
    outer = dim[first] if first < len(dim) else 1
    if not isinstance(outer, int) or outer % count:
        raise NotKnown(f"{x}: {'*'.join(map(str, dim)) or 1} elements are cut into {count} pieces across their extents")
    return tidy((*dim[:first], axis, outer // count, *dim[first + 1 :]))


def exchange(x: Spread, axis: str, split: int, join: int, sizes: Mapping[str, int]) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after an AllToAll along a mesh axis. Each rank
    splits dimension `split` into a part for each rank, and joins the received parts along dimension `join`. After the
    AllToAll, dimension `split` is cut along the axis, and the former pieces along the axis are gathered in dimension
    `join`.
    """
    if axis not in x.holes:
        how = "partial over it" if axis in x.partial else "the same on its ranks"
        raise refusal((x,), f"pieces over {axis} are exchanged, but the value is {how}", {axis})
    taken = f"{axis} taken"  # the axis in its new place, until its old pieces are gathered
    x = replace(x, dims=cut(x, split, taken, sizes[axis]))
    home = next(number for number, dim in enumerate(x.dims) if axis in dim)
    at, dims = x.dims[home].index(axis), list(x.dims)
    if any(not isinstance(atom, str) for atom in dims[home][:at]):
        raise refusal((x,), f"pieces over {axis} are exchanged in an order that differs from the order of the ranks")
    left = [atom for dim in dims for atom in dim if isinstance(atom, Block)]
    if left and (home != join or any(block.home != home or block.at > at for block in left)):
        raise NotKnown(f"{x}: pieces are exchanged before other pieces are in their final place")
    if home == join:
        dims[home] = tidy(sizes[axis] if atom == axis else atom for atom in dims[home])
    else:
        dims[home] = tuple(atom for atom in dims[home] if atom != axis)
        dims[join] = (Block(home, sizes[axis], at), *dims[join])
    renamed = tuple(tuple(axis if atom == taken else atom for atom in dim) for dim in dims)
    return replace(x, dims=renamed, loose=x.loose - {axis}, dropped=x.dropped - {axis})
