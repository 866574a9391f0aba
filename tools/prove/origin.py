"""This module names the operators of a compiled graph that explain a violation: the operators from which the arguments
of a refused operator come, the operators at which a value became a partial sum or a multiple of the intended value, and
the operators at which the ranks took pieces of a value that was not yet summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from tools.dryrun.graph_text import Node
from tools.dryrun.scale import OVER_DEVICES
from tools.prove.call import Order, Part, Value
from tools.prove.frame import Failure, Frame, Sum
from tools.prove.mesh import COLLECTIVES
from tools.prove.spread import Contradiction, NotKnown, Spread
from tools.prove.typing import Typing

NAMED = 3  # operators that a text names
# operators that only hand on, move or reshape what they are given
_MOVES = frozenset(
    ("Cast", "Reshape", "Squeeze", "ExpandDims", "Transpose", "TransposeExtView", "Depend", "Load", "TensorMove")
) | {"MakeTuple", "TupleGetItem", "Send", "Muls", "Divs", "Neg", "MoveTo", "TensorToTuple"}
_SUMS = frozenset(("Add", "AddExt", "AddN", "Sub", "SubExt"))
_LIMITS = frozenset(("Minimum", "Maximum", "ReLU", "ClipByValue"))  # of indices that lie outside a table
Place = tuple[Frame, int]  # a call of a graph, and an operator of the graph


def only_moves(node: Node) -> bool:
    """Return whether an operator only moves the elements of its input, or only limits indices to a range."""
    of_indices = node.op in _LIMITS and bool(node.outputs) and node.outputs[0].dtype.startswith(("Int", "UInt"))
    return node.op in _MOVES or of_indices


def explained(typing: Typing, failure: Failure) -> str:
    """Return a text that says from which operators the arguments of a refused operator come, with a semicolon in front.
    Return "" if the operator has no computed arguments.
    """
    frame = next(
        (each for each in typing.frames if each.name == failure.graph and each.values.get(failure.number) == failure),
        None,
    )
    if frame is None:
        return ""
    node, given = typing.graph.graphs[frame.name][failure.number], _members(typing, (frame, failure.number))
    right = _rightly_partial(typing, node, given)
    found = [text for place in given if (text := _argument(typing, place, right))]
    if len(given) == 1:
        found += _whole(typing, given[0], node)
    return "; ".join(["", *dict.fromkeys(found)])


def since(typing: Typing, weight: str, number: int, found: Spread) -> str:
    """Return a text that names the operators at which the gradient of a weight became what it should not be: a partial
    sum, or the gradient times a number of ranks or divided by it. The text begins with a semicolon; it is "" if the
    gradient is none of these.

    Args:
        number: the operator of the root graph whose result is the gradient; -1 if the gradient is what micro-batches
            add up.
        found: how the gradient is distributed over the ranks.
    """
    if not found.partial and not found.powers:
        return ""
    places = [(typing.root, number)] if number >= 0 else typing.adders.get(weight, [])
    if how := _wrong(typing, places, found):
        return f"; it is {how}{'' if found.partial else _undivided(typing, places)}"
    axes = {axis for axis, power in found.powers if power < 0}

    def small(x: Spread) -> set[str]:
        return {axis for axis, power in x.powers if power < 0 and axis in axes}

    cut = _begins(typing, places, lambda x: bool(small(x) & (x.holes | x.partial)), lambda x: bool(small(x)))
    return f"; it was not yet summed when its ranks took parts of it at {cut}" if cut else ""


def _undivided(typing: Typing, places: Sequence[Place]) -> str:
    """Return a text that names the first operators of the backward pass, if nothing on the way from the loss to a
    gradient divides by the number of devices. Return "" if another stage sends the gradient, or a called backward pass
    returns it, because that stage or pass may divide it.
    """
    every = [(place, typing.graph.graphs[place[0].name][place[1]]) for place in _way(typing, places)]
    received = any(node.op == "Receive" and typing.direction_of(node)[0] == "backward" for _, node in every)
    returned = any("◂" in name for _, node in every for name in node.calls)
    if received or returned or any(node.op == "RealDiv" and OVER_DEVICES in node.scope for _, node in every):
        return ""
    back = [place for place, node in every if "Grad" in node.scope and not only_moves(node)]
    first = _named(typing, _in_order(typing, back)[:NAMED])
    behind = f", which begins with {first}," if first else ""
    return f"; nothing in the backward pass{behind} divides the loss's gradient by the number of devices"


def _in_order(typing: Typing, places: Iterable[Place]) -> list[Place]:
    """Return operators in the order of the graph, the calling graph first."""
    order = {id(frame): number for number, frame in enumerate(typing.frames)}
    return sorted(places, key=lambda place: (order[id(place[0])], place[1]))


def _wrong(typing: Typing, places: Sequence[Place], x: Spread) -> str:
    """Return since which operators a value is a partial sum and since which it is too large; return "" if the value is
    neither.
    """
    large, found = {axis for axis, power in x.powers if power > 0}, []

    def partial(own: Spread) -> bool:
        return bool(own.partial & x.partial)

    if x.partial and (names := _begins(typing, places, partial)):
        parts = _slices(typing, places, partial)
        found.append(f"a partial sum since {names}" + (f", of which a part is taken at {parts}" if parts else ""))
    if large and (names := _begins(typing, places, lambda x: any(p > 0 and axis in large for axis, p in x.powers))):
        found.append(f"too large since {names}")
    return " and ".join(found)


def _members(typing: Typing, place: Place) -> list[Place]:
    """Return the operators whose results an operator takes; in place of a tuple, those of its members."""
    frame, number = place
    found = []
    for own, each in typing.before(frame, typing.graph.graphs[frame.name][number]):
        node = typing.graph.graphs[own.name][each]
        found += typing.before(own, node) if node.op == "MakeTuple" else [(own, each)]
    return found


def _rightly_partial(typing: Typing, node: Node, given: Sequence[Place]) -> frozenset[str]:
    """Return the axes over which the arguments of a refused operator may be partial sums: for a collective those
    outside its group, and for a sum those over which all members are partial.
    """
    if node.op in _SUMS:
        values = [next(_spreads(typing, place), None) for place in given]
        spreads = [x.partial for x in values if isinstance(x, Spread)]
        return frozenset.intersection(*spreads) if spreads else frozenset()
    return frozenset(typing.mesh.sizes) - _group(typing, node) if node.op in COLLECTIVES else frozenset()


def _group(typing: Typing, node: Node) -> frozenset[str]:
    """Return the axes of a collective's group; return none if they are unknown, and for other operators."""
    try:
        return frozenset(typing.axes_of(node, True)) if node.op in COLLECTIVES else frozenset()
    except (NotKnown, Contradiction):
        return frozenset()


def _argument(typing: Typing, place: Place, right: frozenset[str]) -> str:
    """Return from which operator an argument comes, or since which operator it is a partial sum over other axes than
    `right`, or too large; return "" for a parameter and for a value that could not be determined.
    """
    value = next(_spreads(typing, place), None)
    own = replace(value, partial=value.partial - right) if isinstance(value, Spread) else None
    if how := _wrong(typing, [place], own) if own else "":
        return f"an argument is {how}"
    frame, number = _source(typing, place)
    known = isinstance(value, (Spread, Order)) and not only_moves(typing.graph.graphs[frame.name][number])
    return f"an argument comes from {_named(typing, [(frame, number)])}" if known else ""


def _whole(typing: Typing, place: Place, node: Node) -> Iterator[str]:
    """Yield where a value became whole that a collective gathers or exchanges as if it were cut, and the operators
    behind at which all ranks take the same part of it.
    """
    axes = _group(typing, node)

    def whole(x: Spread) -> bool:
        return not axes & (x.holes | x.partial)

    value = next(_spreads(typing, place), None)
    if not axes or node.op == "AllReduce" or not isinstance(value, Spread) or not whole(value):
        return
    told = ", ".join(sorted(axes))
    if since_when := _begins(typing, [place], whole):
        yield f"it is the same on the ranks along {told} since {since_when}"
    if parts := _slices(typing, [place], whole):
        yield f"all ranks along {told} take the same part at {parts}"


def _slices(typing: Typing, places: Sequence[Place], holds: Callable[[Spread], bool]) -> str:
    """Return the names of the operators that take slices on the way to some values, where a property holds."""
    way = _in_order(typing, _way(typing, places, holds))
    return _named(typing, [each for each in way if typing.graph.graphs[each[0].name][each[1]].op == "StridedSlice"])


def _source(typing: Typing, place: Place) -> Place:
    """Return the last operator before a value that does more than move what it is given; for integers of routing, the
    operator that has made these integers.
    """
    seen = set[tuple[int, int]]()
    while (id(place[0]), place[1]) not in seen:
        seen.add((id(place[0]), place[1]))
        frame, number = place
        value, node = frame.values.get(number), typing.graph.graphs[frame.name][number]
        before = typing.before(frame, node)
        if isinstance(value, Order):
            before = [each for each in before if any(one == value for one in _spreads(typing, each))]
        elif not only_moves(node):
            break
        if not before:
            break
        place = before[0]
    return place


def _spreads(typing: Typing, place: Place) -> Iterator[Value]:
    """Yield a value, or the members of a tuple: accumulated gradients as what is added, and parts as the whole."""
    value = place[0].values.get(place[1])
    for each in value if isinstance(value, list) else [value]:
        added = typing.added.get(each.weight) if isinstance(each, Sum) else None
        own = added[0] if added else each
        yield own.whole if isinstance(own, Part) else own


def _before(typing: Typing, place: Place) -> list[Place]:
    """Return the operators before an operator, also those that add to an accumulated gradient."""
    value = place[0].values.get(place[1])
    adders = typing.adders.get(value.weight, []) if isinstance(value, Sum) else []
    return adders or typing.before(place[0], typing.graph.graphs[place[0].name][place[1]])


def _way(typing: Typing, places: Sequence[Place], holds: Callable[[Spread], bool] = lambda _: True) -> Iterator[Place]:
    """Yield the operators on the way to some values, back to those for whose results a property does not hold."""
    todo, seen = [*places], set[tuple[int, int]]()
    while todo:
        place = todo.pop()
        if (id(place[0]), place[1]) in seen:
            continue
        seen.add((id(place[0]), place[1]))
        yield place
        todo += [each for each in _before(typing, place) if _has(typing, each, holds)]


def _has(typing: Typing, place: Place, holds: Callable[[Spread], bool]) -> bool:
    return any(isinstance(each, Spread) and holds(each) for each in _spreads(typing, place))


def _begins(
    typing: Typing,
    places: Sequence[Place],
    holds: Callable[[Spread], bool],
    along: Callable[[Spread], bool] | None = None,
) -> str:
    """Return the names of the operators at which a property of some values began, the first one first: operators whose
    result has the property, and no argument. Values that only a parameter has are left out.

    Args:
        along: a property of all values on the way, if it is another one.
    """
    found = []
    for place in _way(typing, places, along or holds):
        before = _before(typing, place)
        parameter = not before and only_moves(typing.graph.graphs[place[0].name][place[1]])
        if _has(typing, place, holds) and not parameter and not any(_has(typing, each, holds) for each in before):
            found.append(place)
    return _named(typing, _in_order(typing, found))


def _named(typing: Typing, places: Iterable[Place]) -> str:
    """Return the names of operators; of many, the first and how many more there are."""
    names = [*dict.fromkeys(typing.name_of(frame.name, number) for frame, number in places)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
