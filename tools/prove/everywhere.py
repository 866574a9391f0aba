"""This module finds contradictions in a graph that remain for every possible placement of its loose pieces (pieces of
cut tensors whose dimension is not known yet).

If an operator does not allow the spreads of its arguments, but these have loose pieces (pieces of cut tensors whose
dimension is not known yet), another place of these pieces might make the arguments right. `remains` then types the
graph again for each place of the first loose piece on the way to the operator. The graph is certainly wrong if every
place leads to a contradiction. Only the results of Reshapes of values without loose pieces are tried: every other
operator may have made a partial sum of a loose piece, which no place in a dimension describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from tools.prove.call import Part
from tools.prove.spread import Dim, Spread, placements
from tools.prove.typing import Failure, Typing

DEPTH = 4  # loose pieces, one after another, whose places are tried
PLACES = 4  # places of one piece; a value with more stays unknown
TRIED = 64  # typings of a graph, each with other places
Settled = Mapping[tuple[str, int], tuple[Dim, ...]]  # graph and operator -> the dimensions of its result


def remains(typing: Typing, evaluate: Callable[[Typing], object]) -> Failure | None:
    """Return a failure that is a contradiction for every possible placement of the graph's loose pieces (pieces whose
    dimension is not known yet). Return None if a placement may be right, or if there are too many placements to try.

    Args:
        evaluate: a function that asks a typing for all values that count.
    """
    left = iter(range(TRIED))

    def again(settled: Settled) -> Typing | None:
        tried = typing.again(settled) if next(left, None) is not None else None
        if tried:
            evaluate(tried)
        return tried

    return next((each for each in _unsure(typing) if _everywhere(typing, each, {}, again, DEPTH)), None)


def _unsure(typing: Typing) -> list[Failure]:
    """Return the failures that depend on the places of loose pieces; of many, the first."""
    causes = {(each.graph, each.number): each for each in typing.failures.values() if each.loose}
    return [*islice(causes.values(), 2)]


def _everywhere(
    typing: Typing, failure: Failure, settled: Settled, again: Callable[[Settled], Typing | None], depth: int
) -> bool:
    """Return whether every place of the first loose piece on the way to a failure leads to a contradiction."""
    operator, ways = first_loose(typing, failure)
    if not depth or not 1 < len(ways) <= PLACES or operator in settled:
        return False
    for dims in ways:
        own = {**settled, operator: dims}
        tried = again(own)
        if tried and any(each.contradicts for each in tried.failures.values()):
            continue
        if not tried or not any(_everywhere(tried, each, own, again, depth - 1) for each in _unsure(tried)):
            return False
    return True


def first_loose(typing: Typing, failure: Failure) -> tuple[tuple[str, int], Sequence[tuple[Dim, ...]]]:
    """Return the first operator before a failure whose result has loose pieces (pieces whose dimension is not known
    yet) over the axes of the failure. Return also the dimensions of the operator's result for each possible placement
    of its loose pieces. The dimensions are empty unless the operator is a Reshape of a known value without loose
    pieces.
    """
    frame = next(
        each for each in typing.frames if each.name == failure.graph and each.values.get(failure.number) == failure
    )
    todo, seen = [(frame, failure.number)], set[tuple[int, int]]()
    while todo:
        own, number = todo.pop()
        seen.add((id(own), number))
        node = typing.graph.graphs[own.name][number]
        given = typing.before(own, node)
        before = [(each, place) for each, place in given if _is_loose(each.values.get(place), failure.loose)]
        todo += [(each, place) for each, place in before if (id(each), place) not in seen]
        if before:
            continue
        value, sources = own.values[number], [each.values.get(place) for each, place in given]
        known = sources and all(isinstance(source, Spread) and not source.loose for source in sources)
        if node.op != "Reshape" or not isinstance(value, Spread) or not known:
            break
        ways = dict.fromkeys(one.dims for one in islice(placements(value), PLACES + 1))
        return (own.name, number), [*ways]
    return ("", 0), []


def _is_loose(value: object, axes: frozenset[str]) -> bool:
    members = [one.whole if isinstance(one, Part) else one for one in (value if isinstance(value, list) else [value])]
    return any(isinstance(one, Spread) and one.loose & axes for one in members)
