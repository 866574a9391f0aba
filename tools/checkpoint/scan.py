"""This module finds the newest complete checkpoint of a run, and renames checkpoints from which the run no longer
continues.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any

from plugins.sealed_checkpoint import plan
from plugins.sealed_checkpoint.plan import is_sealed, iteration, iterations, unfinished
from tools.files.atomic import real_path

__all__ = [
    "CheckpointInfo", "carried", "is_sealed", "iteration", "iterations", "later_than", "lies_in", "newest_saved",
    "saved_step", "scan_checkpoints", "set_aside",
]  # fmt: skip
ASIDE = "set_aside_"  # before an iteration's name: no reader takes it for a checkpoint of the run


@dataclass(frozen=True)
class CheckpointInfo:
    """A `CheckpointInfo` describes a complete checkpoint: its folder, its training step, and whether a user has named
    it.
    """

    path: Path
    step: int
    named: bool = field(default=False, compare=False)


def scan_checkpoints(
    root: Path, unfit: Callable[[Path, int], str | None] = lambda folder, step: None
) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
    """Search the checkpoints (iterations) under `root` for the newest complete one.

    Args:
        root: the folder that holds MindFormers' `iteration_*` folders (`checkpoint.save_path`); this folder need not
            exist.
        unfit: a function of (folder, step) that returns the reason why a checkpoint must not be used even if it is
            complete.

    Returns:
        The newest complete checkpoint or None, and what was skipped before it, each with the reason. Saves that an
        attempt has not put in their place (`plan.adopt` does) are skipped, too.
    """
    skipped: list[tuple[Path, str]] = []
    for folder in plan.newest_first([*iterations(root), *unfinished(root)]):
        reason = unfit(folder, iteration(folder)) or plan.fault(folder, checksums=folder.parent == root)
        if folder.parent != root:
            reason = reason or "complete, and not in its place yet"
        step = None if reason else saved_step(folder)
        if step is not None:
            return CheckpointInfo(folder, step), skipped
        skipped.append((folder, reason or "it was removed meanwhile"))
    return None, skipped


def newest_saved(root: Path) -> CheckpointInfo | None:
    """Return the newest checkpoint of which all files exist with their recorded sizes; the content of the files is not
    read.
    """
    whole = (folder for folder in iterations(root) if plan.fault(folder, checksums=False) is None)
    steps = ((folder, saved_step(folder)) for folder in whole)  # none of what is removed meanwhile
    return next((CheckpointInfo(folder, step) for folder, step in steps if step is not None), None)


def saved_step(folder: Path) -> int | None:
    """Return the training step after which a checkpoint was saved, read from its seals or, if it has none, from
    common.json; return None if the step cannot be read.
    """
    try:
        if is_sealed(folder):
            return plan.step_of(folder)
        return int(json.loads((folder / "common.json").read_text(encoding="utf-8"))["step_num"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, plan.RefusedError):
        return None


def carried(folder: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's seals that also hold for a copy of the checkpoint in another layout: only
    the list of samples that the run had left out. (The number of the attempt that saved the checkpoint does not hold
    for the copy, because another run numbers its own attempts.)
    """
    return {key: value for key, value in plan.made(folder).items() if key == "skipped"}


def lies_in(checkpoint: Path, root: Path) -> bool:
    """Return whether a checkpoint is one of those under `root`, also if it, or its name there, is a symbolic link."""
    return real_path(root) in (real_path(checkpoint.parent), real_path(checkpoint).parent)


def later_than(root: Path, taken: Path) -> list[Path]:
    """Return the checkpoints under `root` that a run abandons when it continues from the checkpoint `taken`, newest
    first.

    If `taken` is one of the checkpoints under `root`, these are the checkpoints after it; otherwise these are all
    checkpoints under `root`, because they belong to another run. If the folder of `taken` was renamed, the step is read
    from its files.
    """
    number, others = iteration(taken), iterations(root)
    step = saved_step(taken) if number < 0 else number
    if step is None or not lies_in(taken, root):
        return others
    come = plan.progress({folder: iteration(folder) for folder in others} | {taken: step})
    return [folder for folder in others if come[folder] > come[taken]]


def set_aside(folder: Path, sure: Callable[[Path], bool] = lambda moved: True) -> Path | None:
    """Rename the folder of a checkpoint so that no run finds it any more, and return its new path. The function deletes
    nothing.

    The result is None if the checkpoint no longer exists, or if the renamed checkpoint is not the one that was meant,
    which `sure` decides: if the caller was delayed, the next attempt may have saved another checkpoint under the same
    name. In the second case the checkpoint gets its name back. Until `sure` has decided, the checkpoint is in a folder
    of its own, from which `plan.adopt` moves it back if this process is killed in between.
    """
    own = folder.with_name(f"{plan.MOVING}{uuid.uuid4().hex}")
    name = ASIDE + folder.name
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    try:
        own.mkdir()
        moved = folder.rename(own / folder.name)
        if not sure(moved):
            with suppress(OSError):
                moved.rename(folder)
            return None
        moved = moved.rename(next(path for path in map(folder.with_name, names) if not path.exists()))
        plan.renew_tracker(folder.parent)  # which may name what is gone
        return moved
    except FileNotFoundError:  # several nodes look at once
        return None
    finally:
        with suppress(OSError):
            own.rmdir()
