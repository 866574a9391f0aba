"""What a safetensors file says of its tensors, without reading them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from plugins.errors import CheckpointError

_LENGTH = 8  # bytes of the number in front of the header


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
        CheckpointError: no such file, no safetensors, or one that ends before or after its last tensor.
    """
    try:
        with file.open("rb") as data:
            length = int.from_bytes(data.read(_LENGTH), "little")
            content = json.loads(data.read(min(length, file.stat().st_size)))
        content.pop("__metadata__", None)
        found = {}
        for name, each in content.items():
            first, last = each["data_offsets"]
            found[name] = Header(each["dtype"], tuple(each["shape"]), last - first, _LENGTH + length + first)
        end = _LENGTH + length + max((each["data_offsets"][1] for each in content.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{file}: no whole safetensors file ({error})") from None
    if file.stat().st_size != end:
        raise CheckpointError(f"{file}: no whole safetensors file ({file.stat().st_size} bytes instead of {end})")
    return found
