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
from plugins.semi_auto_cpu.kernels.attention.call import Call, backward_call, forward_call
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
    q, k, v = call.queries, call.keys, call.values
    outs, tops, totals = call.view(out), call.statistics_view(top), call.statistics_view(total)
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        scores = _scores(q[b, :, rows], k[b, :, cols], block, call)
        highest = scores.max(-1, keepdims=True)
        scores -= highest
        np.exp(scores, out=scores)
        summed = scores.sum(-1, keepdims=True)
        outs[b, :, rows] = _from_keys(scores, v[b, :, cols]) / summed
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
    q, k, v = call.queries, call.keys, call.values
    dys, outs = call.view(saved.dy), call.view(saved.out)
    tops, totals = call.statistics_view(saved.top)[..., :1], call.statistics_view(saved.total)[..., :1]
    for block in blocks_of(call):
        b, rows, cols = block.batch, block.rows, block.columns
        dy, highest = dys[b, :, rows], tops[b, :, rows]
        weights = _scores(q[b, :, rows], k[b, :, cols], block, call)
        weights -= highest
        np.exp(weights, out=weights)
        weights /= totals[b, :, rows]
        dvs[b, :, cols] += _to_keys(weights, dy, call)
        dscores = _with_keys(dy, v[b, :, cols])
        dscores -= (dy * outs[b, :, rows]).sum(-1, keepdims=True)
        dscores *= weights
        dscores *= np.float32(call.scale)
        if block.hidden is not None:
            dscores *= highest > _HIDDEN
        dqs[b, :, rows] = _from_keys(dscores, k[b, :, cols])
        dks[b, :, cols] += _to_keys(dscores, q[b, :, rows], call)
    return dq, dk, dv, None


def _scores(q: np.ndarray, k: np.ndarray, block: Block, call: Call) -> np.ndarray:
    """[heads, rows, columns]; hidden ones at the least number."""
    scores = _with_keys(q, k)
    scores *= np.float32(call.scale)
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


def _to_keys(weights: np.ndarray, x: np.ndarray, call: Call) -> np.ndarray:
    """[heads, rows, columns] and [heads, rows, d] -> [groups, columns, d], summed over the heads of a group."""
    groups = call.keys.shape[1]
    return _grouped(weights, groups).swapaxes(-1, -2) @ _grouped(x, groups)
