"""This module describes how a value is distributed over the ranks of a device mesh (its spread), and computes for each
operation how its result is distributed over the ranks. The module does not import MindSpore, and reads no files.

A `Spread` states for one value and for every axis of the mesh whether the ranks along the axis hold the same value
(replicated), pieces of one dimension (cut), or parts whose sum is the value (partial). A `Spread` also has a power for
each axis: the ranks hold the value times the axis' size to this power. MindSpore needs the power, because it starts the
backward pass with 1 / devices on every rank and later sums over all ranks, also if they computed equal values. A
replicated value with the power -1 is a partial sum whose parts are equal.

A dimension is a tuple of atoms, outermost first: an extent on the rank (an integer), the name of an axis whose ranks
hold the pieces at this place, or a `Block`. ``(("tp", 64), (128,))`` is a matrix whose rows are cut over tp, 64 on each
rank. Every function returns the spread of the result. Functions raise `Contradiction` if the ranks' results are neither
pieces nor parts of the result of one device, and `NotKnown` if this module has no rule. A property test splits random
arrays over simulated ranks by these definitions and runs each operation on the parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any

from plugins.errors import TC3Error


class Contradiction(TC3Error):
    """This error means that the ranks together compute another result than one device would compute.

    Args:
        over: the axes along which the results are wrong, if the places of pieces over other axes do not matter.
    """

    def __init__(self, wrong: str, over: Iterable[str] | None = None):
        super().__init__(wrong)
        self.over = None if over is None else frozenset(over)


class Certain(Contradiction):
    """This error means that the compiled graph is wrong for every possible dimension of its loose pieces (pieces of cut
    tensors whose dimension is not known yet).
    """


class NotKnown(TC3Error):
    """This error means that no rule says how the result of an operator is distributed over the ranks."""


class Uncertain(NotKnown):
    """This error means that an operator may be right or wrong, depending on the dimensions of loose pieces in its
    arguments (pieces of cut tensors whose dimension is not known yet).

    Args:
        loose: the axes that cut the arguments into these pieces.
    """

    def __init__(self, wrong: str, loose: frozenset[str]):
        super().__init__(f"{wrong} (the place of the pieces over {', '.join(sorted(loose))} is uncertain)")
        self.loose = loose


@dataclass(frozen=True)
class Block:
    """A `Block` stands for `count` pieces of a cut dimension that an AllGather has put in front of another dimension.

    Args:
        home: the dimension to which these pieces belong.
        at: the number of atoms in front of these pieces in the dimension `home`.
        others: (home, at) of each other place to which these pieces may belong, if their place was loose.
    """

    home: int
    count: int
    at: int
    others: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Rows:
    """A `Rows` stands for rows of tokens whose order is decided by routing and differs from rank to rank.

    Args:
        origin: the atoms of the dimension before the dispatch. These axes come before the rows in the dimension.
        path: the steps of the dispatch that the rows have gone through, in order; see `tools.prove.experts`.
        count: the number of rows on a rank; -1 if the data decide.
    """

    origin: tuple[Any, ...]
    path: tuple[tuple[Any, ...], ...]
    count: int


_TRIED = 200  # places of loose pieces that are tried to find out whether a product is a sum over ranks

Atom = int | str | Block | Rows
Dim = tuple[Atom, ...]
Powers = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Spread:
    """A `Spread` describes how a value is distributed over the ranks of a device mesh: replicated, cut or as partial
    sums along each axis.

    Args:
        dims: the atoms of each dimension, outermost first.
        partial: the axes over which the ranks hold parts that add up to the value.
        powers: (axis, power), sorted, without powers of 0.
        shifted: the axes along which an index counts from the start of the rank's own piece.
        loose: the axes whose piece may lie in a neighbouring dimension of one element instead.
        greatest: the axes over which the value is the maximum of the ranks' values.
        merged: if a reshape has made a matrix of tokens, the two dimensions that became its rows. Values with equal
            elements may differ in this field.
        dropped: the axes that cut a dimension of one element which a reshape to a vector has left out. The pieces on
            these axes are also parts of the sum over it.
        formula: for integers that were computed from ends of documents, the formula (see `tools.prove.documents`).
        undivided: whether this is a received gradient that no router has divided (see `tools.prove.balance`).
    """

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    powers: Powers = ()
    shifted: frozenset[str] = frozenset()
    loose: frozenset[str] = frozenset()
    greatest: frozenset[str] = frozenset()
    merged: tuple[Dim, ...] = field(default=(), compare=False, repr=False)
    dropped: frozenset[str] = field(default=frozenset(), compare=False, repr=False)
    formula: tuple[Any, ...] = field(default=(), compare=False, repr=False)
    undivided: bool = field(default=False, compare=False, repr=False)

    @property
    def holes(self) -> frozenset[str]:
        """Return the axes of the mesh over which a dimension of the value is cut."""
        return frozenset(atom for dim in self.dims for atom in dim if isinstance(atom, str))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part of the value that one rank holds."""
        return tuple(map(extent, self.dims))

    def whole(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole value, given the number of ranks along each axis."""
        return tuple(math.prod(_size(atom, sizes) for atom in dim) for dim in logical(self.dims))

    def __str__(self) -> str:
        """Return the spread as text, for example `[tp*64, 128] partial over dp, x dp^-1`."""
        dims = ", ".join("*".join(map(_told, dim)) or "1" for dim in self.dims)
        partial = f" partial over {', '.join(sorted(self.partial))}" if self.partial else ""
        return f"[{dims}]{partial}" + "".join(f" x {axis}^{power}" for axis, power in self.powers)


def _told(atom: Atom) -> str:
    if isinstance(atom, Block):
        return f"{atom.count} of dimension {atom.home}"
    return f"rows({', '.join(str(step[0]) for step in atom.path)})" if isinstance(atom, Rows) else str(atom)


def extent(dim: Iterable[Atom]) -> int:
    """Return the number of elements that one rank holds along a dimension."""
    return math.prod(_size(atom, {}) for atom in dim)


def _size(atom: Atom, sizes: Mapping[str, int]) -> int:
    if isinstance(atom, (Block, Rows)):
        return atom.count
    return atom if isinstance(atom, int) else sizes.get(atom, 1)


def logical(dims: Sequence[Dim]) -> list[list[Atom]]:
    """Return the dimensions of a tensor after all pieces that an AllGather has put in front of another dimension were
    moved back to their own dimension.
    """
    found: list[list[Atom]] = [[atom for atom in dim if not isinstance(atom, Block)] for dim in dims]
    for block in (atom for dim in dims for atom in dim if isinstance(atom, Block)):
        found[block.home].insert(block.at, block)
    return found


class Zeros(Spread):
    """A `Zeros` describes a tensor that is zero on all ranks, which can be added to any value."""


class Alike(Spread):
    """An `Alike` describes a constant tensor of equal elements, which can be combined with a value cut in any way."""


def plain(shape: Iterable[int]) -> Spread:
    """Return the spread of a value of the given shape that is replicated on all ranks."""
    return Spread(tuple(tidy((size,)) for size in shape))


def tidy(atoms: Iterable[Atom]) -> Dim:
    """Simplify the factors (atoms) of a dimension: remove factors of 1, and multiply neighbouring numbers."""
    found: list[Atom] = []
    for atom in atoms:
        if atom == 1:
            continue
        if isinstance(atom, int) and found and isinstance(found[-1], int):
            found[-1] *= atom
        else:
            found.append(atom)
    return tuple(found)


def times(*parts: tuple[Powers, int]) -> Powers:
    """Multiply powers of axis sizes, and return the exponent of each axis size in the product. Each factor is given as
    (axis sizes with exponents, exponent of the whole factor).
    """
    total: Counter[str] = Counter()
    for powers, sign in parts:
        for axis, power in powers:
            total[axis] += sign * power
    return tuple(sorted((axis, power) for axis, power in total.items() if power))


def scaled(x: Spread, axes: Iterable[str], power: int) -> Spread:
    """Return how a value is distributed over the ranks (its spread) after a multiplication by the number of ranks along
    each of `axes`, to the power of `power`.
    """
    return replace(x, powers=times((x.powers, 1), (tuple((axis, power) for axis in axes), 1)))


def checked(dims: tuple[Dim, ...], *given: Spread) -> tuple[Dim, ...]:
    """Return the dimensions of a value unchanged; raise an error if one axis of the mesh cuts two dimensions."""
    cuts = Counter(atom for dim in dims for atom in dim if isinstance(atom, str))
    if twice := [axis for axis, count in cuts.items() if count > 1]:
        raise refusal(given, f"{twice[0]} would cut two dimensions")
    return dims


def require_home(*given: Spread) -> None:
    """Raise an error for values whose gathered pieces have not yet been moved to the dimension to which they belong.

    Raises:
        NotKnown: the value has such pieces.
    """
    for x in given:
        if any(isinstance(atom, Block) for dim in x.dims for atom in dim):
            raise NotKnown(f"{x}: gathered pieces are used before they are in their final place")


def refusal(given: Sequence[Spread], why: str, over: Iterable[str] | None = None) -> Contradiction:
    """Return a `Contradiction` error whose message says how values are distributed over the ranks, and why an operation
    on these values would be wrong.
    """
    return Contradiction(f"{' with '.join(map(str, given))}: {why}", over)


def placements(x: Spread) -> Iterator[Spread]:
    """Yield every possible spread of a value with loose pieces (pieces whose dimension is not known yet), the given
    spread first. The order of all pieces stays the same, and dimensions of one element are tried before other
    dimensions.
    """
    yield x
    atoms = [(number, atom) for number, dim in enumerate(x.dims) for atom in dim]
    chosen = [place for place, (_, atom) in enumerate(atoms) if atom in x.loose]
    fixed = [place for place in range(len(atoms)) if place not in chosen]
    ranges = []
    for place in chosen:
        before = max((atoms[other][0] for other in fixed if other < place), default=0)
        behind = min((atoms[other][0] for other in fixed if other > place), default=len(x.dims) - 1)
        units = [number for number in range(behind, before - 1, -1) if extent(x.dims[number]) == 1]
        ranges.append([*units, *(number for number in range(behind, before - 1, -1) if number not in units)])
    for numbers in _rising(ranges):
        moved = list(atoms)
        for place, number in zip(chosen, numbers, strict=True):
            moved[place] = number, atoms[place][1]
        if moved != atoms:
            dims = tuple(tuple(atom for own, atom in moved if own == number) for number in range(len(x.dims)))
            yield replace(x, dims=dims)


def _rising(ranges: Sequence[Sequence[int]], least: int = 0) -> Iterator[tuple[int, ...]]:
    """Yield the choices of one number from each range in which no number is smaller than the one before."""
    if not ranges:
        yield ()
        return
    for number in ranges[0]:
        if number >= least:
            yield from ((number, *rest) for rest in _rising(ranges[1:], number))


def own_order(dim: Dim) -> Dim:
    """Return a dimension of tokens that MindFormers has grouped by rank for its router, with the tokens of each rank in
    their original order. Use the result only for sums over the tokens, because their real order differs.
    """
    rows = dim[-1] if dim else None
    if not isinstance(rows, Rows) or rows.path != (("group",),):
        return tidy(dim)
    atoms = [atom for own in rows.origin for atom in own]
    return tidy(atoms) if tuple(atom for atom in atoms if isinstance(atom, str)) == dim[:-1] else dim


def check_rows(one: Dim, other: Dim) -> None:
    """Raise an error if the rows of two values were dispatched to experts in the same steps, but may lie in different
    orders on a rank.

    Raises:
        NotKnown: it is not known whether the orders are the same.
    """
    both = [[atom for atom in dim if isinstance(atom, Rows)] for dim in (one, other)]
    if not all(both) or [atom for atom in one if isinstance(atom, str)] != [a for a in other if isinstance(a, str)]:
        return
    ways = [[(step[0], step[1][0] if step[0] == "exchange" else ()) for step in rows[0].path] for rows in both]
    if ways[0] == ways[1]:
        raise NotKnown("it is unknown whether the rows of two values are in the same order")


def _of_equal_rows(one: Dim, other: Dim) -> bool:
    """Return whether the first dimension is of equal rows, as many as the second has on a rank."""
    equal = len(one) == 1 and isinstance(one[0], Rows) and one[0].path == (("equal",),)
    return equal and extent(one) == extent(other)


def _settled(rule: Callable[[Spread, Spread], Spread], x: Spread, y: Spread, equal: bool = False) -> Spread:
    """Return the result of a rule for the first places of loose pieces for which there is one. If `equal`, the rule
    refuses all places with unequal dimensions, so that these need not be tried.
    """
    first: Contradiction | None = None
    every = [[(each, tuple(map(tidy, each.dims))[::-1]) for each in placements(v)] for v in (x, y)]
    for (one, dims), (two, others) in product(*every):
        if first and equal and any(a != b and a and b for a, b in zip(dims, others, strict=False)):
            continue
        try:
            return rule(one, two)
        except Contradiction as error:
            first = first or error
    assert first
    raise first


def _surely_partial(rule: Callable[[Spread, Spread], Spread], x: Spread, y: Spread) -> frozenset[str]:
    """Return the axes over which the result of a rule is partial for every possible place of loose pieces; return none
    if there are too many places.
    """
    both = list(islice(product(placements(x), placements(y)), _TRIED + 1))
    found = []
    for one, two in both if len(both) <= _TRIED else ():
        try:
            found.append(rule(one, two).partial)
        except Contradiction:
            continue
        except NotKnown:
            return frozenset()
    return frozenset.intersection(*found) if found else frozenset()


def as_tensor(x: Spread) -> Spread:
    """Return the spread of a value without the information that its elements are equal (`Alike`) or `Zeros`."""
    return Spread(**vars(x)) if isinstance(x, (Alike, Zeros)) else x


def alike(x: Spread, other: Spread) -> Spread:
    """Return a constant tensor of equal elements (`Alike`) with its dimensions cut like the dimensions of `other`;
    return any other value unchanged.
    """
    if not isinstance(x, (Alike, Zeros)) or len(x.dims) != len(other.dims):
        return x
    fit = (two if extent(one) == extent(two) else one for one, two in zip(x.dims, other.dims, strict=True))
    return replace(x, dims=tuple(fit))


def joined(x: Spread, y: Spread) -> Spread:
    """Return how the result of an elementwise operation on two values is distributed over the ranks (its spread), with
    broadcasting.
    """
    count = max(len(x.dims), len(y.dims))
    x, y = alike(x, y), alike(y, x)
    if x.dims != y.dims and any(x.dims) and any(y.dims):
        require_home(x, y)
    if either := x.greatest | y.greatest:
        why = f"one of them is the maximum of only a rank's own piece over {', '.join(sorted(either))}"
        raise refusal((x, y), why, either)

    def join(one: Spread, two: Spread) -> Spread:
        found = []
        pairs = zip(*(((),) * (count - len(v.dims)) + tuple(map(tidy, v.dims)) for v in (one, two)), strict=True)
        for number, (first, second) in enumerate(pairs):
            if first != second and _of_equal_rows(first, second):
                first = second
            elif first != second and _of_equal_rows(second, first):
                second = first
            if first != second and () not in (first, second):
                check_rows(first, second)
                raise Contradiction(f"{x} with {y}: dimension {number} is not cut equally")
            found.append(first or second)
        return Spread(checked(tuple(found), one, two))

    has_rows = any(isinstance(atom, Rows) for v in (x, y) for dim in v.dims for atom in dim)
    found = _settled(join, x, y, not has_rows)
    return replace(found, loose=(x.loose | y.loose) & (found.holes | x.partial | y.partial))


def as_partial(x: Spread, axes: frozenset[str]) -> Spread:
    """Return the spread of a replicated value as a partial sum over `axes`. The value must have been divided by the
    number of ranks along `axes`.
    """
    powers = dict(x.powers)
    for axis in sorted(axes - x.partial):
        if axis in x.holes or powers.get(axis) != -1:
            raise refusal(
                (x,), f"the value is added to a partial sum over {axis}, and would count once for each rank", {axis}
            )
        x = scaled(replace(x, partial=x.partial | {axis}), (axis,), 1)
    return x


def add(x: Spread, y: Spread) -> Spread:
    """Return how the elementwise sum or difference of two values is distributed over the ranks (its spread)."""
    if isinstance(x, Zeros) or isinstance(y, Zeros):
        zeros, other = (x, y) if isinstance(x, Zeros) else (y, x)
        more = len(zeros.dims) - len(other.dims)
        return replace(other, dims=(((),) * more + other.dims)) if more > 0 else other
    both = x.partial | y.partial
    one, two = as_partial(x, both), as_partial(y, both)
    if one.powers != two.powers:
        raise refusal((x, y), "the two values are scaled differently")
    found = joined(one, two)
    return replace(found, partial=both, powers=one.powers, shifted=x.shifted | y.shifted)


def check_linear(x: Spread, y: Spread) -> None:
    """Raise an error if the products that the ranks compute do not add up to the product of the whole values."""
    if either := x.greatest | y.greatest:
        why = f"one of them is the maximum of only a rank's own piece over {', '.join(sorted(either))}"
        raise refusal((x, y), why, either)
    if both := x.partial & y.partial:
        raise refusal((x, y), f"both are partial over {', '.join(sorted(both))}")
    if x.partial and y.partial:  # the parts of one may differ along the axes of the other
        raise NotKnown(f"{x} with {y}: both are partial sums, over different axes")
    for one, two in ((x, y), (y, x)):
        if mixed := one.partial & two.holes:
            raise refusal((x, y), f"one value is partial and the other is cut over {', '.join(sorted(mixed))}")


def multiply(x: Spread, y: Spread) -> Spread:
    """Return how the elementwise product of two values is distributed over the ranks (its spread); the product with
    zeros is zeros.
    """
    if isinstance(x, Zeros) or isinstance(y, Zeros):
        return Zeros(joined(Spread(alike(x, y).dims), Spread(alike(y, x).dims)).dims)
    check_linear(x, y)
    both = x.shifted & y.shifted  # what a rank looked up times whether it could: the others add zeros
    partial, powers = x.partial | y.partial | both, times((x.powers, 1), (y.powers, 1))
    return replace(joined(x, y), partial=partial, powers=powers, shifted=(x.shifted | y.shifted) - both)


def divide(x: Spread, y: Spread) -> Spread:
    """Return how the elementwise quotient of two values is distributed over the ranks (its spread)."""
    if y.partial:
        raise refusal((x, y), "the divisor is a partial sum")
    return multiply(x, replace(y, powers=times((y.powers, -1))))


def by_element(*given: Spread) -> Spread:
    """Return how the result of an elementwise function that is not linear is distributed over the ranks (its spread);
    its arguments must be neither partial sums nor scaled.
    """
    for x in given:
        if x.partial or x.powers or x.greatest:
            over = x.partial | x.greatest | dict(x.powers).keys()
            raise refusal((x,), "the operator is not linear, and its argument is not a plain value", over)
    found = Spread(given[0].dims, loose=given[0].loose)
    for x in given[1:]:
        found = joined(found, x)
    return replace(found, shifted=frozenset().union(*(x.shifted for x in given)))


def _held(x: Spread) -> frozenset[str]:
    """Return the axes along which the ranks do not all hold the same, right value."""
    return x.holes | x.partial | x.greatest | x.shifted | frozenset(axis for axis, _ in x.powers)


def matmul(x: Spread, y: Spread, x_turned: bool = False, y_turned: bool = False) -> Spread:
    """Return how a matrix product over the last two dimensions of two values is distributed over the ranks (its
    spread); the other dimensions are the batch.
    """
    require_home(x, y)
    check_linear(x, y)

    if either := x.shifted | y.shifted:
        raise refusal((x, y), f"one value is right only on one rank along {', '.join(sorted(either))}")

    def product_of(one: Spread, two: Spread) -> Spread:
        rows, inner = one.dims[-2:][::-1] if x_turned else one.dims[-2:]
        inner_too, columns = two.dims[-2:][::-1] if y_turned else two.dims[-2:]
        if own_order(inner) != own_order(inner_too):
            check_rows(inner, inner_too)
            raise refusal((one, two), "the summed dimension of the product is not cut equally in both factors")
        over = frozenset(atom for atom in inner if isinstance(atom, str))
        batch = joined(Spread(one.dims[:-2]), Spread(two.dims[:-2])).dims
        return Spread(checked((*batch, rows, columns), one, two), partial=over)

    found = _settled(product_of, x, y)
    sure = _surely_partial(product_of, x, y) if found.partial & (x.loose | y.loose) else frozenset()
    sure |= (y.holes - y.loose - _held(x)) | (x.holes - x.loose - _held(y))  # the pieces of one factor, in its place
    partial, powers = x.partial | y.partial | found.partial, times((x.powers, 1), (y.powers, 1))
    return replace(found, partial=partial, powers=powers, loose=(x.loose | y.loose) & (found.holes | partial) - sure)
