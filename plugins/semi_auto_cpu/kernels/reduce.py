"""Sums, means and running sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import LOW_PRECISION, Attrs, kernel

Dims = int | tuple[int, ...] | list[int] | None


def _over(function: Callable[..., Any], x: np.ndarray, dims: Dims, keep: bool) -> np.ndarray:
    """No dimensions at all mean all of them."""
    axis = tuple(dims) if isinstance(dims, (tuple, list)) else dims
    return np.asarray(function(x, axis=None if axis == () else axis, keepdims=bool(keep)))


@kernel()
def CumsumExt(attrs: Attrs, x: np.ndarray, dim: int, dtype: int | None = None) -> np.ndarray:
    """Running sums along a dimension."""
    return np.cumsum(x, dim)


@kernel()
def MeanExt(attrs: Attrs, x: np.ndarray, dim: Dims = None, keep: bool = False, dtype: int | None = None) -> np.ndarray:
    """The mean over dimensions."""
    return _over(np.mean, x, dim, keep)


@kernel()
def SumExt(attrs: Attrs, x: np.ndarray, dim: Dims = None, keep: bool = False, dtype: int | None = None) -> np.ndarray:
    """The sum over dimensions."""
    return _over(np.sum, x, dim, keep)


@kernel(LOW_PRECISION)
def ReduceSum(
    attrs: Attrs, x: np.ndarray, axis: Dims = (), keep_dims: bool = False, skip_mode: bool = False
) -> np.ndarray:
    """The sum over dimensions; with `skip_mode` no dimensions mean none."""
    if skip_mode and axis in ((), [], None):
        return x
    return _over(np.sum, x, axis, keep_dims)
