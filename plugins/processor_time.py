"""This module reads from the kernel's counters how long this process ran, waited for a core, and was stopped by a CPU
limit. The module is pure Python.

If a file of a counter does not exist, as in some containers, the counter is 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

_THREADS, _THREAD = "/proc/self/task", "/proc/thread-self/schedstat"


def scheduled() -> tuple[float, float]:
    """Return two sums over this process's threads: the seconds in which they ran, and the seconds in which they were
    ready to run but waited for a core.
    """
    ran = waited = 0.0
    for thread in os.listdir(_THREADS) if os.path.isdir(_THREADS) else ():
        own = _read(f"{_THREADS}/{thread}/schedstat")
        ran, waited = ran + own[0], waited + own[1]
    return ran, waited


def thread_waited() -> float:
    """Return the seconds in which the calling thread was ready but waited for a core."""
    return _read(_THREAD)[1]


def _read(path: str) -> tuple[float, float]:
    """Return the two times of a thread; the file is read without buffers and text, which would take five times as long
    for the many threads of a process.
    """
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            numbers = os.read(file, 100).split()
        finally:
            os.close(file)
        return int(numbers[0]) / 1e9, int(numbers[1]) / 1e9
    except (OSError, IndexError):  # the thread has ended, or the kernel does not count
        return 0.0, 0.0


def throttled(read: Callable[[str], str | None]) -> float:
    """Return the seconds in which a CPU limit stopped the process's control group or one of its visible parents.

    Args:
        read: a function from the path of a file of the host to its text, or None if there is no such file; `text_of`
            reads this host's files.
    """
    own = dict(groups(read("/proc/self/cgroup") or ""))
    total = 0.0
    for top, name, unit in (("/sys/fs/cgroup/cpu", "cpu", 1e-9), ("/sys/fs/cgroup", "", 1e-6)):
        for path in upwards(own[name]) if name in own else ():
            rows = [line.split() for line in (read(f"{top}{path}cpu.stat") or "").splitlines()]
            found = {row[0]: int(row[1]) for row in rows if len(row) == 2}
            total += unit * found.get("throttled_time" if name else "throttled_usec", 0)
    return total


def text_of(path: str) -> str | None:
    """Return the text of a file of this host; return None if the file does not exist or may not be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def groups(text: str) -> list[tuple[str, str]]:
    """Return the pairs (controller, group) in /proc/self/cgroup; in version 2 of control groups the controller has no
    name.
    """
    rows = [line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2]
    return [(name, path) for _, names, path in rows for name in names.split(",")]


def upwards(path: str) -> list[str]:
    """Return a path and all its parent folders, from the longest to the shortest: ``/a/b`` -> ["/a/b/", "/a/", "/"]."""
    parts = [part for part in path.split("/") if part]
    return ["/" + "".join(f"{part}/" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]
