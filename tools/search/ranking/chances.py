"""Which candidates could still beat the best that is placed, and what no layout of the space is under.

Every candidate has a bound that costs nothing (`Ranking.bounds`). Where that leaves it a chance it gets a closer one,
the smallest first (`least_seconds`: the pipeline with layers that may be cut at will, under every stage's memory).
Those that could be fastest by it are placed as well; a candidate whose bound is over the best is proven not to be
better, by the estimator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tools.search.ranking.rank import Ranked, Ranking
from tools.search.space.candidates import RECOMPUTE, Candidate
from tools.search.space.limits import PLANNED

BOUNDS = 4  # closer bounds for a unit of effort
EFFORT = 0.5  # of each, at most


class Chances:
    """Bounds of the candidates that are placed by the optimiser.

    Args:
        best: seconds of the best layout so far.
    """

    def __init__(self, ranking: Ranking, best: float):
        self.best = best
        self._known: dict[Candidate, float] = {}
        planned = ranking.places[:, 2] == RECOMPUTE.index(PLANNED)
        under = np.flatnonzero(planned & (ranking.bounds < best))
        under = under[np.lexsort((ranking.seconds[under], ranking.bounds[under]))]
        self.open = [ranking.at(int(index)) for index in under]
        self._plain = {one.candidate: float(ranking.bounds[index]) for one, index in zip(self.open, under, strict=True)}

    def next(self, count: int) -> list[Ranked]:
        """The candidates with the smallest bounds that have no closer one."""
        return [one for one in self.open if one.candidate not in self._known][:count]

    def learn(self, ranked: Sequence[Ranked], bounds: Iterable[float]) -> None:
        """Take closer bounds, or the time of what is proven best."""
        for one, bound in zip(ranked, bounds, strict=True):
            self._known[one.candidate] = max(bound, self._known.get(one.candidate, 0.0))

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no layout of it is under."""
        return max(self._plain.get(candidate, 0.0), self._known.get(candidate, 0.0))

    def promising(self, placed: Iterable[Candidate], count: int) -> list[Ranked]:
        """Those with closer bounds under the best, of each layout one, that are not placed: by bound, then by rank."""
        taken = {_layout(candidate) for candidate in placed}
        found = []
        for one in sorted(self.open, key=lambda one: (self.bound(one.candidate), one.seconds)):
            known = one.candidate in self._known and self.bound(one.candidate) < self.best
            if known and _layout(one.candidate) not in taken:
                taken.add(_layout(one.candidate))
                found.append(one)
        return found[:count]

    @property
    def least(self) -> float:
        """Seconds that no layout of the space is under, or those of the best where nothing can be better."""
        return min([self.best, *(self.bound(one.candidate) for one in self.open)])

    @property
    def left(self) -> list[Ranked]:
        """Candidates that could be better by their bounds; placed ones by another placement."""
        return [one for one in self.open if self.bound(one.candidate) < self.best]


def _layout(candidate: Candidate) -> tuple[int, ...]:
    return (candidate.tp, candidate.pp, candidate.cp, candidate.ep, candidate.vpp, candidate.mbs)
