"""ZB-H1 and ZB-H2 of Zero Bubble Pipeline Parallelism (arXiv 2401.10241, figure 3): weight gradients as filling.

A backward that only makes the input's gradients is short, so the stage before can go on earlier; the weight gradients
wait until a stage would idle. Stage s of p runs p - s forwards first and lags its weight gradients s micro-batches
behind (H1: memory of 1F1B), or 2 (p - s) - 1 forwards and 2 s (H2: no bubble when F = B = W, memory 2 p - 1).
H2's stages begin and end one after the other: that saves time only where the optimizer does not wait for all stages.
"""

from __future__ import annotations

import numpy as np

from tools.pipeline.operation import Op, as_table


def zb_h1(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Bubble (p - 1) (F + B - W), with B the input's gradients only; no more in flight than 1F1B."""
    return _lagging(stages - stage, stage, micro_batches)


def zb_h2(stage: int, stages: int, chunks: int, micro_batches: int) -> np.ndarray:
    """Bubble of a stage between its own first and last operation (p - 1) (F + B - 2 W); 2 p - 1 in flight."""
    return _lagging(2 * (stages - stage) - 1, 2 * stage, micro_batches)


def _lagging(warm_up: int, lag: int, micro_batches: int) -> np.ndarray:
    """`warm_up` forwards; then by turns a backward, the weight gradients `lag` micro-batches before, and a forward."""
    order = [Op("F", number, 0) for number in range(min(warm_up, micro_batches))]
    for number in range(micro_batches):
        order.append(Op("B", number, 0))
        if number >= lag:
            order.append(Op("W", number - lag, 0))
        if number + warm_up < micro_batches:
            order.append(Op("F", number + warm_up, 0))
    left = range(max(0, micro_batches - lag), micro_batches)
    return as_table([*order, *(Op("W", number, 0) for number in left)])
