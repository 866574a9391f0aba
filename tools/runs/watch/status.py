"""How a run stands now, from its files alone: any machine that sees the folder can ask.

Ages are taken between times that the run itself wrote, so that the clock of the one who asks does not matter.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

from plugins.spans import as_span, spans_file
from tools.files.paths import real_path
from tools.runs.attempts import Attempt, numbers, read_attempt
from tools.runs.failures import Failure, failure_of, has_failed
from tools.runs.readings import Follower
from tools.runs.slow import Probes
from tools.runs.source import check_folder, metrics_of, recipe_of
from tools.runs.study import state_of
from tools.runs.watch.kept import Kept, Sink

OVER = {"done": 0, "given up": 1, "left": 1}  # states that a run does not leave by itself -> exit code
BAD = ("failed", "given up", "left", "interrupted", "preempted")


@dataclass(frozen=True)
class Status:
    """What is not known is None. Times are seconds; `goodput` a share; `quiet` since we last saw anything new."""

    run: str
    state: str
    attempt: int | None
    hosts: int | None
    phase: str | None
    phase_seconds: float | None
    step: int
    total_steps: int | None
    loss: float | None
    tokens_per_second: float | None
    goodput: float | None
    wall_seconds: float | None
    checkpoint_step: int | None
    checkpoint_age: float | None
    failures: int | None
    last_failure: str | None
    slow_ranks: list[str] = field(default_factory=list)
    last_sign: float | None = None
    quiet: float = 0.0

    @property
    def over(self) -> int | None:
        """The exit code of a run that has ended; None while it goes on."""
        return OVER.get(self.state)


class Watch:
    """Follows one run; what it has read it does not read again.

    Raises:
        DataError: the folder is no run's.
    """

    def __init__(self, folder: Path, sink: Sink = lambda record: None):
        check_folder(folder)
        self.folder = folder
        recipe = recipe_of(folder)
        self.kept = Kept(metrics_of(folder, recipe), sink)
        self.probes = Probes(folder, recipe)
        self.spans = Follower(spans_file(folder))
        self.sealed: tuple[int, float] | None = None  # newest checkpoint: its step, and when it was whole
        self.span_end = -math.inf
        self.attempt: Attempt | None = None
        self.first: float | None = None  # the first attempt's plan
        self.failed: list[int] = []  # attempts that failed, of those that are over
        self.last_failure: Failure | None = None
        self.told: tuple[int, int, bool] | None = None  # what was known when it was judged
        self.sign: float | None = None
        self.changed = time.monotonic()

    def look(self) -> Status:
        """Read what is new, and say how the run stands."""
        self._attempts()
        self.kept.look()
        plan = self.attempt.plan if self.attempt else None
        waits = plan is not None and (self.kept.began is None or self.kept.began < plan.time)
        self.kept.begin_at(plan.step if plan and waits and self.kept.step else None)
        self._spans()
        sign = self._sign()
        if sign != self.sign:
            self.sign, self.changed = sign, time.monotonic()
        return self._status()

    def _attempts(self) -> None:
        """The newest attempt as it is now; those before it are read once more when they are over."""
        found = numbers(self.folder)
        newest = self.attempt.number if self.attempt else -1
        for number in (one for one in found if one >= newest):
            self.attempt = read_attempt(self.folder, number)
            if self.first is None and self.attempt.plan:
                self.first = self.attempt.plan.time
            known = number, len(self.attempt.ends), self.attempt.verdict is not None
            if has_failed(self.attempt) and known != self.told:  # its logs are read again only when more is known
                self.failed += [number] if number not in self.failed[-1:] else []
                self.last_failure, self.told = failure_of(self.attempt), known

    def _spans(self) -> None:
        for record in self.spans.records():
            if span := as_span(record):
                self.span_end = max(self.span_end, span.end)
                if span.sealed:
                    self.sealed = span.step, span.end

    def _sign(self) -> float | None:
        """The newest time that the run has written anywhere; of an attempt that has ended, its end."""
        attempt = self.attempt
        if attempt and attempt.ends:
            return max(end.time for end in attempt.ends.values())
        signs = [self.kept.last.get("time"), self.span_end, attempt.plan.time if attempt and attempt.plan else None]
        signs += [beat.time for beat in attempt.beats.values()] if attempt else []
        return max((one for one in signs if isinstance(one, float) and math.isfinite(one)), default=None)

    def _status(self) -> Status:
        kept, attempt = self.kept, self.attempt
        began = self.first if self.first is not None else kept.first
        wall = self.sign - began if self.sign is not None and began is not None else None
        # the host that is furthest behind is the one that the others wait for
        beat = min(attempt.beats.values(), key=lambda one: (one.step, one.since), default=None) if attempt else None
        running = beat if attempt and not attempt.ends else None
        loss = kept.last.get("loss")
        return Status(
            run=real_path(self.folder).name,
            state=self._state(),
            attempt=attempt.number if attempt else None,
            hosts=len(attempt.plan.hosts) if attempt and attempt.plan else None,
            phase=running.phase if running else None,
            phase_seconds=max(0.0, running.time - running.since) if running else None,
            step=min(kept.step, kept.cut),
            total_steps=kept.total,
            loss=loss if isinstance(loss, float) and math.isfinite(loss) else None,
            tokens_per_second=kept.speed,
            goodput=kept.seconds / wall if wall else None,
            wall_seconds=wall,
            checkpoint_step=self.sealed[0] if self.sealed else None,
            checkpoint_age=max(0.0, self.sign - self.sealed[1]) if self.sealed and self.sign is not None else None,
            failures=len(self.failed) if attempt else None,
            last_failure=_in_words(self.last_failure),
            slow_ranks=self.probes.look().slow,
            last_sign=self.sign,
            quiet=time.monotonic() - self.changed,
        )

    def _state(self) -> str:
        """As of its newest attempt; of a run without attempts by its steps."""
        if self.attempt:
            state = state_of(self.attempt)
            return "running" if state == "unfinished" else state
        done = self.kept.total is not None and self.kept.step >= self.kept.total
        return "done" if done else "running"


def _in_words(failure: Failure | None) -> str | None:
    """Who, what and where; then what was wrong, in the words of the log or of who saw it."""
    if failure is None:
        return None
    rank = "" if failure.rank is None else f"worker {failure.rank}"
    who = ", ".join(part for part in (failure.host or "", rank) if part) or "nobody knows who"
    what = f"attempt {failure.attempt}: {who}, {failure.name}" + (f", step {failure.step}" if failure.step else "")
    said = failure.message or "; ".join(failure.found.lines)
    return f"{what}: {said}" if said else what
