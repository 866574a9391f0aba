"""This module lets an agent ask all ranks of a run to save a checkpoint after the same step and then end, through files
in the attempt's folder; either all ranks do so, or none does.

If a node has to stop soon (SIGTERM), its agent names a step that no rank can have passed yet. At the end of each step
ranks read a file that exists from the beginning (an NFS client may not look again for a file that it remembers as
absent, but a file that it opens is up to date). No step needs a collective for this.

On a slow disk a rank may still learn of the request too late. A save needs collectives, in which the other ranks would
wait for that rank for ever. So each rank that reaches the step first writes a file, and then waits for one decision,
which is also a file, and which a hard link makes unique: "save", by rank 0 once all ranks have reached the step, or "go
on", by any rank after `PATIENCE` seconds. A late rank meanwhile waits in the collectives of its next step, which the
other ranks then join.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from plugins.lines import OF, number_of

VARIABLE = "TC3_SAVE_REQUEST"  # of a worker: the request's file
FILE, CLAIM, FOLDER, DECISION = "save_at.json", "save_claim", "save", "decision"
SAVE, GO_ON = "save", "go on"
AHEAD = 1.0  # seconds that a request may take until all ranks see it
PATIENCE = 20.0  # seconds that ranks wait for each other, at the end of one step
POLL = 0.05
TAIL = 1 << 20  # bytes at the end of a metrics file: several steps of it, each with a digest of every sample
RECENT = 32  # steps: an earlier one may have been much shorter, such as one of a smaller batch


def environment(attempt: Path) -> dict[str, str]:
    """Create an attempt's empty request file, and return the environment variables that tell its workers the path of
    this file.
    """
    file = attempt / FILE
    attempt.mkdir(parents=True, exist_ok=True)
    file.touch()
    _began(attempt).touch()
    return {VARIABLE: str(file)}


def request(run_dir: Path, attempt: Path, ranks: Iterable[int]) -> int | None:
    """Ask all ranks to save a checkpoint after the same step and to end; return this step, which may be the step of an
    earlier request from another node.

    `ranks` are the ranks of this node, whose newest step is known here; no rank is more than one step ahead of another
    rank.

    Return None if there is nothing to save, because no step has been made in this attempt, or if no worker can be
    asked.
    """
    file = attempt / FILE
    try:
        began = _began(attempt).stat().st_mtime
        (attempt / f"{CLAIM}.now").touch()
        now = (attempt / f"{CLAIM}.now").stat().st_mtime  # by the clock that times the metrics
        files = (run_dir / "metrics" / f"rank_{rank}.jsonl" for rank in ranks)
        steps = [found for each in files if (found := _newest(each, began, number_of(attempt.name)))]
        if not steps:
            return requested(file)
        step, made, seconds, every = max(steps)
        claim = _publish(attempt / CLAIM, json.dumps({"step": step + _ahead(now - made, seconds, every)}) + "\n")
        with file.open("r+", encoding="utf-8") as out:  # in place, see above; one write, of the same by all nodes
            out.write(claim)
        return requested(file)
    except OSError:
        return None


def requested(file: Path) -> int | None:
    """Return the step that a request names; return None if there is no request yet, or if the request is incomplete."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(file.read_text(encoding="utf-8"))["step"])
    return None


def agree(attempt: Path, rank: int, world: int, patience: float = PATIENCE) -> bool:
    """Return at the end of the requested step whether all ranks save now; the answer is the same on every rank."""
    folder = attempt / FOLDER
    decision, own = folder / DECISION, folder / f"rank_{rank}"
    missing = set(range(world))
    until = time.monotonic() + patience
    while True:
        with contextlib.suppress(OSError):  # a disk that fails for good is the agent's to notice
            folder.mkdir(parents=True, exist_ok=True)
            own.write_text("")  # again and again: who writes into a folder is told what is new in it
            if decision.exists():
                return decision.read_text() == SAVE
            if rank == 0:
                missing = {each for each in missing if not (folder / f"rank_{each}").exists()}
                if not missing:
                    _publish(decision, SAVE)
            if time.monotonic() > until:
                _publish(decision, GO_ON)
        if not decision.exists():
            time.sleep(POLL)


def saved_at(attempt: Path) -> int | None:
    """Return the step after which all ranks of an attempt saved a checkpoint and ended on request; return None if they
    did not.
    """
    with contextlib.suppress(OSError):
        if (attempt / FOLDER / DECISION).read_text() == SAVE:
            return requested(attempt / FILE)
    return None


def _began(attempt: Path) -> Path:
    """Return the path of a file that this host writes when its workers start: the times of this file and of the metrics
    come from the same clock.

    Some disks (Lustre, GPFS) take the times of files from the host that writes.
    """
    return attempt / f".began.{socket.gethostname().replace('/', '_')}"


def _publish(path: Path, text: str) -> str:
    """Write a file completely unless it exists, and return its content. If this process dies in the meantime, the file
    does not exist or is complete.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        part.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


def _ahead(since: float, seconds: float, every: float) -> int:
    """Return the distance in steps between the newest known step and the first step that will not have ended `AHEAD`
    seconds from now.

    However long ago the newest known step ended, the step whose record comes next cannot have ended yet: a step may
    take long, such as the first one of a larger batch, which compiles.

    Args:
        since: seconds since that step ended; `seconds`: the duration of the shortest of the last steps.
        every: the number of steps from one record to the next; infinite if it is not known.
    """
    seconds = max(seconds, 1e-3)
    return max(1, math.ceil(min(max(since, 0.0) / seconds, every) + AHEAD / seconds))


def _newest(metrics: Path, began: float, number: int) -> tuple[int, float, float, float] | None:
    """Return four numbers about the steps that an attempt has recorded: the newest step, the time at which it was made,
    the seconds of the shortest of the last steps, and how many steps lie between two records (or infinity). Return None
    if the attempt of this number has recorded no step.
    """
    made = metrics.stat().st_mtime if metrics.exists() else 0.0
    if made <= began:
        return None
    with metrics.open("rb") as text:
        text.seek(max(0, os.fstat(text.fileno()).st_size - TAIL))
        lines = text.read().splitlines()
    found = [each for each in map(_record, lines) if each]
    steps = [(step, seconds) for step, seconds, of in found if of in (-1, number)]  # a late worker's are of another one
    if not steps:
        return None
    steps = steps[-RECENT:]
    every = max((two[0] - one[0] for one, two in pairwise(steps)), default=0)
    shortest = min((seconds for _, seconds in steps if seconds > 0), default=0.0)  # a clock may have been set back
    return steps[-1][0], made, shortest, every if every > 0 else math.inf


def _record(line: bytes) -> tuple[int, float, int] | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = json.loads(line)
        return int(found["step"]), float(found["seconds"]), number_of(found.get(OF))
    return None
