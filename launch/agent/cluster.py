"""This module writes the files of `tc3 agent --slurm` and `--volcano`, with which a cluster manager starts an agent on
every node of a run.

An `Allocation` describes the request to Slurm or to Volcano. `sbatch_file` writes it as a script for Slurm,
`volcano_job` as a job of Volcano (https://volcano.sh, a batch scheduler for Kubernetes). The shell and YAML files
beside this module hold the parts that are the same in every file.

Agents restart a failed run inside the job. Slurm requeues the job when the agents cannot go on: no node is left, the
job was preempted, or its time is over. Volcano restarts single pods.
"""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import click
from click.core import ParameterSource

from launch.run.effective import FULL_SIZE, checked_recipe
from launch.run.msrun import ROOT, worker_count
from launch.run.script import body, default, in_checkout, node_size, one_line, size_in_words
from plugins.errors import ClusterError
from tools.process.host import read_hosts
from tools.schema.versions import unverified_words

NOTICE = 300  # seconds between the manager's SIGTERM and its SIGKILL: time for a checkpoint
DECISION = ROOT / "launch/agent/decision.sh"  # what both kinds of script ask after their agents ended


@dataclass(frozen=True)
class Allocation:
    """An `Allocation` describes the job in which Slurm or Volcano starts the agents of one run. The command-line
    options in `options` are passed to each agent unchanged; the list of hosts, the agent's own host and the run's
    folder are passed separately.

    `slots` is the number of workers of a node; relative paths start at the checkout; `made_by` is the command that
    wrote the file.
    """

    recipe: str
    run_dir: str
    workers: int
    slots: int
    spares: int = 0
    target: str = "Ascend"
    options: Sequence[str] = field(default=())
    made_by: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        """Refuse a number of workers that does not fill whole nodes.

        Raises:
            ClusterError: they are none.
        """
        if self.workers % self.slots:
            raise ClusterError(
                f"the recipe's {self.workers} workers do not fill whole nodes of {self.slots} workers: write a file "
                "with the line NAME WORKERS for each host, where WORKERS is its number of workers, and give the file "
                "with --nodes"
            )

    @property
    def nodes(self) -> int:
        """Return the number of nodes that train; the spare nodes, which only wait, are not counted."""
        return self.workers // self.slots

    @property
    def name(self) -> str:
        """Return a name, made from the run's folder, that Slurm and Kubernetes accept: lower case, digits and
        hyphens.
        """
        words = re.sub(r"[^a-z0-9]+", "-", Path(self.run_dir).name.lower()).strip("-")
        return (words if words[:1].isalpha() else f"tc3-{words}")[:40].strip("-")

    @property
    def size(self) -> str:
        """Return in words how many nodes and workers the job takes."""
        spares = f" and {self.spares:,} spare{'s' * (self.spares > 1)}" if self.spares else ""
        return size_in_words(self.workers, self.nodes) + spares


BODY = DECISION.with_name("slurm_body.sh")
REQUEUES = 3


def sbatch_file(job: Allocation) -> str:
    """Return the text of the sbatch file of `job`; options on sbatch's own command line override the options in the
    file.
    """
    return "\n".join(
        [
            *_head(job),
            f"RECIPE={shlex.quote(job.recipe)}",
            f"OPTIONS=({_options(job)})",
            f"SLOTS={job.slots} # workers of a node",
            default("RUN_DIR", job.run_dir),
            default("REQUEUES", str(REQUEUES)),
            "",
            body(DECISION) + body(BODY),
        ]
    )


def _head(job: Allocation) -> list[str]:
    """Return the head of the file: the options that Slurm reads, and comments that say what the user has to do."""
    return [
        "#!/usr/bin/env bash",
        f"# {job.size}. Written by: {one_line(job.made_by)}",
        "# Submit it from the checkout, which lies with the data and RUN_DIR on a disk that all nodes see:",
        "#   sbatch [--time=7-0] [--partition=NAME] [--account=NAME] FILE",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes + job.spares}",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --exclusive",
        "# A lost node does not end the job: the agents go on with a spare, or smaller.",
        "#SBATCH --no-kill",
        "# Before the time limit, and before a preemption if the site sends it (PreemptParameters=send_user_signal),",
        f"# each agent gets SIGTERM and has {NOTICE} s to save and leave. proctrack/cgroup and proctrack/pgid",
        "# send it only to the agents, as it has to be; proctrack/linuxproc would send it to the workers, too.",
        f"#SBATCH --signal=TERM@{NOTICE}",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=%x-%j.out",
        "# The environment can set: TC3_ROOT (the checkout), RUN_DIR, REQUEUES (how often it is queued again).",
        "# Exit code: 0 trained, 1 given up, 2 the user has to correct something, 130 or 143 interrupted.",
        "# shellcheck disable=SC2016 # words are taken as they stand",
        "set -euo pipefail",
        "",
    ]


YAML = DECISION.with_name("volcano.yaml")
POD = DECISION.with_name("volcano_pod.sh")
# what Ascend's device plugin for Kubernetes calls an NPU; a worker on CPU gets a core
RESOURCES = {"Ascend": "huawei.com/Ascend910"}
INDENT = 18  # of the script and of resources, less 2


def volcano_job(job: Allocation, root: Path) -> str:
    """Return the YAML of `job`. `root` is the checkout; the shared volume is mounted at the folder above it."""
    values = {
        "size": job.size,
        "made_by": one_line(job.made_by),
        "name": job.name,
        "nodes": job.nodes,
        "replicas": job.nodes + job.spares,
        "notice": NOTICE,
        "root": json.dumps(str(root)),
        "mount": json.dumps(str(root.parent)),
        "script": textwrap.indent(pod_script(job), " " * INDENT, lambda line: line.strip() != ""),
        "resources": textwrap.indent(f"limits:\n  {RESOURCES.get(job.target, 'cpu')}: {job.slots}", " " * (INDENT - 2)),
    }
    return Template(YAML.read_text(encoding="utf-8")).substitute(values)


def pod_script(job: Allocation) -> str:
    """Return the bash commands that each pod of a Volcano job runs."""
    lines = [
        "# shellcheck disable=SC2016 # words are taken as they stand",
        "set -euo pipefail",
        f"JOB={job.name}",
        f"RECIPE={shlex.quote(job.recipe)}",
        f"RUN_DIR={shlex.quote(job.run_dir)}",
        f"SLOTS={job.slots}",
        f"OPTIONS=({_options(job)})",
    ]
    return "\n".join([*lines, body(DECISION) + body(POD)]).rstrip("\n")


def _options(job: Allocation) -> str:
    """Return what each agent gets, as words of bash."""
    return shlex.join([*job.options, *["--spares", str(job.spares)] * bool(job.spares)])


# options that the file has for itself, or that each node has its own of
ELSEWHERE = ("recipe", "nodes", "host", "run_dir", "spares", "resume", "slurm", "volcano")


def print_job(given: Mapping[str, Any]) -> None:
    """Check the recipe and the options of `tc3 agent`, and print the file for Slurm or Volcano; data and devices are
    checked where the job runs.
    """
    recipe, run_dir, nodes, spares = (given[name] for name in ("recipe", "run_dir", "nodes", "spares"))
    if given["slurm"] and given["volcano"]:
        raise click.UsageError("--slurm and --volcano are for different cluster managers: choose one")
    folder = next((each for each in given["resume"] if each != "auto"), None)
    flat, _ = checked_recipe(recipe, given["overrides"], given["steps"], folder, run_dir)
    workers = worker_count(flat)
    place = in_checkout(run_dir) if run_dir else str(FULL_SIZE.run_dir(recipe))
    places = [each if each == "auto" else in_checkout(Path(each)) for each in given["resume"]]
    words = [*passed_on(), *(word for each in places for word in ("--resume", each)), *unverified_words()]
    own = [*["--nodes", str(nodes)] * bool(nodes), *["--spares", str(spares)] * bool(spares)]
    own += ["--run-dir", place] * bool(run_dir)
    manager = "--slurm" if given["slurm"] else "--volcano"
    job = Allocation(
        recipe=in_checkout(recipe),
        run_dir=place,
        workers=workers,
        slots=read_hosts(nodes, node_size(flat))[1] if nodes else min(workers, node_size(flat)),
        spares=spares,
        target=str((flat.get("context") or {}).get("device_target", "Ascend")),
        options=words,
        made_by=["tc3", "agent", in_checkout(recipe), manager, *own, *words],
    )
    click.echo(sbatch_file(job) if given["slurm"] else volcano_job(job, ROOT), nl=False)


def passed_on() -> list[str]:
    """Return those options of this `tc3 agent` command line that the cluster manager passes to each agent."""
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
