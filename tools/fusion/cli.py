"""This module is the command `tc3 fusion`, which says which operators of a recipe's graphs are fused into one kernel,
and how much time and HBM traffic this saves.

`level_of` returns the level of operator fusion that MindSpore would use for a recipe, and the key that sets it. The
command compiles the recipe as `tc3 dryrun --quick` does, or reads a final graph, and counts operators and bytes in the
graph. The exit code is 0 on success, 1 if MindSpore refuses the recipe, and 2 for wrong arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from plugins.errors import RecipeError
from plugins.operator_fusion.plan import JIT_LEVEL, KEY, LEVELS, NEEDED, OWN_KEYS, Fusion, check
from tools.check.check import require_sound
from tools.dryrun.compiles import compile_all, refusal_of, text_of
from tools.dryrun.plan import plan_jobs, resized, without_files
from tools.dryrun.quick import quick_plan
from tools.estimate.efficiency import DeviceTimes
from tools.estimate.efficiency import cluster as find_cluster
from tools.estimate.from_recipe import from_recipe
from tools.files.atomic import check_writable
from tools.files.figure import check_ending
from tools.fusion.render import draw, render
from tools.fusion.report import Pieces, quick_pieces, report_of, stage_pieces
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.resolve import resolve
from tools.process.waiting import saying
from tools.ranges import Number, jobs_option, overrides_option
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.schema.versions import require_verified, unverified_option

_WIDTH = 150  # of tables in a file or pipe
_OF_A_GRAPH = -1  # the stage of a graph that was handed over


@click.command("fusion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--stage",
    type=Number("stage"),
    help="Compile this pipeline stage with all its layers; by default one layer of each kind is compiled.",
)
@click.option(
    "--graph",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Compile nothing, but read RECIPE's compiled graph from this file, which MindSpore wrote earlier "
    "(*_backend_pass_*.ir or .ir.gz).",
)
@click.option("--level", type=click.Choice(LEVELS), help="Use this fusion level instead of the recipe's.")
@click.option(
    "--devices",
    type=Number("devices"),
    help="Compile for this many devices instead of the recipe's number; data_parallel is changed to match.",
)
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Compute times with the HBM bandwidth of this cluster's devices.",
)
@overrides_option
@jobs_option
@click.option("--no-cache", is_flag=True, help="Compile everything again instead of reusing earlier compiles.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the HBM traffic of each part of the model before and after fusion to this file (.svg or .png).",
)
@unverified_option
def fusion(
    recipe: Path,
    stage: int | None,
    graph: Path | None,
    level: str | None,
    devices: int | None,
    cluster: str,
    overrides: tuple[str, ...],
    jobs: int | None,
    no_cache: bool,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Report which operators of RECIPE MindSpore would fuse into kernels of DVM (the library that makes fused kernels),
    and the HBM traffic and time that this saves.

    \b
    tc3 fusion recipes/telechat3_438b/pretrain_4k.yaml
    tc3 fusion my.yaml --level off --json
    tc3 fusion my.yaml --stage 7 --picture stage_7.svg

    The command compiles the recipe as tc3 dryrun --quick does, and keeps the graphs, so that a second call compiles
    nothing. Bytes are counted in the graph, and seconds are modelled. Nothing was measured on an NPU.

    Exit codes: 0 success; 1 the recipe does not compile; 2 a wrong input; 130 interrupted.
    """
    if picture:
        check_ending(picture)
        check_writable(picture)
    if graph and stage is not None:
        raise click.UsageError("--graph already names the graph of one stage: leave --stage out")
    loaded = without_files(resized(apply_overrides(load_recipe(recipe), overrides), devices))
    loaded = resolve(loaded, partial(click.echo, err=True))
    require_sound(loaded)
    chosen, why = level_of(loaded)
    if level:
        chosen, why = replace(chosen, level=level), f"--level {level}; the recipe: {chosen.level}, {why}"
    config, times = from_recipe(loaded), DeviceTimes(find_cluster(cluster))
    if graph:
        with saying("counting"):
            pieces = stage_pieces(loaded, graph, chosen, _OF_A_GRAPH)
    else:
        pieces = _compiled(loaded, chosen, stage, jobs, not no_cache)
    report = report_of(loaded.source, pieces, chosen, why, config, times)
    if picture:
        draw(report, picture)
        click.echo(f"written: {picture}", err=True)
    if as_json:
        click.echo(json.dumps(report))
    else:
        console = Console(highlight=False, markup=False)
        render(report, console if console.is_terminal else Console(highlight=False, markup=False, width=_WIDTH))


def _compiled(recipe: Recipe, chosen: Fusion, stage: int | None, at_once: int | None, use_cache: bool) -> Pieces:
    """Compile the graphs that are not in the cache, and count the operators of all graphs."""
    view = View(recipe)
    if view.cpu_classes:
        raise RecipeError(
            f"{recipe.source}: this recipe is for CPU, so no graph for Ascend can be compiled; give the recipe of "
            "the full-size model"
        )
    if stage is not None and stage >= view.pp:
        raise RecipeError(f"--stage {stage}: there is no such stage; the recipe has stages 0 to {view.pp - 1}")
    require_verified()
    whole = stage is not None or view.pp == 1
    number = stage or 0
    plan = plan_jobs(recipe, (number * (view.devices // view.pp),)) if whole else quick_plan(recipe)
    results = compile_all(plan, at_once, use_cache, texts=True)
    if refused := [refusal_of(result, recipe) for result in results if "error" in result]:
        click.echo("\n".join(refused), err=True)
        sys.exit(1)
    texts = [text_of(job) for job in plan.jobs]
    with saying("counting"):
        return stage_pieces(recipe, texts[0], chosen, number) if whole else quick_pieces(recipe, texts, chosen)


def level_of(recipe: Mapping[str, Any]) -> tuple[Fusion, str]:
    """Return the level of operator fusion that is assumed for a recipe, and the reason for this assumption.

    Raises:
        RecipeError: `plugins.operator_fusion` cannot be read, or contradicts other keys of the recipe.
    """
    context = recipe.get("context") or {}
    if context.get("device_target", "Ascend") != "Ascend":
        return Fusion("off"), "context.device_target is not Ascend: only Ascend has DVM"
    if (fusion := check(recipe)) is not None:
        return fusion, f"{KEY}.level: {fusion.level}"
    if own := [key for key in OWN_KEYS if context.get(key)]:
        return Fusion("vector"), f"context.{own[0]} is set, and what it says is not read here: counted as level vector"
    level = (context.get("jit_config") or {}).get("jit_level")
    if level == NEEDED:
        return Fusion("vector"), f"{JIT_LEVEL}: {NEEDED}, with which MindSpore fuses vector operators by default"
    written = "not written" if level is None else level
    return Fusion("off"), f"{JIT_LEVEL} is {written}: on Ascend nothing is fused without {NEEDED}"
