"""Workers without MindFormers: each computes on a core of its own, waits for the others, and is probed by `Watch`."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plugins.straggler_probe.plan import Settings
from plugins.straggler_probe.record import probe_file
from plugins.straggler_probe.watch import Watch, processor_work

COMPUTES, SLEEPS = 0.01, 0.02  # seconds of a step: processor time, and time in which the core is free


def train(run: Path, steps: int, meanwhile: Callable[[list[int]], object] = lambda pids: None) -> None:
    """Two workers make so many steps; `meanwhile` is called with their process ids when they are about to begin."""
    spawn = multiprocessing.get_context("spawn")
    together, ready = spawn.Barrier(2), spawn.Event()
    cores = sorted(os.sched_getaffinity(0))[:2]
    workers = [spawn.Process(target=_worker, args=(run, rank, cores[rank], steps, together, ready)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    try:
        meanwhile([worker.pid or 0 for worker in workers])
        ready.set()
        for worker in workers:
            worker.join(600)
        assert [worker.exitcode for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()


def _worker(run, rank, core, steps, together, ready) -> None:
    os.sched_setaffinity(0, {core})
    watch = Watch(Settings(every=2), probe_file(run, rank), rank, socket.gethostname(), "CPU", processor_work(), True)
    ready.wait()
    for step in range(1, steps + 1):
        time.sleep(SLEEPS)  # the batch is read
        watch.begin()
        until = time.process_time() + COMPUTES
        while time.process_time() < until:
            pass
        together.wait()  # the collective: both workers' steps take the same time
        watch.end(step)


GROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")  # of version 1 and 2


def can_limit() -> bool:
    """Return whether this machine allows making control groups that limit processor time."""
    try:
        with limit([], 1.0):
            return True
    except OSError:
        return False


@contextmanager
def limit(pids: list[int], share: float) -> Iterator[None]:
    """Hold processes to a share of one core, by a control group of their own."""
    first = (GROUPS[0] / "cpu.cfs_quota_us").exists()
    group = GROUPS[not first] / f"tc3_test_{os.getpid()}"
    home = GROUPS[not first] / "cgroup.procs"
    group.mkdir()
    try:
        if first:
            (group / "cpu.cfs_quota_us").write_text(str(int(100_000 * share)))
        else:
            (group / "cpu.max").write_text(f"{int(100_000 * share)} 100000")
        for pid in pids:
            (group / home.name).write_text(str(pid))
        yield
    finally:
        for left in (group / home.name).read_text().split():
            home.write_text(left)
        group.rmdir()
