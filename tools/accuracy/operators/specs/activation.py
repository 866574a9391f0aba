"""Activations of the MLP and of routing scores."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tools.accuracy.operators.accumulation import elementwise
from tools.accuracy.operators.spec import Array, Spec, kernel


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return x * sigmoid(x)


def silu_grad(x: Array) -> Array:
    """The derivative of silu."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def _inner(x):
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu(x: Array) -> Array:
    """The tanh form, MindSpore's default."""
    return 0.5 * x * (1 + np.tanh(_inner(x)))


def gelu_grad(x: Array) -> Array:
    """The derivative of gelu."""
    t = np.tanh(_inner(x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def swiglu(x: Array) -> Array:
    """[..., 2H] -> [..., H]: silu of the first half times the second."""
    gate, up = np.split(x, 2, -1)
    return silu(gate) * up


def swiglu_grad(x: Array, dout: Array) -> Array:
    """The gradient of x."""
    gate, up = np.split(x, 2, -1)
    return np.concatenate([dout * up * silu_grad(gate), dout * silu(gate)], -1)


def _formula(ms):
    auto = ms.ops.auto_generate

    def call(x):
        half = x.shape[-1] // 2
        gate, up = auto.SplitWithSize()(x, (half, half), -1)
        return auto.Mul()(auto.SiLU()(gate), up)

    return call


def _wide(rng, *shape):
    return (3 * rng.standard_normal(shape, np.float32),)


def _spec(name, source, golden, derivative, call):
    return Spec(
        name=name,
        source=source,
        shapes=((64, 96),),
        make=_wide,
        golden=golden,
        grad=lambda x, dout: (dout * derivative(x),),
        call=call,
        counts=elementwise,
        special="each",
    )


SWIGLU = Spec(
    name="swiglu",
    source="the MLP: SplitWithSize, SiLU, Mul, training_graph/activation.py",
    shapes=((64, 128),),
    make=_wide,
    golden=swiglu,
    grad=lambda x, dout: (swiglu_grad(x, dout),),
    call=_formula,
    counts=elementwise,
    roundings=2,
)
ACTIVATION = (
    _spec(
        "sigmoid",
        "router scores: Sigmoid",
        sigmoid,
        lambda x: sigmoid(x) * (1 - sigmoid(x)),
        kernel("Sigmoid"),
    ),
    _spec("silu", "the MLP: SiLU", silu, silu_grad, kernel("SiLU")),
    _spec("gelu", "MLPs of other models: GeLU, tanh form", gelu, gelu_grad, kernel("GeLU")),
    _spec("relu", "optimizer and masks: ReLU", lambda x: np.maximum(x, 0), lambda x: x > 0, kernel("ReLU")),
    SWIGLU,
    replace(SWIGLU, name="swiglu.fused", source="the kernel Swiglu, experts' FFN", call=kernel("Swiglu"), roundings=1),
)
