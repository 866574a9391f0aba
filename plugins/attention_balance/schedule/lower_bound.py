"""Below this no assignment can go: how much a plan could still gain at most. NumPy only."""

from __future__ import annotations

import numpy as np

from plugins.attention_balance.schedule.objective import Objective


def lower_bound(costs: np.ndarray, ranks: int, micro_batches: int, slots: int, objective: Objective) -> np.ndarray:
    """The largest of several bounds on the step time [...], in the unit of `costs` [..., samples].

    With one sample a slot, one group of ranks and no pipeline the bound is attained (`assign.py`). In the others
    (x: costs falling; y: the falling block maxima of `assign.py`'s claim, G groups of M blocks):

    1. The mean: all work spread evenly over the ranks.
    2. Blocks: the maxima of all blocks sum to at least sum(y), and some group has a G-th of them.
    3. Pigeonhole: of the j G + 1 heaviest blocks some group has j + 1, besides its other M - j - 1 blocks.
    4. Pipelines add what `_pipeline` says. That bound is loose when micro-batches differ much.
    """
    *lead, size = costs.shape
    falling = -np.sort(-costs.reshape(-1, size), axis=1)
    together = objective.ranks_per_barrier
    groups = ranks // together
    work = falling.sum(1) / ranks
    blocks = _least_maxima(falling, together, slots)
    bound = np.maximum(work, blocks.sum(1) / groups)
    if together == 1:
        bound = np.maximum(bound, _pigeonhole(falling, ranks))
    else:
        bound = np.maximum(bound, _pigeonhole(blocks, groups))
    if objective.stages > 1:
        bound = _pipeline(bound, blocks, micro_batches, objective)
    return bound.reshape(lead)


def _least_maxima(falling: np.ndarray, together: int, slots: int) -> np.ndarray:
    """[rows, blocks]: the k-th slowest block of any assignment takes at least this long.

    By the claim its largest sample is at least x[k * together * slots]; its rank has slots - 1 others besides, each
    of them at least as heavy as the lightest of all.
    """
    company = falling[:, falling.shape[1] - (slots - 1) :].sum(1, keepdims=True)
    return falling[:, :: together * slots] + company


def _pigeonhole(falling: np.ndarray, groups: int) -> np.ndarray:
    """Bound 3, for items [rows, n] falling, as many in each of `groups` groups."""
    rows, count = falling.shape
    size = count // groups
    total = np.concatenate((np.zeros((rows, 1)), np.cumsum(falling, axis=1)), axis=1)
    j = np.arange(size)
    crowded = total[:, j * groups + 1] - total[:, j * groups - j]
    others = total[:, -1:] - total[:, count - (size - j - 1)]
    return (crowded + others).max(1)


def _pipeline(work: np.ndarray, blocks: np.ndarray, micro_batches: int, objective: Objective) -> np.ndarray:
    """Bounds on the makespan of p stages; f: forward share, b = 1 - f, L: the slowest micro-batch, S: the fastest.

    1. The last stage works through all of them, after the first came down and before the last goes up:
       sum + (p - 1) S.
    2. L alone goes down and up all stages; on the first stage the forwards of those before it come before, the
       backwards of those behind it after: p L + min(f, b) * (sum of the others).
    3. With X before L and Y behind it (sums): the last stage finishes X and L, L goes up, the first stage then runs
       the backwards of Y: (p - 1) f S + X + L + (p - 1) b L + b Y. Mirrored: f X + (p - 1) f L + L + Y + (p - 1) b S.
       Whatever X and Y are, b times the first plus f times the second stays below the makespan.
    """
    more, f = objective.stages - 1, objective.forward_share
    b = 1 - f
    slowest, fastest = blocks[:, 0], blocks[:, -1]
    others = blocks[:, blocks.shape[1] - (micro_batches - 1) :].sum(1)
    alone = objective.stages * slowest + min(f, b) * others
    around = slowest * (1 + more * (b * b + f * f)) + (1 - f * b) * others + more * 2 * f * b * fastest
    return np.maximum.reduce((work + more * fastest, alone, around))
