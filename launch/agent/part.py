"""This module runs one node's part of an attempt: it starts msrun, supervises the workers of msrun, and reports how the
workers ended.

`command_of` makes the command with which this node starts an attempt: the msrun command, and the environment and cores
of its workers. `Part` runs the workers under the supervisor and the lookout. A separate thread publishes the graphs
that the workers have compiled, because copying takes time; a `Part` lets the workers save when an end is announced, and
writes how they ended.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launch.agent.disk import LostDiskError
from launch.agent.lookout import Around, Link, Lookout
from launch.agent.meeting import Meeting
from launch.agent.phases import Limits, Phases
from launch.agent.planning import Job, follow, logs_of, read_saves, recipe_of
from launch.resume import checkpoints
from launch.run.compile_cache import CompileCache, prepare
from launch.run.cores import Cores, of_launch
from launch.run.failure import Failure
from launch.run.msrun import (
    Node,
    check_port,
    cluster_environment,
    msrun_command,
    optimizer_environment,
    worker_environment,
)
from launch.run.supervise import Outcome, supervise
from launch.workers import leave_request
from plugins.errors import ClusterError
from plugins.lines import ATTEMPT
from plugins.operator_fusion import plan as operator_fusion
from tools.checkpoint.scan import CheckpointInfo
from tools.process.waiting import meanwhile
from tools.recipe.load import Recipe
from tools.runs.attempts import End, Plan, folder_of, recipe_file
from tools.runs.attempts import Outcome as Ending

LOOK = 2.0  # seconds between looks at what is compiled
WORDS = 400  # characters of a worker's last words in an end


@dataclass(frozen=True)
class Command:
    """A `Command` holds what a node starts for an attempt: the argv of msrun, the environment of the workers, and the
    cores on which they run.
    """

    argv: list[str]
    environment: dict[str, str]
    cores: Cores


def command_of(job: Job, plan: Plan) -> Command:
    """Return the command with which this node starts its workers for the attempt that `plan` describes."""
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
    environment = {**optimizer_environment(recipe), **environment}
    if several:
        environment = {**cluster_environment(recipe, job.run_dir, logs), **environment}
    return Command(argv, environment, cores)


def own_logs(job: Job, plan: Plan) -> Path:
    """Return the folder for the logs of this node's part of an attempt."""
    return logs_of(job.run_dir, plan.attempt, plan.hosts.index(job.host) if len(plan.hosts) > 1 else None)


def own_ranks(job: Job, plan: Plan) -> range:
    """Return the ranks of this node's workers in the whole run."""
    first = plan.hosts.index(job.host) * plan.slots
    return range(first, first + plan.slots)


@dataclass
class Part:
    """A `Part` runs this node's workers in one attempt of a run (one start of all its workers)."""

    job: Job
    plan: Plan
    meeting: Meeting
    limits: Limits
    link: Link = field(default_factory=Link)
    signals: list[int] = field(default_factory=list)  # that came before the workers were started
    noticed: bool = False
    lookout: Lookout | None = None

    def run(self) -> tuple[Outcome, End]:
        """Start the workers, and return after all of them have ended."""
        if done := self._complete():
            self.job.say(done)
            return Outcome(0), self._end(Outcome(0), None)
        recipe, logs = recipe_of(self.job, self.plan), own_logs(self.job, self.plan)
        ranks = own_ranks(self.job, self.plan)
        logs.mkdir(parents=True, exist_ok=True)
        if failure := self._port_taken(logs):
            return Outcome(1, failure), self._end(Outcome(1, failure), None)
        phases = Phases(recipe, self.job.run_dir, logs, ranks, self.plan.before, self.limits.learn, name=self.plan.name)
        around = Around(self.meeting, self.plan, self.job.host)
        careful = self.job.watchful
        limits, lost = (self.limits, self.job.lost_after) if careful else (None, None)
        with self.job.show() as show, Lookout(phases, around, limits, show, lost, self.link) as self.lookout:
            outcome = self._supervised(recipe, logs, ranks)
        end = self._end(outcome, phases)
        return (Outcome(128 + signal.SIGTERM) if end.outcome == "preempted" else outcome), end

    @property
    def folder(self) -> Path:
        """Return the folder in which the run keeps the files of this attempt."""
        return folder_of(self.job.run_dir, self.plan.attempt)

    def _supervised(self, recipe: Recipe, logs: Path, ranks: range) -> Outcome:
        """Start the workers, wait for their end and return the outcome; the lookout already gives signs of life."""
        assert self.lookout
        read_saves(self.job, partial(follow, self.job, self.plan))
        command = command_of(self.job, self.plan)
        cache = self._cache(recipe, ranks)
        for sentence in (*command.cores.said, *filter(None, [cache.said])):
            self.job.say(sentence)
        command.cores.write()
        environment = {**command.environment, **cache.environment, **leave_request.environment(self.folder)}
        outcome = None
        try:
            with meanwhile(cache.keep, LOOK, LOOK):
                outcome = supervise(
                    command.argv, environment, self.job.run_dir, len(ranks), self.lookout.tick, logs, self._ends,
                    self.signals, self.lookout.explain,
                )  # fmt: skip
            return outcome
        finally:
            cache.close(outcome is not None and outcome.code == 0)

    def _cache(self, recipe: Recipe, ranks: range) -> CompileCache:
        if not self.plan.compile_cache:
            return CompileCache()
        assert self.lookout
        world = len(self.plan.hosts) * self.plan.slots
        over = self.lookout.tick
        if self.plan.resume:
            recipe = Recipe({**recipe, "checkpoint": {**recipe["checkpoint"], "load_path": self.plan.resume}})
        return prepare(recipe, self.job.run_dir, self.folder, world, ranks, over=lambda: self.signals or over())

    def _ends(self, number: int) -> bool:
        """Return whether a signal to this process ends the workers at once; the first SIGTERM only announces the end,
        so that the workers may save.
        """
        if number != signal.SIGTERM or self.noticed or not self.job.watchful:
            return True
        self.noticed = True
        ranks = own_ranks(self.job, self.plan)
        return leave_request.request(self.job.run_dir, self.folder, ranks) is None

    def _complete(self) -> str | None:
        if not self.plan.resume:
            return None
        return checkpoints.complete(self.job.recipe, CheckpointInfo(Path(self.plan.resume), self.plan.step))

    def _port_taken(self, logs: Path) -> Failure | None:
        """Return a failure if the scheduler's port is in use; msrun would report this only after most of a minute, and
        vaguely.
        """
        if self.plan.hosts[0] != self.job.host:
            return None
        try:
            check_port(self.plan.port)
        except ClusterError:
            return Failure(f"port {self.plan.port} is in use", logs / "msrun.log", cause="port")
        return None

    def _end(self, outcome: Outcome, phases: Phases | None) -> End:
        phase, step = (phases.phase, phases.step) if phases else ("start", self.plan.before)
        now = self._now()
        host, failure = self.job.host, outcome.failure
        if outcome.code == 0 and (saved := leave_request.saved_at(self.folder)):
            how: Ending = "preempted" if self.noticed else "told to end"
            return End(host, now, how, "save", saved, message=f"saved on request at step {saved}")
        if outcome.code == 0:
            return End(host, now, "done", "end", step)
        if self.lookout and self.lookout.told:
            return End(host, now, "told to end", phase, step, message=failure.message if failure else "")
        if failure:
            words = last_words(failure)
            return End(
                host, now, "failed", phase, step, failure.cause or "exit", failure.rank, failure.code, words,
                str(failure.log),
            )  # fmt: skip
        notice = outcome.code == 128 + signal.SIGTERM and self.job.watchful
        return End(host, now, "preempted" if notice else "interrupted", phase, step, code=outcome.code)

    def _now(self) -> float:
        try:
            return self.meeting.now()
        except LostDiskError:
            return self.meeting.disk.guess()


def last_words(failure: Failure) -> str:
    """Return a failure's message, and the last error in the log of the failed worker; a killed worker has no such
    error.
    """
    said = failure.error or " ".join(line.strip() for line in failure.lines[-3:])
    silent = failure.user_error or failure.stopped or not said
    return (failure.message if silent else f"{failure.message}: {said}")[:WORDS]
