"""This module computes hyper-connections in NumPy, token by token, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.hyper_connections.plan import CLIP, EPSILON

Array = np.ndarray


@dataclass(frozen=True)
class Weights:
    """A `Weights` holds the weights of one sublayer's hyper-connections with n streams of width h.

    Args:
        fn: [2n + n n, n h].
        base: [2n + n n].
        scale: [3], of H_pre, H_post and H_res.
    """

    fn: Array
    base: Array
    scale: Array


def sinkhorn(matrix: Array, iterations: int) -> tuple[Array, list[tuple[Array, Array, int]]]:
    """Return a positive matrix [n, n] whose rows and then columns were divided by their sums `iterations` times, and
    the values that the backward pass needs: (result, sum, axis) of each division.
    """
    kept = []
    for _ in range(iterations):
        for axis in (1, 0):
            total = matrix.sum(axis, keepdims=True) + EPSILON
            matrix = matrix / total
            kept.append((matrix, total, axis))
    return matrix, kept


def sinkhorn_backward(gradient: Array, kept: list[tuple[Array, Array, int]]) -> Array:
    """Return the gradient with respect to the matrix that was passed to `sinkhorn`."""
    for result, total, axis in reversed(kept):
        gradient = (gradient - (gradient * result).sum(axis, keepdims=True)) / total
    return gradient


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gates_of(x: Array, weights: Weights, iterations: int, eps: float) -> tuple[Array, Array, Array, Any]:
    """Return H_pre [n], H_post [n], H_res [n, n] of the streams x [n, h] of a token, and the values that the backward
    pass needs.
    """
    n = len(x)
    flat = x.reshape(-1)
    rms = np.sqrt((flat**2).mean() + eps)
    unit = flat / rms
    w = weights.fn @ unit
    parts = np.split(w, [n, 2 * n])
    pre, post, logits = (
        part * scale + base
        for part, scale, base in zip(parts, weights.scale, np.split(weights.base, [n, 2 * n]), strict=True)
    )
    clipped = np.clip(logits, -CLIP, CLIP).reshape(n, n)
    powers = np.exp(clipped - clipped.max(1, keepdims=True))
    residual, kept = sinkhorn(powers, iterations)
    return _sigmoid(pre), 2 * _sigmoid(post), residual, (unit, rms, parts, logits, powers, kept)


def forward(x: Array, weights: Weights, sublayer: Any, iterations: int, eps: float) -> Array:
    """Return the streams [T, n, h] after a sublayer.

    Args:
        x: [T, n, h].
        sublayer: a function of [T, h] to [T, h].
        eps: the epsilon of the root mean square.
    """
    found = [gates_of(token, weights, iterations, eps) for token in x]
    out = sublayer(np.stack([pre @ token for token, (pre, *_) in zip(x, found, strict=True)]))
    return np.stack(
        [residual @ token + np.outer(post, y) for token, y, (_, post, residual, _) in zip(x, out, found, strict=True)]
    )


def backward(
    x: Array, weights: Weights, sublayer: Any, gradient_of_sublayer: Any, dout: Array, iterations: int, eps: float
) -> tuple[Array, Weights]:
    """Return the gradients with respect to x [T, n, h] and to the weights, for the gradient dout [T, n, h] of the
    result.

    Args:
        gradient_of_sublayer: a function of (input [T, h], gradient of the output [T, h]) to the gradient of the input.
    """
    n = x.shape[1]
    found = [gates_of(token, weights, iterations, eps) for token in x]
    read = np.stack([pre @ token for token, (pre, *_) in zip(x, found, strict=True)])
    out = sublayer(read)
    d_read = gradient_of_sublayer(read, np.stack([post @ d for d, (_, post, _, _) in zip(dout, found, strict=True)]))
    dx = np.zeros_like(x)
    d_fn, d_base, d_scale = (np.zeros_like(each) for each in (weights.fn, weights.base, weights.scale))
    for index, (token, (pre, post, residual, (unit, rms, parts, logits, powers, kept))) in enumerate(
        zip(x, found, strict=True)
    ):
        d, here = dout[index], d_read[index]
        dx[index] = residual.T @ d + np.outer(pre, here)
        d_powers = sinkhorn_backward(d @ token.T, kept)
        # without the gradient of the row's largest power, which Sinkhorn divides out but for its epsilon
        d_clipped = d_powers * powers
        inside = np.abs(logits) < CLIP
        d_gates = (
            (token @ here) * pre * (1 - pre),
            (d @ out[index]) * post * (1 - post / 2),
            d_clipped.reshape(-1) * inside,
        )
        d_base += np.concatenate(d_gates)
        d_scale += [part @ each for part, each in zip(parts, d_gates, strict=True)]
        d_w = np.concatenate([scale * each for scale, each in zip(weights.scale, d_gates, strict=True)])
        d_fn += np.outer(d_w, unit)
        d_unit = weights.fn.T @ d_w
        d_flat = (d_unit - unit * (unit @ d_unit) / unit.size) / rms
        dx[index] += d_flat.reshape(n, -1)
    return dx, Weights(d_fn, d_base, d_scale)
