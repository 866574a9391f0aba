"""1F1B: in which order a pipeline stage runs forwards and backwards. NumPy only.

The order of PipeDream-flush (arXiv 2006.09503, figure 2, with a flush at the end of the step), as in Megatron-LM: here
for 3 stages and 4 micro-batches, a column for each time, forwards as 0 1 2 3 and backwards as a b c d:

    stage 0   0 1 2     a 3 b   c   d
    stage 1     0 1   a 2 b 3 c   d
    stage 2       0 a 1 b 2 c 3 d
"""

from __future__ import annotations

import numpy as np

FORWARD, BACKWARD = 0, 1


def by_turns(forward: np.ndarray, backward: np.ndarray, warm_up: int) -> np.ndarray:
    """`warm_up` forwards, then one forward and one backward by turns, then the backwards that are left.

    Args:
        forward, backward: [operations, columns] each in its own order, equally many.
        warm_up: forwards before the first backward but one; more than there are means all.
    """
    warm_up = min(warm_up, len(forward))
    steady = len(forward) - warm_up
    turns = np.stack([forward[warm_up:], backward[:steady]], axis=1).reshape(-1, forward.shape[1])
    return np.concatenate([forward[:warm_up], turns, backward[steady:]])


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> np.ndarray:
    """What `stage` of `stages` runs: int64 [2 * micro_batches, 2] of `FORWARD` or `BACKWARD`, and micro-batch."""
    numbers = np.arange(micro_batches)
    forward, backward = (np.stack([np.full(micro_batches, kind), numbers], axis=1) for kind in (FORWARD, BACKWARD))
    return by_turns(forward, backward, stages - 1 - stage)
