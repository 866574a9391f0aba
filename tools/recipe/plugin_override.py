"""`--set plugins.NAME...` for what the recipe does not write: of plugins alone may keys be new.

A plugin is off where its name is not written, and a setting has its default, so that neither is there to be overridden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins import ADAPTERS
from plugins.errors import RecipeError, did_you_mean

SECTION = "plugins"


def is_new(recipe: Mapping[str, Any], name: str) -> bool:
    """Whether a dotted name is of a plugin or one of its settings, that stands nowhere in it and is no slip."""
    words = name.split(".")
    if words[0] != SECTION or len(words) not in (2, 3):
        return False
    written = recipe.get(SECTION) or {}
    if len(words) == 2:
        return words[1] not in written
    settings = written.get(words[1]) or {}
    near = isinstance(settings, Mapping) and (words[2] in settings or did_you_mean(words[2], list(settings)))
    return isinstance(settings, Mapping) and not near


def write_new(recipe: dict[str, Any], name: str, value: Any, where: str) -> None:
    """Write `plugins.NAME` or `plugins.NAME.SETTING`; which settings there are is said by `tc3 check`.

    Raises:
        RecipeError: there is no such plugin, or its whole section is no mapping.
    """
    plugin, setting = (*name.split(".")[1:], None)[:2]
    if plugin not in ADAPTERS:
        raise RecipeError(f"{where}: there is no plugin {plugin!r}{did_you_mean(plugin, list(ADAPTERS))}")
    if setting is None and value is not False and not isinstance(value, dict):
        right = f"{SECTION}.{plugin}={{}} for the defaults, {SECTION}.{plugin}.SETTING=VALUE for one of its own"
        raise RecipeError(f"{where}: a plugin has settings, got {value!r}; write {right}")
    written = recipe[SECTION] = recipe.get(SECTION) or {}
    written[plugin] = value if setting is None else {**(written.get(plugin) or {}), setting: value}
