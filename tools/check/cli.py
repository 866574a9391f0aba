"""This module is `tc3 check`: it prints findings as lines and the sizes of recipes as one table; the exit code is 0
without findings, 1 with findings, and 2 if a file cannot be read or the command is used wrongly.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from tools.check.build import check_built
from tools.check.check import FORMULA, check_recipe, is_fragment, side_by_side
from tools.process.waiting import saying
from tools.ranges import Tokens, overrides_option
from tools.recipe.findings import ERROR, NOTE, WARNING, Report
from tools.recipe.load import Recipe, read_recipe
from tools.recipe.override import apply_overrides
from tools.schema.schema import json_schema, load_schema
from tools.schema.versions import require_verified, unverified_option

CARD = "card.yaml"  # says what is true of the recipes beside it
_STYLES = {ERROR: "red", WARNING: "yellow", NOTE: "dim"}
LAYOUT = ".layout.yaml"  # what `offset: auto` of the recipe beside it stands for


@click.command()
@click.argument("recipes", nargs=-1, type=click.Path(path_type=Path), metavar="RECIPE...")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--schema",
    is_flag=True,
    help="Check nothing, but print the JSON Schema with which editors complete and check recipes.",
)
@overrides_option
@click.option(
    "--token-budget",
    type=Tokens(),
    metavar="N",
    help="Print how many steps it takes to train on this many tokens, such as 300M, 1.5B or 10T.",
)
@click.option(
    "--build/--no-build", default=True, help="Also let MindFormers itself build the model's config; this takes seconds."
)
@click.option(
    "--here",
    is_flag=True,
    help="Check whether the recipe can run on this machine; missing data is then an error, not a warning.",
)
@click.option("--strict", is_flag=True, help="Also refuse a recipe that has only warnings.")
@unverified_option
def check(
    recipes: tuple[Path, ...],
    as_json: bool,
    schema: bool,
    overrides: tuple[str, ...],
    token_budget: int | None,
    build: bool,
    here: bool,
    strict: bool,
) -> None:
    """Check, without a device, that MindFormers will run RECIPEs as they are written, and print their sizes.

    In a fragment (a file in a folder `base`) only the keys are checked; a `card.yaml` or
    `*.layout.yaml` is not a recipe and is left out.

    Exit codes: 0 clean, 1 findings, 2 a file cannot be read.
    """
    if schema:
        click.echo(json_schema(load_schema()), nl=False)
        return
    if not recipes:
        raise click.UsageError("name at least one recipe, or --schema")
    require_verified()
    wanted = [recipe for recipe in recipes if not is_left_out(recipe)]
    with saying(f"{_count(len(wanted))} being checked"):
        reports = [check_recipe(_loaded(recipe, overrides), token_budget, here) for recipe in wanted]
    if build:
        whole = [report for report in reports if report.clean and not is_fragment(report.recipe.source)]
        with saying("MindFormers builds the model's configuration; --no-build leaves that out"):
            note = check_built(whole)
        if note:
            click.echo(note, err=True)
    refused = [report for report in reports if not report.clean or (strict and report.warnings)]
    if as_json:
        click.echo(json.dumps({"clean": not refused, "recipes": [report.as_json() for report in reports]}))
    else:
        _print(reports)
    sys.exit(1 if refused else 0)


def _loaded(recipe: Path, overrides: tuple[str, ...]) -> Recipe:
    """Return the recipe as written, overrides applied: what is wrong with its numbers is a finding."""
    return apply_overrides(read_recipe(recipe), overrides) if overrides else read_recipe(recipe)


def is_left_out(path: Path) -> bool:
    """Return whether a file is not a recipe because its name is that of a card or of a layout file."""
    return path.name == CARD or path.name.endswith(LAYOUT)


def _count(recipes: int) -> str:
    return f"{recipes} recipe{'s' * (recipes != 1)}"


def _print(reports: list[Report]) -> None:
    """Print findings first, then the table, then one line of summary."""
    console = Console(soft_wrap=True, highlight=False)
    for report in reports:
        for finding in report.findings:
            console.print(str(finding), style=_STYLES[finding.severity], markup=False)
    tables = [(report.recipe.source, report.table) for report in reports if report.table]
    for start in range(0, len(tables), 3):
        Console(highlight=False).print(side_by_side(tables[start : start + 3]))
    if tables:
        console.print(f"FLOPs per token: {FORMULA}, forward and backward, causal, nothing recomputed", style="dim")
    errors = sum(len(report.errors) for report in reports)
    warnings = sum(len(report.warnings) for report in reports)
    notes = sum(len(report.findings) for report in reports) - errors - warnings
    verdict = [f"{errors} error{'s' * (errors > 1)}" if errors else "clean"]
    verdict += [
        f"{count} {name}{'s' * (count > 1)}" for count, name in ((warnings, "warning"), (notes, "note")) if count
    ]
    console.print(f"{_count(len(reports))}: {', '.join(verdict)}")
