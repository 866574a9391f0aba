"""Rotary position embedding and core attention."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tools.accuracy.operators.accumulation import Counts, elementwise
from tools.accuracy.operators.spec import Array, Spec
from tools.accuracy.operators.specs.normalise import softmax

BASE = 10000.0


def angles(sequence: int, dim: int, offset: int = 0) -> Array:
    """Angles [S, 1, 1, D] of positions offset .. offset + S - 1, both halves alike; float32 as the model has them."""
    frequencies = BASE ** (-np.arange(0, dim, 2) / dim)
    half = np.outer(np.arange(offset, offset + sequence), frequencies)
    return np.concatenate([half, half], -1).astype(np.float32)[:, None, None]


def _half(x):
    first, second = np.split(x, 2, -1)
    return np.concatenate([-second, first], -1)


def _half_transposed(d):
    first, second = np.split(d, 2, -1)
    return np.concatenate([second, -first], -1)


def rope(x: Array, freqs: Array) -> Array:
    """x: [S, B, N, D], freqs: [S, 1, 1, D]."""
    return x * np.cos(freqs) + _half(x) * np.sin(freqs)


def rope_grad(x: Array, freqs: Array, dout: Array) -> tuple[Array]:
    """The rotation back."""
    return (dout * np.cos(freqs) + _half_transposed(dout * np.sin(freqs)),)


def _rope_call(ms):
    def call(x, freqs):
        t = x.astype(ms.float32)
        first, second = ms.ops.split(t, t.shape[-1] // 2, -1)
        turned = ms.ops.concat((ms.ops.neg(second), first), -1)
        return (t * ms.ops.cos(freqs) + turned * ms.ops.sin(freqs)).astype(x.dtype)

    return call


def _rope_fused(ms):
    def call(x, freqs):
        t = x.astype(ms.float32)
        rotate = ms.ops.auto_generate.RotaryPositionEmbedding()
        return rotate(t, ms.ops.cos(freqs), ms.ops.sin(freqs), 0).astype(x.dtype)

    return call


def _heads(rng, batch, heads, sequence, dim):
    return tuple(rng.standard_normal((batch, heads, sequence, dim), np.float32) for _ in range(3))


def _probabilities(q, k):
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    future = np.triu(np.ones(scores.shape[-2:], bool), 1)
    return softmax(np.where(future, scores.dtype.type(-1e4), scores))


def attention(q: Array, k: Array, v: Array) -> Array:
    """Causal softmax(q k^T / sqrt(D)) v, all [B, N, S, D]."""
    return _probabilities(q, k) @ v


def attention_grad(q: Array, k: Array, v: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Gradients of q, k and v."""
    p, scale = _probabilities(q, k), 1 / math.sqrt(q.shape[-1])
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout


def _attention_call(ms):
    def call(q, k, v):
        scores = ms.ops.BatchMatMul(transpose_b=True)(q, k).astype(ms.float32) * (1 / math.sqrt(q.shape[-1]))
        future = ms.Tensor(np.triu(np.ones(scores.shape[-2:], bool), 1))
        p = ms.ops.softmax(ms.ops.masked_fill(scores, future, -1e4), -1)
        return ms.ops.BatchMatMul()(p.astype(q.dtype), v)

    return call


def _flash_call(ms):
    def call(q, k, v):
        future = ms.Tensor(np.triu(np.ones((q.shape[2], k.shape[2]), np.uint8), 1))
        flash = ms.ops.operations.nn_ops.FlashAttentionScore(
            q.shape[1], scale_value=1 / math.sqrt(q.shape[-1]), input_layout="BNSD"
        )
        return flash(q, k, v, None, None, None, future)[3]

    return call


ROPE = Spec(
    name="rope",
    source="queries and keys: ApplyRotaryPosEmb in float32, rope_utils.py",
    shapes=((128, 2, 3, 32), (2048, 1, 1, 64)),
    make=lambda rng, s, b, n, d: (rng.standard_normal((s, b, n, d), np.float32), angles(s, d)),
    golden=rope,
    grad=rope_grad,
    fixed=(1,),
    call=_rope_call,
    counts=elementwise,
)
ATTENTION = Spec(
    name="attention",
    source="core attention as separate kernels: BatchMatMul, Softmax in float32",
    shapes=((2, 2, 64, 32),),
    make=_heads,
    golden=attention,
    grad=attention_grad,
    wrt=(0, 1, 2),
    call=_attention_call,
    counts=lambda q, k, v: Counts(max(q.shape[-1], k.shape[-2])),
    roundings=6,  # scores, probabilities, output, and the three gradients on the way back
)
ATTENTIONS = (
    ROPE,
    replace(ROPE, name="rope.fused", source="the kernel RotaryPositionEmbedding, apply_rope_fusion", call=_rope_fused),
    ATTENTION,
    replace(ATTENTION, name="attention.flash", source="the kernel FlashAttentionScore", call=_flash_call, roundings=1),
)
