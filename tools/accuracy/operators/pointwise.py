"""This module tests operators that compute each element separately: arithmetic, activations, optimizers' steps."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from importlib import import_module
from types import ModuleType

import numpy as np

from tools.accuracy.operators.spec import Array, Counts, Spec, elementwise, kernel, moved, normal, variant

_ANY, _TWO, _WIDE = normal(scale=2), normal(2), normal(scale=3)


def _positive(rng, *shape):
    return (rng.uniform(0.05, 8, shape).astype(np.float32),)


def _unary(name, source, golden, derivative, primitive="", make=_ANY, counts=elementwise):
    return Spec(
        name, f"{source}: {primitive or name.capitalize()}", ((64, 96),), make, golden,
        grad=lambda x, dout: (dout * derivative(x),), call=kernel(primitive or name.capitalize()), counts=counts,
        special="each",
    )  # fmt: skip


def _binary(name, source, golden, grad, primitive="", make=_TWO, roundings=1, more=""):
    primitive = primitive or name.capitalize()
    return Spec(
        name, f"{source}: {primitive}{more}", ((64, 96),), make, golden, grad=grad, wrt=(0, 1),
        call=kernel(primitive), counts=elementwise, special="each", roundings=roundings,
    )  # fmt: skip


def _apart(rng, *shape):
    # no ties, where kernels share the gradient in their own ways
    x = rng.standard_normal(shape, np.float32)
    return x, x + (rng.choice([-1, 1], shape) * rng.uniform(0.25, 1, shape)).astype(np.float32)


_THREE = {"roundings": 3, "more": "; its gradient is three kernels"}
ELEMENTWISE = (
    _binary("add", "residual stream", np.add, lambda x, y, dout: (dout, dout), "AddExt"),
    _binary("sub", "normalisation", np.subtract, lambda x, y, dout: (dout, -dout), "SubExt"),
    _binary("mul", "gates and weights", np.multiply, lambda x, y, dout: (dout * y, dout * x)),
    _binary(
        "div", "normalisation of scores", np.divide, lambda x, y, dout: (dout / y, -dout * x / y**2), **_THREE,
    ),
    _binary(
        "pow", "bias correction of AdamW", np.power,
        lambda x, y, dout: (dout * y * x ** (y - 1), dout * x**y * np.log(x)), **_THREE,
        make=lambda rng, *shape: tuple(rng.uniform(*ends, shape).astype(np.float32) for ends in ((0.2, 3), (-2, 2))),
    ),
    _binary("maximum", "clipping", np.maximum, lambda x, y, dout: (dout * (x >= y), dout * (x < y)), make=_apart),
    _binary("minimum", "clipping", np.minimum, lambda x, y, dout: (dout * (x <= y), dout * (x > y)), make=_apart),
    _unary("neg", "RoPE, loss", np.negative, lambda x: -1, counts=moved),
    _unary("square", "RMSNorm, global norm", np.square, lambda x: 2 * x),
    _unary("exp", "softmax, loss", np.exp, np.exp),
    _unary("log", "loss", np.log, lambda x: 1 / x, make=_positive),
    _unary("sqrt", "global norm, AdamW", np.sqrt, lambda x: 0.5 / np.sqrt(x), make=_positive),
    _unary("rsqrt", "RMSNorm", lambda x: 1 / np.sqrt(x), lambda x: -0.5 * x**-1.5, make=_positive),
    _unary("cos", "RoPE", np.cos, lambda x: -np.sin(x)),
    _unary("sin", "RoPE", np.sin, np.cos),
    _unary("tanh", "GELU", np.tanh, lambda x: 1 - np.tanh(x) ** 2),
)  # fmt: skip


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """Return silu(x) = x sigmoid(x) for each element."""
    return x * sigmoid(x)


def silu_grad(x: Array) -> Array:
    """Return the derivative of silu(x) for each element."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def _inner(x):
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


def gelu(x: Array) -> Array:
    """Return gelu of each element by the tanh formula, which is MindSpore's default."""
    return 0.5 * x * (1 + np.tanh(_inner(x)))


def gelu_grad(x: Array) -> Array:
    """Return the derivative of gelu(x) for each element."""
    t = np.tanh(_inner(x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)


def swiglu(x: Array) -> Array:
    """Return SwiGLU of an input [..., 2H]: silu of the input's first half times its second half, [..., H]."""
    gate, up = np.split(x, 2, -1)
    return silu(gate) * up


def swiglu_grad(x: Array, dout: Array) -> Array:
    """Return the gradient of swiglu with respect to its input x."""
    gate, up = np.split(x, 2, -1)
    return np.concatenate([dout * up * silu_grad(gate), dout * silu(gate)], -1)


def _formula(ms, x):
    auto = ms.ops.auto_generate
    half = x.shape[-1] // 2
    gate, up = auto.SplitWithSize()(x, (half, half), -1)
    return auto.Mul()(auto.SiLU()(gate), up)


SWIGLU = Spec(
    "swiglu", "the MLP: SplitWithSize, SiLU, Mul, training_graph/activation.py", ((64, 128),), _WIDE, golden=swiglu,
    grad=lambda x, dout: (swiglu_grad(x, dout),), call=_formula, counts=elementwise, roundings=2,
)  # fmt: skip
ACTIVATION = (
    _unary("sigmoid", "router scores", sigmoid, lambda x: sigmoid(x) * (1 - sigmoid(x)), make=_WIDE),
    _unary("silu", "the MLP", silu, silu_grad, "SiLU", _WIDE),
    replace(_unary("gelu", "", gelu, gelu_grad, "GeLU", _WIDE), source="MLPs of other models: GeLU, tanh form"),
    _unary("relu", "optimizer and masks", lambda x: np.maximum(x, 0), lambda x: x > 0, "ReLU", _WIDE),
    SWIGLU,
    variant(SWIGLU, "swiglu.fused", "the kernel Swiglu, experts' FFN", kernel("Swiglu"), roundings=1),
)


BETA1, BETA2, EPS, STEP, DECAY = 0.9, 0.95, 1e-8, 3.0, 0.1
RATE = 0.01  # large, so that the change of a weight is not lost in the weight's own rounding
MAX_NORM = 1.0


def adamw(weight: Array, gradient: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
    """Return - lr decay w - lr m^ / (sqrt(v^) + eps), the change of a weight by AdamW, and the new moments m and v."""
    m = BETA1 * m + (1 - BETA1) * gradient
    v = BETA2 * v + (1 - BETA2) * np.square(gradient)
    denominator = np.sqrt(v / (1 - BETA2**STEP)) + EPS
    return -RATE * DECAY * weight - RATE / (1 - BETA1**STEP) * m / denominator, m, v


def clip_by_norm(*gradients: Array) -> tuple[Array, ...]:
    """Return the gradients scaled to a joint norm of at most MAX_NORM, and their joint norm before the scaling, [1]."""
    dtype = gradients[0].dtype
    norm = np.sqrt(np.array([np.square(gradient).sum() for gradient in gradients], dtype).sum(keepdims=True))
    scale = MAX_NORM / (np.maximum(norm, MAX_NORM) + dtype.type(1e-6))
    return *(gradient * scale for gradient in gradients), norm


def from_mindformers(module: str) -> ModuleType:
    """Import a module of MindFormers, and send its log output to stderr and into a temporary folder."""
    ours = "LOG_MF_PATH" not in os.environ
    if ours:
        os.environ["LOG_MF_PATH"] = os.path.join(tempfile.gettempdir(), "tc3_mindformers_log")
    try:
        with redirect_stdout(sys.__stderr__):
            return import_module(f"mindformers.{module}")
    finally:
        if ours:
            del os.environ["LOG_MF_PATH"]


def _adamw_call(ms, weight, gradient, m, v):
    update = from_mindformers("core.optim.adamw")._update_run_op
    named = (("w", weight), ("m", m), ("v", v))
    w, m, v = (ms.Parameter(tensor.copy(), name=name) for name, tensor in named)
    settings = (ms.Tensor(value, ms.float32) for value in (BETA1, BETA2, EPS, STEP, RATE, DECAY))
    update(*settings, w, gradient, m, v, True)
    return w - weight, m.value(), v.value()


def _adamw_fused(ms, weight, gradient, m, v):
    w, first, second = (ms.Parameter(tensor.copy()) for tensor in (weight, m, v))
    steps = ms.Tensor([STEP], ms.float32)
    outs = ms.ops.auto_generate.AdamW()(
        w, first, second, second, gradient, steps, RATE, BETA1, BETA2, DECAY, EPS, False, False
    )
    return outs[0] - weight, outs[1], outs[2]


def _clip_call(ms, *gradients):
    clip = from_mindformers("core.clip_grad").ClipGradNorm(MAX_NORM)
    clipped, norm = clip(gradients)
    return *clipped, norm


def _states(rng, *shape):
    weight, gradient, m = rng.standard_normal((3, *shape)).astype(np.float32)
    return weight, gradient, (0.1 * m).astype(np.float32), rng.uniform(0.01, 0.1, shape).astype(np.float32)


ADAMW = Spec(
    "adamw", "the step of MindFormers' AdamW, core/optim/adamw.py; states in float32", ((64, 48),), _states,
    golden=adamw, fixed=(0, 2, 3), call=_adamw_call, counts=lambda *_: Counts(1),
)  # fmt: skip
OPTIMIZER = (
    ADAMW,
    variant(ADAMW, "adamw.fused", "the kernel AdamW", _adamw_fused),
    Spec(
        "global_norm_clip", "MindFormers' ClipGradNorm, core/clip_grad.py", ((8, 4), (60, 50), (150, 100)),
        lambda rng, rows, width: (
            0.1 * rng.standard_normal((rows, width), np.float32),
            0.1 * rng.standard_normal(width, np.float32),
        ),
        golden=clip_by_norm, call=_clip_call, counts=lambda x, y: Counts(x.size + y.size),
    ),
)  # fmt: skip
