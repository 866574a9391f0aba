"""This module computes the operator FlashAttentionScore and its gradient in NumPy.

Sources: the class in `mindspore/ops/auto_generate/gen_ops_prim.py` (inputs, layouts, sparse modes) and `op_enum.h`'s
FASInputLayoutMode. The first part of the file converts the arguments of all layouts to one form (`Call`), and the
second part computes which keys a block of queries attends to (`blocks_of`), from the sparse mode, the mask and the ends
of documents:

    sparse mode 0  without a mask all keys; with one what it leaves, between pre_tokens and next_tokens of the place
                1  what the mask leaves
                2  keys up to the query's place, both counted from the first
                3  the same, both counted from the last
                4  between pre_tokens and next_tokens of the query's place, both counted from the last
Modes 2, 3 and 4 come with a mask [2048, 2048] that always has the same form, ones above the diagonal; this form is
checked, and the mask is not used further. In layout TND each document is separate, and modes 2, 3 and 4 apply within a
document.

The third part contains the operators. `softmax_max` and `softmax_sum` repeat each row's value eight times;
`softmax_out` is not used. A row in which an explicit mask hides all keys gives equal weights to all keys, as a softmax
of equal scores does, and no gradient passes to its scores.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from plugins.cpu_backend.grouped_query import from_keys, to_keys, with_keys
from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel

LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")  # by number: op_enum.h's FASInputLayoutMode
_OTHER_LAYOUTS = ("TH", "NSD", "SH", "BNSD_BSND", "PA_BSND")
_SETTINGS = 8  # head_num, keep_prob, scale_value, pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode
_ORDERS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}
_ROWS = 128  # of a block: long enough for BLAS, short enough to leave out what a causal mask hides
_COMPRESSED = 2048
_HIDDEN = np.finfo(np.float32).min  # a score that exp() turns into 0 beside any other
_REPEATED = 8


@dataclass(frozen=True)
class Call:
    """A `Call` holds the arguments of one call of FlashAttentionScore or of its gradient.

    Args:
        name: the name of the operator, for messages.
        query, key, value: tensors in the layout `layout`.
        mask: 1 where a query must not attend, in the form of the sparse mode; None if there is no mask.
        query_ends, key_ends: the cumulative ends of the documents in TND; None in other layouts.
        heads: the number of heads of the query.
        scale: the scale of the scores.
        before, behind: the numbers of tokens that a query sees before and after itself (`pre_tokens`, `next_tokens`).
        layout: one of LAYOUTS.
        sparse: the sparse mode.
    """

    name: str
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    mask: np.ndarray | None
    query_ends: np.ndarray | None
    key_ends: np.ndarray | None
    heads: int
    scale: float
    before: int
    behind: int
    layout: str
    sparse: int

    @property
    def key_heads(self) -> int:
        """Return the number of heads of keys and values; each of them is shared by an equal number of query heads."""
        if "H" not in self.layout:
            return self.key.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[self.layout]]
        return self.key.shape[-1] * self.heads // self.query.shape[-1]

    @property
    def queries(self) -> np.ndarray:
        """Return the queries as a view [B, heads, S1, D]."""
        return self.view(self.query)

    @property
    def keys(self) -> np.ndarray:
        """Return the keys as [B, key heads, S2, D]."""
        return self.view(self.key, "key")

    @property
    def values(self) -> np.ndarray:
        """Return the values as [B, key heads, S2, D of the values]."""
        return self.view(self.value, "value")

    def view(self, x: np.ndarray, owner: str = "query") -> np.ndarray:
        """Return a tensor in the layout of `owner` as [B, heads, S, D]; writing into the result writes into `x`."""
        return heads_first(x, self.layout, self.heads if owner == "query" else self.key_heads)

    def empty_output(self) -> np.ndarray:
        """Return an empty array for the attention: the query's shape with the values' head size."""
        head = self.values.shape[-1]
        width = head * self.heads if "H" in self.layout else head
        return np.empty((*self.query.shape[:-1], width), np.float32)

    def empty_statistics(self) -> np.ndarray:
        """Return an empty array for a softmax statistic: [B, heads, S1, 8], or [T, heads, 8] in TND."""
        batch, heads, rows, _ = self.queries.shape
        shape = (rows, heads, _REPEATED) if self.layout == "TND" else (batch, heads, rows, _REPEATED)
        return np.empty(shape, np.float32)

    def statistics_view(self, x: np.ndarray) -> np.ndarray:
        """Return a view of a softmax statistic as [B, heads, S1, repeated]; the statistic has one value for each query,
        which is repeated.
        """
        return x.transpose(1, 0, 2)[None] if self.layout == "TND" else x


def heads_first(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    """Return a view [B, heads, S, D] of a tensor in one of LAYOUTS."""
    if layout == "TND":
        return x.transpose(1, 0, 2)[None]
    if "H" in layout:
        x = x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)  # no copy: MindSpore's tensors are contiguous
    return x.transpose(_ORDERS[layout])


def _refuse(name: str, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {argument} is given, but this CPU kernel does not support it")


def _call(
    name: str, tensors: tuple[np.ndarray, ...], mask: Any, ends: tuple[Any, ...], settings: tuple[Any, ...]
) -> Call:
    heads, keep_prob, scale, before, behind, _, layout, sparse = settings
    if keep_prob != 1:
        raise NotImplementedError(f"{name}: keep_prob must be 1, not {keep_prob}: this CPU kernel has no dropout")
    layout = _layout(name, layout)
    if sparse not in range(5):
        raise NotImplementedError(f"{name}: sparse_mode {sparse} is not supported by this CPU kernel")
    if mask is not None and not (isinstance(mask, np.ndarray) and mask.dtype.name in ("bool", "uint8")):
        raise ValueError(f"{name}: attn_mask must be a tensor of bool or uint8, but is {_form(mask)}")
    if layout != "TND" and any(item is not None for item in ends):
        raise NotImplementedError(f"{name}: actual_seq_qlen and actual_seq_kvlen need layout TND, not {layout}")
    query_ends, key_ends = (
        None if layout != "TND" else _ends(name, argument, item)
        for argument, item in zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True)
    )
    query, key, value = tensors
    call = Call(name, query, key, value, mask, query_ends, key_ends, heads, scale, before, behind, layout, sparse)
    _check_heads(call)
    return call


def _layout(name: str, layout: Any) -> str:
    text = (LAYOUTS + _OTHER_LAYOUTS)[layout] if isinstance(layout, int) and 0 <= layout < 10 else str(layout)
    if text not in LAYOUTS:
        raise NotImplementedError(f"{name}: input_layout {text} is not supported by this CPU kernel")
    return text


def _ends(name: str, argument: str, ends: Any) -> np.ndarray:
    if not isinstance(ends, (tuple, list, np.ndarray)):
        raise ValueError(
            f"{name}: {argument} must be a list or tensor with the end of each document, but is {_form(ends)}"
        )
    return np.asarray(ends).reshape(-1)


def _form(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, np.ndarray) else repr(x)


def _check_heads(call: Call) -> None:
    heads, key_heads = call.heads, call.key_heads
    if not key_heads or heads % key_heads:
        raise ValueError(f"{call.name}: head_num {heads} is not a multiple of the {key_heads} heads of keys and values")
    wanted, found = call.queries.shape[-1], call.keys.shape[-1]
    if call.queries.shape[1] != heads or wanted != found:
        raise ValueError(
            f"{call.name}: query {call.query.shape} and key {call.key.shape} do not fit head_num {heads} in layout "
            f"{call.layout}"
        )


class Block(NamedTuple):
    """A `Block` holds a range of query rows of one sample, and the range of keys that contains every key to which any
    of these rows may attend.

    Args:
        batch: the number of the sample.
        rows, columns: the positions in the sequences of queries and keys.
        hidden: True where a row must not attend, broadcasting to [heads, rows, columns]; None if nothing is masked.
    """

    batch: int
    rows: slice
    columns: slice
    hidden: np.ndarray | None


class _Part(NamedTuple):
    """A `_Part` is a sample or, in the layout TND, a document: where its rows and columns begin,
    and how many it has.
    """

    batch: int
    first_row: int
    rows: int
    first_column: int
    columns: int


def blocks_of(call: Call) -> Iterator[Block]:
    """Yield blocks of query rows; all blocks together hold each row once.

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
                    f"{call.name}: with sparse_mode {call.sparse} a query attends to no key: {part.rows} queries, "
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
    """Return the samples or documents; documents without queries are left out (the list of ends is padded by repeating
    the last).
    """
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
            f"{call.name}: actual_seq_qlen {_short(ends)} must rise and end at {rows}, the number of queries; "
            f"actual_seq_kvlen {_short(key_ends)} must rise and end at {columns}, the number of keys, or below; and "
            "both must have equally many entries"
        )
    documents = zip(starts, ends, key_starts, key_ends, strict=True)
    return [_Part(0, a, b - a, c, d - c) for a, b, c, d in documents if b > a]


def _band(call: Call, part: _Part) -> tuple[int, int]:
    """Return (lower, upper): query i of a part may see keys i + lower to i + upper."""
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
    """Return [1, rows, columns], which is True where a key lies outside the band; None if every key lies inside it."""
    if start - first >= lower + (last - 1 - first) and stop - 1 - first <= upper:
        return None
    distance = np.arange(start, stop) - np.arange(first, last)[:, None]
    return ((distance < lower) | (distance > upper))[None]


def _explicit_mask(call: Call) -> np.ndarray | None:
    """Return the mask of modes 0 and 1, bool [1 or B, 1 or heads, S1, S2]; check the mask of the other modes and
    return None.
    """
    mask = call.mask
    if call.sparse in (2, 3, 4):
        if mask is None or mask.shape != (_COMPRESSED, _COMPRESSED):
            raise ValueError(
                f"{call.name}: sparse_mode {call.sparse} needs an attn_mask of shape (2048, 2048), not {_shape(mask)}"
            )
        if not np.array_equal(np.ascontiguousarray(mask).view(np.uint64), _above_diagonal()):
            raise ValueError(f"{call.name}: sparse_mode {call.sparse} needs an attn_mask of ones above the diagonal")
        return None
    if call.layout == "TND":
        raise NotImplementedError(
            f"{call.name}: sparse_mode {call.sparse} is not supported by this CPU kernel in layout TND"
        )
    if mask is None:
        if call.sparse == 1:
            raise ValueError(f"{call.name}: sparse_mode 1 needs an attn_mask")
        return None
    batch, heads, rows, _ = call.queries.shape
    columns = call.keys.shape[2]
    wanted = {(batch, heads, rows, columns), (batch, 1, rows, columns), (1, 1, rows, columns), (rows, columns)}
    if mask.shape not in wanted:
        raise ValueError(f"{call.name}: attn_mask {mask.shape} does not fit {rows} queries and {columns} keys")
    return mask.reshape((1,) * (4 - mask.ndim) + mask.shape).astype(bool, copy=False)


@functools.cache
def _above_diagonal() -> np.ndarray:
    """Return the compressed mask, eight elements in each integer, because every call compares it."""
    return np.triu(np.ones((_COMPRESSED, _COMPRESSED), np.uint8), 1).view(np.uint64)


def _shape(mask: np.ndarray | None) -> str:
    return "none" if mask is None else str(mask.shape)


def _short(ends: list[int]) -> str:
    return str(ends) if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ... {ends[-1]}]"


@kernel()
def FlashAttentionScore(attrs: Attrs, *inputs: Any) -> tuple[np.ndarray | None, ...]:
    """Return the outputs of the operator: softmax_max, softmax_sum, softmax_out and the result of the attention.

    Args:
        inputs: query, key, value, real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen,
            actual_seq_kvlen and eight settings.

    Raises:
        NotImplementedError: the call needs dropout, a position bias, a padding mask, prefixes, or an unsupported layout
            or sparse mode.
        ValueError: the mask or the ends of documents do not have the form of the sparse mode.
    """
    name = "FlashAttentionScore"
    _refuse(name, real_shift=inputs[3], drop_mask=inputs[4], padding_mask=inputs[5], prefix=inputs[7])
    call = _call(name, inputs[:3], inputs[6], inputs[8:10], inputs[-_SETTINGS:])
    out = call.empty_output()
    top, total = call.empty_statistics(), call.empty_statistics()
    q, k, v, scale = call.queries, call.keys, call.values, np.float32(call.scale)
    outs, tops, totals = call.view(out), call.statistics_view(top), call.statistics_view(total)
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        weights = _scores(q[b, :, rows] * scale, k[b, :, cols], block)
        highest = weights.max(-1, keepdims=True)
        weights -= highest
        np.exp(weights, out=weights)
        summed = weights.sum(-1, keepdims=True)
        outs[b, :, rows] = from_keys(weights, v[b, :, cols]) / summed
        tops[b, :, rows], totals[b, :, rows] = highest, summed
    return top, total, None, out


@kernel()
def FlashAttentionScoreGrad(attrs: Attrs, *inputs: Any) -> tuple[np.ndarray | None, ...]:
    """Return the gradients of query, key and value; a position bias gets no gradient.

    Args:
        inputs: query, key, value, dy, pse_shift, drop_mask, padding_mask, atten_mask, softmax_max, softmax_sum,
            softmax_in, attention_in, prefix, actual_seq_qlen, actual_seq_kvlen and eight settings.

    Raises:
        NotImplementedError, ValueError: as FlashAttentionScore does.
    """
    name = "FlashAttentionScoreGrad"
    _refuse(name, pse_shift=inputs[4], drop_mask=inputs[5], padding_mask=inputs[6], prefix=inputs[12])
    call = _call(name, inputs[:3], inputs[7], inputs[13:15], inputs[-_SETTINGS:])
    dy, top, total, out = inputs[3], inputs[8], inputs[9], inputs[11]
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (call.query, call.key, call.value))
    dqs, dks, dvs = (call.view(x, owner) for x, owner in ((dq, "query"), (dk, "key"), (dv, "value")))
    q, k, v, scale = call.queries, call.keys, call.values, np.float32(call.scale)
    dys, outs, groups = call.view(dy), call.view(out), k.shape[1]
    tops, totals = call.statistics_view(top)[..., :1], call.statistics_view(total)[..., :1]
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        scaled, highest = q[b, :, rows] * scale, tops[b, :, rows]
        weights = _scores(scaled, k[b, :, cols], block)
        weights -= highest
        np.exp(weights, out=weights)
        dy = dys[b, :, rows] / totals[b, :, rows]  # what the weights are divided by
        dvs[b, :, cols] += to_keys(weights, dy, groups)
        dscores = with_keys(dy, v[b, :, cols])
        dscores -= (dy * outs[b, :, rows]).sum(-1, keepdims=True)
        dscores *= weights
        if block.hidden is not None and (highest == _HIDDEN).any():
            dscores *= highest > _HIDDEN
        dqs[b, :, rows] = from_keys(dscores, k[b, :, cols]) * scale
        dks[b, :, cols] += to_keys(dscores, scaled, groups)
    return dq, dk, dv, None


def _scores(q: np.ndarray, k: np.ndarray, block: Block) -> np.ndarray:
    """Return the scores [heads, rows, columns]; hidden scores have the smallest number of the type."""
    scores = with_keys(q, k)
    if block.hidden is not None:
        np.copyto(scores, _HIDDEN, where=block.hidden)
    return scores
