"""This module defines the test of one operator as data: small functions over NumPy arrays, one MindSpore call, and
functions that count the terms that are summed in an element of the result. The counts of summed terms select the
tolerance in Table 2 of the TeleChat3-MoE report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Counts:
    """A `Counts` holds the number of terms that are summed in an element of each output and of each gradient (one
    number, or one for each tensor); 0 means that values are only moved.
    """

    forward: int | tuple[int, ...]
    backward: int | tuple[int, ...] = 1

    def of(self, phase: str, index: int) -> int:
        """Return the number of summed terms of the output or gradient number `index`; `phase` is "forward" or
        "backward".
        """
        counts = self.forward if phase == "forward" else self.backward
        return counts[index] if isinstance(counts, tuple) else counts


Counter = Callable[..., Counts]


def elementwise(*_: np.ndarray) -> Counts:
    """Return the counts of summed terms for an elementwise operator: 1 in forward and backward."""
    return Counts(1, 1)


def moved(*_: np.ndarray) -> Counts:
    """Return the counts of summed terms for an operator that only moves values: 0 in forward and backward."""
    return Counts(0, 0)


def reduced(x: np.ndarray) -> Counts:
    """Return the counts of summed terms for a sum over the last axis: the length of the axis in forward, and 1 in
    backward, which only copies the gradient.
    """
    return Counts(x.shape[-1], 1)


def scanned(x: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of summed terms for operators such as a cumulative sum: the length of the last axis in forward
    and backward.
    """
    return Counts(x.shape[-1], x.shape[-1])


def normalised(x: np.ndarray, *parameters: np.ndarray) -> Counts:
    """Return the counts of summed terms for a norm: the length of the last axis, and the number of rows for the
    gradients of scale and shift.
    """
    n = x.shape[-1]
    return Counts(n, (n, *[x.size // n] * len(parameters)))


def gathered(table: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of summed terms for an operator that reads rows of a table by index: 0 in forward, and in
    backward the number of times that the most frequent index occurs.
    """
    return Counts(0, busiest(index))


def added(x: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the counts of summed terms for an operator that adds rows to a tensor by index: in forward 1 plus the
    number of times that the most frequent index occurs, and 0 in backward.
    """
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
    # the module `mindspore` -> function of tensors that returns a tensor or a tuple
    call: Callable[[Any], Callable[..., Any]]
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


def variant(spec: Spec, name: str, source: str, call: Callable[[Any], Callable[..., Any]], **other: Any) -> Spec:
    """Return a test that compares another kernel or formula with the golden results of `spec`."""
    return replace(spec, name=name, source=source, call=call, **other)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a single output as a tuple of one element."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def normal(count: int = 1, scale: float = 1) -> Callable[..., tuple[Array, ...]]:
    """Return a function for `Spec.make` that draws `count` normally distributed tensors of the same shape."""
    return lambda rng, *shape: tuple(scale * rng.standard_normal(shape, np.float32) for _ in range(count))


def kernel(name: str, *rest: Any, **settings: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a function for `Spec.call` that calls the primitive `name` of `mindspore.ops.auto_generate` or, if it is
    not there, of `mindspore.ops`. The primitive is created with `settings`, and gets the arguments `rest` after the
    tensors.
    """

    def call(ms: Any) -> Callable[..., Any]:
        primitive = (getattr(ms.ops.auto_generate, name, None) or getattr(ms.ops, name))(**settings)
        return lambda *tensors: primitive(*tensors, *rest)

    return call


def function(name: str, *rest: Any, **settings: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a function for `Spec.call` that calls the function `name` of `mindspore.ops` with the tensors, then the
    arguments `rest`.
    """
    return lambda ms: lambda *tensors: getattr(ms.ops, name)(*tensors, *rest, **settings)


def place_back(x: Array, index: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of an operator that picks elements along the last axis: zeros, with the incoming gradient at
    the positions of the picked elements.
    """
    grad = np.zeros_like(x)
    np.put_along_axis(grad, index, dout, -1)
    return (grad,)


def scatter_rows(table: Array, index: Array, dout: Array) -> tuple[Array]:
    """Return the gradient of an operator that picks rows of a table by `index` [P]: the rows of `dout` [P, h], added at
    their indices to zeros in the shape of the table.
    """
    grad = np.zeros_like(table)
    np.add.at(grad, index, dout)
    return (grad,)
