"""A whole search: rank the space, place the best, judge them beside the recipe's own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plugins.errors import RecipeError
from tools.estimate.time_model import TimeModel
from tools.placement.budget import Budget
from tools.placement.place import Placement
from tools.process.signals import terminate_as_interrupt
from tools.search.ranking.chances import BOUNDS, EFFORT, Chances
from tools.search.ranking.entry import Entry, entry_of
from tools.search.ranking.place_best import bounds_of, place_all
from tools.search.ranking.rank import Ranked, Ranking, rank
from tools.search.ranking.swapping import Swapping
from tools.search.space.candidates import configuration
from tools.search.space.limits import PLANNED
from tools.search.space.request import Request

Progress = Callable[[str, int, int, float], None]  # phase, done, of how many, best seconds so far (infinite: none)


@dataclass
class Found:
    """The answer.

    Args:
        entries: the best, by simulated step time.
        own: the recipe's own run; None with `own_why` where it has no model.
        dropped: candidates of the short list that came to nothing, with the reason.
        failed: what dry runs dropped of the `verified` best, with what they found; doubtful: what they neither refused
            nor proved to fit, with the reason; passed: what compiles and fits.
        to_verify: dry runs that were asked for.
        whole: False when the search was interrupted; candidates that were not placed are then missing.
        seconds: of the ranking.
        effort: of each placement.
        placed: how many candidates were placed; those that are no `entries` are slower.
        least: seconds that no layout of the candidates that fit is under, by the estimator; 0 where none is known.
        open: candidates that could be faster than the best by their bounds; unplaced: those of them that were never
            placed.
        cut: a deadline ended one of them: another machine may find another answer.
        swapping: the first layout placed once more with swapping as a third choice, where that was asked for.
    """

    request: Request
    ranking: Ranking
    entries: list[Entry] = field(default_factory=list)
    own: Entry | None = None
    own_why: str = ""
    dropped: list[tuple[Ranked, str]] = field(default_factory=list)
    failed: list[tuple[Entry, list[str]]] = field(default_factory=list)
    doubtful: list[tuple[Entry, list[str]]] = field(default_factory=list)
    passed: list[Entry] = field(default_factory=list)
    verified: int = 0
    to_verify: int = 0
    whole: bool = True
    seconds: float = 0.0
    effort: float = 0.0
    placed: int = 0
    least: float = 0.0
    open: int = 0
    unplaced: int = 0
    cut: bool = False
    swapping: Swapping | None = None

    @property
    def complete(self) -> bool:
        """Whether each candidate that fits was placed, or cannot be faster than the best by its bound."""
        return self.whole and not self.cut and self.least > 0 and not self.unplaced

    @property
    def best(self) -> Entry:
        """The fastest; where dry runs proved some to fit, the fastest of those."""
        return self.passed[0] if self.passed else self.entries[0]

    @property
    def unverified(self) -> str:
        """Why the best has not passed a dry run, where dry runs were asked for; "" where it has or none were."""
        if not self.to_verify or not self.entries or self.passed:
            return ""
        doubts = next((lines for entry, lines in self.doubtful if entry is self.entries[0]), None)
        return "it had no dry run before the search was interrupted" if doubts is None else "; ".join(doubts)


def search(
    request: Request,
    top: int,
    budget: Budget,
    times: TimeModel,
    progress: Progress,
    at_once: int | None = None,
) -> Found:
    """Rank, place, judge; Ctrl-C while placing ends it with what is known, while ranking with KeyboardInterrupt."""
    ranking = rank(request, lambda done, of, best: progress("ranking", done, of, best))
    found = Found(request, ranking, seconds=budget.elapsed, effort=budget.effort)
    try:
        found.own = entry_of(request.base, times, "recipe")
    except RecipeError as error:
        found.own_why = str(error)
    _Placing(found, top, budget, times, progress, at_once).run()
    return found


@dataclass
class _Placing:
    """The part of a search behind the ranking: the candidates that rank best, then those that could still be better."""

    found: Found
    top: int
    budget: Budget
    times: TimeModel
    progress: Progress
    at_once: int | None
    done: dict[Ranked, Entry] = field(default_factory=dict)
    least: dict[Ranked, float] = field(default_factory=dict)  # by their own searches, no placement is under

    def run(self) -> None:
        """Fill in what is found."""
        found, short = self.found, self.found.ranking.short_list(self.top)
        for one in short:
            if one.candidate.recompute != PLANNED:
                self.done[one] = entry_of(configuration(found.request, one.candidate), self.times)
        found.whole = self._place(short)
        planned = [one for one in short if one.candidate.recompute == PLANNED]
        if found.whole and planned and self.done and self.budget.seconds_left <= 0:
            found.cut = True
        elif found.whole and planned and self.done:
            try:
                with terminate_as_interrupt():
                    self._close(short)
            except KeyboardInterrupt:
                found.whole = False
        every = sorted(self.done.values(), key=lambda entry: (entry.seconds, entry.peak))
        found.placed, found.entries = len(every), every[: self.top]

    def _close(self, short: list[Ranked]) -> None:
        """Bound the rest of the space, place what could be better by it, and keep what stays open."""
        found = self.found
        chances = Chances(found.ranking, self._best)
        closer = chances.next(int(BOUNDS * self.budget.effort))
        self.progress("bounding", 0, len(closer), self._best)
        chances.learn(closer, bounds_of(found.request, closer, self.times, EFFORT, self.at_once))
        more = chances.promising([one.candidate for one in short], max(1, self.top // 2))
        found.whole = self._place(more)
        chances.best = self._best
        chances.learn(list(self.least), self.least.values())
        found.least, found.open = chances.least, len(chances.left)
        found.unplaced = sum(one not in self.done for one in chances.left)

    def _place(self, ranked: list[Ranked]) -> bool:
        of = len(self.done) + len(self.found.dropped) + len(ranked)

        def told(one: Ranked, placement: Placement) -> None:
            found = self.found
            found.cut |= placement.cut
            self.least[one] = placement.least_s
            if placement.configuration is None:
                found.dropped.append((one, placement.why))
            else:
                self.done[one] = entry_of(placement.configuration, self.times, bound=placement.bound_s)
            self.progress("placing", len(self.done) + len(found.dropped), of, self._best)

        return place_all(self.found.request, ranked, self.times, self.budget, told, self.at_once)

    @property
    def _best(self) -> float:
        return min((entry.seconds for entry in self.done.values()), default=float("inf"))
