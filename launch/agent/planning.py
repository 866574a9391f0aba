"""Who takes part in an attempt, from which checkpoint, on which port: what the one that plans it decides."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launch.agent import decide
from launch.agent.decide import Smaller
from launch.agent.disk import LostDiskError
from launch.agent.job import Job, link_logs, next_number
from launch.agent.meeting import Meeting
from launch.resume.skipped import go_back
from launch.run import compile_cache
from launch.run.msrun import MASTER, free_port
from plugins.errors import ClusterError
from plugins.sealed_checkpoint.plan import fault, step_of
from tools.checkpoint.scan import CheckpointInfo, iterations, scan_checkpoints
from tools.runs.attempts import Attempt, Beat, Plan, numbers, read_attempt

BEAT = 1.0  # seconds between signs of life of who plans
SETTLE = 2.0  # seconds without a newcomer after which those who are there start without the others
PORTS = range(20000, 32000)  # below those that Linux gives to connections by itself
FINAL = ("done", "give up", "leave")

Can = Callable[[list[str]], Smaller | str | None]


@dataclass
class Planning:
    """One attempt before its plan. `began`: when this node came to it; `came`: when it first saw each host there."""

    job: Job
    number: int
    can: Can
    meeting: Meeting
    prepare: Callable[[Plan], None]
    began: float = field(default_factory=time.monotonic)
    came: dict[str, float] = field(default_factory=dict)

    def wanted(self, there: list[str]) -> Plan | None:
        """The plan with those who are there; None while they are too few, or others may still come.

        Only who is to plan the attempt asks: the plan's checkpoint is read as a whole, to see whether it is one.
        """
        now = time.monotonic()
        for host in there:
            self.came.setdefault(host, now)
        missing = set(self.job.hosts) - set(there)
        if missing and now - max([self.began, *self.came.values()]) < SETTLE:
            return None
        attempts = history(self.job, self.number)
        hosts, overrides = self._hosts(there, attempts)
        if not hosts:
            return None
        spares = [host for host in there if host not in hosts]
        now = self.meeting.now()
        with self._alive():
            if attempts:
                go_back(self.job.recipe, self.job.run_dir, self.job.saves)
            plan = make_plan(self.job, self.number, hosts, spares, overrides, again=bool(attempts), now=now)
            if not self.meeting.plans(self.number):
                return None  # what prepare writes into the run's folder is another one's now
            self.prepare(plan)
            link_logs(self.job.run_dir, self.number)
        return plan

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Give signs of life meanwhile, so that no other node plans beside this one."""
        over = threading.Event()
        since = self.meeting.now()

        def beat() -> None:
            with suppress(LostDiskError, ClusterError):  # the main thread meets them, too
                while not over.wait(BEAT):
                    self.meeting.beat(self.number, Beat(self.job.host, self.meeting.now(), "start", since))

        thread = threading.Thread(target=beat, daemon=True, name="alive")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _hosts(self, there: list[str], attempts: list[Attempt]) -> tuple[list[str], list[str]]:
        """(hosts by rank, overrides of the recipe); no hosts while they are too few."""
        last = attempts[-1] if attempts else None
        if last is None or last.plan is None or last.verdict is None:
            hosts = [host for host in self.job.hosts if host in there][: self.job.nodes]
            return (hosts if len(hosts) == self.job.nodes else []), []
        hosts = decide.next_hosts(last, last.verdict, there, attempts[:-1], self.job.rules)
        if last.verdict.decision == "smaller" or last.plan.overrides:  # or hosts are back
            how = self.can(hosts)
            return (hosts[: how.hosts], how.overrides) if isinstance(how, Smaller) else ([], [])
        return (hosts if len(hosts) == len(last.plan.hosts) else []), last.plan.overrides


def make_plan(
    job: Job,
    number: int,
    hosts: Sequence[str],
    spares: Sequence[str] = (),
    overrides: Sequence[str] = (),
    again: bool = False,
    now: float = 0.0,
) -> Plan:
    """The plan of attempt `number` on `hosts`; `again`: from the newest complete checkpoint, if there is one."""
    best = scan_checkpoints(job.saves)[0] if again else None
    own = job.resume if job.resume and job.resume.path.exists() else None
    resume = best or own or job.choose()
    return Plan(
        attempt=number,
        time=now,
        hosts=list(hosts),
        slots=job.slots,
        master=hosts[0] if len(hosts) > 1 else MASTER,  # one node looks for nobody else
        port=(None if again else job.port) or _port(hosts[0] == job.host),
        spares=list(spares),
        resume=str(resume.path.absolute()) if resume else None,
        step=resume.step if resume else 0,
        overrides=list(overrides),
        compile_cache=str(compile_cache.root()) if job.cached else None,
    )


def _port(own: bool) -> int:
    """A port that is free on the first host: known if that is this one, else a guess, which that host tries."""
    return free_port() if own else random.choice(PORTS)


def first_number(run_dir: Path) -> int:
    """The attempt that an agent comes to: the newest one while it goes on, a new one after a run that has ended."""
    known = numbers(run_dir)
    if not known:
        return next_number(run_dir)
    newest = read_attempt(run_dir, known[-1])
    return known[-1] + 1 if newest.verdict else known[-1]


def under_way(run_dir: Path) -> bool:
    """Whether attempts are in progress in `run_dir`, or were interrupted without a word: an agent joins them."""
    known = numbers(run_dir)
    newest = read_attempt(run_dir, known[-1]).verdict if known else None
    return bool(known) and (newest is None or newest.decision not in FINAL)


def history(job: Job, number: int) -> list[Attempt]:
    """The attempts before `number` of the same launch: since the last one after which the run was not to go on."""
    found: list[Attempt] = []
    for earlier in reversed([each for each in numbers(job.run_dir) if job.first <= each < number]):
        attempt = read_attempt(job.run_dir, earlier)
        if attempt.plan is None or (attempt.verdict and attempt.verdict.decision in FINAL):
            break
        found.insert(0, attempt)
    return found


def newest_saved(saves: Path) -> int | None:
    """The step of the newest checkpoint whose files are all there; their content is not read."""
    for folder in iterations(saves):
        if fault(folder, checksums=False) is None:
            return step_of(folder)
    return None


def checkpoint_of(plan: Plan) -> CheckpointInfo | None:
    """The checkpoint that a plan goes on from."""
    return CheckpointInfo(Path(plan.resume), plan.step) if plan.resume else None
