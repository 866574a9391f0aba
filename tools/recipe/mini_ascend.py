"""This module makes small recipes for Ascend devices, which `tc3 firsthour` trains on the NPUs of a new cluster.

The small recipes have the sizes of the mini recipes for a CPU (`tools.recipe.mini`), and the device target, operators
and precision of the original recipe. All small recipes of one family have the same weights, batch and samples, whatever
their number of devices, so each of them can start from a checkpoint of another, and their losses can be compared.

No small recipe has run on an NPU; `tc3 check` accepts the small recipes, and `tc3 dryrun` compiles them for virtual
devices.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from plugins.errors import RecipeError
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER
from tools.recipe.load import Recipe
from tools.recipe.mini import BATCH, derive_mini
from tools.recipe.mini_strategy import MOVES, SENDS, Degrees, degrees_for, give_strategy, least_micro_batches
from tools.recipe.view import MODEL, View

LENGTH = 2048  # tokens of a sample: the least with which MindFormers compresses masks; it cannot shard a whole mask
_MASKS = ("use_attn_mask_compression", "use_eod_attn_mask_compression")
_CONTEXT = ("mode", "device_target", "max_call_depth", "jit_config", "jit_level", "memory_optimize_level")
ON_CPU = 0  # stands for the small recipe of a CPU
# MindFormers' Megatron loader needs this level, which needs sink mode (tc3 check names its lines)
_BROADCAST = {"dataset_broadcast_opt_level": 3}
_SINK = {"sink_mode": True, "sink_size": 1}


def ascend_minis(recipe: Recipe, data_path: str, steps: int, counts: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return small flat recipes for Ascend as a dictionary number of devices -> recipe, for 1 device and for each
    number in `counts`. The schedules of the small recipes have `steps` steps. The key `ON_CPU` holds a small recipe for
    one CPU process. A number of devices is left out if the recipe's parallel degrees, scaled down, need fewer devices.

    Raises:
        RecipeError: the recipe is for a CPU, trains on packed conversations, or cannot be shrunk.
    """
    view = View(recipe)
    if view.on_cpu:
        raise RecipeError(
            f"{recipe.source}: context.device_target: this recipe is for a CPU, so no toy-size recipe for Ascend can "
            "be made of it; give a recipe whose device_target is Ascend"
        )
    if view.packs:
        raise RecipeError(
            f"{recipe.source}: no toy-size recipe for Ascend can be made of a recipe with packed conversations; give "
            "a recipe of pre-training"
        )
    mini = derive_mini(recipe, data_path, steps, length=LENGTH)
    degrees = {1: Degrees(), **{count: degrees_for(mini, view, count) for count in counts}}
    degrees = {count: found for count, found in degrees.items() if found.workers == count}
    deepest = max(degrees.values(), key=lambda found: found.pp)
    batch = max(BATCH, *(found.dp * least_micro_batches(view, found) for found in degrees.values()))
    mini["train_dataset"]["data_loader"]["sizes"] = [steps * batch, 0, 0]
    if evaluation := (mini.get("plugins") or {}).get("held_out_loss"):
        evaluation["samples"] = max(batch, evaluation["samples"])  # the plugin refuses fewer than a step has
    small = {count: _of(mini, view, found, batch, deepest) for count, found in degrees.items()}
    return {ON_CPU: _on_cpu(mini, small[1]), **small}


def _on_cpu(mini: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """Return the mini recipe with the batch and the layers of the small recipe for one device, in one process."""
    found = copy.deepcopy(mini)
    model, wanted = found["model"]["model_config"], one["model"]["model_config"]
    found["parallel_config"].update(one["parallel_config"])
    if not _wants_groups(found):  # otherwise the mini recipe is already one process of the sharded graph
        found["use_parallel"] = False
        found["parallel"].update(parallel_mode=0)
    found["parallel"]["dataset_strategy"] = [[1] * len(row) for row in found["parallel"]["dataset_strategy"]]
    found["runner_config"]["batch_size"] = model["batch_size"] = wanted["batch_size"]
    model["num_hidden_layers"] = wanted["num_hidden_layers"]
    if "npu_nums_per_device" in model:
        model["npu_nums_per_device"] = 1
    _leave_dispatch(found, inside_node=True)
    return found


def _wants_groups(mini: dict[str, Any]) -> bool:
    """Return whether the optimizer asks for groups of ranks, also on one device: MindFormers' Muon does."""
    return bool(mini["optimizer"]["type"] == "Muon")


def _of(mini: dict[str, Any], view: View, degrees: Degrees, batch: int, deepest: Degrees) -> dict[str, Any]:
    """Return the small recipe for as many devices as `degrees` needs."""
    found = copy.deepcopy(mini)
    model = found["model"]["model_config"]
    give_strategy(found, view, degrees, batch, deepest)
    model.update({key: value for key in _MASKS if (value := view.get((*MODEL, key))) is not None})
    _own_dataset(found, view, degrees)
    own = view.get(("context",)) or {}
    found["context"] = {**found["context"], **{key: copy.deepcopy(own[key]) for key in _CONTEXT if key in own}}
    found["context"].pop("device_id", None)  # msrun chooses it
    found["context"].update(_BROADCAST)
    found["runner_config"].update(_SINK)
    found["use_parallel"] = degrees.workers > 1 or _wants_groups(found)
    if degrees.workers == 1:
        found["parallel"].update(
            parallel_mode=int(found["use_parallel"]), enable_parallel_optimizer=False, enable_alltoall=False
        )
        found["parallel"].pop("parallel_optimizer_config", None)
    node = view.number((*MODEL, "npu_nums_per_device"), 1)
    if "npu_nums_per_device" in model:
        model["npu_nums_per_device"] = min(degrees.ep, node)
    if "moe_token_dispatcher_type" in model and degrees.ep == 1:
        model["moe_token_dispatcher_type"] = DEFAULT_DISPATCHER  # the only one that MindFormers takes on one device
    _leave_dispatch(found, inside_node=degrees.ep <= node)
    if degrees.pp == 1:
        (found.get("plugins") or {}).pop("grouped_gradient", None)  # it adds up over a pipeline's micro-batches
    return found


def _own_dataset(mini: dict[str, Any], view: View, degrees: Degrees) -> None:
    """Give the mini recipe (in place) the recipe's own columns and masks, with its corpus, length and samples."""
    small, dataset = mini["train_dataset"]["data_loader"], copy.deepcopy(view.get(("train_dataset",)))
    loader = dataset["data_loader"]
    loader["sizes"] = small["sizes"]
    own = {key: value for key, value in loader["config"].items() if not key.endswith("_data_path")}
    loader["config"] = own | {key: small["config"][key] for key in ("data_path", "seq_length", "split", "eod", "pad")}
    dataset["num_parallel_workers"] = 1
    mini["train_dataset"] = dataset
    mini.setdefault("train_dataset_task", {})["dataset_config"] = dataset
    rows = view.get(("parallel", "dataset_strategy")) or []
    mini["parallel"]["dataset_strategy"] = [[degrees.dp, *row[1:]] for row in rows]


def _leave_dispatch(mini: dict[str, Any], inside_node: bool) -> None:
    """Leave out (in place) the plugins that move experts, which would part the weights of one family, and those that
    send tokens between nodes, where the experts are shared inside a node.
    """
    for name in (*MOVES, *(SENDS if inside_node else ())):
        (mini.get("plugins") or {}).pop(name, None)
