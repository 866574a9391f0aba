"""Find the newest complete checkpoint of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plugins.sealed_checkpoint import plan


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
    for folder in sorted(root.glob("iteration_*"), key=_iteration, reverse=True):
        reason = plan.fault(folder)
        if reason is None:
            return CheckpointInfo(folder, plan.step_of(folder)), skipped
        skipped.append((folder, reason))
    return None, skipped


def _iteration(folder: Path) -> int:
    """The number in MindFormers' folder name, -1 for a name that has none."""
    number = folder.name.removeprefix("iteration_")
    return int(number) if number.isdecimal() else -1
