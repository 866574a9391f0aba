"""Products of matrices."""

from __future__ import annotations

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import LOW_PRECISION, Attrs, kernel


@kernel()
def Dense(attrs: Attrs, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """X [..., in] with weight [out, in] and bias [out]."""
    out = x @ weight.T
    return out if bias is None else out + bias


@kernel()
def MatMulExt(attrs: Attrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product as NumPy broadcasts it."""
    return a @ b


@kernel()
def Outer(attrs: Attrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A [n] and b [m] give [n, m]."""
    return np.outer(a, b)


def _product(a: np.ndarray, b: np.ndarray, transpose_a: bool, transpose_b: bool) -> np.ndarray:
    return (a.swapaxes(-1, -2) if transpose_a else a) @ (b.swapaxes(-1, -2) if transpose_b else b)


@kernel(LOW_PRECISION)
def MatMul(
    attrs: Attrs, a: np.ndarray, b: np.ndarray, transpose_a: bool = False, transpose_b: bool = False
) -> np.ndarray:
    """The product of two matrices."""
    return _product(a, b, transpose_a, transpose_b)


@kernel(LOW_PRECISION)
def BatchMatMul(
    attrs: Attrs, a: np.ndarray, b: np.ndarray, transpose_a: bool = False, transpose_b: bool = False
) -> np.ndarray:
    """The products of matrices, the last two dimensions of each tensor."""
    return _product(a, b, transpose_a, transpose_b)
