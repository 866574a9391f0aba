"""This module is the command `tc3 recipe`. The commands of this group show one recipe as it will run, or compare two
recipes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from tools.layout.resolve import resolve
from tools.ranges import Number, overrides_option
from tools.recipe.diff import ABSENT, GROUPS, Batch, Change, Comparison, compare
from tools.recipe.dump import recipe_text
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.mini_strategy import WORKERS
from tools.recipe.override import apply_overrides

# The flat effective recipe: bases merged in, overrides applied, as YAML that stock MindFormers reads, or as JSON.


def effective(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    mini: bool = False,
    as_written: bool = False,
    workers: int | None = None,
) -> Recipe:
    """Return the recipe of a file as it would run, or the mini recipe (a small version for CPU) that `tc3 train
    --mini` would train instead.

    With a number of `workers` the mini recipe keeps the recipe's parallel strategy, scaled to this number (`--mini
    --parallel`). `auto` and layout strings are replaced by the values that they stand for, with a line on stderr for
    each; with `as_written` they stay unchanged.

    Raises:
        RecipeError: the file, a base recipe or an override is wrong, or the value that replaces `auto` is unknown.
    """
    recipe = load_mini(path, workers=workers) if mini else load_recipe(path)
    recipe = apply_overrides(recipe, overrides) if overrides else recipe
    return recipe if as_written else resolve(recipe, partial(click.echo, err=True))


def recipe_as_text(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    as_json: bool = False,
    mini: bool = False,
    as_written: bool = False,
    workers: int | None = None,
) -> str:
    """Return as text the recipe that `effective` returns. A YAML text keeps the anchors that the recipe's author
    wrote.
    """
    recipe = effective(path, overrides, mini, as_written, workers)
    if as_json:
        return json.dumps(recipe, indent=2, default=str) + "\n"  # only YAML knows dates
    return recipe_text(recipe)


SETTINGS = {"help_option_names": ["-h", "--help"]}
TITLES = {
    "numbers": "changes the numbers",
    "layout": "changes the layout (values equal up to rounding)",
    "nothing": "changes nothing numerical",
}
as_written_option = click.option(
    "--as-written",
    is_flag=True,
    help="Print `auto` and layout strings as the recipe has them, instead of the values that MindFormers can read.",
)
_LONG = 120  # characters of a value that are printed; --json has them all


@click.group(context_settings=SETTINGS)
def recipe() -> None:
    """Show a recipe as it will run, or compare two recipes."""


@recipe.command(context_settings=SETTINGS)
@click.argument("recipe", type=click.Path(path_type=Path))
@overrides_option
@click.option(
    "--mini",
    is_flag=True,
    help="Show the toy-size recipe that `tc3 train --mini` derives from RECIPE and trains on CPU.",
)
@click.option(
    "--parallel",
    is_flag=True,
    help="With --mini: show the toy-size recipe that `tc3 train --mini --parallel` trains, which keeps RECIPE's "
    "parallel strategy.",
)
@click.option(
    "--workers",
    type=Number("workers"),
    help=f"Let --parallel scale the parallel strategy down to this many CPU workers.  [default: {WORKERS}]",
)
@as_written_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of YAML.")
def show(
    recipe: Path,
    overrides: tuple[str, ...],
    mini: bool,
    parallel: bool,
    workers: int | None,
    as_written: bool,
    as_json: bool,
) -> None:
    """Print RECIPE as one flat file that stock MindFormers reads. Bases are merged, overrides are applied, and `auto`
    is replaced by values.
    """
    if (parallel and not mini) or (workers is not None and not parallel):
        raise click.UsageError(
            "--parallel works only with --mini, and --workers only with --parallel: give --mini --parallel --workers N"
        )
    processes = (workers or WORKERS) if parallel else None
    click.echo(recipe_as_text(recipe, overrides, as_json, mini, as_written, processes), nl=False)


@recipe.command(context_settings=SETTINGS)
@click.argument("before", metavar="A", type=click.Path(path_type=Path))
@click.argument("after", metavar="B", type=click.Path(path_type=Path))
@as_written_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def diff(before: Path, after: Path, as_written: bool, as_json: bool) -> None:
    """Compare recipes A and B by full key path, and show the effect of each difference on training.

    Exit codes: 0 if the recipes are equal, 1 if they differ, 2 if an error in a recipe or argument must be corrected
    first.
    """
    comparison = compare(*(effective(path, as_written=as_written) for path in (before, after)))
    if as_json:
        click.echo(json.dumps(_as_dict(comparison, before, after), default=str))
    else:
        _print(comparison, before, after)
    sys.exit(bool(comparison.changes))


def _print(comparison: Comparison, before: Path, after: Path) -> None:
    """Print the batches of both sides, then the changes by group."""
    width = max(len(str(before)), len(str(after)))
    for name, batch in ((before, comparison.before), (after, comparison.after)):
        click.echo(f"{name!s:{width}}  {_batch(batch)}")
    if not comparison.changes:
        click.echo("the same recipe")
    for group in GROUPS:
        if changes := comparison.group(group):
            click.echo("\n" + click.style(f"{TITLES[group]}: {len(changes)}", bold=True))
        for change in changes:
            click.echo(f"  {_line(change)}")


def _batch(batch: Batch) -> str:
    plural = "s" if batch.devices > 1 else ""
    return f"{batch.devices:,} device{plural}, global batch {batch.samples:,}, {batch.tokens:,} tokens per step"


def _line(change: Change) -> str:
    """Return ``optimizer.weight_decay 0.1 -> 0.01: changes training``."""
    also = f" (also {', '.join(change.also)})" if change.also else ""
    return f"{change.path} {_value(change.before)} -> {_value(change.after)}: {change.meaning.phrase}{also}"


def _value(value: Any) -> str:
    """Return a value as YAML's flow style writes it, long ones cut."""
    if value is ABSENT:
        return "absent"
    text = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _as_dict(comparison: Comparison, before: Path, after: Path) -> dict[str, Any]:
    """Return the comparison for machines; a side without the key has no `before` or no `after`."""
    changes: dict[str, list[dict[str, Any]]] = {}
    for group in GROUPS:
        changes[group] = [
            {
                "path": change.path,
                **{side: value for side, value in sides if value is not ABSENT},
                "meaning": change.meaning.phrase,
                "also": list(change.also),
            }
            for change in comparison.group(group)
            for sides in [(("before", change.before), ("after", change.after))]
        ]
    sides = {"before": (before, comparison.before), "after": (after, comparison.after)}
    headers = {side: {"recipe": str(name), **batch._asdict()} for side, (name, batch) in sides.items()}
    return {"same": not comparison.changes, **headers, "changes": changes}
