"""`tc3 ep-report`: expert-parallel communication of a recipe on a cluster; exit code 0, or 2 for a wrong input."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from plugins.errors import RecipeError
from tools.estimate.configuration import DEFAULT_SKEW
from tools.estimate.efficiency import cluster as find_cluster
from tools.files.figure import check_ending
from tools.hardware import DEFAULT_HARDWARE
from tools.layout.advise import advise
from tools.layout.resolve import resolve
from tools.ranges import Number
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import PARALLEL, View


class Degrees(click.ParamType):
    """``16,32`` as a tuple of integers."""

    name = "N,N"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Split and check."""
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"{value!r}: want EP degrees such as 16,32,64", param, ctx)
        return tuple(int(Number("devices").convert(word, param, ctx)) for word in words)


@click.command("ep-report", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--cluster", default=DEFAULT_HARDWARE, show_default=True, metavar="NAME|FILE", help="Its devices.")
@click.option("--hardware", hidden=True, help="The old name of --cluster.")
@click.option(
    "--skew",
    default=DEFAULT_SKEW,
    show_default=True,
    type=Number("skew"),
    help="Load of the busiest rank of an EP group over the mean.",
)
@click.option("--ep", type=Degrees(), help="EP degrees to compare; the recipe's own by default.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option("--picture", type=click.Path(path_type=Path), help="Draw the streams of a layer (.svg or .png).")
def ep_report(
    recipe: Path,
    cluster: str,
    hardware: str | None,
    skew: float,
    ep: tuple[int, ...] | None,
    overrides: tuple[str, ...],
    as_json: bool,
    picture: Path | None,
) -> None:
    """Say what expert parallelism of RECIPE costs, and which dispatch mode and overlap to set.

    For each mode: bytes on each class of links, predicted time, and the share of EP communication that is waited for,
    without and with overlap. All numbers are modelled.
    """
    if picture and ep and len(ep) > 1:
        raise click.UsageError("--picture draws one EP degree: give --ep one number")
    if picture:
        check_ending(picture)
    if hardware:
        click.echo("--hardware is called --cluster now", err=True)
    loaded, devices = load_recipe(recipe), find_cluster(hardware or cluster)
    changed = resolve(apply_overrides(loaded, overrides), partial(click.echo, err=True), layout="even", dispatch=False)
    advices = []
    for degree in ep or [None]:
        try:
            advices.append(advise(_of_degree(changed, degree) if degree else changed, devices, skew))
        except RecipeError as error:
            raise RecipeError(f"--ep {degree}: {error}" if degree else str(error)) from None
    if picture:
        from tools.ep_report.render import draw

        click.echo(f"drawn: {draw(advices[0], picture)}", err=True)
    from tools.ep_report.render import content, print_text

    if as_json:
        click.echo(json.dumps(content(advices, str(recipe))))
    else:
        print_text(advices, str(recipe), Console(soft_wrap=True, highlight=False, markup=False))


def _of_degree(recipe: Recipe, degree: int) -> Recipe:
    """The recipe with another EP degree, also where it writes none."""
    if View(recipe).has((*PARALLEL, "expert_parallel")):
        return apply_overrides(recipe, [f"parallel_config.expert_parallel={degree}"])
    changed = copy.deepcopy(recipe)
    changed.setdefault("parallel_config", {})["expert_parallel"] = degree
    return changed
