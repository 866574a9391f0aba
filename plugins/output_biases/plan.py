"""This module reads `plugins.output_biases`, and says which linear layers of a dense model have a bias. The module is
pure Python.

The public weights of TeleChat2 (7B, 35B, 115B) have biases where a layer writes into the residual stream: in the output
projection of attention and in the second projection of the MLP. The projections for queries, keys, values, gate and up
have no bias. MindFormers' training graph has only the key `add_bias_linear`, which gives a bias to all linear layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import Section

KEY, MODEL = "plugins.output_biases", "model.model_config"
MODEL_TYPE = "telechat3"  # of the models with grouped-query attention
QKV = ("attention_bias", "add_qkv_bias", "qkv_has_bias")  # keys by which MindFormers gives them a bias
OFF = f"or {KEY}: False"


@dataclass(frozen=True)
class Settings(Section):
    """The plugin has no settings."""

    KEY = KEY
    RIGHT = f"write {KEY}: {{}}, or False"
    CHANGE = ("numbers", "another model")


def read(settings: Any, model: Mapping[str, Any]) -> None:
    """Check that the section `plugins.output_biases` is valid and fits the recipe's `model.model_config`.

    Raises:
        RecipeError: a setting is wrong, or the model has no such biases.
    """
    Settings.read(settings)
    if (found := model.get("model_type")) != MODEL_TYPE:
        raise RecipeError(
            f"{KEY} is for dense models with grouped-query attention ({MODEL_TYPE!r}), not for {found!r}; write "
            f"{KEY}: False",
            f"{MODEL}.model_type",
        )
    if model.get("n_routed_experts"):
        raise RecipeError(
            f"experts have no bias, and {KEY} is for dense models; write {KEY}: False", f"{MODEL}.n_routed_experts"
        )
    if model.get("add_bias_linear") is not True:
        raise RecipeError(
            f"{model.get('add_bias_linear')!r} gives no linear layer a bias, but {KEY} exists to leave some of the "
            "biases out; "
            f"write True, {OFF}",
            f"{MODEL}.add_bias_linear",
        )
    for key in QKV:
        if model.get(key):
            raise RecipeError(
                f"{model[key]!r} gives queries, keys and values a bias, which {KEY} leaves out; write False, {OFF}",
                f"{MODEL}.{key}",
            )
