"""This module finds contradictions in a graph that remain for every possible placement of its loose pieces (pieces of
cut tensors whose dimension is not known yet).

If an operator does not allow the spreads of its arguments, but these have loose pieces (pieces of cut tensors whose
dimension is not known yet), another place of these pieces might make the arguments right. `remains` then types the
graph again for each place of the first loose piece on the way to the operator. The graph is certainly wrong if every
place leads to a contradiction.

A graph does not show a sum over a dimension that has one element on each rank: if this dimension is cut, the ranks'
pieces may therefore be parts of a sum, and no place in a dimension describes parts of a sum. For this reason the module
tries places only for the result of a Reshape, and only if the argument of the Reshape has no loose pieces over the mesh
axes of the contradiction, and none of these axes cuts a dimension of one element of the argument. If a place is a
dimension of one element, an operator contradicts it only if the operator also refuses the pieces as parts of a sum
(`Placed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, islice

from tools.prove.call import Call, Part, Value
from tools.prove.frame import Failure, Frame
from tools.prove.places import TRIED as TRIED_PLACES
from tools.prove.spread import Certain, Contradiction, Dim, NotKnown, Spread, extent, placements
from tools.prove.typing import Typing

DEPTH = 4  # loose pieces, one after another, whose places are tried
PLACES = 12  # places of one piece; a value with more stays unknown
TRIED = 64  # typings of a graph, each with other places
# graph and operator -> the dimensions of its result, and the axes whose pieces these dimensions place
Settled = Mapping[tuple[str, int], tuple[tuple[Dim, ...], frozenset[str]]]


class Placed(Typing):
    """A `Placed` is a `Typing` of a graph in which some values with loose pieces have given dimensions (`settled`)."""

    def applied(self, call: Call) -> Value:
        """Return the result of an operator. Raise NotKnown if the operator refuses arguments whose pieces cut a
        dimension of one element, but would accept these pieces as parts of a sum over this dimension.
        """
        try:
            return super().applied(call)
        except Contradiction as error:
            if not isinstance(error, Certain) and any(map(self._takes, self._as_sums(call))):
                raise NotKnown(f"{error}; but they may be parts of a sum that the graph does not show") from None
            raise

    def _takes(self, call: Call) -> bool:
        """Return whether an operator does not refuse its arguments."""
        try:
            super().applied(call)
        except Contradiction:
            return False
        except (NotKnown, KeyError, IndexError, TypeError, ValueError, AttributeError):
            return True
        return True

    def _as_sums(self, call: Call) -> Iterator[Call]:
        """Yield the operator with one or more of its arguments as sums over their cut dimensions of one element."""
        axes = frozenset(
            atom for dims, _ in self.settled.values() for dim in dims for atom in dim if isinstance(atom, str)
        )
        places = [place for place, x in enumerate(call.values) if _summed(x, axes) != x]
        for chosen in chain.from_iterable(combinations(places, count) for count in range(1, len(places) + 1)):
            values = [_summed(x, axes) if place in chosen else x for place, x in enumerate(call.values)]
            yield replace(call, values=values)


def _alone(dims: Sequence[Dim]) -> frozenset[str]:
    """Return the axes that cut dimensions of which a rank has one element."""
    return frozenset(atom for dim in dims if extent(dim) == 1 for atom in dim if isinstance(atom, str))


def _summed(x: Value, axes: frozenset[str]) -> Value:
    """Return a value, or the members of a tuple, as sums over their dimensions of one element that are cut over
    `axes`.
    """
    if isinstance(x, list):
        return [_summed(each, axes) for each in x]
    if isinstance(x, Part):
        return replace(x, whole=_summed(x.whole, axes))
    if not isinstance(x, Spread) or not (over := axes & _alone(x.dims)):
        return x
    dims = tuple(tuple(atom for atom in dim if atom not in over) for dim in x.dims)
    return replace(x, dims=dims, partial=x.partial | over, loose=x.loose - over)


def again(typing: Typing, settled: Settled) -> Placed:
    """Return a new typing of the same graph with the given dimensions of some values with loose pieces."""
    given = typing.graph, typing.mesh, typing.parameter, typing.ranks_of, typing.peers, typing.received
    return Placed(*given, settled)


def remains(typing: Typing, evaluate: Callable[[Typing], object]) -> Failure | None:
    """Return a failure that is a contradiction for every possible placement of the graph's loose pieces (pieces whose
    dimension is not known yet). Return None if a placement may be right, or if there are too many placements to try.

    Args:
        evaluate: a function that asks a typing for all values that count.
    """
    left = iter(range(TRIED))

    def tried_with(settled: Settled) -> Typing | None:
        tried = again(typing, settled) if next(left, None) is not None else None
        if tried:
            evaluate(tried)
        return tried

    return next((each for each in _unsure(typing) if _everywhere(typing, each, {}, tried_with, DEPTH)), None)


def _unsure(typing: Typing) -> list[Failure]:
    """Return the failures that depend on the places of loose pieces; of many, the first."""
    causes = {(each.graph, each.number): each for each in typing.failures.values() if each.loose}
    return [*islice(causes.values(), 2)]


def _everywhere(
    typing: Typing, failure: Failure, settled: Settled, tried_with: Callable[[Settled], Typing | None], depth: int
) -> bool:
    """Return whether every place of the first loose piece on the way to a failure leads to a contradiction."""
    operator, ways = first_loose(typing, failure)
    if not depth or not 1 < len(ways) <= PLACES or operator in settled:
        return False
    for dims in ways:
        own = {**settled, operator: (dims, failure.loose)}
        tried = tried_with(own)
        if tried and any(each.contradicts for each in tried.failures.values()):
            continue
        if not tried or not any(_everywhere(tried, each, own, tried_with, depth - 1) for each in _unsure(tried)):
            return False
    return True


def first_loose(typing: Typing, failure: Failure) -> tuple[tuple[str, int], Sequence[tuple[Dim, ...]]]:
    """Return the first operator before a failure whose result has loose pieces (pieces whose dimension is not known
    yet) over the axes of the failure. Return also the dimensions of the operator's result for each possible placement
    of these loose pieces. Return no dimensions unless the operator is a Reshape whose argument is known, has no loose
    pieces over these axes, and is the same in all calls of the graph. Return no dimensions if one of these axes cuts a
    dimension of one element.
    """
    frame = next(
        each for each in typing.frames if each.name == failure.graph and each.values.get(failure.number) == failure
    )
    todo, seen = [(frame, failure.number)], set[tuple[int, int]]()
    while todo:
        own, number = todo.pop()
        seen.add((id(own), number))
        node = typing.graph.graphs[own.name][number]
        before = [(each, place) for each, place in typing.before(own, node)
                  if _is_loose(each.values.get(place), failure.loose)]  # fmt: skip
        todo += [(each, place) for each, place in before if (id(each), place) not in seen]
        if before:
            continue
        value, calls = own.values[number], [_sources(typing, each, number) for each in typing.frames
                                            if each.name == own.name and number in each.values]  # fmt: skip
        if node.op != "Reshape" or not isinstance(value, Spread) or any(call != calls[0] for call in calls):
            break
        unplaced = value.loose & failure.loose
        if len(calls[0]) != 1 or not isinstance(x := calls[0][0], Spread) or _alone(x.dims) & unplaced:
            break
        return (own.name, number), _ways(value, unplaced)
    return ("", 0), []


def _ways(value: Spread, axes: frozenset[str]) -> Sequence[tuple[Dim, ...]]:
    """Return the dimensions of a value for each possible placement of its loose pieces over `axes`; other loose pieces
    lie where the former have this place. Return none if there are too many placements.
    """
    found: dict[tuple[int, ...], tuple[Dim, ...]] = {}
    every = [*islice(placements(value), TRIED_PLACES + 1)]
    for one in every:
        found.setdefault(tuple(n for n, dim in enumerate(one.dims) for atom in dim if atom in axes), one.dims)
    return [*found.values()] if len(every) <= TRIED_PLACES else []


def _sources(typing: Typing, frame: Frame, number: int) -> list[Value]:
    """Return the values that an operator takes in a call of its graph."""
    given = typing.before(frame, typing.graph.graphs[frame.name][number])
    return [each.values.get(place) for each, place in given]


def _is_loose(value: object, axes: frozenset[str]) -> bool:
    members = [one.whole if isinstance(one, Part) else one for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(one, Spread) and one.loose & axes for one in members)
