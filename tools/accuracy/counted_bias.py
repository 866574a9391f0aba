"""This module records in every step how many tokens chose each expert, before MindFormers resets its counters."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from mindformers.core.callback.callback import TopkBiasBalanceCallback

LOAD_END, BIAS_END = ".expert_load", ".expert_bias"  # ends of names; the rest is the router


class CountedBias(TopkBiasBalanceCallback):
    """A `CountedBias` is a `TopkBiasBalanceCallback` that also records the experts' loads: before it changes the biases
    in a step, it appends to `loads` for each router the share of the choices that each expert got, float32 [experts].
    """

    loads: ClassVar[list[dict[str, np.ndarray]]] = []

    def on_train_step_end(self, run_context: Any) -> None:
        """Record the loads, then move the biases."""
        self.loads.append(of_routers(run_context, LOAD_END))
        super().on_train_step_end(run_context)


def of_routers(run_context: Any, end: str) -> dict[str, np.ndarray]:
    """Return for each router a copy of its parameter whose name ends with `end`; `asnumpy` returns a view."""
    parameters = run_context.original_args().train_network.network.get_parameters()
    return {item.name.removesuffix(end): np.array(item.asnumpy()) for item in parameters if item.name.endswith(end)}
