"""This module finds the additional results of `tc3 search`: the best layouts of other pipeline schedules, and the
effect of swapping.

1F1B and interleaved 1F1B are always ranked. Each other schedule is handled separately: its legal candidates are ranked
(by its filling of equal stages, see `tools.pipeline.simulate.filling`), the layers of the best few are placed with the
same effort as for 1F1B, and the results are compared by simulating the schedule.

The cost of swapping a layer's activations to the host is printed beside that of recomputing them. Swapping is only
simulated, because MindFormers 1.9.0 does not pass `swap_config` to any model (docs/schedules.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from plugins.errors import RecipeError, did_you_mean
from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved
from tools.estimate.time_model import TimeModel
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.place import Placement
from tools.pipeline.schedules import BY_ENVIRONMENT, PAPER_SCHEDULES, SCHEDULES, pairs_up, why_not
from tools.process.children import terminate_as_interrupt
from tools.search.candidates import configuration
from tools.search.ranking.rank import Chances, Ranked, Ranking, rank
from tools.search.ranking.run import Entry, Found, Progress, entry_of
from tools.search.ranking.swapping import Swapping, place_swapping, swapped
from tools.search.ranking.uneven import Uneven
from tools.search.ranking.workers import floors, place_all
from tools.search.request import PLANNED, Request

ALWAYS = ("1f1b", "interleaved_1f1b")
OTHERS = tuple(name for name in (*SCHEDULES, *PAPER_SCHEDULES) if name not in (*ALWAYS, "dual_pipe"))
ALL = "all"
OF_EACH = 3  # candidates of a schedule that are placed
BOUNDED = 256  # so many candidates of a schedule get the tighter bound, which does not cut layers


@dataclass(frozen=True)
class Scheduled:
    """A `Scheduled` holds the best layout of one pipeline schedule other than 1F1B and interleaved 1F1B."""

    schedule: str
    entry: Entry | None  # its fastest layout; None with `why` where it has none
    reason: str  # why no recipe can ask for it; "" where MindFormers runs it
    why: str = ""
    least: float = 0.0  # seconds that no layout of it is under, by the estimator; 0 where none is known

    @property
    def runs(self) -> str:
        """Return in words which software can run the schedule."""
        if self.schedule == BY_ENVIRONMENT:
            return f"not by a recipe: {self.reason}"
        return f"simulated only: {self.reason}" if self.reason else "runnable"

    def as_json(self) -> dict[str, Any]:
        """Return the layout of this schedule as values for `--json`."""
        found = self.entry.as_json() if self.entry else None
        words = {"schedule": self.schedule, "runnable": not self.reason, "reason": self.reason or None}
        return {**words, "strategy": found, "bound_s": self.least or None, "why": self.why or None}


@dataclass
class BySchedule:
    """A `BySchedule` holds the best layout of each requested pipeline schedule, in the order of the request. The field
    `whole` is False if Ctrl-C or SIGTERM interrupted a search, and `cut` is True if the time limit ended a search.
    """

    every: list[Scheduled] = field(default_factory=list)
    whole: bool = True
    cut: bool = False

    def writable(self, uneven: Sequence[Uneven] = ()) -> Scheduled | None:
        """Return the fastest layout among the pipeline schedules that a recipe can use. If layouts were ranked under
        uneven loads (`uneven`), return the first usable layout of this ranking.
        """
        able = [one for one in self.every if one.entry and not one.reason]
        order = {one.name: place for place, one in enumerate(uneven)}
        return min(
            able, key=lambda one: (order.get(one.schedule, 0), one.entry.seconds if one.entry else 0.0), default=None
        )


def asked_schedules(words: Sequence[str]) -> tuple[str, ...]:
    """Return the schedules that `--schedule` names, without 1F1B and interleaved 1F1B, which the search always
    considers.

    Raises:
        RecipeError: a schedule does not exist, or the search does not rank it.
    """
    names = [name for word in words for name in (OTHERS if word == ALL else (word,))]
    for name in names:
        if name == "dual_pipe":
            raise RecipeError(
                "--schedule dual_pipe: this schedule keeps two copies of the model and cannot be searched; choose "
                "dual_pipe_v"
            )
        if name not in (*ALWAYS, *OTHERS):
            known = [ALL, *ALWAYS, *OTHERS]
            raise RecipeError(
                f"--schedule {name!r}: the schedule must be one of {', '.join(known)}{did_you_mean(name, known)}"
            )
    return tuple(dict.fromkeys(name for name in names if name not in ALWAYS))


def require_writable(names: Sequence[str]) -> None:
    """Raise RecipeError if a recipe is to be written, but MindFormers can run none of the requested schedules."""
    if names and all(why_not(name) for name in names):
        raise RecipeError(f"--write: no recipe can ask for --schedule {names[0]}: {why_not(names[0])}")


def search_schedules(
    request: Request, names: Sequence[str], budget: Budget, times: TimeModel, progress: Progress
) -> BySchedule:
    """Return the fastest layout of each requested pipeline schedule; Ctrl-C ends the search with the results so far."""
    found = BySchedule()
    for name in names:
        try:
            with terminate_as_interrupt():
                found.every.append(_scheduled(replace(request, schedule=name), budget, times, progress, found))
        except KeyboardInterrupt:  # what was found before stays
            found.whole = False
        if not found.whole:
            break
    return found


def _scheduled(own: Request, budget: Budget, times: TimeModel, progress: Progress, found: BySchedule) -> Scheduled:
    """Return the fastest layout of the schedule of a request, and write into `found` what ended the search early."""
    ranking = rank(own, partial(progress, "ranking"))
    short = ranking.short_list(OF_EACH)
    if ranking.near:  # what fits only if layers move
        short += ranking.near.short_list(OF_EACH)[: OF_EACH - len(short)]
    uniform = [one.candidate for one in short if one.candidate.recompute != PLANNED]
    entries = [entry_of(configuration(own, one), times) for one in uniform]
    placed: dict[Ranked, Placement] = {}
    found.whole &= place_all(own, short, times, budget, placed.__setitem__)
    found.cut |= any(placement.cut for placement in placed.values())
    for placement in placed.values():
        if placement.configuration is not None:
            entries.append(entry_of(placement.configuration, times, bound=placement.bound_s))
    whys = (placed[one].why for one in short if one in placed and placed[one].configuration is None)
    why = "" if entries else next(whys, "no layout of it is legal and fits")
    best = min(entries, key=lambda entry: (entry.seconds, entry.peak, entry.candidate), default=None)
    # layouts that limits keep from being placed have no bound
    least = _least(own, ranking, placed, best.seconds, times) if best and found.whole and not uniform else 0.0
    return Scheduled(own.schedule, best, why_not(own.schedule), why, least)


def _least(own: Request, ranking: Ranking, placed: Mapping[Ranked, Placement], best: float, times: TimeModel) -> float:
    """Return a lower bound on the seconds of a step of every layout of a schedule: the smallest bound of its
    candidates. The optimiser bounds the candidates that were placed; `floors` bounds `BOUNDED` others, with whole
    layers under the memory limit; the rest are bounded by their work. Return 0 for schedules with pairs, for which no
    bound is known.
    """
    if pairs_up(own.schedule):
        return 0.0
    chances = Chances(ranking, best)
    for one, placement in placed.items():
        chances.learn(one.candidate, placement.least_s)
    some = [one.candidate for one in chances.left if one not in placed][:BOUNDED]
    for candidate, bound in zip(some, floors(own, some, times, best), strict=True):
        chances.learn(candidate, bound)
    return chances.least


_LEAST = 2.0  # seconds, whatever the time limit says


def swap_words(config: Configuration, times: TimeModel) -> list[str]:
    """Return for each kind of layer a line that compares the time for swapping activations to the host with the time
    for recomputing them. If the bandwidth to the host is unknown, return one line that says so.
    """
    lines = []
    for kind in dict.fromkeys(config.model.pattern):
        layer, whole = times.layer(config, kind), saved(config, kind)
        moved = whole - saved(config, kind, "full")
        copied = times.to_host(moved)
        if copied is None:
            return [f"swapping instead of recomputing: not known, {times.hardware.name} has no host_link"]
        found = swapped(whole, moved, copied, layer.backward.total)
        again = layer.recomputed["full"].total
        lines.append(
            f"swapping what a {kind} layer keeps ({moved / GIB:.2f} GiB a micro-batch) would add "
            f"{1e3 * found.extra_backward:.1f} ms to its backward, recomputing all of it {1e3 * again:.1f} ms: host "
            f"link {times.hardware.host_link}, nothing else on it; swap_config cannot be run by "
            "MindFormers 1.9.0"
        )
    return lines


def add_swapping(found: Found, times: TimeModel, budget: Budget) -> None:
    """Place the layers of the fastest layout again, with three choices for activations: keeping, recomputing and
    swapping. The search spends twice the effort of one placement on this.
    """
    if found.whole and found.entries:
        twice, seconds = 2 * budget.effort, max(_LEAST, budget.seconds_left)
        room = found.request.room
        found.swapping = place_swapping(found.entries[0].config, times, room, Budget(twice, seconds))


def swapping_words(found: Swapping) -> list[str]:
    """Return lines that state how much faster the fastest layout would be if its layers could also swap activations to
    the host.
    """
    if found.with_s == float("inf"):
        return ["keep, recompute or swap: no layout of the first one's stages fits, with swapping or without"]
    options = ", ".join(f"{name} {count}" for name, count in found.layers.items())
    words = f"{found.with_s:.2f} s a step instead of {found.without_s:.2f}"
    if found.with_s >= found.without_s:
        words = f"nothing gained over {found.without_s:.2f} s a step"
    return [
        f"keep, recompute or swap, in the stages of 1: {words}, {found.peak / GIB:.1f} GiB; layers: {options}; those "
        f"that swap by stage: {' '.join(map(str, found.by_stage))}",
        "only simulated, because MindFormers' swapping runs only on a device; the link is assumed to have no other use",
    ]


def swapping_json(found: Swapping) -> dict[str, Any]:
    """Return the predicted gain of swapping activations as a dictionary for `--json`; seconds are None if no layout
    fits.
    """
    seconds = (found.without_s, found.with_s)
    without, swapping = (None if one == float("inf") else one for one in seconds)
    more = {"layers": dict(found.layers), "swapping_by_stage": list(found.by_stage), "peak_gib": found.peak / GIB}
    return {"step_s_without": without, "step_s": swapping, **more, "runnable": False}
