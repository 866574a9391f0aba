"""This module is step 2 of operator fusion: it cuts a cluster of operators into kernels as MindSpore does
(split_model.cc, split_model_factory).

A kernel begins as an area, a group of operators with a shape pattern, and grows by merging neighbouring areas
(area.cc). Merge rules are applied one after another; each rule is applied to all areas until it merges no more of them.
In the forward direction an area merges an area whose result it uses; in the backward direction it merges an area that
uses its result. In the variant `depth` of a rule the two areas are connected only to each other (a chain); in the
variant `width` other areas are connected to them, too.

MindSpore has both variants for all three patterns. This module leaves out the variant `depth` for reductions, because
it has no effect: if two areas are connected only to each other, no other area can merge with them before the other
variant merges them, and until then they lie on the same paths as the merged area.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import accumulate

from tools.fusion.cluster import DVM, Operator, Rules


class Pattern(IntEnum):
    """A `Pattern` is the class of an operator in operator fusion (elementwise, broadcast, reduce or opaque). A group of
    operators has the highest class of its operators.
    """

    ELEMENTWISE = 1
    BROADCAST = 2
    REDUCE = 3
    OPAQUE = 4


# no pattern joins what is opaque with anything
_PATTERNS = {"ReduceSum": Pattern.REDUCE, "Transpose": Pattern.OPAQUE, "BroadcastTo": Pattern.BROADCAST}


@dataclass
class Area:
    """An `Area` holds operators that have been joined so far and that are to become one kernel.

    Args:
        place: the position of the area's first operator, which identifies the area.
        operators: the positions of the area's operators, the dominant operator first.
        shape: the shape of the dominant operator's output.
        output: whether an operator outside the cluster uses one of the area's results.
        inputs: for each area whose result this area uses, whether this area broadcasts the result.
        users: the areas that use the result of this area.
    """

    place: int
    operators: list[int]
    pattern: Pattern
    shape: tuple[int, ...]
    output: bool
    inputs: dict[int, bool] = field(default_factory=dict)
    users: set[int] = field(default_factory=set)

    @property
    def numbers(self) -> int:
        """Return the number of elements in the output of the area's dominant operator."""
        return math.prod(self.shape)


class Areas:
    """An `Areas` holds all areas (future kernels) of a cluster while they are merged.

    Args:
        body: the operators of the cluster, in order.
        outputs: the positions of the operators whose results are used outside the cluster.
    """

    def __init__(self, body: Sequence[Operator], outputs: Collection[int]) -> None:
        self.alive: dict[int, Area] = {}
        for place, operator in enumerate(body):
            if not operator.virtual:
                self.alive[place] = _area(place, operator, body, place in outputs)
        for area in self.alive.values():
            for place in area.inputs:
                self.alive[place].users.add(area.place)

    def circle(self, one: Area, other: Area) -> bool:
        """Return whether merging two areas would make a cycle in the graph, because a path between the two areas goes
        through a third area.
        """
        before, behind = (one, other) if self._reaches(one.place, other.place) else (other, one)
        return any(place != before.place and self._reaches(before.place, place) for place in behind.inputs)

    def _reaches(self, start: int, end: int) -> bool:
        seen: set[int] = set()
        stack = [end]
        while stack:
            place = stack.pop()
            if place == start:
                return True
            if place not in seen:
                seen.add(place)
                stack += self.alive[place].inputs
        return False

    def fuse(self, into: Area, taken: Area) -> None:
        """Merge the group of operators (area) `taken` into the area `into`, whose input is the result of `taken`."""
        broadcasts = into.inputs.pop(taken.place)
        dominant = taken if into.pattern < taken.pattern else into
        into.operators = dominant.operators + (into if dominant is taken else taken).operators
        into.shape, into.output = dominant.shape, into.output or taken.output
        into.pattern = max(into.pattern, taken.pattern)
        if broadcasts and into.pattern is Pattern.ELEMENTWISE:
            into.pattern = Pattern.BROADCAST
        for place, relation in taken.inputs.items():
            into.inputs[place] = into.inputs.get(place, False) or relation
            self.alive[place].users.discard(taken.place)
            self.alive[place].users.add(into.place)
        for place in taken.users - {into.place}:
            user = self.alive[place]
            relation = user.inputs.pop(taken.place)
            user.inputs[into.place] = user.inputs.get(into.place, False) or relation
            into.users.add(place)
        del self.alive[taken.place]


def _area(place: int, operator: Operator, body: Sequence[Operator], output: bool) -> Area:
    shape = operator.output.shape or (1,)
    pattern = _PATTERNS.get(operator.name, Pattern.ELEMENTWISE)
    inputs = {
        source: pattern is Pattern.ELEMENTWISE and (body[source].output.shape or (1,)) != shape
        for source in operator.inputs
        if not body[source].virtual
    }
    if pattern is Pattern.ELEMENTWISE and any(taken.shape and taken.shape != shape for taken in operator.takes):
        pattern = Pattern.BROADCAST  # a scalar constant is none
    return Area(place, [place], pattern, shape, output, inputs)


Match = Callable[[Areas, Area], list[Area]]


def kernels(body: Sequence[Operator], outputs: Collection[int], rules: Rules = DVM) -> list[list[int]]:
    """Return for each kernel of one cluster the indices of its operators.

    Args:
        body: the operators of the cluster, in order; virtual operators belong to no kernel.
        outputs: the positions of the operators whose results are used outside the cluster.
    """
    areas = Areas(body, outputs)
    for match, forward in _patterns(rules):
        for place in sorted(areas.alive):
            while place in areas.alive and _run(areas, areas.alive[place], match, forward, rules.largest):
                pass
    return sorted(sorted(area.operators) for area in areas.alive.values())


def _patterns(rules: Rules) -> Iterator[tuple[Match, bool]]:
    """Yield in order the pairs (function that finds areas to join with an area, whether these areas are merged into
    that area).
    """
    if rules.chains_of_a_size:
        yield partial(_same_size, depth=True), True
    yield partial(_same_size, depth=False), True
    yield partial(_into_reduction, rules=rules), True
    if rules.chains_of_users:
        yield partial(_into_users, depth=True, limit=rules.broadcast_depth), False
    yield partial(_into_users, depth=False, limit=rules.broadcast_depth), False


def _run(areas: Areas, area: Area, match: Match, forward: bool, largest: int) -> bool:
    """Join `area` with the areas that `match` finds, as long as the joined area has at most `largest` operators; return
    whether any was joined.
    """
    found = match(areas, area)
    sizes = list(accumulate(len(each.operators) for each in (area, *found)))[1:]
    found = [other for other, size in zip(found, sizes, strict=True) if size <= largest]
    for other in found:
        if forward:
            areas.fuse(area, other)
        else:
            areas.fuse(other, area)
            area = other
    return bool(found)


def _same_size(areas: Areas, area: Area, depth: bool) -> list[Area]:
    """Return the elementwise areas whose results an area reads without broadcasting, if these results have as many
    elements as its own.
    """
    if area.pattern > Pattern.BROADCAST or (depth and len(area.inputs) != 1):
        return []
    found = []
    for place, broadcasts in sorted(area.inputs.items()):
        other = areas.alive[place]
        if broadcasts or other.pattern > Pattern.BROADCAST or (depth and len(other.users) != 1):
            continue
        if other.numbers == area.numbers and (depth or not areas.circle(other, area)):
            found.append(other)
    return found


def _into_reduction(areas: Areas, area: Area, rules: Rules) -> list[Area]:
    """Return the small areas whose results a reduction reads, which can be joined with the reduction."""
    if area.pattern is not Pattern.REDUCE:
        return []
    highest = Pattern.BROADCAST if rules.broadcast_into_reduce else Pattern.ELEMENTWISE
    found = []
    for place, broadcasts in sorted(area.inputs.items()):
        other = areas.alive[place]
        alone = len(other.users) == 1
        if other.pattern > highest or len(other.operators) > rules.reduce_depth:
            continue
        if broadcasts and not (rules.broadcast_into_reduce and alone and not other.output):
            continue
        if not areas.circle(other, area):
            found.append(other)
    return found


def _into_users(areas: Areas, area: Area, depth: bool, limit: int) -> list[Area]:
    """Return all users of a small area if the area can be joined with each of them; otherwise return none, because the
    result must then be written to memory anyway.
    """
    users = [areas.alive[place] for place in sorted(area.users)]
    if area.pattern > Pattern.BROADCAST or area.output or len(area.operators) > limit or (depth and len(users) > 1):
        return []
    for user in users:
        if (depth and len(user.inputs) != 1) or user.pattern > Pattern.REDUCE:
            return []
        if not depth and (user.numbers != users[0].numbers or areas.circle(area, user)):
            return []
        if user.pattern is Pattern.REDUCE and (area.pattern is not Pattern.ELEMENTWISE or user.inputs[area.place]):
            return []
    return users
