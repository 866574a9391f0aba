"""Element by element: arithmetic with constants, activations."""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import LOW_PRECISION, Attrs, kernel


def _alike(number: Any, x: np.ndarray) -> np.ndarray:
    """A constant in the type of a tensor, so that NumPy does not compute in float64; integers stay exact."""
    if x.dtype.kind in "iub" and isinstance(number, float):
        return np.asarray(number, np.float32)
    return np.asarray(number, x.dtype)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)); where exp() overflows that is 0."""
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """X sigmoid(x)."""
    return x * sigmoid(x)


def silu_gradient(dout: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The derivative of x sigmoid(x), times `dout`."""
    s = sigmoid(x)
    return dout * s * (1 + x * (1 - s))


@kernel()
def Divs(attrs: Attrs, x: np.ndarray, other: float) -> np.ndarray:
    """X / constant."""
    return x / np.asarray(other, x.dtype if x.dtype.kind == "f" else np.float32)


@kernel()
def Muls(attrs: Attrs, x: np.ndarray, other: float) -> np.ndarray:
    """X * constant."""
    return x * _alike(other, x)


@kernel()
def FmodScalar(attrs: Attrs, x: np.ndarray, other: float) -> np.ndarray:
    """Remainder with the sign of x."""
    return np.fmod(x, _alike(other, x))


@kernel()
def RemainderTensorScalar(attrs: Attrs, x: np.ndarray, other: float) -> np.ndarray:
    """Remainder with the sign of the constant."""
    return np.remainder(x, _alike(other, x))


@kernel()
def PowTensorScalar(attrs: Attrs, x: np.ndarray, exponent: float) -> np.ndarray:
    """X to the power of a constant; NumPy is fast with squares and roots only if that is one of Python's numbers."""
    return x**exponent if x.dtype.kind == "f" else np.power(x, _alike(exponent, x))


@kernel()
def SiLU(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    """X sigmoid(x)."""
    return silu(x)


@kernel()
def SiLUGrad(attrs: Attrs, dout: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Gradient of SiLU."""
    return silu_gradient(dout, x)


@kernel()
def Swiglu(attrs: Attrs, x: np.ndarray, dim: int = -1) -> np.ndarray:
    """silu(a) b, where a and b are the halves of x along `dim`."""
    a, b = np.split(x, 2, dim)
    return silu(a) * b


@kernel()
def SwigluGrad(attrs: Attrs, dout: np.ndarray, x: np.ndarray, dim: int = -1) -> np.ndarray:
    """Gradient of Swiglu."""
    a, b = np.split(x, 2, dim)
    return np.concatenate([silu_gradient(dout * b, a), dout * silu(a)], dim)


@kernel()
def ClipByValue(attrs: Attrs, x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """X, between `low` and `high`, which are tensors."""
    return np.clip(x, low, high)


@kernel()
def LessScalar(attrs: Attrs, x: np.ndarray, other: float) -> np.ndarray:
    """X < constant."""
    return x < other


@kernel(widen=False)
def MoveTo(attrs: Attrs, x: np.ndarray, to: str, blocking: bool = True) -> np.ndarray:
    """A copy on another device: here there is one."""
    return x


@kernel(LOW_PRECISION)
def Sub(attrs: Attrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A - b."""
    return a - b


@kernel(LOW_PRECISION)
def AddN(attrs: Attrs, tensors: list[np.ndarray]) -> np.ndarray:
    """The sum of tensors, in their order."""
    total = tensors[0].copy()
    for item in tensors[1:]:
        total += item
    return total


@kernel(LOW_PRECISION, updates=0)
def AssignAdd(attrs: Attrs, variable: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The variable plus a value; how gradients in bfloat16 are accumulated in float32."""
    return variable + value


@kernel(LOW_PRECISION, widen=False, updates=0)
def Assign(attrs: Attrs, variable: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The value, in the variable's place."""
    return value


@kernel(LOW_PRECISION, widen=False)
def TensorMove(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    """A copy of a parameter that the step will change; MindSpore adds most of them behind the front end."""
    return x


@kernel(LOW_PRECISION)
def Equal(attrs: Attrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A == b; how gradients are asked whether they are finite."""
    return a == b


@kernel(LOW_PRECISION)
def Square(attrs: Attrs, x: np.ndarray) -> np.ndarray:
    """X * x."""
    return x * x
