"""Find the newest complete checkpoint of a run, and put those of an abandoned branch aside."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from plugins.sealed_checkpoint import plan

ASIDE = "set_aside_"  # before an iteration's name: no reader takes it for a checkpoint of the run


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint: its folder, and the training step that it holds."""

    path: Path
    step: int


def scan_checkpoints(root: Path) -> tuple[CheckpointInfo | None, list[tuple[Path, str]]]:
    """Look at the iterations under `root`, newest first, and stop at the first complete one.

    Args:
        root: the folder that holds MindFormers' `iteration_*` folders (`checkpoint.save_path`); may not exist.

    Returns:
        The newest complete checkpoint or None, and what was skipped before it, each with the reason.
    """
    skipped: list[tuple[Path, str]] = []
    for folder in iterations(root):
        reason = plan.fault(folder)
        if reason is None:
            return CheckpointInfo(folder, plan.step_of(folder)), skipped
        skipped.append((folder, reason))
    return None, skipped


def iterations(root: Path) -> list[Path]:
    """The iterations under `root`, newest first, whole or not."""
    return sorted(root.glob("iteration_*"), key=iteration, reverse=True)


def iteration(folder: Path) -> int:
    """The number in MindFormers' folder name, -1 for a name that has none."""
    number = folder.name.removeprefix("iteration_")
    return int(number) if number.isdecimal() else -1


def is_sealed(folder: Path) -> bool:
    """Whether any rank has sealed its part: a run of this repository wrote it, and got that far."""
    return any(folder.glob("seal_rank_*.json"))


def later_than(root: Path, taken: Path) -> list[Path]:
    """The iterations under `root` that a run which goes on from `taken` leaves behind, newest first.

    Those after it, if it is one of them; else all, for they are another run's.
    """
    own = taken.resolve().parent == root.resolve()
    return [folder for folder in iterations(root) if not own or iteration(folder) > iteration(taken)]


def set_aside(folder: Path) -> Path:
    """Rename an iteration so that it is found no more; returns the new path. Nothing is deleted."""
    name = ASIDE + folder.name
    names = chain([name], (f"{name}_{number}" for number in count(2)))
    return folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))
