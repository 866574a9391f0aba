"""Recording and moving experts in a sharded graph, and the model that has them.

The router counts for itself here: MindSpore averages its loads over all ranks, so that every rank has the loads of all.
"""

from __future__ import annotations

import numpy as np
from mindformers.parallel_core.utils.spec_utils import ModuleSpec
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank

from plugins import telechat3_moe
from plugins.expert_balance.callback import ExpertBalance
from plugins.expert_balance.graph.exchange import CollectiveRanks
from plugins.expert_balance.graph.experts import PlacedDispatch, PlacedGroupedGEMM
from plugins.expert_balance.settings import KEY

CALLBACK = "ShardedExpertBalance"


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class ShardedExpertBalance(ExpertBalance):
    """`ExpertBalance` where each rank's counts are those of all ranks already; copies: of all ranks."""

    def connect(self) -> CollectiveRanks:
        """All ranks of the run, by MindSpore's collectives."""
        return CollectiveRanks(get_real_rank(), get_real_group_size())

    def tokens(self, counted: np.ndarray) -> np.ndarray:
        """[layers, E] shares of all ranks' choices -> numbers of them."""
        return np.rint(counted * self.copies).astype(np.int64)


def use_placed_experts(config) -> None:
    """Models built from now on carry a placement; `plugins.hierarchical_ep` has been enabled, if it is on."""
    telechat3_moe.use_edited_model(config.model.model_config, KEY)
    if (config.get("plugins") or {}).get("hierarchical_ep"):
        telechat3_moe.use_experts(ModuleSpec(PlacedDispatch, params=telechat3_moe.experts().params))
    else:
        telechat3_moe.use_experts(PlacedGroupedGEMM)
