"""What a rank notes between probes, without MindSpore: the adapter calls it at the beginning and end of each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from plugins.processor_time import scheduled, text_of, throttled
from plugins.straggler_probe.record import Record, append
from plugins.straggler_probe.settings import Settings
from plugins.straggler_probe.work import seconds_of


class Watch:
    """One rank's probes and what passed between them.

    The first step of a part of a run compiles and is not counted. The time between the end of a step and the beginning
    of the next one is the wait for its batch: nothing else happens there.

    Args:
        settings: when, and how much work. file: where to record. rank, host, device: whose probes they are.
        work: the fixed piece of work.
        sees_data: whether the host waits for batches itself; in sink mode the device does.
    """

    def __init__(
        self,
        settings: Settings,
        file: Path,
        rank: int,
        host: str,
        device: str,
        work: Callable[[], float],
        sees_data: bool,
    ):
        self.settings, self.file, self.work, self.sees_data = settings, file, work, sees_data
        self.rank, self.host, self.device = rank, host, device
        self.left: float | None = None  # when the step before ended
        self.before: tuple[float, float, float, float] | None = None  # the clocks at the probe before
        self.steps, self.data = 0, 0.0

    def begin(self) -> None:
        """A step begins: its batch is there."""
        if self.left is not None:
            self.data += time.perf_counter() - self.left

    def end(self, step: int) -> None:
        """Step number `step`, from 1 on, has ended; probe when it is time."""
        self.steps += 1
        if self.before is None or step % self.settings.every == 0:
            now = _clocks()
            if self.before is not None:
                append(self.file, self._record(step, self.before, now))
            self.steps, self.data, self.before = 0, 0.0, now
        self.left = time.perf_counter()

    def _record(self, step: int, before: tuple[float, ...], now: tuple[float, ...]) -> Record:
        seconds, ran, waited, stopped = (max(0.0, b - a) for a, b in zip(before, now, strict=True))
        probe = seconds_of(self.work, self.settings.work)
        data = self.data if self.sees_data else None
        return Record(
            step, self.rank, self.host, self.device, self.settings.work, probe, seconds, self.steps, data,
            ran, waited, stopped,
        )  # fmt: skip


def _clocks() -> tuple[float, float, float, float]:
    """Seconds by the wall's clock, of running, of waiting for a core, and of being stopped by a limit."""
    return time.perf_counter(), *scheduled(), throttled(text_of)
