"""FlashAttentionScore and its gradient.

Sources: the class in `mindspore/ops/auto_generate/gen_ops_prim.py` (inputs, layouts, sparse modes) and
`op_enum.h`'s FASInputLayoutMode. `call.py` reads the arguments, `blocks.py` says what sees what.

`softmax_max` and `softmax_sum` repeat each row's number eight times, `softmax_out` has no use. A row that an explicit
mask hides altogether weighs all keys alike, as a softmax of equal scores does, and hands no gradient to its scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.attention.blocks import Block, blocks_of
from plugins.semi_auto_cpu.kernels.attention.call import backward_call, forward_call
from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel

_HIDDEN = np.finfo(np.float32).min  # a score that exp() turns into 0 beside any other
_REPEATED = 8


@kernel()
def FlashAttentionScore(attrs: Attrs, *inputs: Any) -> tuple[np.ndarray | None, ...]:
    """softmax_max, softmax_sum, softmax_out and the attention.

    Raises:
        NotImplementedError: dropout, a position bias, a padding mask, prefixes, layouts and sparse modes not covered.
        ValueError: a mask or document ends of another form than the sparse mode asks for.
    """
    call = forward_call(inputs)
    out = call.empty_output()
    top, total = call.empty_statistics(_REPEATED), call.empty_statistics(_REPEATED)
    q, k, v, scale = call.queries, call.keys, call.values, np.float32(call.scale)
    outs, tops, totals = call.view(out), call.statistics_view(top), call.statistics_view(total)
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        weights = _scores(q[b, :, rows] * scale, k[b, :, cols], block)
        highest = weights.max(-1, keepdims=True)
        weights -= highest
        np.exp(weights, out=weights)
        summed = weights.sum(-1, keepdims=True)
        outs[b, :, rows] = _from_keys(weights, v[b, :, cols]) / summed
        tops[b, :, rows], totals[b, :, rows] = highest, summed
    return top, total, None, out


@kernel()
def FlashAttentionScoreGrad(attrs: Attrs, *inputs: Any) -> tuple[np.ndarray | None, ...]:
    """Gradients of query, key, value; none of a position bias.

    Raises:
        NotImplementedError, ValueError: as FlashAttentionScore does.
    """
    call, saved = backward_call(inputs)
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (call.query, call.key, call.value))
    dqs, dks, dvs = (call.view(x, owner) for x, owner in ((dq, "query"), (dk, "key"), (dv, "value")))
    q, k, v, scale = call.queries, call.keys, call.values, np.float32(call.scale)
    dys, outs, groups = call.view(saved.dy), call.view(saved.out), k.shape[1]
    tops, totals = call.statistics_view(saved.top)[..., :1], call.statistics_view(saved.total)[..., :1]
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        scaled, highest = q[b, :, rows] * scale, tops[b, :, rows]
        weights = _scores(scaled, k[b, :, cols], block)
        weights -= highest
        np.exp(weights, out=weights)
        dy = dys[b, :, rows] / totals[b, :, rows]  # what the weights are divided by
        dvs[b, :, cols] += _to_keys(weights, dy, groups)
        dscores = _with_keys(dy, v[b, :, cols])
        dscores -= (dy * outs[b, :, rows]).sum(-1, keepdims=True)
        dscores *= weights
        if block.hidden is not None and (highest == _HIDDEN).any():
            dscores *= highest > _HIDDEN
        dqs[b, :, rows] = _from_keys(dscores, k[b, :, cols]) * scale
        dks[b, :, cols] += _to_keys(dscores, scaled, groups)
    return dq, dk, dv, None


def _scores(q: np.ndarray, k: np.ndarray, block: Block) -> np.ndarray:
    """[heads, rows, columns]; hidden ones at the least number."""
    scores = _with_keys(q, k)
    if block.hidden is not None:
        np.copyto(scores, _HIDDEN, where=block.hidden)
    return scores


def _grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """[heads, rows, n] -> [groups, heads of a group * rows, n]: heads of a group share keys and values."""
    return x if len(x) == groups else x.reshape(groups, -1, x.shape[-1])


def _with_keys(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[heads, rows, d] and [groups, columns, d] -> [heads, rows, columns]."""
    return (_grouped(x, len(keys)) @ keys.swapaxes(-1, -2)).reshape(*x.shape[:2], -1)


def _from_keys(weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[heads, rows, columns] and [groups, columns, d] -> [heads, rows, d]."""
    return (_grouped(weights, len(keys)) @ keys).reshape(*weights.shape[:2], -1)


def _to_keys(weights: np.ndarray, x: np.ndarray, groups: int) -> np.ndarray:
    """[heads, rows, columns] and [heads, rows, d] -> [groups, columns, d], summed over the heads of a group."""
    return _grouped(weights, groups).swapaxes(-1, -2) @ _grouped(x, groups)
