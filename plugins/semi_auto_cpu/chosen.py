"""This module reads `parallel.parallel_mode` and says which recipes split their model over devices, and which of these
recipes the plugin `semi_auto_cpu` executes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEMI_AUTO = (1, "semi_auto_parallel")
AUTO = (2, "auto_parallel")
SECTIONS = ("context", "parallel")


def is_semi_auto(mode: Any) -> bool:
    """Return whether a value of `parallel.parallel_mode` (a number, or a name in upper or lower case) means semi-auto
    parallel.
    """
    return _plain(mode) in SEMI_AUTO


def splits_model(mode: Any) -> bool:
    """Return whether MindSpore splits the model over devices in this mode; all other modes split only the data."""
    return _plain(mode) in (*SEMI_AUTO, *AUTO)


def chosen(recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe (or MindFormerConfig) is for CPU and has `parallel.parallel_mode: 1`.

    A section that is not a mapping counts as empty, because `tc3 check`, which also calls this function, reports it
    with its own message.
    """
    context, parallel = (section if isinstance(section := recipe.get(name), Mapping) else {} for name in SECTIONS)
    return context.get("device_target") == "CPU" and is_semi_auto(parallel.get("parallel_mode"))


def _plain(mode: Any) -> Any:
    return mode.lower() if isinstance(mode, str) else mode
