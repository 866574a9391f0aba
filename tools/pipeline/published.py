"""Bubbles and memory of pipeline schedules as their papers state them; `docs/schedules.md` has them beside simulations.

Symbols of the DualPipe repository's table: p pieces of the model in a row (`PP`), f a forward of one piece, b its whole
backward, w the weight gradients in it, pair a forward and a backward run together. What is in flight is counted in
activations of one piece and micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One row: seconds of bubble of (p, f, b, w, pair), the most in flight on a device of (p).

    Args:
        own: the bubble is that of a stage between its own first and last operation, which is what a step waits only
            where no stage waits for the others (`tools.pipeline.simulate.Simulation.waits`).
        exact: False for a paper's "about", of f = b - w = w and many micro-batches.
        pieces: of the model on one device; with 2 there are p / 2 devices, but for dual_pipe, which has two models.
    """

    source: str
    bubble: Callable[[int, float, float, float, float], float]
    held: Callable[[int], int]
    own: bool = False
    exact: bool = True
    pieces: int = 1


_ZERO_BUBBLE, _CONTROLLABLE = "arXiv 2401.10241, section 2", "arXiv 2405.15362, table of its public demonstration"
_DUAL_PIPE = "github.com/deepseek-ai/DualPipe, README"


def _dual_pipe(p: int, f: float, b: float, w: float, pair: float) -> float:
    return (p / 2 - 1) * (pair + b - 3 * w)


def _about(share: float) -> Callable[[int, float, float, float, float], float]:
    """A bubble of `share` micro-batches for each of the p / 2 devices; one is two pieces of f + b."""
    return lambda p, f, b, w, pair: share * p / 2 * 2 * (f + b)


PUBLISHED = {
    "1f1b": Published(_DUAL_PIPE, lambda p, f, b, w, pair: (p - 1) * (f + b), lambda p: p),
    "zb_h1": Published(
        f"{_ZERO_BUBBLE}; ZB1P in {_DUAL_PIPE}", lambda p, f, b, w, pair: (p - 1) * (f + b - 2 * w), lambda p: p
    ),
    "zb_h2": Published(_ZERO_BUBBLE, lambda p, f, b, w, pair: (p - 1) * (f + b - 3 * w), lambda p: 2 * p - 1, own=True),
    # the demonstration counts in micro-batches of a device's two pieces
    "zb_v": Published(_CONTROLLABLE, _about(0), lambda p: p, True, False, 2),
    "v_half": Published(_CONTROLLABLE, _about(1 / 2), lambda p: 2 * ((p // 2 + 2) // 2), True, False, 2),
    "v_min": Published(_CONTROLLABLE, _about(2 / 3), lambda p: 2 * ((p // 2 + 4) // 3), True, False, 2),
    "dual_pipe": Published(_DUAL_PIPE, _dual_pipe, lambda p: p + 1, pieces=2),
    "dual_pipe_v": Published(_DUAL_PIPE, _dual_pipe, lambda p: p + 1, pieces=2),
}
