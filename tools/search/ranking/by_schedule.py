"""The best layouts of other pipeline schedules, beside 1F1B and interleaved 1F1B that `tc3 search` ranks anyway.

Each schedule is a question of its own: its legal candidates ranked (by its filling of equal stages, see
`tools.pipeline.simulate.filling`), the best few placed with the same effort as 1F1B's, and judged by simulating it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from plugins.errors import RecipeError, did_you_mean
from tools.estimate.time_model import TimeModel
from tools.pipeline.runnable import BY_ENVIRONMENT, why_not
from tools.pipeline.schedules import PAPER_SCHEDULES, SCHEDULES
from tools.placement.budget import Budget
from tools.placement.place import Placement
from tools.search.ranking.entry import Entry, entry_of
from tools.search.ranking.place_best import place_all
from tools.search.ranking.rank import Ranked, rank
from tools.search.space.candidates import configuration
from tools.search.space.limits import PLANNED
from tools.search.space.request import Request

ALWAYS = ("1f1b", "interleaved_1f1b")
OTHERS = tuple(name for name in (*SCHEDULES, *PAPER_SCHEDULES) if name not in (*ALWAYS, "dual_pipe"))
ALL = "all"
OF_EACH = 3  # candidates of a schedule that are placed
Progress = Callable[[str, int, int, float], None]


@dataclass(frozen=True)
class Scheduled:
    """What one schedule would bring.

    Args:
        entry: its fastest layout; None with `why` where it has none.
        reason: why no recipe can ask for it; "" where MindFormers runs it.
    """

    schedule: str
    entry: Entry | None
    reason: str
    why: str = ""

    @property
    def runs(self) -> str:
        """In words."""
        if self.schedule == BY_ENVIRONMENT:
            return f"not by a recipe: {self.reason}"
        return f"simulated only: {self.reason}" if self.reason else "runnable"

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        found = self.entry.as_json() if self.entry else None
        words = {"schedule": self.schedule, "runnable": not self.reason, "reason": self.reason or None}
        return {**words, "strategy": found, "why": self.why or None}


@dataclass
class BySchedule:
    """The answers, in the order of what was asked; `whole`: none was interrupted, `cut`: a deadline ended one."""

    every: list[Scheduled] = field(default_factory=list)
    whole: bool = True
    cut: bool = False

    @property
    def writable(self) -> Scheduled | None:
        """The fastest of those that a recipe can ask for."""
        able = [one for one in self.every if one.entry and not one.reason]
        return min(able, key=lambda one: one.entry.seconds if one.entry else 0.0, default=None)


def asked_schedules(words: Sequence[str]) -> tuple[str, ...]:
    """The schedules of `--schedule`, without those that are searched anyway.

    Raises:
        RecipeError: there is no such schedule, or it is not searched.
    """
    names = [name for word in words for name in (OTHERS if word == ALL else (word,))]
    for name in names:
        if name == "dual_pipe":
            raise RecipeError("--schedule dual_pipe: it holds the model twice, which is not searched; try dual_pipe_v")
        if name not in (*ALWAYS, *OTHERS):
            known = [ALL, *ALWAYS, *OTHERS]
            raise RecipeError(f"--schedule {name!r}: want one of {', '.join(known)}{did_you_mean(name, known)}")
    return tuple(dict.fromkeys(name for name in names if name not in ALWAYS))


def require_writable(names: Sequence[str]) -> None:
    """Refuse to write a recipe for schedules of which none can run.

    Raises:
        RecipeError: says why.
    """
    if names and all(why_not(name) for name in names):
        raise RecipeError(f"--write: no recipe can ask for --schedule {names[0]}: {why_not(names[0])}")


def search_schedules(
    request: Request,
    names: Sequence[str],
    budget: Budget,
    times: TimeModel,
    progress: Progress,
    at_once: int | None = None,
) -> BySchedule:
    """The fastest layout of each schedule; Ctrl-C ends it with what is known."""
    found = BySchedule()
    for name in names:
        own = replace(request, schedule=name)
        ranking = rank(own, lambda done, of, best: progress("ranking", done, of, best))
        short = ranking.short_list(OF_EACH)
        entries, whys = _placed(found, own, short, budget, times, at_once)
        why = "" if entries else whys[0] if whys else "no layout of it is legal and fits"
        best = min(entries, key=lambda entry: (entry.seconds, entry.peak), default=None)
        found.every.append(Scheduled(name, best, why_not(name), why))
        if not found.whole:
            break
    return found


def _placed(
    found: BySchedule,
    request: Request,
    short: Sequence[Ranked],
    budget: Budget,
    times: TimeModel,
    at_once: int | None,
) -> tuple[list[Entry], list[str]]:
    """Entries of what could be placed, and why the others could not."""
    uniform = [one.candidate for one in short if one.candidate.recompute != PLANNED]
    entries, whys = [entry_of(configuration(request, one), times) for one in uniform], []

    def told(_: Ranked, placement: Placement) -> None:
        found.cut |= placement.cut
        if placement.configuration is None:
            whys.append(placement.why)
        else:
            entries.append(entry_of(placement.configuration, times, bound=placement.bound_s))

    found.whole &= place_all(request, short, times, budget, told, at_once)
    return entries, whys
