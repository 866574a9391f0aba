"""This module runs dry runs of the best strategies: they are written as overlays, compiled through the virtual cluster,
and dropped if they fail.

A quick dry run compiles each kind of layer once: whether MindSpore takes the strategy, and exactly what weights,
gradients and optimizer state hold. Activations are the larger of the search's own prediction and what the dry run puts
together for each stage from its kinds of layer; a full one compiles every kind of stage as it is, and its own estimate
counts.

A strategy above the limit fails. A strategy below the limit, but by less than the search's margin, is neither failed
nor proven to fit, because both estimates have errors of this size.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    """This holds the result of a dry run: refusals, or errors other than memory, and bytes by stage."""

    problems: list[str]
    exact: list[int]
    total: list[int]  # with the dry run's own estimate of activations


@dataclass(frozen=True)
class Verdict:
    """This says what the result of a dry run means for a strategy."""

    problems: list[str]  # why it is none; [] where it compiles and nothing is over the limit
    doubts: list[str]  # why it is not proven to fit all the same
    estimate: int  # bytes of the heaviest stage by the dry run's own estimate; 0: refused

    @property
    def proven(self) -> bool:
        """Return whether the strategy compiles and fits."""
        return not self.problems and not self.doubts


Run = Callable[[Path, bool], DryRun]  # a recipe's file, whether every stage is compiled


def dry_run(path: Path, full: bool) -> DryRun:
    """Check and compile a recipe.

    Raises KeyboardInterrupt on Ctrl-C; the compiles that were over are kept in the dry run's cache.
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
    """Make dry runs of entries one after the other: the first `count`, and more until one of them compiles and fits.

    Args:
        request: what was asked for: its cap of bytes on a device, its margin, its machine.
        told: hears the number of each and what was found.
        full: compile every kind of stage.
        run: the dry run.
        loads: of each entry, how it fits under the loads that were asked for; empty: at even loads.
    """
    passed = False
    for number, entry in enumerate(entries):
        if number >= count and passed:
            return
        with tempfile.TemporaryDirectory(prefix="tc3-verify-") as folder:
            path = Path(folder) / "overlay.yaml"
            try:
                write_overlay(recipe, entry.config, path, [], request.site)
                found = run(path, full)
            except (RecipeError, ClusterError) as error:
                found = DryRun([str(error)], [], [])
        verdict = judge(entry, found, request, full, loads[number] if loads else None)
        passed |= verdict.proven
        told(number, verdict)


def judge(entry: Entry, found: DryRun, request: Request, full: bool, loads: Judged | None = None) -> Verdict:
    """Return what a strategy's dry run means.

    Args:
        loads: how the strategy fits under uneven loads: what their fullest step adds to a stage by the model is added
            to what was compiled.
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
