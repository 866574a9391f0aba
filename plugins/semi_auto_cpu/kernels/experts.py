"""This module holds operators of routed experts: their grouped matmul, and the permutation of tokens by expert and
back.

GroupedMatmul multiplies each expert's rows by its own matrix; the gradient of those matrices may also be added in
place. Source: `grouped_matmul` in `mindspore/ops/auto_generate/gen_ops_def.py`. MindFormers' experts call it with one
x, one weight and split_item 3; the gradient of x has group_type 0 again, and the gradient of the weights has group_type
2.

The other operators are the fused operators of MindFormers' `moe_permute_fusion`. Their source is `moe_token_permute`
and `moe_token_unpermute` in `gen_ops_def.py`; the arguments of the gradients are in `gen_ops_prim.py`.
`sorted_indices[token * topk + k]` is the row of the k-th copy of a token among the permuted copies; of two copies for
the same expert the copy that came first is placed first. Copies from number `num_out_tokens` on are dropped: they are
not read, and they return no gradient.
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
    """Return the products of the rows of each group with the weights of this group, as one tensor.

    Args:
        x: a tensor of shape [m, k] after `transpose_a`.
        weight: one tensor. Group type 0, rows are split: [groups, k, n] after `transpose_b`, result [m, n]. Group type
            2, the inner dimension is split: [k, n] after `transpose_b`, result [groups, m, n].
        group_list: the cumulative ends of the groups; the last end is the size of the dimension that is split.

    Raises:
        NotImplementedError: the call needs biases, quantization or other kinds of groups.
        ValueError: the group list does not cover the dimension.
    """
    extra = {"bias": bias, "scale": scale, "offset": offset}
    extra |= {"antiquant_scale": antiquant_scale, "antiquant_offset": antiquant_offset}
    given = [name for name, value in extra.items() if value is not None]
    if given:
        raise NotImplementedError(f"GroupedMatmul: {given[0]} is given, but this CPU kernel does not support it")
    if split_item != 3 or group_type not in (_SPLIT_ROWS, _SPLIT_INNER) or len(x) != 1 or len(weight) != 1:
        raise NotImplementedError(
            f"GroupedMatmul: this CPU kernel does not support split_item {split_item} with group_type {group_type}, "
            f"{len(x)} tensors x and {len(weight)} weights"
        )
    a = x[0].swapaxes(-1, -2) if transpose_a else x[0]
    b = weight[0].swapaxes(-1, -2) if transpose_b else weight[0]
    groups = _groups(group_list, a.shape[0] if group_type == _SPLIT_ROWS else a.shape[1])
    if group_type == _SPLIT_INNER:
        return np.stack([a[:, rows] @ b[rows] for rows in groups])
    if len(groups) != len(b):
        raise ValueError(f"GroupedMatmul: group_list has {len(groups)} groups, but weight has {len(b)} matrices")
    out = np.empty((a.shape[0], b.shape[-1]), a.dtype)
    for rows, matrix in zip(groups, b, strict=True):
        np.matmul(a[rows], matrix, out=out[rows])
    return out


@kernel(updates=3)
def InplaceGroupedMatmulAdd(
    attrs: Attrs, x: np.ndarray, weight: np.ndarray, group_list: np.ndarray, out: np.ndarray
) -> np.ndarray:
    """Return `out` plus the product of x^T and the weight for the rows of each group, without rounding the products to
    the type of the rows.

    Args:
        x: [m, k].
        weight: [m, n].
        group_list: the cumulative ends of the groups' rows.
        out: [groups, k, n] or [groups * k, n], changed in place.

    Raises:
        ValueError: the group list does not cover the rows.
    """
    products = np.stack([x[rows].T @ weight[rows] for rows in _groups(group_list, len(x))])
    return out + products.reshape(out.shape)


def _groups(group_list: np.ndarray | None, size: int) -> list[slice]:
    if group_list is None:
        raise ValueError("GroupedMatmul: group_list must be given, but is None")
    ends = group_list.tolist()
    starts = [0, *ends[:-1]]
    if not ends or ends[-1] != size or any(a > b for a, b in zip(starts, ends, strict=True)):
        raise ValueError(
            f"GroupedMatmul: group_list {ends} must rise and end at {size}, the size of the dimension that it splits"
        )
    return [slice(a, b) for a, b in zip(starts, ends, strict=True)]


@kernel(widen=False)
def MoeTokenPermute(
    attrs: Attrs, tokens: np.ndarray, indices: np.ndarray, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return copies of the tokens sorted by expert, and `sorted_indices` (int32), the row of each copy.

    Args:
        tokens: [tokens, hidden].
        indices: experts, [tokens, topk] or [tokens].
        num_out_tokens: the number of copies that are kept; all of them if None or 0; if negative, all except the last
            -num_out_tokens.
    """
    _refuse_padding("MoeTokenPermute", padded_mode)
    experts = indices.reshape(-1)
    order = np.argsort(experts, kind="stable")
    rows = np.empty(experts.size, np.int32)
    rows[order] = np.arange(experts.size, dtype=np.int32)
    kept = num_out_tokens or experts.size
    kept = min(kept if kept > 0 else experts.size + kept, experts.size)
    topk = max(1, experts.size // max(1, len(tokens)))
    return tokens[order[:kept] // topk], rows


@kernel()
def MoeTokenPermuteGrad(
    attrs: Attrs, grad: np.ndarray, sorted_indices: np.ndarray, num_topk: int = 1, padded_mode: bool = False
) -> np.ndarray:
    """Return for each token the sum of the gradients of its copies, [tokens, hidden], added in the order of the
    copies.
    """
    _refuse_padding("MoeTokenPermuteGrad", padded_mode)
    return _copies(grad, sorted_indices, num_topk).sum(1)


@kernel()
def MoeTokenUnpermute(
    attrs: Attrs,
    permuted_tokens: np.ndarray,
    sorted_indices: np.ndarray,
    probs: np.ndarray | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> np.ndarray:
    """Return for each token the sum over its copies, [tokens, hidden], in which each copy is multiplied by its
    probability (1 without probabilities).
    """
    _refuse_padding("MoeTokenUnpermute", padded_mode)
    if probs is None:
        return _copies(permuted_tokens, sorted_indices, 1)[:, 0]
    copies = _copies(permuted_tokens, sorted_indices, probs.shape[1])
    return (probs[:, None, :].astype(copies.dtype) @ copies)[:, 0]


@kernel()
def InnerMoeTokenUnpermute(attrs: Attrs, *inputs: Any) -> np.ndarray:
    """Compute the operator that MindSpore's graphs contain instead of MoeTokenUnpermute."""
    return MoeTokenUnpermute(attrs, *inputs)


@kernel()
def MoeTokenUnpermuteGrad(
    attrs: Attrs,
    permuted_tokens: np.ndarray,
    grad: np.ndarray,
    sorted_indices: np.ndarray,
    probs: np.ndarray | None = None,
    padded_mode: bool = False,
    restore_shape: Any = None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the gradients of the permuted tokens and of the probabilities."""
    _refuse_padding("MoeTokenUnpermuteGrad", padded_mode)
    out = np.zeros(permuted_tokens.shape, grad.dtype)
    topk = 1 if probs is None else probs.shape[1]
    weights = np.ones((len(grad), 1), grad.dtype) if probs is None else probs
    kept = sorted_indices < len(out)
    spread = (weights[:, :, None] * grad[:, None, :]).reshape(-1, grad.shape[-1])
    out[sorted_indices[kept]] = spread[kept]
    if probs is None:
        return out, None
    copies = _copies(permuted_tokens, sorted_indices, topk)
    return out, (copies @ grad[:, :, None])[:, :, 0]


def _copies(permuted: np.ndarray, sorted_indices: np.ndarray, topk: int) -> np.ndarray:
    """Return [tokens, topk, hidden]; zeros for dropped copies."""
    kept = sorted_indices < len(permuted)
    if kept.all():
        copies = permuted[sorted_indices]
    else:
        copies = np.zeros((sorted_indices.size, permuted.shape[-1]), permuted.dtype)
        copies[kept] = permuted[sorted_indices[kept]]
    return copies.reshape(-1, topk, permuted.shape[-1])


def _refuse_padding(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError(f"{name}: padded_mode True is not supported by this CPU kernel")
