"""How many terms an output element accumulates, from operator, shapes and indices: the row of Table 2.

Each function takes the operator's input arrays and returns `Counts`; `forward` has one number per output, `backward`
one per gradient. A single number holds for all of them. 0: values are moved, nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Counts:
    """Accumulation counts of the outputs and of the gradients."""

    forward: int | tuple[int, ...]
    backward: int | tuple[int, ...] = 1

    def of(self, phase: str, index: int) -> int:
        """The count of output or gradient number `index`; phase is "forward" or "backward"."""
        counts = self.forward if phase == "forward" else self.backward
        return counts[index] if isinstance(counts, tuple) else counts


Counter = Callable[..., Counts]


def elementwise(*_: np.ndarray) -> Counts:
    """One result from one element of each input."""
    return Counts(1, 1)


def moved(*_: np.ndarray) -> Counts:
    """No arithmetic, neither forward nor backward."""
    return Counts(0, 0)


def tiled(repeats: int) -> Counter:
    """Values are copied `repeats` times; their gradients are summed."""
    return lambda *_: Counts(0, repeats)


def reduced(*axes: int) -> Counter:
    """A reduction of the first input over `axes` (all without any); its gradient is spread, not summed."""
    return lambda x, *_: Counts(_size(x, axes), 1)


def scanned(axis: int) -> Counter:
    """A cumulative sum: the last element and the first gradient accumulate the whole axis."""
    return lambda x, *_: Counts(x.shape[axis], x.shape[axis])


def normalised(x: np.ndarray, *parameters: np.ndarray) -> Counts:
    """A statistic over the last axis; gradients of scale and shift accumulate the rows."""
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
    """Rows picked by index: moved forward; backward sums as many as the most frequent index occurs."""
    return Counts(0, busiest(index))


def added(x: np.ndarray, index: np.ndarray, *_: np.ndarray) -> Counts:
    """Rows added at indices: one element, and as many as the most frequent index occurs; moved backward."""
    return Counts(1 + busiest(index), 0)


def busiest(index: np.ndarray) -> int:
    """How often the most frequent index occurs."""
    return int(np.unique(index, return_counts=True)[1].max())


def _size(x: np.ndarray, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in axes) if axes else x.size
