"""Dry runs of the best strategies: written as overlays, compiled through the virtual cluster, dropped if they fail.

A quick dry run compiles each kind of layer once: whether MindSpore takes the strategy, and exactly what weights,
gradients and optimizer state hold. Activations are the larger of the search's own prediction and what the dry run puts
together for each stage from its kinds of layer; a full one compiles every kind of stage as it is, and its own estimate
counts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import ClusterError, RecipeError
from tools.check.check import check_recipe
from tools.check.view import View
from tools.dryrun.cli import compile_all, without_files
from tools.dryrun.diagnose import diagnose
from tools.dryrun.jobs import plan_jobs
from tools.dryrun.quick import quick_plan
from tools.dryrun.report import report_of
from tools.ep_report.settle import settle
from tools.recipe.load import Recipe, load_recipe
from tools.search.memory_model import GIB, all_stages
from tools.search.overlay import write_overlay
from tools.search.search_entry import Entry
from tools.search.search_request import Request

_MEMORY = "context.max_device_memory"  # what `tools.dryrun` says of it is judged here, against the search's cap


@dataclass(frozen=True)
class DryRun:
    """What a dry run found.

    Args:
        problems: refusals, or what is wrong beside memory.
        exact, total: bytes by stage, without and with the dry run's own estimate of activations.
    """

    problems: list[str]
    exact: list[int]
    total: list[int]


Run = Callable[[Path, bool], DryRun]  # a recipe's file, whether every stage is compiled


def dry_run(path: Path, full: bool) -> DryRun:
    """Check and compile a recipe.

    Raises KeyboardInterrupt on Ctrl-C; the compiles that were over are kept in the dry run's cache.
    """
    recipe = without_files(load_recipe(path))
    refused = [str(finding) for finding in check_recipe(recipe).errors]
    if refused:
        return DryRun(refused, [], [])
    settle(recipe)
    plan = plan_jobs(recipe) if full else quick_plan(recipe)
    try:
        results = compile_all(plan, None, True)
    except SystemExit:  # its command's answer to Ctrl-C
        raise KeyboardInterrupt from None
    refused = [diagnose(*result["error"].values()) for result in results if "error" in result]
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
    told: Callable[[int, list[str], int], None],
    full: bool = False,
    run: Run = dry_run,
) -> None:
    """Dry-run entries one after the other: the first `count`, and more as long as none of them compiles and fits.

    Args:
        request: what was asked for: its cap of bytes on a device, its machine.
        told: hears the number of each, what is wrong with it ([] where it compiles and fits), and the bytes of the
            heaviest stage by the dry run's own estimate (0: refused).
        full: compile every kind of stage.
        run: the dry run.
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
        problems = judge(entry, found, request.cap, full)
        passed |= not problems
        told(number, problems, max(found.total, default=0))


def judge(entry: Entry, found: DryRun, cap: float, full: bool) -> list[str]:
    """What is wrong with a strategy by its dry run."""
    if not found.exact:
        return found.problems
    rest = [memory.peak - memory.static for memory in all_stages(entry.config)]
    own = [exact + size for exact, size in zip(found.exact, rest, strict=True)]
    needs = found.total if full else [max(pair) for pair in zip(own, found.total, strict=True)]
    over = [
        f"stage {stage}: {need / GIB:.1f} GiB a device, {found.exact[stage] / GIB:.1f} of them exact, the cap is "
        f"{cap / GIB:.1f}"
        for stage, need in enumerate(needs)
        if need > cap
    ]
    return found.problems + over
