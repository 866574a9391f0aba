"""This module times the probe of a rank, which is a fixed piece of work, and measures the rank's waiting times between
probes.

The adapter calls `Watch` at the beginning and end of each step. A probe's time does not include the time in which other
processes had the core. MindSpore is imported only for an NPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from plugins.processor_time import scheduled, text_of, thread_waited, throttled
from plugins.straggler_probe.plan import Settings
from plugins.straggler_probe.record import Record, append

ROUNDS = 5  # of which the median counts: a pause of a few milliseconds falls into one of them


DEVICE_SIDE, _PRODUCTS = 4096, 16  # some 8 ms of an Atlas A2
_NUMBERS, _PASSES = 1 << 15, 24  # 128 KiB, which stay in a core's own cache: some 0.5 ms of a current core


def device_products(side: int = DEVICE_SIDE) -> Callable[[], float]:
    """Return a function that multiplies float16 matrices by MindSpore on the device of this process and returns the
    GFLOP that it computed. This function has never run on an NPU.
    """
    import mindspore as ms

    left = ms.Tensor(np.full((side, side), 0.01), ms.float16)

    def work() -> float:
        for _ in range(_PRODUCTS):
            ms.ops.matmul(left, left)
        ms.runtime.synchronize()
        return 2e-9 * side**3 * _PRODUCTS

    work()  # compiles
    return work


def processor_work() -> Callable[[], float]:
    """Return a function that computes square roots in one thread of this process and returns their number in billions.

    The function does not use MindSpore's operators or a product by NumPy's BLAS, because both use as many threads as
    they like, which then wait for cores that other processes use.
    """
    numbers = np.full(_NUMBERS, 2.0, np.float32)
    out = np.empty_like(numbers)

    def work() -> float:
        for _ in range(_PASSES):
            np.sqrt(numbers, out=out)
            np.add(out, numbers, out=out)
        return 1e-9 * _NUMBERS * _PASSES

    work()
    return work


def of_device(device: str) -> Callable[[], float]:
    """Return the function that does the probe's fixed piece of work on a type of device."""
    return processor_work() if device == "CPU" else device_products()


def seconds_of(work: Callable[[], float], pieces: int) -> float:
    """Return the seconds of `pieces` pieces of `work`: the median of `ROUNDS` measurements, each without the time in
    which the thread waited for a core.

    The time in which a limit or a signal stopped the process is included, unless the kernel counts it as waiting.
    """
    times = []
    for _ in range(ROUNDS):
        began, waited = time.perf_counter(), thread_waited()
        for _ in range(pieces):
            work()
        took = time.perf_counter() - began
        times.append(max(took - (thread_waited() - waited), 1e-9))
    return median(times)


class Watch:
    """A `Watch` times a fixed piece of work (a probe) on one rank now and then, and the rank's waits for data.

    The first step after a start of the run compiles the graph and is not counted. The time between the end of a step
    and the beginning of the next step is the wait for the batch, because nothing else happens in this time.

    Args:
        settings: the settings, which say when to probe, and how much work to do.
        file: the file of the record.
        rank, host, device: the worker whose probes are recorded.
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
        """Record that a step begins, because its batch has arrived."""
        if self.left is not None:
            self.data += time.perf_counter() - self.left

    def end(self, step: int) -> None:
        """Record that step number `step`, counted from 1, has ended; probe if a probe is due."""
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
    """Return seconds by the wall's clock, of running, of waiting for a core, and of being stopped by a limit."""
    return time.perf_counter(), *scheduled(), throttled(text_of)
