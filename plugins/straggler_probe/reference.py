"""This module computes `plan.slow_ranks` in the most direct and slow way: it takes one rank, one probe and one possible
beginning of a slowdown at a time, without arrays.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from statistics import NormalDist, median

from plugins.straggler_probe import plan
from plugins.straggler_probe.plan import LEVELS
from plugins.straggler_probe.record import Record


def slow_ranks(records: Sequence[Record], groups: Mapping[int, Hashable]) -> set[tuple[int, str, str]]:
    """Return (rank, host, kind) of each rank that is slower than its peers, as `plan.slow_ranks` names them."""
    who = {(record.rank, record.host, groups[record.rank], record.device, record.work) for record in records}
    probes = max(plan.LEAST, len({record.step for record in records}))
    enough = len(plan.KINDS) * len(who) * probes / plan.ALARM
    found: set[tuple[int, str, str]] = set()
    for kind in plan.KINDS:
        for rank, host, *same in who:
            peers = {one[:2] for one in who if [*one[2:]] == same}
            counted = {key for key in peers if kind != "host" or any(one.cpu for one in records if _of(one) == key)}
            series = {key: _series(kind, records, key) for key in counted}
            named = _slow(kind, series, (rank, host), same[1], enough)
            if named:
                found.add((rank, host, kind))
    return found


def _of(record: Record) -> tuple[int, str]:
    return record.rank, record.host


def _series(kind: str, records: Sequence[Record], key: tuple[int, str]) -> dict[int, float | None]:
    out: dict[int, float | None] = {}
    for one in records:
        if _of(one) == key:
            out[one.step] = {
                "device": math.log(one.probe),
                "data": None if one.data is None else one.data / one.seconds,
                "host": max(0.0, one.waited - one.stopped) / max(one.seconds, one.cpu + one.waited),
                "limit": min(1.0, one.stopped / one.seconds),
            }[kind]
    return out


def _slow(kind, series, key, device, enough) -> bool:
    series = {one: values for one, values in series.items() if None not in values.values()}
    if key not in series or len({rank for rank, _ in series}) < 2:
        return False
    steps = sorted({step for values in series.values() for step in values})
    excess = {}
    for one, values in series.items():
        excess[one] = [
            values[step] - median(others)
            if step in values and (others := [series[o][step] for o in series if o != one and step in series[o]])
            else None
            for step in steps
        ]
    spread = _noise(excess.values())
    own, error = excess[key], 0.0
    if len(series) >= plan.ENOUGH:
        first = {
            one: median([x for x in values if x is not None][: plan.FIRST] or [0.0]) for one, values in excess.items()
        }
        most = plan.WITHIN * 1.4826 * median(abs(value) for value in first.values())
        own = [x if x is None else x - min(max(first[key], -most), most) for x in own]
        unlucky = NormalDist().inv_cdf(1 - 1 / len(series))
        error = unlucky * 1.2533 * spread / math.sqrt(min(plan.FIRST, len(steps)))
    floor = (plan.FLOORS_ON_CPU if device == "CPU" else plan.FLOORS)[kind]
    floor = math.log(1 + floor) if kind == "device" else floor
    return any(_evidence(own[: k + 1], spread, error, floor) >= enough for k in range(len(own)))


def _noise(excess) -> float:
    present = ([value for value in values if value is not None] for values in excess)
    changes = [abs(after - before) for values in present for before, after in pairwise(values)]
    return 1.4826 * median(changes) / math.sqrt(2) if changes else 0.0


def _evidence(values, spread, error, floor) -> float:
    """Return the mean over the levels of the sum over beginnings of the product of all ratios since then."""
    total = 0.0
    for level in LEVELS:
        limit = max(level.limit * spread + error, floor)
        for begin in range(len(values)):
            product = 1.0
            for value in values[begin:]:
                if value is not None:
                    above = value > limit
                    product *= level.slow / level.usual if above else (1 - level.slow) / (1 - level.usual)
            total += product
    return total / len(LEVELS)
