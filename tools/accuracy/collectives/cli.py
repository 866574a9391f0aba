"""`tc3 accuracy collectives`: exit code 0 equal, 1 different, 2 unknown or a wrong input."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from plugins.errors import RecipeError
from tools.process.signals import terminate_as_interrupt
from tools.ranges import Number
from tools.schema.versions import require_verified, unverified_option

if TYPE_CHECKING:
    from tools.accuracy.collectives.compare import Verdict

_SHOWN = 10  # differences of a rank


@click.command("collectives")
@click.argument("recipe", metavar="RECIPE|RUN", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="Keep the run's files in this folder.")
@click.option("--jobs", type=Number("workers"), help="Compiles at a time; as many as fit by default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@unverified_option
def collectives_command(
    recipe: Path, overrides: tuple[str, ...], keep: Path | None, jobs: int | None, as_json: bool
) -> None:
    """Compare the collectives that CPU processes execute with those that `tc3 dryrun` reports.

    RECIPE is trained for two steps as MindSpore's sharded graph, on made-up data; a recipe for Ascend as the mini that
    keeps its parallel strategy (`tc3 train --mini --parallel`). Every rank of the same recipe is compiled, too. Name,
    ranks, type and shape of each collective, tags of Sends and Receives, and the order must agree for every rank.
    Instead of a recipe, the folder of a sharded run may be given: nothing is trained then.

    Exit codes: 0 equal; 1 they differ, line by line; 2 unknown, because something did not run, or a wrong input.
    """
    from tools.accuracy.collectives import compare, run
    from tools.accuracy.equivalence.runs import RunFailedError

    require_verified()
    if recipe.is_dir():
        if overrides or keep:
            raise click.UsageError("--set and --keep are for a recipe: a run's folder is compared as it is")
        _tell(recipe, compare.compare_run(recipe, jobs), as_json)
    flat = run.sharded_recipe(recipe, overrides)
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise RecipeError(f"--keep {keep}: the folder is not empty")
    with terminate_as_interrupt(), _folder(keep) as folder:
        click.echo(f"{flat.source}: training {run.STEPS} steps", err=True)
        try:
            verdict = compare.compare_run(run.train(flat, Path(folder)), jobs)
        except RunFailedError as error:
            verdict = compare.Verdict(compare.UNKNOWN, f"the training failed: {error}")
    _tell(recipe, verdict, as_json)


def _folder(keep: Path | None) -> AbstractContextManager[Path | str]:
    return nullcontext(keep.absolute()) if keep else tempfile.TemporaryDirectory(prefix="tc3-collectives-")


def _tell(what: Path, verdict: Verdict, as_json: bool) -> NoReturn:
    """Print the verdict and end with its exit code."""
    from tools.accuracy.collectives.compare import DIFFERS, EQUAL

    if as_json:
        click.echo(json.dumps({"recipe": str(what), **verdict.as_json()}))
    else:
        for rank in verdict.ranks:
            names = ", ".join(f"{count} {name}" for name, count in rank.by_name.items())
            click.echo(f"rank {rank.rank}: {rank.calls} collectives, {rank.bytes / 2**20:.2f} MiB: {names}")
            for line in rank.differences[:_SHOWN]:
                click.echo(f"  {line}")
            if len(rank.differences) > _SHOWN:
                click.echo(f"  and {len(rank.differences) - _SHOWN} more (--json has all)")
        click.echo(f"{verdict.word}: {verdict.why}" if verdict.why else verdict.word)
    sys.exit({EQUAL: 0, DIFFERS: 1}.get(verdict.word, 2))
