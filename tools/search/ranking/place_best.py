"""Place candidates' layers by the pipeline optimiser, several at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

from tools.estimate.configuration import Configuration
from tools.estimate.time_model import TimeModel
from tools.placement.budget import Budget
from tools.placement.place import Placement, least_seconds, place
from tools.process.signals import terminate_as_interrupt
from tools.search.ranking.rank import Ranked
from tools.search.space.candidates import configuration
from tools.search.space.limits import PLANNED
from tools.search.space.request import Request

_LEAST = 2.0  # seconds for a candidate, however many there are
Told = Callable[[Ranked, Placement], None]


def processes() -> int:
    """Placements at a time: the solver uses one core each."""
    return max(1, len(os.sched_getaffinity(0)))


def place_all(
    request: Request,
    ranked: Sequence[Ranked],
    times: TimeModel,
    budget: Budget,
    told: Told,
    at_once: int | None = None,
) -> bool:
    """Place every "planned" candidate and tell of each as it is done; False when Ctrl-C or SIGTERM ended it early.

    The others stay as they were ranked: their recomputation is what the user's limits ask for. Each candidate gets
    the effort of `budget`, however many run at a time, and the same share of its seconds as a deadline.
    """
    todo = [one for one in ranked if one.candidate.recompute == PLANNED]
    at_once = min(at_once or processes(), max(1, len(todo)))
    rounds = -(-len(todo) // at_once)
    seconds = max(_LEAST, budget.seconds_left / max(1, rounds))
    jobs = [
        (configuration(request, one.candidate), times, request.room, budget.effort, seconds, request.groups)
        for one in todo
    ]
    try:
        with terminate_as_interrupt():
            for index, placement in _results(_place, jobs, at_once):
                told(todo[index], placement)
    except KeyboardInterrupt:
        return False
    return True


def bounds_of(
    request: Request, ranked: Sequence[Ranked], times: TimeModel, effort: float, at_once: int | None = None
) -> list[float]:
    """Seconds that no placement of each candidate is under (`least_seconds`); Ctrl-C raises KeyboardInterrupt."""
    jobs = [(configuration(request, one.candidate), times, request.room, effort, request.groups) for one in ranked]
    found = [0.0] * len(jobs)
    for index, bound in _results(_bound, jobs, min(at_once or processes(), max(1, len(jobs)))):
        found[index] = bound
    return found


Job = tuple[Any, ...]
Answer = TypeVar("Answer")


def _results(work: Callable[..., Answer], jobs: Sequence[Job], at_once: int) -> Iterator[tuple[int, Answer]]:
    """(number of the job, its result) as they come, in processes of their own unless one at a time is enough."""
    if at_once == 1 or len(jobs) <= 1:
        for index, job in enumerate(jobs):
            yield index, work(*job)
        return
    with _pool(at_once) as pool:
        futures = {pool.submit(work, *job): index for index, job in enumerate(jobs)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _place(
    config: Configuration, times: TimeModel, cap: float, effort: float, seconds: float, groups: bool
) -> Placement:
    if not groups:
        return place(config, times, cap, Budget(effort, seconds))
    return place(config, times, cap, Budget(2 * effort, seconds), groups=True)  # half of it as without them


def _bound(config: Configuration, times: TimeModel, cap: float, effort: float, groups: bool) -> float:
    return least_seconds(config, times, cap, Budget(effort), groups)


@contextmanager
def _pool(at_once: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that leave Ctrl-C to their parent, and end with it."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), initializer=_deaf)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _deaf() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
