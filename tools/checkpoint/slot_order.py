"""Experts that have moved (plugins/expert_balance): in which order a checkpoint holds them.

Each layer of experts then has `<layer>.experts.placement`, int [E]: logical expert -> slot. The rows of its weights and
of their moments stand in the order of slots. Who reads them without the placement has the experts mixed up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from plugins.errors import CheckpointError

PLACEMENT = "placement"
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of iterations: MindFormers takes the newest


class UnreadableError(CheckpointError):
    """A file is damaged, or no safetensors."""


def read_placements(folder: Path) -> dict[str, np.ndarray]:
    """Name of each module of experts that has a placement (`decoder.layers.0.mlp.experts`) -> int [E].

    Args:
        folder: MindFormers' `iteration_*`; may be one of the legacy format or no checkpoint at all, which have none.

    Raises:
        CheckpointError: a file cannot be read, a placement is no permutation, or two ranks differ.
    """
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*-model-*.safetensors")):
        for module, slots in _in_file(file):
            if not np.array_equal(np.sort(slots), np.arange(len(slots))):
                raise CheckpointError(f"{file}: {module}.{PLACEMENT} does not give each expert a slot of its own")
            if not np.array_equal(found.setdefault(module, slots), slots):
                raise CheckpointError(f"{file}: {module}.{PLACEMENT} is not that of the other ranks")
    return found


def _in_file(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                module, _, last = name.rpartition(".")
                if last == PLACEMENT:
                    yield module, tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise UnreadableError(f"{file}: not a complete safetensors file ({error})") from None


def moved(placements: dict[str, np.ndarray]) -> list[str]:
    """The modules whose experts do not stand in logical order."""
    return [module for module, slots in placements.items() if (slots != np.arange(len(slots))).any()]


def refuse_moved(folder: Path, balanced: bool) -> None:
    """Raise CheckpointError when a run without plugins.expert_balance is to begin with experts that have moved.

    Args:
        folder: an iteration, or a folder of iterations, of which MindFormers takes the newest.
        balanced: whether the run has the plugin.
    """
    tracker = folder / TRACKER
    if tracker.exists() and (number := tracker.read_text(encoding="utf-8").strip()).isdecimal():
        folder = folder / f"iteration_{int(number):08d}"
    if balanced:
        return
    try:
        wrong = moved(read_placements(folder))
    except UnreadableError:
        return  # whoever reads the weights says what is wrong with the file
    if wrong:
        raise CheckpointError(
            f"{folder}: the experts of {len(wrong)} layers have moved (plugins.expert_balance), and this recipe has no "
            f"such plugin: it would train experts in a wrong order; switch it on, or first "
            f"`tc3 experts restore-order {folder}`"
        )
