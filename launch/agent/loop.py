"""This module is the agent of one node, from the time when it joins a run until the run is done or this node leaves.

An `Agent` runs in a loop: it joins an attempt, waits for its plan, starts the workers (`launch.agent.part`) or waits as
a spare, writes how they ended, follows the verdict, and joins the next attempt. Signals to an agent are stored while it
waits, and handled where the agent may be interrupted.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from launch.agent import decide
from launch.agent.decide import Smaller
from launch.agent.disk import LostDiskError
from launch.agent.lookout import Around, link_to
from launch.agent.meeting import Meeting
from launch.agent.part import Part
from launch.agent.phases import Limits, learn_steps
from launch.agent.planning import Job, Planning, checkpoint_of, history, logs_of, read_saves, read_skipped
from launch.agent.smaller import smaller
from launch.resume.checkpoints import steps_done
from launch.run.failure import Failure
from launch.run.supervise import Outcome
from plugins.errors import CheckpointError, TC3Error
from plugins.sealed_checkpoint.plan import global_batch_of, made, progress
from tools.checkpoint.scan import CheckpointInfo, newest_saved
from tools.process.children import NUMBERS, collected_signals, handled
from tools.process.host import shorten
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.attempts import END, FINAL, PLAN, VERDICT, Attempt, Beat, End, Plan, Verdict, file_of, folder_of, read
from tools.runs.readings import Follower
from tools.schema.stages import loss_rank

NOTICE_POLL = 0.1  # seconds between looks for such a signal
POLL = 0.2  # seconds between looks while nothing runs here
BEAT = 1.0  # seconds between signs of life of a node that waits
LEAVE = 3.0  # seconds that a node which leaves waits for the verdict
RECENT = 1 << 26  # bytes of a metrics file from which the limits of its steps are learned
UNFIT = 60.0  # seconds until a node that was not fit is tried again


class Interrupted(Exception):
    """This error means that a signal, such as SIGTERM, makes this agent leave the run."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Agent:
    """An `Agent` takes part in a run for one node (`job.host`): it starts and supervises the workers of this node.

    Attributes:
        fit: returns why this node cannot take part now; called before every attempt except the first.
        prepare: called by the agent that plans an attempt, before others know of the plan; see `Planning`.
        outcome: the result of this agent's last part; `failed` means that the part itself failed, and did not end
            because of another host.
        parts: the number of attempts in which this agent took part.
    """

    job: Job
    fit: Callable[[], list[str]] = list
    prepare: Callable[[Plan], Recipe | None] = lambda plan: None
    outcome: Outcome = field(default_factory=lambda: Outcome(0))
    failed: bool = False
    parts: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Prepare to meet the other agents in the run's folder."""
        self.meeting = Meeting(self.job.run_dir, self.job.host, lost_after=self.job.lost_after)
        self.link = link_to(host for host in self.job.hosts if host != self.job.host)
        self.notices: list[int] = []  # signals that came; while workers run the supervisor collects them instead
        metrics = self.job.run_dir / "metrics" / f"rank_{loss_rank(View(self.job.recipe))}.jsonl"
        learn_steps(self.limits, Follower(metrics, newest=RECENT).records())  # of months of steps only the last count
        self.last: tuple[int, Verdict] | None = None
        self.leaving = False  # a signal has told us to
        self.refused = False  # whether a run of only this host was refused before it started anything

    def run(self, number: int) -> Outcome:
        """Take part in the run from attempt `number` on, until the run is done or given up, or a signal makes this
        agent leave.
        """
        with collected_signals(self.notices):
            try:
                while True:
                    verdict = self._attempt(number)
                    if verdict is None or verdict.decision in FINAL or self.leaving:
                        return self._final(number, verdict)
                    self.last = number, verdict
                    self._sleep(verdict.wait)
                    number += 1
            except Interrupted as notice:
                with suppress(OSError, LostDiskError):
                    self.meeting.gone(number)
                return Outcome(128 + notice.number)
            except LostDiskError as error:
                return Outcome(1, Failure(str(error), logs_of(self.job.run_dir, number), cause="lost disk"))
            except TC3Error:
                with suppress(OSError, LostDiskError):
                    self.meeting.withdraw(number) if self.refused else self.meeting.gone(number)
                raise

    def _sleep(self, seconds: float) -> None:
        """Wait; raise Interrupted if a signal arrives or has arrived before."""
        until = time.monotonic() + seconds
        while True:
            if self.notices:
                raise Interrupted(self.notices[0])
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(NOTICE_POLL, left))

    def _attempt(self, number: int) -> Verdict | None:
        """Take part in one attempt, and return its verdict; None if this node leaves before the verdict."""
        self.failed = self.leaving = False
        plan = self._planned(number)
        if plan is None:
            return read(folder_of(self.job.run_dir, number) / VERDICT, Verdict)
        self._say_plan(plan)
        if self.job.host not in plan.hosts:
            self._stand_by(plan)
            return self._verdict(plan)
        if read(file_of(folder_of(self.job.run_dir, number), END, self.job.host), End):
            return self._verdict(plan)  # of an earlier agent of this host, whose workers are gone
        part = Part(self.job, plan, self.meeting, self.limits, self.link, self.notices)
        self.outcome, end = part.run()
        self.failed = end.outcome == "failed"
        self.parts += 1
        self.leaving = bool(self.outcome.code) and self.outcome.failure is None
        try:
            self.meeting.end(number, end)
            return self._verdict(plan, LEAVE if self.leaving else None)
        except LostDiskError as error:
            if self.outcome.code:  # that comes first
                if self.outcome.failure and self.outcome.failure.cause != "lost disk":
                    self.job.say(f"tc3: {error}")
                return None
            raise

    def _planned(self, number: int) -> Plan | None:
        """Announce this host for an attempt, wait for the plan and return it; None if the attempt gets a verdict
        instead.
        """
        planning = Planning(self.job, number, self._can, self.meeting, self.prepare)

        def wanted(there: list[str]) -> Plan | None:
            try:
                with self._interruptible():  # a plan changes nothing in the run, and reads a whole checkpoint
                    return planning.wanted(there)
            except TC3Error as error:
                if not (self.job.several or history(self.job, number)):  # nothing was started, and nobody asks why
                    self.refused = True
                    raise
                # the others would try the same, one after another
                why = Verdict(self.meeting.now(), "give up", str(error), self.job.host, cause="user error")
                self.meeting.refuse(number, why)
                raise

        if self.last is not None:
            self._become_fit(number)
        self.meeting.come(number)
        until = look = planning.began + self.job.patience
        while (plan := self.meeting.plan(number, wanted)) is None:
            if read(folder_of(self.job.run_dir, number) / VERDICT, Verdict):
                return None
            if (now := time.monotonic()) > look:
                look = now + self.job.lost_after
                if self.meeting.is_planned(number):
                    until = now + self.job.patience  # also for another plan, if this agent dies
                elif now > until:
                    raise self._too_few(number)
            self._sleep(POLL)
        return plan

    def _too_few(self, number: int) -> TC3Error:
        """Leave an attempt to which too few hosts came, and return the error that says so."""
        there = self.meeting.there(number)
        self.meeting.gone(number)
        missing = shorten(host for host in self.job.hosts if host not in there)
        where = f"; start tc3 agent, with this run folder ({self.job.run_dir}), on {missing}" if missing else ""
        return TC3Error(
            f"attempt {number} cannot start: only {shorten(there) or 'nobody'} joined within {self.job.patience:g} s, "
            f"but the run needs more nodes{where}"
        )

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let signals raise Interrupted at once in the `with` block."""

        def interrupt(number: int, frame: object) -> None:
            raise Interrupted(number)

        with ExitStack() as handlers:
            for number in NUMBERS:
                handlers.enter_context(handled(number, interrupt))
            yield

    def _become_fit(self, number: int) -> None:
        """Return when this node passes its checks, or when the other nodes have made their plan without it."""
        began, asked, said = time.monotonic(), -math.inf, ""
        while True:
            now = time.monotonic()
            if now - asked > UNFIT:
                asked, reasons = now, self.fit()
            why = "; ".join([*reasons, *self.link.lost()])
            if not why or read(folder_of(self.job.run_dir, number) / PLAN, Plan):
                return
            words = f"{self.job.host} cannot take part in attempt {number}: {why}"
            if now - began > self.job.patience:
                raise TC3Error(words)
            if why != said:
                self.job.say(f"tc3: {words}")
                said = why
            self._sleep(POLL)

    def _stand_by(self, plan: Plan) -> None:
        """Wait as a spare until the attempt is over: give signs of life, and watch all other hosts in turn."""
        around = Around(self.meeting, plan, self.job.host)
        place = folder_of(self.job.run_dir, plan.attempt) / VERDICT
        since = self.meeting.now()
        while not (around.look() or read(place, Verdict)):
            self.meeting.beat(plan.attempt, Beat(self.job.host, self.meeting.now(), "start", since))
            self._sleep(BEAT)

    def _verdict(self, plan: Plan, limit: float | None = None) -> Verdict | None:
        """Return the verdict, which this agent waits for or decides itself; None if there is no verdict after `limit`
        seconds.
        """
        earlier = history(self.job, plan.attempt)
        around = Around(self.meeting, plan, self.job.host)
        began = time.monotonic()

        def given(attempt: Attempt) -> Verdict:
            now, saved = self.meeting.now(), None
            with suppress(CheckpointError):  # a file cannot be read: whoever goes on, or tells the end, says so
                saved = _saved(plan, best) if (best := newest_saved(self.job.saves)) else None
            return decide.verdict(attempt, earlier, self.job.rules, self._can, now=now, saved=saved)

        def given_in_time(attempt: Attempt) -> Verdict:
            with self._interruptible() if limit is None else nullcontext():
                return read_saves(self.job, partial(given, attempt), limit)

        while (found := self.meeting.verdict(plan.attempt, given_in_time)) is None:
            if limit is not None and time.monotonic() - began > limit:
                return None
            around.look()
            if limit is None:
                self._sleep(POLL)
            else:
                time.sleep(POLL)
        return found

    def _can(self, hosts: list[str]) -> Smaller | str:
        read_skipped(self.job)
        best = None
        with suppress(CheckpointError):  # a file cannot be read: whoever plans the next attempt says so
            best = newest_saved(self.job.saves)
        done = steps_done(self.job.recipe, best) if best else 0
        return smaller(self.job.recipe, len(hosts), self.job.slots, done)

    def _say_plan(self, plan: Plan) -> None:
        """Print one line for an attempt that follows another: why it follows, and from which checkpoint it goes on."""
        if self.last is None:
            return
        number, verdict = self.last
        checkpoint = checkpoint_of(plan)
        place = f"goes on from step {checkpoint.step}: {checkpoint.path}" if checkpoint else "starts from the beginning"
        before = read(folder_of(self.job.run_dir, number) / PLAN, Plan)
        hosts = f" on {_hosts(plan, before)}" if self.job.several else ""
        self.job.say(f"tc3: attempt {number} ended: {verdict.why}; attempt {plan.attempt}{hosts} {place}")

    def _final(self, number: int, verdict: Verdict | None) -> Outcome:
        """Return the outcome of the run, as this node sees it."""
        if self.last is not None:
            restarts = len(history(self.job, number))  # an agent that joins a run does not know its first attempt
            self.job.say(f"tc3: {restarts} restart{'s' * (restarts > 1)} in all")
        if self.leaving or self.failed:
            return self.outcome
        if verdict and verdict.decision == "done":
            return Outcome(0)
        user = verdict is not None and verdict.cause == "user error"
        why = verdict.why if verdict else "the end of the attempt was not agreed upon"
        failure = Failure(why, logs_of(self.job.run_dir, number), cause=verdict.cause if verdict else None)
        return Outcome(2 if user else 1, failure)


def _hosts(plan: Plan, before: Plan | None) -> str:
    """Return the hosts of an attempt, and which of them were not in the attempt before."""
    new, old = set(plan.hosts), set(before.hosts if before else plan.hosts)
    came = [host for host in plan.hosts if host not in old]
    left = [host for host in (before.hosts if before else []) if host not in new]
    change = f" ({', '.join(came)} in place of {', '.join(left)})" if came and left else ""
    change = change or (
        f" (without {', '.join(left)})" if left else f" ({', '.join(came)} in addition)" if came else ""
    )
    return ", ".join(plan.hosts) + change


def _saved(plan: Plan, best: CheckpointInfo) -> int:
    """Return the step of a checkpoint, counted as the attempt's `plan` counts the step that it begins from, which may
    have another global batch.
    """
    if not plan.resume:
        return best.step
    begin = Path(plan.resume)
    if not global_batch_of(begin) and made(best.path).get("attempt") == plan.name:
        return max(best.step, plan.step + 1)  # `begin` is gone (`checkpoint.save_max`), and with it its batch
    come = progress({best.path: best.step, begin: plan.step})
    return plan.step + come[best.path] - come[begin]
