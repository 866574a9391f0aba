"""How long a step takes, from where the devices really wait. One knob, derived from the parallel layout. NumPy only.

Expert parallelism exchanges tokens in every MoE layer, so the ranks of an EP group pass each micro-batch together:
the slowest of them sets its time. All data-parallel ranks meet at the end of the step. Context- and tensor-parallel
devices work on the same sample, so they add no wait between different samples. MindFormers numbers devices
(dp, cp, tp) with tp fastest and an EP group is `expert_parallel` consecutive devices (`get_ep_group_name`): it spans
ep / (cp * tp) data-parallel ranks. With `g` ranks in such a group and `t` the time of a micro-batch on a rank:

    step time = max over groups of (sum over micro-batches of (max over the group's ranks of t))

g = all ranks is the barrier of every micro-batch, g = 1 that of the step alone. With pipeline stages the inner sum
becomes the makespan of 1F1B (`pipeline.makespan`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.attention_balance.schedule.pipeline import makespan
from plugins.errors import RecipeError


@dataclass(frozen=True)
class Objective:
    """What a plan minimises.

    ranks_per_barrier: data-parallel ranks that wait for each other in every micro-batch;
    stages: pipeline stages; forward_share: the share of a micro-batch's time that its forward pass takes.
    """

    ranks_per_barrier: int
    stages: int = 1
    forward_share: float = 1 / 3

    def step_time(self, loads: np.ndarray) -> np.ndarray:
        """Time of a step [...], from the loads [..., ranks, micro-batches] and in their unit."""
        *lead, ranks, micro_batches = loads.shape
        groups = ranks // self.ranks_per_barrier
        slowest = loads.reshape(*lead, groups, self.ranks_per_barrier, micro_batches).max(-2)
        if self.stages == 1:
            return slowest.sum(-1).max(-1)
        return makespan(slowest, self.stages, self.forward_share).max(-1)

    def even_time(self, totals: np.ndarray, ranks: int, micro_batches: int) -> np.ndarray:
        """Time of a step [...] whose total cost [...] is spread evenly over all ranks and micro-batches."""
        return totals / ranks * (micro_batches + self.stages - 1) / micro_batches


def objective_of(
    *,
    data_parallel: int,
    expert_parallel: int = 1,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    pipeline_stages: int = 1,
    recomputed: float = 0.0,
) -> Objective:
    """The objective of a recipe's `parallel_config`; `recomputed`: share of the forward pass that is repeated.

    Raises:
        RecipeError: EP groups that do not consist of whole data-parallel ranks, equally many each.
    """
    devices = context_parallel * tensor_parallel
    together = max(expert_parallel // devices, 1)
    if max(expert_parallel, devices) % min(expert_parallel, devices) or data_parallel % together:
        raise RecipeError(
            f"parallel_config.expert_parallel: {expert_parallel} devices are no whole number of data-parallel ranks "
            f"(a rank has context_parallel {context_parallel} x model_parallel {tensor_parallel} devices, "
            f"data_parallel is {data_parallel}); a divisor or multiple of {devices} that divides "
            f"{data_parallel * devices} fits"
        )
    return Objective(together, pipeline_stages, 1 / (3.0 + recomputed))
