"""A whole search: rank the space, place the best, judge them beside the recipe's own layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from plugins.errors import RecipeError
from tools.estimate.time_model import TimeModel
from tools.placement.budget import Budget
from tools.placement.place import Placement
from tools.search.ranking.entry import Entry, entry_of
from tools.search.ranking.place_best import place_all
from tools.search.ranking.rank import Ranked, Ranking, rank
from tools.search.ranking.store import Store
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
        cut: a deadline ended one of them: another machine may find another answer.
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
    cut: bool = False

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
    store: Store,
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
    short = ranking.short_list(top)
    done: dict[Ranked, Entry] = {}

    def told(one: Ranked, placement: Placement) -> None:
        found.cut |= placement.cut
        if placement.configuration is None:
            found.dropped.append((one, placement.why))
        else:
            done[one] = entry_of(placement.configuration, times, bound=placement.bound_s)
        best = min((entry.seconds for entry in done.values()), default=float("inf"))
        progress("placing", len(done) + len(found.dropped), len(short), best)

    for one in short:
        if one.candidate.recompute != PLANNED:
            done[one] = entry_of(configuration(request, one.candidate), times)
    found.whole = place_all(request, short, times, budget, store, told, at_once)
    found.entries = sorted(done.values(), key=lambda entry: (entry.seconds, entry.peak))
    return found
