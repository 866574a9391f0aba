"""A cluster cut into kernels (split_model.cc with the patterns of split_model_factory's models).

Each pattern goes over all areas until none matches any more, then the next one. Forward, an area takes in what it takes
from; backward, what takes from it. With `depth` the two have only each other (a chain); with width others hold on to
them, too.

MindSpore has both kinds of all three patterns. For reductions depth is left out, for it changes nothing: what only one
reduction takes, and it nothing else, no other can take, and the reduction's own turn takes it first; until then it is
on the same paths as the two are as one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from tools.fusion.areas import Area, Areas, Pattern
from tools.fusion.graph import Operator
from tools.fusion.rules import DVM, Rules

Match = Callable[[Areas, Area], list[Area]]


def kernels(body: Sequence[Operator], outputs: Collection[int], rules: Rules = DVM) -> list[list[int]]:
    """The places of the operators of each kernel of one cluster.

    Args:
        body: the cluster's operators, in order; virtual ones belong to no kernel.
        outputs: places whose results leave the cluster.
    """
    areas = Areas(body, outputs)
    for match, forward in _patterns(rules):
        for place in sorted(areas.alive):
            while place in areas.alive and _run(areas, areas.alive[place], match, forward, rules.largest):
                pass
    return sorted(sorted(area.operators) for area in areas.alive.values())


def _patterns(rules: Rules) -> Iterator[tuple[Match, bool]]:
    """(what an area is joined with, whether forward), in order."""
    if rules.chains_of_a_size:
        yield partial(_same_size, depth=True), True
    yield partial(_same_size, depth=False), True
    yield partial(_into_reduction, rules=rules), True
    if rules.chains_of_users:
        yield partial(_into_users, depth=True, limit=rules.broadcast_depth), False
    yield partial(_into_users, depth=False, limit=rules.broadcast_depth), False


def _run(areas: Areas, area: Area, match: Match, forward: bool, largest: int) -> bool:
    """Fuse what matches `area`; whether anything did."""
    found = match(areas, area)
    size = len(area.operators)
    for number, other in enumerate(found):
        size += len(other.operators)
        if size > largest:
            found = found[:number]
            break
    for other in found:
        if forward:
            areas.fuse(area, other)
        else:
            areas.fuse(other, area)
            area = other
    return bool(found)


def _same_size(areas: Areas, area: Area, depth: bool) -> list[Area]:
    """Elementwise neighbours that give as many numbers, by edges that do not broadcast."""
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
    """What a reduction takes from, if it is small."""
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
    """All users of a small area, if each can take it in; otherwise none, for then it must be written anyway."""
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
