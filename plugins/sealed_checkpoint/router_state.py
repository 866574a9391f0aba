"""This module adds the routers' biases and the placement of experts to the metadata of a sharded checkpoint, so that a
resume loads them.

MindFormers 1.9.0 writes metadata.json from MindSpore's list of sharded parameters, and loads by it
(`checkpoint/sharded_tensor.py`). The biases of aux-loss-free balancing are not in that list: every rank saves them, no
rank loads them, and training goes on from biases of zero. The same holds for the placements of plugins.expert_balance,
so tokens would go to other experts than before. All of these tensors are replicated on all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plugins.private_hooks import replace

# what is not listed -> what is, of the same cell
STATE = {"expert_bias": "weight", "expert_load": "weight", "placement": "weight1"}
Entries = dict[str, list]  # name -> [layout, type, whole shape], as MindSpore lists a rank's parameters


def add_router_state(entries: Entries, parameters: Iterable[Any]) -> Entries:
    """Return a rank's metadata `entries`, to which the biases and the placement are added for each router and each MoE
    layer whose weight is listed.
    """
    added = {}
    for item in parameters:
        cell, _, name = item.name.rpartition(".")
        if name not in STATE or item.name in entries:
            continue
        weight = entries.get(f"{cell}.{STATE[name]}")
        if weight is not None:  # otherwise the layer is another stage's
            added[item.name] = [copied_like(weight[0]), item.dtype, tuple(item.shape)]
    return {**entries, **added}


def copied_like(layout: Any) -> Any:
    """Return the layout of a vector that is replicated on every rank of `layout`."""
    from mindspore import Layout

    known = layout.to_dict()
    names = tuple(name for name in known["alias_name"] if name != "interleaved_parallel")
    return Layout(tuple(known["device_matrix"]), names, list(known["rank_list"]))("None")


def enable() -> None:
    """Let MindFormers' checkpoint metadata include the routers' state wherever MindFormers asks MindSpore for layouts;
    the CPU backend's own answers already include it.
    """
    from mindformers.checkpoint import sharded_tensor

    of_all, of_this = sharded_tensor.get_strategy_metadata, sharded_tensor.get_current_strategy_metadata

    def all_ranks(network: Any, rank_id: int | None = None) -> dict[int, Entries] | None:
        found = of_all(network, rank_id)
        return found and {rank: add_router_state(each, network.get_parameters()) for rank, each in found.items()}

    def this_rank(network: Any) -> dict[int, Entries] | None:
        found = of_this(network)
        return found and {rank: add_router_state(each, network.get_parameters()) for rank, each in found.items()}

    replace(sharded_tensor, "get_strategy_metadata", ".get_rank_layout(rank_id)", all_ranks)
    replace(sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", this_rank)
