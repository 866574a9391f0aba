"""This module determines which phase a node's workers are in, and how long a phase may last before it counts as a hang.

`Limits` learns from the run how long each phase may last; it has no side effects. As long as fewer than ENOUGH
durations of a phase were seen, its limit is the phase's default, or LONGEST times the longest duration if that is more.
From then on the limit is the largest of

* the phase's floor,
* TYPICAL times the median of the last WINDOW durations,
* LONGEST times the longest of them.

A deviation from the median (such as the median absolute deviation) would add nothing: for durations, which are above 0,
it is at most the median itself.

So a false alarm takes a step that lasts 10 times as long as usual, 3 times as long as the longest of the last 200
steps, and longer than the floor, all at once; a false alarm costs a restart. If steps are alike and independent, the
next step is the longest of n + 1 steps with probability 1 / (n + 1); if pauses have a heavy tail (a chance to exceed t
that falls as t**-a), the next step lasts LONGEST times the longest step before it with probability LONGEST**-a / (n +
1), which is once in 5,400 steps in the window of 200 and with a = 3; and then it has to exceed the other two bounds as
well. A hang is noticed when the limit is over: after the time of 10 steps, or after the floor. benchmarks/RESULTS.md
says how the rule judges recorded steps.

Each phase has its own limit: the first step after a start, or after a growth of the batch, compiles or warms up, and
evaluations and saves stop the steps.

`Phases` finds the phase from the files that the workers write: metrics, logs, checkpoints. A `Phases` only reads, and
decides nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from plugins.held_out_loss.plan import due, held_out_file
from plugins.lines import OF
from plugins.sealed_checkpoint.plan import REMOVING, saving_folder, seal_file
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.runs.attempts import Phase
from tools.runs.readings import Follower

ENOUGH, WINDOW = 5, 200
TYPICAL, LONGEST = 10.0, 3.0
_SECONDS: Mapping[Phase, tuple[float, float]] = {  # the default and the floor
    "start": (1800.0, 120.0),
    "compile": (7200.0, 300.0),
    "first step": (7200.0, 300.0),
    "step": (1800.0, 30.0),
    "evaluation": (3600.0, 60.0),
    "save": (3600.0, 60.0),
    "end": (1800.0, 60.0),
}
DEFAULTS = {phase: first for phase, (first, _) in _SECONDS.items()}  # nothing is known: 1119B's stages compile for long
FLOORS = {phase: last for phase, (_, last) in _SECONDS.items()}  # so long a busy host or disk may pause
COMPILING = b".........Starting Training Model"  # MindFormers' trainer says so before the first step is compiled
MOST = 1 << 20  # bytes of a log read at a look


@dataclass
class Limits:
    """A `Limits` holds the seconds that each phase of one run may last before the phase counts as a hang; a caller can
    set its own `defaults` and `floors` for some phases.
    """

    defaults: Mapping[Phase, float] = field(default_factory=dict)
    floors: Mapping[Phase, float] = field(default_factory=dict)
    seen: dict[Phase, deque[float]] = field(default_factory=dict)

    def learn(self, phase: Phase, seconds: float) -> None:
        """Record that a phase, or one training step, has ended without failure after `seconds`."""
        self.seen.setdefault(phase, deque(maxlen=WINDOW)).append(seconds)

    def limit(self, phase: Phase) -> float:
        """Return the seconds that `phase` may last before it counts as a hang."""
        seen = self.seen.get(phase, ())
        longest = LONGEST * max(seen, default=0.0)
        if len(seen) < ENOUGH:
            return max(self.defaults.get(phase, DEFAULTS[phase]), longest)
        return max(self.floors.get(phase, FLOORS[phase]), TYPICAL * median(seen), longest)


def learn_steps(limits: Limits, records: Iterable[Mapping[str, Any]]) -> None:
    """Add the durations of the steps in a metrics file to the limits, except for the first step of each attempt and of
    each stage of a growing batch, because MindSpore compiles the graph in these steps.
    """
    first = True
    for record in records:
        if "total_steps" in record:
            first = True
        elif isinstance(record.get("seconds"), (int, float)):
            if not first:
                limits.learn("step", float(record["seconds"]))
            first = False


@dataclass
class _Rank:
    """A `_Rank` holds the data that was read from the files of one worker."""

    rank: int
    metrics: Follower
    log: Path
    step: int
    offset: int = 0
    total: int | None = None
    stepped: bool = False  # in this attempt
    compiling: bool = False


@dataclass
class Phases:
    """A `Phases` finds in which phase the local workers of one attempt are; create it before the workers start.

    Attributes:
        phase, since: the phase of the slowest worker, and its begin by `clock`.
        step: the newest step that a local worker has on record.
        behind: the global rank of the only worker that is behind the other ones, if there is one.
    """

    recipe: Recipe
    run_dir: Path
    logs: Path
    ranks: Sequence[int]
    first_step: int = 0
    learn: Callable[[Phase, float], None] = lambda phase, seconds: None
    clock: Callable[[], float] = time.monotonic
    name: str = ""  # of the attempt
    phase: Phase = "start"
    since: float = 0.0
    step: int = 0
    _workers: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin to follow the metrics files of the workers and the file of held-out losses."""
        self.since, self.step = self.clock(), self.first_step
        for rank in self.ranks:
            metrics = Follower(self.run_dir / "metrics" / f"rank_{rank}.jsonl", newest=0)
            self._workers.append(_Rank(rank, metrics, self.logs / f"worker_{rank}.log", self.first_step))
        self.saves = Path(self.recipe["checkpoint"]["save_path"])
        self.held_out = Follower(held_out_file(self.run_dir), newest=0)
        self.evaluated = -1

    def look(self) -> None:
        """Read the lines that the workers have appended to their metrics files since the last call."""
        before = [worker.step for worker in self._workers]
        for worker in self._workers:
            self._read(worker)
        phase = self._phase()
        now = self.clock()
        moved = any(worker.step != old for worker, old in zip(self._workers, before, strict=True))
        if phase != self.phase or moved:
            self.learn(self.phase, now - self.since)
            self.phase, self.since = phase, now
        self.step = max(worker.step for worker in self._workers)

    @property
    def behind(self) -> int | None:
        """Return the rank of the worker that has made fewer steps than each other worker on this node; return None if
        no worker has, for example before the first step.
        """
        steps = sorted((worker.step, worker.rank) for worker in self._workers)
        return steps[0][1] if len(steps) > 1 and steps[0][0] < steps[1][0] else None

    def _read(self, worker: _Rank) -> None:
        for record in self._own(worker.metrics):
            worker.total = record.get("total_steps", worker.total)
            if isinstance(record.get("step"), int):
                worker.step, worker.stepped = record["step"], True
        if not (worker.stepped or worker.compiling):
            worker.compiling = self._says_compiling(worker)

    def _own(self, follower: Follower) -> list[Mapping[str, Any]]:
        """Return the new lines without those of a late worker, which belongs to another attempt and runs on a host that
        was cut off.
        """
        return [each for each in follower.new_records() if each.get(OF) in (None, self.name)]

    def _says_compiling(self, worker: _Rank) -> bool:
        """Read the new part of the worker's log, and return whether it holds MindFormers' message about compiling; the
        end of the part that was read before is read again, because the message may have been cut.
        """
        try:
            with worker.log.open("rb") as file:
                file.seek(worker.offset)
                text = file.read(MOST)
        except OSError:
            return False
        worker.offset += max(0, len(text) - len(COMPILING))
        return COMPILING in text

    def _phase(self) -> Phase:
        if not all(worker.stepped for worker in self._workers):
            return "compile" if all(worker.stepped or worker.compiling for worker in self._workers) else "start"
        if self._saving():
            return "save"
        if self._evaluating():
            return "evaluation"
        done = all(worker.total and worker.step >= worker.total for worker in self._workers)
        return "end" if done else "first step" if self._growing() else "step"

    def _saving(self) -> bool:
        """Return whether a save is in progress: the checkpoint of the newest step is begun and a worker of this node
        has not sealed its part, or rank 0 removes old checkpoints while all ranks wait.
        """
        saving = saving_folder(self.saves, self.name)
        folder = saving / f"iteration_{min(worker.step for worker in self._workers):08d}"
        begun = folder.is_dir() and not all(seal_file(folder, worker.rank).exists() for worker in self._workers)
        return begun or any(saving.glob(f"{REMOVING}*"))

    def _growing(self) -> bool:
        """Return whether the next step is the first of another batch, whose graph is compiled first
        (plugins/batch_ramp).
        """
        ramp, step = View(self.recipe).ramp, min(worker.step for worker in self._workers)
        return ramp.batch_at(step + 1) != ramp.batch_at(step)

    def _evaluating(self) -> bool:
        """Return whether the held-out loss is due after the newest step and not recorded yet."""
        settings = (self.recipe.get("plugins") or {}).get("held_out_loss")
        every = settings.get("every") if isinstance(settings, dict) else None
        for record in self._own(self.held_out):
            self.evaluated = max(self.evaluated, int(record.get("step", -1)))
        if not isinstance(every, int) or every < 1:
            return False
        behind = min(self._workers, key=lambda worker: worker.step)
        return due(behind.step, every, behind.total) and self.evaluated < behind.step
