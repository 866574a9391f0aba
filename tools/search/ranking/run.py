"""This module runs a whole search: it ranks all strategies, places the layers of every candidate that could be the
fastest, and compares the best layouts with the recipe's own layout.

An `Entry` is one line of the result: a layout with its predicted step time, the parts of this time, and its memory. The
layers of candidates are first placed quickly, and then by the solver of the pipeline optimiser (`_Placing`), several
candidates at a time (`tools.search.ranking.workers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from tools.estimate.configuration import PATTERNS, Configuration, parts_of
from tools.estimate.loads import loads_of
from tools.estimate.memory.model import layer_options, peak_memory
from tools.estimate.memory.room import Room
from tools.estimate.time_model import TimeModel, exposed_of
from tools.hardware.units import GIB
from tools.layout.budget import Budget
from tools.layout.place import WHOLE_EFFORT, Placement
from tools.process.children import terminate_as_interrupt
from tools.search.candidates import RECOMPUTE, Candidate, candidate_of, configuration
from tools.search.ranking.rank import Chances, Ranked, Ranking, layout_of, rank
from tools.search.ranking.swapping import Swapping
from tools.search.ranking.uneven import Uneven, in_order, renumbered, under
from tools.search.ranking.workers import (
    LEAST_SECONDS,
    Results,
    faster,
    floors,
    own_placement,
    place_one,
    screen_one,
    working,
)
from tools.search.request import PLANNED, Request


@dataclass(frozen=True)
class Entry:
    """An `Entry` is a layout with its predicted times and memory."""

    name: str  # "recipe" for the recipe's own, "" for the search's
    config: Configuration
    seconds: float  # of a step, the schedule simulated
    parts: Mapping[str, float]  # the same by `PARTS`, which add up to it
    peak: float  # bytes of the heaviest stage
    bound: float  # no placement of this strategy is under these seconds; 0 where none was looked for
    mfu: float  # model FLOPs (no recomputation, causal attention) over the devices' peak

    @property
    def candidate(self) -> Candidate:
        """Return the candidate strategy of the search that matches this layout."""
        return candidate_of(self.config)

    @property
    def tokens_per_s(self) -> float:
        """Return the number of tokens on which the whole run trains in a second."""
        return self.config.tokens / self.seconds

    @property
    def exposed(self) -> float:
        """Return the seconds of communication in a step that computation does not hide."""
        return exposed_of(self.parts)

    @property
    def layout(self) -> str:
        """Return the layout as text, such as ``dp256 tp2 pp8 vpp2 ep16, 64 x 1`` (parallel degrees, then the number of
        micro-batches x the samples in a micro-batch).
        """
        c = self.config
        stages = f"pp{c.pp}" + (f" vpp{c.chunks}" if c.chunks > 1 else "")
        sizes = {f"dp{c.dp}": c.dp, f"tp{c.tp}": c.tp, stages: c.pp, f"cp{c.cp}": c.cp, f"ep{c.ep}": c.ep}
        words = " ".join(word for word, size in sizes.items() if size > 1)
        return f"{words or 'one device'}, {c.micro_batches} x {c.batch}"

    @property
    def recompute(self) -> str:
        """Return the numbers of layers with each recompute option as text, such as ``full 16, select 30 of 54``."""
        config, counts = self.config, Counter[str]()
        for chunk, row in enumerate(config.layers):
            for stage, count in enumerate(row):
                for option in layer_options(config, chunk, stage, count):
                    counts.update(parts_of(option))
        words = [f"{name} {counts[name]}" for name in ("full", "select", *PATTERNS, "communication") if counts[name]]
        return f"{', '.join(words)} of {config.model.layers}" if words else "none"

    def as_json(self) -> dict[str, Any]:
        """Return the layout as values for `--json`: parallel degrees, numbers of layers and recomputed layers,
        predicted seconds and GiB.
        """
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
    """Return the predicted times and memory of a run.

    Raises:
        RecipeError: the run's schedule cannot be simulated, or cannot run with its numbers of stages, chunks and
            micro-batches.
    """
    step = times.step(config, simulated=True)
    return Entry(name, config, step.total, step.by_part, peak_memory(config), bound, times.mfu(config, step.total))


Progress = Callable[[str, int, int, float], None]  # phase, done, of how many, best seconds so far (infinite: none)


@dataclass(frozen=True)
class ByStages:
    """A `ByStages` holds the best strategy for one pair of pp (number of stages) and vpp (number of chunks)."""

    pp: int
    vpp: int
    strategies: int
    entry: Entry | None  # the fastest that was placed; None where the bounds made placing unnecessary
    bound: float  # seconds that none of them is under

    def as_json(self) -> dict[str, Any]:
        """Return the best strategy for one pair of pp and vpp as a dictionary for `--json`."""
        words = {"pp": self.pp, "vpp": self.vpp, "strategies": self.strategies, "bound_s": self.bound}
        return {**words, "step_s": self.entry.seconds if self.entry else None}


@dataclass
class Found:
    """A `Found` holds the results of a search for parallel strategies."""

    request: Request
    ranking: Ranking
    entries: list[Entry] = field(default_factory=list)  # the best, by simulated step time
    own: Entry | None = None  # the recipe's own run; None with `own_why` where it has no model
    own_why: str = ""
    own_mesh: Entry | None = None  # the recipe's own mesh, its layers placed anew; None where it does not fit
    stages: list[ByStages] = field(default_factory=list)
    dropped: list[tuple[Ranked, str]] = field(default_factory=list)  # of the short list: came to nothing, and why
    # of the `verified` best: what dry runs dropped, what they neither refused nor proved to fit, and what passed
    failed: list[tuple[Entry, list[str]]] = field(default_factory=list)
    doubtful: list[tuple[Entry, list[str]]] = field(default_factory=list)
    passed: list[Entry] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # terms of the memory that dry runs contradict
    verified: int = 0
    to_verify: int = 0  # dry runs that were asked for
    whole: bool = True  # False: the search was interrupted, and candidates that were not placed are missing
    seconds: float = 0.0  # of the ranking
    effort: float = 0.0  # of each placement
    placed: int = 0  # candidates that were placed
    solved: int = 0  # those that the solver placed, too
    least: float = 0.0  # seconds that no layout of what fits is under, by the estimator; 0 where none is known
    open: int = 0  # candidates that could be faster than the best by their bounds
    unplaced: int = 0  # those of them that were never placed
    cut: bool = False  # a deadline ended a placement: another machine may find another answer
    uneven: list[Uneven] = field(default_factory=list)  # placed layouts and the recipe's under the loads asked for
    loads: tuple[str, tuple[tuple[int, float], ...]] = ("", ())  # of --loads: as asked for, mean max/mean by EP degree
    under: Found | None = None  # the same search with the mean max/mean of these loads in every layer
    added: int = 0  # entries that come only from `under`
    swapping: Swapping | None = None  # the first layout with swapping as a third choice, where that was asked for

    @property
    def complete(self) -> bool:
        """Return whether every candidate that fits into memory was placed, or is proven not to be faster than the best
        layout.
        """
        return self.whole and not self.cut and self.least > 0 and not self.unplaced

    @property
    def gap(self) -> float:
        """Return by which fraction the step of another layout could at most be shorter than the fastest step found;
        return 1 if no lower bound is known.

        The fastest step found counts even if a dry run has dropped its layout since.
        """
        fastest = min(entry.seconds for entry in [*self.entries, *(entry for entry, _ in self.failed)])
        return max(0.0, 1 - self.least / fastest)

    @property
    def best(self) -> Entry:
        """Return the fastest layout that passed a dry run. If no layout passed a dry run, return the fastest layout
        under the requested expert loads.
        """
        if self.passed:
            return self.passed[0]
        own = {id(entry.config): entry for entry in self.entries}
        ranked = (own[id(one.config)] for one in self.uneven if one.numbered and id(one.config) in own)
        return next(ranked, self.entries[0])

    @property
    def unverified(self) -> str:
        """Return the reason why the best layout has not passed the requested dry run; return "" if it passed, or if no
        dry run was requested.
        """
        if not self.to_verify or not self.entries or self.passed:
            return ""
        doubts = next((lines for entry, lines in self.doubtful if entry is self.best), None)
        return "it had no dry run before the search was interrupted" if doubts is None else "; ".join(doubts)


def search(
    request: Request, top: int, budget: Budget, times: TimeModel, progress: Progress, at_once: int | None = None
) -> Found:
    """Search for parallel strategies: rank all candidates, place the layers of the best candidates, and compare the
    resulting layouts. Ctrl-C during placement ends the search with the results so far, and Ctrl-C during ranking raises
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


def search_under(found: Found, text: str, top: int, budget: Budget, times: TimeModel, progress: Progress) -> None:
    """Search once more under the uneven loads of `--loads`. For each EP degree, the mean of max/mean (the fullest
    device's load over the mean load) is assumed in every layer. The best layouts of the second search are added to the
    results, with their predictions at even loads. If Ctrl-C ends the second search, its layouts are left out, and the
    whole search counts as interrupted.
    """
    request, blocks = found.request, found.ranking.blocks
    sizes = sorted({int(ep) for block in blocks for ep in np.unique(block.columns["ep"])})
    skews = tuple((ep, loads_of(text, replace(request.base, dp=ep, tp=1, cp=1, ep=ep), True).typical) for ep in sizes)
    found.loads = text, skews
    if all(ratio == request.base.skew for _, ratio in skews):
        return
    try:
        again = search(replace(request, skews=skews), top, budget, times, progress)
    except KeyboardInterrupt:  # what was found at even loads stays
        found.whole = False
        return
    found.whole, found.cut, found.under = found.whole and again.whole, found.cut or again.cut, again
    known = {entry.config for entry in found.entries}
    even = [replace(entry.config, skew=request.base.skew) for entry in again.entries[: max(1, top // 2)]]
    found.added = sum(config not in known for config in even)
    found.entries += [entry_of(config, times) for config in even if config not in known]
    found.entries.sort(key=lambda entry: (entry.seconds, entry.peak))


def add_loads(
    found: Found, text: str, times: TimeModel, progress: Progress, others: Mapping[str, Entry] | None = None
) -> None:
    """Rank the layouts of a search, and the layouts in `others` (schedule -> layout), under the loads of `--loads`, and
    add this ranking to the results. If the recipe's own layout ranks before all layouts of the search, and the search
    may take it, it becomes one of the search's layouts. If the user presses Ctrl-C during the ranking, add no ranking
    and mark the search as interrupted.
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
    first = next(one for one in found.uneven if one.numbered or one.name == "recipe")
    mine = own_placement(request, times) if found.own_mesh and not first.numbered else None
    if found.own and mine and mine.configuration:  # it is the answer, like a placed layout
        own = replace(found.own, name="", config=mine.configuration)
        found.entries = sorted([*found.entries, own], key=lambda entry: (entry.seconds, entry.peak))
        ranked = in_order([replace(first, name="0", config=own.config), *found.uneven])
        found.uneven = renumbered(ranked, [entry.config for entry in found.entries])


FLOORS = 32  # candidates of one job
WAVE = 16  # candidates that are placed against one best time, however many processes there are
PROVING = 4  # candidates that are proven slower against one best time
CLOSING = 2  # candidates that the solver places at a time, however many processes there are


@dataclass
class _Placing:
    """A `_Placing` is the part of a search behind the ranking.

    1. The candidates that rank best and the recipe's own mesh are placed quickly (`tools.layout.place.screen`), and
       once more against the fastest of them, for closer bounds.
    2. Every other candidate (also of `Ranking.near`) that could be faster by its plain bound gets a bound of whole
       layers under memory.
    3. Those that could still be faster are placed quickly, the smallest bound first, until none is left.
    4. The solver places those that are still not proven slower, the fastest first, as far as the effort goes.

    What is compared with the best time is compared in groups of a fixed size, so that the answer does not depend on the
    number of processes. Steps 1 to 3 do not depend on the effort, and a larger effort begins with what a smaller one
    does in step 4.
    """

    found: Found
    top: int
    budget: Budget
    times: TimeModel
    progress: Progress
    at_once: int | None
    done: dict[Ranked, Entry] = field(default_factory=dict)
    placements: dict[Ranked, Placement] = field(default_factory=dict)
    own: dict[Ranked, Placement] = field(default_factory=dict)  # the recipe's own layout, if the search may take it
    of: int = 0  # candidates that are placed, if none of those left is proven slower before its turn

    def run(self) -> None:
        """Place the layers of the best candidates, and add the resulting layouts to `found`."""
        found, short = self.found, self.found.ranking.short_list(self.top)
        for one in short:
            if one.candidate.recompute != PLANNED:
                self.done[one] = entry_of(configuration(found.request, one.candidate), self.times)
        planned = [one for one in short if one.candidate.recompute == PLANNED]
        mesh = candidate_of(found.request.base)._replace(recompute=PLANNED)
        own = None if found.request.changed else found.ranking.find(mesh)
        planned += [own] if own and own not in planned else []
        if own and (mine := own_placement(found.request, self.times)):
            self.own[own] = mine
        try:
            with terminate_as_interrupt(), working(self.at_once) as results:
                if planned or found.ranking.near:
                    self._place(planned, results)
        except KeyboardInterrupt:
            found.whole = False
            found.ranking.admit({one: (entry.seconds, entry.peak) for one, entry in self.done.items()}, found.request)
        nothing = [one for one in planned if one in self.placements and one not in self.done]
        found.dropped += [(one, self.placements[one].why) for one in nothing]
        found.dropped.sort(key=lambda pair: (pair[0].seconds, pair[0].candidate, pair[1]))
        every: dict[tuple[int, ...], Entry] = {}
        for one, entry in self._in_order():
            every.setdefault(layout_of(one.candidate), entry)
        found.placed, found.entries = len(self.done), list(every.values())[: self.top]
        found.own_mesh = self.done.get(own) if own else None

    def _in_order(self) -> list[tuple[Ranked, Entry]]:
        """Return what was placed, the fastest first, in an order that no process's speed changes."""
        return sorted(self.done.items(), key=lambda pair: (pair[1].seconds, pair[1].peak, pair[0].candidate))

    def _place(self, first: list[Ranked], results: Results) -> None:
        found, self.of = self.found, len(first)
        self._quickly(first, np.inf, results)
        chances = Chances(found.ranking, self._best)
        self._learn(chances, first)
        if not self._late():  # now that there is a time to beat, closer bounds of those that are not proven slower
            again = [one for one in chances.left if one in self.placements]
            self._quickly(again, chances.best, results)
            self._learn(chances, again)
        if not self._late():
            self._bound(chances, results)
        while not self._late():
            chances.best = self._best
            left = [one for one in chances.left if one not in self.placements]
            if not left:
                break
            wave, self.of = left[:WAVE], len(self.placements) + len(left)
            self._quickly(wave, chances.best, results)
            self._learn(chances, wave)
        self._prove(chances, results)
        chances.best = self._best
        self._close(chances, results)
        chances.best = self._best
        found.least, found.open = chances.least, len(chances.left)
        found.unplaced = sum(one not in self.placements for one in chances.left)
        found.ranking.admit({one: (entry.seconds, entry.peak) for one, entry in self.done.items()}, found.request)
        found.stages = self._by_stages(chances)

    def _learn(self, chances: Chances, ranked: list[Ranked]) -> None:
        for one in ranked:
            chances.learn(one.candidate, self.placements[one].least_s)

    def _late(self) -> bool:
        self.found.cut |= self.budget.seconds_left <= 0
        return self.found.cut

    def _bound(self, chances: Chances, results: Results) -> None:
        """Compute the second bound of every candidate that could be faster by its plain bound."""
        todo = [one.candidate for one in chances.open if one not in self.placements]
        # alike candidates share what is computed once
        todo.sort(key=lambda c: (c.pp, c.vpp, c.tp, c.cp, c.ep, c.mode, c.shard, c.mbs, c.dp))
        parts = [todo[first : first + FLOORS] for first in range(0, len(todo), FLOORS)]
        jobs = [(self.found.request, part, self.times, chances.best) for part in parts]
        for done, (index, bounds) in enumerate(results(floors, jobs)):
            for candidate, bound in zip(parts[index], bounds, strict=True):
                chances.learn(candidate, bound)
            self.progress("bounding", min(FLOORS * (done + 1), len(todo)), len(todo), self._best)

    def _quickly(self, ranked: list[Ranked], beat: float, results: Results) -> None:
        jobs = [(self.found.request, one.candidate, self.times, beat) for one in ranked]
        for index, placement in results(screen_one, jobs):
            self._told(ranked[index], placement)

    def _prove(self, chances: Chances, results: Results) -> None:
        """Bound the candidates that are not proven slower again by whole layers, with more effort, the smallest bound
        first; in all this takes as much work as the solver has.
        """
        spent, tried = 0.0, set[Ranked]()
        more = self.budget.effort > WHOLE_EFFORT  # else it was all tried
        while more and not self._late() and spent < self._most:
            chances.best = self._best
            left = [one for one in chances.left if one in self.placements and one not in tried]
            wave = left[:PROVING]
            if not wave:
                break
            tried.update(wave)
            jobs = [(self.found.request, one.candidate, self.times, chances.best, self.budget.effort) for one in wave]
            for index, placement in results(screen_one, jobs):
                spent += placement.spent
                self._told(wave[index], placement)
            self._learn(chances, wave)
            self.progress("proving", len(tried), len(tried) + len(left) - len(wave), self._best)

    @property
    def _most(self) -> float:
        return max(1, self.top // 2) * self.budget.effort

    def _close(self, chances: Chances, results: Results) -> None:
        """Let the solver place what is not proven slower, with the effort of half of the shown rows."""
        spent = 0.0
        order = sorted(
            (one for one in chances.left if one in self.placements),
            key=lambda one: (self.placements[one].step_s, chances.bound(one.candidate), one.seconds),
        )
        while not self._late() and spent < self._most:
            chances.best = self._best
            wave = [one for one in order if chances.bound(one.candidate) < chances.best][:CLOSING]
            if not wave:
                break
            order = [one for one in order if one not in wave]
            seconds = max(LEAST_SECONDS, self.budget.seconds_left)
            effort = self.budget.effort, seconds
            jobs = [(self.found.request, one.candidate, self.times, *effort, self.placements[one]) for one in wave]
            for index, placement in results(place_one, jobs):
                spent += placement.spent
                self._told(wave[index], placement)
                chances.learn(wave[index].candidate, placement.least_s)
                self.found.solved += 1
                self.progress("closing", self.found.solved, self.found.solved + len(order), self._best)

    def _told(self, one: Ranked, placement: Placement) -> None:
        found = self.found
        if one in self.own:  # a search of a recipe that a search has written gives up nothing
            placement = faster(placement, self.own[one])
        found.cut |= placement.cut
        known = [words for other, words in found.dropped if other == one]
        found.dropped += [(one, words) for words in placement.dropped if words not in known]
        first, before = one not in self.placements, self.placements.get(one, placement)
        if before.step_s < placement.step_s:  # it was placed against another time
            placement = replace(before, least_s=max(before.least_s, min(before.step_s, placement.least_s)))
        self.placements[one] = placement
        if placement.configuration is not None:
            self.done[one] = entry_of(placement.configuration, self.times, bound=placement.bound_s)
        if first:
            self.progress("placing", len(self.placements), self.of, self._best)

    def _by_stages(self, chances: Chances) -> list[ByStages]:
        """Return the best of each number of stages and chunks, the fastest first, then by bound."""
        ranking = self.found.ranking
        best: dict[tuple[int, int], Entry] = {}
        for one, entry in self._in_order():
            best.setdefault((one.candidate.pp, one.candidate.vpp), entry)
        open_: dict[tuple[int, int], list[float]] = {}
        for one in chances.open:
            open_.setdefault((one.candidate.pp, one.candidate.vpp), []).append(chances.bound(one.candidate))
        planned = ranking.places[:, 2] == RECOMPUTE.index(PLANNED)
        rows = []
        for number, block in enumerate(ranking.blocks):
            own = planned & (ranking.places[:, 0] == number)
            if own.any():
                key = block.pp, block.vpp
                others = ranking.bounds[own & (ranking.bounds >= chances.at_first)]
                bounds = [*open_.get(key, []), *map(float, others)]
                rows.append(ByStages(*key, int(own.sum()), best.get(key), min(bounds)))
        return sorted(rows, key=lambda row: (row.entry.seconds if row.entry else np.inf, row.bound))

    @property
    def _best(self) -> float:
        return min((entry.seconds for entry in self.done.values()), default=float("inf"))
