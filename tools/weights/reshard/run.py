"""A resharding from its first file to the folder that reads as whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.stored import METADATA
from tools.data.workers import ordered_map
from tools.files.atomic import atomic_folder
from tools.weights.inventory import mark
from tools.weights.reshard.metadata import metadata_of
from tools.weights.reshard.plan import Plan
from tools.weights.reshard.write import Written, writer
from tools.weights.source import Source

_MARGIN = 1.02  # headers, metadata, seals
COMMON = "common.json"
BESIDE = ("recipe.yaml", "data.json")  # of the run: a resume compares the order of its data with them


def folder_in(target: Path, source: Source) -> Path:
    """Where in `target` the iteration goes: a resume looks for the run's recipe two folders above it."""
    return target / "checkpoint" / f"iteration_{source.step or 0:08d}"


def reshard(
    source: Source,
    target: Path,
    plan: Plan,
    workers: int = 1,
    progress: Callable[[int, str], None] = lambda done, file: None,
    damaged: Sequence[str] = (),
) -> None:
    """Write `target`, a folder that is not there yet: whole, or not at all. `progress` is told bytes and file.

    What is `damaged` in `source` and taken all the same (`inventory.salvaged`) is said beside the weights.

    Raises:
        CheckpointError: `target` exists, or the source is damaged.
        DataError: it cannot be written, or there is no room.
    """
    if target.exists():
        raise CheckpointError(f"{target}: is there already; remove it, or name another folder")
    _check_room(target, plan)
    with atomic_folder(target) as part:
        folder = folder_in(part, source)
        folder.mkdir(parents=True)
        make = partial(writer, source.path.absolute(), folder, plan)
        files: dict[str, Written] = {}
        done = 0
        for written in ordered_map(make, plan.files, min(workers, len(plan.files))):
            files[written.file] = written
            done += written.bytes
            progress(done, written.file)
        if (source.path / COMMON).exists():
            shutil.copyfile(source.path / COMMON, folder / COMMON)
        (folder / METADATA).write_text(json.dumps(metadata_of(plan)), "utf-8")
        mark(folder, damaged)
        known = {name: each.sha256 for name, each in files.items()}
        for rank in range(plan.world):
            write_seal(folder, rank, plan.world, source.step or 0, known=known)
        for name in BESIDE:
            if (source.path.absolute().parents[1] / name).exists():
                shutil.copyfile(source.path.absolute().parents[1] / name, part / name)


def _check_room(target: Path, plan: Plan) -> None:
    there = next(folder for folder in target.absolute().parents if folder.exists())
    try:
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise DataError(f"{target}: cannot be written ({error.strerror or error})") from None
    if (wanted := int(plan.bytes * _MARGIN)) > free:
        raise DataError(f"{target}: {wanted / 1e9:,.3f} GB are to be written, {free / 1e9:,.3f} GB are free there")
