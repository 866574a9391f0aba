"""Digests of files that may have terabytes: of all of one, or of blocks spread over it."""

from __future__ import annotations

import hashlib
from pathlib import Path

BLOCK, BLOCKS = 1 << 16, 256
_CHUNK = 1 << 22


def whole(path: Path) -> str:
    """sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as data:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def sample(path: Path) -> str:
    """sha256 of `BLOCKS` blocks spread over a file, the first and the last among them; of all where it has no more."""
    size = path.stat().st_size
    if size <= BLOCK * BLOCKS:
        return whole(path)
    digest = hashlib.sha256()
    with path.open("rb") as data:
        for block in range(BLOCKS):
            data.seek((size - BLOCK) * block // (BLOCKS - 1))
            digest.update(data.read(BLOCK))
    return digest.hexdigest()
