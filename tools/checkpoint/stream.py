"""A safetensors file that is written as its tensors are made, piece by piece, and hashed beside it in one pass.

The layout is that of the `safetensors` package: the same tensors give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.checkpoint.types import TYPES

_ORDER = list(TYPES)
_ALIGNED = 8  # bytes: what the header is padded to
_WAITING = 4  # pieces that the thread that hashes may be behind


@dataclass(frozen=True)
class Made:
    """A tensor to write: safetensors' name of its type, its shape, and its numbers in row-major order, in pieces."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def bytes(self) -> int:
        """Of its numbers."""
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


def in_order(tensors: Mapping[str, Made]) -> list[str]:
    """Names in the order of the file."""
    return sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), name))


def save_file(tensors: Mapping[str, Made], path: Path, metadata: Mapping[str, str]) -> str:
    """Write `path`, all of it on the disk when this returns; returns its SHA-256, in hexadecimal.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as out, _Hash() as digest:
        for piece in _contents(tensors, metadata):
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def save_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> str:
    """`save_file` of arrays that are in memory, for MindSpore; returns the file's SHA-256.

    The `safetensors` package writes the same bytes, but its error for a full disk is not an OSError.

    Raises:
        OSError: it cannot be written.
    """
    made = {name: _made(array) for name, array in arrays.items()}
    return save_file(made, path, {"format": "ms"})


def _made(array: np.ndarray) -> Made:
    name = next(
        name for name, dtype in TYPES.items() if dtype.name == array.dtype.name
    )  # MindSpore has a bfloat16 of its own
    return Made(name, array.shape, lambda: iter((array,)))


def _contents(tensors: Mapping[str, Made], metadata: Mapping[str, str]) -> Iterator[Any]:
    """The file's bytes, in its order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in (names := in_order(tensors)):
        made = tensors[name]
        header[name] = {"dtype": made.dtype, "shape": made.shape, "data_offsets": [end, end + made.bytes]}
        end += made.bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        written = 0
        for piece in tensors[name].pieces():
            written += piece.nbytes
            yield np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
        assert written == tensors[name].bytes, f"{name}: {written} bytes instead of {tensors[name].bytes}"


class _Hash:
    """SHA-256 in a thread of its own: it takes as long as all the rest, and does not hold Python's lock."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: queue.Queue[Any] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Hash:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pieces.put(None)
        self._thread.join()

    def update(self, piece: Any) -> None:
        """Go on with `piece`, whose bytes must stay as they are."""
        self._pieces.put(piece)

    def hexdigest(self) -> str:
        """Of all, when the thread has ended."""
        return self._digest.hexdigest()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)
