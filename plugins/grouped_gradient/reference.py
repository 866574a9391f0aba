"""This module computes the sum over micro-batches of a gradient of grouped weights in NumPy, as a reference for
tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def summed(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], ends: Sequence[int], kind: np.dtype, rounded: bool
) -> np.ndarray:
    """Return the sum as float32 [groups * k, n].

    Args:
        batches: of each micro-batch the rows that the weights were multiplied with, [m, k], and the gradient of what
            came of it, [m, n]; both of type `kind`.
        ends: where each group's rows end.
        rounded: whether each micro-batch's gradient is rounded to `kind` before it is added (GroupedMatmul, then
            AssignAdd) or not (InplaceGroupedMatmulAdd).
    """
    total = np.float32(0)
    for x, dout in batches:
        x, dout = x.astype(np.float32), dout.astype(np.float32)
        groups = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        gradient = np.concatenate([x[rows].T @ dout[rows] for rows in groups])
        total = total + (gradient.astype(kind).astype(np.float32) if rounded else gradient)
    return np.asarray(total)
