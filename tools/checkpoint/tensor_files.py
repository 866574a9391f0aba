"""This module reads the headers of safetensors files, and writes such files while their tensors are computed.

`TYPES` lists safetensors' names of types, the types with the widest alignment first, which is the order in which the
package safetensors writes tensors. `read_headers` returns what the header of a file says about its tensors, without
reading the tensors. `save_file` writes a file piece by piece, and computes its checksum in the same pass. The layout is
that of the `safetensors` package: the same tensors give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from plugins.errors import CheckpointError

TYPES: dict[str, np.dtype] = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_LENGTH_BYTES = 8  # bytes of the number in front of the header
_WIDTHS = {  # bytes of an element of every type that a safetensors file may have, also of those that nothing here reads
    **{name: dtype.itemsize for name, dtype in TYPES.items()},
    **{"C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}
_ORDER = list(TYPES)
_ALIGNED = 8  # bytes: what the header is padded to
_MOST_WAITING = 4  # pieces that the thread that hashes may be behind


@dataclass(frozen=True)
class Header:
    """A `Header` is the entry of one tensor in the header of a safetensors file: its type as safetensors writes it
    (F32, BF16), its shape, its size in bytes, and the position at which its bytes begin.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    start: int = field(default=0, compare=False)


def read_headers(file: Path) -> dict[str, Header]:
    """Return for each tensor in a safetensors file its entry in the header of the file.

    Raises:
        CheckpointError: no such file, no safetensors, or one whose tensors do not fill it without gap or overlap.
    """
    try:
        with file.open("rb") as data:
            size = os.fstat(data.fileno()).st_size
            length = int.from_bytes(data.read(_LENGTH_BYTES), "little")
            text = data.read(min(length, size))
    except OSError as error:
        raise CheckpointError(f"{file}: the file cannot be read ({error.strerror})") from None
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        found = {name: _header(each, _LENGTH_BYTES + length) for name, each in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{file}: this is not a complete safetensors file: its header cannot be read; copy it again"
        ) from None
    end = _LENGTH_BYTES + length
    for name, header in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if header.start != end or header.bytes != math.prod(header.shape) * _width(header, file, name):
            kind = f"{header.dtype} {list(header.shape)}, bytes {header.start} to {header.start + header.bytes}"
            raise CheckpointError(
                f"{file}: this is not a complete safetensors file: {name} is {kind}, but its type, its shape and its "
                "place in the file do not fit together; copy it again"
            )
        end += header.bytes
    if size != end:
        raise CheckpointError(
            f"{file}: this is not a complete safetensors file: it has {size} bytes instead of {end}; copy it again"
        )
    return found


def _header(entry: Mapping[str, Any], base: int) -> Header:
    """Return one entry of a header. Raises ValueError, TypeError or KeyError if it is not such an entry."""
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(size) is not int or size < 0 for size in (*shape, first, last)):
        raise ValueError(f"{entry} does not describe a tensor (dtype, shape, data_offsets)")
    return Header(dtype, tuple(shape), last - first, base + first)


def _width(header: Header, file: Path, name: str) -> int:
    """Return the bytes of one element of a type."""
    if header.dtype not in _WIDTHS:
        raise CheckpointError(
            f"{file}: {name} is of the unknown type {header.dtype!r}; the known types are {', '.join(_WIDTHS)}"
        )
    return _WIDTHS[header.dtype]


@dataclass(frozen=True)
class Made:
    """A `Made` is a tensor whose elements are computed while its file is written. The elements are computed and written
    in pieces, in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[np.ndarray]]

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the tensor's elements."""
        return math.prod(self.shape) * TYPES[self.dtype].itemsize


def in_order(tensors: Mapping[str, Made]) -> list[str]:
    """Return the names of tensors in the order in which a safetensors file stores them."""
    return sorted(tensors, key=lambda name: (_ORDER.index(tensors[name].dtype), name))


def save_file(tensors: Mapping[str, Made], path: Path, metadata: Mapping[str, str]) -> str:
    """Write tensors to the safetensors file `path`, and return its SHA-256 in hexadecimal. The whole file is on the
    disk when this function returns.

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
    """Write arrays from memory as `save_file` does, in the form that MindSpore reads; return the file's SHA-256.

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
    """Yield the file's bytes, in its order."""
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
    """A `_Hash` computes a SHA-256 in a separate thread, because the computation takes as long as the rest of the work
    and does not hold Python's lock.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._pieces: queue.Queue[Any] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, daemon=True)

    def __enter__(self) -> _Hash:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._pieces.put(None)
        self._thread.join()

    def update(self, piece: Any) -> None:
        """Add the bytes of `piece` to the digest; these bytes must not change before the digest is computed."""
        self._pieces.put(piece)

    def hexdigest(self) -> str:
        """Return the SHA-256 of all added bytes in hexadecimal, after the thread has ended."""
        return self._digest.hexdigest()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            self._digest.update(piece)
