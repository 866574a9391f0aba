"""Read .npy files chunk by chunk, with little work per file: a dump holds thousands of small ones."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO

import numpy as np

from plugins.errors import DataError

CHUNK = 1 << 16  # values in a piece; the pieces of both sides and their errors fit a core's cache
WIDEST = 16  # bytes of a value
_HEAD = 128  # NumPy pads a header to a multiple of 64; nearly every one is this long


class NpyFile:
    """One open array: `dtype`, `shape`, and its values in C order, `chunks()` at a time. A context manager.

    Raises:
        DataError: the file is missing, is no .npy, or is shorter than its header says.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}: the dump names it, so the dump is not whole") from None
        try:
            self.dtype, self.shape, self._start = _header(self._file)
        except (ValueError, SyntaxError, TypeError, TokenError, OSError) as error:
            self._file.close()
            raise DataError(f"{path}: not a .npy file ({error})") from None
        self.size = int(np.prod(self.shape, dtype=np.int64))

    def __enter__(self) -> NpyFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def chunks(self, buffer: np.ndarray) -> Iterator[np.ndarray]:
        """Flat pieces of `CHUNK` values, from the first one on: views of `buffer`, uint8 [CHUNK * WIDEST]."""
        self._file.seek(self._start)
        left = self.size
        while left:
            count = min(left, CHUNK)
            piece = buffer[: count * self.dtype.itemsize]
            self._fill(memoryview(piece))  # type: ignore[arg-type]
            yield piece.view(self.dtype)
            left -= count

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            read = self._file.readinto(view[done:])  # type: ignore[attr-defined]
            if not read:
                raise DataError(f"{self.path}: ends too early: the dump is not whole")
            done += read


def _header(file: BinaryIO) -> tuple[np.dtype, tuple[int, ...], int]:
    head = file.read(_HEAD)
    length = 10 + int.from_bytes(head[8:10], "little")
    if length > _HEAD:  # many axes
        head += file.read(length - _HEAD)
    dtype, shape, fortran = _parsed(head[:length])
    if fortran:
        raise ValueError("Fortran order, which msprobe never writes")
    return dtype, shape, length


@lru_cache(maxsize=4096)
def _parsed(head: bytes) -> tuple[np.dtype, tuple[int, ...], bool]:
    """NumPy's own reading of a header; cached, because most arrays of a dump share theirs with others."""
    stream = io.BytesIO(head)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("format 1.0 is wanted")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.kind not in "biufc":
        raise ValueError(f"its values are neither numbers nor truth values: {dtype}")
    return dtype, shape, fortran
