"""`tc3 accuracy fusion`: exit code 0 within tolerance, 1 out of it, 2 unknown or a wrong input."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plugins.errors import ClusterError, DataError
from tools.process.children import terminate_as_interrupt
from tools.process.waiting import saying
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

if TYPE_CHECKING:
    from tools.accuracy.fusion.report import Report, Row

GRAPHS = (".ir", ".ir.gz")
_UNKNOWN = "unknown of {} kernels; the others are within tolerance"
_SHOWN = 10  # kernels of each side, the worst first


@click.command("fusion")
@click.argument("recipe", metavar="RECIPE|GRAPH", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--seed", default=0, show_default=True, type=Number("seed"), help="Seed of the random inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def fusion_command(recipe: Path, overrides: tuple[str, ...], seed: int, as_json: bool) -> None:
    """Compute fused kernels again, fused and one operator after the other, against float64.

    RECIPE is trained for two steps on this CPU with MindSpore's CPU graph kernels and without (for an Ascend recipe,
    its mini). Each kind of kernel then runs by itself, and where one is out of tolerance, the operator that is wrong is
    named. The kernels that DVM would make of the same graph are computed in NumPy as DVM does: 16-bit chains in
    float32, rounded once. GRAPH.ir is the text of a graph that MindSpore compiled: its kernels are replayed, nothing
    is trained.

    \b
    tc3 accuracy fusion recipes/mini/pretrain.yaml
    tc3 accuracy fusion graph.ir --json

    Tolerances are those of `tc3 accuracy ops` (report, Table 2). Exit codes: 0 all within tolerance, 1 a fused kernel
    is out of it, 2 unknown of some, because they could not be run, or a wrong input.
    """
    from tools.accuracy.equivalence.runs import RunFailedError

    require_verified()
    graph = recipe.name.endswith(GRAPHS)
    if graph and overrides:
        raise click.UsageError("--set is for a recipe: a graph is replayed unchanged")
    try:
        with terminate_as_interrupt():
            report = _of_graph(recipe, seed) if graph else _of_recipe(recipe, overrides, seed)
    except RunFailedError as error:
        raise ClusterError(f"{recipe}: unknown: the training failed: {error}") from None
    if as_json:
        click.echo(json.dumps({"recipe": str(recipe), **report.as_json()}))
    else:
        _print(report)
    sys.exit({True: 0, False: 1, None: 2}[report.passed])


def _of_graph(file: Path, seed: int) -> Report:
    from tools.accuracy.fusion.kernels import predicted
    from tools.accuracy.fusion.report import Report, replayed
    from tools.dryrun.graph_text import read_graph

    if not file.is_file():
        raise DataError(f"{file}: no such file: give the text of a compiled graph, or a recipe")
    found = predicted([read_graph(file)])
    return Report(replayed(found, seed), dict(found.skipped))


def _of_recipe(file: Path, overrides: tuple[str, ...], seed: int) -> Report:
    from tools.accuracy.fusion.cells import recipe_of, require_akg, train_both
    from tools.accuracy.fusion.kernels import built, predicted
    from tools.accuracy.fusion.report import Report, measured, replayed

    recipe = recipe_of(file, overrides)
    require_akg()
    with tempfile.TemporaryDirectory(prefix="tc3-fusion-") as name:
        folder = Path(name)
        with saying(f"{file}: training with graph kernels and without"):
            steps = train_both(recipe, folder)
        dvm, akg = predicted(steps.before), built(steps.after)
        with saying("running kernels"):
            rows = [*replayed(dvm, seed), *measured(akg, seed, folder / "cells")]
    return Report(rows, dict(dvm.skipped + akg.skipped), {"on": steps.on, "off": steps.off})


def _print(report: Report) -> None:
    from tools.accuracy.fusion.report import AKG, DVM

    for who in (DVM, AKG):
        rows = [row for row in report.rows if row.who == who]
        if rows:
            total = sum(row.times for row in rows)
            bad = [row for row in rows if not row.passed and not row.why]
            click.echo(f"{who}: {total} kernels of {len(rows)} kinds, {len(bad)} kinds out of tolerance")
            for row in sorted(rows, key=lambda row: -_used(row))[:_SHOWN]:
                click.echo(f"  {_line(row)}")
    for place, losses in enumerate(zip(report.losses.get("on", []), report.losses.get("off", []), strict=True)):
        click.echo(f"step {place + 1}: loss {losses[0]:.6f} with CPU graph kernels, {losses[1]:.6f} without")
    for why, count in report.skipped.items():
        click.echo(f"not computed again: {count} kernels, for {why}")
    first = next((row for row in report.wrong), None)
    if first:
        click.echo(f"out of tolerance first: {first.culprit or first.name} ({first.where})")
    else:
        click.echo("all within tolerance" if report.passed else _UNKNOWN.format(report.unknown))


def _used(row: Row) -> float:
    """Share of its tolerance."""
    if row.why or row.culprit:
        return float("inf")
    return row.fused / row.allowed if row.allowed else row.fused


def _line(row: Row) -> str:
    if row.why:
        return f"unknown  {row.name}: {row.why}"
    word = "ok   " if row.passed else "WRONG"
    culprit = f"; wrong by itself: {row.culprit}, {row.detail}" if row.culprit else ""
    also = "" if row.unfused_passed else " (out of tolerance, too)"
    return (
        f"{word} {row.name} x{row.times} {row.dtype}: fused {row.fused:.1e}, unfused {row.unfused:.1e}{also}, "
        f"allowed {row.allowed:.1e}{culprit}"
    )
