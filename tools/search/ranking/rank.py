"""This module ranks all legal parallel strategies that fit into memory by predicted step time, and returns the time and
memory of each strategy.

A candidate is ranked with balanced layers (`candidates`) and the closed form of the pipeline. For "planned"
recomputation each stage takes the cheapest mix of two uniform policies that keeps the memory limit: memory is convex in
the mix, so the mix fits if linear interpolation between the two policies fits. Recomputation that differs between
layers reaches this mix if layers may be divided, and comes close to it with whole layers.

Balanced layers take equally long on all stages, but not equally much memory. A candidate may therefore fit only if some
of its layers move to other stages. `Ranking.near` holds such candidates, and the search places their layers, too.

`Chances` finds the candidates that could still be faster than the best placed candidate, and a lower bound for the
whole space. Every candidate has a lower bound that needs no further computation (`Ranking.bounds`). If this bound is
below the best time, the search computes tighter bounds (`tools.layout.place`). A candidate whose bound is above the
best time is proven not to be faster, according to the estimator.

If no strategy is feasible, `explain_infeasible` returns the reason and the nearest request with a feasible strategy: a
smaller margin, no limit, another number of devices, or more memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from tools.estimate.memory.room import known_errors
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.place import screen
from tools.search.candidates import RECOMPUTE, Block, Candidate, Funnel, blocks, configuration
from tools.search.ranking.predict import MemoryTable, TimeTable
from tools.search.request import PLANNED, POLICIES, Request

_A_MESH = 2  # candidates of one tp, pp, cp, ep in a short list


@dataclass(frozen=True)
class Ranked:
    """A `Ranked` is a candidate strategy with the predicted seconds of its step and the peak bytes of its fullest
    stage.
    """

    candidate: Candidate
    seconds: float
    peak: float


@dataclass
class Ranking:
    """A `Ranking` holds all candidate strategies that fit into memory. For each candidate, a `Ranking` holds the
    predicted step time, a lower bound on the step time, and the peak bytes of the fullest stage. The table `places`
    [candidates, 3] holds each candidate's block, row and index in `RECOMPUTE`.
    """

    blocks: list[Block]
    funnel: Funnel
    least: Ranked | None = None  # what needs the least memory, whether it fits or not; None when nothing is legal
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    peaks: np.ndarray = field(default_factory=lambda: np.zeros(0))
    bounds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    places: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), int))
    # the candidates that do not fit with balanced layers, but may fit if layers move; their peaks are those of balanced
    # layers
    near: Ranking | None = None

    def admit(self, fitting: Mapping[Ranked, tuple[float, float]], request: Request) -> None:
        """Move the candidates of `near` for which a layout that fits was found to the other candidates, and no longer
        count these candidates as dropped.

        Args:
            fitting: the seconds of a step and the peak bytes of the layout of each candidate that fits.
        """
        if (near := self.near) is None:
            return
        every = [near.at(index) for index in range(len(near.seconds))]
        fits = np.array([one in fitting for one in every], bool)
        found = np.array([fitting[one] for one in every if one in fitting]).reshape(-1, 2)
        self.seconds, self.peaks = np.append(self.seconds, found[:, 0]), np.append(self.peaks, found[:, 1])
        self.bounds = np.append(self.bounds, near.bounds[fits])
        self.places = np.concatenate([self.places, near.places[fits]])
        self.funnel.drop(_over_memory(request), -len(found))
        columns = {name: getattr(near, name)[~fits] for name in ("seconds", "peaks", "bounds", "places")}
        self.near = replace(near, **columns)

    def at(self, index: int) -> Ranked:
        """Return the candidate strategy number `index` of the ranking, with its time and memory."""
        block, row, recompute = (int(place) for place in self.places[index])
        candidate = self.blocks[block].candidate(row, RECOMPUTE[recompute])
        return Ranked(candidate, float(self.seconds[index]), float(self.peaks[index]))

    def find(self, candidate: Candidate) -> Ranked | None:
        """Return the predicted step time and peak memory of a candidate strategy, also of one in `near`; return None if
        the candidate is not legal or does not fit into memory.
        """
        for number, block in enumerate(self.blocks):
            if (block.pp, block.vpp) == (candidate.pp, candidate.vpp):
                own = np.flatnonzero(self.places[:, 0] == number)
                index = [i for i in map(int, own) if self.at(i).candidate == candidate] if len(own) else []
                if index:
                    return self.at(index[0])
        return self.near.find(candidate) if self.near else None

    def fastest(self) -> Iterator[Ranked]:
        """Yield the candidate strategies, the fastest first; equally fast candidates are sorted by memory."""
        for index in np.lexsort((self.peaks, self.seconds)):
            yield self.at(int(index))

    def short_list(self, count: int) -> list[Ranked]:
        """Return the `count` fastest candidate strategies that differ in their layout.

        Of candidates with the same degrees and micro-batch the list has only the fastest, and of candidates with the
        same tp, pp, cp and ep at most two. Otherwise the variants of one layout with other dispatch modes, sharding and
        recomputation would fill the list. Uniform recomputation is in the list only if limits exclude "planned", which
        is never slower.
        """
        taken: list[Ranked] = []
        layouts: set[tuple[int, ...]] = set()
        of_mesh: dict[tuple[int, ...], int] = {}
        planned = any(PLANNED in block.recompute for block in self.blocks)
        for one in self.fastest():
            c = one.candidate
            mesh = (c.tp, c.pp, c.cp, c.ep)
            if planned and c.recompute != PLANNED:
                continue
            if layout_of(c) in layouts or of_mesh.get(mesh, 0) == _A_MESH:
                continue
            layouts.add(layout_of(c))
            of_mesh[mesh] = of_mesh.get(mesh, 0) + 1
            taken.append(one)
            if len(taken) == count:
                break
        return taken


_TRIED = 2  # candidates whose layers are moved to see whether anything fits
Report = Callable[[int, int, float], None]  # blocks done, of how many, best seconds so far (infinite: none)


def feasible(request: Request, funnel: Funnel | None = None) -> bool:
    """Return whether any legal strategy fits into the memory of the devices, either with layers divided evenly over the
    pipeline stages or after layers were moved from stages without enough memory to stages with free memory; `funnel`
    counts the candidates that are not legal. Layers are moved only in the `_TRIED` candidates whose fullest stage needs
    the least memory.
    """
    memory, room = MemoryTable(request), request.room
    nearly: list[tuple[float, Candidate]] = []  # of each block the one whose heaviest stage holds least
    for block in reversed(blocks(request, funnel or Funnel())):  # many stages fit first
        some = block.select(memory.static(block).mean(axis=1) <= room)
        if not len(some):
            continue
        peaks = memory.peaks(some)
        if fitting(peaks, room, block.recompute).any():
            return True
        near = nearly_fitting(peaks, memory.static(some), room, block.recompute).any(axis=1)
        near &= not request.base.model.alternates
        heaviest = np.where(near, peaks.min(axis=1).max(axis=1), np.inf)
        if near.any():
            nearly.append((float(heaviest.min()), some.candidate(int(heaviest.argmin()), PLANNED)))
    times = TimeModel(request.hardware)
    every = (configuration(request, candidate) for _, candidate in sorted(nearly)[:_TRIED])
    return any(screen(config, times, room, np.inf, request.groups).configuration is not None for config in every)


def _over_memory(request: Request) -> str:
    """Return the rule that drops candidates that do not fit into memory."""
    return f"memory: over {request.room_words} on a stage"


def rank(request: Request, report: Report | None = None) -> Ranking:
    """Return every legal strategy that fits into memory, with the predicted seconds of its step and its peak memory."""
    funnel = Funnel()
    ranking = Ranking(blocks(request, funnel), funnel)
    memory, times = MemoryTable(request), TimeTable(request)
    parts: list[tuple[np.ndarray, ...]] = []
    nearly: list[tuple[np.ndarray, ...]] = []
    best = np.inf
    for number, block in enumerate(ranking.blocks):
        found = memory.peaks(block)
        _keep_least(ranking, block, found)
        fits = fitting(found, request.room, block.recompute)
        funnel.drop(_over_memory(request), int(fits.size - fits.sum()))
        movable = not request.base.model.alternates
        near = nearly_fitting(found, memory.static(block), request.room, block.recompute) & movable
        for some, taken in ((fits, parts), (near, nearly)):
            rows = np.flatnonzero(some.any(axis=1))
            if len(rows):
                own = block.select(rows)
                took, held, least = _timed(own, found[rows], times, request.room)
                row, policy = np.nonzero(some[rows])
                recompute = np.array([RECOMPUTE.index(word) for word in block.recompute])[policy]
                places = np.column_stack([np.full(len(row), number), rows[row], recompute])
                taken.append((took[row, recompute], held[row, recompute], least[row], places))
        best = min(best, float(parts[-1][0].min()) if parts else best)
        if report:
            report(number + 1, len(ranking.blocks), best)
    if parts:
        whole = map(np.concatenate, zip(*parts, strict=True))
        ranking.seconds, ranking.peaks, ranking.bounds, ranking.places = whole
    if nearly:
        seconds, peaks, bounds, places = map(np.concatenate, zip(*nearly, strict=True))
        ranking.near = Ranking(ranking.blocks, funnel, None, seconds, peaks, bounds, places)
    return ranking


def fitting(peaks: np.ndarray, cap: float, recompute: tuple[str, ...]) -> np.ndarray:
    """Return for each candidate and each kind of recomputation whether the candidate fits into memory, as bool
    [candidates, recompute]. The argument `peaks` [candidates, policies, stages] holds the peak bytes for each recompute
    policy.
    """
    uniform = (peaks <= cap).all(axis=2)
    planned = (peaks.min(axis=1) <= cap).all(axis=1)
    return np.column_stack([planned if word == PLANNED else uniform[:, POLICIES.index(word)] for word in recompute])


def nearly_fitting(peaks: np.ndarray, static: np.ndarray, cap: float, recompute: tuple[str, ...]) -> np.ndarray:
    """Return which candidates do not fit with balanced layers, but may fit if layers move from full stages to stages
    with room, as bool [candidates, recompute]. All other candidates that do not fit have no placement that fits,
    because the sum of `static` [candidates, stages] over the stages (weights, gradients and optimizer state) is the
    same wherever the layers are. Only layers with "planned" recomputation are placed. The other arguments are those of
    `fitting`.
    """
    movable = (peaks.min(axis=1) > cap).any(axis=1) & (static.mean(axis=1) <= cap)
    return np.column_stack([movable & np.bool_(word == PLANNED) for word in recompute])


def _keep_least(ranking: Ranking, block: Block, peaks: np.ndarray) -> None:
    """Keep, of the candidates that the limits leave, the one whose heaviest stage holds least."""
    for word in reversed(block.recompute):  # of equals the planned one
        stages = peaks.min(axis=1) if word == PLANNED else peaks[:, POLICIES.index(word)]
        heaviest = stages.max(axis=1)
        row = int(heaviest.argmin())
        if ranking.least is None or heaviest[row] < ranking.least.peak:
            ranking.least = Ranked(block.candidate(row, word), 0.0, float(heaviest[row]))


def _timed(block: Block, peaks: np.ndarray, times: TimeTable, cap: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return [rows, RECOMPUTE] seconds and bytes, [rows] bounds; nobody reads those of what does not fit."""
    stages = times.stages(block)
    mixed, mixed_peaks = mix(peaks, stages.work, cap)
    works = [*stages.work.swapaxes(0, 1), mixed]
    seconds = np.column_stack([times.totals(block, work, stages.sending) for work in works])
    held = np.column_stack([peaks.max(axis=2), mixed_peaks.max(axis=1)])
    return seconds, held, times.least(block, works[POLICIES.index("none")])


def mix(peaks: np.ndarray, works: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds and bytes, both [candidates, stages], of the fastest mix of two recompute policies with which
    each stage fits within the memory cap. The arguments `peaks` and `works` [candidates, policies, stages] hold the
    bytes and seconds if all layers follow one policy. A stage that fits with no policy gets the policy that needs the
    least memory.
    """
    least = peaks.argmin(axis=1)[:, None]
    best_peak = np.take_along_axis(peaks, least, axis=1)[:, 0]
    best = np.take_along_axis(works, least, axis=1)[:, 0]
    fits = peaks <= cap
    best = np.where(fits.any(axis=1), np.inf, best)
    for low in range(len(POLICIES)):
        for high in range(len(POLICIES)):
            # share of the layers that take the policy `high`, which by itself would not fit (or is `low` itself)
            gap = np.where(peaks[:, high] > peaks[:, low], peaks[:, high] - peaks[:, low], np.inf)
            share = np.where(low == high, 0.0, (cap - peaks[:, low]) / gap)
            taken = works[:, low] + share * (works[:, high] - works[:, low])
            able = fits[:, low] & (~fits[:, high] | np.bool_(low == high)) & (taken < best)
            best = np.where(able, taken, best)
            best_peak = np.where(able, cap if low != high else peaks[:, low], best_peak)
    return best, best_peak


class Chances:
    """A `Chances` holds lower bounds on the step times of the candidate strategies whose layers may still be placed,
    and the step time of the best layout so far.
    """

    def __init__(self, ranking: Ranking, best: float):
        self.best = self.at_first = best
        self.open: list[Ranked] = []
        self._known: dict[Candidate, float] = {}
        for some in (ranking, ranking.near) if ranking.near else (ranking,):
            planned = some.places[:, 2] == RECOMPUTE.index(PLANNED)
            under = np.flatnonzero(planned & (some.bounds < best))
            under = under[np.lexsort((some.seconds[under], some.bounds[under]))]
            own = [some.at(int(index)) for index in under]
            self.open += own
            self._known |= {one.candidate: float(some.bounds[index]) for one, index in zip(own, under, strict=True)}

    def learn(self, candidate: Candidate, bound: float) -> None:
        """Raise the lower bound on a candidate's step time to `bound`. The new bound is a tighter bound, or the step
        time of a layout that is proven to be the candidate's best.
        """
        self._known[candidate] = max(bound, self.bound(candidate))

    def bound(self, candidate: Candidate) -> float:
        """Return the lower bound in seconds on the step time of a candidate strategy; return 0 if none is known."""
        return self._known.get(candidate, 0.0)

    @property
    def least(self) -> float:
        """Return a lower bound in seconds on the step time of all strategies. If no candidate can be faster than the
        best layout, the bound is the step time of this layout.
        """
        return min([self.best, *(self.bound(one.candidate) for one in self.open)])

    @property
    def left(self) -> list[Ranked]:
        """Return the candidates that could still be faster than the best layout according to their lower bounds, the
        smallest bound first. Candidates whose layers were already placed on stages stay among them, because another
        placement of these layers could be faster.
        """
        some = [one for one in self.open if self.bound(one.candidate) < self.best]
        return sorted(some, key=lambda one: (self.bound(one.candidate), one.seconds))


def layout_of(candidate: Candidate) -> tuple[int, ...]:
    """Return the values of a candidate strategy by which layouts differ: tp, pp, cp, ep, vpp and the micro-batch size.
    Candidates that differ only in dispatch mode or sharding have the same layout.
    """
    return (candidate.tp, candidate.pp, candidate.cp, candidate.ep, candidate.vpp, candidate.mbs)


_MULTIPLES = (2, 3, 4, 6, 8, 16, 32)
_NEAR = 256  # numbers of devices tried in each direction,
_UNFIT = 16  # of them some strategy is legal, but none fits
_MANY, _CANDIDATES = 10_000, 1_000_000_000  # for more devices, of so many strategies, which takes some seconds


def explain_infeasible(request: Request, ranking: Ranking) -> list[str]:
    """Return lines that say why no strategy is feasible, and the smallest changes that would make a strategy
    feasible.
    """
    if ranking.least is None:
        return [_nothing_legal(ranking), *_without_limits(request), *_other_devices(request)]
    least = ranking.least
    short = [
        f"nothing fits: the least memory of any strategy with balanced layers is {least.peak / GIB:.1f} GiB per "
        f"device, it may be {request.room_words}; the limit is {request.cap_source}",
        more_memory(request, least),
        *_less_margin(request, least),
    ]
    enough = least.peak <= (1 - request.margin) * (request.hardware.hbm_bytes - request.reserve)
    near = [] if enough else _other_devices(request)
    return [*short, *_without_limits(request), *(near or _more_devices(request))]


def more_memory(request: Request, least: Ranked) -> str:
    """Return in words the smallest value of --memory with which a strategy with balanced layers fits. If a device of
    the cluster has less memory than this value, say instead that no value is enough.
    """
    gib = -(-(least.peak / (1 - request.margin) + request.reserve) * 10 // GIB) / 10
    device = request.hardware.hbm_bytes / GIB
    if gib > device:
        words = f"no --memory is enough for balanced layers: a device has {device:.1f} GiB"
        return f"{words}; the least is {least.candidate.words}"
    return f"nearest: --memory {gib:.1f} (GiB), with {least.candidate.words}"


def _less_margin(request: Request, least: Ranked) -> list[str]:
    """Return the margin with which the strategy that needs least would be taken, and how likely it then fits."""
    if least.peak > request.cap:
        return []
    margin = math.floor(1000 * (1 - least.peak / request.cap)) / 1000
    odds = known_errors().fits(least.peak, request.cap)
    return [f"nearest: --memory-margin {margin:g}; {odds} published runs would fit then, had they so little left"]


def _nothing_legal(ranking: Ranking) -> str:
    limits = {reason: count for reason, count in ranking.funnel.dropped.items() if reason.startswith("--limit")}
    if limits:
        words = "; ".join(f"{reason} drops {count:,}" for reason, count in limits.items())
        return f"no strategy is left: {words} that are legal"
    dropped = sorted(ranking.funnel.dropped.items(), key=lambda item: -item[1])
    most = "; ".join(f"{reason} ({count:,})" for reason, count in dropped[:4])
    return f"none of {ranking.funnel.total:,} strategies is legal; most break: {most}"


def _without_limits(request: Request) -> list[str]:
    """Return the limits without which, one by one or all, something fits."""
    lines = []
    for limit in request.limits:
        others = tuple(other for other in request.limits if other is not limit)
        if feasible(replace(request, limits=others)):
            lines.append(f"without --limit {limit.text!r} there are strategies that fit")
    if not lines and len(request.limits) > 1 and feasible(replace(request, limits=())):
        lines.append("without all of the limits there are strategies that fit")
    return lines


def _other_devices(request: Request) -> list[str]:
    """Return the nearest numbers of devices, below and above, on which some strategy fits."""
    lines = []
    for step, word in ((-1, "fewer"), (1, "more")):
        seen = legal = 0  # candidates of all numbers; numbers on which some strategy is legal, but none fits
        for number in range(request.devices + step, max(0, request.devices + step * (_NEAR + 1)), step):
            funnel = Funnel()
            if feasible(replace(request, devices=number), funnel):
                lines.append(f"nearest with {word}: --devices {number}")
                break
            seen, legal = seen + funnel.total, legal + (funnel.left > 0)
            if legal > _UNFIT or (seen > _CANDIDATES and request.devices > _MANY):
                break
    return lines


def _more_devices(request: Request) -> list[str]:
    """Return the least multiple of the devices on which something fits."""
    for times in _MULTIPLES:
        if feasible(replace(request, devices=times * request.devices)):
            return [f"--devices {times * request.devices} is the least multiple tried on which a strategy fits"]
    return [f"no strategy was found that fits on up to {_MULTIPLES[-1]} times the devices either"]
