"""The flat effective recipe: bases merged in, overrides applied, as YAML that stock MindFormers reads, or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial

import click

from tools.auto.resolve import resolve
from tools.recipe.dump import recipe_text
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import load_mini
from tools.recipe.override import apply_overrides


def effective(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), mini: bool = False, as_written: bool = False
) -> Recipe:
    """The recipe of a file as it would run, or the mini of it that `tc3 train --mini` would.

    What `auto` and layout strings stand for is in their place, and said on stderr; `as_written` leaves them.

    Raises:
        RecipeError: the file, a base or an override is wrong; what `auto` stands for is not known.
    """
    recipe = load_mini(path) if mini else load_recipe(path)
    recipe = apply_overrides(recipe, overrides) if overrides else recipe
    return recipe if as_written else resolve(recipe, partial(click.echo, err=True))


def show(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    as_json: bool = False,
    mini: bool = False,
    as_written: bool = False,
) -> str:
    """The text of `effective`, with a line at its end; YAML keeps the anchors that its author wrote."""
    recipe = effective(path, overrides, mini, as_written)
    if as_json:
        return json.dumps(recipe, indent=2, default=str) + "\n"  # YAML alone knows dates
    return recipe_text(recipe)
