"""This module computes RoPE with YaRN in NumPy, element by element, forward and backward."""

from __future__ import annotations

import math

import numpy as np

from plugins.yarn.plan import Yarn


def frequencies(yarn: Yarn, head_dim: int, base: float) -> np.ndarray:
    """Return the angle by which each pair of dimensions turns from one position to the next, float64 [head_dim / 2].

    A pair that turns `n` times within the original length is placed on a ramp between the pairs that turn `beta_fast`
    and `beta_slow` times; both ends of the ramp are rounded outwards to whole pairs.
    """
    found = []
    first = max(math.floor(_pair_that_turns(yarn.beta_fast, yarn, head_dim, base)), 0)
    last = min(math.ceil(_pair_that_turns(yarn.beta_slow, yarn, head_dim, base)), head_dim - 1)
    for pair in range(head_dim // 2):
        plain = base ** (-2 * pair / head_dim)
        ramp = (pair - first) / (last - first) if last > first else (pair - first) / 0.001
        stretched = min(max(ramp, 0.0), 1.0)  # 0: as it was trained; 1: divided by the factor
        found.append((1 - stretched) * plain + stretched * plain / yarn.factor)
    return np.array(found)


def _pair_that_turns(times: float, yarn: Yarn, head_dim: int, base: float) -> float:
    """Return the index (usually not an integer) of the pair of dimensions that makes this number of turns within the
    original length.
    """
    return head_dim * math.log(yarn.original / (times * 2 * math.pi)) / (2 * math.log(base))


def rotate(x: np.ndarray, yarn: Yarn, base: float, backwards: bool = False) -> np.ndarray:
    """Return queries or keys [S, B, N, D] rotated to positions 0 to S - 1; dimension i forms a pair with dimension i +
    D / 2.

    With `backwards` the function returns the gradient with respect to `x` for a gradient [S, B, N, D] of the result:
    pairs are rotated back, and multiplied by the same attention factor.
    """
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None, None] * frequencies(yarn, x.shape[-1], base)
    cos, sin = np.cos(angles), np.sin(angles) * (-1 if backwards else 1)
    first, second = x[..., :half], x[..., half:]
    turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)
    return yarn.attention_factor * turned
