"""`tc3 train`: recipe -> checks -> msrun, supervised -> losses, speed, checkpoint, picture, what to do next."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from launch.agent.decide import Rules
from launch.agent.loop import Agent
from launch.agent.part import command_of
from launch.agent.planning import Job, make_plan, next_number, own_name
from launch.resume import checkpoints, data
from launch.resume.checkpoints import check_model
from launch.run import compile_cache, preflight
from launch.run.effective import (
    FULL_SIZE,
    Size,
    chosen_recipe,
    effective_recipe,
    fitted_to_conversations,
    resolved,
    steps_overrides,
)
from launch.run.msrun import check_port
from launch.run.script import Launch, in_checkout, launch_script, outside
from launch.run.summary import ResumeCommand, TrainingProgress, print_failure, print_summary, summarize
from launch.run.supervise import Outcome
from plugins.errors import TC3Error
from plugins.operator_fusion import plan as operator_fusion
from plugins.sealed_checkpoint.plan import adopt
from tools.ranges import Number
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.mini import WORKERS
from tools.recipe.override import apply_overrides
from tools.runs.readings import loss_rank
from tools.schema.versions import require_verified, unverified_option, unverified_words

LOST_AFTER = 60.0  # seconds for which the disk of a run on one host may stand still


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key that the recipe has.")
@click.option("--steps", type=Number("steps"), help="Number of steps in all; the dataset's size is set to match.")
@click.option("--mini", is_flag=True, help="Train a mini of RECIPE on CPU: its architecture at toy size, for 10 steps.")
@click.option("--parallel", is_flag=True, help="With --mini: keep the parallel strategy, scaled down to --workers.")
@click.option("--workers", type=Number("workers"), help=f"Number of CPU workers of --parallel.  [default: {WORKERS}]")
@click.option("--resume", metavar="auto|DIR", help="Continue from the newest complete checkpoint, or from DIR.")
@click.option(
    "--run-dir", type=click.Path(path_type=Path), help="Folder of the run.  [default: output/<folder>-<recipe>]"
)
@click.option("--force", is_flag=True, help="Start over in a folder that holds a run, and remove its checkpoints.")
@click.option("--restarts", type=Number("restarts"), default=0, help="Start again after so many failures in a row.")
@click.option("--port", type=Number("port"), help="Port of msrun's scheduler.  [default: a free one]")
@click.option("--no-bind", is_flag=True, help="Do not bind workers to cores: Linux and MindSpore choose them.")
@click.option("--script", is_flag=True, help="Print a bash script that starts the run on every node; start nothing.")
@click.option("--nodes", type=click.Path(path_type=Path), help="File with a host of --script a line: NAME [WORKERS].")
@click.option(
    "--compile-cache", "cached", is_flag=True, help="Load the graph that an earlier start compiled, or keep this one's."
)
@click.option("--dry-run", is_flag=True, help="Print the exact msrun command, and start and write nothing.")
@unverified_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, everything else on stderr.")
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
    restarts: int,
    port: int | None,
    no_bind: bool,
    script: bool,
    nodes: Path | None,
    cached: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Train RECIPE under msrun, and watch its workers until the end.

    Exit code: 0 trained (or complete already), 1 failed, or stopped at a non-finite loss, 2 something to mend first,
    130/143 interrupted.
    """
    _refuse_conflicts(resume, force, script, mini, restarts > 0 or cached)
    size = Size.chosen(mini, parallel, workers)
    if script:
        _script(recipe, overrides, steps, run_dir, nodes, port, resume, no_bind)
        return
    if nodes:
        raise click.UsageError("--nodes is for --script: without --script a run takes only this host")
    run_dir = (run_dir or size.run_dir(recipe)).absolute()
    flat = effective_recipe(recipe, overrides, steps, run_dir, size, make_layout=not dry_run)
    if dry_run:
        _dry_run(flat, run_dir, resume, port, force, as_json, no_bind)
        return
    flat = fitted_to_conversations(flat, steps)
    for check in _checks(flat, run_dir, resume, port, force):
        check()
    saves = checkpoints.save_path(flat)
    with preflight.only_run_in(run_dir, saves):
        if force:
            preflight.clear_run_dir(run_dir)
            checkpoints.clear_save_path(saves)
        if resume == "auto":
            adopt(saves)
            data.put_guilty_aside(flat, run_dir, saves)
        cached = cached or restarts > 0 or compile_cache.FOLDER in os.environ
        job = replace(make_job(flat, run_dir, resume, port, no_bind, restarts), cached=cached)
        if job.resume:
            check_model(flat, job.resume.path)
            checkpoints.check_data_order(flat, run_dir, job.resume)
        if job.resume and (done := checkpoints.complete(flat, job.resume)):
            click.echo(done, err=True)
            outcome = Outcome(0)
        else:
            dump_recipe(flat, run_dir / "recipe.yaml")
            data.keep_digests(flat, run_dir)
            outcome = _run(job, as_json)
    _report(job, outcome, partial(_resume_command, recipe, overrides, run_dir, size), steps, as_json)
    sys.exit(outcome.code)


def _refuse_conflicts(resume: str | None, force: bool, script: bool, mini: bool, here: bool) -> None:
    """Raise UsageError for options that exclude each other; `here`: one that is for a run on this host."""
    if resume == "":
        raise click.UsageError("--resume is empty: write auto, or the folder of a checkpoint")
    if resume and force:
        raise click.UsageError("--resume continues a run and --force starts over: choose one")
    if script and mini:
        raise click.UsageError("--script is for a cluster and --mini for this host: choose one")
    if script and here:
        raise click.UsageError("--restarts and --compile-cache are for this host; on a cluster, tc3 agent has both")


def make_job(
    recipe: Recipe, run_dir: Path, resume: str | None, port: int | None, no_bind: bool, restarts: int = 0
) -> Job:
    """What the agent of this one host is to train, from the checkpoint to go on from; `recipe` learns what it skips."""
    data.apply_ledger(recipe, run_dir)
    saves = checkpoints.save_path(recipe)
    otherwise = checkpoints.beginning(run_dir, saves) if resume == "auto" else None
    checkpoint = checkpoints.find_checkpoint(resume, saves, data.guilty(recipe, run_dir), otherwise) if resume else None
    if resume and checkpoint is None:
        checkpoints.refuse_scratch(run_dir, saves)
    if checkpoint:
        checkpoints.keep_cost(recipe, run_dir, checkpoint.path)
    return Job(
        recipe,
        run_dir,
        hosts=(own_name(),),
        port=port,
        resume=checkpoint,
        first=next_number(run_dir),
        bind=not no_bind,
        rules=Rules(restarts=restarts, hosts=[own_name()]),
        lost_after=LOST_AFTER,
        watchful=restarts > 0,
    )


def _checks(
    recipe: Recipe, run_dir: Path, resume: str | None, port: int | None, force: bool
) -> list[Callable[[], object]]:
    """What must hold on this machine, in the order in which a user would want to hear of it."""
    saves = checkpoints.save_path(recipe)
    return [
        require_verified,
        lambda: preflight.check_machine(recipe),
        lambda: compile_cache.refuse_own(recipe),
        lambda: operator_fusion.environment(recipe, os.environ),
        lambda: preflight.check_memory(recipe),
        lambda: preflight.check_sound(recipe),
        lambda: preflight.check_data(recipe),
        lambda: None if resume else checkpoints.check_load_path(recipe),
        lambda: preflight.check_run_dir(run_dir, bool(resume), force, saves),
        lambda: checkpoints.check_save_path(saves, bool(resume), force),
        lambda: preflight.check_disk(run_dir),
        lambda: preflight.check_disk(saves),
        lambda: check_port(port) if port is not None else None,
    ]


def _dry_run(
    flat: Recipe, run_dir: Path, resume: str | None, port: int | None, force: bool, as_json: bool, no_bind: bool
) -> None:
    """Print the argv; what would stop the run here goes to stderr and does not stop the dry run."""
    job = make_job(flat, run_dir, resume, port, no_bind)
    command = command_of(job, make_plan(job, 0 if force else job.first, job.hosts))
    for sentence in command.cores.said:
        click.echo(sentence, err=True)
    checks = _checks(flat, run_dir, resume, port, force)
    if job.resume:
        checks += [
            partial(check_model, flat, job.resume.path),
            partial(checkpoints.check_data_order, flat, run_dir, job.resume),
        ]
        if done := checkpoints.complete(flat, job.resume):
            click.echo(done, err=True)
    for check in checks:
        try:
            check()
        except TC3Error as error:
            click.echo(f"would be refused here: {error}", err=True)
    argv = [*_with_flags(flat), *command.argv]
    click.echo(json.dumps(argv) if as_json else shlex.join(argv))


def _with_flags(recipe: Recipe) -> list[str]:
    """`env NAME=VALUE` before msrun, for what a plugin sets in the environment of its workers."""
    flags = operator_fusion.environment(recipe, {})
    return ["env", *(f"{name}={value}" for name, value in flags.items())] if flags else []


def _script(
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path | None,
    nodes: Path | None,
    port: int | None,
    resume: str | None,
    no_bind: bool,
) -> None:
    """Print the bash script that does on every node what `tc3 train` does on this host.

    The recipe is checked here; its data and devices are looked for where the script runs.
    """
    if resume == "auto":
        raise click.UsageError("--script needs --resume DIR: a script cannot know which checkpoint will be the newest")
    folder = run_dir or FULL_SIZE.run_dir(recipe)
    chosen = chosen_recipe(recipe, overrides)
    more = steps_overrides(chosen, steps, overrides)
    flat = resolved(apply_overrides(chosen, more), make_layout=True)
    preflight.check_sound(flat)
    for line in outside(recipe, flat, resume, run_dir):
        click.echo(f"note: {line}", err=True)
    settings = (*overrides, *more)
    checkpoint = in_checkout(Path(resume)) if resume else ""
    place = in_checkout(folder) if run_dir else str(folder)
    launch = Launch(in_checkout(recipe), place, settings, port, checkpoint, not no_bind)
    click.echo(launch_script(launch, flat, nodes), nl=False)


def _run(job: Job, as_json: bool) -> Outcome:
    """Say what starts, start it, show its progress."""
    console = Console(stderr=as_json)
    say = partial(console.print, highlight=False, soft_wrap=True)
    workers = f"{job.slots} worker{'s' * (job.slots > 1)}"
    say(f"{job.recipe.source}: {workers}, run folder {job.run_dir}")

    @contextmanager
    def show() -> Iterator[Callable[[], None]]:
        with TrainingProgress(job.run_dir, console, loss_rank(job.recipe)) as progress:
            yield progress.tick

    return Agent(replace(job, show=show, say=say)).run(job.first)


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


def _report(job: Job, outcome: Outcome, resume_command: ResumeCommand, steps: int | None, as_json: bool) -> None:
    """Print how it went: the result on stdout (JSON or lines), a failure's details on stderr."""
    summary = summarize(job.run_dir, job.recipe, outcome, resume_command, steps)
    if outcome.code:
        print_failure(job.run_dir, outcome, summary)
    if as_json:
        click.echo(json.dumps(summary))
    elif not outcome.code:
        print_summary(summary)
