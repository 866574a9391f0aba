"""Which of this node's workers holds the others up in a hang: one that is stopped, or that is not where they wait.

In a hang all workers wait for one, and their steps are the same. Where each of them is tells them apart: those that
wait are in MindSpore, which runs the graph or a collective; the one that they wait for may be elsewhere: in the data,
in a save, in a callback. One that hangs in MindSpore itself looks like all others, and is not named.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.workers.stacks import ASK

ANSWER = 1.0  # seconds
_THREAD = re.compile(rb"^(?:Current thread|Thread) 0x[^\n]*\n", re.MULTILINE)  # the main thread is the last one
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass(frozen=True)
class Place:
    """The innermost Python call of a worker's main thread."""

    file: str
    line: int
    function: str

    @property
    def waits(self) -> bool:
        """Whether it is in MindSpore, and not for its own data."""
        return "/mindspore/" in self.file and "/mindspore/dataset/" not in self.file

    def __str__(self) -> str:
        """As a user would look for it."""
        return f"{self.function} ({'/'.join(Path(self.file).parts[-2:])}:{self.line})"


def workers() -> dict[int, psutil.Process]:
    """Rank -> process of the workers below this one."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
            environ = process.environ()
            if environ.get("MS_ROLE") == "MS_WORKER":
                found[int(environ["RANK_ID"])] = process
    return found


def stopped() -> int | None:
    """The first worker whose process was stopped (SIGSTOP, a debugger)."""
    for rank, process in sorted(workers().items()):
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                return rank
    return None


def places(logs: Path, ranks: Sequence[int]) -> dict[int, Place]:
    """Where the workers are that say so within `ANSWER` seconds; they are asked all at once."""
    sizes = {}
    for rank, process in workers().items():
        log = logs / f"worker_{rank}.log"
        with contextlib.suppress(psutil.Error, OSError):
            if rank in ranks and _answers(process.pid):
                sizes[rank] = log.stat().st_size
                process.send_signal(ASK)
    found: dict[int, Place] = {}
    until = time.monotonic() + ANSWER
    while len(found) < len(sizes) and time.monotonic() < until:
        time.sleep(0.1)
        for rank, size in sizes.items():
            with contextlib.suppress(OSError), (logs / f"worker_{rank}.log").open("rb") as file:
                file.seek(size)
                if place := place_of(file.read()):
                    found[rank] = place
    return found


def place_of(said: bytes) -> Place | None:
    """The place in what `faulthandler` has written; the main thread's stack ends it."""
    starts = [match.end() for match in _THREAD.finditer(said)]
    frame = _FRAME.match(said[starts[-1] :].decode("utf-8", "replace")) if starts else None
    return Place(frame["file"], int(frame["line"]), frame["function"]) if frame else None


def _answers(pid: int) -> bool:
    """Whether a process has a handler for the question: others would die of it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (ASK - 1) & 1)
    return False
