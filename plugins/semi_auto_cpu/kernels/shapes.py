"""What moves values and changes none: shapes, cuts, repetitions."""

from __future__ import annotations

from typing import Any

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import LOW_PRECISION, Attrs, kernel


@kernel(widen=False)
def SplitWithSize(attrs: Attrs, x: np.ndarray, sizes: tuple[int, ...], dim: int = 0) -> tuple[np.ndarray, ...]:
    """Parts of given sizes along a dimension."""
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"SplitWithSize: sizes {tuple(sizes)} do not make up {x.shape[dim]}")
    return tuple(np.split(x, np.cumsum(sizes)[:-1], dim))


@kernel(widen=False)
def TransposeExtView(attrs: Attrs, x: np.ndarray, dim0: int, dim1: int) -> np.ndarray:
    """Two dimensions exchanged."""
    return np.swapaxes(x, dim0, dim1)


@kernel(widen=False)
def ExpandAs(attrs: Attrs, x: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Repeated to another tensor's shape."""
    return np.broadcast_to(x, other.shape)


@kernel(LOW_PRECISION, widen=False)
def Reshape(attrs: Attrs, x: np.ndarray, shape: Any = None) -> np.ndarray:
    """The same values: the caller stores them in the output's shape."""
    return x


@kernel(LOW_PRECISION, widen=False)
def ExpandDims(attrs: Attrs, x: np.ndarray, axis: int) -> np.ndarray:
    """One more dimension of size 1."""
    return np.expand_dims(x, axis)


@kernel(LOW_PRECISION, widen=False)
def Squeeze(attrs: Attrs, x: np.ndarray, axis: Any = None) -> np.ndarray:
    """Without dimensions of size 1: the caller stores the values in the output's shape."""
    return x


@kernel(LOW_PRECISION, widen=False)
def BroadcastTo(attrs: Attrs, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Repeated to a shape, where -1 keeps the tensor's own size."""
    own = (1,) * (len(shape) - x.ndim) + x.shape
    return np.broadcast_to(x, [size if wanted == -1 else wanted for wanted, size in zip(shape, own, strict=True)])


@kernel(LOW_PRECISION, widen=False)
def Transpose(attrs: Attrs, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Dimensions in another order."""
    return np.transpose(x, axes)


@kernel(LOW_PRECISION, widen=False)
def Tile(attrs: Attrs, x: np.ndarray, multiples: tuple[int, ...]) -> np.ndarray:
    """Whole repetitions along each dimension."""
    return np.tile(x, multiples)


@kernel(LOW_PRECISION, widen=False)
def StridedSlice(
    attrs: Attrs, x: np.ndarray, begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...], *masks: int
) -> np.ndarray:
    """A cut of a tensor."""
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
    """Gradient of a cut: zeros around it. Its masks are attributes (`mindspore/ops/operations/_grad_ops.py`)."""
    out = np.zeros(shape, dout.dtype)
    masks = tuple(int(attrs.get(name, "0")) for name in MASKS)
    out[_cut("StridedSliceGrad", begin, end, strides, masks)] = dout
    return out


MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")


def _cut(
    name: str, begin: tuple[int, ...], end: tuple[int, ...], strides: tuple[int, ...], masks: tuple[int, ...]
) -> tuple[slice | int, ...]:
    """An index; `masks` are those of `MASKS`: bits by dimension."""
    from_start, to_end, ellipsis, new_axis, shrink = (*masks, 0, 0, 0, 0, 0)[:5]
    if ellipsis or new_axis:
        raise NotImplementedError(f"{name}: ellipsis_mask {ellipsis}, new_axis_mask {new_axis}")
    return tuple(
        first
        if shrink >> place & 1
        else slice(None if from_start >> place & 1 else first, None if to_end >> place & 1 else last, stride)
        for place, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True))
    )
