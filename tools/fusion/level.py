"""What MindSpore would fuse for a recipe, and by which key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.operator_fusion.plan import JIT_LEVEL, KEY, NEEDED, OWN_KEYS, Fusion, check


def level_of(recipe: Mapping[str, Any]) -> tuple[Fusion, str]:
    """What is fused, and why.

    Raises:
        RecipeError: `plugins.operator_fusion` cannot be read, or does not go with the rest.
    """
    context = recipe.get("context") or {}
    if context.get("device_target", "Ascend") != "Ascend":
        return Fusion("off"), "context.device_target is no Ascend: there is no DVM"
    if (fusion := check(recipe)) is not None:
        return fusion, f"{KEY}.level: {fusion.level}"
    if own := [key for key in OWN_KEYS if context.get(key)]:
        return Fusion("vector"), f"context.{own[0]} is set, and what it says is not read here: counted as level vector"
    level = (context.get("jit_config") or {}).get("jit_level")
    if level == NEEDED:
        return Fusion("vector"), f"{JIT_LEVEL}: {NEEDED}, with which MindSpore fuses vector operators by default"
    written = "not written" if level is None else level
    return Fusion("off"), f"{JIT_LEVEL} is {written}: on Ascend nothing is fused without {NEEDED}"
