"""GroupedMatmul: each expert's rows with its own matrix, and the gradient of those matrices, also added in place.

Source: `grouped_matmul` in `mindspore/ops/auto_generate/gen_ops_def.py`. MindFormers' experts call it with one x, one
weight, split_item 3; the gradient of x is group_type 0 again, that of the weights group_type 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel

_SPLIT_ROWS, _SPLIT_INNER = 0, 2


@kernel()
def GroupedMatmul(
    attrs: Attrs,
    x: list[np.ndarray],
    weight: list[np.ndarray],
    bias: Any = None,
    scale: Any = None,
    offset: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    group_list: np.ndarray | None = None,
    split_item: int = 0,
    group_type: int = -1,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> np.ndarray:
    """One tensor: the groups' products.

    Args:
        x: one tensor; [m, k] after `transpose_a`.
        weight: one tensor. Group type 0, rows are split: [groups, k, n] after `transpose_b`, result [m, n]. Group type
            2, the inner dimension is split: [k, n] after `transpose_b`, result [groups, m, n].
        group_list: where each group ends, cumulative; the last end is the size of the dimension that is split.

    Raises:
        NotImplementedError: biases, quantization, other kinds of groups.
        ValueError: a group list that does not cover the dimension.
    """
    extra = {"bias": bias, "scale": scale, "offset": offset}
    extra |= {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    given = [name for name, value in extra.items() if value is not None]
    if given:
        raise NotImplementedError(f"GroupedMatmul: {given[0]} is not None")
    if split_item != 3 or group_type not in (_SPLIT_ROWS, _SPLIT_INNER) or len(x) != 1 or len(weight) != 1:
        raise NotImplementedError(
            f"GroupedMatmul: split_item {split_item}, group_type {group_type}, {len(x)} x, {len(weight)} weight"
        )
    a = x[0].swapaxes(-1, -2) if transpose_a else x[0]
    b = weight[0].swapaxes(-1, -2) if transpose_b else weight[0]
    groups = _groups(group_list, a.shape[0] if group_type == _SPLIT_ROWS else a.shape[1])
    if group_type == _SPLIT_INNER:
        return np.stack([a[:, rows] @ b[rows] for rows in groups])
    if len(groups) != len(b):
        raise ValueError(f"GroupedMatmul: {len(groups)} groups, {len(b)} matrices")
    out = np.empty((a.shape[0], b.shape[-1]), a.dtype)
    for rows, matrix in zip(groups, b, strict=True):
        np.matmul(a[rows], matrix, out=out[rows])
    return out


@kernel(updates=3)
def InplaceGroupedMatmulAdd(
    attrs: Attrs, x: np.ndarray, weight: np.ndarray, group_list: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """`out` plus the products of each group's rows, not rounded to the rows' type in between.

    Args:
        x: [m, k]; weight: [m, n]. group_list: where each group's rows end.
        out: [groups, k, n] or [groups * k, n], changed in place.

    Raises:
        ValueError: a group list that does not cover the rows.
    """
    products = np.stack([x[rows].T @ weight[rows] for rows in _groups(group_list, len(x))])
    return out + products.reshape(out.shape)


def _groups(group_list: np.ndarray | None, size: int) -> list[slice]:
    if group_list is None:
        raise ValueError("GroupedMatmul: group_list is None")
    ends = group_list.tolist()
    starts = [0, *ends[:-1]]
    if not ends or ends[-1] != size or any(a > b for a, b in zip(starts, ends, strict=True)):
        raise ValueError(f"GroupedMatmul: group_list {ends} must rise to {size}")
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)]
