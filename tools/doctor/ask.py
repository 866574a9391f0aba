"""This module runs a command, most often `tc3 doctor --json`, on many hosts by ssh. The commands run on all hosts at
the same time, each with a time limit, and no process is left behind.

The same ssh session first measures the difference of the clocks: this host sends a line, and the other host answers
with its time. The other host read its clock between the moments at which this host sent the line and received the
answer; of several rounds the shortest round is the most exact. No round includes the start of the connection or of
Python.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from plugins.errors import ClusterError
from tools.doctor.report import CHECKOUT, Report, ReportError, read_report
from tools.process.children import kill, terminate_as_interrupt
from tools.process.waiting import Progressing

# What came of asking a host: its report and the difference of its clock, or what went wrong.

_MOST = 1 << 22  # bytes that are taken of a report; a real one has some 20 thousand


@dataclass(frozen=True)
class Skew:
    """A `Skew` is the number of seconds by which another host's clock is ahead of this host's clock, and the possible
    error of this number (half of the round-trip time).
    """

    ahead: float
    error: float


@dataclass(frozen=True)
class Trouble:
    """A `Trouble` says why a host gave no report: it holds the part that failed (`ssh` or `report`), a description of
    the failure, and a remedy.
    """

    what: str
    words: str
    mend: str


@dataclass(frozen=True)
class Answer:
    """An `Answer` holds the report that one host gave, or the reason why it gave none. `skew` is None if the host's
    clock was not measured.
    """

    told: Report | Trouble
    skew: Skew | None = None


def parsed(text: str) -> Report | Trouble:
    """Return the report of `tc3 doctor --json` that a text holds, or a `Trouble` that says why the text is not such a
    report.
    """
    if len(text) > _MOST:
        return Trouble(
            "report",
            f"the output has {len(text):,} characters, so it is not a report",
            "find out what prints text there when a shell starts",
        )
    try:
        return read_report(text)
    except ReportError as error:
        return Trouble("report", str(error), "run tc3 doctor --json on that host, with the same checkout as here")


def read_folder(folder: Path) -> Mapping[str, Answer]:
    """Return the answer of each host, read from a folder that holds a file HOST.json for each host.

    Raises:
        ClusterError: the folder holds no file HOST.json, or cannot be listed.
    """
    try:
        files = sorted(folder.glob("*.json"))
    except OSError as error:
        raise ClusterError(f"--nodes {folder}: the folder cannot be listed: {error.strerror}") from None
    if not files:
        raise ClusterError(
            f"--nodes {folder}: the folder holds no *.json file; on each host run `tc3 doctor --json`, and save its "
            "output in this folder as HOST.json, where HOST is the host's name"
        )
    return {path.stem: Answer(_of_file(path)) for path in files}


def _of_file(path: Path) -> Report | Trouble:
    try:
        if path.stat().st_size > _MOST:
            return parsed(" " * (_MOST + 1))
        return parsed(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Trouble("report", f"{path}: {error.strerror}", "run tc3 doctor --json there again")


AT_ONCE = 64
CONNECT = 10  # seconds
# seconds for one host, connection included; where a driver hangs, several tools take 30 s each
LIMIT, PROBE_LIMIT = 180.0, 300.0
_ROUNDS = 5
# never a question; no master process that would outlive us and keep our pipes
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}", "-o", "ControlMaster=no", "--"]
_FAILED = 255  # ssh's own exit code
REACHED = (0, 1)  # exit codes of a command of tc3 that has reached a verdict
_CLOCK, _REPORT = b"tc3-clock ", b"tc3-report"
# a shell that nobody logs in to knows few folders; NPUs' tools are in these
_TOOLS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/Ascend/driver/tools"
_PASSED_ON = ("HCCL_IF_BASE_PORT",)  # what checks read of the environment
_LOOK = 0.2  # seconds between two looks at signals and at who is late
TC3 = (sys.executable, "-c", "from launch.cli import main; main()")  # tc3, in this Python
DOCTOR = (*TC3, "doctor", "--json")
_Meaning = Callable[[str, int, bytes, str], Any]  # (host, exit code, output, errors) -> what was told, or Trouble


def ask_all(hosts: Sequence[str], words: Sequence[str], limit: float = LIMIT) -> dict[str, Answer]:
    """Ask every host by ssh for its report, and return a dictionary host -> answer, in the order of `hosts`. The
    argument `words` holds the command-line arguments that follow ``tc3 doctor --json``.

    The function expects the checkout, Python and the working folder at the same paths as on this host, as the launch
    scripts do.

    Raises:
        KeyboardInterrupt: the user or a signal ended this process; every ssh process has ended by then.
    """
    answers = _every(dict.fromkeys(hosts, remote_command([*DOCTOR, *words])), limit, _told)
    return {host: Answer(told, skew) for host, (told, skew) in answers.items()}


def call_each(
    argvs: Mapping[str, Sequence[str]], limit: float, codes: Collection[int] = REACHED
) -> dict[str, str | Trouble]:  # fmt: skip
    """Run a command on every host by ssh, and return the output of each host, or the reason why a host gave no output.
    The argument `argvs` holds the command of each host.

    A command with one of the exit codes `codes` gave an output; any other exit code means that the command failed. So
    does an exit code above 1 without any output.

    Raises:
        KeyboardInterrupt: the user or a signal ended this process; every ssh process has ended by then.
    """
    answers = _every({host: remote_command(argv) for host, argv in argvs.items()}, limit, partial(_output, codes=codes))
    return {host: told for host, (told, _) in answers.items()}


def _every(commands: Mapping[str, str], limit: float, told: _Meaning) -> dict[str, tuple[Any, Skew | None]]:
    """Return a dictionary host -> the result of `told` for the output of the host's command, and the difference of the
    host's clock.
    """
    hosts = list(commands)
    sessions = _Sessions(limit)
    with terminate_as_interrupt(), Progressing(f"asking {len(hosts)} hosts", len(hosts)) as progress:
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            futures = [pool.submit(_ask, host, command, sessions, told) for host, command in commands.items()]
            left = set(futures)
            while left:
                _, left = wait(left, timeout=_LOOK)
                sessions.end_late_ones()
                done = len(hosts) - len(left)
                progress.show(f"{done} of {len(hosts)} hosts have answered", done)
        finally:
            sessions.stop()
            pool.shutdown(cancel_futures=True)
    return {host: future.result() for host, future in zip(hosts, futures, strict=True)}


def remote_command(argv: Sequence[str]) -> str:
    """Return the command line for a host's shell that prints the host's clock and runs `argv`, in a form that every
    shell understands.
    """
    environment = [f"PYTHONPATH={CHECKOUT}", f"PATH={_TOOLS}:{os.environ.get('PATH', '')}"]
    environment += [f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ]
    rounds = " ".join(map(str, range(_ROUNDS)))
    script = [
        f'for i in {rounds}; do read -r line || exit; echo "{_CLOCK.decode()}$(date +%s.%N)"; done',
        f"cd {shlex.quote(os.getcwd())} || exit 2",
        f"echo {_REPORT.decode()}",
        f"exec {shlex.join(['env', *environment, *argv])} </dev/null",
    ]
    return shlex.join(["exec", "sh", "-c", "\n".join(script)])


class _Sessions:
    """A `_Sessions` holds the running ssh processes, each with its time limit; when a process ends, all processes that
    it has started end, too.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._lock = threading.Lock()
        self._ends: dict[Popen[bytes], float] = {}
        self._late: set[Popen[bytes]] = set()
        self._stopped = False

    def start(self, words: Sequence[str], errors: int) -> Popen[bytes] | None:
        """Start a process in a new session, which Ctrl-C does not reach, and return it; return None after `stop` was
        called.
        """
        with self._lock:
            if self._stopped:
                return None
            process = Popen(words, stdin=PIPE, stdout=PIPE, stderr=errors, bufsize=0, start_new_session=True)
            self._ends[process] = time.monotonic() + self.limit
            return process

    def end(self, process: Popen[bytes]) -> bool:
        """End a process that still runs; return whether the process had exceeded its time limit."""
        with self._lock:
            del self._ends[process]
            kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process in self._late

    def end_late_ones(self) -> None:
        """End the processes that have exceeded their time limit, so that the threads that read their output can
        finish.
        """
        with self._lock:
            late = {process for process, end in self._ends.items() if time.monotonic() > end} - self._late
            self._late |= late
            for process in late:
                kill(process)

    def stop(self) -> None:
        """End the processes of all hosts, and let no further process start."""
        with self._lock:
            self._stopped = True
            for process in self._ends:
                kill(process)


def _ask(host: str, command: str, sessions: _Sessions, told: _Meaning) -> tuple[Any, Skew | None]:
    """Ask one host; its ssh has ended when this function returns. Its errors go to a file: a daemon could keep a pipe
    open.
    """
    with tempfile.TemporaryFile() as errors:
        try:
            process = sessions.start([*_SSH, host, command], errors.fileno())
        except OSError as error:
            return Trouble("ssh", f"ssh cannot be started: {error.strerror}", "install an ssh client"), None
        if process is None:
            return Trouble("ssh", "not asked", ""), None
        try:
            skew = _skew(process)
            text = _all(process)
            code = process.wait() if len(text) <= _MOST else 0
        finally:
            late = sessions.end(process)
        if late:
            mend = (
                "look for a file system or a driver that hangs on that host; --limit SECONDS gives slow hosts more time"
            )
            return Trouble("ssh", f"no answer within {sessions.limit:g} s", mend), None
        errors.seek(0)
        return told(host, code, text, errors.read(_MOST).decode(errors="replace")), skew


def _skew(process: Popen[bytes]) -> Skew | None:
    """Return the clock's difference by the shortest of some rounds; None if the host's `date` gives no parts of
    seconds.
    """
    assert process.stdin is not None and process.stdout is not None
    best: Skew | None = None
    for _ in range(_ROUNDS):
        sent, began = time.time(), time.monotonic()
        _send(process, b"\n")
        line = process.stdout.readline()
        while line and not line.startswith(_CLOCK):  # what its shell says when it starts
            line = process.stdout.readline()
        trip = time.monotonic() - began
        try:
            found = Skew(float(line.removeprefix(_CLOCK)) - sent - trip / 2, trip / 2)
        except ValueError:
            _send(process, b"\n" * _ROUNDS)  # the host goes on by itself
            return None
        best = found if best is None or found.error < best.error else best
    return best


def _send(process: Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # it has ended
        process.stdin.write(text)


def _all(process: Popen[bytes]) -> bytes:
    """Return the whole output of a process, up to a size slightly above that of any report."""
    assert process.stdout is not None
    parts, size = [], 0
    while size <= _MOST and (part := process.stdout.read(1 << 16)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _told(host: str, code: int, text: bytes, errors: str) -> Report | Trouble:
    found = _output(host, code, text, errors)
    return parsed(found) if isinstance(found, str) else found


def _output(host: str, code: int, text: bytes, errors: str, codes: Collection[int] = REACHED) -> str | Trouble:
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), f"exit code {code}")
    if code == _FAILED:
        return Trouble("ssh", last, f"`ssh -o BatchMode=yes {host} true` must work without asking for a password")
    _, found, rest = text.partition(_REPORT + b"\n")
    if not found or code not in codes or (code not in REACHED and not rest.strip()):
        return Trouble(
            "report", last, f"the checkout, Python and this folder must have the same paths there as here ({CHECKOUT})"
        )
    return rest.decode(errors="replace")


def skews(answers: Mapping[str, Answer]) -> dict[str, Skew]:
    """Return the clock differences of the hosts whose clock was measured."""
    return {host: answer.skew for host, answer in answers.items() if answer.skew is not None}
