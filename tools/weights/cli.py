"""This module is the command `tc3 weights`. The commands of this group show what a checkpoint holds, and compare,
average, merge, convert (to and from Hugging Face) and reshard checkpoints.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console

from plugins.errors import CheckpointError
from tools.process.children import terminate_as_interrupt
from tools.process.waiting import Progressing
from tools.ranges import Number, overrides_option
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.weights.average import average, check_average
from tools.weights.convert import check_tokenizer, convert
from tools.weights.convert_plan import DTYPES, prepare
from tools.weights.inventory import (
    SALVAGED_LINE,
    Comparison,
    Group,
    compare,
    comparison_lines,
    faults,
    inventory,
    inventory_table,
    salvaged,
    summary_lines,
)
from tools.weights.merge import merge, plan_merge
from tools.weights.reshard import folder_in, reshard
from tools.weights.reshard_plan import plan_recipes, plan_stored
from tools.weights.source import Source, open_source, refuse_target

_RECIPES = (".yaml", ".yml")
SETTINGS = {"help_option_names": ["-h", "--help"]}
PIPED = 200  # columns
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
salvage_option = click.option(
    "--salvage",
    is_flag=True,
    help="Copy damaged tensors (with non-finite values or a wrong checksum) unchanged instead of refusing the "
    "checkpoint, and list them in the result.",
)
workers_option = click.option(
    "--workers",
    default=1,
    type=Number("files"),
    help="Write this many files at the same time.",
    show_default=True,
)
file_size_option = click.option(
    "--file-size",
    default=5.0,
    type=Number("file_gb"),
    help="Write files of at most this many GB (0.001 or more).",
    show_default=True,
)


@click.group(context_settings=SETTINGS)
def weights() -> None:
    """Inspect, average, merge, convert and reshard weights (an iteration of a run, or a Hugging Face folder)."""
    click.get_current_context().with_resource(terminate_as_interrupt())  # else half a folder would stay


@weights.command(
    "inspect", context_settings=SETTINGS, short_help="Show what a checkpoint holds, or how two checkpoints differ."
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--values",
    is_flag=True,
    help="Also read all values: show their norms, and look for non-finite values, copies of one tensor on "
    "several ranks that differ, and wrong checksums.",
)
@click.option(
    "--diff",
    "other",
    type=click.Path(path_type=Path),
    help="Compare CHECKPOINT with this other checkpoint, even if their parallel layouts differ.",
)
@json_option
def inspect_command(checkpoint: Path, values: bool, other: Path | None, as_json: bool) -> None:
    """Show what CHECKPOINT holds. The command reads only the headers of the files, which takes about a second for any
    size.

    Exit codes: 0 if the checkpoint has no fault (with --diff: if the two are equal), 1 if it has a fault (with --diff:
    if they differ), 2 for a wrong input.
    """
    source = open_source(checkpoint)
    if other is not None:
        comparison = compare(source, open_source(other), _progress())
        _print_comparison(comparison, checkpoint, other, as_json)
        sys.exit(not comparison.equal)
    groups = inventory(source, values, _progress() if values else lambda name: None)
    fault = next(iter(faults(source, checksums=values)), None)
    if as_json:
        click.echo(json.dumps(_as_dict(source, groups, fault)))
    else:
        console = Console(width=None if sys.stdout.isatty() else PIPED)  # names whole in a file
        for line in summary_lines(source, groups, fault, values):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(inventory_table(groups))
    wrong = any(group.values and (group.values.not_finite or group.values.differing) for group in groups)
    sys.exit(bool(fault or wrong))


@weights.command("average", context_settings=SETTINGS, short_help="Average checkpoints of one model.")
@click.argument("checkpoints", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="Write the average into this folder, which must not exist yet.",
)
@click.option(
    "--weights",
    "shares",
    help="Weight the checkpoints by these shares, which add up to 1, such as 0.5,0.3,0.2.  [default: equal shares]",
)
@salvage_option
def average_command(checkpoints: tuple[Path, ...], target: Path, shares: str | None, salvage: bool) -> None:
    """Write the average of the weights of CHECKPOINTS. CHECKPOINTS are iterations of one run, or of several runs in one
    layout.

    Sums are taken in float64 and rounded once. The optimizer's state is left out: the result is meant as the start of a
    new run (--set checkpoint.load_path=FOLDER). The command first reads all files and compares them with the checksums
    that were recorded when they were saved.
    """
    given = _numbers(shares) if shares is not None else None
    sources = [open_source(path) for path in checkpoints]
    check_average(sources, target, given)
    damaged = salvaged(sources, salvage, _progress())
    tensors = average(sources, target, given, _progress(), damaged)
    click.echo(f"{target}: {tensors} tensors, each the average of {len(checkpoints)}")
    _print_damaged(damaged)


@weights.command("merge", context_settings=SETTINGS, short_help="Merge LoRA adapters into the weights of the model.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Take the LoRA adapters' rank and alpha from this recipe.  [default: the recipe of CHECKPOINT's run]",
)
@file_size_option
@salvage_option
def merge_command(checkpoint: Path, target: Path, recipe: Path | None, file_size: float, salvage: bool) -> None:
    """Merge the LoRA adapters in CHECKPOINT (an iteration of a run with plugins.lora) into its weights, and write the
    weights of a model without adapters.

    TO is a folder that does not exist yet. A new run in any layout can start from TO (--set checkpoint.load_path=TO),
    and tc3 weights convert can convert TO to Hugging Face's form. The optimizer's state is left out.
    """
    source = open_source(checkpoint)
    plan = plan_merge(source, recipe, int(file_size * 1e9))
    refuse_target(target)
    damaged = salvaged([source], salvage, _progress())
    with Progressing(f"writing {target}", plan.bytes) as shown:
        merge(source, target, plan, _file_shown(shown), damaged)
    click.echo(
        f"{target}: {len(plan.headers):,} tensors, {plan.bytes / 1e9:,.3f} GB; "
        f"{len(plan.adapted):,} of them with their adapters, times {plan.scale:g}"
    )
    click.echo(f"for Hugging Face: {shlex.join(['tc3', 'weights', 'convert', str(target), 'FOLDER'])}")
    _print_damaged(damaged)


@weights.command(
    "convert",
    context_settings=SETTINGS,
    short_help="Convert weights between MindFormers' form and Hugging Face's form.",
)
@click.argument("source", metavar="FROM", type=click.Path(path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Convert the weights of this recipe's model.  [default: the recipe of FROM's run]",
)
@click.option(
    "--dtype",
    type=click.Choice(list(DTYPES)),
    help="Write the trained weights in this data type.  [default: the data type in which they are stored]",
)
@file_size_option
@workers_option
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Copy the tokenizer from this folder into the folder of the Hugging Face weights.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Read only the headers of the files, check names, shapes and types, and write nothing.",
)
@salvage_option
@json_option
def convert_command(
    source: Path,
    target: Path,
    recipe: Path | None,
    dtype: str | None,
    file_size: float,
    workers: int,
    tokenizer: Path | None,
    dry_run: bool,
    salvage: bool,
    as_json: bool,
) -> None:
    """Convert TeleChat3 weights from Hugging Face's form to MindFormers' form, or back. The form of FROM decides the
    direction of the conversion.

    FROM is a folder of safetensors with its index, or an iteration of a run; TO is a folder that does not exist yet.
    Every tensor of FROM is converted, or named as left out. After an interruption, the same command continues the
    conversion. The command first reads all of FROM and compares it with its checksums.
    """
    weights_in = open_source(source)
    if tokenizer and weights_in.form == "Hugging Face":
        raise click.UsageError(
            "--tokenizer copies a tokenizer beside weights for Hugging Face, but FROM is already in that form"
        )
    conversion = prepare(weights_in, recipe, DTYPES[dtype] if dtype else None, int(file_size * 1e9))
    if tokenizer:
        check_tokenizer(tokenizer, conversion.sizes.hf["vocab_size"])
    damaged: list[str] = []
    if not dry_run:
        refuse_target(target)
        damaged = salvaged([weights_in], salvage, _progress())
        with Progressing(f"writing {target}", conversion.plan.bytes) as shown:
            plan, sizes, ends = conversion.plan, conversion.sizes, conversion.ends
            kept = load_recipe(conversion.recipe)
            convert(weights_in, target, plan, sizes, workers, tokenizer, ends, _file_shown(shown), damaged, kept)
    if as_json:
        click.echo(json.dumps(conversion.as_dict(source, target) | {"salvaged": damaged}))
        return
    for line in conversion.lines(source, target, dry_run, tokenizer is not None):
        click.echo(line)
    _print_damaged(damaged)


@weights.command("reshard", context_settings=SETTINGS, short_help="Write a checkpoint in another parallel layout.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(path_type=Path))
@click.option(
    "--recipe",
    required=True,
    type=click.Path(path_type=Path),
    help="Write the new checkpoint TO in the parallel layout of this recipe.",
)
@overrides_option
@workers_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Plan the new files from the headers of CHECKPOINT's files, and write nothing. With --dry-run, CHECKPOINT may "
    "also be a recipe.",
)
@salvage_option
@json_option
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
    """Write CHECKPOINT, which is one iteration of a run, in the layout of a recipe. The command needs no device.

    The command reshards weights, optimizer moments, the routers' biases, moved experts and counters. The command writes
    checkpoint/iteration_* with checksums into TO, and the files of the old run that a resumed run compares; each rank
    of the new run reads only its own part. With --dry-run, CHECKPOINT may be a recipe: then the command plans for the
    checkpoint that a run of this recipe would save.
    """
    damaged: list[str] = []
    new = apply_overrides(load_recipe(recipe), overrides)
    if checkpoint.suffix in _RECIPES:
        if not dry_run:
            raise CheckpointError(
                f"{checkpoint}: this is a recipe, which holds no weights; add --dry-run to plan what its run would save"
            )
        planned, written = plan_recipes(load_recipe(checkpoint), new), target
    else:
        source = open_source(checkpoint)
        planned, written = plan_stored(source, new), folder_in(target, source)
        if not dry_run:
            refuse_target(target)
            damaged = salvaged([source], salvage)
            with Progressing(f"writing {target}", planned.plan.bytes) as shown:
                reshard(source, target, planned.plan, workers, _file_shown(shown), damaged)
    if as_json:
        click.echo(json.dumps(planned.as_dict(checkpoint, written, recipe) | {"salvaged": damaged}))
        return
    for line in planned.lines(checkpoint, written, recipe, dry_run, overrides):
        click.echo(line)
    _print_damaged(damaged)


def _print_damaged(damaged: Sequence[str]) -> None:
    for line in damaged:
        click.echo(SALVAGED_LINE.format(line))


def _numbers(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise CheckpointError(
            f"--weights {text}: shares must be numbers with commas between them, such as 0.5,0.3,0.2"
        ) from None


def _progress() -> Callable[[str], None]:
    """Show names on stderr if it is a terminal, each over the last."""
    if not sys.stderr.isatty():
        return lambda name: None
    return lambda name: click.echo(f"\r\033[K{name}", nl=False, err=True)


def _file_shown(shown: Progressing) -> Callable[[int, str], None]:
    """Return what shows the last written file, and the bytes of all."""
    return lambda done, file: shown.show(f"{file} is written", done)


def _print_comparison(comparison: Comparison, a: Path, b: Path, as_json: bool) -> None:
    if as_json:
        content = {"equal": comparison.equal, "a": str(a), "b": str(b), **asdict(comparison)}
        for change in content["changes"]:  # JSON knows neither infinity nor NaN
            change.update({key: None for key in ("relative", "largest") if not math.isfinite(change[key])})
        click.echo(json.dumps(content, allow_nan=False))
        return
    for line in comparison_lines(comparison, a, b):
        click.echo(line)


def _as_dict(source: Source, groups: list[Group], fault: str | None) -> dict[str, object]:
    return {
        "path": str(source.path),
        "form": source.form,
        "step": source.step,
        "ranks": source.ranks,
        "sealed": source.sealed,
        "fault": fault,
        "moved_experts": list(source.placements),
        "groups": [asdict(group) | {"elements": group.elements} for group in groups],
    }
