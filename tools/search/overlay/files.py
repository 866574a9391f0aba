"""The files that a recipe is made of: an answer written over one of them would destroy the recipe."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from plugins.errors import RecipeError
from tools.recipe.load import BASE_CONFIG


def files_of(recipe: str | os.PathLike[str]) -> Iterator[Path]:
    """The file of a recipe that can be loaded, and all that it inherits."""
    path = Path(recipe)
    yield path
    bases = yaml.safe_load(path.read_text(encoding="utf-8")).get(BASE_CONFIG) or []
    for base in bases if isinstance(bases, list) else [bases]:
        yield from files_of(path.parent / base)


def keep_files_of(recipe: str | os.PathLike[str], option: str, target: str | os.PathLike[str] | None) -> None:
    """Refuse to write to a file that the recipe is made of.

    Raises:
        RecipeError: `target` of the command line's `option` is one, by this name or another.
    """
    if target is None or not os.path.exists(target):
        return
    for file in files_of(recipe):
        if os.path.samefile(target, file):
            own = "is the recipe itself" if os.path.samefile(file, recipe) else f"is what {recipe} inherits"
            raise RecipeError(f"{option} {target}: {own}, which would be lost; give the answer a file of its own")
