"""Causal attention inside documents, at the cost of the documents: blocks of queries against their keys. NumPy only.

The dense form multiplies S x S scores and masks most of them. Here a document's queries go in blocks of at most
`BLOCK`, each against the keys from its document's start to the block's end: a document of n tokens costs about
n * (n + BLOCK) / 2 scores, which follows the attending pairs n * (n + 1) / 2 that `plugins/attention_balance` counts,
and memory grows with BLOCK * n instead of S * S. Backward makes the scores again from the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

BLOCK = 128  # queries; smaller ones waste fewer masked scores, larger ones make better matmuls

_LATER = np.triu(np.ones((BLOCK, BLOCK), bool), 1)


def blocks(breaks: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (start of the document, first query, end of the queries) of each block of one sample.

    breaks: [S - 1]; entry i is not 0 where token i + 1 begins a document.
    """
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    for start, end in zip(starts, [*starts[1:], len(breaks) + 1], strict=True):
        for first in range(start, end, BLOCK):
            yield start, first, min(first + BLOCK, end)


def forward(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, breaks: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """softmax(Q K^T * scale) V within each document, causal.

    Args:
        query, key: [S, B, N, D]; value: [S, B, N, Dv]; breaks: [B, S - 1], see `blocks`.

    Returns:
        [S, B, N, Dv], and the log-sum-exp of each row's scores [B, N, S].
    """
    length, batch, heads, _ = query.shape
    out = np.empty(value.shape, value.dtype)
    log_sum = np.empty((batch, heads, length), query.dtype)
    for sample in range(batch):
        q, k, v, o = (_heads_first(x, sample) for x in (query, key, value, out))
        for start, first, end in blocks(breaks[sample]):
            scores = _scores(q, k, start, first, end, scale)
            top = scores.max(-1, keepdims=True)
            scores -= top
            np.exp(scores, out=scores)
            total = scores.sum(-1, keepdims=True)
            o[:, first:end] = np.matmul(scores, v[:, start:end]) / total
            log_sum[sample, :, first:end] = (top + np.log(total))[..., 0]
    return out, log_sum


def backward(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    breaks: np.ndarray,
    out: np.ndarray,
    log_sum: np.ndarray,
    dout: np.ndarray,
    scale: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `forward` with respect to query, key and value; out, log_sum: its results; dout: as `out`."""
    gradients = np.empty(query.shape, query.dtype), np.zeros(key.shape, key.dtype), np.zeros(value.shape, value.dtype)
    inner = (out * dout).sum(-1).transpose(1, 2, 0)[..., None]  # [B, N, S, 1]
    for sample in range(len(breaks)):
        q, k, v, do, dq, dk, dv = (_heads_first(x, sample) for x in (query, key, value, dout, *gradients))
        for start, first, end in blocks(breaks[sample]):
            rows, keys = np.s_[:, first:end], np.s_[:, start:end]
            weights = _scores(q, k, start, first, end, scale)
            weights -= log_sum[sample][rows][..., None]
            np.exp(weights, out=weights)
            dv[keys] += np.matmul(weights.transpose(0, 2, 1), do[rows])
            dscores = np.matmul(do[rows], v[keys].transpose(0, 2, 1))
            dscores -= inner[sample][rows]
            dscores *= weights
            dscores *= scale
            dq[rows] = np.matmul(dscores, k[keys])
            dk[keys] += np.matmul(dscores.transpose(0, 2, 1), q[rows])
    return gradients


def _heads_first(x: np.ndarray, sample: int) -> np.ndarray:
    """A view of one sample: [S, B, N, D] -> [N, S, D]; BLAS takes its strides as they are."""
    return x[:, sample].transpose(1, 0, 2)


def _scores(q: np.ndarray, k: np.ndarray, start: int, first: int, end: int, scale: float) -> np.ndarray:
    """Scores [N, queries, keys] of one block, -inf where a key comes after its query: only in the last square."""
    scores = np.matmul(q[:, first:end], k[:, start:end].transpose(0, 2, 1))
    scores *= scale
    size = end - first
    scores[:, :, first - start :][:, _LATER[:size, :size]] = -np.inf
    return scores
