"""What a rank computes by itself, forward and backward, and the choices in which implementations go wrong."""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis."""
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps) * weight


def rms_norm_backward(x: Array, weight: Array, eps: float, d_out: Array) -> tuple[Array, Array]:
    """Gradients of x, and of the weight summed over all rows."""
    r = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    d_scaled = d_out * weight
    d_x = r * (d_scaled - x * r * r * (d_scaled * x).mean(-1, keepdims=True))
    return d_x, (d_out * x * r).reshape(-1, x.shape[-1]).sum(0)


def rope(x: Array, positions: Array, theta: float, sign: int = 1) -> Array:
    """Rotate x [B, S, n, d] by its positions [S]; sign -1 rotates back, which is the gradient."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], sign * np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def softmax_backward(weights: Array, d_out: Array) -> Array:
    """Gradient of the scores; `weights` is the softmax, last axis normalised."""
    return weights * (d_out - (d_out * weights).sum(-1, keepdims=True))


def linear(x: Array, weight: Array) -> Array:
    """x [..., k] times weight [k, ...] -> [..., ...]."""
    return (x @ weight.reshape(len(weight), -1)).reshape(*x.shape[:-1], *weight.shape[1:])


def linear_backward(x: Array, weight: Array, d_out: Array) -> tuple[Array, Array]:
    """Gradients of x and weight of `linear`."""
    flat = d_out.reshape(*x.shape[:-1], -1)
    d_weight = x.reshape(-1, x.shape[-1]).T @ flat.reshape(-1, flat.shape[-1])
    return flat @ weight.reshape(len(weight), -1).T, d_weight.reshape(weight.shape)


class Kernels:
    """The right choices. A fault is a subclass with one method wrong.

    Arguments named `rank` are indices into the world's lists.
    """

    def softmax(self, rank: int, scores: Array) -> Array:
        """Over the last axis."""
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def first_position(self, part: int, length: int) -> int:
        """Position of the first token of part `part` of a sequence that is split into parts of `length`."""
        return part * length

    def expert_weights(self, rank: int, weight: Array) -> Array:
        """The weights [E, ...] of the experts of a rank."""
        return weight

    def combine_probs(self, rank: int, probs: Array) -> Array:
        """The probabilities [N, k] by which expert outputs are weighted when they return to a rank's tokens."""
        return probs

    def loss_divisor(self, micro: int, dp: int, cp: int, tp: int) -> float:
        """What each rank's mean loss is divided by before the sum over all ranks and micro-batches."""
        return micro * dp * cp * tp

    def seed_divisor(self, micro: int, dp: int, cp: int, tp: int) -> float:
        """The same of the gradient with which backward begins."""
        return micro * dp * cp * tp

    def activations_of(self, turn: int, newest: int) -> int:
        """The micro-batch whose activations the backward pass of `turn` uses; `newest` was the last to go forward."""
        return turn

    def accumulate(self, total: Array, gradient: Array) -> Array:
        """The gradient of one more micro-batch added."""
        return total + gradient

    def decays(self, name: str, dimensions: int) -> bool:
        """Whether AdamW decays a weight: matrices, not the scales of norms."""
        return dimensions > 1
