"""This module is the command `tc3 accuracy fusion`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plugins.errors import ClusterError, DataError, RecipeError
from tools.process.waiting import saying
from tools.ranges import Number, overrides_option
from tools.schema.versions import require_verified, unverified_option

if TYPE_CHECKING:
    from tools.accuracy.fused_kernels import Report
    from tools.dryrun.graph_text import GraphText

GRAPHS = (".ir", ".ir.gz")
_SHOWN = 10  # kernels, the worst first


@click.command("fusion")
@click.argument("recipe", metavar="RECIPE|GRAPH", type=click.Path(path_type=Path))
@overrides_option
@click.option(
    "--seed", default=0, show_default=True, type=Number("seed"), help="Draw the random inputs with this seed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def fusion_command(recipe: Path, overrides: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Compute the fused kernels of a graph in NumPy in two ways, fused and operator by operator, and compare the
    results with float64 results.

    RECIPE is compiled as `tc3 fusion` compiles it. A recipe for the CPU is compiled as if it were for Ascend, because
    DVM exists only for Ascend. The kernels that DVM would make of the graph are computed in NumPy as DVM computes them:
    chains of 16-bit operators in float32, rounded once at the end. GRAPH.ir is the text of a graph that MindSpore
    compiled; the command computes its kernels and compiles nothing.

    \b
    tc3 accuracy fusion recipes/mini/pretrain.yaml
    tc3 accuracy fusion graph.ir --json

    Tolerances are those of `tc3 accuracy ops` (report, Table 2). Exit codes: 0 all within tolerance, 1 a fused kernel
    is out of tolerance, 2 some kernels could not be computed, or a wrong input.
    """
    from tools.accuracy.fused_kernels import predicted, replayed

    require_verified()
    graph = recipe.name.endswith(GRAPHS)
    if graph and overrides:
        raise click.UsageError("--set works only with a recipe; the text of a compiled graph is replayed unchanged")
    graphs = _read(recipe) if graph else _compiled(recipe, overrides)
    with saying("computing kernels"):
        report = replayed(predicted(graphs), seed)
    if as_json:
        click.echo(json.dumps({"recipe": str(recipe), **report.as_json()}))
    else:
        _print(report)
    sys.exit({True: 0, False: 1, None: 2}[report.passed])


def _read(file: Path) -> list[GraphText]:
    from tools.dryrun.graph_text import read_graph

    if not file.is_file():
        raise DataError(f"{file}: there is no such file; give the text of a compiled graph, or a recipe")
    return [read_graph(file)]


def _compiled(file: Path, overrides: tuple[str, ...]) -> list[GraphText]:
    """Return a recipe's graphs; raise RecipeError for a wrong recipe, and ClusterError if it does not compile."""
    from tools.check.check import require_sound
    from tools.dryrun.compiles import compile_all, refusal_of, text_of
    from tools.dryrun.graph_text import read_graph
    from tools.dryrun.plan import without_files
    from tools.dryrun.quick import quick_plan
    from tools.layout.resolve import resolve
    from tools.recipe.load import load_recipe
    from tools.recipe.override import apply_overrides
    from tools.recipe.view import View

    recipe = without_files(apply_overrides(load_recipe(file), overrides))
    if View(recipe).cpu_classes:
        if (processes := View(recipe).devices) > 1:
            raise RecipeError(
                f"{file}: the recipe trains on {processes} CPU processes; give a recipe for one CPU process or for "
                "Ascend"
            )
        recipe["context"]["device_target"] = "Ascend"
    recipe = resolve(recipe, partial(click.echo, err=True))
    require_sound(recipe)
    plan = quick_plan(recipe)
    for result in compile_all(plan, None, True, texts=True):
        if "error" in result:
            raise ClusterError(
                f"{file}: the result is unknown, because the recipe does not compile: {refusal_of(result, recipe)}"
            )
    return [read_graph(text_of(job)) for job in plan.jobs]


def _print(report: Report) -> None:
    total, bad = sum(row.times for row in report.rows), report.wrong
    click.echo(f"DVM, replayed: {total} kernels of {len(report.rows)} kinds, {len(bad)} kinds out of tolerance")
    for row in sorted(report.rows, key=lambda row: -row.used)[:_SHOWN]:
        also = "" if row.unfused_passed else " (out of tolerance, too)"
        click.echo(
            f"  {'ok   ' if row.passed else 'WRONG'} {row.name} x{row.times} {row.dtype}: fused {row.fused:.1e}, "
            f"unfused {row.unfused:.1e}{also}, allowed {row.allowed:.1e}"
        )
    for why, count in report.skipped.items():
        click.echo(f"not computed again: {count} kernels, for {why}")
    if bad:
        click.echo(f"out of tolerance first: {bad[0].name} ({bad[0].where})")
    elif report.passed:
        click.echo("all within tolerance")
    elif report.unknown:
        click.echo(f"unknown of {report.unknown} kernels; the others are within tolerance")
    else:
        click.echo("unknown: no kernel of two or more operators is predicted for this graph, so nothing was compared")
