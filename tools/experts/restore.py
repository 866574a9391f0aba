"""This module is the command `tc3 experts restore-order`. The command puts the experts of a checkpoint back into
logical order if a run has moved them; no value is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError
from plugins.sealed_checkpoint.plan import fault, step_of, world_of, write_seal
from tools.checkpoint.scan import carried
from tools.checkpoint.stored import PLACEMENT, Stored, moved, open_stored, read_placements
from tools.checkpoint.tensor_files import save_arrays
from tools.files.atomic import atomic_folder
from tools.weights.convert_plan import keep_recipe, recipe_of_run
from tools.weights.inventory import mark, salvaged
from tools.weights.source import open_source, refuse_target

FOLDER = "checkpoint_in_order"  # beside a run's `checkpoint`: a resume from there finds the run's recipe


def target_of(folder: Path) -> Path:
    """Return the default folder of the restored checkpoint: `RUN/checkpoint_in_order/iteration_*`."""
    folder = folder.absolute()
    return folder.parent.parent / FOLDER / folder.name


def restore_order(
    folder: Path, target: Path, progress: Callable[[str], None] = lambda name: None, salvage: bool = False
) -> tuple[int, Sequence[str]]:
    """Copy the checkpoint `folder` to `target`, with the experts in their original order (expert e in slot e), and
    record the checksums of the new files. Return the number of restored layers, and the names of damaged values that
    were copied all the same.

    The function writes the file of one rank at a time, from the files that hold its experts; at most one of these files
    is in memory.

    Args:
        folder: a complete checkpoint, which is a folder `iteration_*` of MindFormers.
        target: a folder that does not exist yet.
        progress: a function that is called with the name of each file that is written.
        salvage: whether damaged and non-finite values are copied unchanged, and recorded in `target`; otherwise they
            are errors.

    Raises:
        CheckpointError: `folder` is incomplete, is damaged, or has no moved experts to restore; or `target` exists.
        DataError: `target` cannot be written.
    """
    _refuse(folder, target)
    placements = read_placements(folder)
    if not (layers := moved(placements)):
        raise CheckpointError(f"{folder}: all experts already are in logical order, so there is nothing to restore")
    stored, step, ranks = open_stored(folder), step_of(folder), world_of(folder) or 0
    described = stored.others(*(file.name for file in folder.glob("*.json") if not file.name.startswith("seal_rank_")))
    stored.tensors  # noqa: B018 (metadata.json is read now: a run that trains may remove the folder later)
    source, made, recipe = open_source(folder), carried(folder), recipe_of_run(folder)
    source.require_types()
    damaged = salvaged([source], salvage)
    with atomic_folder(target) as part:
        for file in sorted(stored.files):
            progress(file)
            save_arrays(_restored(file, placements, stored), part / file)
        for name, content in described.items():
            (part / name).write_bytes(content)
        if recipe:
            keep_recipe(part, recipe)
        mark(part, damaged)
        for rank in range(ranks):
            write_seal(part, rank, ranks, step, made=made)
    return len(layers), damaged


def _refuse(folder: Path, target: Path) -> None:
    if not any(folder.glob("*-model-*.safetensors")):
        raise CheckpointError(
            f"{folder}: this is not a checkpoint; give one iteration, such as RUN/checkpoint/iteration_00000100"
        )
    if reason := fault(folder, checksums=False):  # `salvaged` compares those
        raise CheckpointError(f"{folder}: this is not a complete checkpoint: {reason}")
    if target.exists():
        raise CheckpointError(f"{target}: the folder exists already; remove it, or name another folder with --to")
    if target.absolute() != target_of(folder):
        refuse_target(target)


def _restored(file: str, placements: Mapping[str, np.ndarray], stored: Stored) -> dict[str, np.ndarray]:
    """Return all tensors of one file, the rows of experts in logical order."""
    arrays = {}
    for name, header in stored.files[file].items():
        module, _, last = name.rpartition(".")
        there = next((each for each in placements if module == each or module.endswith("." + each)), None)
        if there is None or header.shape == (1,):  # of no expert; what Muon leaves of AdamW's moments is one number
            arrays[name] = stored.read_from(file, name)
        elif last == PLACEMENT:
            arrays[name] = np.arange(len(placements[there]), dtype=stored.read_from(file, name).dtype)
        else:
            arrays[name] = _gathered(name, file, placements[there], stored)
    return arrays


def _gathered(name: str, file: str, slots: np.ndarray, stored: Stored) -> np.ndarray:
    """Return the rows that `file` must hold of a tensor of experts, read in runs of consecutive rows from the files
    that hold them now.
    """
    tensor = stored.tensors[name]
    held = [place for place, copies in enumerate(tensor.copies) if any(each == file for _, each in copies)]
    index = np.unravel_index(held[0], tensor.cuts)
    height, rest = divmod(tensor.shape[0], len(slots))  # rows of one expert
    if rest:
        raise CheckpointError(
            f"{stored.folder}: {name}: its {tensor.shape[0]} rows cannot be divided among {len(slots)} experts"
        )
    out, length = np.empty_like(stored.read_from(file, name)), tensor.part[0]
    row = first = int(index[0]) * length
    while row < first + length:
        expert, inside = divmod(row, height)
        part, at = divmod(int(slots[expert]) * height + inside, length)
        run = min(height - inside, length - at, first + length - row)
        _, source = tensor.copies[int(np.ravel_multi_index((part, *index[1:]), tensor.cuts))][0]
        with stored.opened(source) as tensors:
            out[row - first : row - first + run] = tensors.get_slice(name)[at : at + run]
        row += run
    return out
