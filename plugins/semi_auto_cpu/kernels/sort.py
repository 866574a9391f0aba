"""Orders and the largest elements. Among equal elements the one with the lower index comes first.

`mindspore.ops.topk_ext` promises that (gen_ops_def.py); of `sort_ext` without `stable` nothing is promised, and it is
assumed here.
"""

from __future__ import annotations

import numpy as np

from plugins.semi_auto_cpu.kernels.registry import Attrs, kernel


def _order(x: np.ndarray, dim: int, descending: bool) -> np.ndarray:
    """Indices of the sorted elements; a NaN counts as the largest, as NumPy and PyTorch have it."""
    if not descending:
        return np.argsort(x, axis=dim, kind="stable")
    # backwards twice, because the negative of an unsigned number or of the least integer is none
    backwards = np.flip(np.argsort(np.flip(x, dim), axis=dim, kind="stable"), dim)
    return x.shape[dim] - 1 - backwards


@kernel()
def SortExt(
    attrs: Attrs, x: np.ndarray, dim: int = -1, descending: bool = False, stable: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Sorted values and their indices."""
    order = _order(x, dim, descending)
    return np.take_along_axis(x, order, dim), order


@kernel()
def TopkExt(
    attrs: Attrs, x: np.ndarray, k: int, dim: int = -1, largest: bool = True, is_sorted: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The k largest (or smallest) values in order, and their indices."""
    order = np.take(_order(x, dim, largest), np.arange(k), dim)
    return np.take_along_axis(x, order, dim), order
