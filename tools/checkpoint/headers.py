"""What a safetensors file says of its tensors, without reading them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError
from tools.checkpoint.types import TYPES

_LENGTH = 8  # bytes of the number in front of the header
_WIDTHS = {  # bytes of an element of every type that a safetensors file may have, also of those that nothing here reads
    **{name: dtype.itemsize for name, dtype in TYPES.items()},
    **{"U64": 8, "U32": 4, "U16": 2, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True)
class Header:
    """One tensor of a file: its type as safetensors writes it (F32, BF16), its shape, its bytes, where in the file."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    start: int = field(default=0, compare=False)


def read_headers(file: Path) -> dict[str, Header]:
    """Name -> what the file says of that tensor.

    Raises:
        CheckpointError: no such file, no safetensors, or one whose tensors do not fill it without gap or overlap.
    """
    try:
        with file.open("rb") as data:
            size = os.fstat(data.fileno()).st_size
            length = int.from_bytes(data.read(_LENGTH), "little")
            text = data.read(min(length, size))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    try:
        content = json.loads(text)
        content.pop("__metadata__", None)
        found = {name: _header(each, _LENGTH + length) for name, each in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{file}: not a complete safetensors file: its header cannot be read") from None
    end = _LENGTH + length
    for name, header in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if header.start != end or header.bytes != math.prod(header.shape) * _width(header, file, name):
            kind = f"{header.dtype} {list(header.shape)}, bytes {header.start} to {header.start + header.bytes}"
            raise CheckpointError(f"{file}: not a complete safetensors file: {name} is {kind}, which do not fit")
        end += header.bytes
    if size != end:
        raise CheckpointError(f"{file}: not a complete safetensors file ({size} bytes instead of {end})")
    return found


def _header(entry: Mapping[str, Any], base: int) -> Header:
    """One entry of a header. Raises ValueError, TypeError or KeyError where it is none."""
    dtype, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(size) is not int or size < 0 for size in (*shape, first, last)):
        raise ValueError(f"{entry}: no tensor")
    return Header(dtype, tuple(shape), last - first, base + first)


def _width(header: Header, file: Path, name: str) -> int:
    """Bytes of an element."""
    if header.dtype not in _WIDTHS:
        raise CheckpointError(f"{file}: {name} is of type {header.dtype!r}; known are {', '.join(_WIDTHS)}")
    return _WIDTHS[header.dtype]
