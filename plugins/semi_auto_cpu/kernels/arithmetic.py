"""This module holds arithmetic kernels: elementwise operators, sums and means, norms, rotary positions, matrix
products.

The source of RotaryPositionEmbedding is `rotary_position_embedding` in `mindspore/ops/auto_generate/gen_ops_def.py`:
mode 0 rotates halves (GPT-NeoX), mode 1 rotates neighbouring elements (GPT-J). In the gradient operator, the input that
`gen_ops_prim.py` calls `dx` is the x of the forward operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import KERNELS, LOW_PRECISION, Attrs, enter, kernel

Dims = int | tuple[int, ...] | list[int] | None


def _alike(number: Any, x: np.ndarray) -> np.ndarray:
    """Return a constant in the type of a tensor, so that NumPy does not compute in float64;
    integers stay exact.
    """
    if x.dtype.kind in "iub" and isinstance(number, float):
        return np.asarray(number, np.float32)
    return np.asarray(number, x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(-x)), which is 0 where exp() overflows."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """Return x sigmoid(x)."""
    return x * sigmoid(x)


def silu_gradient(dout: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return the derivative of x sigmoid(x), times `dout`."""
    s = sigmoid(x)
    return dout * s * (1 + x * (1 - s))


@kernel()
def Swiglu(attrs: Attrs, x: np.ndarray, dim: int = -1) -> np.ndarray:
    """Return silu(a) b, where a and b are the halves of x along `dim`."""
    a, b = np.split(x, 2, dim)
    return silu(a) * b


@kernel()
def SwigluGrad(attrs: Attrs, dout: np.ndarray, x: np.ndarray, dim: int = -1) -> np.ndarray:
    """Return the gradient of the operator Swiglu."""
    a, b = np.split(x, 2, dim)
    return np.concatenate([silu_gradient(dout * b, a), dout * silu(a)], dim)


@kernel(LOW_PRECISION)
def AddN(attrs: Attrs, tensors: list[np.ndarray]) -> np.ndarray:
    """Return the sum of the given tensors, added in the given order."""
    total = tensors[0].copy()
    for item in tensors[1:]:
        total += item
    return total


@kernel(LOW_PRECISION, updates=0)
def AssignAdd(attrs: Attrs, variable: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the variable plus a value; in this way graphs add gradients in bfloat16 to a float32 sum."""
    return variable + value


@kernel(LOW_PRECISION, widen=False, updates=0)
def Assign(attrs: Attrs, variable: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return the new value of a variable, which replaces the old one."""
    return value


def _over(function: Callable[..., Any], x: np.ndarray, dims: Dims, keep: bool) -> np.ndarray:
    """Call a NumPy function over these dimensions; an empty list means all dimensions."""
    axis = tuple(dims) if isinstance(dims, (tuple, list)) else dims
    return np.asarray(function(x, axis=None if axis == () else axis, keepdims=bool(keep)))


@kernel(LOW_PRECISION)
def ReduceSum(
    attrs: Attrs, x: np.ndarray, axis: Dims = (), keep_dims: bool = False, skip_mode: bool = False
) -> np.ndarray:
    """Return the sum over the given dimensions; with `skip_mode`, an empty list means that no dimension is summed."""
    if skip_mode and axis in ((), [], None):
        return x
    return _over(np.sum, x, axis, keep_dims)


@kernel()
def RmsNorm(attrs: Attrs, x: np.ndarray, gamma: np.ndarray, epsilon: float = 1e-6) -> tuple[np.ndarray, np.ndarray]:
    """Return x / sqrt(mean(x^2) + epsilon) * gamma, and the reciprocal of this square root.

    Args:
        x: [..., *gamma.shape].
        gamma: weights.
    """
    axes = tuple(range(x.ndim - gamma.ndim, x.ndim))
    rstd = 1 / np.sqrt(np.mean(x * x, axes, keepdims=True) + np.float32(epsilon))
    return x * rstd * gamma, rstd


@kernel()
def RmsNormGrad(
    attrs: Attrs, dy: np.ndarray, x: np.ndarray, rstd: np.ndarray, gamma: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of the RMS norm with respect to x and gamma."""
    leading = x.ndim - gamma.ndim
    axes = tuple(range(leading, x.ndim))
    normed = x * rstd
    scaled = dy * gamma
    dx = rstd * (scaled - normed * np.mean(scaled * normed, axes, keepdims=True))
    return dx, np.sum(dy * normed, tuple(range(leading)))


@kernel()
def RotaryPositionEmbedding(attrs: Attrs, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, mode: int = 0) -> np.ndarray:
    """Return x cos + rotated(x) sin; cos and sin broadcast to x."""
    return x * cos + _rotated("RotaryPositionEmbedding", x, mode) * sin


@kernel()
def RotaryPositionEmbeddingGrad(
    attrs: Attrs, dy: np.ndarray, cos: np.ndarray, sin: np.ndarray, x: np.ndarray | None = None, mode: int = 0
) -> tuple[np.ndarray | None, ...]:
    """Return the gradients with respect to x, cos and sin; the gradients of cos and sin are None unless x is given."""
    name = "RotaryPositionEmbeddingGrad"
    dx = dy * cos - _rotated(name, dy * sin, mode)  # a quarter turn back is the negative of one forward
    if x is None:
        return dx, None, None
    return dx, _summed(dy * x, cos), _summed(dy * _rotated(name, x, mode), sin)


def _rotated(name: str, x: np.ndarray, mode: int) -> np.ndarray:
    """Return x after a quarter turn in each plane: (a, b) becomes (-b, a)."""
    if mode == 0:
        a, b = np.split(x, 2, -1)
        return np.concatenate([-b, a], -1)
    if mode == 1:
        return np.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    raise NotImplementedError(f"{name}: mode {mode} is not supported by this CPU kernel")


def _summed(gradient: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Return the sum over the dimensions that were broadcast."""
    axes = tuple(axis for axis in range(gradient.ndim) if owner.shape[axis] == 1 != gradient.shape[axis])
    return gradient.sum(axes, keepdims=True)


@kernel()
def Dense(attrs: Attrs, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return x [..., in] times weight [out, in] transposed, plus bias [out]."""
    out = x @ weight.T
    return out if bias is None else out + bias


def _product(a: np.ndarray, b: np.ndarray, transpose_a: bool, transpose_b: bool) -> np.ndarray:
    return (a.swapaxes(-1, -2) if transpose_a else a) @ (b.swapaxes(-1, -2) if transpose_b else b)


enter(KERNELS, {
    "ClipByValue": lambda attrs, x, low, high: np.clip(x, low, high),  # between two tensors
    "CumsumExt": lambda attrs, x, dim, dtype=None: np.cumsum(x, dim),
    "Divs": lambda attrs, x, other: x / np.asarray(other, x.dtype if x.dtype.kind == "f" else np.float32),
    "FmodScalar": lambda attrs, x, other: np.fmod(x, _alike(other, x)),  # has the sign of x
    "LessScalar": lambda attrs, x, other: x < other,
    "MatMulExt": lambda attrs, a, b: a @ b,
    "MeanExt": lambda attrs, x, dim=None, keep=False, dtype=None: _over(np.mean, x, dim, keep),
    "Muls": lambda attrs, x, other: x * _alike(other, x),
    "Outer": lambda attrs, a, b: np.outer(a, b),
    # NumPy is fast with squares and roots only if the exponent is one of Python's numbers
    "PowTensorScalar": lambda attrs, x, exponent: (
        x**exponent if x.dtype.kind == "f" else np.power(x, _alike(exponent, x))
    ),
    "RemainderTensorScalar": lambda attrs, x, other: np.remainder(x, _alike(other, x)),  # has the sign of the constant
    "SiLU": lambda attrs, x: silu(x),
    "SiLUGrad": lambda attrs, dout, x: silu_gradient(dout, x),
    "SumExt": lambda attrs, x, dim=None, keep=False, dtype=None: _over(np.sum, x, dim, keep),
})  # fmt: skip
enter(KERNELS, {
    "MoveTo": lambda attrs, x, to, blocking=True: x,  # there is one device
    "NPUClearFloatStatusV2": lambda attrs, *inputs: np.zeros(8, np.int32),  # eight flags, none of them up
    "NPUGetFloatStatusV2": lambda attrs, *inputs: np.zeros(8, np.int32),
}, widen=False)  # fmt: skip
enter(LOW_PRECISION, {
    "Equal": lambda attrs, a, b: a == b,  # how gradients are asked whether they are finite
    "Square": lambda attrs, x: x * x,
    "Sqrt": lambda attrs, x: np.sqrt(x),  # of the norm by which Muon divides a momentum
    "Sub": lambda attrs, a, b: a - b,
    # of matrices, the last two dimensions of each tensor
    "BatchMatMul": lambda attrs, a, b, transpose_a=False, transpose_b=False: _product(a, b, transpose_a, transpose_b),
    "MatMul": lambda attrs, a, b, transpose_a=False, transpose_b=False: _product(a, b, transpose_a, transpose_b),
})  # fmt: skip
# a copy of a parameter that the step will change; MindSpore adds most of them behind the front end
enter(LOW_PRECISION, {"TensorMove": lambda attrs, x: x}, widen=False)
