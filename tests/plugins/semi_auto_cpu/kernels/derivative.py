"""Gradients by differences, and tensors in the types of a graph."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LOW = (BFLOAT16, np.dtype(np.float16))


def numerical(function: Callable[..., np.ndarray], inputs: Sequence[np.ndarray], dout: np.ndarray) -> list[np.ndarray]:
    """Of sum(function(*inputs) * dout) by central differences in float64, for each input."""
    wide = [x.astype(np.float64) for x in inputs]
    gradients = []
    for x in wide:
        gradient = np.zeros_like(x)
        for place in np.ndindex(*x.shape):
            kept, step = x[place], 1e-5
            x[place] = kept + step
            above = np.sum(function(*wide) * dout)
            x[place] = kept - step
            gradient[place] = (above - np.sum(function(*wide) * dout)) / (2 * step)
            x[place] = kept
        gradients.append(gradient)
    return gradients


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the values as the caller stores them, rounded to `dtype`."""
    return x.astype(np.float32).astype(dtype)
