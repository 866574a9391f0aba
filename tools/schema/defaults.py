"""What MindFormers takes for a key of `model.model_config` that a recipe leaves out, by `schema.json`."""

from __future__ import annotations

from typing import Any

from tools.recipe.view import MODEL, View
from tools.schema.schema import load_schema


def model_number(view: View, key: str) -> int:
    """The positive integer at `model.model_config.KEY`, or MindFormers' default of it for the recipe's model.

    Raises:
        KeyError: MindFormers has no number for it; the caller has to ask for the key.
    """
    default = model_default(view, key)
    if type(default) is not int:
        raise KeyError(f"MindFormers has no default number for model_config.{key}")
    return view.number((*MODEL, key), default)


def model_default(view: View, key: str) -> Any:
    """MindFormers' default: of the model's config class, else of the field that the key becomes; None without one."""
    schema = load_schema()
    model = schema.model_type(view.recipe)
    defaults = schema.models[model]["defaults"]
    if key in defaults:
        return defaults[key]
    fields = schema.fields(model)
    return next((fields[field].get("default") for field, _ in schema.targets(model, key)), None)
