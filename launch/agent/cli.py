"""This module is the command `tc3 agent`: it runs as one process on each node, starts the node's workers, and starts
them again after a failure.

The agents of all nodes start the workers together, and start them again when a node or a worker fails.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import psutil

from launch.agent.cluster import print_job
from launch.agent.decide import Rules
from launch.agent.loop import Agent
from launch.agent.meeting import LOST_AFTER
from launch.agent.planning import PATIENCE, Job, checkpoint_of, first_number, under_way
from launch.resume import checkpoints, data
from launch.resume.model import check_load_path, check_model
from launch.run import preflight
from launch.run.command import checks
from launch.run.effective import FULL_SIZE, effective_recipe
from launch.run.msrun import on_ascend, worker_count
from launch.run.script import node_size
from launch.run.summary import ResumeCommand, complain, print_next_command, print_summary, summarize, words_to_go_on
from launch.run.supervise import Outcome
from plugins.errors import ClusterError, TC3Error
from tools.checkpoint.scan import CheckpointInfo, lies_in
from tools.doctor.outliers import gate
from tools.files.atomic import real_path
from tools.process.host import read_hosts, usual_form
from tools.ranges import Folder, Number, no_bind_option, overrides_option, steps_option
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.runs.attempts import PLAN, Plan, folder_of, newest_attempt, numbers, read
from tools.schema.versions import unverified_option

RESTARTS = Rules.restarts  # failures in a row after which a run goes on, unless the user says otherwise


def unfit(slots: int, folder: Path) -> list[str]:
    """Return the reasons why a run should not start on this host; the list is empty if there is no such reason, or if
    the host cannot be checked.

    The host's workers are compared with each other, so a host with a single worker is never unfit.
    """
    from tools.doctor.probe import probe  # brings the solver of the plan

    try:
        found = gate({socket.gethostname(): probe(None, slots, folder)})
    except (TC3Error, OSError):  # what cannot be probed keeps nobody out
        return []
    return found.reasons if found.verdict == "fail" else []


@dataclass
class Start:
    """A `Start` is the run that the agents of all nodes start or join.

    `resume` is the value of --resume; `otherwise` is the folder that the user gives in addition to `auto`, from which
    the run begins as long as it has saved no checkpoint; `chosen` is the checkpoint that was found for `resume`;
    `joined` is the attempt that was under way when this agent joined the run, whose checkpoints may be those of another
    model; None if there was none.
    """

    recipe: Recipe
    run_dir: Path
    resume: str | None
    otherwise: str | None = None
    chosen: CheckpointInfo | None = None
    joined: int | None = None

    @property
    def saves(self) -> Path:
        """Return the folder in which the run saves its checkpoints."""
        return checkpoints.save_path(self.recipe)

    def check(self, slots: int, port: int | None) -> None:
        """Check this node as `tc3 train` does; if a run is already in progress, the agent joins it.

        Raises:
            TC3Error: the user has to correct something first.
        """
        goes_on = bool(self.resume) or under_way(self.run_dir)
        for check in checks(self.recipe, self.run_dir, goes_on, port, None, slots):
            check()
        if self.resume not in (None, "auto"):  # `otherwise` may be gone by the time that the run has its own
            checkpoints.one_iteration(str(self.resume), ["auto"])

    def choose(self) -> CheckpointInfo | None:
        """Return the checkpoint from which the run begins. Only one node calls this method: it reads all files of the
        checkpoint, or of the weights with which a new run begins, and verifies them.

        Raises:
            CheckpointError: the checkpoint is not complete; or there is none, although the run has started from a
                checkpoint before.
        """
        if not self.resume:
            check_load_path(self.recipe)
            return None
        resume, given = self.resume, self.otherwise
        if given and not self._has_begun_from(given):
            resume = given  # other checkpoints are of a branch that this run leaves
        if resume == "auto":
            checkpoints.take_stock(self.run_dir, self.saves)
            given = given or checkpoints.beginning(self.run_dir, self.saves)
        unfit = data.guilty(self.recipe, self.run_dir)
        self.chosen = checkpoints.find_checkpoint(resume, self.saves, unfit, given)
        if self.chosen is None:
            checkpoints.refuse_scratch(self.run_dir, self.saves)
            check_load_path(self.recipe)
        return self.chosen

    def leaves(self) -> bool:
        """Return whether the user has named a checkpoint without `auto`, and no attempt has gone on from it yet, so
        that the run abandons the checkpoints that it saved after the named one.
        """
        return self.resume not in (None, "auto") and not self._has_begun_from(str(self.resume), True)

    def _has_begun_from(self, given: str, named: bool = False) -> bool:
        """Return whether an attempt has been planned that goes on from the folder `given`, with `named` because a user
        named it; also if a plan cannot be read, because what the run has saved since would be left behind.
        """
        files = [folder_of(self.run_dir, number) / PLAN for number in numbers(self.run_dir)]
        plans = [read(file, Plan) for file in files]
        if any(plan is None and file.exists() for file, plan in zip(files, plans, strict=True)):
            return True
        begun = [plan for plan in plans if plan and plan.resume and real_path(plan.resume) == real_path(given)]
        own = lies_in(Path(given), self.saves)  # so that a run may go on from it by itself
        return any(plan.branch or not (named and own) for plan in begun)

    def prepare(self, plan: Plan) -> Recipe:
        """Check the checkpoint from which an attempt continues, and return the recipe of the attempt."""
        checkpoint = checkpoint_of(plan)
        recipe = apply_overrides(self.recipe, plan.overrides) if plan.overrides else self.recipe
        if checkpoint:
            # whoever saved it may have been started with another recipe than this agent
            joins = self.joined is not None and plan.attempt <= self.joined + 1
            if joins or (self.chosen and checkpoint.path == self.chosen.path):
                check_model(recipe, checkpoint.path)
            checkpoints.keep_cost(recipe, self.run_dir, checkpoint.path)
            checkpoints.check_data_order(recipe, self.run_dir, checkpoint)
        return recipe


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--nodes",
    type=click.Path(path_type=Path),
    help="Read the hosts from this file, one host per line as NAME or as NAME WORKERS (its number of workers); spare "
    "hosts come last.",
)
@click.option(
    "--spares",
    type=Number("spares"),
    default=0,
    help="Keep this many of the hosts in --nodes idle as spares, which replace hosts that fail.  [default: 0]",
)
@click.option(
    "--host",
    help="Give the name of this node in the --nodes file.  [default: the name that equals this node's host name or "
    "address]",
)
@click.option(
    "--restarts",
    type=Number("restarts"),
    default=RESTARTS,
    help="Give up when the run fails more than this many times in a row without saving a newer checkpoint.  [default: "
    f"{RESTARTS}]",
)
@overrides_option
@steps_option
@click.option(
    "--resume",
    multiple=True,
    metavar="auto|DIR",
    help=(
        "auto continues from this run's newest complete checkpoint; DIR is the folder of a checkpoint to continue "
        "from. If the option is given twice, with auto and with DIR, DIR is used until this run has a checkpoint. "
        "With DIR only, the first start of the command continues from DIR and renames this run's checkpoints that are "
        "newer than DIR (all of them if DIR is not in this run's folder of checkpoints), so that no resume finds them; "
        "every later start of the same command continues from this run's newest complete checkpoint, or from DIR if "
        "there is none."
    ),
)
@click.option(
    "--run-dir",
    type=Folder(),
    help="Write the run to this folder, which must be on a disk that all nodes share.",
)
@click.option(
    "--port",
    type=Number("port"),
    help="Use this port for the scheduler of msrun (MindSpore's torchrun) when the workers start for the first time.  "
    "[default: a free one]",
)
@no_bind_option
@click.option(
    "--lost-after",
    type=Number("seconds"),
    default=LOST_AFTER,
    show_default=True,
    help="Treat a node as lost if nothing was heard from it for this many seconds.",
)
@click.option(
    "--patience",
    type=Number("seconds"),
    default=PATIENCE,
    show_default=True,
    help="At each start of the workers, wait at most this many seconds for enough hosts to join and for this host to "
    "pass its checks.",
)
@click.option("--slurm", is_flag=True, help="Print an sbatch file that starts an agent on every node; start nothing.")
@click.option(
    "--volcano",
    is_flag=True,
    help="Print a Volcano job for Kubernetes that starts an agent in each pod; start nothing.",
)
@unverified_option
def agent(**given: Any) -> None:
    """Train RECIPE on several nodes: start this command on each of them.

    The agents meet in the run's folder, start the workers together, and start them again when a node or a worker fails.

    Exit code: 0 trained, 1 given up, 2 the user has to correct something first, 130/143 interrupted.
    """
    asked = SimpleNamespace(**given)
    going_on, otherwise = resumed(asked.resume)
    if asked.slurm or asked.volcano:
        print_job(given)
        return
    recipe, nodes, steps = asked.recipe, asked.nodes, asked.steps
    if nodes is None:
        raise click.UsageError(
            "--nodes is missing: give a file that lists the hosts; on one host use tc3 train --restarts"
        )
    folder = asked.run_dir or FULL_SIZE.run_dir(recipe)
    run_dir = folder.absolute()
    flat = effective_recipe(recipe, asked.overrides, steps, run_dir)
    hosts, slots = read_hosts(nodes, node_size(flat))
    name = own_host(hosts, asked.host, nodes)
    data.apply_ledger(flat, run_dir)
    count = check_hosts(hosts, slots, asked.spares, worker_count(flat), nodes)
    start = Start(flat, run_dir, going_on, otherwise)
    start.check(slots, asked.port)
    job = Job(
        flat,
        run_dir,
        name,
        tuple(hosts),
        count,
        asked.port,
        choose=start.choose,
        leaves=start.leaves,
        bind=not asked.no_bind,
        rules=Rules(restarts=asked.restarts, hosts=hosts),
        lost_after=asked.lost_after,
        patience=asked.patience,
        watchful=True,
        cached=True,
    )
    click.echo(f"tc3: {name}: follow the run with: tc3 runs watch {shlex.quote(str(run_dir))}", err=True)
    probing = partial(unfit, slots, run_dir) if on_ascend(flat) else list
    with preflight.only_run_in(run_dir, start.saves, together=True):
        begun, number = under_way(run_dir), first_number(run_dir, start.saves)
        start.joined = number if begun else None
        outcome = Agent(job, probing, start.prepare).run(number)
        report(name, outcome)  # before anything waits for a disk that is lost, as the release of a lock may do
    begin = ["tc3", "agent", str(recipe), "--nodes", str(nodes), *["--spares", str(asked.spares)] * bool(asked.spares)]
    conclude(job, outcome, partial(words_to_go_on, begin, asked.overrides, folder, bool(asked.run_dir), flat), steps)
    sys.exit(outcome.code)


def resumed(given: Sequence[str]) -> tuple[str | None, str | None]:
    """Return two values from the options --resume: "auto" or a checkpoint's folder; and, if --resume was given both as
    auto and as a folder, this folder, from which a run without checkpoints of its own starts.

    Raises:
        UsageError: the option is empty, or names two folders.
    """
    if "" in given:
        raise click.UsageError("--resume is empty: write auto, or the folder of a checkpoint")
    folders = list(dict.fromkeys(each for each in given if each != "auto"))
    if len(folders) > 1:
        raise click.UsageError(
            f"--resume names {' and '.join(folders)}: give only one folder; a second --resume may be auto"
        )
    folder = folders[0] if folders else None
    return ("auto", folder) if "auto" in given else (folder, None)


def conclude(job: Job, outcome: Outcome, resume_command: ResumeCommand, steps: int | None) -> None:
    """Print, on the first host of the newest attempt, the results of the run, its loss curve, and how to continue."""
    if outcome.failure and outcome.failure.cause == "lost disk":
        return
    newest = newest_attempt(job.run_dir)
    if newest is None or newest.plan is None or newest.plan.hosts[0] != job.host:
        return
    # one host would read terabytes; whoever goes on reads them
    summary = summarize(job.run_dir, job.recipe, outcome, resume_command, steps, checksums=False)
    if outcome.code == 0:
        print_summary(summary)
        return
    if summary["picture"]:
        click.echo(f"Loss curve: {summary['picture']}", err=True)
    print_next_command(summary, outcome.failure is not None and outcome.failure.stopped)


def own_host(hosts: Sequence[str], given: str | None, file: Path) -> str:
    """Return this node's name in the list of hosts: the name that the user gave, or the name in the list that matches
    the node's own name or addresses.

    Raises:
        ClusterError: the list has no such host, or several of them.
    """
    if given is not None:
        known = {usual_form(host): host for host in hosts}
        if usual_form(given) not in known:
            raise ClusterError(
                f"--host {given}: {file} does not list this host; give one of the hosts that the file lists: "
                f"{', '.join(hosts[:5])}"
            )
        return known[usual_form(given)]
    name = socket.gethostname()
    addresses = [each.address.split("%")[0] for card in psutil.net_if_addrs().values() for each in card]
    ours = set(map(usual_form, [name, name.split(".")[0], socket.getfqdn(), *addresses]))
    found = [host for host in hosts if usual_form(host) in ours]
    if not found:
        raise ClusterError(
            f"{file} lists neither the name {name} of this machine nor one of its addresses: give with --host the "
            "name under which that file lists this machine"
        )
    if len(found) > 1:
        raise ClusterError(
            f"{file}: {' and '.join(found)} are both names of this machine: choose one of these names with --host"
        )
    return found[0]


def check_hosts(hosts: Sequence[str], slots: int, spares: int, workers: int, file: Path) -> int:
    """Return the number of nodes that train; raise ClusterError if the recipe's workers do not fill whole nodes, or if
    the host file does not list as many hosts as the recipe and --spares need.
    """
    count, rest = divmod(workers, slots)
    if rest:
        raise ClusterError(
            f"{file}: the recipe's {workers} workers do not fill whole nodes of {slots} workers: write NAME WORKERS on "
            "each line, where WORKERS is the number of workers on that host"
        )
    if len(hosts) != count + spares:
        more = len(hosts) - count
        hint = f": write --spares {more}" if more > 0 else f": list {count + spares} hosts"
        raise ClusterError(
            f"{file}: the file lists {len(hosts)} hosts with {slots} workers each, but the recipe needs {count} hosts "
            f"for its {workers} workers, and --spares is {spares}{hint}"
        )
    return count


def report(host: str, outcome: Outcome) -> None:
    """Print one line that says how the attempt ended on this host, with the last log lines of a failed worker."""
    if outcome.code == 0:
        click.echo(f"tc3: {host}: the run is complete", err=True)
    elif outcome.failure:
        complain(outcome.failure)
    else:
        click.echo(f"tc3: {host}: interrupted; all workers here have ended", err=True)
    if outcome.left:
        click.echo(f"tc3: these processes did not end: {' '.join(map(str, outcome.left))}", err=True)
