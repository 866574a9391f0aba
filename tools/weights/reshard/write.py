"""One file of the new layout: its slices are put together from the old files, a block of rows at a time.

Nothing but that block is in memory, whatever the size of a tensor: old files are mapped, and their pages given back.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from plugins.errors import CheckpointError, DataError
from tools.checkpoint.stored import Stored, open_stored
from tools.checkpoint.stream import Made, save_file
from tools.checkpoint.types import TYPES
from tools.weights.reshard.layout import Shape
from tools.weights.reshard.pieces import Piece, pieces
from tools.weights.reshard.plan import Copied, Kind, Move, Plan

BLOCK = 4 << 20  # bytes put together at a time; a few blocks wait for the thread that hashes
_OPEN = 64  # files mapped at once


@dataclass(frozen=True)
class Written:
    """A file that is whole: its name, its bytes, and its sha256 in hexadecimal."""

    file: str
    bytes: int
    sha256: str


def writer(source: Path, folder: Path, plan: Plan) -> Callable[[tuple[int, Kind]], Written]:
    """A function that writes the file of a rank and kind into `folder`; built once in each worker process."""
    return partial(write_file, Mapped(open_stored(source)), folder, plan)


def write_file(old: Mapped, folder: Path, plan: Plan, job: tuple[int, Kind]) -> Written:
    """Write the file of (rank, kind), flushed to the disk.

    Raises:
        DataError: it cannot be written. CheckpointError: an old file cannot be read.
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
        raise DataError(f"{folder / file}: cannot be written ({error.strerror or error})") from None


def _whole(old: Mapped, copied: Copied) -> Iterator[np.ndarray]:
    yield old.slice(copied.file, copied.name, copied.dtype, copied.shape)


def _blocks(old: Mapped, move: Move, place: int) -> Iterator[np.ndarray]:
    """A new slice in blocks of whole rows, in order, as whole numbers of its width."""
    shape, item = move.new.part, TYPES[move.dtype].itemsize
    found = pieces(move.old.shape, move.old.cuts, move.new.cuts, place)
    row = math.prod(shape[1:]) * item
    step = max(1, BLOCK // max(row, 1))
    rows = shape[0] if shape else 1
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        inside = [piece for piece in found if not shape or _meets(piece, begin, end)]
        yield _block(old, move, inside, begin, end)
    old.give_back(move, found)


def _meets(piece: Piece, begin: int, end: int) -> bool:
    """Whether it has rows of a new slice from `begin` to `end`."""
    return piece.target[0] < end and piece.target[0] + piece.size[0] > begin


def _block(old: Mapped, move: Move, inside: list[Piece], begin: int, end: int) -> np.ndarray:
    """Rows `begin` to `end` of a new slice."""
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
    """Whole numbers of a type's width."""
    return f"u{TYPES[dtype].itemsize}"


@dataclass
class Mapped:
    """The old files, mapped when they are asked for; the last `_OPEN` of them stay so."""

    stored: Stored
    maps: dict[str, mmap.mmap] = field(default_factory=dict)

    def part(self, move: Move, place: int) -> np.ndarray:
        """An old slice, not read yet: its numbers as whole numbers of their width."""
        return self.slice(self._file(move, place), move.name, move.dtype, move.old.part)

    def slice(self, file: str, name: str, dtype: str, shape: Shape) -> np.ndarray:
        """What a file has of a tensor, not read yet."""
        start = self.stored.files[file][name].start
        flat = np.frombuffer(self._map(file), _bits(dtype), math.prod(shape), start)
        return flat.reshape(shape)

    def give_back(self, move: Move, found: tuple[Piece, ...]) -> None:
        """Let go of the pages of old slices: they count as memory of this process."""
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
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        return self.maps[file]
