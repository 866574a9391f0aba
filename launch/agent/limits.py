"""How long each phase of an attempt may last before it counts as a hang. Learned from the run; pure.

The rule. With fewer than ENOUGH durations seen of a phase: its default, or LONGEST times the longest seen, whichever
is more. From then on the largest of

* the phase's floor,
* TYPICAL times the median of the last WINDOW durations,
* LONGEST times the longest of them.

A deviation from the median (such as the median absolute one) adds nothing: of durations, which are above 0, it is at
most the median itself.

So a false alarm takes one step that lasts 10 times the usual, 3 times the longest of the last 200, and longer than the
floor, all at once; what it costs is a restart. How often, where steps are alike and independent: the next one is the
longest of n + 1 with probability 1 / (n + 1); where pauses have a heavy tail (a chance to exceed t that falls as
t**-a), it is LONGEST times the longest before with LONGEST**-a / (n + 1), in the window of 200 and with a = 3 once in
5,400 steps; then it has to be above the other two bounds as well. A hang is seen after the limit: 10 steps, or the
floor. benchmarks/RESULTS.md says what the rule makes of recorded steps.

Phases are kept apart: the first step after a start compiles or warms up, evaluations and saves stop the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tools.runs.attempts import Phase

ENOUGH, WINDOW = 5, 200
TYPICAL, LONGEST = 10.0, 3.0
DEFAULTS: Mapping[Phase, float] = {  # seconds, where nothing is known: a stage of 1119B takes long to compile
    "start": 1800.0,
    "compile": 7200.0,
    "first step": 7200.0,
    "step": 1800.0,
    "evaluation": 3600.0,
    "save": 3600.0,
    "end": 1800.0,
}
FLOORS: Mapping[Phase, float] = {  # seconds: pauses of a busy host or disk that are no hang
    "start": 120.0,
    "compile": 300.0,
    "first step": 300.0,
    "step": 30.0,
    "evaluation": 60.0,
    "save": 60.0,
    "end": 60.0,
}


@dataclass
class Limits:
    """The limits of one run's phases; `defaults` and `floors` can be set, in part, by whoever knows better."""

    defaults: Mapping[Phase, float] = field(default_factory=dict)
    floors: Mapping[Phase, float] = field(default_factory=dict)
    seen: dict[Phase, deque[float]] = field(default_factory=dict)

    def learn(self, phase: Phase, seconds: float) -> None:
        """A phase (of steps: one of them) has ended well after `seconds`."""
        self.seen.setdefault(phase, deque(maxlen=WINDOW)).append(seconds)

    def limit(self, phase: Phase) -> float:
        """Seconds that `phase` may last."""
        seen = self.seen.get(phase, ())
        longest = LONGEST * max(seen, default=0.0)
        if len(seen) < ENOUGH:
            return max(self.defaults.get(phase, DEFAULTS[phase]), longest)
        return max(self.floors.get(phase, FLOORS[phase]), TYPICAL * median(seen), longest)


def learn_steps(limits: Limits, records: Iterable[Mapping[str, Any]]) -> None:
    """Learn from the lines of a metrics file; the first step of each attempt, which compiles, is left out."""
    first = True
    for record in records:
        if "total_steps" in record:
            first = True
        elif isinstance(record.get("seconds"), (int, float)):
            if not first:
                limits.learn("step", float(record["seconds"]))
            first = False
