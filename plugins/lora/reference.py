"""This module computes a linear layer with an adapter, forward and backward, element by element in float64."""

from __future__ import annotations

import numpy as np


def forward(x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Return y [tokens, outputs] = x W^T + scale x A^T B^T.

    Args:
        x: [tokens, inputs].
        weight: [outputs, inputs].
        a: [rank, inputs].
        b: [outputs, rank].
    """
    y = np.zeros((len(x), len(weight)))
    for token, row in enumerate(x):
        thin = [sum(a[k, i] * row[i] for i in range(len(row))) for k in range(len(a))]
        for out in range(len(weight)):
            y[token, out] = sum(weight[out, i] * row[i] for i in range(len(row)))
            y[token, out] += scale * sum(b[out, k] * thin[k] for k in range(len(a)))
    return y


def backward(
    x: np.ndarray, weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float, dy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of sum(dy * y) with respect to x, A and B; W is frozen, so no gradient is returned for
    it.
    """
    dx, da, db = np.zeros(x.shape), np.zeros(a.shape), np.zeros(b.shape)
    for token, row in enumerate(x):
        for out in range(len(weight)):
            gradient = dy[token, out]
            for i in range(len(row)):
                dx[token, i] += gradient * weight[out, i]
                for k in range(len(a)):
                    dx[token, i] += gradient * scale * b[out, k] * a[k, i]
                    da[k, i] += gradient * scale * b[out, k] * row[i]
                    db[out, k] += gradient * scale * a[k, i] * row[i]
    return dx, da, db
