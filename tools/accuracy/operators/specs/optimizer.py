"""The optimizer's step and the global norm, as MindFormers has them: its own functions are called."""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from types import ModuleType

import numpy as np

from tools.accuracy.operators.accumulation import Counts
from tools.accuracy.operators.spec import Array, Spec

BETA1, BETA2, EPS, STEP, DECAY = 0.9, 0.95, 1e-8, 3.0, 0.1
RATE = 0.01  # large, so that the change of a weight is not lost in the weight's own rounding
MAX_NORM = 1.0


def adamw(weight: Array, gradient: Array, m: Array, v: Array) -> tuple[Array, Array, Array]:
    """Change of the weight and new moments, decay decoupled: w (1 - lr decay) - lr m^ / (sqrt(v^) + eps)."""
    m = BETA1 * m + (1 - BETA1) * gradient
    v = BETA2 * v + (1 - BETA2) * np.square(gradient)
    denominator = np.sqrt(v / (1 - BETA2**STEP)) + EPS
    return -RATE * DECAY * weight - RATE / (1 - BETA1**STEP) * m / denominator, m, v


def clip_by_norm(*gradients: Array) -> tuple[Array, ...]:
    """The gradients scaled to a joint norm of MAX_NORM at most, and the norm before, [1]."""
    dtype = gradients[0].dtype
    norm = np.sqrt(np.array([np.square(gradient).sum() for gradient in gradients], dtype).sum(keepdims=True))
    scale = MAX_NORM / (np.maximum(norm, MAX_NORM) + dtype.type(1e-6))
    return *(gradient * scale for gradient in gradients), norm


def from_mindformers(module: str) -> ModuleType:
    """Import a module of MindFormers, which logs to stdout and to ./output/log: to stderr and elsewhere instead."""
    ours = "LOG_MF_PATH" not in os.environ
    if ours:
        os.environ["LOG_MF_PATH"] = os.path.join(tempfile.gettempdir(), "tc3_mindformers_log")
    try:
        with redirect_stdout(sys.__stderr__):
            return import_module(f"mindformers.{module}")
    finally:
        if ours:
            del os.environ["LOG_MF_PATH"]


def _adamw_call(ms):
    update = from_mindformers("core.optim.adamw")._update_run_op

    def number(value):
        return ms.Tensor(value, ms.float32)

    def call(weight, gradient, m, v):
        parameters = [ms.Parameter(tensor.copy(), name=name) for name, tensor in (("w", weight), ("m", m), ("v", v))]
        w, m, v = parameters
        settings = map(number, (BETA1, BETA2, EPS, STEP, RATE, DECAY))
        update(*settings, w, gradient, m, v, True)
        return w - weight, m.value(), v.value()

    return call


def _adamw_fused(ms):
    def call(weight, gradient, m, v):
        w, first, second = (ms.Parameter(tensor.copy()) for tensor in (weight, m, v))
        steps = ms.Tensor([STEP], ms.float32)
        outs = ms.ops.auto_generate.AdamW()(
            w, first, second, second, gradient, steps, RATE, BETA1, BETA2, DECAY, EPS, False, False
        )
        return outs[0] - weight, outs[1], outs[2]

    return call


def _clip_call(ms):
    clip = from_mindformers("core.clip_grad").ClipGradNorm(MAX_NORM)

    def call(*gradients):
        clipped, norm = clip(gradients)
        return *clipped, norm

    return call


def _states(rng, *shape):
    weight, gradient, m = rng.standard_normal((3, *shape)).astype(np.float32)
    return weight, gradient, (0.1 * m).astype(np.float32), rng.uniform(0.01, 0.1, shape).astype(np.float32)


def _step(name, source, call):
    return Spec(
        name=name,
        source=source,
        shapes=((64, 48),),
        make=_states,
        golden=adamw,
        fixed=(0, 2, 3),
        call=call,
        counts=lambda *_: Counts(1),
    )


OPTIMIZER = (
    _step("adamw", "the step of MindFormers' AdamW, core/optim/adamw.py; states in float32", _adamw_call),
    _step("adamw.fused", "the kernel AdamW", _adamw_fused),
    Spec(
        name="global_norm_clip",
        source="MindFormers' ClipGradNorm, core/clip_grad.py",
        shapes=((8, 4), (60, 50), (150, 100)),
        make=lambda rng, rows, width: (
            0.1 * rng.standard_normal((rows, width), np.float32),
            0.1 * rng.standard_normal(width, np.float32),
        ),
        golden=clip_by_norm,
        call=_clip_call,
        counts=lambda x, y: Counts(x.size + y.size),
    ),
)
