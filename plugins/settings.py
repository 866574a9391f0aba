"""Reading a plugin's section of a recipe: what the readers of all plugins share. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plugins.errors import RecipeError, refuse_unknown


def section_of(
    key: str, settings: Any, names: Sequence[str], right: str, needs: Sequence[str] = ()
) -> Mapping[str, Any]:
    """`settings`, which stands at `key` of a recipe.

    Args:
        names: the settings that there are. needs: those of them that must be written.
        right: what to write instead of something that is not a section.

    Raises:
        RecipeError: no mapping, one without what it needs, or an unknown name.
    """
    if not isinstance(settings, Mapping) or any(name not in settings for name in needs):
        raise RecipeError(f"{key}: {right}")
    refuse_unknown(f"{key}.", settings, names, what="setting")
    return settings


def whole_number(key: str, settings: Mapping[str, Any], name: str, right: str, least: int = 1, default: int = 1) -> int:
    """Return a setting that is a whole number from `least` on; `default` where it is not written.

    Raises:
        RecipeError: another value; `right` says what to write.
    """
    value = settings.get(name, default)
    if type(value) is not int or value < least:
        raise RecipeError(f"{key}.{name}: {value!r}; {right}")
    return value
