"""The steps of a run that goes on, taken in as they are written: memory does not grow with their number.

Only sums are held. When an attempt begins before steps that were made, the file is read again from its start, once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from tools.runs.goodput import NEVER
from tools.runs.readings import Steps
from tools.runs.source import USUAL_OF, header_of, number

Sink = Callable[[dict[str, Any]], None]
_SPEED_OF = 50  # steps


class _Part:
    """Sums of the steps of one start of the workers that still stand."""

    def __init__(self, start: int):
        self.start, self.last = start, 0
        self.first = 0.0  # seconds of its first step, which compiles
        self.others = 0.0
        self.some: list[float] = []  # seconds of the first `USUAL_OF` others

    def add(self, record: dict[str, Any], cut: int) -> None:
        """Take in a step; beyond `cut` it was made again."""
        seconds, stands = _number(record, "seconds"), record["step"] <= cut
        if not self.last:
            self.first = seconds if stands else 0.0
        else:
            self.others += seconds if stands else 0.0
            if len(self.some) < USUAL_OF and seconds > 0:
                self.some.append(seconds)
        self.last = record["step"]


def _opens(record: dict[str, Any], parts: list[_Part]) -> bool:
    """Whether a line begins a part: a header, or a step that falls back where a kill broke the header."""
    return "total_steps" in record or (_is_step(record) and (not parts or record["step"] <= parts[-1].last))


def _is_step(record: dict[str, Any]) -> bool:
    return isinstance(record.get("step"), int)


def _part(record: dict[str, Any]) -> _Part:
    return _Part(header_of(record)[0] if "total_steps" in record else record["step"] - 1)


class Kept:
    """What stands of a run: `seconds` of usual steps, how many, and the newest step.

    Args:
        file: metrics of the rank that stands for the run. sink: gets every record of a step, once, in order.
    """

    def __init__(self, file: Path, sink: Sink = lambda record: None):
        self.file, self.sink = file, sink
        self.follower = Steps(file)
        self.parts: list[_Part] = []
        self.cut = NEVER  # where the attempt that is about to train begins
        self.last: dict[str, Any] = {}
        self.total: int | None = None
        self.began: float | None = None  # of the newest part
        self.first: float | None = None  # of the oldest one
        self.speeds: deque[float] = deque(maxlen=_SPEED_OF)

    def look(self) -> None:
        """Take in what is new."""
        again = False
        for record in self.follower.records():
            if _opens(record, self.parts):
                self.parts.append(_part(record))
                again = again or self.parts[-1].start < self.step
                self.cut = NEVER
                self.speeds.clear()
            if "total_steps" in record:
                _, self.began, self.total = header_of(record)
                self.first = self.began if self.first is None else self.first
            elif _is_step(record):
                self._step(record)
        if again:
            self._count()

    def begin_at(self, step: int | None) -> None:
        """Steps beyond `step` will be made again by an attempt that has not trained yet; None: there is none."""
        cut = NEVER if step is None else step
        if cut != self.cut:
            self.cut = cut
            self._count()

    def _step(self, record: dict[str, Any]) -> None:
        part, seconds = self.parts[-1], _number(record, "seconds")
        if part.last and seconds > 0:
            self.speeds.append(_number(record, "tokens") / seconds)
        part.add(record, self.cut)
        self.last = record
        self.sink(record)

    def _count(self) -> None:
        """Count all parts anew, now that it is known which of their steps were made again."""
        starts = [*(part.start for part in self.parts), self.cut]
        cuts = [min(starts[at + 1 :]) for at in range(len(self.parts))]
        parts: list[_Part] = []
        so_far = Steps(self.file)
        for record in so_far.records():
            if so_far.offset > self.follower.offset:
                break
            if _opens(record, parts):
                parts.append(_part(record))
            if _is_step(record):
                parts[-1].add(record, cuts[len(parts) - 1])
        self.parts = parts

    @property
    def step(self) -> int:
        """The newest step that was made."""
        return self.last.get("step", 0)

    @property
    def usual(self) -> float | None:
        """Seconds of a usual step, of the newest part that can tell."""
        return next((median(part.some) for part in reversed(self.parts) if part.some), None)

    @property
    def seconds(self) -> float:
        """Of the steps that stand; of a part's first one as many as a usual one takes."""
        whole = 0.0
        for part in self.parts:
            usual = median(part.some) if part.some else self.usual
            whole += part.others + (min(part.first, usual) if usual else 0.0)
        return whole

    @property
    def speed(self) -> float | None:
        """Tokens a second, the median of the newest steps."""
        return median(self.speeds) if self.speeds else None


def _number(record: dict[str, Any], name: str) -> float:
    value = number(record.get(name))
    return 0.0 if value is None or not math.isfinite(value) else float(value)
