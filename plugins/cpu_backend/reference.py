"""This module computes attention, forward and backward, in the most direct way in NumPy, as the reference for the
attention of `plugins.cpu_backend`. (`plugins.hierarchical_ep.reference` is the reference of the backend's experts.)
"""

from __future__ import annotations

import numpy as np


def document_mask(breaks):
    """Return the dense mask that GPTDataset delivers with `reset_attention_mask`, computed pair by pair of tokens.

    Args:
        breaks: [B, S - 1], not 0 at i where token i + 1 begins a document.

    Returns:
        int32 [B, 1, S, S], 1 where the row's token must not see the column's.
    """
    batch, length = len(breaks), breaks.shape[1] + 1
    mask = np.ones((batch, 1, length, length), np.int32)
    for sample, row, column in np.ndindex(batch, length, length):
        if column <= row and not breaks[sample, column:row].any():
            mask[sample, 0, row, column] = 0
    return mask


def attention(query, key, value, mask, scale):
    """Return softmax(Q K^T * scale, masked) V, computed head by head.

    Args:
        query: [S, B, N, D].
        key: [S, B, G, D].
        value: [S, B, G, Dv].
        mask: [B, 1, S, S], 1 where forbidden. Each of the G heads of keys and values is repeated for the N / G query
            heads that share it.

    Returns:
        [S, B, N * Dv] and the weights [B, N, S, S].
    """
    key, value = (np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = np.einsum("ibnd,jbnd->bnij", query, key) * scale
    scores = np.where(mask == 1, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bnij,jbnd->ibnd", weights, value)
    return out.reshape(out.shape[0], out.shape[1], -1), weights


def attention_gradients(query, key, value, mask, scale, dout):
    """Return the gradients of `attention` with respect to query, key and value; dout is [S, B, N * Dv]."""
    _, weights = attention(query, key, value, mask, scale)
    heads, groups = query.shape[2], key.shape[2]
    keys, values = (np.repeat(x, heads // groups, axis=2) for x in (key, value))
    dout = dout.reshape(values.shape)
    dvalues = np.einsum("bnij,ibnd->jbnd", weights, dout)
    dweights = np.einsum("ibnd,jbnd->bnij", dout, values)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True)) * scale
    dkeys = np.einsum("bnij,ibnd->jbnd", dscores, query)
    # what a head of keys and values gets from each of the query heads that share it
    dkey, dvalue = (x.reshape(*x.shape[:2], groups, heads // groups, -1).sum(3) for x in (dkeys, dvalues))
    return np.einsum("bnij,jbnd->ibnd", dscores, keys), dkey, dvalue
