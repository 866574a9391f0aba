"""This module adds a parameter to the routed experts of CPU runs, which holds the slot of each expert.

The router, its bias, the auxiliary loss and the counted loads use logical expert numbers: only the experts to which a
token was routed are translated to slots, by one Gather before the dispatch. A model has this parameter whenever the
plugin is on, even if no expert moves: so training can continue from a checkpoint of a balanced run with `every: 0`, or
on one worker.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from plugins.cpu_backend.expert_parallel import CpuRoutedExperts
from plugins.cpu_backend.layers import GroupedExperts


def placement(experts: int) -> Parameter:
    """Return the `placement` parameter, int32 [E]: the slot of each logical expert. In a new training, expert e is in
    slot e for every e. MindFormers saves and loads the `placement` parameter with the weights.
    """
    return Parameter(Tensor(np.arange(experts), ms.int32), name="placement", requires_grad=False)


class PlacedRoutedExperts(CpuRoutedExperts):
    """This is `CpuRoutedExperts` with experts on several workers, placed as the `placement` parameter says."""

    def __init__(self, config, settings):
        super().__init__(config, settings)
        self.placement = placement(config.num_moe_experts)
        self.slot_of = ops.Gather()

    def construct(self, tokens, probs, routing_map):
        """Return the experts' outputs [1, N, h] for tokens [1, N, h], probs [1, N, k] and routing_map int32 [1, N, k]
        of logical experts.
        """
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


class PlacedGroupedExperts(GroupedExperts):
    """This is `GroupedExperts` with all experts on one worker, in the order of the `placement` parameter."""

    def __init__(self, config):
        super().__init__(config)
        self.placement = placement(config.num_moe_experts)
        self.slot_of = ops.Gather()

    def construct(self, tokens, probs, routing_map):
        """Return the experts' outputs [1, N, h] for tokens [1, N, h], probs [1, N, k] and routing_map int32 [1, N, k]
        of logical experts.
        """
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))
