"""This module sums the weight gradients of a grouped matmul over micro-batches in NumPy, as a reference for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Chunk = tuple[np.ndarray, np.ndarray, Sequence[int]]


def summed(batches: Iterable[Sequence[Chunk]], kind: np.dtype, rounded: bool) -> np.ndarray:
    """Return the gradient of a grouped matmul's weights, summed over micro-batches, float32 [groups * k, n].

    Args:
        batches: for each micro-batch its chunks of rows, in the order in which their gradients are added. A chunk
            consists of the rows that were multiplied with the weights, [m, k], the gradient of the product, [m, n],
            both of type `kind`, and the end of each group's rows.
        rounded: whether each gradient, and the sum of a micro-batch's, is rounded to `kind` before it is added
            (GroupedMatmul, AddN, then AssignAdd) or not (InplaceGroupedMatmulAdd).
    """
    total = np.zeros((), np.float32)
    for chunks in batches:
        gradients = [_gradient(*chunk) for chunk in chunks]
        if rounded:
            gradients = [_rounded(np.sum([_rounded(each, kind) for each in gradients], axis=0), kind)]
        for gradient in gradients:
            total = total + gradient
    return total


def _gradient(x: np.ndarray, dout: np.ndarray, ends: Sequence[int]) -> np.ndarray:
    x, dout = x.astype(np.float32), dout.astype(np.float32)
    groups = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
    return np.concatenate([x[rows].T @ dout[rows] for rows in groups])


def _rounded(values: np.ndarray, kind: np.dtype) -> np.ndarray:
    return values.astype(kind).astype(np.float32)
