"""This module places the layers of candidates, and computes lower bounds on their step times, in several processes at a
time.

Every function of this module takes a request and candidates, and returns the results of `tools.layout.place` for these
candidates. The result for a candidate does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tools.estimate.memory.model import all_stages
from tools.estimate.time_model import TimeModel
from tools.layout.budget import Budget
from tools.layout.place import WHOLE_EFFORT, Placement, floor_seconds, place, screen
from tools.process.children import end_with_parent, terminate_as_interrupt
from tools.search.candidates import Candidate, candidate_of, configuration
from tools.search.ranking.rank import Ranked
from tools.search.request import PLANNED, Request

LEAST_SECONDS = 2.0  # seconds for a candidate, however many there are
Told = Callable[[Ranked, Placement], None]
Job = tuple[Any, ...]
Results = Callable[[Callable[..., Any], Sequence[Job]], Iterator[tuple[int, Any]]]


def processes() -> int:
    """Return the number of placements that run at the same time; the solver uses one core for each placement."""
    return max(1, len(os.sched_getaffinity(0)))


def place_all(
    request: Request, ranked: Sequence[Ranked], times: TimeModel, budget: Budget, told: Told, at_once: int | None = None
) -> bool:
    """Place the layers of every candidate with "planned" recomputation, and report each placement when it is done;
    return False if Ctrl-C or SIGTERM ended the work early.

    Candidates whose recomputation is not "planned" are not placed, because the user's limits fix their recomputation.
    Each candidate gets the effort of `budget`, however many candidates are placed at the same time, and an equal share
    of the seconds of `budget` as its deadline.
    """
    todo = [one for one in ranked if one.candidate.recompute == PLANNED]
    at_once = min(at_once or processes(), max(1, len(todo)))
    seconds = max(LEAST_SECONDS, budget.seconds_left / max(1, -(-len(todo) // at_once)))
    jobs = [(request, one.candidate, times, budget.effort, seconds) for one in todo]
    try:
        with terminate_as_interrupt(), working(at_once) as results:
            for index, placement in results(place_one, jobs):
                told(todo[index], placement)
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def working(at_once: int | None) -> Iterator[Results]:
    """Yield a function that runs jobs in several processes. The function yields (number of the job, result) as the
    results arrive. If only one process is allowed, the jobs run in this process.
    """
    at_once = at_once or processes()
    if at_once == 1:
        yield lambda work, jobs: ((index, work(*job)) for index, job in enumerate(jobs))
        return
    with _pool(at_once) as pool:

        def results(work: Callable[..., Any], jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
            futures = {pool.submit(work, *job): index for index, job in enumerate(jobs)}
            for future in as_completed(futures):
                yield futures[future], future.result()

        yield results


def place_one(
    request: Request,
    candidate: Candidate,
    times: TimeModel,
    effort: float,
    seconds: float,
    start: Placement | None = None,
) -> Placement:
    """Return the placement of a candidate's layers that the solver finds, with the effort that the solver spent."""
    # with groups half of it is as without them
    budget = Budget(2 * effort if request.groups else effort, seconds)
    found = place(configuration(request, candidate), times, request.room, budget, groups=request.groups, start=start)
    return replace(found, spent=budget.spent)


def screen_one(
    request: Request, candidate: Candidate, times: TimeModel, beat: float, effort: float = WHOLE_EFFORT
) -> Placement:
    """Return a quick placement of a candidate's layers, without the solver; at most `effort` units of work are spent on
    the lower bound for undivided layers.
    """
    return screen(configuration(request, candidate), times, request.room, beat, request.groups, effort)


def own_placement(request: Request, times: TimeModel) -> Placement | None:
    """Return the recipe's own layout as a placement; return None if the layout leaves no margin to the memory limit, or
    if a setting other than layers and recomputation (such as the pipeline schedule) differs from what the search
    assumes for the recipe's parallel degrees.
    """
    base = request.base
    assumed = configuration(request, candidate_of(base))
    own = replace(assumed, layers=base.layers, recompute=base.recompute)
    peaks = tuple(memory.peak for memory in all_stages(own))
    # without tensor parallelism nobody reads the flag of sequence parallelism
    sequence = base.sequence_parallel if own.tp == 1 else own.sequence_parallel
    if replace(own, skew=base.skew, sequence_parallel=sequence) != base or max(peaks) > request.room:
        return None
    return Placement(own, times.step(own, simulated=True).total, 0.0, peaks)


def faster(placement: Placement, own: Placement) -> Placement:
    """Return a placement of the recipe's own degrees with the recipe's own layout `own`, if this layout is faster."""
    if own.step_s >= placement.step_s:
        return placement
    return replace(
        placement,
        configuration=own.configuration,
        step_s=own.step_s,
        bound_s=min(placement.bound_s, own.step_s),
        peak_bytes=own.peak_bytes,
        why="",
        least_s=min(placement.least_s, own.step_s),
    )


def floors(request: Request, candidates: Sequence[Candidate], times: TimeModel, beat: float) -> list[float]:
    """Return for each candidate a lower bound on its step time in seconds."""
    every = (configuration(request, one) for one in candidates)
    return [floor_seconds(config, times, request.room, beat, request.groups) for config in every]


@contextmanager
def _pool(at_once: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes that leave Ctrl-C to their parent, and end with it."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), initializer=_follow)
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _follow() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
