"""The golden baseline: a spec's inputs as the device gets them, its outputs and gradients in the promoted type."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from tools.accuracy.operators.extremes import clip_lower, inspect
from tools.accuracy.operators.spec import Spec, as_tuple
from tools.accuracy.promotion import promoted, rounded
from tools.accuracy.tolerance import lower_bound


@dataclass(frozen=True)
class Case:
    """One test: inputs and incoming gradients as the tested type holds them, golden outputs and gradients.

    Args:
        extreme: elements of the inputs, as the device gets them, that are below the lower bound or not finite.
        douts: gradients of the float outputs; empty without a backward.
    """

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    douts: tuple[np.ndarray, ...]
    grads: tuple[np.ndarray, ...]
    extreme: int


def generator(spec: Spec, shape: tuple[int, ...], seed: int) -> np.random.Generator:
    """Random numbers that depend on the operator's base name, the shape and the seed, and on nothing else."""
    return np.random.default_rng([seed, zlib.crc32(spec.name.split(".")[0].encode()), *shape])


def make_case(spec: Spec, shape: tuple[int, ...], dtype: str, seed: int, clip: bool = True) -> Case:
    """Draw inputs, clip them from below, round them to `dtype`, and compute what should come out.

    Args:
        shape: sizes for `spec.make`.
        clip: False to see what unclipped inputs do.
    """
    rng = generator(spec, shape, seed)
    made = spec.make(rng, *shape)
    inputs, extreme = [], 0
    for number, values in enumerate(made):
        if is_float(values):
            if clip and spec.clip:
                values = clip_lower(values, lower_bound())
            values = rounded(values, "float32" if number in spec.fixed else dtype)
            found = inspect(values, dtype, lower_bound())
            extreme += found.small + found.inf + found.nan
        inputs.append(values)
    outputs = forward(spec, tuple(inputs), dtype)
    if spec.grad is None:
        return Case(tuple(inputs), outputs, (), (), extreme)
    douts = tuple(rounded(rng.standard_normal(out.shape).astype(np.float32), dtype) for out in outputs if is_float(out))
    return Case(tuple(inputs), outputs, douts, backward(spec, tuple(inputs), douts, dtype), extreme)


def forward(spec: Spec, inputs: tuple[np.ndarray, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """Golden outputs; invalid operations give inf and NaN as IEEE says."""
    with np.errstate(all="ignore"):
        return tuple(np.asarray(out) for out in as_tuple(spec.golden(*(promoted(values, dtype) for values in inputs))))


def backward(
    spec: Spec, inputs: tuple[np.ndarray, ...], douts: tuple[np.ndarray, ...], dtype: str
) -> tuple[np.ndarray, ...]:
    """Golden gradients of the inputs `spec.wrt`."""
    assert spec.grad is not None
    grads = spec.grad(*(promoted(values, dtype) for values in (*inputs, *douts)))
    return tuple(np.asarray(grad) for grad in as_tuple(grads))


def is_float(values: np.ndarray) -> bool:
    """Whether it is a tensor of numbers that are rounded, and can have a gradient."""
    return bool(np.issubdtype(values.dtype, np.floating))
