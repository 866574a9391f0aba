"""This module is `tc3 train`: it checks a recipe, runs and supervises msrun, and prints losses, speed, the checkpoint,
the picture of the loss curve, and the next command.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from launch.agent.decide import Rules
from launch.agent.loop import Agent
from launch.agent.part import command_of
from launch.agent.planning import Job, make_plan, next_number, own_name
from launch.resume import checkpoints, data
from launch.resume.model import check_load_folder, check_load_path, check_model
from launch.run import compile_cache, preflight
from launch.run.effective import FULL_SIZE, Size, checked_recipe, effective_recipe, fitted_to_conversations
from launch.run.msrun import check_port, optimizer_environment
from launch.run.script import Launch, in_checkout, launch_script
from launch.run.summary import (
    TrainingProgress,
    print_failure,
    print_next_command,
    print_summary,
    summarize,
    words_to_go_on,
)
from launch.run.supervise import Outcome
from plugins.errors import TC3Error
from plugins.operator_fusion import plan as operator_fusion
from tools.ranges import Folder, Number, no_bind_option, overrides_option, steps_option
from tools.recipe.load import Recipe
from tools.recipe.mini_strategy import WORKERS
from tools.recipe.view import View
from tools.schema.stages import loss_rank
from tools.schema.versions import require_verified, unverified_option

LOST_AFTER = 60.0  # seconds for which the disk of a run on one host may stand still


@dataclass(frozen=True)
class Asked:
    """An `Asked` holds the values of the command-line options; the help texts of `train` describe each option."""

    recipe: Path
    overrides: tuple[str, ...]
    steps: int | None
    mini: bool
    parallel: bool
    workers: int | None
    resume: str | None
    run_dir: Path | None
    force: bool
    restarts: int
    port: int | None
    no_bind: bool
    script: bool
    nodes: Path | None
    cached: bool
    dry_run: bool
    as_json: bool

    @cached_property
    def size(self) -> Size:
        """Return the size at which the recipe is trained; raise UsageError if the options contradict each other."""
        return Size.chosen(self.mini, self.parallel, self.workers)

    def refuse_conflicts(self) -> None:
        """Raise UsageError for options that exclude each other."""
        if self.resume == "":
            raise click.UsageError("--resume: the value is empty; write auto, or the folder of a checkpoint")
        if self.resume and self.force:
            raise click.UsageError("--resume continues a run, and --force starts over: give only one of the two")
        if self.script and self.mini:
            raise click.UsageError(
                "--script prints a script for a cluster, and --mini trains on this host: give only one of the two"
            )
        other = {"--force": self.force, "--dry-run": self.dry_run, "--json": self.as_json}
        if self.script and (given := [name for name, chosen in other.items() if chosen]):
            raise click.UsageError(
                f"--script only prints a script, in which {given[0]} has no effect: leave one of the two out"
            )
        if self.script and (self.restarts > 0 or self.cached):
            raise click.UsageError(
                "--restarts and --compile-cache do not work with --script; on a cluster use tc3 agent, which restarts "
                "runs and has a compile cache"
            )
        _ = self.size


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@overrides_option
@steps_option
@click.option(
    "--mini",
    is_flag=True,
    help="Train RECIPE's architecture at toy size on CPU, for 10 steps unless --steps says otherwise.",
)
@click.option(
    "--parallel",
    is_flag=True,
    help=(
        "With --mini: keep the recipe's parallel strategy too, scaled down to as many CPU workers as --workers says."
    ),
)
@click.option(
    "--workers", type=Number("workers"), help=f"With --parallel: start this many CPU workers.  [default: {WORKERS}]"
)
@click.option(
    "--resume",
    metavar="auto|DIR",
    help="auto continues from the newest complete checkpoint in the run's folder; DIR is the folder of a checkpoint "
    "to continue from.",
)
@click.option(
    "--run-dir",
    type=Folder(),
    help="Write the run to this folder.  [default: output/<the recipe's folder>-<the recipe's name>]",
)
@click.option(
    "--force", is_flag=True, help="If the run's folder already holds a run, remove its checkpoints and start over."
)
@click.option(
    "--restarts",
    type=Number("restarts"),
    default=0,
    help="Restart the run when it fails, but at most this many times in a row without a newer checkpoint.",
)
@click.option(
    "--port",
    type=Number("port"),
    help="Use this port for the scheduler of msrun, MindSpore's torchrun.  [default: a free one]",
)
@no_bind_option
@click.option("--script", is_flag=True, help="Print a bash script that starts the run on every node; start nothing.")
@click.option(
    "--nodes",
    type=click.Path(path_type=Path),
    help="With --script: read the hosts from this file, one host per line as NAME or as NAME WORKERS (its number of "
    "workers).",
)
@click.option(
    "--compile-cache",
    "cached",
    is_flag=True,
    help="Load the graph that an earlier start of the same recipe compiled, or, if no such graph is stored, compile it "
    "and store it for later starts.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the exact msrun command that would start the workers; start nothing, and write nothing. If "
    "something would stop the run on this machine, the command says so on stderr, but its exit code is 0 all the same.",
)
@unverified_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON on stdout, and everything else on stderr."
)
def train(**given: Any) -> None:
    """Train RECIPE under msrun, and watch its workers until the end.

    Exit code: 0 trained (or complete already), 1 failed, or stopped at a non-finite loss, 2 the user has to correct
    something first, 130/143 interrupted.
    """
    asked = Asked(**given)
    asked.refuse_conflicts()
    if asked.script:
        _script(asked)
        return
    if asked.nodes:
        raise click.UsageError("--nodes works only with --script, because without --script a run uses only this host")
    run_dir = (asked.run_dir or asked.size.run_dir(asked.recipe)).absolute()
    flat = effective_recipe(
        asked.recipe, asked.overrides, asked.steps, run_dir, asked.size, make_layout=not asked.dry_run
    )
    if asked.dry_run:
        _dry_run(asked, flat, run_dir)
        return
    flat = fitted_to_conversations(flat, asked.steps)
    for check in checks(flat, run_dir, bool(asked.resume), asked.port, asked.force):
        check()
    saves = checkpoints.save_path(flat)
    with preflight.only_run_in(run_dir, saves):
        if asked.force:
            preflight.clear_run_dir(run_dir)
            checkpoints.clear_save_path(saves)
        if asked.resume == "auto":
            checkpoints.take_stock(run_dir, saves)
            data.put_guilty_aside(flat, run_dir, saves)
        cached = asked.cached or asked.restarts > 0 or compile_cache.FOLDER in os.environ
        job = replace(_job(asked, flat, run_dir), cached=cached)
        if job.resume:
            check_model(flat, job.resume.path)
            checkpoints.check_data_order(flat, run_dir, job.resume)
        elif asked.resume:  # the run has no checkpoint yet, and begins
            check_load_path(flat)
        if job.resume and (done := checkpoints.complete(flat, job.resume)):
            click.echo(done, err=True)
            outcome = Outcome(0)
        else:
            outcome = _run(job, asked.as_json)
    _report(asked, job, outcome)
    sys.exit(outcome.code)


def _job(asked: Asked, recipe: Recipe, run_dir: Path) -> Job:
    """Return the job of the agent of this single host, with the checkpoint from which the run continues; the samples
    that the run leaves out are added to `recipe` in place.
    """
    resume = asked.resume
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
        port=asked.port,
        resume=checkpoint,
        first=next_number(run_dir, saves),
        bind=not asked.no_bind,
        rules=Rules(restarts=asked.restarts, hosts=[own_name()]),
        lost_after=LOST_AFTER,
        watchful=asked.restarts > 0,
    )


def checks(
    recipe: Recipe, run_dir: Path, goes_on: bool, port: int | None, force: bool | None, slots: int | None = None
) -> list[Callable[[], object]]:
    """Return the checks of this machine, in the order in which a user would want to see their errors.

    For a node of a run on several nodes, which has `slots` workers, `force` is None, because `tc3 agent` has no such
    option.
    """
    saves = checkpoints.save_path(recipe)
    return [
        require_verified,
        lambda: preflight.check_machine(recipe, slots),
        lambda: compile_cache.refuse_own(recipe),
        lambda: operator_fusion.environment(recipe, os.environ),
        lambda: None if slots else preflight.check_memory(recipe),
        lambda: preflight.check_sound(recipe),
        lambda: preflight.check_data(recipe),
        lambda: None if goes_on else (check_load_folder if slots else check_load_path)(recipe),
        lambda: preflight.check_run_dir(run_dir, goes_on, force, saves),
        lambda: checkpoints.check_save_path(saves, goes_on, bool(force)),
        lambda: checkpoints.check_kept(recipe, run_dir, saves) if force else None,
        lambda: preflight.check_disk(run_dir),
        lambda: preflight.check_disk(saves),
        lambda: None if port is None else check_port(port),
    ]


def _dry_run(asked: Asked, flat: Recipe, run_dir: Path) -> None:
    """Print msrun's argv; errors that would prevent the run on this host are printed on stderr and do not end the dry
    run.
    """
    job = _job(replace(asked, restarts=0), flat, run_dir)
    command = command_of(job, make_plan(job, 0 if asked.force else job.first, job.hosts))
    for sentence in command.cores.said:
        click.echo(sentence, err=True)
    found = checks(flat, run_dir, bool(asked.resume), asked.port, asked.force)
    if job.resume:
        found += [
            partial(check_model, flat, job.resume.path),
            partial(checkpoints.check_data_order, flat, run_dir, job.resume),
        ]
        if done := checkpoints.complete(flat, job.resume):
            click.echo(done, err=True)
    elif asked.resume:
        found.append(partial(check_load_path, flat))
    for check in found:
        try:
            check()
        except TC3Error as error:
            click.echo(f"would be refused here: {error}", err=True)
    # what the recipe sets in the environment of the workers
    flags = {name: value for name, value in optimizer_environment(flat).items() if name not in os.environ}
    flags |= operator_fusion.environment(flat, {})
    argv = [*["env"] * bool(flags), *(f"{name}={value}" for name, value in flags.items()), *command.argv]
    click.echo(json.dumps(argv) if asked.as_json else shlex.join(argv))


def _script(asked: Asked) -> None:
    """Print the bash script that does on every node what `tc3 train` does on this host.

    The recipe is checked here; its data and devices are looked for where the script runs.
    """
    if asked.resume == "auto":
        raise click.UsageError(
            "--script needs --resume DIR instead of --resume auto, because a script cannot know "
            "which checkpoint will be the newest"
        )
    flat, settings = checked_recipe(asked.recipe, asked.overrides, asked.steps, asked.resume, asked.run_dir)
    checkpoint = in_checkout(Path(asked.resume)) if asked.resume else ""
    place = in_checkout(asked.run_dir) if asked.run_dir else str(FULL_SIZE.run_dir(asked.recipe))
    launch = Launch(in_checkout(asked.recipe), place, settings, asked.port, checkpoint, not asked.no_bind)
    click.echo(launch_script(launch, flat, asked.nodes), nl=False)


def _run(job: Job, as_json: bool) -> Outcome:
    """Print what the run trains, start the run, and show its progress."""
    console = Console(stderr=as_json)
    say = partial(console.print, highlight=False, soft_wrap=True)
    workers = f"{job.slots} worker{'s' * (job.slots > 1)}"
    say(f"{job.recipe.source}: {workers}, run folder {job.run_dir}")

    @contextmanager
    def show() -> Iterator[Callable[[], None]]:
        with TrainingProgress(job.run_dir, console, loss_rank(View(job.recipe))) as progress:
            yield progress.tick

    return Agent(replace(job, show=show, say=say)).run(job.first)


def _report(asked: Asked, job: Job, outcome: Outcome) -> None:
    """Print the result of the run: the result on stdout (as JSON or as lines), the details of a failure on stderr."""
    begin, usual = ["tc3", "train", str(asked.recipe), *asked.size.words()], asked.size.run_dir(asked.recipe).absolute()
    resume_command = partial(words_to_go_on, begin, asked.overrides, job.run_dir, job.run_dir != usual, job.recipe)
    if outcome.code:
        print_failure(job.run_dir, job.recipe, outcome)
    summary = summarize(job.run_dir, job.recipe, outcome, resume_command, asked.steps)
    if outcome.code:
        print_next_command(summary, outcome.failure is not None and outcome.failure.stopped)
    if asked.as_json:
        click.echo(json.dumps(summary))
    elif not outcome.code:
        print_summary(summary)
