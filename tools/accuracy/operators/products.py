"""This module tests operators with matrix products: matmul, attention with rotary positions, experts' dispatch."""

from __future__ import annotations

import math

import numpy as np

from tools.accuracy.operators.pointwise import sigmoid
from tools.accuracy.operators.reductions import softmax
from tools.accuracy.operators.spec import (
    Array,
    Counts,
    Spec,
    elementwise,
    function,
    gathered,
    kernel,
    normal,
    scatter_rows,
    variant,
)

ALL = ("float32", "float16", "bfloat16", "hfloat32")


def grouped(rng, rows, h, width, experts):
    """Return rows sorted by expert, a matrix for each expert, and the index after each expert's last row. Experts have
    unequal numbers of rows, and one may have none.
    """
    cuts = np.sort(rng.integers(0, rows + 1, experts - 1))
    ends = np.append(cuts, rows).astype(np.int64)
    return rng.standard_normal((rows, h), np.float32), rng.standard_normal((experts, h, width), np.float32), ends


def grouped_golden(rows: Array, weight: Array, ends: Array) -> Array:
    """Return rows [C, h] times the weights [E, h, H] of their experts, as [C, H]."""
    parts = np.split(rows, ends[:-1])
    return np.concatenate([part @ matrix for part, matrix in zip(parts, weight, strict=True)])


def grouped_grad(rows, weight, ends, dout):
    """Return the gradients of a grouped matmul; the gradient of an expert without rows is zero."""
    douts, parts = np.split(dout, ends[:-1]), np.split(rows, ends[:-1])
    drows = np.concatenate([d @ matrix.T for d, matrix in zip(douts, weight, strict=True)])
    return drows, np.stack([part.T @ d for part, d in zip(parts, douts, strict=True)])


def _per_expert(ms, rows, weight, ends):
    first, outs = 0, []
    for expert, end in enumerate(ends.asnumpy().tolist()):
        if end > first:
            outs.append(ms.ops.matmul(rows[first:end], weight[expert]))
        first = end
    return ms.ops.concat(outs)


BATCHED = Spec(
    "batch_matmul", "attention without fusion: BatchMatMul", ((3, 16, 64, 24), (2, 4, 2500, 4)),
    lambda rng, b, m, k, n: (rng.standard_normal((b, m, k), np.float32), rng.standard_normal((b, k, n), np.float32)),
    golden=lambda a, b: a @ b, grad=lambda a, b, dout: (dout @ b.swapaxes(1, 2), a.swapaxes(1, 2) @ dout), wrt=(0, 1),
    call=kernel("BatchMatMul"), counts=lambda a, b: Counts(a.shape[-1], (b.shape[-1], a.shape[-2])), dtypes=ALL,
)  # fmt: skip
GROUPED = Spec(
    "grouped_matmul", "experts' FFN: GroupedMatmul(split_item=3, group_type=0), moe/ffn.py",
    ((96, 64, 48, 4), (64, 2500, 4, 3)), grouped, golden=grouped_golden, grad=grouped_grad, wrt=(0, 1),
    call=lambda ms, rows, weight, ends: ms.ops.auto_generate.GroupedMatmul(split_item=3, group_type=0)(
        [rows], [weight], None, None, None, None, None, ends
    ),
    counts=lambda rows, weight, ends: Counts(  # the last: the rows of the busiest expert
        rows.shape[-1], (weight.shape[-1], int(np.diff(ends, prepend=0).max()))
    ),
)  # fmt: skip
MATMUL = (
    Spec(
        "matmul", "every linear layer: MatMul(transpose_b=True), tensor_parallel/layers.py",
        ((16, 64, 24), (8, 2500, 8), (4, 20480, 4)),
        lambda rng, m, k, n: (rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)),
        golden=lambda x, w: x @ w.T,
        grad=lambda x, w, dout: (dout @ w, dout.T @ x), wrt=(0, 1), call=kernel("MatMul", transpose_b=True),
        counts=lambda x, w: Counts(x.shape[1], (w.shape[0], x.shape[0])), dtypes=ALL,
    ),
    BATCHED,
    variant(BATCHED, "batch_matmul.ext", "absorbed projections of MLA: BatchMatMulExt", kernel("BatchMatMulExt")),
    GROUPED,
    variant(
        GROUPED, "grouped_matmul.per_expert", "the same as one MatMul an expert, for devices without the kernel",
        _per_expert,
    ),
    Spec(
        "outer", "RoPE angles: Outer(positions, frequencies), rotary_pos_embedding.py", ((128, 32),),
        lambda rng, m, n: (rng.standard_normal(m).astype(np.float32), rng.standard_normal(n).astype(np.float32)),
        golden=np.outer, grad=lambda a, b, dout: (dout @ b, a @ dout), wrt=(0, 1), call=kernel("Outer"),
        counts=lambda a, b: Counts(1, (b.size, a.size)),
    ),
)  # fmt: skip


BASE = 10000.0


def angles(sequence: int, dim: int) -> Array:
    """Return RoPE's angles [S, 1, 1, D], float32; the two halves of the axis D are equal."""
    frequencies = BASE ** (-np.arange(0, dim, 2) / dim)
    half = np.outer(np.arange(sequence), frequencies)
    return np.concatenate([half, half], -1).astype(np.float32)[:, None, None]


def _half(x):
    first, second = np.split(x, 2, -1)
    return np.concatenate([-second, first], -1)


def rope(x: Array, freqs: Array) -> Array:
    """Return vectors x [S, B, N, D] rotated by RoPE with the angles freqs [S, 1, 1, D]."""
    return x * np.cos(freqs) + _half(x) * np.sin(freqs)


def rope_grad(x: Array, freqs: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of `rope` with respect to x: the incoming gradient rotated back by the same angles."""
    return (dout * np.cos(freqs) - _half(dout * np.sin(freqs)),)


def _rope_call(ms, x, freqs):
    t = x.astype(ms.float32)
    first, second = ms.ops.split(t, t.shape[-1] // 2, -1)
    turned = ms.ops.concat((ms.ops.neg(second), first), -1)
    return (t * ms.ops.cos(freqs) + turned * ms.ops.sin(freqs)).astype(x.dtype)


def _rope_fused(ms, x, freqs):
    t = x.astype(ms.float32)
    rotate = ms.ops.auto_generate.RotaryPositionEmbedding()
    return rotate(t, ms.ops.cos(freqs), ms.ops.sin(freqs), 0).astype(x.dtype)


def _probabilities(q, k):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    future = np.triu(np.ones(scores.shape[-2:], bool), 1)
    return softmax(np.where(future, scores.dtype.type(-1e4), scores))


def attention(q: Array, k: Array, v: Array) -> Array:
    """Return causal attention softmax(q k^T / sqrt(D)) v, all [B, N, S, D]."""
    return _probabilities(q, k) @ v


def attention_grad(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of causal attention with respect to the queries, keys and values."""
    p, scale = _probabilities(q, k), 1 / math.sqrt(q.shape[-1])
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def _attention_call(ms, q, k, v):
    scores = ms.ops.BatchMatMul(transpose_b=True)(q, k).astype(ms.float32) * (1 / math.sqrt(q.shape[-1]))
    future = ms.Tensor(np.triu(np.ones(scores.shape[-2:], bool), 1))
    p = ms.ops.softmax(ms.ops.masked_fill(scores, future, -1e4), -1)
    return ms.ops.BatchMatMul()(p.astype(q.dtype), v)


def _flash_call(ms, q, k, v):
    future = ms.Tensor(np.triu(np.ones((q.shape[2], k.shape[2]), np.uint8), 1))
    flash = ms.ops.operations.nn_ops.FlashAttentionScore(
        q.shape[1], scale_value=1 / math.sqrt(q.shape[-1]), input_layout="BNSD"
    )
    return flash(q, k, v, None, None, None, future)[3]


ROPE = Spec(
    "rope", "queries and keys: ApplyRotaryPosEmb in float32, rope_utils.py", ((128, 2, 3, 32), (2048, 1, 1, 64)),
    lambda rng, s, b, n, d: (rng.standard_normal((s, b, n, d), np.float32), angles(s, d)),
    golden=rope, grad=rope_grad, fixed=(1,), call=_rope_call, counts=elementwise,
)  # fmt: skip
ATTENTION = Spec(
    "attention", "core attention as separate kernels: BatchMatMul, Softmax in float32", ((2, 2, 64, 32),), normal(3),
    golden=attention, grad=attention_grad, wrt=(0, 1, 2), call=_attention_call,
    counts=lambda q, k, v: Counts(max(q.shape[-1], k.shape[-2])),
    roundings=6,  # scores, probabilities, output, and the three gradients on the way back
)  # fmt: skip
ATTENTIONS = (
    ROPE,
    variant(ROPE, "rope.fused", "the kernel RotaryPositionEmbedding, apply_rope_fusion", _rope_fused),
    ATTENTION,
    variant(ATTENTION, "attention.flash", "the kernel FlashAttentionScore", _flash_call, roundings=1),
)


TOP_K, SCALING = 4, 2.5


def _chosen(logits, bias):
    scores = sigmoid(logits)
    index = np.argsort(-(scores + bias), -1, kind="stable")[:, :TOP_K]
    return np.take_along_axis(scores, index, -1), index


def router(logits: Array, bias: Array) -> tuple[Array, Array]:
    """Return the weights and the indices of the k experts that a router chooses for each token, both [N, k]: the best
    by score plus bias, weighted by their scores without the bias, normalised and scaled.
    """
    gate, index = _chosen(logits, bias)
    return SCALING * gate / (gate.sum(-1, keepdims=True) + 1e-20), index


def router_grad(logits: Array, bias: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of a router's weights with respect to its logits; the choice of experts has no gradient."""
    gate, index = _chosen(logits, bias)
    total = gate.sum(-1, keepdims=True)
    dgate = SCALING * (dout - (dout * gate).sum(-1, keepdims=True) / total) / total
    dlogits = np.zeros_like(logits)
    np.put_along_axis(dlogits, index, dgate * gate * (1 - gate), -1)
    return (dlogits,)


def _router_call(topk, **settings):
    def call(ms, logits, bias):
        scores = ms.ops.sigmoid(logits)
        _, index = kernel(topk, TOP_K, **settings)(ms, scores + bias)
        gate = ms.ops.gather_d(scores, 1, index)
        total = ms.ops.ReduceSum(keep_dims=True)(gate, 1)
        return SCALING * (gate / (total + 1e-20)), index

    return call


def _logits(rng, tokens, experts):
    # spaced, so that no rounding changes which experts are chosen
    spaced = (np.arange(experts) - experts / 2) * 8 / experts
    logits = np.stack([rng.permutation(spaced) for _ in range(tokens)]).astype(np.float32)
    return logits, (1e-3 * rng.standard_normal(experts)).astype(np.float32)


def _routed(rng, tokens, experts):
    return np.argsort(rng.random((tokens, experts)), -1)[:, :TOP_K].astype(np.int32)


def sort_maps(experts: Array) -> tuple[Array, Array]:
    """Return for the k copies of N tokens, int [N k], the order by expert (stable), and the place of each copy in this
    order.
    """
    order = np.argsort(experts.reshape(-1), kind="stable").astype(np.int32)
    return order, np.argsort(order, kind="stable").astype(np.int32)


def _permute_inputs(rng, tokens, hidden, experts):
    order, _ = sort_maps(_routed(rng, tokens, experts))
    return rng.standard_normal((tokens, hidden), np.float32), order // TOP_K


def _permute_fused(tokens, experts):
    order, place = sort_maps(experts)
    return tokens[order // TOP_K], place


def _unpermute_inputs(rng, tokens, hidden, experts):
    _, place = sort_maps(_routed(rng, tokens, experts))
    probs = rng.random((tokens, TOP_K), np.float32)
    return rng.standard_normal((tokens * TOP_K, hidden), np.float32), place, probs


def unpermute(rows: Array, place: Array, probs: Array) -> Array:
    """Return tokens [N, h]: each sums k copies, rows[place] ([N k, h], place [N k]), weighted by probs [N, k]."""
    return np.einsum("nkh,nk->nh", rows[place].reshape(*probs.shape, -1), probs)


def unpermute_grad(rows: Array, place: Array, probs: Array, dout: Array) -> tuple[Array, Array]:
    """Return the gradients of `unpermute` with respect to the copies of the tokens and to the weights."""
    grad = np.empty_like(rows)
    grad[place] = (dout[:, None] * probs[..., None]).reshape(rows.shape)
    return grad, np.einsum("nkh,nh->nk", rows[place].reshape(*probs.shape, -1), dout)


def _unpermute_call(ms, rows, place, probs):
    copies = ms.ops.gather(rows, place, 0).reshape(*probs.shape, -1)
    return ms.ops.ReduceSum()(copies * ms.ops.expand_dims(probs, -1), 1)


ROUTER = Spec(
    "router_topk", "TopKRouter: sigmoid, bias, TopK, normalised, scaled, in float32; moe/router.py", ((256, 64),),
    _logits, golden=router, grad=router_grad, clip=False, call=_router_call("TopK", sorted=True),
    counts=lambda logits, bias: Counts((TOP_K, 0), TOP_K), dtypes=("float32",),
)  # fmt: skip
PERMUTE = Spec(
    "permute", "tokens to experts: rows by sorted index, token_dispatcher.py; Gather for IndexSelect",
    ((128, 64, 16),), _permute_inputs, golden=lambda tokens, source: tokens[source], grad=scatter_rows,
    call=kernel("Gather", 0), counts=gathered,
)  # fmt: skip
UNPERMUTE = Spec(
    "unpermute", "experts' results to tokens, weighted: token_dispatcher.py; Gather for IndexSelect",
    ((128, 64, 16),), _unpermute_inputs, golden=unpermute, grad=unpermute_grad, wrt=(0, 2), call=_unpermute_call,
    counts=lambda rows, place, probs: Counts(TOP_K, (1, rows.shape[1])), roundings=2,
)  # fmt: skip
MOE = (
    ROUTER,
    variant(ROUTER, "router_topk.ext", "the same with the kernel TopkExt", _router_call("TopkExt")),
    PERMUTE,
    variant(
        PERMUTE, "permute.fused",
        "the kernel MoeTokenPermute, moe_permute_fusion; second output as torch_npu documents it",
        function("moe_token_permute"), golden=_permute_fused, counts=lambda tokens, experts: Counts(0, TOP_K),
        grad=lambda tokens, experts, dout: scatter_rows(tokens, sort_maps(experts)[0] // TOP_K, dout),
        make=lambda rng, tokens, hidden, experts: (
            rng.standard_normal((tokens, hidden), np.float32), _routed(rng, tokens, experts),
        ),
    ),
    UNPERMUTE,
    variant(UNPERMUTE, "unpermute.fused", "the kernel MoeTokenUnpermute, with its weights",
            function("moe_token_unpermute"), roundings=1),
)  # fmt: skip
