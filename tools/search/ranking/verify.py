"""This module runs dry runs of the best strategies: it writes each strategy as a recipe file, lets MindSpore compile
the recipe for all devices without needing any device, and drops the strategy if this fails.

A quick dry run compiles each kind of layer once. A quick dry run shows whether MindSpore accepts the strategy, and
gives the exact bytes of weights, gradients and optimizer state. For activations the larger of two numbers counts: the
search's own prediction, and the sum that the dry run computes for each stage from its kinds of layer. A full dry run
compiles every kind of stage unchanged, and only its own estimate counts.

If the memory of a dry run differs from that of the search by more than the dry run's own error, the term with the
largest difference is named. In other strategies with an equal layer this term is corrected by the same factor, and
strategies that then exceed the limit are dropped without a dry run.

A strategy above the limit fails. A strategy below the limit, but by less than the search's margin, is neither failed
nor proven to fit, because both estimates have errors of this size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plugins.errors import ClusterError, RecipeError
from tools.check.check import check_recipe
from tools.dryrun.compiles import compile_all, diagnose
from tools.dryrun.plan import plan_jobs, without_files
from tools.dryrun.quick import ERROR, quick_plan
from tools.dryrun.report import report_of
from tools.estimate.memory.loaded import Judged
from tools.estimate.memory.model import all_stages
from tools.estimate.memory.room import DOES_NOT_FIT, UNKNOWN, fit_between
from tools.hardware.units import GIB
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View
from tools.search.overlay import write_overlay
from tools.search.ranking.run import Entry
from tools.search.request import Request

_MEMORY = "context.max_device_memory"  # what `tools.dryrun` says of it is judged here, against the search's cap
_SAME = 0.005  # of the room: plans fill it to the last byte, and the graph's weights are not counted to the last one


@dataclass(frozen=True)
class DryRun:
    """A `DryRun` holds the result of compiling a strategy for virtual devices: its errors (except too much memory), and
    the bytes of each stage.
    """

    problems: list[str]
    exact: list[int]
    total: list[int]  # with the dry run's own estimate of activations


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` holds whether a strategy compiles and fits according to its dry run, with the reasons if it does
    not.
    """

    problems: list[str]  # why it is none; [] where it compiles and nothing is over the limit
    doubts: list[str]  # why it is not proven to fit all the same
    estimate: int  # bytes of the heaviest stage by the dry run's own estimate; 0: refused or not compiled
    wrong: str = field(default="", compare=False)  # which term of the search's memory the dry run contradicts
    compiled: bool = True  # False: dropped by what an earlier dry run found

    @property
    def proven(self) -> bool:
        """Return whether the dry run compiled the strategy, and the strategy fits in memory."""
        return not self.problems and not self.doubts


@dataclass(frozen=True)
class Wrong:
    """A `Wrong` is a part of the predicted memory that a dry run contradicts. A `Wrong` holds the predicted bytes of
    this part and the bytes that were counted from the compiled graphs, both on the stage where these two numbers differ
    the most.
    """

    layout: str
    stage: int
    static: bool  # weights, gradients and optimizer state; else activations and buffers
    counted: float  # bytes by the search
    found: float  # bytes by the dry run

    @property
    def words(self) -> str:
        """Return as text the predicted bytes of the contradicted part of the memory, and the bytes that the dry run
        found.
        """
        name = "weights, gradients and optimizer state" if self.static else "activations and buffers"
        return (
            f"the search counts {self.counted / GIB:.1f} GiB of {name} on stage {self.stage}, the dry run "
            f"{self.found / GIB:.1f}"
        )

    def exceeds(self, entry: Entry, cap: float) -> str:
        """Return the reason why another strategy would exceed the memory cap if the prediction underestimates its
        memory by the same factor. Return "" if the strategy would not exceed the cap.
        """
        more = max(0.0, self.found / self.counted - 1) if self.counted else 0.0
        for stage, memory in enumerate(all_stages(entry.config)):
            need = memory.peak + more * (memory.static if self.static else memory.peak - memory.static)
            if need > cap:
                return (
                    f"not compiled: stage {stage} needs {need / GIB:.1f} GiB per device if the search errs as in "
                    f"{self.layout}, where {self.words}; the limit is {cap / GIB:.1f}"
                )
        return ""


def wrong_term(entry: Entry, found: DryRun) -> Wrong | None:
    """Return the part of the predicted memory that a dry run contradicts; return None if prediction and dry run agree
    within the dry run's error.
    """
    every = all_stages(entry.config)
    if len(found.exact) != len(every):
        return None
    off = [total - memory.peak for total, memory in zip(found.total, every, strict=True)]
    stage = max(range(len(off)), key=lambda stage: abs(off[stage]))
    memory, exact, total = every[stage], found.exact[stage], found.total[stage]
    if abs(off[stage]) <= ERROR * memory.peak:
        return None
    kept = memory.peak - memory.static
    static = abs(exact - memory.static) > abs(total - exact - kept)
    return Wrong(entry.layout, stage, static, *((memory.static, exact) if static else (kept, total - exact)))


def _alike(entry: Entry) -> tuple[object, ...]:
    """Return what a layer's memory depends on: entries with equal values have the same graph of a layer."""
    c = entry.candidate
    return c.tp, c.cp, c.ep, c.mode, c.shard


Run = Callable[[Path, bool], DryRun]  # a recipe's file, whether every stage is compiled


def dry_run(path: Path, full: bool) -> DryRun:
    """Check and compile a recipe by a dry run. Ctrl-C raises KeyboardInterrupt; the results of finished compiles stay
    in the cache of dry runs.
    """
    recipe = without_files(load_recipe(path))
    refused = [str(finding) for finding in check_recipe(recipe).errors]
    if refused:
        return DryRun(refused, [], [])
    recipe = resolve(recipe)
    plan = plan_jobs(recipe) if full else quick_plan(recipe)
    try:
        results = compile_all(plan, None, True)
    except SystemExit:  # its command's answer to Ctrl-C
        raise KeyboardInterrupt from None
    errors = [result["error"] for result in results if "error" in result]
    refused = [diagnose(error["type"], error["message"], recipe) for error in errors]
    if refused:
        return DryRun(refused, [], [])
    report = report_of(recipe, plan, results, View(recipe).node)
    problems = [problem for problem in report["problems"] if not problem.startswith(_MEMORY)]
    memory = [stage["memory"] for stage in report["stages"]]
    return DryRun(problems, [stage["exact"] for stage in memory], [stage["total"] for stage in memory])


def verify(
    recipe: Recipe,
    entries: Sequence[Entry],
    count: int,
    request: Request,
    told: Callable[[int, Verdict], None],
    full: bool = False,
    run: Run = dry_run,
    *,
    loads: Sequence[Judged | None] = (),
) -> None:
    """Make dry runs of the first `count` layouts. If none of the first `count` layouts compiles and fits, make dry runs
    of further layouts until one compiles and fits. If a dry run contradicts the predicted memory, the prediction is
    corrected for layouts with the same kind of layer. Layouts that exceed the memory cap after the correction are
    refused without a dry run.

    Args:
        request: the request of the search, with the memory limit of a device, the margin and the cluster.
        told: a function that is called with the number and the verdict of each entry.
        full: whether each dry run compiles every kind of stage (a full dry run) and not every kind of layer (a quick
            one).
        run: the function that makes a dry run.
        loads: for each entry, the result under the requested loads; if it is empty, loads are even.
    """
    passed = False
    learned: dict[tuple[object, ...], Wrong] = {}
    for number, entry in enumerate(entries):
        known = learned.get(_alike(entry))
        if known is not None and (words := known.exceeds(entry, request.cap)):
            told(number, Verdict([words], [], 0, compiled=False))
            continue
        if number >= count and passed:
            continue
        with tempfile.TemporaryDirectory(prefix="tc3-verify-") as folder:
            path = Path(folder) / "overlay.yaml"
            try:
                write_overlay(recipe, entry.config, path, [], request.site)
                found = run(path, full)
            except (RecipeError, ClusterError) as error:
                found = DryRun([str(error)], [], [])
        verdict = judge(entry, found, request, full, loads[number] if loads else None)
        wrong = wrong_term(entry, found)
        if wrong is not None:
            learned[_alike(entry)] = wrong
            verdict = replace(verdict, wrong=wrong.words)
        passed |= verdict.proven
        told(number, verdict)


def judge(entry: Entry, found: DryRun, request: Request, full: bool, loads: Judged | None = None) -> Verdict:
    """Return the verdict on a strategy after its dry run. For uneven loads, the additional bytes of the fullest step
    (from the memory model) are added to the bytes that the dry run counts from the compiled graphs.
    """
    estimate = max(found.total, default=0)
    if not found.exact:
        return Verdict(found.problems, [], estimate)
    needs: list[float] = list(found.total)
    every = all_stages(entry.config)
    if not full:
        rest = [memory.peak - memory.static for memory in every]
        own = [exact + more for exact, more in zip(found.exact, rest, strict=True)]
        needs = [max(pair) for pair in zip(own, found.total, strict=True)]
    words = [""] * len(needs)
    if loads is not None:
        added = [most - memory.peak for most, memory in zip(loads.total.max(axis=0), every, strict=True)]
        needs = [float(need + more) for need, more in zip(needs, added, strict=True)]
        words = [f", {more / GIB:.1f} added by the fullest step of the loads" for more in added]
    lines = [
        f"stage {stage}: {need / GIB:.1f} GiB per device, {exact / GIB:.1f} of them exact{more}"
        for stage, (need, exact, more) in enumerate(zip(needs, found.exact, words, strict=True))
    ]
    cap, proven = request.cap, min(request.cap, (1 + _SAME) * request.room)
    proven = proven if full else min(proven, cap / (1 + ERROR))
    fits = [fit_between(need, need, cap, proven) for need in needs]
    over = [
        f"{line}, the limit is {cap / GIB:.1f}" for line, fit in zip(lines, fits, strict=True) if fit == DOES_NOT_FIT
    ]
    near = [line for line, fit in zip(lines, fits, strict=True) if fit == UNKNOWN]
    return Verdict(found.problems + over, [f"{line}, it may be {request.room_words}" for line in near], estimate)
