"""This module is the command `tc3 dryrun`, which compiles a recipe for all its devices on this CPU. The exit code is 0
if there is no problem, 1 for errors of the recipe, and 2 for wrong arguments.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from plugins.errors import RecipeError
from tools.check.check import check_recipe
from tools.check.differences import modelled
from tools.dryrun.compiles import compile_all, refusal_of
from tools.dryrun.plan import plan_jobs, resizing, without_files
from tools.dryrun.quick import quick_plan
from tools.dryrun.render import draw, render
from tools.dryrun.report import loads_asked, report_of
from tools.estimate.loads import HELP
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, Room, known_errors, require_known
from tools.estimate.memory.time_line import TimeLine, check_form, write_line
from tools.estimate.time_model import TimeModel
from tools.files.atomic import check_writable
from tools.files.figure import check_ending
from tools.hardware import DEFAULT_HARDWARE, load_hardware
from tools.hardware.units import GIB
from tools.layout.resolve import resolve
from tools.measured import require_memory
from tools.memory import Proposal, explain
from tools.process.waiting import saying
from tools.prove.cli import proof_of, require_collectives
from tools.prove.cli import render as render_proof
from tools.ranges import Number, jobs_option, overrides_option
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.schema.versions import require_verified, unverified_option

ALL = "all-stages"
_WIDTH = 130  # of tables in a file or pipe


class Ranks(click.ParamType):
    """A `Ranks` is the type of the option `--ranks`: `all-stages`, or ranks such as `0,512` as integers."""

    name = f"{ALL}|R,R"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...] | None:
        """Return the ranks in the option's value as integers after a check; return None for `all-stages`."""
        if value == ALL or not isinstance(value, str):
            return None if value == ALL else value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() for word in words):
            self.fail(f"{ALL} or global ranks such as 0,512 are needed, but {value!r} was given", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.command("dryrun", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--ranks",
    type=Ranks(),
    default=ALL,
    show_default=True,
    help="Compile these global ranks, such as 0,512; all-stages compiles one rank for each kind of pipeline stage. If "
    "two of the compiled ranks belong to one communication group, the order of their collectives is compared.",
)
@click.option(
    "--devices",
    type=Number("devices"),
    help="Compile for this many devices instead of the recipe's number; data_parallel is changed to match.",
)
@click.option(
    "--micro-batches",
    type=Number("micro_batches"),
    help="Compile the pipeline with this many micro-batches. By default, the number is twice the number of "
    "pipeline stages, or the recipe's number of micro-batches if that is smaller.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Compile each kind of layer only once, and compose the report on each pipeline stage from these results.",
)
@click.option("--loads", metavar="LOADS", help=HELP)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="BUNDLE.zip",
    help="Reduce the memory limit by the memory that framework and driver use, as tc3 firsthour measured it with "
    "RECIPE and wrote it into BUNDLE.zip.",
)
@overrides_option
@jobs_option
@click.option(
    "--prove",
    is_flag=True,
    help="Also check the gradients as tc3 prove does. For this check the command also compiles, for each rank that it "
    "compiles anyway, a neighbouring rank along each axis of the device mesh and the last rank of the stage.",
)
@click.option("--no-cache", is_flag=True, help="Compile everything again instead of reusing earlier compiles.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.option(
    "--picture",
    type=click.Path(path_type=Path),
    help="Draw the memory and the communication traffic of each pipeline stage to this file (.svg or .png).",
)
@click.option(
    "--time-line",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the memory in use at each forward and backward pass on the pipeline stage with the highest peak to this "
    "file (.svg or .png), or write the values to this file (.json).",
)
@unverified_option
def dryrun(
    recipe: Path,
    ranks: tuple[int, ...] | None,
    devices: int | None,
    micro_batches: int | None,
    quick: bool,
    loads: str | None,
    measured: Path | None,
    overrides: tuple[str, ...],
    jobs: int | None,
    prove: bool,
    no_cache: bool,
    as_json: bool,
    picture: Path | None,
    time_line: Path | None,
) -> None:
    """Compile the training step of RECIPE for all its devices, without needing any device.

    MindFormers builds the step as in a training, and MindSpore's own front end shards it, for one rank of each kind of
    pipeline stage. The report shows the memory of every device, collectives and their ranks, Sends and Receives, or the
    error with which MindSpore refuses the recipe.

    The graph assumes that routing is even. The memory that --loads adds for uneven routing is predicted by the model of
    `tc3 memory`.

    Exit codes: 0 it compiles, fits and does not hang; 1 one of these fails (also if only at some step of --loads), or
    it is unknown whether it fits (also because --ranks leaves out a stage), or --prove finds a violation; 2 a wrong
    input; 130 interrupted.
    """
    if picture:
        check_ending(picture)
        check_writable(picture)
    if time_line:
        check_form(time_line)
    if quick and (ranks or micro_batches):
        raise click.UsageError("--quick chooses ranks and micro-batches itself: leave out --ranks and --micro-batches")
    require_verified()
    reserve = require_memory(measured, recipe, partial(click.echo, err=True)).reserve if measured else 0
    loaded, sets = _sized(recipe, overrides, devices)
    with saying("checking the recipe"):
        refused = [str(finding) for finding in check_recipe(loaded).errors]
    if said := modelled(loaded):
        click.echo(said, err=True)
    if not refused:
        loaded = resolve(loaded, partial(click.echo, err=True))
        asked = loads_asked(loads, loaded) if loads is not None else None
        plan = quick_plan(loaded) if quick else plan_jobs(loaded, ranks, micro_batches)
        if quick and plan.job_of:
            click.echo("--quick: the recipe has one stage, which is compiled whole", err=True)
        if prove:
            require_collectives(loaded)
        results = compile_all(plan, jobs, not no_cache, texts=prove)
        refused = [refusal_of(result, loaded) for result in results if "error" in result]
    if refused:
        _refuse(refused, as_json)
    lines: dict[int, TimeLine] = {}
    report = report_of(loaded, plan, results, View(loaded).node, lines, asked, round(reserve))
    if _exceeds(report):
        words = advice(loaded, report["stages"][0]["memory"]["limit"], sets, measured, loads)
        report["problems"].append(f"context.max_device_memory: {words}")
    if picture:
        draw(report, picture)
    if time_line:
        fullest = max(lines, key=lambda stage: lines[stage].peak)
        title = f"{report['recipe']}, stage {fullest}, compiled{' (quick)' if quick else ''}"
        write_line(lines[fullest], title, report["stages"][0]["memory"]["limit"], time_line)
    proof = partial(proof_of, loaded, plan, results, jobs, not no_cache, as_json) if prove else None
    sys.exit(1 if _tell(report, proof, as_json) else 0)


def _exceeds(report: Mapping[str, Any]) -> bool:
    """Return whether a stage does not fit at even loads, or at some step of the loads that were asked for."""
    steps = (report.get("loads") or {}).get("steps", {})
    return bool(steps.get("need_more")) or any(stage["fit"] == DOES_NOT_FIT for stage in report["stages"])


def _sized(path: Path, overrides: Sequence[str], devices: int | None) -> tuple[Recipe, list[str]]:
    """Return the recipe for the devices, and the texts of `--set` that make it of its file."""
    written = apply_overrides(load_recipe(path), overrides)
    sizes = resizing(written, devices)
    return without_files(apply_overrides(written, sizes)), [*overrides, *sizes]


_SHOWN = 3  # changes of each sort


def advice(
    recipe: Recipe, limit: int, overrides: Sequence[str] = (), measured: Path | None = None, loads: str | None = None
) -> str:
    """Return one line of text that names the single changes with which a recipe fits into `limit` bytes, and the memory
    that it needs with other changes. The changes are those that `tc3 memory --explain-oom` proposes and `tc3 check`
    does not refuse. The texts of `--set` that made the recipe, `overrides`, are part of the command that is named, as
    are the bundle of `--measured` and the text of `--loads`; of several texts for one key the last one counts. The
    option `--time-line` is not part of the named command, because this command would replace the compiled bytes in the
    file by modelled bytes.
    """
    room, times = (
        Room(limit, "context.max_device_memory", known_errors().margin),
        TimeModel(load_hardware(DEFAULT_HARDWARE)),
    )
    try:
        require_known(recipe)
        found = [one for one in explain(recipe, times, room, pairs=False, loads=loads) if not one.refused]
    except RecipeError as error:
        return f"what would make it fit is unknown: {error}"
    enough = [one for one in found if one.fit == FITS]
    short = [one for one in found if one.fit != FITS]
    words = f"fits by the memory model: {_named(enough)}" if enough else "no single change fits by the memory model"
    rest = f"; not enough by itself: {_named(short)}" if short else ""
    sets = {one.partition("=")[0].strip(): f"--set {shlex.quote(one)}" for one in overrides}
    given = {"--measured": measured, "--loads": loads}
    options = [*sets.values(), *(f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value)]
    options.append("--explain-oom")
    command = f"tc3 memory {shlex.quote(recipe.source)} {' '.join(options)}"
    return f"{words}{rest}; {command} has their keys and costs, and pairs"


def _named(changes: Sequence[Proposal]) -> str:
    return ", ".join(f"{change.name} ({change.peak / GIB:.1f} GiB)" for change in changes[:_SHOWN])


def _tell(report: dict[str, Any], proof: Callable[[], dict[str, Any]] | None, as_json: bool) -> bool:
    """Print the report, and the proof that is made then; return whether there is a problem."""
    if not as_json:
        _print(render, report)
    if proof:
        report["proof"] = proof()
        if not as_json:
            _print(render_proof, report["proof"])
    if as_json:
        click.echo(json.dumps(report))
    return bool(report["problems"] or (proof and report["proof"]["problems"]))


def _print(render_it: Callable[[Mapping[str, Any], Console], None], report: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    render_it(report, console if console.is_terminal else Console(highlight=False, width=_WIDTH))


def _refuse(lines: Sequence[str], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"problems": list(lines)}))
    else:
        for line in lines:
            click.echo(line)
    sys.exit(1)
