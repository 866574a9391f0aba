"""Runs one row of the tables: in this process as the console script would, or in one of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from launch import cli
from tests.inputs.rows import ROOT, Row

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
_TC3 = [sys.executable, "-c", "from launch.cli import main; main()"]
# root reads and writes everything; without these two abilities it is held to what a file's mode says
_AS_OTHERS = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
_MEMORY = 12 << 30  # bytes of address space; what asks for more is refused instead of ending the machine


class Ended(NamedTuple):
    """An `Ended` holds how a command ended.

    Args:
        text: the text of stdout and stderr.
        after: the seconds from Ctrl-C to the end; 0 if Ctrl-C was not pressed.
        left: the processes that the command started and that still run.
    """

    code: int
    text: str
    seconds: float
    after: float
    left: list[str]


def run_here(row: Row, folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """Call what the console script calls, in this process."""
    monkeypatch.setattr(sys, "argv", ["tc3", *(row.place(word, folder) for word in shlex.split(row.run))])
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # what `main` puts there is gone after the test
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in _SIGNALS}
    before = _children(os.getpid())
    capfd.readouterr()
    start = time.monotonic()
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        seconds = time.monotonic() - start
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
    left = [_words(child) for child in map(psutil.Process, _children(os.getpid()) - before)]
    return Ended(code, "".join(capfd.readouterr()), seconds, 0, [words for words in left if "tracker" not in words])


def run_apart(row: Row, folder: Path) -> Ended:
    """Start a process, in a session of its own, whose output is not a terminal's."""
    command = [*_TC3, *(row.place(word, folder) for word in shlex.split(row.run))]
    if row.shell:
        function = f'tc3() {{ {shlex.join(_TC3)} "$@"; }}; '
        command = ["bash", "-c", function + row.place(row.shell, folder)]
    if row.locked and os.geteuid() == 0:
        if subprocess.run([*_AS_OTHERS, "true"], capture_output=True).returncode:
            pytest.skip("root here reads what it may not, and setpriv cannot change that")
        command = [*_AS_OTHERS, *command]
    for name in row.locked:
        (folder / name).chmod(0)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "COLUMNS": "200"}
    start = time.monotonic()
    process = subprocess.Popen(
        ["prlimit", f"--as={_MEMORY}", *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        text, pressed = _watched(process, row)
    finally:
        for name in row.locked:
            (folder / name).chmod(0o755)
        left = [child for child in psutil.process_iter() if _session(child) == process.pid]
        words = [_words(child) for child in left]
        for child in left:
            child.kill()
    end = time.monotonic()
    return Ended(process.returncode, text, end - start, end - pressed if pressed else 0, words)


def _watched(process: subprocess.Popen[bytes], row: Row) -> tuple[str, float]:
    """Read until the process ends, pressing Ctrl-C where the row says; the text, and when it was pressed, else 0."""
    assert process.stdout
    timer = threading.Timer(row.limit, lambda: os.killpg(process.pid, signal.SIGKILL))
    timer.start()
    try:
        parts: list[bytes] = []
        pressed = 0.0
        while part := os.read(process.stdout.fileno(), 1 << 16):
            parts.append(part)
            if row.interrupt and not pressed and row.interrupt.encode() in b"".join(parts):
                pressed = time.monotonic()
                os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches the whole group
        process.wait()
    finally:
        timer.cancel()
        process.stdout.close()
    assert pressed or not row.interrupt, f"it never said {row.interrupt!r}: {b''.join(parts)!r}"
    return b"".join(parts).decode(errors="replace"), pressed


def _children(process: int) -> set[int]:
    """Ids of all processes that come from one. The kernel knows them; psutil reads what is said of every process."""
    found: set[int] = set()
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found |= set(map(int, file.read_text().split()))
    return found.union(*map(_children, found))


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return -1


def _words(process: psutil.Process) -> str:
    try:
        return shlex.join(process.cmdline())
    except psutil.Error:
        return "tracker"  # it has just ended


def have_tools() -> bool:
    """Return whether this machine has the tools of util-linux that start a row in a separate process."""
    return all(map(shutil.which, ("prlimit", "setpriv")))
