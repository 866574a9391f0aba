"""This module records in every training step how many tokens chose each expert. A subclass of MindFormers' callback
records the counts, because MindFormers resets its counters of tokens before another callback could read them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from mindformers.core.callback.callback import TopkBiasBalanceCallback

LOAD_END, BIAS_END = ".expert_load", ".expert_bias"  # ends of names; the rest is the router


class CountedBias(TopkBiasBalanceCallback):
    """A `CountedBias` is a `TopkBiasBalanceCallback` that first records in every step how many of this rank's tokens
    chose each expert, and then moves the routers' biases and resets the counters as its parent class does.

    Attributes:
        loads: for each step and each router the share of the choices that each expert got, float32 [experts].
    """

    loads: ClassVar[list[dict[str, np.ndarray]]] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Record how many tokens chose each expert, then move the routers' biases."""
        self.loads.append(of_routers(run_context, LOAD_END))
        super().on_train_step_end(run_context)


def of_routers(run_context: Any, end: str) -> dict[str, np.ndarray]:
    """Return for each router a copy of its parameter whose name ends with the text `end`; a copy is needed because
    `asnumpy` returns a view of a buffer that later steps change.
    """
    parameters = run_context.original_args().train_network.network.get_parameters()
    return {item.name.removesuffix(end): np.array(item.asnumpy()) for item in parameters if item.name.endswith(end)}
