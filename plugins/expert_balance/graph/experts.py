"""The routed experts of a sharded graph (Ascend, or semi-auto parallel on CPU) where the placement says.

As in `placed.py`, one Gather renames the experts that tokens were routed to, on the way into the dispatch. MindSpore
cuts it as it cuts the tokens, so that it needs no communication; every rank has the whole placement, 4 x E bytes.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.parallel_core.training_graph.transformer.moe.ffn import FFNGroupedGEMM
from mindspore import Parameter, Tensor, ops

from plugins.hierarchical_ep.graph.experts import RoutedExperts


class PlacedGroupedGEMM(FFNGroupedGEMM):
    """With MindFormers' own dispatch."""

    def __init__(self, config):
        super().__init__(config)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """tokens [ranks, N, h], probs [ranks, N, k], routing_map int32 [ranks, N, k] -> [ranks, N, h]."""
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


class PlacedDispatch(RoutedExperts):
    """With the dispatch of `plugins.hierarchical_ep`."""

    def __init__(self, config, settings, net, rows, streams):
        super().__init__(config, settings, net, rows, streams)
        place(self, config)

    def construct(self, tokens, probs, routing_map):
        """As `PlacedGroupedGEMM`."""
        return super().construct(tokens, probs, self.slot_of(self.placement, routing_map, 0))


def place(cell, config) -> None:
    """Give `cell` the parameter and the Gather, cut over the ranks of a stage."""
    identity = Tensor(np.arange(config.num_moe_experts), ms.int32)
    cell.placement = Parameter(identity, name="placement", requires_grad=False, parallel_optimizer=False)
    ranks = config.data_parallel_size * config.tensor_model_parallel_size * config.context_parallel_size
    cell.slot_of = ops.Gather()
    cell.slot_of.shard(((1,), (ranks, 1, 1)))
