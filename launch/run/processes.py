"""The processes below a command: which are workers, how each ended, and how to end them all."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launch.workers.lifeline import adopt_orphans


@dataclass
class Member:
    """One process that msrun itself started: a worker, or the scheduler (`rank` None)."""

    process: psutil.Process
    rank: int | None
    ended: bool = False
    code: int | None = None  # exit code, negative for a signal, None while unknown

    @property
    def failed(self) -> bool:
        """Ended, and known not to have ended well."""
        return self.ended and self.code not in (0, None)


@dataclass
class Family:
    """Every descendant of the process `root`, also those that change session or lose their parent.

    While a family exists this process is the kernel's "subreaper": orphans become its children and stay findable.
    """

    root: int
    before: set[int] = field(default_factory=set)  # children of ours that have nothing to do with it
    seen: dict[int, psutil.Process] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)

    def scan(self) -> None:
        """Look for new descendants, and for the role of msrun's own children. Walks /proc: for once a second."""
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self.before:
                self.seen.setdefault(child.pid, child)
        for pid, process in self.seen.items():
            if pid not in self.members and pid != self.root:
                self._identify(process)

    def _identify(self, process: psutil.Process) -> None:
        """Note a worker or the scheduler: a child of msrun with its role in the environment."""
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.ppid() != self.root:
                return
            environ = process.environ()
            if environ.get("MS_ROLE") == "MS_WORKER":
                self.members[process.pid] = Member(process, int(environ.get("RANK_ID", 0)))
            elif environ.get("MS_ROLE") == "MS_SCHED":
                self.members[process.pid] = Member(process, None)

    def poll(self) -> list[Member]:
        """Members that have ended since the last call. Cheap: reads one file for each."""
        ended = []
        for member in self.members.values():
            if not member.ended and has_ended(member.process):
                member.ended = True
                member.code = _exit_code(member.process.pid)
                ended.append(member)
        return ended

    def workers(self) -> list[Member]:
        """The workers seen so far."""
        return [member for member in self.members.values() if member.rank is not None]

    def alive(self) -> list[psutil.Process]:
        """Every descendant that still runs."""
        self.scan()
        self._reap()
        return [process for process in self.seen.values() if not has_ended(process)]

    def kill(self, grace: float = 2.0, limit: float = 10.0) -> list[int]:
        """End every descendant: SIGTERM, after `grace` seconds SIGKILL; return pids left after `limit` seconds."""
        start = time.monotonic()
        asked: set[int] = set()
        while (left := self.alive()) and time.monotonic() - start < limit:
            for process in left:
                if time.monotonic() - start >= grace:
                    _send(process, signal.SIGKILL)
                elif process.pid not in asked:
                    asked.add(process.pid)
                    _send(process, signal.SIGTERM)
            time.sleep(0.05)
        return [process.pid for process in left]

    def _reap(self) -> None:
        """Collect the exit status of orphans that have become our children."""
        for pid in self.seen:
            if pid != self.root:  # its owner waits for it
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def family_of(root: int, before: set[int]) -> Family:
    """The family of a process just started; `before` are the pids of our children from before the start."""
    adopt_orphans()
    family = Family(root, before)
    family.scan()
    return family


def children_now() -> set[int]:
    """Pids of this process's descendants."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def has_ended(process: psutil.Process) -> bool:
    """Gone, or a zombie that nobody has collected."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


def _exit_code(pid: int) -> int | None:
    """Exit code of a zombie that its parent has not collected yet, negative for a signal; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    status = int(stat.rsplit(")", 1)[1].split()[-1])  # field 52, as waitpid would give it
    return os.waitstatus_to_exitcode(status)


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
