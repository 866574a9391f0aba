"""Why a request has no answer, and the nearest one that has: a smaller margin, no limit, other devices, more memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from tools.estimate.memory.error import known_errors
from tools.hardware.units import GIB
from tools.search.ranking.rank import Ranked, Ranking, feasible
from tools.search.space.candidates import blocks
from tools.search.space.funnel import Funnel
from tools.search.space.request import Request

_MULTIPLES = (2, 3, 4, 6, 8, 16, 32)
_NEAR = 256  # numbers of devices tried in each direction,
_MANY, _CANDIDATES = 10_000, 1_000_000_000  # for more devices, of so many strategies, which takes some seconds


def explain(request: Request, ranking: Ranking) -> list[str]:
    """What is missing, and the nearest feasible changes, one a line."""
    if ranking.least is None:
        return [_nothing_legal(ranking), *_without_limits(request), *_other_devices(request)]
    least = ranking.least
    short = [
        f"nothing fits: the least memory of any strategy is {least.peak / GIB:.1f} GiB per device, it may be "
        f"{request.room_words}; the limit is {request.cap_source}",
        more_memory(request, least),
        *_less_margin(request, least),
    ]
    return [*short, *_without_limits(request), *_more_devices(request)]


def more_memory(request: Request, least: Ranked) -> str:
    """The memory that would be enough, where a device has it."""
    gib = -(-least.peak / (1 - request.margin) * 10 // GIB) / 10
    device = request.hardware.hbm_bytes / GIB
    if gib > device:
        return f"no --memory is enough: a device has {device:.1f} GiB; the least is {least.candidate.words}"
    return f"nearest: --memory {gib:.1f} (GiB), with {least.candidate.words}"


def _less_margin(request: Request, least: Ranked) -> list[str]:
    """The margin with which the strategy that needs least would be taken, and how likely it then fits."""
    if least.peak > request.cap:
        return []
    margin = math.floor(1000 * (1 - least.peak / request.cap)) / 1000
    odds = known_errors().fits(least.peak, request.cap)
    return [f"nearest: --memory-margin {margin:g}; {odds} published runs would fit then, had they so little left"]


def _nothing_legal(ranking: Ranking) -> str:
    limits = {reason: ranking.funnel.dropped[reason] for reason in ranking.funnel.excluded_by_limits()}
    if limits:
        words = "; ".join(f"{reason} drops {count:,}" for reason, count in limits.items())
        return f"no strategy is left: {words} that are legal"
    dropped = sorted(ranking.funnel.dropped.items(), key=lambda item: -item[1])
    most = "; ".join(f"{reason} ({count:,})" for reason, count in dropped[:4])
    return f"none of {ranking.funnel.total:,} strategies is legal; most break: {most}"


def _without_limits(request: Request) -> list[str]:
    """Limits that alone stand in the way."""
    lines = []
    for limit in request.limits:
        others = tuple(other for other in request.limits if other is not limit)
        if feasible(replace(request, limits=others)):
            lines.append(f"without --limit {limit.text!r} there are strategies that fit")
    if not lines and len(request.limits) > 1 and feasible(replace(request, limits=())):
        lines.append("without all of the limits there are strategies that fit")
    return lines


def _other_devices(request: Request) -> list[str]:
    """The nearest numbers of devices, below and above, that some legal strategy uses."""
    lines = []
    for step, word in ((-1, "fewer"), (1, "more")):
        tried = range(request.devices + step, max(0, request.devices + step * (_NEAR + 1)), step)
        devices = _first_legal(request, tried)
        if devices is not None:
            lines.append(f"nearest with {word}: --devices {devices}")
    return lines


def _first_legal(request: Request, numbers: Iterable[int]) -> int | None:
    """The first number of devices that some legal strategy uses, as long as the spaces looked at are not too large."""
    seen = 0
    for number in numbers:
        funnel = Funnel()
        if blocks(replace(request, devices=number), funnel):
            return number
        seen += funnel.total
        if seen > _CANDIDATES and request.devices > _MANY:
            return None
    return None


def _more_devices(request: Request) -> list[str]:
    """The least multiple of the devices on which something fits."""
    for times in _MULTIPLES:
        if feasible(replace(request, devices=times * request.devices)):
            return [f"--devices {times * request.devices} is the least multiple tried on which a strategy fits"]
    return [f"nothing fits on up to {_MULTIPLES[-1]} times the devices either"]
