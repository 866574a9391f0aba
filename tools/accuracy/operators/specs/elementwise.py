"""Elementwise arithmetic."""

from __future__ import annotations

import numpy as np

from tools.accuracy.operators.accumulation import elementwise, moved
from tools.accuracy.operators.spec import Spec, kernel

SHAPES = ((64, 96),)


def _any(rng, *shape):
    return (2 * rng.standard_normal(shape, np.float32),)


def _positive(rng, *shape):
    return (rng.uniform(0.05, 8, shape).astype(np.float32),)


def _two(rng, *shape):
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def _unary(name, source, primitive, golden, derivative, make=_any, counts=elementwise):
    return Spec(
        name=name,
        source=source,
        shapes=SHAPES,
        make=make,
        golden=golden,
        grad=lambda x, dout: (dout * derivative(x),),
        call=kernel(primitive),
        counts=counts,
        special="each",
    )


def _binary(name, source, primitive, golden, grad, make=_two, roundings=1):
    return Spec(
        name=name,
        source=source,
        shapes=SHAPES,
        make=make,
        golden=golden,
        grad=grad,
        wrt=(0, 1),
        call=kernel(primitive),
        counts=elementwise,
        special="each",
        roundings=roundings,
    )


def _apart(rng, *shape):
    # no ties, where kernels share the gradient in their own ways
    x = rng.standard_normal(shape, np.float32)
    return x, x + (rng.choice([-1, 1], shape) * rng.uniform(0.25, 1, shape)).astype(np.float32)


def _power(rng, *shape):
    return rng.uniform(0.2, 3, shape).astype(np.float32), rng.uniform(-2, 2, shape).astype(np.float32)


ELEMENTWISE = (
    _binary("add", "residual stream: AddExt", "AddExt", np.add, lambda x, y, dout: (dout, dout)),
    _binary("sub", "normalisation: SubExt", "SubExt", np.subtract, lambda x, y, dout: (dout, -dout)),
    _binary("mul", "gates and weights: Mul", "Mul", np.multiply, lambda x, y, dout: (dout * y, dout * x)),
    _binary(
        "div",
        "normalisation of scores: Div; its gradient is three kernels",
        "Div",
        np.divide,
        lambda x, y, dout: (dout / y, -dout * x / y**2),
        roundings=3,
    ),
    _binary(
        "pow",
        "bias correction of AdamW: Pow; its gradient is three kernels",
        "Pow",
        np.power,
        lambda x, y, dout: (dout * y * x ** (y - 1), dout * x**y * np.log(x)),
        make=_power,
        roundings=3,
    ),
    _binary(
        "maximum",
        "clipping: Maximum",
        "Maximum",
        np.maximum,
        lambda x, y, dout: (dout * (x >= y), dout * (x < y)),
        make=_apart,
    ),
    _binary(
        "minimum",
        "clipping: Minimum",
        "Minimum",
        np.minimum,
        lambda x, y, dout: (dout * (x <= y), dout * (x > y)),
        make=_apart,
    ),
    _unary("neg", "RoPE, loss: Neg", "Neg", np.negative, lambda x: -1, counts=moved),
    _unary("square", "RMSNorm, global norm: Square", "Square", np.square, lambda x: 2 * x),
    _unary("exp", "softmax, loss: Exp", "Exp", np.exp, np.exp),
    _unary("log", "loss: Log", "Log", np.log, lambda x: 1 / x, make=_positive),
    _unary("sqrt", "global norm, AdamW: Sqrt", "Sqrt", np.sqrt, lambda x: 0.5 / np.sqrt(x), make=_positive),
    _unary("rsqrt", "RMSNorm: Rsqrt", "Rsqrt", lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5, make=_positive),
    _unary("cos", "RoPE: Cos", "Cos", np.cos, lambda x: -np.sin(x)),
    _unary("sin", "RoPE: Sin", "Sin", np.sin, np.cos),
    _unary("tanh", "GELU: Tanh", "Tanh", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
)
