"""This module computes in NumPy, in an obvious way, forward and backward, everything that `plugins.cpu_backend`
replaces.
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
        query: [S, B, N, D]; key: [S, B, G, D]; value: [S, B, G, Dv]; mask: [B, 1, S, S], 1 where forbidden. Each of
            the G heads of keys and values is repeated for the N / G query heads that share it.

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


def swiglu(gate_up):
    """Return silu(gate) * up of [..., 2H], as [..., H]."""
    gate, up = np.split(gate_up, 2, -1)
    return gate / (1 + np.exp(-gate)) * up


def swiglu_gradient(gate_up, dout):
    """Return the gradient of `swiglu`, [..., 2H]."""
    gate, up = np.split(gate_up, 2, -1)
    sigmoid = 1 / (1 + np.exp(-gate))
    return np.concatenate([dout * up * sigmoid * (1 + gate * (1 - sigmoid)), dout * gate * sigmoid], -1)


def experts(tokens, probs, chosen, w1, w2):
    """Run every token through each of its experts, one pair at a time; return the weighted sums.

    Args:
        tokens: [N, h]; probs, chosen: [N, k]; w1: [E, h, 2H]; w2: [E, H, h].

    Returns:
        [N, h].
    """
    out = np.zeros_like(tokens)
    for n, k in np.ndindex(chosen.shape):
        expert = chosen[n, k]
        out[n] += probs[n, k] * (swiglu(tokens[n] @ w1[expert]) @ w2[expert])
    return out


def experts_gradients(tokens, probs, chosen, w1, w2, dout):
    """Return the gradients of `experts` with respect to tokens, probs, w1 and w2; dout is [N, h]."""
    dtokens, dprobs = np.zeros_like(tokens), np.zeros_like(probs)
    dw1, dw2 = np.zeros_like(w1), np.zeros_like(w2)
    for n, k in np.ndindex(chosen.shape):
        expert = chosen[n, k]
        gate_up = tokens[n] @ w1[expert]
        hidden = swiglu(gate_up)
        dprobs[n, k] = dout[n] @ (hidden @ w2[expert])
        dexpert = probs[n, k] * dout[n]
        dw2[expert] += np.outer(hidden, dexpert)
        dgate_up = swiglu_gradient(gate_up, dexpert @ w2[expert].T)
        dw1[expert] += np.outer(tokens[n], dgate_up)
        dtokens[n] += w1[expert] @ dgate_up
    return dtokens, dprobs, dw1, dw2
