"""Seals: how a reader knows that a checkpoint folder is whole. Pure Python.

MindFormers writes an iteration's files in place and names the newest iteration in a tracker file; a run killed
in the middle of a save leaves a folder that looks like a checkpoint. Here every rank, after its files are on
disk, writes `seal_rank_N.json` with their sizes and checksums. A checkpoint is complete when the seals of all
ranks are there and every sealed file matches.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from plugins.errors import CheckpointError

CHUNK = 1 << 22  # bytes read at a time


def seal_file(folder: Path, rank: int) -> Path:
    """The seal of one rank."""
    return folder / f"seal_rank_{rank}.json"


def files_of_rank(folder: Path, rank: int, world_size: int) -> list[Path]:
    """The files that rank `rank` answers for: its safetensors, and for rank 0 the shared json files.

    MindFormers' names end in `-<rank>-<world size>.safetensors`, seven digits each.
    """
    own = sorted(folder.glob(f"*-{rank:07d}-{world_size:07d}.safetensors"))
    shared = [folder / name for name in ("common.json", "metadata.json")] if rank == 0 else []
    return own + [path for path in shared if path.exists()]


def expected_files(prefix: str, rank: int, world_size: int, optimizer: bool) -> list[str]:
    """The names of all that rank `rank` writes in a whole save (MindFormers 1.9.0, `checkpoint/checkpoint.py`).

    Weights, the optimizer's state where `optimizer` (not `checkpoint.no_save_optim`), and for rank 0 common.json and,
    with several ranks, metadata.json. `checkpoint.save_remove_redundancy` changes what is in the files, not their
    names: MindFormers counts the ranks that have a share, and breaks off in one that has none.
    """
    kinds = ("model", "opt") if optimizer else ("model",)
    shared = ["common.json", "metadata.json"][: min(world_size, 2)] if rank == 0 else []
    return [f"{prefix}-{kind}-{rank:07d}-{world_size:07d}.safetensors" for kind in kinds] + shared


def write_seal(
    folder: Path,
    rank: int,
    world_size: int,
    step: int,
    expected: Sequence[str] = (),
    known: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Seal what rank `rank` wrote into `folder`; atomic. Returns the seal's path.

    Args:
        folder: of one iteration.
        rank, world_size: of this training; step: that the checkpoint holds.
        expected: names of what must be there, see `expected_files`.
        known: checksums of files that were hashed while they were written; others are read.

    Raises:
        CheckpointError: one of those is not there, or the rank has no safetensors at all.
    """
    files = files_of_rank(folder, rank, world_size)
    missing = sorted({*expected} - {path.name for path in files})
    if missing:
        raise CheckpointError(
            f"{folder}: {', '.join(missing)} not written, so this checkpoint cannot be resumed; is the disk full? "
            "MindFormers' log of this worker has the reason"
        )
    if not any(path.suffix == ".safetensors" for path in files):
        raise CheckpointError(f"{folder}: no safetensors of rank {rank} of {world_size} to seal")
    seal = {
        "step": step,
        "rank": rank,
        "world_size": world_size,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": known.get(path.name) or checksum(path)}
            for path in files
        },
    }
    return _write(seal, folder, rank)


def write_refusal(folder: Path, rank: int, reason: str) -> Path:
    """Instead of a seal, why this checkpoint is not to be gone on from; atomic. Returns the file's path."""
    return _write({"rank": rank, "refused": reason}, folder, rank)


def _write(seal: dict, folder: Path, rank: int) -> Path:
    # open, not tempfile: the seal is for whoever may read the folder, as the umask says
    with (folder / f".seal_rank_{rank}.tmp").open("w", encoding="utf-8") as out:
        json.dump(seal, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(out.name, seal_file(folder, rank))
    return seal_file(folder, rank)


def remove_old(folders: Sequence[Path], newest: Path, keep: int) -> int:
    """Remove the oldest of this run's checkpoints but `keep`; none while ranks have yet to seal the newest.

    Args:
        folders: of the iterations that this run has saved, oldest first; newest: the last of them to be sealed.

    Returns:
        How many of `folders` are gone.
    """
    sealed = folders[: folders.index(newest) + 1] if newest in folders else []
    surplus = sealed[: -max(keep, 1)]
    if not surplus or _unsealed_rank(newest) is not None:
        return 0
    for folder in surplus:
        shutil.rmtree(folder, ignore_errors=True)  # what is left of it has lost its files: no reader takes it
    return len(surplus)


def _unsealed_rank(folder: Path) -> int | None:
    """The first rank whose seal is not there (yet); None when all are."""
    ranks = range(_read_seal(folder, 0)["world_size"])
    return next((rank for rank in ranks if not seal_file(folder, rank).exists()), None)


def checksum(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fault(folder: Path, share: tuple[int, int] = (0, 1), checksums: bool = True) -> str | None:
    """What keeps `folder` from being a complete checkpoint, in a few words; None when it is complete.

    Args:
        share: (worker, number of workers) where each reads a part, all of them the whole.
        checksums: read every file; without, their sizes alone are compared.

    Raises:
        CheckpointError: a file is there and cannot be read.
    """
    try:
        first, every = share
        ranks = range(first, _read_seal(folder, 0)["world_size"], every)
        seals = [_read_seal(folder, rank) for rank in ranks]
        expected = {name: what for seal in seals for name, what in seal["files"].items()}
        faults = (
            _file_fault(folder / name, what["bytes"], what["sha256"] if checksums else None)
            for name, what in expected.items()
        )
        return next(filter(None, faults), None)
    except RefusedError as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing: the save did not finish"
    except OSError as error:  # it may well be whole: nobody is to train on from an older one, or from nothing, for that
        raise CheckpointError(f"{error.filename or folder}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"a seal is unreadable ({error})"


def newest_of_rank(root: Path, rank: int) -> Path | None:
    """The newest iteration below `root` that this rank has sealed, whatever the others have; None if there is none."""
    for folder in sorted(root.glob("iteration_*"), reverse=True):
        with contextlib.suppress(OSError, ValueError, RefusedError):
            _read_seal(folder, rank)
            return folder
    return None


class RefusedError(Exception):
    """A rank has said why nobody is to go on from its checkpoint."""


def _read_seal(folder: Path, rank: int) -> dict:
    seal = json.loads(seal_file(folder, rank).read_text(encoding="utf-8"))
    if "refused" in seal:
        raise RefusedError(seal["refused"])
    return seal


def _file_fault(path: Path, size: int, sha256: str | None) -> str | None:
    if not path.exists():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes instead of {size}: truncated or overwritten"
    if sha256 is not None and checksum(path) != sha256:
        return f"{path.name} does not match its checksum: corrupted"
    return None


def step_of(folder: Path) -> int:
    """The training step that a complete checkpoint holds."""
    return _read_seal(folder, 0)["step"]
