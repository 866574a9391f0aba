"""What a test of one operator consists of, and how many terms each element of its result accumulates.

Specs are data: small functions over NumPy arrays and one MindSpore call. The counts, which choose the row of Table 2,
follow from an operator's shapes and indices.

**How many terms an output element accumulates, from operator, shapes and indices: the row of Table 2.**

Each function takes the operator's input arrays and returns `Counts`; `forward` has one number per output, `backward`
one per gradient. A single number holds for all of them. 0: values are moved, nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Counts:
    """Accumulation counts of the outputs and of the gradients."""

    forward: int | tuple[int, ...]
    backward: int | tuple[int, ...] = 1

    def of(self, phase: str, index: int) -> int:
        """Return the count of output or gradient number `index`; phase is "forward" or "backward"."""
        counts = self.forward if phase == "forward" else self.backward
        return counts[index] if isinstance(counts, tuple) else counts


Counter = Callable[..., Counts]


def elementwise(*_: np.ndarray) -> Counts:
    """Return one result from one element of each input."""
    return Counts(1, 1)


def moved(*_: np.ndarray) -> Counts:
    """No arithmetic, neither forward nor backward."""
    return Counts(0, 0)


def tiled(repeats: int) -> Counter:
    """Values are copied `repeats` times; their gradients are summed."""
    return lambda *_: Counts(0, repeats)


def reduced(*axes: int) -> Counter:
    """Return a reduction of the first input over `axes` (all without any); its gradient is spread, not summed."""
    return lambda x, *_: Counts(_size(x, axes), 1)


def scanned(axis: int) -> Counter:
    """Return a cumulative sum: the last element and the first gradient accumulate the whole axis."""
    return lambda x, *_: Counts(x.shape[axis], x.shape[axis])


def normalised(x: np.ndarray, *parameters: np.ndarray) -> Counts:
    """Return a statistic over the last axis; gradients of scale and shift accumulate the rows."""
    n = x.shape[-1]
    return Counts(n, (n, *[x.size // n] * len(parameters)))


def matmul(a: np.ndarray, b: np.ndarray, transpose_b: bool = False) -> Counts:
    """[..., m, k] x [..., k, n] (or [..., n, k]): k terms, n for the gradient of a, m for that of b."""
    n = b.shape[-2] if transpose_b else b.shape[-1]
    return Counts(a.shape[-1], (n, a.shape[-2]))


def grouped_matmul(rows: np.ndarray, weight: np.ndarray, ends: np.ndarray) -> Counts:
    """Rows [C, h] of experts with last rows `ends` x weight [E, h, H]: h, H, and the rows of the busiest expert."""
    busiest = int(np.diff(ends, prepend=0).max())
    return Counts(rows.shape[-1], (weight.shape[-1], busiest))


def gathered(table: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the rows picked by index: moved forward; backward sums as many as the most frequent index occurs."""
    return Counts(0, busiest(index))


def added(x: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Return the rows added at indices: one element, and as many as the most frequent index occurs; moved backward."""
    return Counts(1 + busiest(index), 0)


def busiest(index: np.ndarray) -> int:
    """Return how often the most frequent index occurs."""
    return int(np.unique(index, return_counts=True)[1].max())


def _size(x: np.ndarray, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in axes) if axes else x.size


@dataclass(frozen=True)
class Spec:
    """One operator.

    Args:
        name: what the user types; a `.suffix` names another kernel or formula for the same golden baseline.
        source: who uses it in TeleChat3-MoE training, or which kernel it is.
        shapes: test cases; each is the tuple of sizes that `make` takes.
        make: (rng, *sizes) -> input arrays: float32 (rounded to the tested type later), integers or booleans.
        golden: inputs -> output or tuple of outputs, in the float type of its inputs.
        call: the module `mindspore` -> function of tensors that returns a tensor or a tuple.
        counts: inputs -> accumulation counts.
        grad: (*inputs, *gradients of the float outputs) -> gradients of inputs `wrt`; None: not differentiable.
        wrt: which inputs have gradients.
        fixed: which float inputs stay float32 whatever type is tested.
        roundings: kernels in a row that store in the tested type; an upper bound.
        clip: whether inputs are clipped from below; not where zero means something.
        special: "each" to try all special values (elementwise), "row" to put one in each row of the first input.
        dtypes: tested types other than the three usual ones, or fewer.
    """

    name: str
    source: str
    shapes: tuple[tuple[int, ...], ...]
    make: Callable[..., tuple[Array, ...]]
    golden: Callable[..., Any]
    call: Callable[[Any], Callable[..., Any]]
    counts: Counter
    grad: Callable[..., tuple[Array, ...]] | None = None
    wrt: tuple[int, ...] = (0,)
    fixed: tuple[int, ...] = ()
    roundings: int = 1
    clip: bool = True
    special: str = ""
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return a single output as a tuple of one."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def kernel(name: str, *arguments: Any, **settings: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return the `call` of one MindSpore primitive: `auto_generate`'s, or the older one of `mindspore.ops`."""

    def call(ms: Any) -> Callable[..., Any]:
        primitive = getattr(ms.ops.auto_generate, name, None) or getattr(ms.ops, name)
        return primitive(*arguments, **settings)

    return call
