"""Which recipes this plugin executes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEMI_AUTO = (1, "SEMI_AUTO_PARALLEL", "semi_auto_parallel")


def chosen(recipe: Mapping[str, Any]) -> bool:
    """True for a recipe (or MindFormerConfig) of the CPU with `parallel.parallel_mode: 1`."""
    context, parallel = recipe.get("context") or {}, recipe.get("parallel") or {}
    return context.get("device_target") == "CPU" and parallel.get("parallel_mode") in SEMI_AUTO
