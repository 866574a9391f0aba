"""This module derives from a recipe a smaller recipe with only one pipeline stage. The only stage of the smaller recipe
has the layers of the original recipe's largest stage, and at most as many devices as one stage.

`tc3 firsthour` trains the result on a new cluster to measure a real stage. The new recipe has the embedding and the
head around the stage's layers, and one micro-batch a step. Tensor, context, data and expert parallelism, and the
recomputation of these layers, are unchanged. MTP layers and the settings of the pipeline are left out.
"""

from __future__ import annotations

import copy
import math
from typing import Any

from plugins.errors import RecipeError
from tools.dryrun.plan import Stage, resized, stages_of
from tools.model import DENSE, MOE
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.stages import EXCLUDE, RECOMPUTE, swaps


def one_stage(recipe: Recipe, devices: int) -> Recipe:
    """Return a recipe for one pipeline stage of a resolved Ascend recipe, on at most `devices` devices. If a stage has
    more than `devices` devices, the data-parallel degree is reduced.

    Raises:
        RecipeError: layers are swapped by their numbers, or tp, cp and ep need more devices.
    """
    view = View(recipe)
    if swaps(view):
        raise RecipeError(
            f"{recipe.source}: one stage cannot be compiled separately, because the recipe swaps activations and "
            "therefore holds lists of layers instead of counts of layers; write model_config.swap: False"
        )
    stages = stages_of(view)
    stage = max(stages, key=lambda one: len(one.kinds))
    found = copy.deepcopy(recipe)
    model = found["model"]["model_config"]
    model.update(num_hidden_layers=len(stage.kinds), offset=0, pp_interleave_num=1)
    if any(MOE in one.kinds for one in stages):  # whichever way the recipe spells its layers, or leaves to a default
        dense = stage.kinds.index(MOE) if MOE in stage.kinds else len(stage.kinds)
        behind = [int(kind == MOE) for kind in stage.kinds] if DENSE in stage.kinds[dense:] else 1
        model.update(first_k_dense_replace=dense if behind == 1 else 0, moe_layer_freq=behind)
    elif "first_k_dense_replace" in model:
        model["first_k_dense_replace"] = len(stage.kinds)
    if model.get("num_nextn_predict_layers"):
        model["num_nextn_predict_layers"] = 0
        (found.get("plugins") or {}).pop("mtp_documents", None)
    found["parallel_config"] = {**(found.get("parallel_config") or {}), "pipeline_stage": 1, "micro_batch_num": 1}
    found["parallel"].pop("pipeline_config", None)
    for key in (*RECOMPUTE, *EXCLUDE):
        if key in (found.get("recompute_config") or {}):
            found["recompute_config"][key] = _of_stage(found["recompute_config"][key], stage)
    return _fitting(found, devices)


def _fitting(recipe: Recipe, devices: int) -> Recipe:
    """Return the recipe with as many data-parallel ranks as fit the devices and go with its expert parallelism."""
    view = View(recipe)
    other = view.tp * view.cp
    step = view.ep // math.gcd(view.ep, view.tp)  # MindFormers: expert_parallel divides data_parallel x model_parallel
    dp = min(view.dp, devices // other) // step * step
    if dp < 1:
        least = step * other
        raise RecipeError(
            f"{recipe.source}: one stage needs at least {least} devices, but only {devices} are available"
        )
    return resized(recipe, dp * other)


def _of_stage(value: Any, stage: Stage) -> Any:
    """Return the value of a recompute setting for one stage: a list of counts becomes a list with one count."""
    if isinstance(value, dict):
        return {key: _of_stage(inner, stage) for key, inner in value.items()}
    if not isinstance(value, list) or not value or any(isinstance(item, str) for item in value):
        return value
    if any(isinstance(row, list) for row in value):  # by chunk; a flag stands for all layers of its place, or for none
        sizes = [len(kinds) for _, kinds in stage.chunks]
        wanted = [row[stage.number] if isinstance(row, list) else row for row in value]
        pairs = zip(wanted, sizes, strict=True)
        return [sum(size * want if isinstance(want, bool) else min(want, size) for want, size in pairs)]
    return [value[stage.number]]
