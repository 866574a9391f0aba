"""This module writes and reads seals, which say whether a checkpoint folder is complete, and which attempt of a run
made it. The module is pure Python.

MindFormers writes an iteration's files in place and names the newest iteration in a tracker file; a run killed in the
middle of a save leaves a folder that looks like a checkpoint. With this plugin every rank, after its files are on disk,
writes `seal_rank_N.json` with their sizes and checksums. A checkpoint is complete if the seals of all ranks exist, all
seals are of one attempt, and every sealed file matches its seal.

A run that is started again after a failure saves the same steps again, while a rank of the previous attempt may still
be running: on a host that was cut off, or in a write that its disk has delayed for minutes. So each attempt saves into
its own folder, `saving_ATTEMPT/iteration_N`, to which no other attempt writes; a save that all ranks have sealed is
renamed to `iteration_N`. A late rank damages only the unfinished save of its own attempt. Attempts are identified by
`NUMBER-TOKEN`, which the launch of a run passes to its workers in $TC3_ATTEMPT. Workers without this variable (msrun by
hand, a script) save directly into `iteration_N`, and seals that name no attempt, from older versions, remain valid.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plugins.errors import CheckpointError
from plugins.lines import flush, number_of, write_whole

CHUNK = 1 << 22  # bytes read at a time
SAVING, REMOVING = "saving_", "removing_"  # before an attempt's name: its saves in progress; before an iteration's
REFUSED = "refused_rank_"  # before a rank: an empty file beside its refusal, which one listing of names shows
MOVING = "moving_"  # before a token: a folder with an iteration that may be set aside (tools/checkpoint/scan.py)
_WORLD = re.compile(r"-\d+-(\d+)\.safetensors$")  # behind a file's name: how many ranks saved
TRACKER = "latest_checkpointed_iteration.txt"  # MindFormers': which iteration of a folder to load


def iteration(folder: Path) -> int:
    """Return the iteration number in the name of a checkpoint folder of MindFormers; return -1 if the name has none."""
    number = folder.name.removeprefix("iteration_")
    return int(number) if number.isdecimal() else -1


def iterations(root: Path) -> list[Path]:
    """Return the checkpoint folders (iterations) under `root`, newest first, including incomplete ones, but no copies
    of a user, such as iteration_00000100_best and iteration_00000100.tar, which no run may load or remove.
    """
    return newest_first(folder for folder in root.glob("iteration_*") if iteration(folder) >= 0)


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """Return the checkpoint folders, sorted by the progress of their runs (`progress`), the most progress first."""
    come = progress({folder: iteration(folder) for folder in folders})
    return sorted(come, key=lambda folder: come[folder], reverse=True)


def progress(steps: Mapping[Path, int]) -> dict[Path, int]:
    """Return for each checkpoint, given with its step, how far its run had come: the number of trained steps or, if
    the global batches of the checkpoints differ, the number of trained samples. Step numbers cannot be compared if the
    global batch changed, because MindFormers counts steps of the present batch, so that a resume with a larger batch
    continues with smaller step numbers.
    """
    batches = {folder: global_batch_of(folder) for folder in steps}
    known = {batch for batch in batches.values() if batch}
    if len(known) < 2:
        return dict(steps)
    # one that does not say it has no common.json yet: its save is in progress, or was broken off
    return {folder: step * (batches[folder] or max(known)) for folder, step in steps.items()}


def global_batch_of(folder: Path) -> int:
    """Return the global batch size of the run that saved a checkpoint, in samples; return 0 if the checkpoint does not
    state it.
    """
    try:
        return int(json.loads((folder / "common.json").read_text(encoding="utf-8"))["global_batch_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def unfinished(root: Path, kind: str = SAVING) -> list[Path]:
    """Return the folders of iterations that attempts have begun to save but not yet moved to the checkpoints in `root`,
    newest first. If `kind` is MOVING, return instead the folders of iterations that are being set aside.
    """
    found: list[Path] = []
    for folder in root.glob(f"{kind}*"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            found += folder.glob("iteration_*")
    return newest_first(found)


def saving_folder(root: Path, attempt: str | None) -> Path:
    """Return the folder in which an attempt saves its iterations until they are complete; it is `root` itself for
    workers without an attempt.
    """
    return root / f"{SAVING}{attempt}" if attempt else root


def seal_file(folder: Path, rank: int) -> Path:
    """Return the path of one rank's seal (the file with sizes and checksums) in a checkpoint folder."""
    return folder / f"seal_rank_{rank}.json"


def files_of_rank(folder: Path, rank: int, world_size: int) -> list[Path]:
    """Return the files for which rank `rank` is responsible: its safetensors, and for rank 0 the shared json files.

    MindFormers' names end in `-<rank>-<world size>.safetensors`, seven digits each.
    """
    own = sorted(folder.glob(f"*-{rank:07d}-{world_size:07d}.safetensors"))
    shared = [folder / name for name in ("common.json", "metadata.json")] if rank == 0 else []
    return own + [path for path in shared if path.exists()]


def expected_files(prefix: str, rank: int, world_size: int, optimizer: bool) -> list[str]:
    """Return the names of all files that rank `rank` writes in a complete save (MindFormers 1.9.0,
    `checkpoint/checkpoint.py`).

    These are the weights, the optimizer's state if `optimizer` is true (that is, without `checkpoint.no_save_optim`),
    and for rank 0 common.json and, with several ranks, metadata.json. `checkpoint.save_remove_redundancy` changes the
    content of the files, not their names: MindFormers counts the ranks that have a share, and raises an error in a rank
    that has none.
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
    made: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write atomically the seal of the files that rank `rank` wrote into `folder` (their sizes and checksums), and
    return the path of the seal. The files are first flushed to the disk, so that no seal outlives its files in a power
    cut. If only one rank saves, the files that a broken save on more ranks left in `folder` are removed first.

    Args:
        folder: the folder of one iteration.
        rank, world_size: this rank and the number of ranks of this training.
        step: the step of the checkpoint.
        expected: the names of the files that must exist, see `expected_files`.
        known: the checksums of files that were hashed while they were written.
        made: the name of the `attempt`, and the samples that `plugins.spike_guard` left out (`skipped`).

    Raises:
        CheckpointError: one of these files is missing, or the rank has no safetensors.
    """
    if world_size == 1 and (left := [path for path in folder.glob("*-*.safetensors") if _world(path) not in (None, 1)]):
        for path in (*left, folder / "metadata.json"):  # MindFormers writes none for one rank, and would load these
            path.unlink(missing_ok=True)
    files = files_of_rank(folder, rank, world_size)
    missing = sorted({*expected} - {path.name for path in files})
    if missing:
        raise CheckpointError(
            f"{folder}: MindFormers did not write {', '.join(missing)}, so no run can resume from this checkpoint; "
            "is the disk full? MindFormers' log of this worker has the reason"
        )
    if not any(path.suffix == ".safetensors" for path in files):
        raise CheckpointError(
            f"{folder}: rank {rank} of {world_size} has written no safetensors file, so the checkpoint is not complete"
        )
    seal = {
        "step": step,
        "rank": rank,
        "world_size": world_size,
        **made,
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": known.get(path.name) or checksum(path)}
            for path in files
        },
    }
    for path in files:
        flush(path)
    write_whole(seal_file(folder, rank), seal)
    # of a save of the same step before this one; last: beside a refusal without it, names would show a whole checkpoint
    (folder / f"{REFUSED}{rank}").unlink(missing_ok=True)
    return seal_file(folder, rank)


def write_refusal(folder: Path, rank: int, reason: str) -> Path:
    """Write atomically a file that says why no run may continue from this checkpoint, and that is used instead of a
    seal. Return the path of the file with the reason.
    """
    (folder / f"{REFUSED}{rank}").touch()  # first: whoever sees the seals of all ranks by their names sees this, too
    write_whole(seal_file(folder, rank), {"rank": rank, "refused": reason})
    return seal_file(folder, rank)


def publish(saved: Path, root: Path) -> Path | None:
    """Move a checkpoint that all ranks have completed and sealed into `root`, the folder of finished checkpoints;
    return the new path.

    An iteration of the same name in `root` is replaced if an earlier attempt saved it. The result is None if a later
    attempt saved it, or if another process has published this checkpoint in the meantime. A checkpoint that was saved
    directly into `root` stays there, and its path is returned.
    """
    place = root / saved.name
    if saved == place:
        return place
    if _is_later(place, saved):
        return None
    old = saved.with_name(f"{REMOVING}{saved.name}")
    for _ in range(2):
        with contextlib.suppress(OSError):  # another one stands there
            saved.rename(place)
            shutil.rmtree(old, ignore_errors=True)
            with contextlib.suppress(OSError):  # `adopt` says it later; the checkpoint is in its place
                _say_newest(root, place)
            return place
        with contextlib.suppress(OSError):
            if saved.exists():
                place.rename(old)
                if _is_later(old, saved):  # published since we looked
                    break
    with contextlib.suppress(OSError):
        old.rename(place)
    return None


def _is_later(folder: Path, saved: Path) -> bool:
    """Return whether the checkpoint in `folder` was made by a later attempt than that of `saved`."""
    return number_of(made(folder).get("attempt")) > number_of(made(saved).get("attempt"))


def adopt(root: Path) -> list[Path]:
    """Move complete checkpoints to the folder of finished checkpoints, if the attempt that saved them ended before it
    could move them; return the new paths.

    The launch of a run calls this function between two attempts; several nodes may call it at once. A checkpoint counts
    as complete if all its seals are there and its files have the sealed sizes; the contents are not read, and the plan
    of the next attempt judges them by their checksums. A finished checkpoint that is complete stays as it is. A
    checkpoint that a killed launch was about to set aside is renamed back, and the next plan judges it again. Finally
    the tracker file names the newest checkpoint that is complete by the names of its files, even if a process died
    before it could write the tracker file.
    """
    for folder in unfinished(root, MOVING):
        with contextlib.suppress(OSError):  # another one has its name meanwhile
            folder.rename(root / folder.name)
            folder.parent.rmdir()
    whole = [saved for saved in reversed(unfinished(root)) if _has_all(saved) and not _is_there(root, saved)]
    adopted = [place for saved in whole if (place := publish(saved, root))]
    renew_tracker(root)
    return adopted


def _is_there(root: Path, saved: Path) -> bool:
    """Return whether a complete checkpoint with the step of `saved` exists, and holds the same state of the run."""
    place = root / saved.name
    whole = _has_all(place)
    return whole is None or (whole and global_batch_of(place) == global_batch_of(saved))


def _has_all(folder: Path) -> bool | None:
    """Return whether a checkpoint is complete by its names, and all files have the sealed sizes; None if a file cannot
    be read. Reading the seals of all ranks takes long, and is done only for folders that are complete by their names.
    """
    try:
        return _complete(folder) and fault(folder, checksums=False) is None
    except CheckpointError:  # what cannot be read stays where it is, and no other one takes its place
        return None


def renew_tracker(root: Path) -> None:
    """Write the number of the newest complete checkpoint into the tracker file; remove the file if no checkpoint is
    complete.

    A tracker file that names an iteration without seals belongs to a run without this plugin, and is left unchanged.
    Another process may publish a checkpoint at the same time, so after each write this function checks the tracker file
    again.
    """
    with contextlib.suppress(OSError):  # a folder that cannot be written stays as it is
        while _is_wrong(root, said := _said(root), newest := next(filter(_complete, iterations(root)), None)):
            if newest is None:
                (root / TRACKER).unlink()
            else:
                _say_newest(root, newest)
            if _said(root) == said:  # as where nothing that is written stays
                return


def _said(root: Path) -> str | None:
    """Return the content of the tracker file; None if the file does not exist."""
    try:
        return (root / TRACKER).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def _is_wrong(root: Path, said: str | None, newest: Path | None) -> bool:
    """Return whether the tracker file, whose content is `said`, must be changed to name `newest`."""
    if said is None:  # ours always write one; whoever saves without an attempt has none
        return newest is not None and bool(made(newest).get("attempt"))
    if newest is not None and said == str(iteration(newest)):
        return False
    named = next((folder for folder in iterations(root) if said == str(iteration(folder))), None)
    return named is None or is_sealed(named)


def is_sealed(folder: Path) -> bool:
    """Return whether any rank has written a seal (a file that says that the rank's part is complete) into a checkpoint
    folder; only runs of this repository write seals.
    """
    return any(folder.glob("seal_rank_*.json"))


def _say_newest(root: Path, place: Path) -> None:
    """Write the tracker file. The unfinished file is in a folder of `place`'s own, which no reader lists and a save of
    the same step or the removal of `place` takes away, if the process dies here.
    """
    part = place / f".{TRACKER}.{uuid.uuid4().hex}"
    part.write_text(str(iteration(place)), encoding="utf-8")
    part.replace(root / TRACKER)


def remove_old(root: Path, newest: Path, keep: int, attempt: str | None = None, skip: int = 1) -> list[Path]:
    """Remove the oldest checkpoints of a run, whichever attempts saved them; return the paths of the removed ones.

    The `keep` newest checkpoints stay. If none of these is old enough for `plugins.spike_guard` (because some were
    saved on request), the newest checkpoint that is old enough stays, with those that follow it, in place of the last
    checkpoints before `newest`.

    Nothing is removed before all ranks have sealed the newest checkpoint. The function also removes older checkpoints
    that only some ranks have sealed or that one rank has refused, and the unfinished saves of earlier attempts. A rank
    never removes checkpoints of an attempt that is later than its own, because the rank may be late.

    Args:
        root: the root of the iterations.
        newest: the iteration that was sealed last.
        attempt: the attempt that saved `newest`.
        skip: the number of steps whose samples are left out if the next step has a spike.
    """
    if not _complete(newest):
        return []
    own, order = number_of(attempt), iterations(root)
    older = [
        folder
        for folder in (order[order.index(newest) + 1 :] if newest in order else ())
        if is_sealed(folder) and (attempt is None or number_of(made(folder).get("attempt")) <= own)
    ]
    whole = [folder for folder in older if _complete(folder)]
    come = progress({folder: iteration(folder) for folder in [newest, *whole]})
    begin = come[newest] - (skip - 1) * (come[newest] // max(iteration(newest), 1))  # in the steps of the newest
    enough = (at for at, folder in enumerate(whole) if come[folder] <= begin)
    oldest = next(enough, len(whole) - 1) if skip > 1 else 0  # if none is, the oldest will be the first that is
    first = max(oldest - max(keep, 1) + 2, 0)
    gone = [folder for folder in older if folder not in whole[first : first + max(keep, 1) - 1]]
    for folder in gone:  # renamed first: what a kill leaves of it has lost its name, no reader takes it
        with contextlib.suppress(OSError):
            saving = saving_folder(root, attempt)
            saving.mkdir(exist_ok=True)
            shutil.rmtree(folder.rename(saving / f"{REMOVING}{folder.name}"), ignore_errors=True)
    if attempt is not None:
        for left in root.glob(f"{SAVING}*"):
            if number_of(left.name.removeprefix(SAVING)) < own:
                shutil.rmtree(left, ignore_errors=True)
    return gone


def _complete(folder: Path) -> bool:
    """Return whether all ranks have sealed `folder` and none has refused it, judged only by the names of files, which
    takes one listing of the folder for any number of ranks.
    """
    try:
        ranks, names = range(_read_seal(folder, 0)["world_size"]), set(os.listdir(folder))
    except (OSError, ValueError, KeyError, TypeError, RefusedError):
        return False
    return all(seal_file(folder, rank).name in names and f"{REFUSED}{rank}" not in names for rank in ranks)


def made(folder: Path) -> dict[str, Any]:
    """Return from a checkpoint's seal which attempt saved the checkpoint and which samples the run had left out (see
    `write_seal`); the result is empty if no readable seal states them.
    """
    try:
        seal = _read_seal(folder, 0)
        return {key: seal[key] for key in ("attempt", "skipped") if key in seal}
    except (OSError, ValueError, TypeError, RefusedError):
        return {}


def world_of(folder: Path) -> int | None:
    """Return how many ranks saved a checkpoint, as the seal of rank 0 says (a seal is a file with the sizes and
    checksums of a rank's files). Return None if rank 0's seal is missing or unreadable.
    """
    try:
        return int(_read_seal(folder, 0)["world_size"])
    except (OSError, ValueError, KeyError, TypeError, RefusedError):
        return None


def files_in(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint; if the folder also holds files of a broken save on another number
    of ranks, as workers without an attempt may leave them, return only the files of as many ranks as the seals state.
    """
    paths = sorted(folder.glob("*.safetensors"))
    sealed = world_of(folder) if len({*map(_world, paths)} - {None}) > 1 else None
    return [path for path in paths if sealed is None or _world(path) in (None, sealed)]


def _world(file: Path) -> int | None:
    found = _WORLD.search(file.name)
    return int(found[1]) if found else None


def checksum(path: Path) -> str:
    """Return the sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fault(
    folder: Path, share: tuple[int, int] = (0, 1), checksums: bool = True, without: re.Pattern[str] | None = None
) -> str | None:
    """Return in a few words why `folder` is not a complete checkpoint; return None if the checkpoint is complete.

    Args:
        share: (worker, number of workers), if each worker reads only a part of the files.
        checksums: whether every file is read; otherwise only the sizes are compared.
        without: files whose names match this pattern may be missing.

    Raises:
        CheckpointError: a file exists but cannot be read.
    """
    try:
        first, every = share
        ranks = range(first, _read_seal(folder, 0)["world_size"], every)
        seals = [_read_seal(folder, rank) for rank in ranks]
        attempts = {seal.get("attempt") for seal in [_read_seal(folder, 0), *seals]}
        if len(attempts) > 1:
            return f"its parts are of several attempts of the run ({', '.join(sorted(map(str, attempts)))})"
        expected = {name: what for seal in seals for name, what in seal["files"].items()}
        faults = (
            _file_fault(folder / name, what["bytes"], what["sha256"] if checksums else None)
            for name, what in expected.items()
            if not without or not without.search(name)
        )
        return next(filter(None, faults), None)
    except RefusedError as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing: the save did not finish"
    except OSError as error:  # it may well be whole: nobody is to train on from an older one, or from nothing, for that
        raise CheckpointError(f"{error.filename or folder}: this path cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"a seal is unreadable ({error})"


def newest_of_rank(root: Path, rank: int) -> Path | None:
    """Return the newest checkpoint below `root` whose part of this rank is complete (sealed), even if parts of other
    ranks are not; return None if there is no such checkpoint.

    A complete checkpoint that is still in the folder of its attempt is returned under the path to which it will be
    moved.
    """
    for folder in newest_first([*iterations(root), *unfinished(root)]):
        with contextlib.suppress(OSError, ValueError, RefusedError):
            _read_seal(folder, rank)
            return root / folder.name
    return None


class RefusedError(Exception):
    """This error means that a rank has marked a checkpoint as one from which no run may continue; the message has the
    reason.
    """


def _read_seal(folder: Path, rank: int) -> dict:
    seal = json.loads(seal_file(folder, rank).read_text(encoding="utf-8"))
    if not isinstance(seal, dict):
        raise ValueError("the file holds no JSON object")
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
    """Return the training step that a complete checkpoint holds."""
    return _read_seal(folder, 0)["step"]
