"""This module is the command group `tc3 search RECIPE`; the exit code of its commands is 0 with a plan, 1 without a
plan, and 2 for a wrong input.

This module defines the commands `pipeline` and `layout`, which place layers on stages, and imports the other commands
of the group.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from tools.estimate.efficiency import cluster as find_cluster
from tools.estimate.efficiency import error_lines, known_error
from tools.files.atomic import check_writable, keep_existing, real_path, write_atomically
from tools.files.figure import check_ending
from tools.hardware import DEFAULT_HARDWARE, Hardware
from tools.layout.budget import Budget, interruptible
from tools.layout.instance import read_instance
from tools.layout.offsets import LayoutFile, is_layout_file, layout_at, maker_of, path_of, write_layout
from tools.layout.resolve import EFFORT, TIME_LIMIT, NothingFits, layout_text, make_layout
from tools.process.waiting import Progressing
from tools.ranges import Number
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import AUTO, OFFSET, look
from tools.schema.stages import RECOMPUTE
from tools.search.command import space_command
from tools.search.measured import calibrate_command, explain, validate
from tools.search.options import (
    PlanProgress,
    RecipeOrCommand,
    effort_option,
    effort_within,
    json_option,
    margin_option,
    overrides_option,
    seed_option,
    tell_end,
    time_limit_option,
)
from tools.search.overlay import keep_files_of


@click.command("layout")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--cluster",
    default=DEFAULT_HARDWARE,
    show_default=True,
    metavar="NAME|FILE",
    help="Predict step times and memory for this cluster.",
)
@effort_option(EFFORT)
@time_limit_option(TIME_LIMIT, "Stop the search after this time, should the effort take longer.")
@margin_option
@overrides_option()
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the pipeline layout that the search found to this file.  [default: RECIPE.layout.yaml]",
)
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite the output file (--out, or RECIPE.layout.yaml) even if it is not a layout file.",
)
@seed_option
@json_option
def layout(
    recipe: Path,
    cluster: str,
    effort: float | None,
    time_limit: float,
    memory_margin: float | None,
    overrides: tuple[str, ...],
    out: Path | None,
    force: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Assign each layer of RECIPE to a stage, choose its recomputation, and write this layout to a file beside RECIPE.

    A recipe whose model.model_config.offset is `auto` reads the written layout file at every launch. The command
    ignores the recipe's own offset and recompute tables; it uses the recipe's degrees, batch, schedule and memory
    limit, so the layout file must be made anew when these change. If the file exists and holds a faster layout for the
    same run and cluster, it is kept. Predicted memory stays under the limit by a margin, by default the estimator's
    known error. With the same effort the layout is the same on every machine, unless the time limit ends the search,
    which the output then says.

    Exit codes: 0 a layout was found; 1 no layout fits; 2 a wrong input; 130 interrupted, with the best layout so far.
    """
    loaded = apply_overrides(load_recipe(recipe), overrides)
    keep_files_of(recipe, "--out", out)
    own = path_of(loaded.source)
    path = out or own
    if not is_layout_file(path):
        keep_existing("--out" if out else "the layout file", path, force)
    check_writable(path)
    budget = Budget(effort_within(effort, EFFORT, time_limit), time_limit)
    with interruptible(budget), Progressing(f"searching for a layout, effort {budget.effort:g}"):
        try:
            found = make_layout(loaded, cluster, budget, seed, memory_margin, path)
        except NothingFits as error:
            click.echo(f"tc3: {recipe}: {error}", err=True)
            sys.exit(1)
    words = ["tc3", "search", "layout", str(recipe), "--cluster", cluster, "--effort", f"{budget.effort:g}"]
    words += [] if memory_margin is None else ["--memory-margin", f"{memory_margin:g}"]
    words += ["--seed", str(seed)] if seed else []
    words += [word for item in overrides for word in ("--set", item)]
    before, command = layout_at(path), " ".join(shlex.join(words).split())  # one line: it is a comment
    kept = before is not None and _without_times(found) == _without_times(before)
    if found != before:
        write_layout(found, path, maker_of(path) if kept else command)
    text = layout_text(loaded, found)
    hardware = find_cluster(cluster)
    if as_json:
        known = known_error(hardware)
        more = {"layout": text, "path": str(path), "known_step_errors": known.as_json() if known else None}
        click.echo(json.dumps({**asdict(found), **more}))
    else:
        _print(found, text, hardware)
    anew = ", with its times predicted anew" if found != before else ""
    said = f"kept, because this search found no faster layout{anew}" if kept else "written"
    click.echo(f"{said}: {path}", err=True)
    if real_path(path) != real_path(own):
        click.echo(f"a launch reads only {own}: move the layout there to use it", err=True)
    elif look(loaded, OFFSET) != AUTO:
        click.echo("the recipe reads it once its model.model_config.offset is `auto`", err=True)
    tell_end(budget.cut, budget.stopped, "layout ")


def _without_times(layout: LayoutFile) -> LayoutFile:
    """Return a layout without the seconds, which other efficiencies of the cluster change."""
    predicted = layout.predicted if isinstance(layout.predicted, dict) else {}
    return replace(layout, predicted={name: predicted[name] for name in predicted if name not in ("step_s", "bound_s")})


def _print(found: LayoutFile, text: str | None, hardware: Hardware) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    predicted = found.predicted
    step, bound = predicted["step_s"], predicted["bound_s"]
    proven = f"no layout is more than {1 - bound / step:.1%} faster" if bound else "no bound on other layouts is known"
    lines = {"layout (Megatron)": text} if text else {}
    lines |= {name: getattr(found, name) for name in ("offset", *RECOMPUTE)}
    lines["step"] = f"{step:.3f} s; {proven}"
    lines["memory by stage, GiB"] = " ".join(f"{stage:.1f}" for stage in predicted["stage_gib"])
    margin = predicted["memory_margin"]
    lines["memory limit, GiB"] = f"{predicted['cap_gib']:.1f}, of which a margin of {100 * margin:.1f} % stays free"
    lines["fits"] = f"so near to the limit {predicted['fits']} published runs would have"
    for name, value in lines.items():
        console.print(f"{name:<22} {value}")
    for line in error_lines(hardware):
        console.print(line)


# of the time limit: starting Python and HiGHS's last look at the clock
_RESERVE = 3.0


class SearchOrCommand(RecipeOrCommand):
    """A `SearchOrCommand` is the command group `tc3 search`. If the first argument of the command is a recipe, the
    group runs the search for this recipe.
    """

    of_recipe = space_command


@click.group(cls=SearchOrCommand, context_settings={"help_option_names": ["-h", "--help"]})
def search() -> None:
    """Find parallel strategies for a recipe without a device."""


@search.command()
@click.argument("instance", type=click.Path(path_type=Path), metavar="INSTANCE.json")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Write the plan of the pipeline that the search found to this file.",
)
@effort_option("high")
@time_limit_option(600.0, "Stop the command (without --picture) after this time, should the effort take longer.")
@click.option("--force", is_flag=True, help="Overwrite the file that --out names if it exists.")
@seed_option
@click.option(
    "--memory-margin",
    default=0.0,
    show_default=True,
    type=Number("margin"),
    metavar="SHARE",
    help="Leave this share of the memory cap in INSTANCE.json free, such as 0.05.",
)
@json_option
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw a timeline of the forward and backward passes of each pipeline stage under the plan to this file "
    "(.svg or .png).",
)
def pipeline(
    instance: Path,
    out: Path,
    effort: float | None,
    time_limit: float,
    force: bool,
    seed: int,
    memory_margin: float,
    as_json: bool,
    picture: Path | None,
) -> None:
    """Place the layers of INSTANCE.json on stages and chunks, and choose the recomputation of each layer.

    INSTANCE.json is a pipeline-balance problem (schema pp-balance/1). The plan keeps the true peak memory of every
    stage under the memory cap, without a margin. The command reports the plan's simulated step time, and a lower bound
    on the step time of all plans. tools/search/examples has a commented instance. With the same effort the plan is the
    same on every machine, unless the time limit ends the search, which the output then says.

    Exit codes: 0 a plan; 1 no plan stays within the memory cap; 2 a wrong input; 130 interrupted, with the best plan
    so far.
    """
    seconds = max(time_limit - _RESERVE, time_limit / 2)
    budget = Budget(effort_within(effort, "high", seconds), seconds)
    from tools.layout.optimise import optimise
    from tools.layout.output import draw, print_text, report_json, solution_json

    if picture:
        check_ending(picture)
    keep_existing("--out", out, force)
    for path in filter(None, (out, picture)):
        check_writable(path)
    problem = read_instance(instance)
    problem = replace(problem, cap=(1 - memory_margin) * problem.cap)
    with interruptible(budget), PlanProgress(budget) as progress:
        outcome = optimise(problem, budget, seed, progress.tell)
    if as_json:
        click.echo(json.dumps(report_json(outcome)))
    if outcome.plan is None:
        click.echo(f"tc3: {instance}: {outcome.why}", err=True)
        sys.exit(1)
    keep_existing("--out", out, force)  # another command may have written the file meanwhile
    write_atomically(out, json.dumps(solution_json(outcome)) + "\n")
    if not as_json:
        print_text(outcome, Console(soft_wrap=True, highlight=False, markup=False))
    click.echo(f"written: {out}", err=True)
    if picture:
        click.echo(f"drawn: {draw(problem, outcome.plan, picture)}", err=True)
    tell_end(outcome.cut, budget.stopped, "plan ")


for command in (calibrate_command, explain, layout, validate):
    search.add_command(command)
