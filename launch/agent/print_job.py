"""`tc3 agent --slurm | --volcano`: what a cluster manager is given, so that it starts an agent on every node."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from launch.agent.cluster.allocation import Allocation
from launch.agent.cluster.slurm import sbatch_file
from launch.agent.cluster.volcano import volcano_job
from launch.on_cluster.paths import outside
from launch.on_cluster.script import in_checkout
from launch.run import preflight
from launch.run.effective import FULL_SIZE, chosen_recipe, resolved, steps_overrides
from launch.run.msrun import ROOT, worker_count
from tools.process.host import DEVICES, read_hosts
from tools.recipe.override import apply_overrides
from tools.schema.versions import unverified_words

# options that the file has for itself, or that each node has its own of
ELSEWHERE = ("recipe", "nodes", "host", "run_dir", "spares", "resume", "slurm", "volcano")


def print_job(
    recipe: Path,
    overrides: tuple[str, ...],
    steps: int | None,
    run_dir: Path | None,
    nodes: Path | None,
    spares: int,
    resume: tuple[str, ...],
    slurm: bool,
    volcano: bool,
) -> None:
    """Check the recipe, and print the file; data and devices are looked at where it runs."""
    if slurm and volcano:
        raise click.UsageError("--slurm is for one cluster manager, --volcano for another: choose one")
    chosen = chosen_recipe(recipe, overrides)
    flat = resolved(apply_overrides(chosen, steps_overrides(chosen, steps, overrides)), make_layout=True)
    preflight.check_sound(flat)
    folder = next((each for each in resume if each != "auto"), None)
    for line in outside(recipe, flat, folder, run_dir):
        click.echo(f"note: {line}", err=True)
    workers = worker_count(flat)
    place = in_checkout(run_dir) if run_dir else str(FULL_SIZE.run_dir(recipe))
    places = [each if each == "auto" else in_checkout(Path(each)) for each in resume]
    going_on = [word for place in places for word in ("--resume", place)]
    words = [*passed_on(), *going_on, *unverified_words()]
    own = [*(["--nodes", str(nodes)] if nodes else []), *(["--spares", str(spares)] if spares else [])]
    own += ["--run-dir", place] if run_dir else []
    job = Allocation(
        recipe=in_checkout(recipe),
        run_dir=place,
        workers=workers,
        slots=read_hosts(nodes)[1] if nodes else min(workers, DEVICES),
        spares=spares,
        target=str((flat.get("context") or {}).get("device_target", "Ascend")),
        options=words,
        made_by=["tc3", "agent", in_checkout(recipe), "--slurm" if slurm else "--volcano", *own, *words],
    )
    click.echo(sbatch_file(job) if slurm else volcano_job(job, ROOT), nl=False)


def passed_on() -> list[str]:
    """The options of this command line that each agent gets as well."""
    context = click.get_current_context()
    words: list[str] = []
    for option in context.command.params:
        given = context.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
        if not given or option.name in ELSEWHERE or option.name not in context.params:
            continue
        value = context.params[option.name]
        if value is True:
            words.append(option.opts[0])
        else:
            words += [word for each in (value if option.multiple else [value]) for word in (option.opts[0], str(each))]
    return words
