"""Extreme values: what inputs hold, their clipping (report section 3.1 (3)), and inputs made of nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from tools.accuracy.promotion import LARGEST, SMALLEST, rounded


@dataclass(frozen=True)
class Extremes:
    """How many elements of a tensor are extreme; `small` are below the lower bound, zeros and denormals included."""

    nan: int
    inf: int
    zero: int
    denormal: int
    small: int


def inspect(values: np.ndarray, dtype: str, bound: float) -> Extremes:
    """Count the extreme values of a float tensor of `dtype`."""
    magnitude = np.abs(values.astype(np.float64))
    return Extremes(
        nan=int(np.isnan(magnitude).sum()),
        inf=int(np.isinf(magnitude).sum()),
        zero=int((magnitude == 0).sum()),
        denormal=int(((magnitude > 0) & (magnitude < SMALLEST[dtype])).sum()),
        small=int((magnitude < bound).sum()),
    )


def clip_lower(values: np.ndarray, bound: float) -> np.ndarray:
    """Raise every magnitude to `bound` at least; signs stay (0 becomes +bound, -0 -bound)."""
    return np.copysign(np.maximum(np.abs(values), values.dtype.type(bound)), values)


def specials(dtype: str) -> np.ndarray:
    """Zero, denormals, the smallest normal, ones, half the largest, infinities and NaN, as `dtype` holds them. [13]

    Half: so that the order of two factors near one does not decide about overflow. No negative zero: kernels differ
    in its sign, and training does not depend on it.
    """
    low, high = SMALLEST[dtype], LARGEST[dtype] / 2
    values = [0.0, low / 4, -low / 4, low, -low, 1.0, -1.0, 2.0, high, -high, np.inf, -np.inf, np.nan]
    return rounded(np.array(values), dtype)


def grid(dtype: str, inputs: int) -> list[np.ndarray]:
    """Every combination of special values, for an elementwise operator of so many inputs: vectors."""
    return [np.array(column) for column in zip(*product(specials(dtype), repeat=inputs), strict=True)]


def poke(values: np.ndarray, dtype: str) -> np.ndarray:
    """A copy of [..., n] of at least 13 rows, with another special value in the middle of each of the first rows."""
    poked = values.copy()
    rows = poked.reshape(-1, poked.shape[-1])
    special = specials(dtype)
    assert len(rows) >= len(special)
    rows[: len(special), rows.shape[1] // 2] = special
    return poked


def flushed(values: np.ndarray, dtype: str, signed: bool) -> np.ndarray:
    """What a device sees that takes denormals as zero, and does or does not keep the zero's sign."""
    zero = values.dtype.type(0)
    return np.where(np.abs(values) < SMALLEST[dtype], np.copysign(zero, values) if signed else zero, values)
