"""This module is the command group `tc3 experts`; the exit code of its commands is 0, or 2 for a wrong input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from tools.files.figure import check_ending, check_page
from tools.hardware import DEFAULT_HARDWARE
from tools.process.children import terminate_as_interrupt
from tools.ranges import Number

EVERY_HELP = (
    "In the simulation, plan the placement of the experts on devices anew every N steps.  [default: "
    "plugins.expert_balance.every, or 20]"
)

SPARE_HELP = (
    "Assume N spare slots on each device for copies of hot experts. If N is above 0, the report also simulates two "
    "placement policies that use spare slots: swaps and EPLB.  [default: plugins.expert_balance.spare, or 0]"
)


@click.group("experts", context_settings={"help_option_names": ["-h", "--help"]})
def experts() -> None:
    """Report the expert loads of a run and the gain of moving experts, or restore a checkpoint in which experts have
    moved.
    """
    click.get_current_context().with_resource(terminate_as_interrupt())  # else half a folder would stay


@experts.command(
    "report",
    short_help="Report the loads of experts and devices, the time spent waiting for the most loaded device, and the "
    "time that other placements of the experts would save.",
)
@click.argument("run", metavar="RUN|LOG", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Predict the step time of this recipe.  [default: RUN/recipe.yaml]",
)
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Predict step times for this cluster.",
)
@click.option("--every", type=Number("steps"), metavar="N", help=EVERY_HELP)
@click.option("--spare", type=Number("slots"), metavar="N", help=SPARE_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    help="Write the report as an HTML page with tables and pictures to this file.",
)
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the loads of the devices over the recorded steps to this file (.svg or .png).",
)
def report_command(
    run: Path,
    recipe: Path | None,
    cluster: str,
    every: int | None,
    spare: int | None,
    as_json: bool,
    html: Path | None,
    picture: Path | None,
) -> None:
    """Report how unevenly the experts of a run load their devices, as recorded in its metrics/expert_load.jsonl.

    RUN is the folder of a run with plugins.expert_balance; LOG is such a run's expert_load.jsonl. The command replays
    policies of moving experts on the recorded loads: a policy plans at each step with the loads up to this step, and is
    judged by the steps that follow. Seconds are modelled.
    """
    from rich.console import Console

    from tools.experts.render import content, draw, page, print_text
    from tools.experts.study import open_run, study

    if picture:
        check_ending(picture)
    if html:
        check_page(html)
    source = open_run(run, recipe, partial(click.echo, err=True))
    found = study(source, cluster, every, spare)
    if picture:
        click.echo(f"drawn: {draw(found, picture)}", err=True)
    if html:
        from tools.files.atomic import write_atomically

        write_atomically(html, page(found))
        click.echo(f"written: {html}", err=True)
    if as_json:
        click.echo(json.dumps(content(found)))
    else:
        print_text(found, Console(soft_wrap=True, highlight=False, markup=False))


@experts.command(
    "restore-order",
    short_help="Copy a checkpoint of a run that moved experts between devices, and put "
    "the experts back in their original order.",
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path),
    help="Write the copy into this folder, which must not exist yet.  [default: RUN/checkpoint_in_order]",
)
@click.option(
    "--salvage",
    is_flag=True,
    help="Copy damaged tensors (with non-finite values or a wrong checksum) unchanged instead of refusing the "
    "checkpoint, and list them in the result.",
)
def restore_order_command(checkpoint: Path, target: Path | None, salvage: bool) -> None:
    """Write CHECKPOINT, one iteration of a run with plugins.expert_balance, with its experts in logical order.

    Weights and optimizer moments change their rows and keep their bits. Software that does not know moved experts can
    read the result: a run without the plugin, MindFormers, or an export. The command does not change CHECKPOINT itself.
    Without --to the result goes to RUN/checkpoint_in_order. The command first reads all files and compares them with
    the checksums that were recorded when they were saved.
    """
    from tools.experts.restore import restore_order, target_of
    from tools.weights.inventory import SALVAGED_LINE

    target = target or target_of(checkpoint)
    layers, damaged = restore_order(checkpoint, target, partial(click.echo, err=True), salvage)
    click.echo(f"{target}: the experts of {layers} layers are back at the slots of their own numbers")
    for line in damaged:
        click.echo(SALVAGED_LINE.format(line))
    click.echo(f"go on without the plugin: tc3 train RECIPE --resume {target} --set plugins.expert_balance=False")
