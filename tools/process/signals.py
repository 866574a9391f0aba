"""Signals around work that must not be cut in half."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")
INTERRUPTED = 130  # exit code
_LOOK = 0.2  # seconds after which a waiting main thread looks for signals


def interruptibly(work: Callable[[], Result]) -> Result:
    """Do `work`, which may stay in C for minutes, in a thread, so that Ctrl-C ends the wait for it at once.

    The work itself goes on until the process ends, so it must write nothing. It must let go of Python's lock.
    Outside the main thread, which no signal reaches, it is done right here.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_LOOK)  # Python handles a signal between two waits
    except BaseException:
        atexit.register(_leave_behind, outcome)
        raise
    return outcome.result()


def _leave_behind(outcome: Future[Any]) -> None:
    """End the process around work that goes on: Rust panics when it comes back to an interpreter that is torn down."""
    if not outcome.done():  # an interrupted join takes its thread for stopped: is_alive() does not tell
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until the end of the block (milliseconds of renames or of starting a process)."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    try:
        with _handler(signal.SIGINT, note), _handler(signal.SIGTERM, note):
            yield
    finally:
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Keep Ctrl-C from processes started inside, so that it reaches the parent alone; SIGTERM still ends them.

    They inherit a blocked SIGINT. Python's handlers are not inherited, and ignoring SIGINT here would lose one.
    """
    resource_tracker.ensure_running()  # else the first process starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Make SIGTERM end the block as Ctrl-C would: with the clean-up of every `with` and `finally`."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handler(signal.SIGTERM, interrupt):
        yield


@contextmanager
def _handler(number, handler) -> Iterator[None]:
    """Install `handler` for the block; do nothing outside the main thread, where Python allows no handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
