"""Why a worker failed: its log's last traceback or user error, in a few lines."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from plugins.spike_guard.words import SPIKE
from tools.files.tail import last_lines
from tools.runs.attempts import Cause

TAIL = 15  # lines of a log shown
USER_ERROR = 2  # exit code of a worker that has printed `tc3: message`
STOPPED = "tc3: stopped: "  # begins the last words of a worker that has ended the run for what it saw in training

_TRACEBACK = "Traceback (most recent call last):"
_MSRUN_END = re.compile(r"Worker process (\d+) exit with exception. Error code: (-?\d+)")


@dataclass(frozen=True)
class Failure:
    """What ended a run: one message, the log to read, and that log's telling lines.

    `user_error`: the message is all, and the user's to mend; `stopped`: it is all, and says what was wrong in training.
    `rank` and `code` (negative: a signal) are those of the worker that failed, where one is known.
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


def worker_failure(log: Path, rank: int | None, code: int | None) -> Failure:
    """The failure of worker `rank` that ended with exit code `code` (negative: a signal; None: unknown)."""
    lines = last_lines(log)
    told = next((line for line in reversed(lines) if line.startswith("tc3: ")), None)
    if told and told.startswith(STOPPED):
        words = told.removeprefix(STOPPED)
        why: Cause = "spike" if words.startswith(SPIKE) else "not finite"
        return Failure(words, log, stopped=True, rank=rank, code=code, cause=why)
    if code in (USER_ERROR, None) and told:
        message = told.removeprefix("tc3: ")
        return Failure(message, log, user_error=True, rank=rank, code=code, cause="user error")
    traceback = any(_TRACEBACK in line for line in lines)
    shown = telling_lines(lines)
    if code is not None and code < 0 and not traceback:  # it could not say why: only where it was
        shown = shown[-3:]
    cause: Cause = "signal" if code is not None and code < 0 else "exit"
    message = f"worker {rank} {how_it_ended(code)}"
    return Failure(message, log, tuple(shown), has_traceback=traceback, rank=rank, code=code, cause=cause)


def how_it_ended(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "ended, its exit code is not known"
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL): often the kernel's answer to memory running out, `dmesg` knows"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"failed with exit code {code}"


def telling_lines(lines: list[str]) -> list[str]:
    """The last traceback's tail and a little of what follows it; without one, the last lines that are not empty."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return [line for line in lines if line.strip()][-TAIL:]
    block = lines[starts[-1] :]
    # the exception's own line is the first one after the frames that is not indented; MindSpore explains below it
    own = next((number for number, line in enumerate(block[1:], 1) if line.strip() and not line[0].isspace()), None)
    if own is None:
        return block[-TAIL:]
    shown = [line for line in block[: own + TAIL // 2] if line.strip()]
    return shown[-TAIL:]


def ends_in_msrun_log(log: Path) -> dict[int, int]:
    """pid -> exit code of the workers that msrun has logged as failed (it logs the first one it sees)."""
    found = (_MSRUN_END.search(line) for line in last_lines(log))
    return {int(match[1]): int(match[2]) for match in found if match}
