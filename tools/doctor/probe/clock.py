"""How fast a worker is while it is let run, and what kept it from running."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from plugins.processor_time import scheduled, text_of, throttled

Result = TypeVar("Result")


class Piece(NamedTuple):
    """One round of a measure.

    Attributes:
        rate: amount a second of the time in which the worker was let run.
        waited: share of the time in which it was ready, but other processes had its cores.
        throttled: share of the time in which a limit had stopped its control group.
    """

    rate: float
    waited: float
    throttled: float


def timed(work: Callable[[], float], seconds: float) -> Piece:
    """Repeat `work`, which returns the amount that it did, for `seconds`.

    Time in which other processes had the cores is taken out of the rate: it tells of them, not of this worker. Time in
    which a limit stopped the worker stays in. The kernel counts both as waiting (schedstat), the limit also by itself.
    """
    began, (ran, waited), stopped = time.perf_counter(), scheduled(), throttled(text_of)
    amount = work()  # once at least: on a busy host the time can be over before it begins, and a rate of 0 has no time
    while time.perf_counter() - began < seconds:
        amount += work()
    took = time.perf_counter() - began
    now_ran, now_waited = scheduled()
    stop = throttled(text_of) - stopped
    wait = max(0.0, now_waited - waited - stop)
    share = wait / max(took, now_ran - ran + wait)  # of all threads; one that waits for a device is not ready
    return Piece(amount / took / (1 - share), share, min(1.0, stop / took))


def waiting(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the share of its time in which this process was ready, but others had its cores."""
    began, (_, before) = time.perf_counter(), scheduled()
    result = work()
    waited = max(0.0, scheduled()[1] - before)
    return result, min(1.0, waited / (time.perf_counter() - began))
