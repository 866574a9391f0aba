"""This module is the command `tc3 data imbalance`. The command shows how evenly a corpus loads the devices of a
recipe.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from tools.files.figure import check_ending
from tools.hardware import DEFAULT_HARDWARE
from tools.ranges import Number, overrides_option

SETTINGS = {"show_default": True, "help_option_names": ["-h", "--help"]}
STEPS_HELP = (
    "Analyse this many training steps, spread evenly over the run.  [default: as many as can be analysed in a few "
    "seconds]"
)
WINDOW_HELP = (
    "Let the balancing move samples between W consecutive steps, so that a step may get other samples than without "
    "balancing.  [default: the recipe's window, or 1]"
)


@click.command(
    "imbalance",
    context_settings=SETTINGS,
    short_help="Report how unevenly the documents of a corpus load the devices in training.",
)
@click.argument("prefix", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    required=True,
    type=click.Path(path_type=Path),
    help="Take the parallel layout and the model from this recipe; the model determines the compute cost of a sample.",
)
@overrides_option
@click.option("--steps", type=Number("steps"), metavar="N", help=STEPS_HELP)
@click.option("--window", type=Number("window"), metavar="W", help=WINDOW_HELP)
@click.option(
    "--cluster", default=DEFAULT_HARDWARE, metavar="NAME|FILE", help="Predict the step time in seconds on this cluster."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw a picture of the document lengths and of the loads of ranks and micro-batches in one step to this file "
    "(.svg or .png).",
)
def imbalance_command(
    prefix: Path,
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    window: int | None,
    cluster: str,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Report how evenly the documents of PREFIX.idx load the devices of a recipe, without and with the plugin
    attention_balance.

    The command reads only PREFIX.idx and no token of PREFIX.bin. PREFIX takes the place of the recipe's data_path. The
    command needs about 12 bytes of memory per document. Step times are predicted by a model, not measured.
    """
    from rich.console import Console

    from tools.data.imbalance import render as imbalance_render
    from tools.data.imbalance.measure import imbalance
    from tools.layout.resolve import resolve
    from tools.process.waiting import CountingReporter
    from tools.recipe.load import load_recipe
    from tools.recipe.override import apply_overrides
    from tools.schema.keys import refuse_keys

    if picture:
        check_ending(picture)
    loaded = resolve(apply_overrides(load_recipe(recipe), overrides), partial(click.echo, err=True))
    refuse_keys(loaded)
    with CountingReporter() as reporter:
        found = imbalance(prefix, loaded, steps, window, reporter, cluster)
    if picture:
        click.echo(f"drawn: {imbalance_render.draw(found, picture)}", err=True)
    if as_json:
        click.echo(json.dumps(imbalance_render.as_json(found)))
    else:
        imbalance_render.print_text(found, Console(soft_wrap=True, highlight=False, markup=False))
