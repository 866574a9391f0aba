"""This module adds the routers' biases and the placement of experts to the metadata of a sharded checkpoint, so that a
resume loads these tensors. The module also lists each optimizer state for the pipeline stage that holds the state's
weight.

MindFormers 1.9.0 writes metadata.json from MindSpore's list of sharded parameters, and loads checkpoints by this file
(`checkpoint/sharded_tensor.py`). The biases of aux-loss-free balancing are not in this list: every rank saves them, no
rank loads them, and a resumed run trains on with biases of zero. The placements of plugins.expert_balance are not in
the list either, so after a resume tokens would go to other experts than before. All of these tensors are replicated on
all ranks of a stage.

In a pipeline, MindSpore 2.9.0 recognises by the prefixes `adam_m.` and `adam_v.` to which stage the state of the
optimizer belongs, but recognises neither Muon's prefix `muon_m.` nor the prefixes of PmaAdamW's averages and of the
fused AdamW, and so lists these states for a stage that does not hold them. This module lists each of them for the stage
that holds its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from plugins.private_hooks import replace

# what is not listed -> what is, of the same cell
STATE = {"expert_bias": "weight", "expert_load": "weight", "placement": "weight1"}
MUON_MOMENT = "muon_m."
ADAM, FUSED, LARGEST = ("adam_m.", "adam_v."), ("exp_avg.", "exp_avg_sq."), "max_exp_avg_sq."
MOMENTS = (*ADAM, *FUSED, LARGEST, MUON_MOMENT)  # before a weight's name: what AdamW and Muon keep of it
AVERAGES = "pma_weight_"  # before the way of averaging, a full stop and a weight's name: what PmaAdamW keeps, too
# keys of PmaAdamW, with MindFormers' defaults: averages replace the weights every fused_num x interleave_step steps
AVERAGING: dict[str, Any] = {"fused_num": 10, "interleave_step": 1000, "fused_algo": "ema"}
_NO_LAYERS = ("word_embeddings", "output_layer")  # in names of matrices that Muon leaves to AdamW
_UNPLACED = (*FUSED, LARGEST, AVERAGES)  # states whose stage MindSpore does not know, and Muon's, see `with_muon`
_OF_WEIGHTS = ("adam_m.", "adam_v.", "accu_grads.")  # before a weight's name
Entries = dict[str, list]  # name -> [layout, type, whole shape], as MindSpore lists a rank's parameters


def add_router_state(entries: Entries, parameters: Iterable[Any]) -> Entries:
    """Return a rank's metadata `entries`, to which the routers' biases and the placements of experts are added for
    those routers and MoE layers whose weights `entries` lists.
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


def orthogonal(name: str, axes: int) -> bool:
    """Return whether Muon, and not AdamW, updates the weight that MindFormers calls `name` and that has `axes` axes.

    Source: gpt_model.py of MindFormers 1.9.0, get_muon_filter.
    """
    return axes in (2, 3) and not any(part in name for part in _NO_LAYERS)


def weight_of(name: str) -> str:
    """Return the name of the weight to which a moment or an average belongs; any other name is returned unchanged."""
    return name.partition(".")[2] if name.startswith((*MOMENTS, AVERAGES)) else name


def beside_weights(ranks: Mapping[int, Entries], parameters: Iterable[Any]) -> dict[int, Entries]:
    """Return the metadata of `ranks`, in which the averages of PMA and the moments of the fused AdamW are listed for
    exactly the ranks that have the weight. MindSpore splits the averages and moments of a weight over ranks in the same
    way as the weight.
    """
    types = {name: entry[1] for entries in ranks.values() for name, entry in entries.items()}
    types = {item.name: item.dtype for item in parameters} | types
    states = [name for name in types if name.startswith(_UNPLACED)]
    return {rank: _with_states(entries, {name: types[name] for name in states}) for rank, entries in ranks.items()}


def _with_states(entries: Entries, states: Mapping[str, Any]) -> Entries:
    """Return a rank's metadata with those of `states` (name -> type) whose weights the rank has, and no others."""
    found = {name: entry for name, entry in entries.items() if name not in states or weight_of(name) in entries}
    for name, dtype in states.items():
        weight = entries.get(weight_of(name))
        if weight is not None and name not in found:
            found[name] = [weight[0], dtype, weight[2]]
    return found


def with_muon(entries: Entries) -> Entries:
    """Return a rank's metadata, to which Muon's moments of the rank's matrices are added; each moment has the layout of
    its weight.

    Muon has one moment for each matrix that it updates, and AdamW has no moments for these matrices.
    """
    found = {name: entry for name, entry in entries.items() if not name.startswith(MUON_MOMENT)}
    weights = [name for name, entry in found.items() if not name.startswith(_OF_WEIGHTS) and len(entry[2]) > 1]
    moments = {f"{MUON_MOMENT}{name}": found[name] for name in weights if f"adam_m.{name}" not in found}
    return found | moments


def keeps_muon(ranks: Iterable[Entries]) -> bool:
    """Return whether the checkpoint metadata of any rank lists a moment of Muon."""
    return any(name.startswith(MUON_MOMENT) for entries in ranks for name in entries)


def copied_like(layout: Any) -> Any:
    """Return the metadata layout of a vector that is replicated on every rank of `layout`."""
    from mindspore import Layout

    known = layout.to_dict()
    names = tuple(name for name in known["alias_name"] if name != "interleaved_parallel")
    return Layout(tuple(known["device_matrix"]), names, list(known["rank_list"]))("None")


def enable() -> None:
    """Make MindFormers' checkpoint metadata include the state of the routers wherever MindFormers requests layouts from
    MindSpore; the metadata of the CPU backend already include this state.
    """
    from mindformers.checkpoint import sharded_tensor

    of_all, of_this = sharded_tensor.get_strategy_metadata, sharded_tensor.get_current_strategy_metadata

    def added(found: dict[int, Entries] | None, network: Any) -> dict[int, Entries] | None:
        if found and keeps_muon(found.values()):
            found = {rank: with_muon(each) for rank, each in found.items()}
        if found:
            found = beside_weights(found, network.get_parameters())
        return found and {rank: add_router_state(each, network.get_parameters()) for rank, each in found.items()}

    def all_ranks(network: Any, rank_id: int | None = None) -> dict[int, Entries] | None:
        return added(of_all(network, rank_id), network)

    def this_rank(network: Any) -> dict[int, Entries] | None:
        return added(of_this(network), network)

    replace(sharded_tensor, "get_strategy_metadata", ".get_rank_layout(rank_id)", all_ranks)
    replace(sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", this_rank)
