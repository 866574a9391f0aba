"""Tokens in the order of their experts, and back: the fused operators of MindFormers' `moe_permute_fusion`.

Source: `moe_token_permute` and `moe_token_unpermute` in `mindspore/ops/auto_generate/gen_ops_def.py`; the gradients'
arguments in `gen_ops_prim.py`. `sorted_indices[token * topk + k]` is the row at which the k-th copy of a token stands
among the permuted ones; of copies for the same expert the earlier stands first. Copies from `num_out_tokens` on are
dropped: nothing is read from them and they hand back no gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel


@kernel(widen=False)
def MoeTokenPermute(
    attrs: Attrs, tokens: np.ndarray, indices: np.ndarray, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Permuted tokens, and `sorted_indices` (int32).

    Args:
        tokens: [tokens, hidden].
        indices: experts, [tokens, topk] or [tokens].
        num_out_tokens: copies that are kept; all of them if None or 0, all but so many if negative.
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
    """For each token [tokens, hidden] the sum over its copies, in their order."""
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
    """For each token [tokens, hidden] the sum over its copies, each times its probability (1 if there are none)."""
    _refuse_padding("MoeTokenUnpermute", padded_mode)
    if probs is None:
        return _copies(permuted_tokens, sorted_indices, 1)[:, 0]
    copies = _copies(permuted_tokens, sorted_indices, probs.shape[1])
    return (probs[:, None, :].astype(copies.dtype) @ copies)[:, 0]


@kernel()
def InnerMoeTokenUnpermute(attrs: Attrs, *inputs: Any) -> np.ndarray:
    """What MindSpore's graphs hold instead of MoeTokenUnpermute."""
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
    """Gradients of the permuted tokens and of the probabilities."""
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
    """[tokens, topk, hidden]; zeros for dropped copies."""
    kept = sorted_indices < len(permuted)
    if kept.all():
        copies = permuted[sorted_indices]
    else:
        copies = np.zeros((sorted_indices.size, permuted.shape[-1]), permuted.dtype)
        copies[kept] = permuted[sorted_indices[kept]]
    return copies.reshape(-1, topk, permuted.shape[-1])


def _refuse_padding(name: str, padded_mode: bool) -> None:
    if padded_mode:
        raise NotImplementedError(f"{name}: padded_mode True")
