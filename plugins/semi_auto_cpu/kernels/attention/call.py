"""The arguments of FlashAttentionScore and FlashAttentionScoreGrad, in one form for all layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

LAYOUTS = ("BSH", "BNSD", "SBH", "BSND", "TND")  # by number: op_enum.h's FASInputLayoutMode
_OTHER_LAYOUTS = ("TH", "NSD", "SH", "BNSD_BSND", "PA_BSND")
_SETTINGS = 8  # head_num, keep_prob, scale_value, pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode
_ORDERS = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3)}


class Saved(NamedTuple):
    """What the forward pass left, and the gradient of its result."""

    dy: np.ndarray
    out: np.ndarray
    top: np.ndarray
    total: np.ndarray


@dataclass(frozen=True)
class Call:
    """One call.

    Args:
        name: of the operator, for messages.
        query, key, value: in `layout`.
        mask: 1 where a query must not look, as the sparse mode wants it; None if there is none.
        query_ends, key_ends: where the documents end in TND, cumulative; None in other layouts.
        heads: of the query.
        scale: of the scores.
        before, behind: tokens that a query sees to its left and right (`pre_tokens`, `next_tokens`).
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
        """Heads of keys and values; each serves an equal number of the query's."""
        if "H" not in self.layout:
            return self.key.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[self.layout]]
        return self.key.shape[-1] * self.heads // self.query.shape[-1]

    @property
    def queries(self) -> np.ndarray:
        """[B, heads, S1, D]; a view, as the other two."""
        return self.view(self.query)

    @property
    def keys(self) -> np.ndarray:
        """[B, key heads, S2, D]."""
        return self.view(self.key, "key")

    @property
    def values(self) -> np.ndarray:
        """[B, key heads, S2, D of the values]."""
        return self.view(self.value, "value")

    def view(self, x: np.ndarray, owner: str = "query") -> np.ndarray:
        """What has the layout of `owner` as [B, heads, S, D]; writing into it writes into `x`."""
        return heads_first(x, self.layout, self.heads if owner == "query" else self.key_heads)

    def empty_output(self) -> np.ndarray:
        """Room for the attention: the query's shape with the values' head size."""
        head = self.values.shape[-1]
        width = head * self.heads if "H" in self.layout else head
        return np.empty((*self.query.shape[:-1], width), np.float32)

    def empty_statistics(self, repeated: int) -> np.ndarray:
        """[B, heads, S1, repeated], in TND [T, heads, repeated]."""
        batch, heads, rows, _ = self.queries.shape
        shape = (rows, heads, repeated) if self.layout == "TND" else (batch, heads, rows, repeated)
        return np.empty(shape, np.float32)

    def statistics_view(self, x: np.ndarray) -> np.ndarray:
        """As [B, heads, S1, repeated]."""
        return x.transpose(1, 0, 2)[None] if self.layout == "TND" else x


def heads_first(x: np.ndarray, layout: str, heads: int) -> np.ndarray:
    """A view [B, heads, S, D] of a tensor in one of LAYOUTS."""
    if layout == "TND":
        return x.transpose(1, 0, 2)[None]
    if "H" in layout:
        x = x.reshape(*x.shape[:2], heads, x.shape[-1] // heads)  # no copy: MindSpore's tensors are contiguous
    return x.transpose(_ORDERS[layout])


def forward_call(inputs: tuple[Any, ...]) -> Call:
    """What FlashAttentionScore is called with.

    Args:
        inputs: query, key, value, real_shift, drop_mask, padding_mask, attn_mask, prefix, actual_seq_qlen,
            actual_seq_kvlen and eight settings.
    """
    name = "FlashAttentionScore"
    _refuse(name, real_shift=inputs[3], drop_mask=inputs[4], padding_mask=inputs[5], prefix=inputs[7])
    return _call(name, inputs[:3], inputs[6], inputs[8:10], inputs[-_SETTINGS:])


def backward_call(inputs: tuple[Any, ...]) -> tuple[Call, Saved]:
    """What FlashAttentionScoreGrad is called with.

    Args:
        inputs: query, key, value, dy, pse_shift, drop_mask, padding_mask, atten_mask, softmax_max, softmax_sum,
            softmax_in, attention_in, prefix, actual_seq_qlen, actual_seq_kvlen and eight settings.
    """
    name = "FlashAttentionScoreGrad"
    _refuse(name, pse_shift=inputs[4], drop_mask=inputs[5], padding_mask=inputs[6], prefix=inputs[12])
    call = _call(name, inputs[:3], inputs[7], inputs[13:15], inputs[-_SETTINGS:])
    return call, Saved(dy=inputs[3], out=inputs[11], top=inputs[8], total=inputs[9])


def _refuse(name: str, **arguments: Any) -> None:
    for argument, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name}: {argument} is not None")


def _call(
    name: str, tensors: tuple[np.ndarray, ...], mask: Any, ends: tuple[Any, ...], settings: tuple[Any, ...]
) -> Call:
    heads, keep, scale, before, behind, _, layout, sparse = settings
    if keep != 1:
        raise NotImplementedError(f"{name}: keep_prob {keep}: no dropout")
    layout = _layout(name, layout)
    if sparse not in range(5):
        raise NotImplementedError(f"{name}: sparse_mode {sparse}")
    if mask is not None and not (isinstance(mask, np.ndarray) and mask.dtype.name in ("bool", "uint8")):
        raise ValueError(f"{name}: attn_mask is {_form(mask)}, not a tensor of bool or uint8")
    if layout != "TND" and any(item is not None for item in ends):
        raise NotImplementedError(f"{name}: actual_seq_qlen, actual_seq_kvlen in layout {layout}")
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
        raise NotImplementedError(f"{name}: input_layout {text}")
    return text


def _ends(name: str, argument: str, ends: Any) -> np.ndarray:
    if not isinstance(ends, (tuple, list, np.ndarray)):
        raise ValueError(f"{name}: {argument} is {_form(ends)}, not the ends of the documents")
    return np.asarray(ends).reshape(-1)


def _form(x: Any) -> str:
    return f"a tensor of {x.dtype}" if isinstance(x, np.ndarray) else repr(x)


def _check_heads(call: Call) -> None:
    heads, key_heads = call.heads, call.key_heads
    if not key_heads or heads % key_heads:
        raise ValueError(f"{call.name}: head_num {heads} is no multiple of the {key_heads} heads of keys and values")
    wanted, found = call.queries.shape[-1], call.keys.shape[-1]
    if call.queries.shape[1] != heads or wanted != found:
        raise ValueError(
            f"{call.name}: head_num {heads}, layout {call.layout}: query {call.query.shape}, key {call.key.shape}"
        )
