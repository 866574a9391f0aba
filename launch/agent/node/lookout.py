"""What a node does beside its workers while they run: beat, look at the others, see a hang, see the disk go.

All of it touches the shared disk, which may stand still. So a thread of its own does it, and the supervisor, which must
be able to end the workers whatever the disk does, only reads what the thread has found.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from launch.agent.disk import LostDiskError
from launch.agent.initiator import is_sure
from launch.agent.limits import Limits
from launch.agent.node import stuck
from launch.agent.node.around import Around
from launch.agent.node.link import Link
from launch.agent.node.phase import Phases
from launch.run.failure import Failure, timed_out
from plugins.errors import ClusterError, DataError
from tools.runs.attempts import Beat, End

POLL, BEAT = 0.2, 1.0  # seconds between looks at the steps, and at the rest


class Lookout(threading.Thread):
    """Watches one attempt from this node, while it is used as a context.

    Attributes:
        told: whether the workers end for another node's sake.
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
        """`limits`: of phases; None: nothing is a hang. `lost_after`: seconds until the disk is lost; None: never."""
        super().__init__(daemon=True, name="lookout")
        self.phases, self.around, self.limits, self.show = phases, around, limits, show
        self.lost_after, self.link = lost_after, link
        self.told = False
        self._reason: Failure | None = None
        self._trouble = ""
        self._error: Exception | None = None
        self._places: dict[int, stuck.Place] = {}
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
        """Why the workers are to end; touches no disk."""
        if self._error:
            raise self._error
        silent = time.monotonic() - self._alive
        if self._reason is None and self.lost_after is not None and silent > self.lost_after:
            why = self._trouble or f"the run's folder has not answered for {silent:.0f} s"
            return Failure(f"lost disk: {why}", self._log, cause="lost disk")
        return self._reason

    def run(self) -> None:
        """Until the workers have ended: who falls silent while it ends them would be taken for lost."""
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
        """A worker's failure with what has brought it about, where that is known; before the workers are ended."""
        end = End(self.around.host, 0.0, "failed", "step", cause=failure.cause or "exit", code=failure.code)
        if is_sure(end):
            return failure
        with contextlib.suppress(psutil.Error, OSError):  # the failure itself is what counts
            return self._own_fault(places=False) or self._answer(failure)
        return failure

    def _answer(self, failure: Failure) -> Failure:
        """Say so where msrun's scheduler has lost workers of other hosts before one of ours failed."""
        plan, own = self.around.plan, self.phases.ranks
        several = len(plan.hosts) > 1
        first = self.phases.logs.with_name("node_0") if several else self.phases.logs
        lost = timed_out(first / "scheduler.log")
        if not lost or not several or any(rank in own for rank in lost):
            return failure
        names = ", ".join(f"worker {rank} of {plan.hosts[rank // plan.slots]}" for rank in lost)
        return replace(failure, message=f"{failure.message}; msrun's scheduler says that {names} timed out before it")

    def _own_fault(self, places: bool = True) -> Failure | None:
        """What keeps this node from going on, whatever the others do; `places`: ask its workers where they are, too."""
        if lost := self.link.lost():
            return Failure(lost[0], self._log, cause="lost node")
        if (rank := stuck.stopped()) is not None:
            return self._failure(f"worker {rank} is stopped", rank)
        if not places:
            return None
        self._places = stuck.places(self.phases.logs, self.phases.ranks)
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
