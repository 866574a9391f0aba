"""This module computes products of grouped-query attention in NumPy, where consecutive query heads share one head of
keys and values.

Query head n reads the keys and values of group n // (heads / groups), as in MindFormers and Megatron. The query heads
of one group form the rows of one matrix, so that keys and values need not be repeated, and the matrix product itself
sums their gradients over the group. With as many groups as heads, grouped-query attention is multi-head attention.
"""

from __future__ import annotations

import numpy as np


def _grouped(x: np.ndarray, groups: int) -> np.ndarray:
    """Return [heads, rows, n] -> [groups, heads of a group * rows, n]; a view where each head has keys of its own."""
    return x if len(x) == groups else x.reshape(groups, -1, x.shape[-1])


def with_keys(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return x K^T for each query head, [heads, rows, columns], from `x` [heads, rows, d] and `keys` [groups, columns,
    d]; the heads of a group share the keys of the group.
    """
    return np.matmul(_grouped(x, len(keys)), keys.swapaxes(-1, -2)).reshape(*x.shape[:2], -1)


def from_keys(weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return W K for each query head, [heads, rows, d], from `weights` [heads, rows, columns] and `keys` [groups,
    columns, d]; the heads of a group share the keys of the group.
    """
    return np.matmul(_grouped(weights, len(keys)), keys).reshape(*weights.shape[:2], -1)


def to_keys(weights: np.ndarray, x: np.ndarray, groups: int) -> np.ndarray:
    """Return W^T x, summed over the heads of each group, [groups, columns, d], from `weights` [heads, rows, columns]
    and `x` [heads, rows, d].
    """
    return np.matmul(_grouped(weights, groups).swapaxes(-1, -2), _grouped(x, groups))
