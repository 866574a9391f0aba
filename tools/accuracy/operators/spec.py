"""This module defines the test of one operator as data: functions over NumPy arrays, a MindSpore call, and the number
of terms that an element sums, which selects the tolerance in Table 2 of the TeleChat3-MoE report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Counts:
    """A `Counts` holds how many terms an element of each output and of each gradient sums (one number, or one for each
    tensor); 0 means that values are only moved.
    """

    forward: int | tuple[int, ...]
    backward: int | tuple[int, ...] = 1

    def of(self, phase: str, index: int) -> int:
        """Return the count of output ("forward") or gradient ("backward") number `index`."""
        counts = self.forward if phase == "forward" else self.backward
        return counts[index] if isinstance(counts, tuple) else counts


Counter = Callable[..., Counts]


def elementwise(*_: np.ndarray) -> Counts:
    """Return the counts of an elementwise operator."""
    return Counts(1, 1)


def moved(*_: np.ndarray) -> Counts:
    """Return the counts of an operator that only moves values."""
    return Counts(0, 0)


def reduced(x: np.ndarray) -> Counts:
    """Return the counts of a sum over the last axis, whose backward only copies."""
    return Counts(x.shape[-1], 1)


def scanned(x: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of an operator such as a cumulative sum over the last axis."""
    return Counts(x.shape[-1], x.shape[-1])


def normalised(x: np.ndarray, *parameters: np.ndarray) -> Counts:
    """Return the counts of a norm; the gradients of scale and shift sum over rows."""
    n = x.shape[-1]
    return Counts(n, (n, *[x.size // n] * len(parameters)))


def gathered(table: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of reading rows by index; the gradient of the busiest row sums its readers."""
    return Counts(0, busiest(index))


def added(x: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of adding rows to a tensor by index."""
    return Counts(1 + busiest(index), 0)


def busiest(index: np.ndarray) -> int:
    """Return how often the most frequent value occurs in an array of indices."""
    return int(np.unique(index, return_counts=True)[1].max())


@dataclass(frozen=True)
class Spec:
    """A `Spec` describes the test of one operator."""

    # the name in `tc3 accuracy ops`; a `.suffix` names another kernel or formula with the same golden baseline
    name: str
    source: str  # the module of TeleChat3-MoE training that uses it, or the name of the kernel
    shapes: tuple[tuple[int, ...], ...]  # the test cases; each is the tuple of sizes for `make`
    # (rng, *sizes) -> input arrays: float32 (rounded to the tested type later), integers or booleans
    make: Callable[..., tuple[Array, ...]]
    golden: Callable[..., Any]  # inputs -> output or tuple of outputs, in the float type of its inputs
    call: Callable[..., Any]  # (the module `mindspore`, *tensors) -> a tensor or a tuple
    counts: Counter  # inputs -> accumulation counts
    # (*inputs, *gradients of the float outputs) -> gradients of inputs `wrt`; None: not differentiable
    grad: Callable[..., tuple[Array, ...]] | None = None
    wrt: tuple[int, ...] = (0,)  # the inputs that have gradients
    fixed: tuple[int, ...] = ()  # the float inputs that stay float32 with every tested type
    roundings: int = 1  # an upper bound of the number of consecutive kernels that store in the tested type
    clip: bool = True  # whether the magnitudes of inputs are clipped from below; False if zero has a meaning
    special: str = ""  # "each" to try all special values (elementwise), "row" to put one in each row of the first input
    # tested types other than the three usual ones, or fewer
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


def variant(spec: Spec, name: str, source: str, call: Callable[..., Any], **other: Any) -> Spec:
    """Return a test of another kernel or formula with the golden results of `spec`."""
    return replace(spec, name=name, source=source, call=call, **other)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a single output as a tuple of one element."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def normal(count: int = 1, scale: float = 1) -> Callable[..., tuple[Array, ...]]:
    """Return a function for `Spec.make` that draws `count` normally distributed tensors of one shape."""
    return lambda rng, *shape: tuple(scale * rng.standard_normal(shape, np.float32) for _ in range(count))


def kernel(name: str, *rest: Any, **settings: Any) -> Callable[..., Any]:
    """Return a function for `Spec.call` that calls the MindSpore primitive `name`, made with `settings`, with the
    tensors and then `rest`. The primitive is looked up in `mindspore.ops.auto_generate`, and, if it is not there, in
    `mindspore.ops`.
    """

    def call(ms: Any, *tensors: Any) -> Any:
        primitive = getattr(ms.ops.auto_generate, name, None) or getattr(ms.ops, name)
        return primitive(**settings)(*tensors, *rest)

    return call


def function(name: str, *rest: Any, **settings: Any) -> Callable[..., Any]:
    """Return a function for `Spec.call` that calls `mindspore.ops.NAME` with the tensors, then `rest`."""
    return lambda ms, *tensors: getattr(ms.ops, name)(*tensors, *rest, **settings)


def place_back(x: Array, index: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of picking elements along the last axis by index."""
    grad = np.zeros_like(x)
    np.put_along_axis(grad, index, dout, -1)
    return (grad,)


def scatter_rows(table: Array, index: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of picking rows of a table by `index` [P]: rows of `dout` [P, h] added at these indices."""
    grad = np.zeros_like(table)
    np.add.at(grad, index, dout)
    return (grad,)
