"""Run compiles in processes of their own, as many at once as cores and free memory allow; none outlives its parent."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from plugins.errors import ClusterError
from tools.dryrun.compile.job import Job
from tools.hardware.units import GIB
from tools.process import huge_pages
from tools.process.signals import terminate_as_interrupt

ROOT = Path(__file__).resolve().parents[3]
WORKER = "launch.workers.dryrun_rank"
_NEEDS = 6 * GIB  # of one compile: the largest that was seen at full depth, and some room
_POLL = 0.2  # seconds
_TOLD = 30.0  # seconds after which a compile that still runs is told of

Progress = Callable[[Job, str, float, dict[str, Any] | None], None]  # job, what is new, seconds, result


def run_jobs(
    jobs: Sequence[Job], progress: Progress, at_once: int | None = None, texts: Sequence[Path] = ()
) -> list[dict[str, Any]]:
    """Compile all jobs; results in their order.

    After the first refusal no further job is started: its message is the answer. Ctrl-C and SIGTERM end all processes.

    Args:
        progress: is told of each job "started" and "done", and now and then of what is still "running".
        at_once: how many run at a time, by default as many as fit.
        texts: for each job where the text of its final graph is kept; none is kept by default.

    Raises:
        ClusterError: a process died without a result (out of memory, for instance).
    """
    results: dict[int, dict[str, Any]] = {}
    waiting, running = list(enumerate(jobs)), dict[int, _Run]()
    with tempfile.TemporaryDirectory(prefix="tc3-dryrun-") as folder, terminate_as_interrupt():
        try:
            while waiting or running:
                refused = any("error" in result for result in results.values())
                if waiting and not refused and _room(len(running), at_once):
                    place, job = waiting.pop(0)
                    running[place] = _Run(job, Path(folder) / str(place), texts[place : place + 1])
                    progress(job, "started", 0.0, None)
                for place, run in list(running.items()):
                    if run.process.poll() is not None:
                        del running[place]
                        results[place] = run.result()
                        progress(run.job, "done", time.monotonic() - run.started, results[place])
                    elif run.due():
                        progress(run.job, "running", time.monotonic() - run.started, None)
                if refused and not running:
                    break
                time.sleep(_POLL)
        finally:
            for run in running.values():
                run.end()
    return [results[place] for place in sorted(results)]


def _room(running: int, at_once: int | None) -> bool:
    """Whether one more compile fits."""
    if not running:
        return True
    if at_once is not None:
        return running < at_once
    return running < (os.cpu_count() or 1) and psutil.virtual_memory().available > _NEEDS


class _Run:
    """One process and its files."""

    def __init__(self, job: Job, folder: Path, text: Sequence[Path] = ()):
        folder.mkdir()
        self.job, self.out, self.log = job, folder / "out.json", folder / "log"
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))  # as msrun's workers
        environment = {**huge_pages.ENVIRONMENT, **os.environ, "PYTHONPATH": paths, "GLOG_v": "3"}
        command = [sys.executable, "-m", WORKER, str(folder / "job.json"), str(self.out), *map(str, text)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        self.started = self._told = time.monotonic()

    def due(self) -> bool:
        """Whether it is time to say that it still runs."""
        now = time.monotonic()
        if now - self._told < _TOLD:
            return False
        self._told = now
        return True

    def result(self) -> dict[str, Any]:
        """What it found."""
        if self.out.exists():
            return json.loads(self.out.read_text(encoding="utf-8"))
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        code = self.process.returncode
        why = f"ended by signal {-code}, as the kernel does when memory is short" if code < 0 else f"exit code {code}"
        last = f": {lines[-1]}" if lines else ""
        raise ClusterError(f"the compile of rank {self.job.rank} left no result ({why}){last}")

    def end(self) -> None:
        """Kill it, whatever it started as well."""
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for child in [*process.children(recursive=True), process]:
                with suppress(psutil.Error):
                    child.kill()
        self.process.wait()
