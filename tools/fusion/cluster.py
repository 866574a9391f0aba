"""Convex clusters in MindSpore's greedy order (GraphKernelCluster of graph_kernel_cluster.cc).

From the last operator back to the first, each that is in no cluster yet gathers those before it that DVM takes, as far
as they hang together. What a path through another operator comes back to is dropped again, with all that it stands on:
fused, the two would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from tools.fusion.graph import Operator
from tools.fusion.rules import DVM, Rules


class Merged:
    """Operators merged into groups; each group is known by its first member's place."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        self._head = list(range(len(operators)))
        self._inputs = [set(operator.inputs) for operator in operators]
        self.size = [1] * len(operators)
        self.last = list(range(len(operators)))

    def find(self, place: int) -> int:
        """The group of an operator."""
        while self._head[place] != place:
            self._head[place] = self._head[self._head[place]]
            place = self._head[place]
        return place

    def inputs(self, group: int) -> list[int]:
        """Groups that a group takes from, the later ones first."""
        self._inputs[group] = {self.find(place) for place in self._inputs[group]} - {group}
        return sorted(self._inputs[group], reverse=True)

    def merge(self, groups: Iterable[int]) -> None:
        """Make one group of several."""
        first, *others = sorted(groups)
        for group in others:
            self._head[group] = first
            self._inputs[first] |= self._inputs[group]
            self.size[first] += self.size[group]
            self.last[first] = max(self.last[first], self.last[group])

    def walk(self, start: int, follow: Callable[[int], bool]) -> None:
        """Depth first against the edges, through groups that `follow` says True of; each is seen once."""
        seen: set[int] = set()
        stack = [self.find(start)]
        while stack:
            group = stack.pop()
            if group not in seen:
                seen.add(group)
                if follow(group):
                    stack += reversed(self.inputs(group))


def clusters(operators: Sequence[Operator], taken: Sequence[bool], rules: Rules = DVM) -> list[list[int]]:
    """The places of the operators of each cluster, in order; one alone is a cluster unless it was opened before.

    Args:
        taken: whether DVM takes each operator (`support.refusal`).
    """
    merged = Merged(operators)
    for base in reversed(range(len(operators))):
        if merged.size[merged.find(base)] > 1:
            continue
        chosen = _gathered(merged, operators, taken, base)
        if rules.convex:
            _drop_circles(merged, chosen)
        _drop_wild_items(merged, operators, chosen)
        if len(chosen) > 1:
            merged.merge(chosen)
    groups: dict[int, list[int]] = {}
    for place in range(len(operators)):
        groups.setdefault(merged.find(place), []).append(place)
    return [group for group in groups.values() if _is_cluster(group, operators, taken)]


def _gathered(merged: Merged, operators: Sequence[Operator], taken: Sequence[bool], base: int) -> list[int]:
    """Groups that hang together with `base`, the farthest first; a group of several ends the search there."""
    found: list[int] = []

    def follow(group: int) -> bool:
        if not taken[group] and operators[group].name != "TupleGetItem":
            return False
        found.append(group)
        return merged.size[group] == 1

    merged.walk(base, follow)
    return found[::-1]


def _drop_circles(merged: Merged, chosen: list[int]) -> None:
    """Drop from `chosen` what paths through other groups come back to, and what that stands on."""
    left = set(chosen)
    free: set[int] = set()  # groups outside from which no path comes back
    for group in chosen:
        if group not in left:
            continue
        first = min(left)
        met: list[int] = []
        for start in merged.inputs(group):
            if start not in left and start not in free:
                _look(merged, start, left, free, first, met)
        for start in met:
            merged.walk(start, partial(_drop, left))
    chosen[:] = [group for group in chosen if group in left]


def _drop(left: set[int], group: int) -> bool:
    """Take a group out of `left`; whether it was there."""
    there = group in left
    left.discard(group)
    return there


def _look(merged: Merged, start: int, left: set[int], free: set[int], first: int, met: list[int]) -> None:
    """Add to `met` what of `left` can be reached from `start`; what reaches nothing is `free` from now on."""
    outside: list[int] = []
    before = len(met)

    def follow(group: int) -> bool:
        if group in free or merged.last[group] < first:
            return False
        if group in left:
            met.append(group)
            return False
        outside.append(group)
        return True

    merged.walk(start, follow)
    if len(met) == before:
        free.update(outside)


def _drop_wild_items(merged: Merged, operators: Sequence[Operator], chosen: list[int]) -> None:
    """A member of a tuple stays with the operator that gives the tuple, or is left out."""
    left = set(chosen)
    for group in sorted(chosen):
        if operators[group].name == "TupleGetItem" and merged.size[group] == 1 and not left & set(merged.inputs(group)):
            left.discard(group)
    chosen[:] = [group for group in chosen if group in left]


def _is_cluster(group: list[int], operators: Sequence[Operator], taken: Sequence[bool]) -> bool:
    """One Assign alone is left as it is, and what was opened before is a kernel already."""
    computing = [place for place in group if not operators[place].virtual]
    if len(computing) == 1:
        alone = operators[computing[0]]
        return taken[computing[0]] and not alone.opened and alone.name != "Assign"
    return len(computing) > 1
