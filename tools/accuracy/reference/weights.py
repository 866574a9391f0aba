"""Weights that both sides start from: seeded, the same on every machine, chosen so that mistakes show. NumPy only."""

from __future__ import annotations

import zlib

import numpy as np

from tools.weights.hugging_face.names import Arrays, hugging_face_shapes
from tools.weights.hugging_face.sizes import Sizes

SMALL = 0.02  # the recipes' initializer_range, or twice that
# queries, keys and logits of order 1, so that attention is far from uniform and its scale and positions matter
_LARGE = ("q_b_proj.weight", "q_proj.weight", "kv_b_proj.weight", "lm_head.weight")


def initial_weights(sizes: Sizes, seed: int) -> Arrays:
    """Hugging Face name -> float32.

    Not quite what training starts from: norms are not 1 and biases not 0, so that leaving one out is seen. Weights
    are small elsewhere: with unit variance throughout, rounding alone moves the twentieth loss by 1e-3, because
    tokens change experts.
    """
    return {name: draw(name, shape, seed) for name, shape in hugging_face_shapes(sizes).items()}


def draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One weight under Hugging Face's name, float32; it depends on name, shape and seed only."""
    normal = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape)
    if name.endswith("e_score_correction_bias"):
        values = SMALL * normal
    elif len(shape) == 1:
        values = 1 + 0.1 * normal
    else:
        values = normal / np.sqrt(shape[1]) if name.endswith(_LARGE) else SMALL * normal
    return values.astype(np.float32)


def nudged(weights: Arrays) -> Arrays:
    """Every weight changed by one unit in its last place, up or down by chance: what rounding alone may do to a run."""
    random = np.random.default_rng(0)

    def nudge(array: np.ndarray) -> np.ndarray:
        towards = np.where(random.random(array.shape) < 0.5, np.inf, -np.inf).astype(np.float32)
        return np.nextafter(array, towards)

    return {name: nudge(array) for name, array in weights.items()}


def checksum(arrays: Arrays) -> int:
    """CRC-32 over names, shapes and bits, in the order of names."""
    total = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        total = zlib.crc32(f"{name}{array.shape}{array.dtype}".encode(), total)
        total = zlib.crc32(array.tobytes(), total)
    return total
