"""This module reshards a checkpoint: it writes the files of the checkpoint in the new layout, and the further files
(such as metadata.json) that make the folder a complete checkpoint.
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import CheckpointError, DataError
from plugins.sealed_checkpoint.plan import write_seal
from tools.checkpoint.scan import carried
from tools.checkpoint.stored import METADATA, Stored, open_stored
from tools.checkpoint.tensor_files import TYPES, Made, save_file
from tools.files.atomic import atomic_folder
from tools.process.children import ordered_map
from tools.weights.convert_plan import KEPT
from tools.weights.inventory import mark
from tools.weights.reshard_plan import Copied, Kind, Move, Plan
from tools.weights.reshard_target import Shape
from tools.weights.source import Source, refuse_target, require_room

# What a slice of the new layout takes from slices of the old one.


@dataclass(frozen=True)
class Piece:
    """A `Piece` is a rectangular block of a tensor's elements that is copied from a slice of the old layout to a slice
    of the new layout.

    Args:
        place: the number of the old slice, counted in row-major order.
        source, target: the position at which the box begins in the old slice and in the new slice.
        size: the number of elements of the box along each axis.
    """

    place: int
    source: Shape
    target: Shape
    size: Shape


@lru_cache(maxsize=65536)
def pieces(shape: Shape, old: Shape, new: Shape, place: int) -> tuple[Piece, ...]:
    """Return the rectangular blocks of elements that make up slice `place` of a tensor in the new layout (cut into
    `new` parts). Each block comes from one slice of the old layout (cut into `old` parts). Each element of the new
    slice is in exactly one block.

    Args:
        shape: the shape of the whole tensor.
        old, new: the number of equal parts into which each axis is cut in the old and in the new layout.
        place: the number of the new slice, counted in row-major order.
    """
    index = np.unravel_index(place, new) if new else ()
    by_axis = [_spans(*axis) for axis in zip(shape, old, new, map(int, index), strict=True)]
    found = []
    for spans in product(*by_axis):
        numbers, source, target, size = zip(*spans, strict=True) if spans else ((), (), (), ())
        number = int(np.ravel_multi_index(numbers, old)) if old else 0
        found.append(Piece(number, source, target, size))
    return tuple(found)


def _spans(length: int, old: int, new: int, index: int) -> list[tuple[int, int, int, int]]:
    """Return along one axis (number of the old part, begin in it, begin in the new part, length)."""
    before, after = length // old, length // new
    begin, end = index * after, (index + 1) * after
    found = []
    for number in range(begin // before, -(-end // before)):
        low, high = max(begin, number * before), min(end, (number + 1) * before)
        found.append((number, low - number * before, low - begin, high - low))
    return found


# metadata.json of a new layout, as MindFormers 1.9.0 writes and reads it (`checkpoint/metadata.py`).


def metadata_of(plan: Plan) -> dict[str, Any]:
    """Return the content of the metadata.json of a resharded checkpoint.

    Each slice is in only one file. MindFormers looks for a slice in the file of the first rank that holds it, and finds
    the file of another rank by `rank_group`.
    """
    storage: dict[str, Any] = {}
    for move in plan.moves:
        for place, (rank, holders) in enumerate(zip(move.writers, move.new.holders, strict=True)):
            entry = {"file_name": plan.file(rank, move.kind), "storage_rank": rank, "rank_group": list(holders)}
            storage[str((move.name, (place,)))] = [entry]
    return {"state_dict_metadata": {move.name: _described(move) for move in plan.moves}, "storage_data": storage}


def _described(move: Move) -> dict[str, Any]:
    replicas = [0] * (max(rank for ranks in move.new.holders for rank in ranks) - move.layout.first + 1)
    for ranks in move.new.holders:
        for number, rank in enumerate(ranks):
            replicas[rank - move.layout.first] = number
    return {
        "properties": {
            "dtype": TYPES[move.dtype].name,
            "replica_id": replicas,
            "allow_shape_mismatch": False,
            "allow_to_save": True,
        },
        "global_shape": list(move.new.shape),
        "axis_fragmentations": list(move.new.cuts),
        "layout": move.layout.as_metadata(),
        "chunk": [
            {"global_offset": [place], "local_shape": list(move.new.part)} for place in range(len(move.new.holders))
        ],
    }


# One file of the new layout: its slices are put together from the old files, a block of rows at a time.
#
# Nothing but that block is in memory, whatever the size of a tensor: old files are mapped, and their pages given back.

BLOCK = 4 << 20  # bytes put together at a time; a few blocks wait for the thread that hashes
_OPEN = 64  # files mapped at once


@dataclass(frozen=True)
class Written:
    """A `Written` describes a file that was written completely: its name, its size in bytes, and its SHA-256 in
    hexadecimal.
    """

    file: str
    bytes: int
    sha256: str


def writer(source: Path, folder: Path, plan: Plan) -> Callable[[tuple[int, Kind]], Written]:
    """Return a function that writes the file of one rank with one kind of tensors (weights or optimizer state) into
    `folder`. Each worker process calls `writer` once.
    """
    return partial(write_file, Mapped(open_stored(source)), folder, plan)


def write_file(old: Mapped, folder: Path, plan: Plan, job: tuple[int, Kind]) -> Written:
    """Write the file of one rank with one kind of tensors (weights or optimizer state), and flush the file to the disk.

    Raises:
        DataError: the file cannot be written.
        CheckpointError: a file of the old checkpoint cannot be read.
    """
    rank, kind = job
    file = plan.file(rank, kind)
    moves = [(m, m.writers.index(rank)) for m in plan.moves if m.kind == kind and rank in m.writers]
    copied = [each for each in plan.copied if each.kind == kind and rank in each.ranks]
    tensors = {m.name: Made(m.dtype, m.new.part, partial(_blocks, old, m, place)) for m, place in moves}
    tensors |= {each.name: Made(each.dtype, each.shape, partial(_whole, old, each)) for each in copied}
    try:
        digest = save_file(tensors, folder / file, {"format": "ms"})
        return Written(file, (folder / file).stat().st_size, digest)
    except OSError as error:
        raise DataError(f"{folder / file}: this path cannot be written ({error.strerror or error})") from None


def _whole(old: Mapped, copied: Copied) -> Iterator[np.ndarray]:
    yield old.slice(copied.file, copied.name, copied.dtype, copied.shape)


def _blocks(old: Mapped, move: Move, place: int) -> Iterator[np.ndarray]:
    """Yield a new slice in blocks of whole rows, in order, as whole numbers of its width."""
    shape, item = move.new.part, TYPES[move.dtype].itemsize
    found = pieces(move.old.shape, move.old.cuts, move.new.cuts, place)
    row = math.prod(shape[1:]) * item
    step = max(1, BLOCK // max(row, 1))
    rows = shape[0] if shape else 1
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        inside = [p for p in found if not shape or (p.target[0] < end and p.target[0] + p.size[0] > begin)]
        yield _block(old, move, inside, begin, end)
    old.give_back(move, found)


def _block(old: Mapped, move: Move, inside: list[Piece], begin: int, end: int) -> np.ndarray:
    """Return rows `begin` to `end` of a new slice."""
    shape = move.new.part
    if not shape:
        return old.part(move, inside[0].place)
    if len(inside) == 1 and move.old.part[1:] == shape[1:]:  # whole rows of one old slice: nothing to put together
        first = inside[0].source[0] + begin - inside[0].target[0]
        return old.part(move, inside[0].place)[first : first + end - begin]
    rows = np.empty((end - begin, *shape[1:]), _bits(move.dtype))
    for piece in inside:
        low, high = max(begin, piece.target[0]), min(end, piece.target[0] + piece.size[0])
        first = piece.source[0] + low - piece.target[0]
        theirs = [slice(first, first + high - low)]
        ours = [slice(low - begin, high - begin)]
        for source, target, size in list(zip(piece.source, piece.target, piece.size, strict=True))[1:]:
            theirs.append(slice(source, source + size))
            ours.append(slice(target, target + size))
        rows[tuple(ours)] = old.part(move, piece.place)[tuple(theirs)]
    return rows


def _bits(dtype: str) -> str:
    """Return whole numbers of a type's width."""
    return f"u{TYPES[dtype].itemsize}"


@dataclass
class Mapped:
    """A `Mapped` maps the files of the old checkpoint into memory when they are needed. Only the `_OPEN` most recently
    used files stay mapped into memory.
    """

    stored: Stored
    maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def part(self, move: Move, place: int) -> np.ndarray:
        """Return a tensor's slice in the old layout as an array of integers as wide as the elements. The bytes are not
        read from the disk yet.
        """
        return self.slice(self._file(move, place), move.name, move.dtype, move.old.part)

    def slice(self, file: str, name: str, dtype: str, shape: Shape) -> np.ndarray:
        """Return the part of a tensor that one file of the old checkpoint holds, as an array of integers as wide as the
        elements. The bytes are not read from the disk yet.
        """
        start = self.stored.files[file][name].start
        flat = np.frombuffer(self._map(file), _bits(dtype), math.prod(shape), start)
        return flat.reshape(shape)

    def give_back(self, move: Move, found: tuple[Piece, ...]) -> None:
        """Release the memory pages of slices of the old layout that are no longer needed; these pages would otherwise
        count as memory of this process.
        """
        for place in {piece.place for piece in found}:
            file = self._file(move, place)
            if file in self.maps:
                self.maps[file].madvise(mmap.MADV_DONTNEED)

    def _file(self, move: Move, place: int) -> str:
        if move.name in self.stored.tensors:
            return self.stored.tensors[move.name].copies[place][0][1]
        files = self.stored.unlisted[move.name]
        return files[min(files)]

    def _map(self, file: str) -> mmap.mmap:
        if file in self.maps:
            self.maps[file] = self.maps.pop(file)  # the last one used
            return self.maps[file]
        if len(self.maps) >= _OPEN:
            self.maps.pop(next(iter(self.maps)))  # closed when no array looks at it
        path = self.stored.folder / file
        try:
            with path.open("rb") as data:
                self.maps[file] = mmap.mmap(data.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: the file cannot be read ({error})") from None
        return self.maps[file]


COMMON = "common.json"
BESIDE = ("recipe.yaml", "data.json")  # of the run: a resume compares the order of its data with them


def folder_in(target: Path, source: Source) -> Path:
    """Return the folder in `target` into which the resharded checkpoint is written. A resumed run looks for the recipe
    two folders above this folder.
    """
    return target / "checkpoint" / f"iteration_{source.step or 0:08d}"


def reshard(
    source: Source,
    target: Path,
    plan: Plan,
    workers: int = 1,
    progress: Callable[[int, str], None] = lambda done, file: None,
    damaged: Sequence[str] = (),
) -> None:
    """Write the resharded checkpoint to `target`, a folder that does not exist yet; an error leaves no partly written
    checkpoint there. The function `progress` is called with the number of bytes written so far and the name of the
    file.

    Tensors of `source` that are `damaged` and are copied nevertheless (`inventory.salvaged`) are recorded in `target`.

    Raises:
        CheckpointError: `target` exists, or the source is damaged.
        DataError: `target` cannot be written, or the disk has no room for it.
    """
    refuse_target(target)
    require_room(next(folder for folder in target.absolute().parents if folder.exists()), target, plan.bytes)
    copied, made = source.stored.others(COMMON, KEPT), carried(source.stored.folder)
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
        for name, content in copied.items():
            (folder / name).write_bytes(content)
        (folder / METADATA).write_text(json.dumps(metadata_of(plan)), "utf-8")
        mark(folder, damaged)
        known = {name: each.sha256 for name, each in files.items()}
        for rank in range(plan.world):
            write_seal(folder, rank, plan.world, source.step or 0, known=known, made=made)
        run = source.path.absolute().parent.parent
        for name in filter(lambda name: (run / name).exists(), BESIDE):
            shutil.copyfile(run / name, part / name)
