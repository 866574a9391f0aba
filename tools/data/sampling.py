"""A yes/no for each document that depends on nothing but a salt and the document's index."""

from __future__ import annotations

from hashlib import blake2b

_RANGE = float(1 << 64)


def chosen(salt: str, index: int, fraction: float) -> bool:
    """Return True for about `fraction` of all indices: the same ones in every run, on every machine.

    `index` counts the documents of the corpus that are kept (skipped ones have no index), from 0.
    """
    digest = blake2b(f"{salt}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _RANGE < fraction


def held_out(seed: int, index: int, fraction: float) -> bool:
    """Return True when document `index` belongs to the held-out split."""
    return chosen(f"held-out-{seed}", index, fraction)
