"""What a recipe may leave open: values that `tools.layout.resolve` puts in, and the refusal of a recipe without them.

Such a recipe is for people: MindFormers cannot read it, and no number can be told from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import dotted
from tools.recipe.view import MODEL, look

AUTO = "auto"
OFFSET = (*MODEL, "offset")  # `auto`, or a Megatron layout string
DISPATCH, OVERLAP = ("plugins", "hierarchical_ep"), ("plugins", "ep_overlap")
MODE, CHUNKS = (*DISPATCH, "mode"), (*OVERLAP, "chunks")


def unresolved(recipe: Mapping[str, Any]) -> list[KeyPath]:
    """The key paths whose values are still open."""
    written = look(recipe, OFFSET)
    return [OFFSET] * isinstance(written, str) + [path for path in (MODE, CHUNKS) if look(recipe, path) == AUTO]


def require_resolved(recipe: Recipe, *paths: KeyPath) -> None:
    """Refuse a recipe that leaves one of `paths` open; any of them where none is named.

    Raises:
        RecipeError: it names the key, and the command that prints the recipe with values.
    """
    for path in unresolved(recipe):
        if path in paths or not paths:
            raise RecipeError(
                f"{recipe.source or 'the recipe'}: {dotted(path)}: {look(recipe, path)} is not resolved; "
                f"`tc3 recipe show` prints a recipe with values in its place"
            )
