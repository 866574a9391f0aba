"""This module records how many tokens chose each expert in every step, because MindFormers resets the counters before a
recorder can read them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from mindformers.core.callback.callback import TopkBiasBalanceCallback

LOAD_END, BIAS_END = ".expert_load", ".expert_bias"  # ends of names; the rest is the router


class CountedBias(TopkBiasBalanceCallback):
    """A `CountedBias` is a `TopkBiasBalanceCallback` that first records this rank's expert counters of every step, then
    moves the biases and resets the counters as its parent does.

    Attributes:
        loads: for each step, router -> each expert's share of the choices, float32 [experts].
    """

    loads: ClassVar[list[dict[str, np.ndarray]]] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Record the experts' counters, then move the routers' biases."""
        self.loads.append(of_routers(run_context, LOAD_END))
        super().on_train_step_end(run_context)


def of_routers(run_context: Any, end: str) -> dict[str, np.ndarray]:
    """Return for each router a copy of the parameter whose name ends with the given text; a copy is needed, because
    `asnumpy` returns a view of a buffer.
    """
    parameters = run_context.original_args().train_network.network.get_parameters()
    return {item.name.removesuffix(end): np.array(item.asnumpy()) for item in parameters if item.name.endswith(end)}
