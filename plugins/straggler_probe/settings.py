"""Reading `plugins.straggler_probe`: every default stands here. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from plugins.settings import section_of, whole_number

KEY = "plugins.straggler_probe"


@dataclass(frozen=True)
class Settings:
    """When a rank is probed, and with how much work.

    Args:
        every: steps between probes.
        work: how often the fixed piece of work is done in a probe (see `work`).
    """

    every: int = 5
    work: int = 1


SETTINGS = tuple(field.name for field in fields(Settings))


def read(settings: Any) -> Settings:
    """The section of a recipe, with defaults for what it does not write.

    Raises:
        RecipeError: an unknown key, or a value that is no such number.
    """
    right = f"write {', '.join(SETTINGS)} under it (or {{}} for the defaults), or {KEY}: False"
    section = section_of(KEY, settings, SETTINGS, right)
    return Settings(
        every=whole_number(KEY, section, "every", "write steps between probes, from 1 on", default=Settings.every),
        work=whole_number(KEY, section, "work", "write a number of pieces of work, from 1 on", default=Settings.work),
    )
