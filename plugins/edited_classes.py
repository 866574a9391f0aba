"""This module says which of MindFormers' model classes plugins can change. The module is pure Python, so that `tc3
check` can refuse all other classes before a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError

KEY = "model.model_config.architectures"
# MindFormers' class -> ours for Ascend, which differs in what plugins edit, and in when layers are recomputed
ARCHITECTURES = {"TeleChat3MoeForCausalLM": "EditedTeleChat3MoeForCausalLM"}
DENSE = {"TeleChat3ForCausalLM": "EditedTeleChat3ForCausalLM"}
ALL = {**ARCHITECTURES, **DENSE}


def can_edit(architectures: Any) -> bool:
    """Return whether a plugin that can change `ARCHITECTURES` can change the model of a recipe, judged by the recipe's
    `architectures`; return True for a recipe without `architectures`.
    """
    names = architectures if isinstance(architectures, (list, tuple)) else [architectures]
    return not any(names) or all(name in ARCHITECTURES or name in ARCHITECTURES.values() for name in names)


def edited(architectures: Any, plugin: str, classes: Mapping[str, str]) -> list[str]:
    """Return the names of the classes that build a model with plugins' edits, for the names in a recipe's
    `architectures`.

    Args:
        plugin: the key of the plugin, for the message.
        classes: the classes that the plugin can change: MindFormers' class -> ours.

    Raises:
        RecipeError: the plugin cannot change one of these classes.
    """
    known = {**classes, **{ours: ours for ours in classes.values()}}
    names = architectures if isinstance(architectures, (list, tuple)) else [architectures]
    unknown = [name for name in names if not isinstance(name, str) or name not in known]
    if unknown:
        raise RecipeError(
            f"{plugin} supports only {' and '.join(classes)}, not {unknown[0]!r}; leave the plugin out, or train a "
            "model of a supported class",
            KEY,
        )
    return [known[name] for name in names]
