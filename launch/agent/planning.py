"""This module plans an attempt: it decides which hosts take part, from which checkpoint, with which recipe, and on
which port.

`Job` describes what a node's agent trains and how; it is the same in every attempt. `Planning` and `make_plan` make the
decisions of the one agent that plans an attempt; `follow` prepares the run's folder for a valid plan. The other
functions name the folders of attempts, and read files of earlier attempts.
"""

from __future__ import annotations

import math
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import click

from launch.agent import decide
from launch.agent.decide import Can, Rules, Smaller
from launch.agent.disk import Answer, LostDiskError, while_reading
from launch.agent.meeting import LOST_AFTER, Meeting
from launch.resume import data
from launch.resume.checkpoints import leave_behind, refuse_scratch, steps_done, take_stock
from launch.resume.data import guilty
from launch.run import compile_cache
from launch.run.msrun import MASTER, TRAIN, any_port, free_port, worker_count
from plugins.errors import ClusterError, TC3Error
from plugins.lines import OF, number_of
from plugins.sealed_checkpoint.plan import SAVING, iterations, made
from plugins.spike_guard.ledger import Ranges
from tools.checkpoint.scan import CheckpointInfo, lies_in, scan_checkpoints
from tools.files.atomic import part_of
from tools.process.waiting import meanwhile
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View
from tools.runs.attempts import (
    FINAL,
    VERDICT,
    Attempt,
    Beat,
    Plan,
    Verdict,
    folder_of,
    newest_attempt,
    numbers,
    read,
    read_attempt,
    recipe_file,
)
from tools.runs.readings import Follower

LOGS = "logs"
PATIENCE = 600.0  # seconds, at every attempt, until too few hosts, or a host that is not fit, are given up
BEAT = 1.0  # seconds between signs of life of who plans
_ENDS_OF_METRICS = (1 << 14, 1 << 20)  # bytes of a file in which the attempt that wrote last stands; few lines are long
SETTLE = 2.0  # seconds without a newcomer after which those who are there start without the others
Tick = Callable[[], None]


def own_name() -> str:
    """Return this host's name in a form that file names can contain."""
    return socket.gethostname().replace("/", "_") or "localhost"


@dataclass(frozen=True)
class Job:
    """A `Job` describes a run for the agent of one node: the recipe, the hosts, the folder and the settings.

    Attributes:
        recipe: effective; a plan may override more of it.
        host: this node, by its name in `hosts`.
        hosts: all hosts that the run may use, including spares, in the order of use.
        nodes: the number of nodes that take part in an attempt.
        port: the port of msrun's scheduler in the first attempt; None means a free one.
        resume: the checkpoint to begin from, as long as no later one is saved.
        choose: finds that checkpoint on the planning host; used instead of `resume`.
        leaves: whether the user has named a checkpoint from which no attempt has gone on yet.
        first: the earliest attempt that can belong to this launch.
        bind: whether workers get cores of their own.
        lost_after: seconds without a sign of life after which a node, or the disk, is lost.
        patience: seconds, at every attempt, after which too few hosts, or a host that is not fit, are given up.
        watchful: whether hangs and a lost disk end an attempt, and SIGTERM is notice of an end that is to come.
        cached: whether workers load, and write, the compile cache (launch/run/compile_cache.py).
        show: returns a context that shows the steps of an attempt, and yields a function to be called now and then.
        say: prints a sentence for the user.
        worker: the file that every worker runs.
    """

    recipe: Recipe
    run_dir: Path
    host: str = field(default_factory=own_name)
    hosts: tuple[str, ...] = ()
    nodes: int = 1
    port: int | None = None
    resume: CheckpointInfo | None = None
    choose: Callable[[], CheckpointInfo | None] = lambda: None
    leaves: Callable[[], bool] = lambda: False
    first: int = 0
    bind: bool = True
    rules: Rules = field(default_factory=lambda: Rules(restarts=0))
    lost_after: float = LOST_AFTER
    patience: float = PATIENCE
    watchful: bool = False
    cached: bool = False
    show: Callable[[], AbstractContextManager[Tick]] = lambda: nullcontext(lambda: None)
    say: Callable[[str], None] = lambda sentence: click.echo(sentence, err=True)
    worker: Path = TRAIN

    @property
    def several(self) -> bool:
        """Return whether the run may use more nodes than this one."""
        return len(self.hosts) > 1

    @property
    def saves(self) -> Path:
        """Return the folder in which the run's checkpoints are saved."""
        return Path(self.recipe["checkpoint"]["save_path"])

    @property
    def slots(self) -> int:
        """Return the number of workers on each node."""
        return worker_count(self.recipe) // self.nodes


def next_number(run_dir: Path, saves: Path) -> int:
    """Return the number of the attempt with which a new launch begins; logs that an older version wrote without attempt
    numbers count as the first attempt.

    The number is above those of all attempts that have written metrics into the run's folder, or checkpoints into
    `saves`, also if the folders of these attempts were removed: readers leave out what an attempt writes after a later
    one.
    """
    return max(*numbers(run_dir), _written(run_dir, saves), -1) + 1


def _written(run_dir: Path, saves: Path) -> int:
    """Return the number of the newest attempt that has written logs, metrics or checkpoints; -1 if there is none."""
    known = [0 if _is_folder(run_dir / LOGS) else -1]
    known += [number_of(made(folder).get("attempt")) for folder in iterations(saves)]
    known += [number_of(folder.name.removeprefix(SAVING)) for folder in saves.glob(f"{SAVING}*")]
    for file in (run_dir / "metrics").glob("*.jsonl"):
        ends = (list(Follower(file, newest=size).records()) for size in _ENDS_OF_METRICS)
        known += [number_of(record.get(OF)) for record in next(filter(None, ends), [])]
    return max(known)


def logs_of(run_dir: Path, number: int, rank: int | None = None) -> Path:
    """Return the folder in which msrun and the workers of an attempt log; `rank` is the rank of a node if there are
    several.
    """
    logs = folder_of(run_dir, number) / LOGS
    return logs if rank is None else logs / f"node_{rank}"


def link_logs(run_dir: Path, number: int) -> None:
    """Make RUN/logs a link to the logs of attempt `number`; if RUN/logs is a real folder, it becomes the folder of logs
    of the attempt before.
    """
    link, logs = run_dir / LOGS, logs_of(run_dir, number)
    logs.mkdir(parents=True, exist_ok=True)
    if _is_folder(link):
        earlier = logs_of(run_dir, max(number - 1, 0))
        if earlier.exists():
            earlier = earlier.with_name("logs_before")
        earlier.parent.mkdir(parents=True, exist_ok=True)
        link.rename(earlier)
    part = part_of(link)
    part.symlink_to(logs.relative_to(run_dir))
    part.replace(link)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@dataclass
class Planning:
    """A `Planning` is an attempt that has no plan yet. `began` is the time when this node joined the attempt; `came`
    holds the time when it first saw each host.

    Another agent may take over the planning at any moment, and this agent may notice it late. So planning changes
    nothing in a run: files of a plan have the plan's own name, and `follow` makes all other changes once the plan is
    valid.

    `prepare` checks the checkpoint from which a plan goes on, and returns the recipe of the attempt (None means the
    recipe of the job).
    """

    job: Job
    number: int
    can: Can
    meeting: Meeting
    prepare: Callable[[Plan], Recipe | None]
    began: float = field(default_factory=lambda: time.monotonic())
    came: dict[str, float] = field(default_factory=dict)

    def wanted(self, there: list[str]) -> Plan | None:
        """Return a plan with the hosts that are present; return None if there are too few hosts, or if other hosts may
        still come.

        Only the agent that plans the attempt calls this, because the plan's checkpoint is read completely to verify it.
        If this agent was delayed, it may have read the list of left-out samples before another agent planned and
        trained on, and the checkpoints after that: errors that it then finds say nothing about the run, and it returns
        None.

        Raises:
            TC3Error: the attempt cannot be planned.
        """
        try:
            return self._wanted(there)
        except TC3Error:
            if self.meeting.plans(self.number):
                raise
            return None

    def _wanted(self, there: list[str]) -> Plan | None:
        now = time.monotonic()
        for host in there:
            self.came.setdefault(host, now)
        missing = set(self.job.hosts) - set(there)
        if missing and now - max([self.began, *self.came.values()]) < SETTLE:
            return None
        attempts = history(self.job, self.number)
        hosts, overrides = read_saves(self.job, partial(self._hosts, there, attempts))
        if not hosts:
            return None
        spares = [host for host in there if host not in hosts]
        now = self.meeting.now()
        with meanwhile(partial(self._beat, now), 0.0, BEAT):  # so that no other node plans beside this one, or leaves
            make = partial(make_plan, self.job, self.number, hosts, spares, overrides, again=bool(attempts), now=now)
            return read_saves(self.job, partial(self._made, make))

    def _made(self, make: Callable[[], Plan]) -> Plan:
        read_skipped(self.job)
        plan = make()
        recipe = self.prepare(plan) or recipe_of(self.job, plan)
        dump_recipe(recipe, recipe_file(self.job.run_dir, plan))
        return plan

    def _beat(self, since: float) -> None:
        with suppress(LostDiskError, ClusterError):  # the main thread meets them, too
            self.meeting.beat(self.number, Beat(self.job.host, self.meeting.now(), "start", since))

    def _hosts(self, there: list[str], attempts: list[Attempt]) -> tuple[list[str], list[str]]:
        """Return (hosts by rank, overrides of the recipe); the hosts are empty while there are too
        few of them.
        """
        last = attempts[-1] if attempts else None
        if last is None or last.plan is None or last.verdict is None or not self._of_this_size(last.plan):
            hosts = [host for host in self.job.hosts if host in there][: self.job.nodes]
            return (hosts if len(hosts) == self.job.nodes else []), []
        hosts = decide.next_hosts(last, last.verdict, there, attempts[:-1], self.job.rules)
        if last.verdict.decision == "smaller" or last.plan.overrides:  # or hosts are back
            how = self.can(hosts)
            return (hosts[: how.hosts], how.overrides) if isinstance(how, Smaller) else ([], [])
        return (hosts if len(hosts) == len(last.plan.hosts) else []), last.plan.overrides

    def _of_this_size(self, plan: Plan) -> bool:
        """Return whether a plan is for the nodes of this job, or for fewer of them. Otherwise all agents were killed,
        and started again on another number of nodes.
        """
        return plan.slots == self.job.slots and bool(plan.overrides or len(plan.hosts) == self.job.nodes)


def make_plan(
    job: Job,
    number: int,
    hosts: Sequence[str],
    spares: Sequence[str] = (),
    overrides: Sequence[str] = (),
    again: bool = False,
    now: float = 0.0,
) -> Plan:
    """Return the plan of attempt `number` on `hosts`; with `again`, the attempt begins from the newest complete
    checkpoint if one exists, unless the user has meanwhile named another checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, although the run has started from a checkpoint before.
    """
    best, own = None, job.resume if job.resume and job.resume.path.exists() else None
    if again and not job.leaves():
        take_stock(job.run_dir, job.saves)
        unfit = guilty(job.recipe, job.run_dir)
        best = scan_checkpoints(job.saves, unfit)[0]
        if own and lies_in(own.path, job.saves) and unfit(own.path, own.step):
            own = None
    resume = best or own or job.choose()
    if again and resume is None:
        refuse_scratch(job.run_dir, job.saves)
    # free on the first host: known if that is this one, else a guess, which that host tries
    port = free_port() if hosts[0] == job.host else any_port()
    return Plan(
        attempt=number,
        time=now,
        hosts=list(hosts),
        slots=job.slots,
        master=hosts[0] if len(hosts) > 1 else MASTER,  # one node looks for nobody else
        port=(None if again else job.port) or port,
        spares=list(spares),
        resume=str(resume.path.absolute()) if resume else None,
        step=resume.step if resume else 0,
        overrides=list(overrides),
        compile_cache=str(compile_cache.root()) if job.cached else None,
        name=f"{number:04d}-{uuid.uuid4().hex[:8]}",
        branch=resume is not None and resume.named,
        start=steps_done(job.recipe, resume) if resume else 0,
        batch=View(job.recipe).global_batch,
    )


def read_saves(job: Job, what: Callable[[], Answer], limit: float | None = None) -> Answer:
    """Return what the function `what` returns, which reads or renames checkpoints of the run.

    Args:
        limit: of a node that leaves, the seconds after which a read that has not returned is given up.

    Raises:
        LostDiskError: the disk has not answered for `limit` seconds or, in a watchful run, for as long as hosts are
            waited for.
    """
    patience = job.patience if job.watchful else math.inf
    return while_reading(job.saves, patience if limit is None else min(patience, limit), what)


def read_skipped(job: Job) -> None:
    """Change the recipe of `job` in place so that it leaves out all samples that any attempt of the run has left
    out.
    """
    before: Ranges = ()
    if data.guard_is_on(job.recipe) and (known := numbers(job.run_dir)):
        plans = (read_attempt(job.run_dir, number).plan for number in reversed(known))
        last = next((file for plan in plans if plan and (file := recipe_file(job.run_dir, plan)).exists()), None)
        before = data.left_out(load_recipe(last)) if last else ()
    data.apply_ledger(job.recipe, job.run_dir, before)


def follow(job: Job, plan: Plan) -> None:
    """Prepare the run's folder for the attempt that a plan describes, once the plan is valid; each host of the plan
    calls this function before the host's workers start.

    Therefore no checkpoint of this attempt exists at this time. A host that was delayed may find checkpoints of later
    attempts: the seals of a checkpoint say which attempt made it, and only checkpoints of earlier attempts are renamed.
    If the attempt is already over, `RUN/recipe.yaml` belongs to a later attempt and is not changed.

    `RUN/recipe.yaml` and `RUN/data.json` say how the data of the checkpoints in the folder is read. The two files are
    written after the checkpoints that the plan leaves behind were renamed; otherwise, after an interruption, the files
    would describe those checkpoints wrongly.
    """
    recipe = recipe_of(job, plan)
    data.put_guilty_aside(recipe, job.run_dir, job.saves)
    if plan.branch and plan.resume:
        leave_behind(job.saves, Path(plan.resume), plan.attempt)
    if plan.hosts[0] == job.host and not read(folder_of(job.run_dir, plan.attempt) / VERDICT, Verdict):
        dump_recipe(recipe, job.run_dir / "recipe.yaml")
        # `history`, because an agent does not know the first attempt of its launch
        if plan.branch or not history(job, plan.attempt) or not (job.run_dir / data.DIGESTS).exists():
            data.keep_digests(recipe, job.run_dir)
        link_logs(job.run_dir, plan.attempt)


def recipe_of(job: Job, plan: Plan) -> Recipe:
    """Return the recipe of an attempt, as its workers read it; before the plan exists, return the job's recipe."""
    file = recipe_file(job.run_dir, plan)
    if plan.name and file.exists():
        return load_recipe(file)
    return apply_overrides(job.recipe, plan.overrides) if plan.overrides else job.recipe


def first_number(run_dir: Path, saves: Path) -> int:
    """Return the attempt that an agent joins: the newest one while it is in progress, or a new one after a run that
    ended.
    """
    newest = newest_attempt(run_dir)
    if newest and not (newest.verdict and newest.verdict.decision in FINAL):
        return newest.number + bool(newest.verdict)
    last = newest.number if newest else -1
    written = _written(run_dir, saves)
    if written <= last:
        # not by a second look at the folder: another agent may have begun the next attempt since the first one
        return last + 1
    begun = newest_attempt(run_dir)  # by another agent while this one was reading, which wrote what was read
    return begun.number + bool(begun.verdict) if begun and begun.number > last else written + 1


def under_way(run_dir: Path) -> bool:
    """Return whether attempts are in progress in `run_dir`, or were interrupted without a verdict, so that a new agent
    has to join them.
    """
    newest = newest_attempt(run_dir)
    return newest is not None and (newest.verdict is None or newest.verdict.decision not in FINAL)


def history(job: Job, number: int) -> list[Attempt]:
    """Return the attempts before `number` that belong to the same launch: that is, the attempts after the last one that
    ended a run.
    """
    found: list[Attempt] = []
    for earlier in reversed([each for each in numbers(job.run_dir) if job.first <= each < number]):
        attempt = read_attempt(job.run_dir, earlier)
        if attempt.plan is None or (attempt.verdict and attempt.verdict.decision in FINAL):
            break
        found.insert(0, attempt)
    return found


def checkpoint_of(plan: Plan) -> CheckpointInfo | None:
    """Return the checkpoint from which the attempt of a plan continues; return None if the attempt begins without a
    checkpoint.
    """
    return CheckpointInfo(Path(plan.resume), plan.step) if plan.resume else None
