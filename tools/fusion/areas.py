"""What kernels of one cluster grow from: areas of operators, each with a pattern, and edges between them (area.cc)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from tools.fusion.graph import Operator

_REDUCTIONS = ("ReduceSum",)
_OPAQUE = ("Transpose",)  # no pattern joins it with anything
_BROADCASTS = ("BroadcastTo",)


class Pattern(IntEnum):
    """What an area does to shapes; an area has the highest of its operators'."""

    ELEMENTWISE = 1
    BROADCAST = 2
    REDUCE = 3
    OPAQUE = 4


@dataclass
class Area:
    """Operators that are one kernel so far.

    Args:
        place: of its first operator; its name among the areas.
        operators: places, the dominant one first.
        shape: of the dominant operator's output.
        output: whether something outside the cluster takes from it.
        inputs: areas that it takes from -> whether that edge broadcasts.
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
        """How many numbers the dominant operator gives."""
        return math.prod(self.shape)


class Areas:
    """All areas of a cluster.

    Args:
        body: its operators, in order. outputs: places whose results leave it.
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
        """Whether the two would wait for each other if they were one: a path between them goes through a third."""
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
        """Make `taken`, of which `into` takes, a part of `into`."""
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
    pattern = Pattern.ELEMENTWISE
    if operator.name in _REDUCTIONS:
        pattern = Pattern.REDUCE
    elif operator.name in _OPAQUE:
        pattern = Pattern.OPAQUE
    elif operator.name in _BROADCASTS:
        pattern = Pattern.BROADCAST
    inputs = {
        source: pattern is Pattern.ELEMENTWISE and (body[source].output.shape or (1,)) != shape
        for source in operator.inputs
        if not body[source].virtual
    }
    if pattern is Pattern.ELEMENTWISE and any(taken.shape and taken.shape != shape for taken in operator.takes):
        pattern = Pattern.BROADCAST  # a scalar constant is none
    return Area(place, [place], pattern, shape, output, inputs)
