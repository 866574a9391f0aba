"""What `plugins.attention_balance` weighs samples by: computed from the model and written into the effective recipe.

A sample of n tokens costs `per_token` x n, and `per_pair` for each pair of its tokens that attend. The plugin deals
samples to ranks by these two numbers, and with `window` above 1 to steps. They are written down when a run starts and
taken over when it goes on, so that its samples keep their order, however a later version of this repository counts
FLOPs. Recipes in recipes/ leave them out: a model's sizes stand once.
"""

from __future__ import annotations

from typing import Any

from plugins.attention_balance.samples.cost import COMPUTED, Cost
from plugins.attention_balance.settings import COST, KEY, recomputed_share
from plugins.errors import RecipeError
from tools.model.architecture import model_of
from tools.model.flops import PASSES, linear_flops, pair_flops
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.view import View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema

SECTION = ("plugins", "attention_balance")


def sample_cost(recipe: Recipe) -> Cost:
    """FLOPs of training a token, and a pair of tokens that attend; a forward pass that runs again counts again.

    Raises:
        RecipeError: the recipe's sizes make no model.
    """
    try:
        model = model_of(convert(View(recipe), load_schema()).fields)
        pair, token = pair_flops(model) // PASSES, linear_flops(model) // PASSES  # forward
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.model_config: its sizes make no model ({error}), from which {KEY} computes the cost of a sample; "
            f"tc3 check says more, or write measured per_pair and per_token under {KEY}"
        ) from None
    passes = PASSES + recomputed_share(recipe)
    return Cost(passes * pair, passes * token, COMPUTED)


def sample_cost_values(recipe: Recipe) -> dict[KeyPath, Any]:
    """Key path -> value for a recipe whose plugin is on and has no costs; none for others.

    Raises:
        RecipeError: as `sample_cost`.
    """
    section = look(recipe, SECTION)
    if not isinstance(section, dict) or any(name in section for name in COST):
        return {}  # what else is wrong with it the plugin's reader says
    cost = sample_cost(recipe)
    values = {"per_pair": _plain(cost.per_pair), "per_token": _plain(cost.per_token), "unit": cost.unit}
    return {(*SECTION, name): value for name, value in values.items()}


def write_sample_cost(recipe: Recipe) -> None:
    """Write `sample_cost_values` into `recipe` (in place).

    Call it when layout and recomputation are settled, for what is recomputed counts.

    Raises:
        RecipeError: as `sample_cost`.
    """
    if values := sample_cost_values(recipe):  # a new section: other keys may share the old one by an anchor
        section = {**look(recipe, SECTION), **{path[-1]: value for path, value in values.items()}}
        recipe["plugins"] = {**recipe["plugins"], SECTION[1]: section}


def keep_sample_cost(recipe: Recipe, first: Recipe) -> list[str]:
    """Take over (in place) the cost that the run of `first`, its effective recipe, began with; says where it differs.

    A recipe that gives measured costs of its own keeps them, and one without the plugin stays without.
    """
    mine, theirs = look(recipe, SECTION), look(first, SECTION)
    if not isinstance(mine, dict) or not isinstance(theirs, dict) or mine.get("unit") != COMPUTED:
        return []
    kept = {name: theirs[name] for name in COST if name in theirs}
    changed = [name for name in kept if kept[name] != mine.get(name)]
    if not changed:
        return []
    section = {name: value for name, value in mine.items() if name not in COST}
    recipe["plugins"] = {**recipe["plugins"], SECTION[1]: {**section, **kept}}
    was = ", ".join(f"{name} {kept[name]}" for name in changed)
    return [f"{KEY}: the samples keep the order in which this run began ({was}, as {first.source} says)"]


def _plain(number: float) -> int | float:
    """FLOPs are whole but for odd shares of recomputed layers."""
    return int(number) if number.is_integer() else number
