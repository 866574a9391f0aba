"""This module watches an attempt from one node while the workers run: it gives signs of life for this node, and notices
hangs, lost hosts and a lost disk.

`Around` watches the other nodes: it finds whether the attempt is over, or a neighbouring node is gone. Each node
watches the next node by rank, so a node has the same work whether there are 2 or 4,096 nodes, and each dead node is
noticed by a node before it, as long as one node is alive. Each spare node also watches one node, because all nodes that
train may die at once.

`Link` is the network interface by which this node reaches the others. A network link that is gone stops the workers of
all nodes: each worker waits for the others, and no worker can say whose link it is. The node of the lost link can tell,
because its network interface has lost its carrier. (No node can see a failed switch in between.)

`stopped_worker` and `worker_places` find which of this node's workers makes the others wait in a hang: a worker that is
stopped, or that is not in the same call as the waiting workers. In a hang all workers wait for one worker, and their
steps are the same. Their innermost calls distinguish them: workers that wait are in MindSpore, which runs the graph or
a collective; the worker for which they wait may be elsewhere: reading data, saving, or in a callback. A worker that
hangs inside MindSpore cannot be distinguished from the waiting workers, and is not named.

`Lookout` combines these parts. All of these parts use the shared disk, which may not answer. So a separate thread runs
them, and the supervisor, which must be able to end the workers even if the disk does not answer, only reads the
thread's results.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from launch.agent.decide import is_sure
from launch.agent.disk import LostDiskError
from launch.agent.meeting import Meeting
from launch.agent.phases import Limits, Phases
from launch.run.failure import Failure, timed_out
from launch.workers.lifetime import ASK_STACKS
from plugins.errors import ClusterError, DataError
from tools.runs.attempts import Beat, End, Plan

ANY_PORT = 9  # of the probe that finds an interface; nothing is sent
_NAMES = 3  # of other nodes that are looked up to find the interface
ANSWER = 1.0  # seconds that workers have to say where they are
_STACK_THREAD = re.compile(rb"^(?:Current thread|Thread) 0x[^\n]*\n", re.MULTILINE)  # the main thread is the last one
_STACK_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
POLL, BEAT = 0.2, 1.0  # seconds between looks at the steps, and at the rest


@dataclass
class Around:
    """An `Around` lets `host` watch the other nodes of an attempt."""

    meeting: Meeting
    plan: Plan
    host: str
    finished: set[str] = field(default_factory=set)

    def look(self) -> str | None:
        """Check the other nodes of the attempt, and return a sentence that says why this node's workers have to end;
        return None if there is no reason. Call this method about once a second.

        If this agent finds that the neighbour's agent is lost, it writes that the neighbour's part has ended.
        """
        number = self.plan.attempt
        if first := self.meeting.over(number):
            return f"{first} ended attempt {number}" if first != self.host else f"attempt {number} is over"
        other = self._neighbour()
        if other is None:
            return None
        if end := self.meeting.ended(number, other):  # it says no more
            self.meeting.end(number, end)  # again: if it went badly all must hear, and it may have died before that
            self.finished.add(other)
        elif self.meeting.stale(number, other):
            self.meeting.lost(number, other, f"no sign of life for {self.meeting.lost_after:g} s")
            return f"{other} gives no sign of life"
        return None

    def began(self) -> End | None:
        """Return how the workers ended on the host whose failure ended the attempt; return None if no host has
        failed.
        """
        number = self.plan.attempt
        first = self.meeting.over(number)
        return self.meeting.ended(number, first) if first else None

    def _neighbour(self) -> str | None:
        others = [host for host in self._after_us() if host not in self.finished]
        if not others:
            return None
        return others[0 if self.host in self.plan.hosts else sum(self.host.encode()) % len(others)]

    def _after_us(self) -> list[str]:
        """Return the other hosts by rank, beginning with the host after this one and continuing from rank 0."""
        hosts = self.plan.hosts
        place = hosts.index(self.host) + 1 if self.host in hosts else 0
        return [host for host in [*hosts[place:], *hosts[:place]] if host != self.host]


@dataclass(frozen=True)
class Link:
    """A `Link` watches the network interface through which this node reaches the other nodes; the interface is None if
    there are no other nodes, or if it is not known.
    """

    interface: str | None = None

    def lost(self) -> list[str]:
        """Return a list with a sentence if the network interface has no link; the list is empty if the interface has a
        link, or if the link cannot be checked.
        """
        known = psutil.net_if_stats().get(self.interface or "")
        return [f"network interface {self.interface} has no link"] if known and not known.isup else []


def link_to(others: Iterable[str]) -> Link:
    """Return the network link to the first of `others` whose name or address is known.

    Only a few names are tried, because a slow name service takes seconds for each name, in which the agent would wait.
    """
    for host in itertools.islice(others, _NAMES):
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return Link(_interface_of(probe.getsockname()[0]))
    return Link()


def _interface_of(address: str) -> str | None:
    """Return the interface that has an address; loopback does not count, because it needs no link."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.split("%")[0] == address for each in addresses) and not address.startswith("127."):
            return name
    return None


@dataclass(frozen=True)
class Place:
    """A `Place` is the innermost Python call of a worker's main thread, in which the worker hangs or waits."""

    file: str
    line: int
    function: str

    @property
    def waits(self) -> bool:
        """Return whether the worker's innermost call is in MindSpore but not in `mindspore/dataset`, so that it may
        wait for other ranks. Only files of the installed package count as MindSpore, not files of another folder with
        the name mindspore.
        """
        before, found, below = self.file.rpartition("/mindspore/")
        package = bool(found) and (Path(before) / "mindspore" / "__init__.py").exists()
        return package and not below.startswith("dataset/")

    def __str__(self) -> str:
        """Return the place in the form in which a user would look for it."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


def workers() -> dict[int, psutil.Process]:
    """Return a dictionary rank -> process with the workers that descend from this process."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
            environ = process.environ()
            if environ.get("MS_ROLE") == "MS_WORKER":
                found[int(environ["RANK_ID"])] = process
    return found


def stopped_worker() -> int | None:
    """Return the first worker whose process is stopped (by SIGSTOP or by a debugger)."""
    for rank, process in sorted(workers().items()):
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return rank
    return None


def worker_places(logs: Path, ranks: Sequence[int]) -> dict[int, Place]:
    """Return the innermost calls of the workers that answer within `ANSWER` seconds; all workers are asked at the same
    time.
    """
    sizes = {}
    for rank, process in workers().items():
        log = logs / f"worker_{rank}.log"
        with contextlib.suppress(psutil.Error, OSError):
            if rank in ranks and _can_say_stacks(process.pid):
                sizes[rank] = log.stat().st_size
                process.send_signal(ASK_STACKS)
    found: dict[int, Place] = {}
    until = time.monotonic() + ANSWER
    while len(found) < len(sizes) and time.monotonic() < until:
        time.sleep(0.1)
        for rank, size in sizes.items():
            with contextlib.suppress(OSError), (logs / f"worker_{rank}.log").open("rb") as file:
                file.seek(size)
                if place := place_of(file.read()):
                    found[rank] = place
    return found


def place_of(said: bytes) -> Place | None:
    """Return the innermost call from the output of `faulthandler`, which ends with the main thread's stack."""
    starts = [match.end() for match in _STACK_THREAD.finditer(said)]
    frame = _STACK_FRAME.match(said[starts[-1] :].decode("utf-8", "replace")) if starts else None
    return Place(frame["file"], int(frame["line"]), frame["function"]) if frame else None


def _can_say_stacks(pid: int) -> bool:
    """Return whether a process handles the signal that asks for its Python stacks; the signal would end any other
    process.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (ASK_STACKS - 1) & 1)
    return False


class Lookout(threading.Thread):
    """A `Lookout` is a context manager that watches one attempt from this node.

    Attributes:
        told: whether the workers end because of another node.
    """

    def __init__(
        self,
        phases: Phases,
        around: Around,
        limits: Limits | None,
        show: Callable[[], None],
        lost_after: float | None,
        link: Link,
    ):
        """Prepare the watch. Without `limits` no phase counts as a hang; the disk counts as lost after `lost_after`
        seconds, or never if this is None.
        """
        super().__init__(daemon=True, name="lookout")
        self.phases, self.around, self.limits, self.show = phases, around, limits, show
        self.lost_after, self.link = lost_after, link
        self.told = False
        self._reason: Failure | None = None
        self._trouble = ""
        self._error: Exception | None = None
        self._places: dict[int, Place] = {}
        self._alive = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> Lookout:
        self._alive = time.monotonic()
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join(timeout=2 * BEAT)  # not for ever: the disk may be gone
        if not self.is_alive():
            with contextlib.suppress(OSError):
                self.phases.look()
            self.show()

    def tick(self) -> Failure | None:
        """Return the reason why the workers have to be ended, or None; this check makes no file operation on the shared
        disk.
        """
        if self._error:
            raise self._error
        silent = time.monotonic() - self._alive
        if self._reason is None and self.lost_after is not None and silent > self.lost_after:
            trouble = self._trouble or self.around.meeting.disk.trouble
            why = trouble or f"the run's folder has not answered for {silent:.0f} s"
            return Failure(f"lost disk: {why}", self._log, cause="lost disk")
        return self._reason

    def run(self) -> None:
        """Keep watching until the workers have ended, because other nodes would consider this host lost if it gave no
        sign of life while it ends its workers.
        """
        looked = 0.0
        while not self._over.wait(POLL):
            try:
                self.show()
                if time.monotonic() - looked >= BEAT:
                    looked = time.monotonic()
                    self._look()
                self._alive, self._trouble = time.monotonic(), ""
            except LostDiskError as error:
                self._trouble, self._alive = str(error), 0.0
            except (OSError, DataError) as error:
                self._trouble = str(error)
            except ClusterError as error:  # another agent has our name
                self._reason = Failure(str(error), self._log, user_error=True, cause="user error")
            except Exception as error:  # a mistake of ours: it is the main thread's to end with it
                self._error = error
                return

    def _look(self) -> None:
        self.phases.look()
        meeting, number, host = self.around.meeting, self.around.plan.attempt, self.around.host
        now = meeting.now()
        lasted = self.phases.clock() - self.phases.since
        meeting.beat(number, Beat(host, now, self.phases.phase, now - lasted, self.phases.step))
        if self._reason is not None:
            return
        if words := self.around.look():
            # where another node was the first to complain, this one may be who holds it up
            end = self.around.began()
            hang = end is not None and end.cause == "hang"
            own = self._own_fault(places=hang) if self.limits and end and (hang or not is_sure(end)) else None
            self.told, self._reason = own is None, own or Failure(words, self._log)
        elif self.limits and lasted > (limit := self.limits.limit(self.phases.phase)):
            self._reason = self._own_fault() or self._hang(lasted, limit)

    def explain(self, failure: Failure) -> Failure:
        """Return the failure of a worker, with the fault that caused it if that fault is known; call this before the
        workers are ended.
        """
        end = End(self.around.host, 0.0, "failed", "step", cause=failure.cause or "exit", code=failure.code)
        if is_sure(end):
            return failure
        with contextlib.suppress(psutil.Error, OSError):  # the failure itself is what counts
            return self._own_fault(places=False) or self._answer(failure)
        return failure

    def _answer(self, failure: Failure) -> Failure:
        """Return the failure, with a message that also names the workers of other hosts that msrun's scheduler lost
        before this node's worker failed.
        """
        plan, own = self.around.plan, self.phases.ranks
        several = len(plan.hosts) > 1
        first = self.phases.logs.with_name("node_0") if several else self.phases.logs
        lost = timed_out(first / "scheduler.log")
        if not lost or not several or any(rank in own for rank in lost):
            return failure
        names = ", ".join(f"worker {rank} of {plan.hosts[rank // plan.slots]}" for rank in lost)
        return replace(failure, message=f"{failure.message}; msrun's scheduler says that {names} timed out before it")

    def _own_fault(self, places: bool = True) -> Failure | None:
        """Return the failure that keeps this node from going on, whatever happens on other nodes; None if there is
        none. With `places`, also ask the workers for their innermost Python calls.
        """
        if lost := self.link.lost():
            return Failure(lost[0], self._log, cause="lost node")
        if (rank := stopped_worker()) is not None:
            return self._failure(f"worker {rank} is stopped", rank)
        if not places:
            return None
        self._places = worker_places(self.phases.logs, self.phases.ranks)
        for rank, place in sorted(self._places.items()):
            if not place.waits:
                return self._failure(f"worker {rank} is in {place}", rank)
        return None

    def _hang(self, lasted: float, limit: float) -> Failure:
        rank = self.phases.behind
        who = "nothing moved" if rank is None else f"worker {rank} does not move"
        waits = "".join(f"; worker {rank} waits in {place}" for rank, place in sorted(self._places.items())[:1])
        return self._failure(
            f"{who} for {lasted:.0f} s in phase {self.phases.phase} (limit {limit:.0f} s){waits}", rank
        )

    def _failure(self, words: str, rank: int | None) -> Failure:
        return Failure(f"hang: {words}", self._log, rank=rank, cause="hang")

    @property
    def _log(self) -> Path:
        rank = self.phases.ranks[0]
        return self.phases.logs / f"worker_{rank}.log"
