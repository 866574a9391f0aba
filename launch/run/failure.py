"""This module finds why a worker failed: the last traceback or user error of its log, in a few lines."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from plugins.spike_guard.plan import SPIKE
from tools.files.atomic import last_lines
from tools.runs.attempts import STOPPED, TOLD, Cause
from tools.runs.failures import diagnose, without_noise

TAIL = 12  # lines of a log shown
FRAMES = 6  # of them, those of the innermost calls
_ROOM = 1 << 16  # bytes; with fewer a log, or the end of one, may not have been written
OF_LOGS = "on the disk of the logs"  # which is the disk of the run, that all hosts share
USER_ERROR = 2  # exit code of a worker that has printed `tc3: message`

_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "mostly the kernel ends a process so when the host's memory runs out: `dmesg` on that host says so",
    signal.SIGTERM: "MindSpore ends a worker so when another one or msrun's scheduler is lost: look at their logs",
}
_TRACEBACK = "Traceback (most recent call last):"
_FATAL = re.compile(r"^Fatal Python error|^terminate called")
_ERROR = re.compile(
    r"^\[(ERROR|CRITICAL)\]| - (ERROR|CRITICAL) - |^\w*(Error|Exception)\b|^msrun: |: error: ", re.IGNORECASE
)
_PART = re.compile(r"^- (.*):?\s*$")  # a title between two rules, in MindSpore's messages
_TIMED_OUT = re.compile(r"The node: (\d+) is timed out")  # MindSpore's meta_server_node.cc; its nodes are our ranks
_MSRUN_END = re.compile(r"Worker process (\d+) exit with exception. Error code: (-?\d+)")


@dataclass(frozen=True)
class Failure:
    """A `Failure` describes why a run ended: one message, the log to read, and the most informative lines of that log.

    `user_error`: the message says everything, and the user has to correct something; `stopped`: the message says what
    was wrong in the training. `rank` and `code` (negative: a signal) are those of the worker that failed, where one is
    known. `error`: the line of the log that states the error; `mend`: how to correct the error. Both `error` and `mend`
    may be empty.
    """

    message: str
    log: Path
    lines: tuple[str, ...] = ()
    user_error: bool = False
    stopped: bool = False
    has_traceback: bool = False
    rank: int | None = None
    code: int | None = None
    cause: Cause | None = None
    error: str = ""
    mend: str = ""


def worker_failure(log: Path, rank: int | None, code: int | None) -> Failure:
    """Return the failure of worker `rank` that ended with exit code `code` (negative: a signal; None: unknown)."""
    lines = last_lines(log)
    told = next((line for line in reversed(lines) if line.startswith("tc3: ") and not line.startswith(TOLD)), None)
    if told and told.startswith(STOPPED):
        words = told.removeprefix(STOPPED)
        why: Cause = "spike" if words.startswith(SPIKE) else "not finite"
        return Failure(words, log, stopped=True, rank=rank, code=code, cause=why)
    if code in (USER_ERROR, None) and told:
        message = told.removeprefix("tc3: ")
        return Failure(message, log, user_error=True, rank=rank, code=code, cause="user error")
    traceback = any(_TRACEBACK in line for line in lines)
    shown = telling_lines(lines)
    killed = code is not None and code < 0
    if killed and not (traceback or any(map(_FATAL.search, lines))):  # it could not say why
        shown = []
    error = error_of(shown)
    if not killed and not (traceback and error) and (room := _no_room(log)):
        error = "; ".join(filter(None, [error, room]))
    if traceback and not error_of(shown):
        error = f"its log ends within a traceback{error and f': {error}'}"
    found = diagnose([*shown, error])
    mend = _SIGNALS.get(-code, "") if code is not None and code < 0 else ""
    return Failure(
        f"worker {rank} {how_it_ended(code)}", log, tuple(shown), has_traceback=traceback, rank=rank, code=code,
        cause="signal" if killed else "exit", error=error, mend=mend or ("" if found.victim else found.mend),
    )  # fmt: skip


def _no_room(log: Path) -> str:
    """Return that the disk of a log is full, so that the log may lack its end; "" if it has room, or is unknown."""
    with suppress(OSError):
        if (free := shutil.disk_usage(log.parent).free) < _ROOM:
            return f"{os.strerror(errno.ENOSPC)} ({free:,} bytes are free {OF_LOGS})"
    return ""


def how_it_ended(code: int | None) -> str:
    """Return in words what an exit code of a worker means."""
    if code is None:
        return "ended, its exit code is not known"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL)"
    if code < 0:
        known = -code in {each.value for each in signal.Signals}  # the real-time signals but two have no names
        return f"was ended by {signal.Signals(-code).name if known else f'signal {-code}'}"
    return f"failed with exit code {code}"


def telling_lines(lines: list[str]) -> list[str]:
    """Return the innermost calls of the last traceback and its error; without a traceback, the last lines that mention
    an error.

    MindSpore's information for its own developers (calls in C++), warnings and rulers are left out.
    """
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line or _FATAL.search(line)]
    if not starts:
        loud = without_noise(lines)
        return ([line for line in loud if _ERROR.search(line)] or loud or [line for line in lines if line.strip()])[
            -TAIL:
        ]
    block = lines[starts[-1] :]
    if _FATAL.search(block[0]):
        return without_noise(block)[:TAIL]
    # the exception's own line is the first one after the frames that is not indented; MindSpore explains below it
    own = next((number for number, line in enumerate(block[1:], 1) if line.strip() and not line[0].isspace()), None)
    if own is None:
        return without_noise(block)[-TAIL:]
    said = without_noise(_for_users(block[own:]))
    return [*_calls(without_noise(block[1:own])), *said[: TAIL - FRAMES]]


def _calls(lines: list[str]) -> list[str]:
    """Return the last call of a traceback outside installed packages, and the innermost calls."""
    begins = [number for number, line in enumerate(lines) if line.lstrip().startswith("File ")]
    calls = [lines[begin:end] for begin, end in pairwise([*begins, len(lines)])]
    own = [number for number, call in enumerate(calls) if "site-packages" not in call[0]][-1:]
    kept = sorted({*own, *range(max(0, len(calls) - FRAMES // 2), len(calls))})[-FRAMES // 2 - 1 :]
    return [line for number in kept for line in calls[number]]


def _for_users(lines: list[str]) -> list[str]:
    """Return MindSpore's message without the parts about C++; a part begins with its title and ends at an empty
    line.
    """
    kept, skips = [], False
    for line in lines:
        if title := _PART.match(line):
            skips = "C++" in title[1]
        elif skips and not line.strip():
            skips = False
        if not skips and not title:
            kept.append(line)
    return kept


def error_of(shown: Sequence[str]) -> str:
    """Return the line among `telling_lines` that states the error (not a call that led to the error); the line is empty
    if none states it, as in a traceback whose end was not written.
    """
    return next((line for line in shown if line.strip() and not line[0].isspace() and _TRACEBACK not in line), "")


def ends_in_msrun_log(log: Path) -> dict[int, int]:
    """Return a dictionary pid -> exit code of the workers that msrun has logged as failed (msrun logs only the first
    failure that it sees).
    """
    found = (_MSRUN_END.search(line) for line in last_lines(log))
    return {int(match[1]): int(match[2]) for match in found if match}


def timed_out(log: Path) -> list[int]:
    """Return the ranks with which msrun's scheduler has lost contact, according to its log."""
    return [int(match[1]) for line in last_lines(log) if (match := _TIMED_OUT.search(line))]
