"""Train some steps under a strategy, on ranks in NumPy, and keep the record of every tensor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.accuracy.emulate.context import Context, Entry
from tools.accuracy.emulate.kernels import Kernels
from tools.accuracy.emulate.network import Network, layouts_of, make_weights
from tools.accuracy.emulate.optimizer import Optimizer
from tools.accuracy.emulate.sizes import Sizes
from tools.accuracy.emulate.strategy import Strategy
from tools.accuracy.emulate.world import World

ONE_RANK = Strategy()


@dataclass(frozen=True)
class Emulated:
    """What a run recorded, in order of execution; losses and global norms, one a step."""

    strategy: Strategy
    entries: list[Entry]
    losses: list[float]
    norms: list[float]


def emulate(
    sizes: Sizes,
    strategy: Strategy = ONE_RANK,
    steps: int = 1,
    seed: int = 0,
    kernels: Kernels | None = None,
    world: World | None = None,
) -> Emulated:
    """Train `steps` steps of a random model on random tokens, the same ones for every strategy.

    Args:
        kernels, world: others than the right ones, to see what a fault looks like.
    """
    assert not strategy.misfit(sizes), strategy.misfit(sizes)
    whole, layouts = make_weights(sizes, seed), layouts_of(sizes, strategy)
    weights = {name: layouts[name].pieces(value) for name, value in whole.items()}
    context = Context(sizes, strategy, world or World(strategy.mesh), kernels or Kernels(), layouts, weights)
    network, optimizer = Network(context), Optimizer(context)
    rng = np.random.default_rng([seed, 1])
    losses, norms = [], []
    for _ in range(steps):
        tokens = rng.integers(0, sizes.vocabulary, (sizes.batch, sizes.length + 1))
        losses.append(network.gradients(tokens[:, :-1], tokens[:, 1:]))
        norms.append(optimizer.step())
    return Emulated(strategy, context.entries, losses, norms)
