"""Rows by their numbers, and the sums that are their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel

_AT_ONCE = 2**20  # numbers that are added by one call: a place of 8 bytes is made for each


def add_rows(target: np.ndarray, index: np.ndarray, rows: np.ndarray) -> None:
    """target[index[i]] += rows[i], where an index may come more than once; in the order of i.

    Number by number because `np.add.at` is three times slower with rows.

    Args:
        target: [n, ...], changed.
        index: [m], within 0 to n - 1.
        rows: [m, ...].
    """
    flat = np.ascontiguousarray(target).reshape(len(target), -1)
    width = flat.shape[1]
    rows = rows.reshape(-1, width)
    for first in range(0, len(index), max(1, _AT_ONCE // width)):
        part = slice(first, first + max(1, _AT_ONCE // width))
        places = index[part, None].astype(np.int64) * width + np.arange(width)
        np.add.at(flat.reshape(-1), places.reshape(-1), rows[part].reshape(-1))
    if not np.shares_memory(flat, target):
        target[...] = flat.reshape(target.shape)


def _within(name: str, index: np.ndarray, size: int) -> np.ndarray:
    """The index, when it stays inside: NumPy would count a negative one from the end."""
    if index.size and not (index.min() >= 0 and index.max() < size):
        raise ValueError(f"{name}: indices from {index.min()} to {index.max()} in a dimension of {size}")
    return index


@kernel(widen=False)
def Embedding(
    attrs: Attrs,
    index: np.ndarray,
    weight: np.ndarray,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
) -> np.ndarray:
    """Rows of a table."""
    if max_norm is not None:
        raise NotImplementedError(f"Embedding: max_norm {max_norm}")
    return weight[_within("Embedding", index, len(weight))]


@kernel()
def EmbeddingDenseBackward(
    attrs: Attrs,
    grad: np.ndarray,
    index: np.ndarray,
    num_weights: int,
    padding_idx: int | None = None,
    scale_grad_by_freq: bool = False,
) -> np.ndarray:
    """Gradient of a table: for each row the sum over the places that took it."""
    if scale_grad_by_freq:
        raise NotImplementedError("EmbeddingDenseBackward: scale_grad_by_freq True")
    out = np.zeros((num_weights, grad.shape[-1]), grad.dtype)
    add_rows(out, _within("EmbeddingDenseBackward", index.reshape(-1), num_weights), grad.reshape(-1, grad.shape[-1]))
    if padding_idx is not None:
        out[padding_idx] = 0
    return out


@kernel(widen=False)
def IndexSelect(attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    """Slices of a dimension by their numbers."""
    return np.take(x, _within("IndexSelect", index, x.shape[dim]), axis=dim)


@kernel(updates=0)
def InplaceIndexAddExt(
    attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray, alpha: float = 1
) -> np.ndarray:
    """X with alpha * source added to the slices that `index` names: IndexSelect's gradient."""
    scaled = source if alpha == 1 else source * np.asarray(alpha, source.dtype)
    _within("InplaceIndexAddExt", index, x.shape[dim])
    add_rows(np.moveaxis(x, dim, 0), index, np.moveaxis(scaled, dim, 0))
    return x


@kernel(widen=False, updates=0)
def InplaceScatterSrc(attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray) -> np.ndarray:
    """x[..., index, ...] = source; of `source` only as much as `index` has."""
    place: list[Any] = list(np.ogrid[tuple(slice(0, size) for size in index.shape)])
    place[dim] = _within("InplaceScatterSrc", index, x.shape[dim])
    x[tuple(place)] = source[tuple(slice(0, size) for size in index.shape)]
    return x


@kernel()
def OneHotExt(
    attrs: Attrs, x: np.ndarray, num_classes: int, on_value: Any, off_value: Any, axis: int = -1
) -> np.ndarray:
    """`on_value` where the new dimension's number is x, else `off_value`."""
    if num_classes < 0:
        num_classes = int(x.max()) + 1
    out = np.where(x[..., None] == np.arange(num_classes), on_value, off_value)
    return out if axis == -1 else np.moveaxis(out, -1, axis)
