"""What this node starts for the plan of an attempt: the msrun command, and what its workers run in."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launch.agent.job import Job, logs_of
from launch.agent.planning import recipe_of
from launch.run.cores import Cores, of_launch
from launch.run.msrun import Node, cluster_environment, msrun_command, worker_environment
from plugins.operator_fusion import plan as operator_fusion
from plugins.sealed_checkpoint.plan import ATTEMPT
from tools.runs.attempts import Plan, recipe_file


@dataclass(frozen=True)
class Command:
    """msrun's argv, and the environment and cores of the workers."""

    argv: list[str]
    environment: dict[str, str]
    cores: Cores


def command_of(job: Job, plan: Plan) -> Command:
    """The command of this node in `plan`."""
    recipe, logs = recipe_of(job, plan), own_logs(job, plan)
    several = len(plan.hosts) > 1
    cores = of_launch(recipe, plan.slots, logs / "cores.json") if job.bind else Cores()
    node = Node(plan.hosts.index(job.host), len(plan.hosts), plan.slots, plan.master) if several else None
    resume = Path(plan.resume) if plan.resume else None
    # on one host nobody else plans: there it is the command that `tc3 train --dry-run` prints, of RUN/recipe.yaml
    config = recipe_file(job.run_dir, plan) if plan.name and job.several else None
    argv = msrun_command(recipe, job.run_dir, plan.port, resume, cores.options, logs, node, job.worker, config)
    environment = worker_environment(plan.slots, job.run_dir, cores=cores.environment, logs=logs)
    environment |= {ATTEMPT: plan.name} if plan.name else {}
    environment |= operator_fusion.environment(recipe, os.environ)
    if several:
        environment = {**cluster_environment(recipe, job.run_dir, logs), **environment}
    return Command(argv, environment, cores)


def own_logs(job: Job, plan: Plan) -> Path:
    """Where this node's part of an attempt logs."""
    return logs_of(job.run_dir, plan.attempt, plan.hosts.index(job.host) if len(plan.hosts) > 1 else None)


def own_ranks(job: Job, plan: Plan) -> range:
    """The workers of this node, by their ranks in the whole run."""
    first = plan.hosts.index(job.host) * plan.slots
    return range(first, first + plan.slots)
