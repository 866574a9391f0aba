"""Nothing is silent for long: what takes more than two seconds says what it is, on a terminal and in a log alike."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

AFTER, EVERY = 2.0, 20.0  # seconds until the first line, and between the others


@contextmanager
def saying(what: str) -> Iterator[None]:
    """While the block runs: a line on stderr after two seconds, and one now and then, ``WHAT (22 s so far)``."""
    done = threading.Event()
    thread = threading.Thread(target=_say, args=(what, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _say(what: str, done: threading.Event) -> None:
    started, pause = time.monotonic(), AFTER
    while not done.wait(pause):
        with suppress(OSError, ValueError):  # nobody listens
            print(f"{what} ({time.monotonic() - started:.0f} s so far)", file=sys.stderr, flush=True)
        pause = EVERY
