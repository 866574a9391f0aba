"""A map over worker processes that keeps order, bounds memory, and outlives neither parent nor Ctrl-C.

Each worker has a pipe of its own and jobs are dealt round robin, so results come back in job order by reading the
pipes in the same turn. At most `DEPTH` jobs a worker are under way: memory is O(workers x job), whatever the corpus.
A worker that dies closes its pipe, which the parent sees at once; a parent that dies closes all pipes, which ends
the workers. (`multiprocessing.Pool` hangs in the first case, `ProcessPoolExecutor` leaves orphans in the second.)
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from plugins.errors import DataError
from tools.process.signals import deaf_children, uninterrupted

Job = TypeVar("Job")
Result = TypeVar("Result")
DEPTH = 3  # one being worked on, one waiting, one on its way back


def ordered_map(make: Callable[[], Callable[[Job], Result]], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Yield ``make()(job)`` for every job, in order.

    make: builds the function, once in each worker (picklable: a module's function or a `functools.partial`).
    workers: processes; 1 works in this process. Raises `DataError` when a worker dies.
    """
    if workers == 1:
        yield from map(make(), jobs)
        return
    with _started(make, workers) as team:
        pending: deque[_Member] = deque()
        for job, member in zip(jobs, cycle(team), strict=False):
            if len(pending) == DEPTH * workers:
                yield pending.popleft().receive()
            member.send(job)
            pending.append(member)
        while pending:
            yield pending.popleft().receive()


class _Member:
    """The parent's side of one worker."""

    def __init__(self, make: Callable[[], Callable]) -> None:
        context = multiprocessing.get_context("spawn")  # forking after threads have run is not safe
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, job: object) -> None:
        try:
            self.connection.send(job)
        except OSError:
            raise self._death() from None

    def receive(self) -> Any:
        try:
            result = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(result, Exception):
            raise result
        return result

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()

    def _death(self) -> DataError:
        self.process.join(timeout=5)
        code = self.process.exitcode
        return DataError(
            f"a worker process died (exit code {code}); -9 mostly means out of memory: try fewer --workers"
        )


@contextmanager
def _started(make: Callable[[], Callable], workers: int) -> Iterator[list[_Member]]:
    team: list[_Member] = []
    try:
        with uninterrupted(), deaf_children():
            team.extend(_Member(make) for _ in range(workers))
        yield team
    finally:
        with uninterrupted():
            for member in team:
                member.stop()


def _serve(connection: Connection, make: Callable[[], Callable]) -> None:
    """Answer jobs until the parent closes the pipe."""
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    # a thread of its own empties the pipe, so that the parent's send never waits for our send: no deadlock
    threading.Thread(target=_fetch, args=(connection, inbox), daemon=True).start()
    function = make()
    while True:
        job = inbox.get()
        try:
            result = function(job)
        except Exception as error:
            result = error
        connection.send(result)


def _fetch(connection: Connection, inbox: queue.SimpleQueue) -> None:
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)  # the parent is done, or gone; either way nobody wants what is still being worked on
