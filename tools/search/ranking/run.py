"""This module runs a whole search: it ranks the space, places the best candidates, and judges them beside the recipe's
own layout.

An `Entry` is one line of the result: a run with its predicted step, its memory, and where its time goes. Candidates'
layers are placed by the pipeline optimiser, several at a time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from plugins.errors import RecipeError
from tools.estimate.configuration import PATTERNS, Configuration, parts_of
from tools.estimate.memory.model import layer_options, peak_memory
from tools.estimate.memory.room import Room
from tools.estimate.time_model import PARTS, TimeModel, exposed_of
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.place import Placement, least_seconds, place
from tools.process.children import terminate_as_interrupt
from tools.search.candidates import Candidate, candidate_of, configuration
from tools.search.ranking.rank import BOUNDS, EFFORT, Chances, Ranked, Ranking, rank
from tools.search.ranking.swapping import Swapping
from tools.search.ranking.uneven import Uneven, in_order, under
from tools.search.request import PLANNED, Request


@dataclass(frozen=True)
class Entry:
    """This is a run with its predictions."""

    name: str  # "recipe" for the recipe's own, "" for the search's
    config: Configuration
    seconds: float  # of a step, the schedule simulated
    parts: Mapping[str, float]  # the same by `PARTS`, which add up to it
    peak: float  # bytes of the heaviest stage
    bound: float  # no placement of this strategy is under these seconds; 0 where none was looked for
    mfu: float  # model FLOPs (no recomputation, causal attention) over the devices' peak

    @property
    def candidate(self) -> Candidate:
        """Return the entry's place in the space."""
        return candidate_of(self.config)

    @property
    def tokens_per_s(self) -> float:
        """Return the seconds of the whole run."""
        return self.config.tokens / self.seconds

    @property
    def exposed(self) -> float:
        """Return the seconds of communication that nothing hides."""
        return exposed_of(self.parts)

    @property
    def layout(self) -> str:
        """Return ``dp256 tp2 pp8 vpp2 ep16, 64 x 1``, as `tc3 check` writes it, with number and samples of
        micro-batches.
        """
        c = self.config
        stages = f"pp{c.pp}" + (f" vpp{c.chunks}" if c.chunks > 1 else "")
        sizes = {f"dp{c.dp}": c.dp, f"tp{c.tp}": c.tp, stages: c.pp, f"cp{c.cp}": c.cp, f"ep{c.ep}": c.ep}
        words = " ".join(word for word, size in sizes.items() if size > 1)
        return f"{words or 'one device'}, {c.micro_batches} x {c.batch}"

    @property
    def recompute(self) -> str:
        """Return the number of layers that recompute, by option: ``full 16, select 30 of 54``."""
        config, counts = self.config, Counter[str]()
        for chunk, row in enumerate(config.layers):
            for stage, count in enumerate(row):
                for option in layer_options(config, chunk, stage, count):
                    counts.update(parts_of(option))
        words = [f"{name} {counts[name]}" for name in ("full", "select", *PATTERNS, "communication") if counts[name]]
        return f"{', '.join(words)} of {config.model.layers}" if words else "none"

    def as_json(self) -> dict[str, Any]:
        """Return values for `--json`: degrees, tables, seconds, GiB."""
        c, recompute = self.config, self.config.recompute
        return {
            "name": self.name,
            **self.candidate._asdict(),
            "schedule": c.schedule,
            "layers": c.layers,
            "recompute": {name: getattr(recompute, name) for name in ("full", "select", "communication")}
            | dict(recompute.operators),
            "step_s": self.seconds,
            "bound_s": self.bound or None,
            "parts_s": dict(self.parts),
            "exposed_communication_s": self.exposed,
            "bubble": self.parts["bubble"] / self.seconds,
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "peak_gib": self.peak / GIB,
        }


def entry_of(config: Configuration, times: TimeModel, name: str = "", bound: float = 0.0) -> Entry:
    """Return the predictions for a run.

    Raises:
        RecipeError: its schedule has no model, or cannot run with these numbers.
    """
    step = times.step(config, simulated=True)
    return Entry(name, config, step.total, step.by_part, peak_memory(config), bound, times.mfu(config, step.total))


def why_faster(first: Entry, second: Entry) -> str:
    """Return the largest differences of two entries' times, in words: first what the first entry saves, then what it
    costs.
    """
    saved = {name: second.parts[name] - first.parts[name] for name in PARTS}
    least = 0.02 * abs(second.seconds - first.seconds) + 1e-3
    gains = [name for name in sorted(PARTS, key=lambda name: -saved[name]) if saved[name] > least][:3]
    costs = [name for name in sorted(PARTS, key=lambda name: saved[name]) if saved[name] < -least][:2]
    words = [f"{saved[name]:.2f} s less {PARTS[name]}" for name in gains]
    paid = [f"{-saved[name]:.2f} s more {PARTS[name]}" for name in costs]
    total = f"{second.seconds - first.seconds:.2f} s per step"
    if not words:
        return f"{total}: the same within a hundredth"
    return f"{total}: {', '.join(words)}" + (f"; it pays {', '.join(paid)}" if paid else "")


_LEAST = 2.0  # seconds for a candidate, however many there are
Told = Callable[[Ranked, Placement], None]


def processes() -> int:
    """Return the number of simultaneous placements: the solver uses one core for each."""
    return max(1, len(os.sched_getaffinity(0)))


def place_all(
    request: Request, ranked: Sequence[Ranked], times: TimeModel, budget: Budget, told: Told, at_once: int | None = None
) -> bool:
    """Place every "planned" candidate and report each when it is done; return False if Ctrl-C or SIGTERM ended this
    early.

    The others stay as they were ranked: their recomputation is what the user's limits ask for. Each candidate gets
    the effort of `budget`, however many run at a time, and the same share of its seconds as a deadline.
    """
    todo = [one for one in ranked if one.candidate.recompute == PLANNED]
    at_once = min(at_once or processes(), max(1, len(todo)))
    seconds = max(_LEAST, budget.seconds_left / max(1, -(-len(todo) // at_once)))
    jobs = [
        (configuration(request, one.candidate), times, request.room, budget.effort, seconds, request.groups)
        for one in todo
    ]
    try:
        with terminate_as_interrupt():
            for index, placement in _results(_place, jobs, at_once):
                told(todo[index], placement)
    except KeyboardInterrupt:
        return False
    return True


def bounds_of(request: Request, ranked: Sequence[Ranked], times: TimeModel, at_once: int | None = None) -> list[float]:
    """Return a lower bound in seconds for every placement of each candidate (`least_seconds`); Ctrl-C raises
    KeyboardInterrupt.
    """
    jobs = [
        (configuration(request, one.candidate), times, request.room, Budget(EFFORT), request.groups) for one in ranked
    ]
    found = dict(_results(least_seconds, jobs, min(at_once or processes(), max(1, len(jobs)))))
    return [found[index] for index in range(len(jobs))]


Job = tuple[Any, ...]
Answer = TypeVar("Answer")


def _results(work: Callable[..., Answer], jobs: Sequence[Job], at_once: int) -> Iterator[tuple[int, Answer]]:
    """(number of the job, its result) as they come, in processes of their own unless one at a time is enough."""
    if at_once == 1 or len(jobs) <= 1:
        for index, job in enumerate(jobs):
            yield index, work(*job)
        return
    with _pool(at_once) as pool:
        futures = {pool.submit(work, *job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _place(
    config: Configuration, times: TimeModel, cap: float, effort: float, seconds: float, groups: bool
) -> Placement:
    if not groups:
        return place(config, times, cap, Budget(effort, seconds))
    return place(config, times, cap, Budget(2 * effort, seconds), groups=True)  # half of it as without them


@contextmanager
def _pool(at_once: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that leave Ctrl-C to their parent, and end with it."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), initializer=_deaf)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


Progress = Callable[[str, int, int, float], None]  # phase, done, of how many, best seconds so far (infinite: none)


@dataclass
class Found:
    """The answer."""

    request: Request
    ranking: Ranking
    entries: list[Entry] = field(default_factory=list)  # the best, by simulated step time
    own: Entry | None = None  # the recipe's own run; None with `own_why` where it has no model
    own_why: str = ""
    dropped: list[tuple[Ranked, str]] = field(default_factory=list)  # of the short list: came to nothing, and why
    # of the `verified` best: what dry runs dropped, what they neither refused nor proved to fit, and what passed
    failed: list[tuple[Entry, list[str]]] = field(default_factory=list)
    doubtful: list[tuple[Entry, list[str]]] = field(default_factory=list)
    passed: list[Entry] = field(default_factory=list)
    verified: int = 0
    to_verify: int = 0  # dry runs that were asked for
    whole: bool = True  # False: the search was interrupted, and candidates that were not placed are missing
    seconds: float = 0.0  # of the ranking
    effort: float = 0.0  # of each placement
    placed: int = 0  # candidates that were placed; those that are no `entries` are slower
    least: float = 0.0  # seconds that no layout of what fits is under, by the estimator; 0 where none is known
    open: int = 0  # candidates that could be faster than the best by their bounds
    unplaced: int = 0  # those of them that were never placed
    cut: bool = False  # a deadline ended a placement: another machine may find another answer
    uneven: list[Uneven] = field(default_factory=list)  # placed layouts and the recipe's under the loads asked for
    swapping: Swapping | None = None  # the first layout with swapping as a third choice, where that was asked for

    @property
    def complete(self) -> bool:
        """Return whether each candidate that fits was placed, or cannot be faster than the best by its bound."""
        return self.whole and not self.cut and self.least > 0 and not self.unplaced

    @property
    def best(self) -> Entry:
        """Return the fastest layout, under the loads if some were asked for; if dry runs proved that some fit, the
        fastest of those.
        """
        if self.passed:
            return self.passed[0]
        own = {id(entry.config): entry for entry in self.entries}
        ranked = (own[id(one.config)] for one in self.uneven if one.numbered and id(one.config) in own)
        return next(ranked, self.entries[0])

    @property
    def unverified(self) -> str:
        """Return why the best layout has not passed a dry run, if dry runs were requested; "" if it has or none were
        requested.
        """
        if not self.to_verify or not self.entries or self.passed:
            return ""
        doubts = next((lines for entry, lines in self.doubtful if entry is self.best), None)
        return "it had no dry run before the search was interrupted" if doubts is None else "; ".join(doubts)


def search(
    request: Request, top: int, budget: Budget, times: TimeModel, progress: Progress, at_once: int | None = None
) -> Found:
    """Rank, place and judge; Ctrl-C while placing ends the search with the results so far, while ranking with
    KeyboardInterrupt.
    """
    ranking = rank(request, partial(progress, "ranking"))
    found = Found(request, ranking, seconds=budget.elapsed, effort=budget.effort)
    try:
        found.own = entry_of(request.base, times, "recipe")
    except RecipeError as error:
        found.own_why = str(error)
    _Placing(found, top, budget, times, progress, at_once).run()
    return found


def add_loads(
    found: Found, text: str, times: TimeModel, progress: Progress, others: Mapping[str, Entry] | None = None
) -> None:
    """Add what is found under the loads of `--loads`; Ctrl-C leaves it out, and the search counts as interrupted.

    Args:
        others: schedule -> its fastest layout, of those that were asked for.
    """
    request = found.request
    room = Room(request.cap, request.cap_source, request.margin)
    entries = {str(number): entry for number, entry in enumerate(found.entries, 1)}
    entries |= {**(others or {}), **({"recipe": found.own} if found.own else {})}
    every: list[Uneven] = []
    try:
        with terminate_as_interrupt():
            for name, entry in entries.items():
                progress("loading", len(every), len(entries), found.entries[0].seconds)
                every.append(under(text, name, entry.layout, entry.config, entry.seconds, room, times))
    except KeyboardInterrupt:
        found.whole = False
        return
    found.uneven = in_order(every)


def renumber(found: Found) -> None:
    """Leave out of the layouts under loads those that a dry run dropped, and number the others as they stand now."""
    names = {id(entry.config): str(number) for number, entry in enumerate(found.entries, 1)}
    kept = [one for one in found.uneven if not one.numbered or id(one.config) in names]
    found.uneven = [replace(one, name=names[id(one.config)]) if one.numbered else one for one in kept]


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
        """Add the results."""
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
        chances.learn(closer, bounds_of(found.request, closer, self.times, self.at_once))
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
            found.dropped += [(one, words) for words in placement.dropped]
            if placement.configuration is None:
                found.dropped.append((one, placement.why))
            else:
                self.done[one] = entry_of(placement.configuration, self.times, bound=placement.bound_s)
            self.progress("placing", len(self.done) + len(found.dropped), of, self._best)

        return place_all(self.found.request, ranked, self.times, self.budget, told, self.at_once)

    @property
    def _best(self) -> float:
        return min((entry.seconds for entry in self.done.values()), default=float("inf"))
