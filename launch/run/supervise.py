"""This module runs msrun and supervises it: it notices immediately that a worker fails, reports why, and leaves no
process running.

msrun starts workers in their own sessions, needs 26-54 s to notice some failures, and leaves workers running if it is
ended by SIGTERM. So this module watches every descendant, and finally kills it by its pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import click
import psutil

from launch.run.failure import Failure, ends_in_msrun_log, error_of, how_it_ended, telling_lines, worker_failure
from launch.workers.lifetime import adopt_orphans, die_with_parent
from plugins.errors import CLOSED, OUT_OF_REACH
from tools.files.atomic import last_lines
from tools.process.children import collected_signals
from tools.runs.attempts import DONE

POLL = 0.2  # seconds between looks at the workers
SCAN = 1.0  # seconds between searches for new descendants
# seconds without a sign of life that workers may outlast one that has finished; on CPU a rank that ends waits up to a
# minute for what it has sent
STRAGGLE = 75.0
PAUSE = 0.5  # seconds between two looks at processes that are to end, at most
FINISH = 15.0  # seconds msrun and its scheduler may take after the last worker


@dataclass
class Member:
    """A `Member` is a process that msrun itself started: a worker, or the scheduler (`rank` is None)."""

    process: psutil.Process
    rank: int | None
    ended: bool = False
    code: int | None = None  # exit code, negative for a signal, None while unknown

    @property
    def failed(self) -> bool:
        """Return whether the process has ended with an exit code that is known and not 0."""
        return self.ended and self.code not in (0, None)


@dataclass
class Family:
    """A `Family` is the set of all descendants of the process `root`, including descendants that change their session
    or lose their parent.

    While a `Family` exists, this process is the kernel's "subreaper": orphans become its children, so that they can be
    found.
    """

    root: int
    before: set[int] = field(default_factory=set)  # children of ours that have nothing to do with it
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)

    def scan(self) -> None:
        """Look for new descendants, and determine which of msrun's own children are workers. This method reads the
        whole of /proc, so call it about once a second.
        """
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.before:
                self.seen.setdefault(child.pid, child)
        for pid, process in self.seen.items():
            if pid not in self.members and pid != self.root:
                self._identify(process)

    def _identify(self, process: psutil.Process) -> None:
        """Record the role of a child of msrun, which its environment states: a worker or the scheduler."""
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.ppid() != self.root:
                return
            environ = process.environ()
            if environ.get("MS_ROLE") == "MS_WORKER":
                self.members[process.pid] = Member(process, int(environ.get("RANK_ID", 0)))
            elif environ.get("MS_ROLE") == "MS_SCHED":
                self.members[process.pid] = Member(process, None)

    def poll(self) -> list[Member]:
        """Return the members that have ended since the last call. This method is cheap: it reads one file for each
        member.
        """
        ended = []
        for member in self.members.values():
            if not member.ended and has_ended(member.process):
                member.ended = True
                member.code = _exit_code(member.process.pid)
                ended.append(member)
        return ended

    def workers(self) -> list[Member]:
        """Return the workers of msrun that this object has found so far."""
        return [member for member in self.members.values() if member.rank is not None]

    def alive(self) -> list[psutil.Process]:
        """Return every process of the family that still runs."""
        self.scan()
        self._reap()
        return [process for process in self.seen.values() if not has_ended(process)]

    def kill(self, grace: float = 2.0, limit: float = 30.0) -> list[int]:
        """End every descendant: send SIGTERM, and SIGKILL after `grace` seconds; return the pids that are left after
        `limit` seconds.

        A pause of this process (it was stopped, or the machine is busy) counts as at most `PAUSE` seconds, because the
        pause delayed the descendants as well: otherwise this method would give up after a long pause and leave them
        running.
        """
        passed, looked = 0.0, time.monotonic()
        asked: set[int] = set()
        while (left := self.alive()) and passed < limit:
            late = passed >= grace
            for process in left:
                if late or process.pid not in asked:
                    asked.add(process.pid)
                    with contextlib.suppress(psutil.Error):
                        process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            time.sleep(0.05)
            now = time.monotonic()
            passed, looked = passed + min(now - looked, PAUSE), now
        return [process.pid for process in left]

    def _reap(self) -> None:
        """Collect the exit status of orphans that have become children of this process."""
        for pid in self.seen:
            if pid != self.root:  # its owner waits for it
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process is gone, or is a zombie that no parent has collected."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _exit_code(pid: int) -> int | None:
    """Return the exit code of a zombie that its parent has not collected yet, negative for a signal; None if the
    process is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    status = int(stat.rsplit(")", 1)[1].split()[-1])  # field 52, as waitpid would give it
    return os.waitstatus_to_exitcode(status)


@dataclass(frozen=True)
class Outcome:
    """An `Outcome` describes the end of a run: the reason, the processes that could not be killed, and the exit code.

    The code is 0 for success, 1 for a failure, 2 for a user error, 128 + n for the end by signal n.
    """

    code: int
    failure: Failure | None = None
    left: tuple[int, ...] = ()


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    run_dir: Path,
    workers: int,
    tick: Callable[[], Failure | None] = lambda: None,
    logs: Path | None = None,
    ends: Callable[[int], bool] = lambda number: True,
    signals: Sequence[int] = (),
    explain: Callable[[Failure], Failure] = lambda failure: failure,
) -> Outcome:
    """Run `command` (msrun) until its `workers` workers have ended, calling `tick` about five times a second.

    Worker n logs to `worker_n.log` in `logs` (msrun does that; default: RUN/logs), msrun itself to `msrun.log`. When
    the function returns, no descendant is running any more, whatever happened: success, a failing worker, a reason to
    end that `tick` returned, or SIGINT, SIGTERM or SIGHUP to this process if `ends` allows it (also one of `signals`,
    which arrived before). If this process itself is killed with SIGKILL, the kernel sends SIGINT to msrun, which then
    kills its workers. `explain` may add details to a failure while the other workers are still running.
    """
    logs = logs or run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with collected_signals(list(signals)) as received, (logs / "msrun.log").open("wb") as log:
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        root = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGINT, os.getpid()),
        )
        adopt_orphans()
        family = Family(root.pid, before)
        family.scan()
        code, failure = 1, None
        try:
            watch = _Watch(root, family, logs, run_dir / "metrics", workers, received, tick, ends)
            code, failure = watch.until_the_end()
            failure = explain(failure) if failure else None
            for each in watch.crashed if code == 0 else ():
                click.echo(f"{each.message}; the run has finished all the same ({each.log})", err=True)
        finally:
            left = family.kill(grace=0.0 if failure else 2.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                root.wait(timeout=1)
            adopt_orphans(False)
    return Outcome(code, failure, tuple(left))


def _how_telling(failure: Failure) -> tuple[bool, bool, bool, bool]:
    """Return a sort key that is largest for the failure to show; a worker that lost the connection to another worker
    ranks below that worker.
    """
    killed = failure.code is not None and failure.code < 0
    lost = any(words in failure.message for words in (OUT_OF_REACH, CLOSED))
    return failure.user_error and not lost, failure.stopped, failure.has_traceback, killed


def _says_done(log: Path) -> bool:
    """Return whether a worker has said in its log that it had done all of its work, and then left the run."""
    return DONE in last_lines(log)


@dataclass
class _Watch:
    """A `_Watch` runs the loop of `supervise`."""

    root: subprocess.Popen
    family: Family
    logs: Path
    metrics: Path
    workers: int
    received: list[int]
    tick: Callable[[], Failure | None]
    ends: Callable[[int], bool]
    crashed: list[Failure] = field(default_factory=list)  # of workers that had done all of their work
    scanned: float = 0.0
    sign: object = None  # what logs and metrics were like when a worker had finished, or anything was written since
    quiet: float = 0.0  # seconds since then; of a pause of this process itself only a part counts
    looked: float = 0.0
    all_done: float = 0.0

    def until_the_end(self) -> tuple[int, Failure | None]:
        """Return the exit code and the failure (or None) as soon as the run has succeeded, the first failure occurs, or
        a signal arrives.
        """
        while True:
            while self.received:
                if self.ends(number := self.received.pop(0)):
                    return 128 + number, None
            self._scan()
            failure = self._failure(self.family.poll()) or self._msrun_failed() or self._straggling()
            if failure:
                return (2 if failure.user_error else 1), failure
            if self._finished():
                return 0, None
            if reason := self.tick():
                return 1, reason
            time.sleep(POLL)

    def _scan(self) -> None:
        """Search for descendants: often until all workers are known, then now and then."""
        if time.monotonic() - self.scanned > SCAN or len(self.family.workers()) < self.workers:
            self.scanned = time.monotonic()
            self.family.scan()

    def _failure(self, ended: list[Member]) -> Failure | None:
        """Return the failure of the first worker that ended with an error; if several ended at once, the failure with
        the most informative log.
        """
        logged = self._ask_msrun(ended)
        if set(logged) - set(self.family.members):  # it ended before we had seen it; msrun kills the others for it
            logs = sorted(self.logs.glob("worker_*.log"), key=lambda log: (log.stat().st_mtime, log.name))
            code = next(iter(logged.values()))
            told = [worker_failure(log, int(log.stem.split("_")[-1]), code) for log in logs if not _says_done(log)]
            found = max(told, key=_how_telling, default=None)
            if found and not found.has_traceback and len(told) < len(logs):  # it may be one whose work was done
                words = f"a worker {how_it_ended(code)}, perhaps while exiting, its work done; msrun ended the others"
                return replace(found, message=words, rank=None)
            return found
        failures = []
        for member in ended:
            if member.rank is not None and member.failed:
                failure = worker_failure(self._log(member), member.rank, member.code)
                if _says_done(self._log(member)):
                    self.crashed.append(replace(failure, message=f"{failure.message} while exiting, its work done"))
                else:
                    failures.append((failure, member.process.pid in logged))
        if failures:
            worst = max(failures, key=lambda pair: (*_how_telling(pair[0]), pair[1]))[0]
            # msrun kills the others for one that has crashed
            killed = all(found.code == -signal.SIGKILL and not found.has_traceback for found, _ in failures)
            return self.crashed[0] if self.crashed and killed else worst
        if any(member.rank is None and member.failed for member in ended) and self._running():
            return self._from_log("scheduler.log", "msrun's scheduler failed")
        return None

    def _ask_msrun(self, ended: list[Member]) -> dict[int, int]:
        """Return the exit codes that msrun has logged, and set those of members that msrun collected before this
        process could look.
        """
        unknown = [member for member in self.family.workers() if member.ended and member.code is None]
        if not (ended or unknown or len(self.family.workers()) < self.workers):
            return {}
        logged = ends_in_msrun_log(self.logs / "msrun.log")
        for member in unknown:
            member.code = logged.get(member.process.pid)
            if member.failed and member not in ended:
                ended.append(member)
        return logged

    def _msrun_failed(self) -> Failure | None:
        """Return a failure if msrun itself has ended with an error, or has ended while workers still run."""
        code = self.root.poll()
        if code is None or (code == 0 and not self._running()):
            return None
        logs = list(self.logs.glob("worker_*.log"))
        if not self._running() and len(logs) == self.workers and all(map(_says_done, logs)):
            return None
        return self._from_log("msrun.log", f"msrun ended with code {code}")

    def _straggling(self) -> Failure | None:
        """Return a failure if some workers have finished and the remaining workers show no sign of life, because they
        wait for the finished ones.
        """
        running = self._running()
        done = [member for member in self.family.workers() if member.ended]
        if not (running and done):
            return None
        before, self.looked = self.looked, time.monotonic()
        self.quiet += min(self.looked - before, PAUSE)
        if (sign := self._sign()) != self.sign:
            self.sign, self.quiet = sign, 0.0
        if self.quiet < STRAGGLE:
            return None
        ranks = ", ".join(str(member.rank) for member in running)
        message = f"worker {done[0].rank} finished while worker {ranks} still waits: its ranks do not do the same steps"
        return Failure(message, self._log(done[0]), tuple(telling_lines(last_lines(self._log(done[0])))))

    def _sign(self) -> object:
        """Return a value that changes with each write to a log or a metrics file.

        Times of files come from a file server, whose clock may be hours off, so they are compared only with each other.
        """
        files = [*self.logs.glob("worker_*.log"), *self.metrics.glob("*")]
        return {file: (status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]}

    def _finished(self) -> bool:
        """Return whether msrun has ended, or all workers have ended and msrun takes too long."""
        if self.root.poll() is not None:
            return True
        if self._running() or len(self.family.workers()) < self.workers:
            return False
        self.all_done = self.all_done or time.monotonic()
        return time.monotonic() - self.all_done > FINISH

    def _running(self) -> list[Member]:
        """Return the workers that have not ended, after a new look at the processes."""
        return [member for member in self.family.workers() if not (member.ended or has_ended(member.process))]

    def _log(self, member: Member) -> Path:
        return self.logs / f"worker_{member.rank}.log"

    def _from_log(self, name: str, message: str) -> Failure:
        log = self.logs / name
        shown = tuple(telling_lines(last_lines(log)))
        return Failure(message, log, shown, error=error_of(shown))
