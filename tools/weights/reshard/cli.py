"""`tc3 weights reshard`: a checkpoint in the layout of another recipe."""

from __future__ import annotations

import json
from pathlib import Path

import click

from plugins.errors import CheckpointError
from tools.process.waiting import Progressing
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.weights.convert.run import refuse_target
from tools.weights.inventory import SALVAGED_LINE, salvaged
from tools.weights.reshard.prepare import plan_recipes, plan_stored
from tools.weights.reshard.run import folder_in, reshard
from tools.weights.source import open_source

_RECIPES = (".yaml", ".yml")


@click.command(
    "reshard", context_settings={"help_option_names": ["-h", "--help"]}, short_help="In the layout of another recipe."
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(path_type=Path))
@click.option("--recipe", required=True, type=click.Path(path_type=Path), help="Whose layout TO is to have.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a value of the recipe.")
@click.option("--workers", default=1, type=Number("files"), help="Files written at once.", show_default=True)
@click.option("--dry-run", is_flag=True, help="Plan by headers alone, or by recipes; write nothing.")
@click.option("--salvage", is_flag=True, help="Take damaged numbers as they are, and say so in the result.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def reshard_command(
    checkpoint: Path,
    target: Path,
    recipe: Path,
    overrides: tuple[str, ...],
    workers: int,
    dry_run: bool,
    salvage: bool,
    as_json: bool,
) -> None:
    """Write CHECKPOINT, one iteration of a run, in the layout that a run of the recipe has, without any device.

    Weights, moments, the routers' biases, moved experts and counters go along. TO gets checkpoint/iteration_*, sealed,
    and of the old run what a resume compares; each rank then reads its own part alone. With --dry-run, CHECKPOINT may
    be a recipe: what its run would save is planned.
    """
    damaged: list[str] = []
    new = apply_overrides(load_recipe(recipe), overrides)
    if checkpoint.suffix in _RECIPES:
        if not dry_run:
            raise CheckpointError(
                f"{checkpoint}: a recipe; --dry-run plans what its run would save, nothing is written"
            )
        planned, written = plan_recipes(load_recipe(checkpoint), new), target
    else:
        source = open_source(checkpoint)
        planned, written = plan_stored(source, new), folder_in(target, source)
        if not dry_run:
            refuse_target(target)
            damaged = salvaged([source], salvage)
            with Progressing(f"writing {target}", planned.plan.bytes) as shown:
                reshard(
                    source,
                    target,
                    planned.plan,
                    workers,
                    lambda done, file: shown.show(f"{file} is written", done),
                    damaged,
                )
    if as_json:
        click.echo(json.dumps(planned.as_dict(checkpoint, written, recipe) | {"salvaged": damaged}))
        return
    for line in [*planned.lines(checkpoint, written, recipe, dry_run), *map(SALVAGED_LINE.format, damaged)]:
        click.echo(line)
