"""What a report is about: the recorded loads of a run, and its recipe where there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import DataError
from plugins.expert_balance.record import Record, load_file, read
from plugins.expert_balance.settings import KEY, Settings
from plugins.expert_balance.settings import read as read_settings
from tools.layout.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import View


@dataclass(frozen=True)
class Source:
    """One log.

    Args:
        file: of `records`, by step. recipe: nothing in it is `auto`; None: not known.
        settings: of the plugin in the recipe, or its defaults.
    """

    file: Path
    records: list[Record]
    recipe: Recipe | None
    settings: Settings


def open_run(place: Path, recipe: Path | None, say: Callable[[str], None]) -> Source:
    """The log at `place`, a run's folder or the file itself, and the recipe beside it.

    Args:
        recipe: to take instead of the run's own. say: told what `auto` became.

    Raises:
        DataError: there is no such log, or it is broken. RecipeError: the recipe is.
    """
    if not place.exists():
        raise DataError(f"{place}: no such run or file")
    file = load_file(place) if place.is_dir() else place
    records = read(file)
    own = file.parent.parent / "recipe.yaml"  # RUN/metrics/expert_load.jsonl
    path = recipe or (own if file.parent.name == "metrics" and own.is_file() else None)
    loaded = resolve(load_recipe(path), say) if path else None
    section = View(loaded).get(tuple(KEY.split("."))) if loaded is not None else None
    on = section is not None and section is not False
    return Source(file, records, loaded, read_settings(section) if on else Settings())
