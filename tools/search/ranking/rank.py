"""Rank the whole space by predicted step time: every legal candidate that fits, with its memory and time.

A candidate is ranked with balanced layers (`space.layers`) and the closed form of the pipeline. For "planned"
recomputation each stage takes the cheapest mix of two uniform policies that keeps the cap: memory is convex in the
mix, so the mix fits if the line between both does. It is what per-layer recomputation can reach with layers that may
be cut at will; whole layers come close.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tools.search.ranking.memory import MemoryTable
from tools.search.ranking.time import TimeTable
from tools.search.space.candidates import RECOMPUTE, Block, Candidate, blocks
from tools.search.space.funnel import Funnel
from tools.search.space.limits import PLANNED, POLICIES
from tools.search.space.request import Request

_A_MESH = 2  # candidates of one tp, pp, cp, ep in a short list


@dataclass(frozen=True)
class Ranked:
    """A candidate with its predicted step seconds and bytes of its heaviest stage."""

    candidate: Candidate
    seconds: float
    peak: float


@dataclass
class Ranking:
    """All candidates that fit.

    Args:
        seconds, peaks: [candidates] step time and bytes of the heaviest stage.
        bounds: [candidates] seconds that no layout is under (`TimeTable.least`).
        places: [candidates, 3] block, row and index in `RECOMPUTE`.
        least: the candidate that needs the least memory, whether it fits or not; None when nothing is legal.
    """

    blocks: list[Block]
    funnel: Funnel
    least: Ranked | None = None
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    peaks: np.ndarray = field(default_factory=lambda: np.zeros(0))
    bounds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    places: np.ndarray = field(default_factory=lambda: np.zeros((0, 3), int))

    def at(self, index: int) -> Ranked:
        """One candidate."""
        block, row, recompute = (int(place) for place in self.places[index])
        candidate = self.blocks[block].candidate(row, RECOMPUTE[recompute])
        return Ranked(candidate, float(self.seconds[index]), float(self.peaks[index]))

    def fastest(self) -> Iterator[Ranked]:
        """Candidates by time; of equals the one that needs less memory, then the first of the space."""
        for index in np.lexsort((self.peaks, self.seconds)):
            yield self.at(int(index))

    def short_list(self, count: int) -> list[Ranked]:
        """The fastest that are distinct.

        Of candidates with the same degrees and micro-batch the fastest stands for all, and of one tp, pp, cp and ep
        two: dispatch modes, sharding and recomputation would fill the list with one layout otherwise. Uniform
        recomputation stands there only where limits leave out "planned", which is never slower.
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
            if (*mesh, c.vpp, c.mbs) in layouts or of_mesh.get(mesh, 0) == _A_MESH:
                continue
            layouts.add((*mesh, c.vpp, c.mbs))
            of_mesh[mesh] = of_mesh.get(mesh, 0) + 1
            taken.append(one)
            if len(taken) == count:
                break
        return taken


Report = Callable[[int, int, float], None]  # blocks done, of how many, best seconds so far (infinite: none)


def feasible(request: Request) -> bool:
    """Whether some legal candidate fits."""
    memory = MemoryTable(request)
    every = blocks(request, Funnel())
    # many stages fit first
    return any(fitting(memory.peaks(block), request.room, block.recompute).any() for block in reversed(every))


def rank(request: Request, report: Report | None = None) -> Ranking:
    """Every legal candidate that fits, with time and memory."""
    funnel = Funnel()
    ranking = Ranking(blocks(request, funnel), funnel)
    memory, times = MemoryTable(request), TimeTable(request)
    seconds: list[np.ndarray] = []
    peaks: list[np.ndarray] = []
    bounds: list[np.ndarray] = []
    places: list[np.ndarray] = []
    best = np.inf
    for number, block in enumerate(ranking.blocks):
        found = memory.peaks(block)
        _keep_least(ranking, block, found)
        fits = fitting(found, request.room, block.recompute)
        funnel.drop(f"memory: over {request.room_words} on a stage", int(fits.size - fits.sum()))
        rows = np.flatnonzero(fits.any(axis=1))
        if len(rows):
            own = block.select(rows)
            took, held, least = _timed(own, found[rows], times, request.room)
            row, policy = np.nonzero(fits[rows])
            recompute = np.array([RECOMPUTE.index(word) for word in block.recompute])[policy]
            seconds.append(took[row, recompute])
            peaks.append(held[row, recompute])
            bounds.append(least[row])
            places.append(np.column_stack([np.full(len(row), number), rows[row], recompute]))
            best = min(best, float(seconds[-1].min()))
        if report:
            report(number + 1, len(ranking.blocks), best)
    if seconds:
        ranking.seconds, ranking.peaks = np.concatenate(seconds), np.concatenate(peaks)
        ranking.bounds, ranking.places = np.concatenate(bounds), np.concatenate(places)
    return ranking


def fitting(peaks: np.ndarray, cap: float, recompute: tuple[str, ...]) -> np.ndarray:
    """[rows, recompute] whether a candidate fits, from the uniform policies' [rows, policies, stages]."""
    uniform = (peaks <= cap).all(axis=2)
    planned = (peaks.min(axis=1) <= cap).all(axis=1)
    return np.column_stack([planned if word == PLANNED else uniform[:, POLICIES.index(word)] for word in recompute])


def _keep_least(ranking: Ranking, block: Block, peaks: np.ndarray) -> None:
    """Of what limits leave, the candidate whose heaviest stage holds least."""
    for word in reversed(block.recompute):  # of equals the planned one
        stages = peaks.min(axis=1) if word == PLANNED else peaks[:, POLICIES.index(word)]
        heaviest = stages.max(axis=1)
        row = int(heaviest.argmin())
        if ranking.least is None or heaviest[row] < ranking.least.peak:
            ranking.least = Ranked(block.candidate(row, word), 0.0, float(heaviest[row]))


def _timed(block: Block, peaks: np.ndarray, times: TimeTable, cap: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[rows, RECOMPUTE] seconds and heaviest bytes, [rows] bounds; what does not fit holds numbers nobody reads."""
    stages = times.stages(block)
    works = [stages.work[:, policy] for policy in range(len(POLICIES))]
    held = [peaks[:, policy] for policy in range(len(POLICIES))]
    mixed, mixed_peaks = mix(peaks, stages.work, cap)
    seconds = [times.totals(block, work, stages.sending) for work in (*works, mixed)]
    least = times.least(block, works[POLICIES.index("none")])
    return np.column_stack(seconds), np.column_stack([stage.max(axis=1) for stage in (*held, mixed_peaks)]), least


def mix(peaks: np.ndarray, works: np.ndarray, cap: float) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest mix of two policies under the cap, for each stage: ([rows, stages] seconds, bytes).

    Args:
        peaks, works: [rows, policies, stages] of the uniform policies. Where none fits the stage gets the one that
            holds least.
    """
    least = peaks.argmin(axis=1)[:, None]
    best_peak = np.take_along_axis(peaks, least, axis=1)[:, 0]
    best = np.take_along_axis(works, least, axis=1)[:, 0]
    fits = peaks <= cap
    best = np.where(fits.any(axis=1), np.inf, best)
    for low in range(len(POLICIES)):
        for high in range(len(POLICIES)):
            # share of the layers that take the policy `high`, which alone would not fit (or is `low` itself)
            gap = np.where(peaks[:, high] > peaks[:, low], peaks[:, high] - peaks[:, low], np.inf)
            share = np.where(low == high, 0.0, (cap - peaks[:, low]) / gap)
            taken = works[:, low] + share * (works[:, high] - works[:, low])
            able = fits[:, low] & (~fits[:, high] | np.bool_(low == high)) & (taken < best)
            best = np.where(able, taken, best)
            best_peak = np.where(able, cap if low != high else peaks[:, low], best_peak)
    return best, best_peak
