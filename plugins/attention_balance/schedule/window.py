"""Look-ahead: which samples share a step, chosen among the samples of W consecutive steps. NumPy only.

Off by default (W = 1), because it changes training: the set of samples of a step, and so its gradient, is no longer
the one that the dataset's order gives. Each sample is still trained exactly once in its window of W steps.
"""

from __future__ import annotations

import numpy as np


def deal(costs: np.ndarray, unit: int) -> np.ndarray:
    """Deal the samples of W global batches to W steps so that samples of like cost meet.

    Sorted by cost and cut into units (all samples that run at the same time, ranks * slots); the units go to the steps
    in turn, back and forth, so that every step gets its share of heavy and light ones.

    Args:
        costs: float64 [W, batch]; batch is a multiple of `unit`.
        unit: samples that stay together.

    Returns:
        int64 [W, batch]: indices into the flattened costs, each once; a step's are rising.
    """
    window, batch = costs.shape
    units = np.argsort(-costs.ravel(), kind="stable").reshape(batch // unit, window, unit)
    units[1::2] = units[1::2, ::-1]
    return np.sort(units.transpose(1, 0, 2).reshape(window, batch), axis=1)
