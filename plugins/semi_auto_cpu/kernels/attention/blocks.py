"""Which keys a block of queries sees, from FlashAttentionScore's sparse mode, mask and ends of documents.

    sparse mode 0  without a mask all keys; with one what it leaves, between pre_tokens and next_tokens of the place
                1  what the mask leaves
                2  keys up to the query's place, both counted from the first
                3  the same, both counted from the last
                4  between pre_tokens and next_tokens of the query's place, both counted from the last
Modes 2, 3 and 4 come with a mask [2048, 2048] of one form, ones above the diagonal, which is checked and not read
further. In layout TND each document is by itself, and modes 2, 3 and 4 hold within it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from plugins.semi_auto_cpu.kernels.attention.call import Call

_ROWS = 128  # of a block: long enough for BLAS, short enough to leave out what a causal mask hides
_COMPRESSED = 2048


class Block(NamedTuple):
    """Rows of one sample and the only keys that any of them may see.

    Args:
        batch: number of the sample.
        rows, columns: places in the sequences of queries and keys.
        hidden: True where a row must not look, broadcasting to [heads, rows, columns]; None if it may everywhere.
    """

    batch: int
    rows: slice
    columns: slice
    hidden: np.ndarray | None


class _Part(NamedTuple):
    """A sample, or in TND a document: where its rows and columns begin, and how many there are."""

    batch: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def blocks_of(call: Call) -> Iterator[Block]:
    """Blocks that hold each row once.

    Raises:
        NotImplementedError, ValueError: see `FlashAttentionScore`.
    """
    explicit = _explicit_mask(call)
    for part in _parts(call):
        lower, upper = _band(call, part)
        for first in range(0, part.rows, _ROWS):
            last = min(first + _ROWS, part.rows)
            start, stop = max(0, first + lower), min(part.columns, last + upper)
            if max(0, last - 1 + lower) >= part.columns or first + upper < 0:
                raise ValueError(
                    f"{call.name}: sparse_mode {call.sparse} leaves a query no key: {part.rows} queries, "
                    f"{part.columns} keys, pre_tokens {call.before}, next_tokens {call.behind}"
                )
            hidden = _outside(first, last, start, stop, lower, upper)
            rows = slice(part.first_row + first, part.first_row + last)
            columns = slice(part.first_column + start, part.first_column + stop)
            if explicit is not None:
                mask = explicit[min(part.batch, len(explicit) - 1), :, rows, columns]
                hidden = mask if hidden is None else mask | hidden
            yield Block(part.batch, rows, columns, hidden)


def _parts(call: Call) -> list[_Part]:
    """Samples or documents; documents of no query are left out (the ends are padded by repeating the last)."""
    batch, _, rows, _ = call.queries.shape
    columns = call.keys.shape[2]
    if call.layout != "TND":
        return [_Part(sample, 0, rows, 0, columns) for sample in range(batch)]
    assert call.query_ends is not None and call.key_ends is not None
    ends, key_ends = call.query_ends.tolist(), call.key_ends.tolist()
    starts, key_starts = [0, *ends[:-1]], [0, *key_ends[:-1]]
    falling = any(a > b for a, b in zip([*starts, *key_starts], [*ends, *key_ends], strict=False))
    if len(ends) != len(key_ends) or falling or not ends or ends[-1] != rows or key_ends[-1] > columns:
        raise ValueError(
            f"{call.name}: actual_seq_qlen {_short(ends)} must rise to the {rows} queries, "
            f"actual_seq_kvlen {_short(key_ends)} to at most the {columns} keys, with as many documents"
        )
    documents = zip(starts, ends, key_starts, key_ends, strict=True)
    return [_Part(0, a, b - a, c, d - c) for a, b, c, d in documents if b > a]


def _band(call: Call, part: _Part) -> tuple[int, int]:
    """(lower, upper): query i of a part may see keys i + lower to i + upper."""
    everything = (-part.rows, part.columns)
    shift = part.columns - part.rows  # of the last query's own place
    if call.sparse == 0:
        return everything if call.mask is None else (-call.before, call.behind)
    if call.sparse == 1:
        return everything
    if call.sparse == 2:
        return -part.rows, 0
    if call.sparse == 3:
        return -max(part.rows, part.columns), shift
    return shift - call.before, shift + call.behind


def _outside(first: int, last: int, start: int, stop: int, lower: int, upper: int) -> np.ndarray | None:
    """[1, rows, columns]: where a key lies outside the band; None if none does."""
    if start - first >= lower + (last - 1 - first) and stop - 1 - first <= upper:
        return None
    distance = np.arange(start, stop) - np.arange(first, last)[:, None]
    return ((distance < lower) | (distance > upper))[None]


def _explicit_mask(call: Call) -> np.ndarray | None:
    """[1 or B, 1 or heads, S1, S2] of bool in modes 0 and 1; the mask of the other modes is checked here."""
    mask = call.mask
    if call.sparse in (2, 3, 4):
        if mask is None or mask.shape != (_COMPRESSED, _COMPRESSED):
            raise ValueError(f"{call.name}: sparse_mode {call.sparse} wants attn_mask (2048, 2048): {_shape(mask)}")
        if not np.array_equal(np.ascontiguousarray(mask).view(np.uint64), _above_diagonal()):
            raise ValueError(f"{call.name}: sparse_mode {call.sparse} wants an attn_mask of ones above the diagonal")
        return None
    if call.layout == "TND":
        raise NotImplementedError(f"{call.name}: sparse_mode {call.sparse} in layout TND")
    if mask is None:
        if call.sparse == 1:
            raise ValueError(f"{call.name}: sparse_mode 1 wants an attn_mask")
        return None
    batch, heads, rows, _ = call.queries.shape
    columns = call.keys.shape[2]
    wanted = {(batch, heads, rows, columns), (batch, 1, rows, columns), (1, 1, rows, columns), (rows, columns)}
    if mask.shape not in wanted:
        raise ValueError(f"{call.name}: attn_mask {mask.shape} for {rows} queries and {columns} keys")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape).astype(bool, copy=False)


@functools.cache
def _above_diagonal() -> np.ndarray:
    """Eight ones or zeros in a number: compared in every call."""
    return np.triu(np.ones((_COMPRESSED, _COMPRESSED), np.uint8), 1).view(np.uint64)


def _shape(mask: np.ndarray | None) -> str:
    return "none" if mask is None else str(mask.shape)


def _short(ends: list[int]) -> str:
    return str(ends) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ... {ends[-1]}]"
