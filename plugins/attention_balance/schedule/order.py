"""Sorting and gathering rows of integers, quickly and with ties by position. NumPy only."""

from __future__ import annotations

import numpy as np


def falling_order(weights: np.ndarray) -> np.ndarray:
    """int64 [rows, n]: indices that sort each row of `weights` (int64, at least 0) falling; equal ones by index.

    Weight and index are sorted as one number: all are different, so the fast unstable sort gives the stable result.
    """
    count = weights.shape[1]
    bits = max(count - 1, 1).bit_length()
    top = int(weights.max(initial=0))
    if top.bit_length() + bits > 62:
        return np.argsort(-weights, axis=1, kind="stable")
    keys = np.left_shift(top - weights, bits)
    keys |= np.arange(count)
    keys.sort(axis=1)
    keys &= (1 << bits) - 1
    return keys


def taken(values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """values [rows, n] at indices [rows, ...], row by row: the shape of `indices`."""
    rows, count = values.shape
    if rows == 1:
        return values[0].take(indices)
    flat = indices.reshape(rows, -1) + np.arange(rows)[:, None] * count
    return values.ravel().take(flat).reshape(indices.shape)
