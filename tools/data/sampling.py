"""Choices that depend on nothing but a salt and what is chosen from: the same in every run, on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b

PIECE = 1 << 14  # characters, at most 64 KiB of UTF-8: the least that is taken of a longer text
_RANGE = float(1 << 64)


def chosen(salt: str, index: int, fraction: float) -> bool:
    """Return True for about `fraction` of all indices: the same ones in every run, on every machine.

    `index` counts from 0; of documents, those of the corpus that are kept (skipped ones have no index).
    """
    digest = blake2b(f"{salt}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _RANGE < fraction


def held_out(seed: int, index: int, fraction: float) -> bool:
    """Return True when document `index` belongs to the held-out split."""
    return chosen(f"held-out-{seed}", index, fraction)


def spread(texts: Iterable[str], total: int, budget: int) -> Iterator[str]:
    """Yield about `budget` bytes of `texts`, spread over all of them: some of their pieces of `PIECE` characters.

    total: the bytes of UTF-8 that `texts` hold; within the budget, every text is yielded whole. Else the first piece
    is among the chosen, and what they hold differs from the budget by less than the largest piece.
    """
    if total <= budget:
        yield from texts
        return
    seen = taken = 0
    pieces = (text[start : start + PIECE] for text in texts for start in range(0, len(text), PIECE))
    for number, piece in enumerate(pieces):
        size = len(piece.encode())
        # what is still wanted of what is still to come (Knuth, TAOCP 2, 3.4.2, algorithm S): exact at the end, and
        # no part of the corpus is more likely than another
        to_come = max(total - seen, 1)  # files can grow while we read
        if not number or chosen("tokenizer", number, (budget - taken) / to_come):
            yield piece
            taken += size
        seen += size
