"""Softmax and the normalisations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tools.accuracy.operators import accumulation
from tools.accuracy.operators.spec import Array, Spec, kernel

RMS_EPS, LAYER_EPS = 1e-6, 1e-5
ROWS = ((24, 64), (16, 2500), (16, 12000))


def softmax(x: Array) -> Array:
    """Over the last axis, shifted by the maximum."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax_grad(x: Array, dout: Array) -> Array:
    """y (d - sum(d y))."""
    y = softmax(x)
    return y * (dout - (dout * y).sum(-1, keepdims=True))


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = x - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def _rms(x):
    return 1 / np.sqrt(np.square(x).mean(-1, keepdims=True) + RMS_EPS)


def rms_norm(x: Array, gamma: Array) -> Array:
    """x / sqrt(mean(x^2) + eps) gamma."""
    return x * _rms(x) * gamma


def rms_norm_grad(x: Array, gamma: Array, dout: Array) -> tuple[Array, Array]:
    """Gradients of x and gamma."""
    r = _rms(x)
    unit, d = x * r, dout * gamma
    return r * (d - unit * (d * unit).mean(-1, keepdims=True)), (dout * unit).sum(0)


def _unit(x):
    centred = x - x.mean(-1, keepdims=True)
    r = 1 / np.sqrt(np.square(centred).mean(-1, keepdims=True) + LAYER_EPS)
    return centred * r, r


def layer_norm(x: Array, gamma: Array, beta: Array) -> Array:
    """(x - mean) / sqrt(var + eps) gamma + beta."""
    return _unit(x)[0] * gamma + beta


def layer_norm_grad(x: Array, gamma: Array, beta: Array, dout: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, gamma and beta."""
    unit, r = _unit(x)
    d = dout * gamma
    dx = r * (d - d.mean(-1, keepdims=True) - unit * (d * unit).mean(-1, keepdims=True))
    return dx, (dout * unit).sum(0), dout.sum(0)


def rms_norm_call(epsilon: float):
    """MindFormers' formula: statistics in float32, stored in the input's type (transformer/norm.py)."""

    def make(ms):
        def call(x, gamma):
            y = x.astype(ms.float32)
            mean = ms.ops.auto_generate.MeanExt()(ms.ops.square(y), -1, True)
            return (y * ms.ops.rsqrt(mean + epsilon) * gamma.astype(ms.float32)).astype(x.dtype)

        return call

    return make


def _rows(rng, rows, n):
    return (rng.standard_normal((rows, n), np.float32),)


def _scaled(rng, rows, n):
    # small rows too, so that epsilon matters
    scale = 10.0 ** rng.uniform(-2, 1, (rows, 1))
    x = rng.standard_normal((rows, n), np.float32) * scale.astype(np.float32)
    return x, rng.standard_normal(n, np.float32) + 1


RMS = Spec(
    name="rms_norm",
    source="before attention and MLP: formula with fused_norm: False, transformer/norm.py",
    shapes=ROWS,
    make=_scaled,
    golden=rms_norm,
    grad=rms_norm_grad,
    wrt=(0, 1),
    call=rms_norm_call(RMS_EPS),
    counts=accumulation.normalised,
    special="row",
    clip=False,  # small rows on purpose, and no division by an element
)
NORMALISE = (
    Spec(
        name="softmax",
        source="attention without fusion, softmax routing: Softmax",
        shapes=ROWS,
        make=_rows,
        golden=softmax,
        grad=lambda x, dout: (softmax_grad(x, dout),),
        call=kernel("Softmax", -1),
        counts=accumulation.normalised,
        special="row",
    ),
    Spec(
        name="log_softmax",
        source="the loss: LogSoftmax",
        shapes=ROWS,
        make=_rows,
        golden=log_softmax,
        grad=lambda x, dout: (dout - softmax(x) * dout.sum(-1, keepdims=True),),
        call=kernel("LogSoftmax", -1),
        counts=accumulation.normalised,
        special="row",
    ),
    RMS,
    replace(
        RMS,
        name="rms_norm.fused",
        source="the kernel RmsNorm, fused_norm: True",
        call=lambda ms: lambda x, gamma: ms.ops.rms_norm(x, gamma, RMS_EPS)[0],
    ),
    Spec(
        name="layer_norm",
        source="where norm is LayerNorm: P.LayerNorm, transformer/norm.py",
        shapes=ROWS,
        make=lambda rng, rows, n: (*_scaled(rng, rows, n), rng.standard_normal(n, np.float32)),
        golden=layer_norm,
        grad=layer_norm_grad,
        wrt=(0, 1, 2),
        clip=False,
        call=lambda ms: lambda x, gamma, beta: ms.ops.LayerNorm(-1, -1, LAYER_EPS)(x, gamma, beta)[0],
        counts=accumulation.normalised,
    ),
)
