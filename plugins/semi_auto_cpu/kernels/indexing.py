"""This module holds operators that move values: lookups by index with their gradients, shapes, slices and sorting.

Among equal elements the element with the lower index comes first. MindSpore guarantees this order for
`mindspore.ops.topk_ext` (gen_ops_def.py); for `sort_ext` without `stable` it guarantees nothing, and this module
assumes the order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import KERNELS, LOW_PRECISION, Attrs, enter, kernel

_AT_ONCE = 2**20  # numbers that are added by one call: a place of 8 bytes is made for each


def add_rows(target: np.ndarray, index: np.ndarray, rows: np.ndarray) -> None:
    """Add rows[i] to target[index[i]] for each i in order; an index may occur more than once.

    The function adds the elements one by one, because `np.add.at` is three times slower with whole rows.

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
    """Return the index if it lies inside the dimension; NumPy would count a negative index from the end."""
    if index.size and not (index.min() >= 0 and index.max() < size):
        raise ValueError(
            f"{name}: the indices range from {index.min()} to {index.max()}, but the dimension has only the indices "
            f"0 to {size - 1}"
        )
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
    """Return the rows of an embedding table at the given indices."""
    if max_norm is not None:
        raise NotImplementedError(f"Embedding: max_norm {max_norm} is not supported by this CPU kernel")
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
    """Return the gradient of an embedding table: for each row of the table, the sum of the gradients of all lookups of
    this row.
    """
    if scale_grad_by_freq:
        raise NotImplementedError("EmbeddingDenseBackward: scale_grad_by_freq True is not supported by this CPU kernel")
    out = np.zeros((num_weights, grad.shape[-1]), grad.dtype)
    add_rows(out, _within("EmbeddingDenseBackward", index.reshape(-1), num_weights), grad.reshape(-1, grad.shape[-1]))
    if padding_idx is not None:
        out[padding_idx] = 0
    return out


@kernel(widen=False)
def IndexSelect(attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
    """Return the slices along a dimension at the given indices."""
    return np.take(x, _within("IndexSelect", index, x.shape[dim]), axis=dim)


@kernel(updates=0)
def InplaceIndexAddExt(
    attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray, alpha: float = 1
) -> np.ndarray:
    """Return x with alpha * source added to the slices that `index` names; this is IndexSelect's gradient."""
    scaled = source if alpha == 1 else source * np.asarray(alpha, source.dtype)
    _within("InplaceIndexAddExt", index, x.shape[dim])
    add_rows(np.moveaxis(x, dim, 0), index, np.moveaxis(scaled, dim, 0))
    return x


@kernel(widen=False, updates=0)
def InplaceScatterSrc(attrs: Attrs, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray) -> np.ndarray:
    """Set x[..., index, ...] = source; of `source` only as many slices are used as `index` has elements."""
    place: list[Any] = list(np.ogrid[tuple(slice(0, size) for size in index.shape)])
    place[dim] = _within("InplaceScatterSrc", index, x.shape[dim])
    x[tuple(place)] = source[tuple(slice(0, size) for size in index.shape)]
    return x


@kernel()
def OneHotExt(
    attrs: Attrs, x: np.ndarray, num_classes: int, on_value: Any, off_value: Any, axis: int = -1
) -> np.ndarray:
    """Return a tensor with a new dimension, which holds `on_value` at the index that x names and `off_value`
    elsewhere.
    """
    if num_classes < 0:
        num_classes = int(x.max()) + 1
    out = np.where(x[..., None] == np.arange(num_classes), on_value, off_value)
    return out if axis == -1 else np.moveaxis(out, -1, axis)


@kernel(widen=False)
def SplitWithSize(attrs: Attrs, x: np.ndarray, sizes: tuple[int, ...], dim: int = 0) -> tuple[np.ndarray, ...]:
    """Split a tensor along a dimension into parts of the given sizes."""
    if sum(sizes) != x.shape[dim]:
        raise ValueError(
            f"SplitWithSize: sizes {tuple(sizes)} must add up to {x.shape[dim]}, the size of the dimension"
        )
    return tuple(np.split(x, np.cumsum(sizes)[:-1], dim))


@kernel(widen=False)
def Chunk(attrs: Attrs, x: np.ndarray, chunks: int, dim: int = 0) -> tuple[np.ndarray, ...]:
    """Return at most `chunks` parts of x along a dimension; only the last part may be smaller than the other parts."""
    size = -(-x.shape[dim] // chunks)
    return tuple(np.split(x, range(size, x.shape[dim], size), dim))


@kernel(LOW_PRECISION, widen=False)
def BroadcastTo(attrs: Attrs, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor that is repeated to a given shape; a size of -1 in this shape keeps the tensor's own size."""
    own = (1,) * (len(shape) - x.ndim) + x.shape
    return np.broadcast_to(x, [size if wanted == -1 else wanted for wanted, size in zip(shape, own, strict=True)])


@kernel(LOW_PRECISION, widen=False)
def StridedSlice(
    attrs: Attrs, x: np.ndarray, begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...], *masks: int
) -> np.ndarray:
    """Return the slice of x from `begin` to `end` with `strides`."""
    return x[_cut("StridedSlice", begin, end, strides, masks)]


@kernel(LOW_PRECISION, widen=False)
def StridedSliceGrad(
    attrs: Attrs,
    dout: np.ndarray,
    shape: tuple[int, ...],
    begin: tuple[int, ...],
    end: tuple[int, ...],
    strides: tuple[int, ...],
) -> np.ndarray:
    """Return the gradient of the sliced tensor: the gradient of the slice, and zeros around it. The masks of the slice
    are attributes of the operator (`mindspore/ops/operations/_grad_ops.py`).
    """
    out = np.zeros(shape, dout.dtype)
    masks = tuple(int(attrs.get(name, "0")) for name in MASKS)
    out[_cut("StridedSliceGrad", begin, end, strides, masks)] = dout
    return out


MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _cut(
    name: str, begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...], masks: tuple[int, ...]
) -> tuple[slice | int, ...]:
    """Return an index; `masks` are those of `MASKS`: bits by dimension."""
    from_start, to_end, ellipsis, new_axis, shrink = (*masks, 0, 0, 0, 0, 0)[:5]
    if ellipsis or new_axis:
        raise NotImplementedError(
            f"{name}: this CPU kernel does not support ellipsis_mask {ellipsis} and new_axis_mask {new_axis}"
        )
    return tuple(
        first
        if shrink >> place & 1
        else slice(None if from_start >> place & 1 else first, None if to_end >> place & 1 else last, stride)
        for place, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True))
    )


def _order(x: np.ndarray, dim: int, descending: bool) -> np.ndarray:
    """Return indices of the sorted elements; a NaN counts as the largest, as NumPy and PyTorch have it."""
    if not descending:
        return np.argsort(x, axis=dim, kind="stable")
    # backwards twice, because the negative of an unsigned number or of the least integer is none
    backwards = np.flip(np.argsort(np.flip(x, dim), axis=dim, kind="stable"), dim)
    return x.shape[dim] - 1 - backwards


@kernel()
def SortExt(
    attrs: Attrs, x: np.ndarray, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values sorted along a dimension, and the original index of each value."""
    order = _order(x, dim, descending)
    return np.take_along_axis(x, order, dim), order


@kernel()
def TopkExt(
    attrs: Attrs, x: np.ndarray, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k largest (or smallest) values in order, and the index of each value."""
    order = np.take(_order(x, dim, largest), np.arange(k), dim)
    return np.take_along_axis(x, order, dim), order


enter(KERNELS, {
    "ExpandAs": lambda attrs, x, other: np.broadcast_to(x, other.shape),
    "TransposeExtView": lambda attrs, x, dim0, dim1: np.swapaxes(x, dim0, dim1),
}, widen=False)  # fmt: skip
enter(LOW_PRECISION, {
    "ExpandDims": lambda attrs, x, axis: np.expand_dims(x, axis),
    "Reshape": lambda attrs, x, shape=None: x,  # the caller stores the values in the output's shape
    "Squeeze": lambda attrs, x, axis=None: x,  # as well
    "Tile": lambda attrs, x, multiples: np.tile(x, multiples),
    "Transpose": lambda attrs, x, axes: np.transpose(x, axes),
}, widen=False)  # fmt: skip
