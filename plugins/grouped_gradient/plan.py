"""This module reads `plugins.grouped_gradient` and says for which recipes one operator can add the experts' weight
gradients to their sum in place. The module is pure Python.

GroupedMatmul computes a micro-batch's gradient of grouped weights, [experts, k, n] in bfloat16. MindFormers' weights
have two dimensions, so a Reshape follows, and MindSpore's pipeline adds the result to a float32 sum by AssignAdd.
MindSpore has one operator that replaces these three, InplaceGroupedMatmulAdd (`ops.auto_generate.grouped_matmul_add_`:
Ascend, in kernel-by-kernel mode), which also accepts a sum of two dimensions; MindSpore's own pass that inserts it does
not apply here, because of the Reshape (docs/grouped-gradient.md). If `plugins.ep_overlap` cuts a micro-batch into
chunks, a separate operator adds the gradient of each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import Section, value_at

KEY = "plugins.grouped_gradient"
LOW = ("bfloat16", "bf16", "float16", "fp16")  # what InplaceGroupedMatmulAdd multiplies
FP32 = ("float32", "fp32")  # to which it adds; the sums have the type of the weights
NOT_BY_KERNEL = "O2"  # the jit level that hands the whole graph to CANN


@dataclass(frozen=True)
class Settings(Section):
    """The plugin has no settings."""

    KEY = KEY
    RIGHT = f"write {KEY}: {{}}, or False"
    CHANGE = ("numbers", "adds the gradients of experts' weights to their float32 sum without rounding them first")


def check(recipe: Mapping[str, Any]) -> bool:
    """Return whether the workers of `recipe` need the compiler pass: the plugin is on, and the device target is Ascend.

    Raises:
        RecipeError: a setting is wrong, or the recipe is for Ascend and no gradient of a grouped matmul in its graph
            ends in a float32 sum.
    """
    settings = value_at(recipe, KEY, False)
    if settings is False:
        return False
    Settings.read(settings)
    if value_at(recipe, "context.device_target", "Ascend") != "Ascend":
        return False
    for key, wrong in _unfit(recipe):
        raise RecipeError(f"{wrong}; write {KEY}: False to leave the plugin out", key)
    return True


def _unfit(recipe: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs (key, fault) of all settings that cannot be combined with the plugin."""
    model = value_at(recipe, "model.model_config") or {}
    dtype = model.get("compute_dtype", LOW[0])
    jit_level = value_at(recipe, "context.jit_config.jit_level")
    found = []
    if not any(model.get(name) for name in ("n_routed_experts", "num_moe_experts", "num_experts")):
        found.append((KEY, "the model has no experts"))
    if (value_at(recipe, "parallel_config.pipeline_stage") or 1) < 2:
        found.append(("parallel_config.pipeline_stage", f"{KEY} is for the sums of a pipeline's micro-batches"))
    key = "parallel.parallel_optimizer_config.gradient_accumulation_shard"
    if value_at(recipe, key):
        found.append((key, "a ReduceScatter stands between each gradient and its sum"))
    if dtype not in LOW:
        found.append(
            (
                "model.model_config.compute_dtype",
                f"the plugin's operator multiplies only {LOW[0]} or {LOW[2]}, not {dtype}",
            )
        )
    if (params := model.get("params_dtype", FP32[0])) not in FP32:
        found.append(
            (
                "model.model_config.params_dtype",
                f"the plugin's operator adds gradients only to {FP32[0]} sums, not to {params} sums",
            )
        )
    if jit_level == NOT_BY_KERNEL:
        found.append(("context.jit_config.jit_level", f"the operator runs kernel by kernel, not with {jit_level}"))
    return found
