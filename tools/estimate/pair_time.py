"""This module predicts the seconds of a forward and a backward pass that run as a pair. In a pair, the communication of
each pass in the MoE layers is hidden under the computation of the other pass.

A pair consists of the forward pass of one micro-batch and the backward pass of another micro-batch, which run together
through the layers of a chunk.

An MoE layer alternates computation and expert parallel communication: attention, dispatch, experts, combine; a backward
pass runs these steps in reverse order. A pass that runs without a second pass waits for its own communication. If two
passes run together, the communication of one pass runs under the computation of the other pass (DeepSeek-V3, arXiv
2412.19437, figure 4; report section 4.1; Pangu Ultra MoE's adaptive pipe overlap). Computation and communication are
two streams, each with its own order of issue, as in `plugins.ep_overlap.timeline`: the two passes take turns, and
weight gradients, for which no other operator waits, come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from plugins.ep_overlap.timeline import Key, Op
from plugins.ep_overlap.timeline import simulate as run_timeline

_STEPS = ("attention", "dispatch", "experts", "combine")
_SENDS = ("dispatch", "combine")


@dataclass(frozen=True)
class LayerSeconds:
    """A `LayerSeconds` holds the seconds of a micro-batch's forward or backward pass in one MoE layer."""

    attention: float  # all computation before dispatch, including the router; of a backward pass, its input gradients
    dispatch: float  # brings tokens to their experts, or returns their gradients
    experts: float  # computation; of a backward pass, the input gradients, including recomputation
    combine: float  # returns results, or brings their gradients to the experts
    weights: float = 0.0  # gradients of the weights of attention and experts (only in a backward pass)

    @property
    def serial(self) -> float:
        """Return the seconds of the pass without any overlap."""
        return self.computation + self.communication

    @property
    def computation(self) -> float:
        """Return the seconds of the pass's computation."""
        return self.attention + self.experts + self.weights

    @property
    def communication(self) -> float:
        """Return the seconds of the pass's communication."""
        return self.dispatch + self.combine


def pair_seconds(forward: LayerSeconds, backward: LayerSeconds, layers: int) -> float:
    """Return the seconds of a forward pass and a backward pass that run as a pair (at the same time), each through
    `layers` layers. The seconds of a pair are at least the largest of these times: the computation of both passes, the
    communication of both passes, and the serial time of each pass without weight gradients. The seconds of a pair are
    at most the sum of the serial times of both passes.
    """
    return pair_of([forward] * layers, [backward] * layers)


def pair_of(forward: Sequence[LayerSeconds], backward: Sequence[LayerSeconds]) -> float:
    """Return the seconds of a forward pass and a backward pass that run as a pair (at the same time) through layers
    with different times. The layers of each pass are listed in the order in which the pass runs them.
    """
    chains = _chain(forward, 0), _chain(backward, 1)
    # of layers that are alike a product, which rounds once
    alike = all(one == backward[0] for one in backward)
    weights = len(backward) * backward[0].weights if alike else sum(one.weights for one in backward)
    last = Op("weights", 1, "compute", weights, (chains[1][-1].key,))
    return run_timeline([*(op for both in zip(*chains, strict=True) for op in both), last]).makespan


def _chain(every: Sequence[LayerSeconds], chunk: int) -> list[Op]:
    """Return the operators of one pass in order, each after the one before; a backward's begin at combine."""
    chain: list[Op] = []
    for layer, seconds in enumerate(every):
        for step in _STEPS if chunk == 0 else _STEPS[::-1]:
            after: tuple[Key, ...] = (chain[-1].key,) if chain else ()
            stream = "inter" if step in _SENDS else "compute"
            chain.append(Op(f"{step} {layer}", chunk, stream, getattr(seconds, step), after))
    return chain


def hidden_seconds(forward: LayerSeconds, backward: LayerSeconds, layers: np.ndarray) -> np.ndarray:
    """Return the seconds that are saved if forward and backward passes run in pairs, as an array [chunks, chunks,
    stages] like `Durations.hidden`. The argument `layers` [chunks, stages] holds the numbers of MoE layers. If two
    chunks have different numbers of layers, the number of layers that run in pairs is the number of layers of the
    smaller chunk.
    """
    fewer = np.minimum(layers[:, None], layers[None])
    saved = [0.0]
    alone = forward.serial + backward.serial
    saved += [count * alone - pair_seconds(forward, backward, count) for count in range(1, int(fewer.max()) + 1)]
    return np.array(saved)[fewer]
