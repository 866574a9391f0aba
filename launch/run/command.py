"""`tc3 train`: recipe -> checks -> msrun, supervised -> losses, speed, checkpoint, picture, what to do next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from launch.on_cluster.paths import outside
from launch.on_cluster.script import Launch, in_checkout, launch_script
from launch.resume import checkpoints, data_digest
from launch.resume.checkpoint_model import check_model
from launch.run import preflight
from launch.run.msrun import check_port, free_port, msrun_command, worker_count, worker_environment
from launch.run.progress import TrainingProgress
from launch.run.readings import loss_rank
from launch.run.size import Size
from launch.run.summary import ResumeCommand, print_failure, print_summary, summarize
from launch.run.supervise import Outcome, supervise
from plugins.errors import RecipeError, TC3Error
from tools.auto.resolve import resolve
from tools.checkpoint.scan import CheckpointInfo
from tools.ranges import Number
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.override import also_changed, apply_overrides
from tools.recipe.parallel_mini import WORKERS
from tools.recipe.view import LOADER, RUNNER, View
from tools.schema.versions import require_verified, unverified_option, unverified_words

FULL_SIZE = Size()


@dataclass(frozen=True)
class Plan:
    """A run that has been thought through and not started."""

    recipe: Recipe
    run_dir: Path
    workers: int
    resume: CheckpointInfo | None
    command: list[str]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--steps", type=Number("steps"), help="Steps to train in all: sets the dataset's size to match.")
@click.option("--mini", is_flag=True, help="Train a mini of RECIPE on CPU: its architecture at toy size, 10 steps.")
@click.option("--parallel", is_flag=True, help="With --mini: keep its parallel strategy, scaled to --workers.")
@click.option("--workers", type=Number("workers"), help=f"CPU workers of --parallel.  [default: {WORKERS}]")
@click.option("--resume", metavar="auto|DIR", help="Go on from the newest complete checkpoint, or from this one.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="The run's folder.  [default: output/<folder>-<recipe>]"
)
@click.option("--force", is_flag=True, help="Start over in a folder that holds a run; its checkpoints are removed.")
@click.option("--port", type=Number("port"), help="Port of msrun's scheduler.  [default: a free one]")
@click.option("--script", is_flag=True, help="Print a bash script that starts the run on every node; start nothing.")
@click.option("--nodes", type=click.Path(path_type=Path), help="Hosts of --script, a line each: NAME [WORKERS].")
@click.option("--dry-run", is_flag=True, help="Print the exact msrun command; start and write nothing.")
@unverified_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, all else on stderr.")
def train(
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    mini: bool,
    parallel: bool,
    workers: int | None,
    resume: str | None,
    run_dir: Path | None,
    force: bool,
    port: int | None,
    script: bool,
    nodes: Path | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train RECIPE under msrun and stay in charge of it.

    Exit code: 0 trained (or complete already), 1 failed, or stopped for what is not finite, 2 something to mend first,
    130/143 interrupted.
    """
    if resume == "":
        raise click.UsageError("--resume wants auto, or the folder of a checkpoint: it is empty")
    if resume and force:
        raise click.UsageError("--resume goes on with a run, --force starts over: choose one")
    if script and mini:
        raise click.UsageError("--script is for a cluster, --mini for this host: choose one")
    size = Size.chosen(mini, parallel, workers)
    if script:
        _script(recipe, overrides, steps, run_dir, nodes, port, resume)
        return
    if nodes:
        raise click.UsageError("--nodes is for --script: without it, a run has this host alone")
    run_dir = (run_dir or size.run_dir(recipe)).absolute()
    flat = effective_recipe(recipe, overrides, steps, run_dir, size, make_layout=not dry_run)
    if dry_run:
        _dry_run(flat, run_dir, resume, port, force, as_json)
        return
    for check in _checks(flat, run_dir, resume, port, force):
        check()
    saves = checkpoints.save_path(flat)
    with preflight.only_run_in(run_dir, saves):
        if force:
            preflight.clear_run_dir(run_dir)
            checkpoints.clear_save_path(saves)
        plan = make_plan(flat, run_dir, resume, port)
        if plan.resume:
            check_model(flat, plan.resume.path)
            checkpoints.check_data_order(flat, run_dir, plan.resume)
        if plan.resume and (done := checkpoints.complete(flat, plan.resume)):
            click.echo(done, err=True)
            outcome = Outcome(0)
        else:
            if plan.resume and resume != "auto":
                checkpoints.leave_behind(saves, plan.resume)
            dump_recipe(flat, run_dir / "recipe.yaml")
            data_digest.keep(flat, run_dir)
            outcome = _run(plan, as_json)
    _report(plan, outcome, partial(_resume_command, recipe, overrides, run_dir, size), steps, as_json)
    sys.exit(outcome.code)


def effective_recipe(
    path: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path,
    size: Size = FULL_SIZE,
    make_layout: bool = True,
) -> Recipe:
    """The flat recipe that will run: overrides, number of steps, and this run's folders filled in.

    `make_layout`: search for the layout of a recipe with `offset: auto`, and keep it, where nobody has.
    """
    flat = _chosen_recipe(path, overrides, size)
    flat = _resolved(apply_overrides(flat, steps_overrides(flat, steps)), make_layout)
    flat["output_dir"] = str(run_dir)
    checkpoint = flat["checkpoint"] = flat.get("checkpoint") or {}
    checkpoint["save_path"] = checkpoint.get("save_path") or str(run_dir / "checkpoint")
    return flat


def _chosen_recipe(path: Path, overrides: tuple[str, ...], size: Size = FULL_SIZE) -> Recipe:
    """The recipe, or its mini, with the user's overrides."""
    flat = size.load(path)
    for override in overrides:
        if others := also_changed(flat, override):
            click.echo(f"--set {override} also sets {', '.join(others)} (one value, shared by an anchor)", err=True)
    return apply_overrides(flat, overrides)


def _resolved(flat: Recipe, make_layout: bool) -> Recipe:
    return resolve(flat, partial(click.echo, err=True), "search" if make_layout else "file")


def steps_overrides(recipe: Recipe, steps: int | None) -> list[str]:
    """The overrides that make a recipe train `steps` steps: samples of the dataset, one pass over it, the schedule."""
    if steps is None:
        return []
    view = View(recipe)
    sizes = view.get((*LOADER, "sizes"))
    if not (isinstance(sizes, list) and sizes and view.has((*RUNNER, "batch_size"))):
        raise RecipeError(
            f"{recipe.source}: --steps needs train_dataset.data_loader.sizes and runner_config.batch_size"
        )
    found = [f"train_dataset.data_loader.sizes.0={steps * view.global_batch}"]  # stays the first
    if view.number((*RUNNER, "epochs"), 1) > 1:
        found.append("runner_config.epochs=1")
    if view.number(("lr_schedule", "total_steps"), 0):
        found.append(f"lr_schedule.total_steps={steps}")
    return found


def make_plan(recipe: Recipe, run_dir: Path, resume: str | None, port: int | None) -> Plan:
    """Everything that `recipe` needs to start: checkpoint to go on from, port, argv."""
    checkpoint = checkpoints.find_checkpoint(resume, checkpoints.save_path(recipe)) if resume else None
    if checkpoint:
        checkpoints.keep_cost(recipe, run_dir, checkpoint.path)
    command = msrun_command(recipe, run_dir, port or free_port(), checkpoint.path if checkpoint else None)
    return Plan(recipe, run_dir, worker_count(recipe), checkpoint, command)


def _checks(
    recipe: Recipe, run_dir: Path, resume: str | None, port: int | None, force: bool
) -> list[Callable[[], None]]:
    """What must hold on this machine, in the order in which a user would want to hear of it."""
    saves = checkpoints.save_path(recipe)
    return [
        require_verified,
        lambda: preflight.check_machine(recipe),
        lambda: preflight.check_memory(recipe),
        lambda: preflight.check_sound(recipe),
        lambda: preflight.check_data(recipe),
        lambda: None if resume else checkpoints.check_load_path(recipe),
        lambda: preflight.check_run_dir(run_dir, bool(resume), force),
        lambda: checkpoints.check_save_path(saves, bool(resume), force),
        lambda: preflight.check_disk(run_dir),
        lambda: preflight.check_disk(saves),
        lambda: check_port(port) if port is not None else None,
    ]


def _dry_run(flat: Recipe, run_dir: Path, resume: str | None, port: int | None, force: bool, as_json: bool) -> None:
    """Print the argv; what would stop the run here goes to stderr and does not stop the dry run."""
    plan = make_plan(flat, run_dir, resume, port)
    checks = _checks(flat, run_dir, resume, port, force)
    if plan.resume:
        checks += [
            partial(check_model, flat, plan.resume.path),
            partial(checkpoints.check_data_order, flat, run_dir, plan.resume),
        ]
        if done := checkpoints.complete(flat, plan.resume):
            click.echo(done, err=True)
    for check in checks:
        try:
            check()
        except TC3Error as error:
            click.echo(f"would be refused here: {error}", err=True)
    click.echo(json.dumps(plan.command) if as_json else shlex.join(plan.command))


def _script(
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path | None,
    nodes: Path | None,
    port: int | None,
    resume: str | None,
) -> None:
    """Print the bash script that does on every node what `tc3 train` does on this host.

    The recipe is checked here; its data and devices are looked for where the script runs.
    """
    if resume == "auto":
        raise click.UsageError("--script wants --resume DIR: which checkpoint is the newest is not known yet")
    folder = run_dir or FULL_SIZE.run_dir(recipe)
    chosen = _chosen_recipe(recipe, overrides)
    more = steps_overrides(chosen, steps)
    flat = _resolved(apply_overrides(chosen, more), make_layout=True)
    preflight.check_sound(flat)
    for line in outside(recipe, flat, resume, run_dir):
        click.echo(f"note: {line}", err=True)
    settings = (*overrides, *more)
    checkpoint = in_checkout(Path(resume)) if resume else ""
    place = in_checkout(folder) if run_dir else str(folder)
    launch = Launch(in_checkout(recipe), place, settings, port, checkpoint)
    click.echo(launch_script(launch, flat, nodes), nl=False)


def _run(plan: Plan, as_json: bool) -> Outcome:
    """Say what starts, start it, show its progress."""
    console = Console(stderr=as_json)
    workers = f"{plan.workers} worker{'s' * (plan.workers > 1)}"
    console.print(f"{plan.recipe.source}: {workers}, run folder {plan.run_dir}", highlight=False, soft_wrap=True)
    environment = worker_environment(plan.workers, plan.run_dir)
    with TrainingProgress(plan.run_dir, console, loss_rank(plan.recipe)) as progress:
        return supervise(plan.command, environment, plan.run_dir, plan.workers, progress.tick)


def _resume_command(
    recipe: Path, overrides: tuple[str, ...], run_dir: Path, size: Size, weights: Path | None, change: str
) -> list[str]:
    """The command that goes on with this run, or starts another from `weights`; without its number of steps.

    `change`: an override that takes the place of what stands for its key; may be empty.
    """
    if change:
        key = change.partition("=")[0]
        overrides = (*(each for each in overrides if each.partition("=")[0].strip() != key), change)
    words = ["tc3", "train", str(recipe), *size.words()]
    if weights:
        words += ["--run-dir", f"{run_dir}-next"]
        overrides = (*overrides, f"checkpoint.load_path={weights}")
    else:
        words += ["--resume", "auto"]
        if run_dir != size.run_dir(recipe).absolute():
            words += ["--run-dir", str(run_dir)]
    return [*words, *(word for override in overrides for word in ("--set", override)), *unverified_words()]


def _report(plan: Plan, outcome: Outcome, resume_command: ResumeCommand, steps: int | None, as_json: bool) -> None:
    """Print how it went: the result on stdout (JSON or lines), a failure's details on stderr."""
    summary = summarize(plan.run_dir, plan.recipe, outcome, resume_command, steps)
    if outcome.code:
        print_failure(plan.run_dir, outcome, summary)
    if as_json:
        click.echo(json.dumps(summary))
    elif not outcome.code:
        print_summary(summary)
