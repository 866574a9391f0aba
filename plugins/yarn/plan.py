"""This module reads `plugins.yarn`, and computes the attention factor of YaRN for models with grouped-query attention.
The module is pure Python.

YaRN (Peng et al., 2023, arXiv 2309.00071) lets a model that was trained on `original_max_position_embeddings` tokens
read `factor` times as many: slow frequencies of RoPE are divided by the factor, fast frequencies stay, and cos and sin
are multiplied by an attention factor, which grows with the logarithm of `factor`. The recipe gives `factor` and
`original_max_position_embeddings` under `model.model_config.rope_scaling`, in MindFormers' form; the plugin's setting
says with which attention factor the weights were trained. TeleChat3's public weights use an attention factor of their
own (`rope_type: telechat3-yarn`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.settings import Section, setting

KEY, SCALING = "plugins.yarn", "model.model_config.rope_scaling"
STANDARD, TELECHAT3 = "standard", "telechat3"
RATES = {STANDARD: 0.1, TELECHAT3: 0.07}  # of the logarithm of `factor`
ROPE_TYPES = {STANDARD: "yarn", TELECHAT3: "telechat3-yarn"}  # what config.json of Hugging Face calls them
MODEL_TYPE = "telechat3"  # of the models that this plugin builds with YaRN
NUMBERS = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True)
class Settings(Section):
    """The only setting chooses the attention factor; `model.model_config.rope_scaling` describes the frequencies."""

    KEY = KEY
    RIGHT = "write {attention_factor: standard} or {attention_factor: telechat3}, or False"
    CHANGE = ("numbers", "other positions")

    attention_factor: str = setting(
        STANDARD,
        "what multiplies cos and sin: `standard`, 0.1 x mscale x ln(factor) + 1; `telechat3`, 0.07 in place of 0.1, as "
        "the public TeleChat3-36B",
        choices=tuple(RATES),
    )


@dataclass(frozen=True)
class Yarn:
    """A `Yarn` holds the values of `model.model_config.rope_scaling` and of the plugin's setting.

    Args:
        factor: the new sequence length divided by the old one, at least 1.
        original: the sequence length before the extension.
        beta_fast: frequencies that turn at least this often within `original` tokens are unchanged.
        beta_slow: frequencies that turn at most this often are divided by `factor`, with a ramp between both.
        mscale: a factor on the rate of the attention factor.
        kind: a key of `RATES`.
    """

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    mscale: float
    kind: str

    @property
    def attention_factor(self) -> float:
        """Return the number by which cos and sin are multiplied."""
        return attention_factor(self.kind, self.factor, self.mscale)


def attention_factor(kind: str, factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's attention factor, rate x mscale x ln(factor) + 1, with the rate of `kind`; return 1 if the context
    is not extended.

    Both queries and keys are multiplied by the attention factor, so scores are multiplied by its square. The sources
    are section 3.4 of YaRN, and for `telechat3` the functions `_yarn_get_mscale` and `FreqsMgr` in
    github.com/Tele-AI/TeleChat3 at 8a4b6d2 (mindformers_telechat3/mindformers/modules/layers.py), with which vLLM's
    `telechat3-yarn` agrees.
    """
    return 1.0 if factor <= 1 else RATES[kind] * mscale * math.log(factor) + 1.0


def read(settings: Any, model: Mapping[str, Any]) -> Yarn:
    """Return the parameters of YaRN that a recipe gives.

    Args:
        settings: the recipe's `plugins.yarn`.
        model: its `model.model_config`.

    Raises:
        RecipeError: a setting is wrong, the plugin does not support the model, or `rope_scaling` is not that of YaRN or
            is incomplete.
    """
    kind = Settings.read(settings).attention_factor
    if (found := model.get("model_type")) != MODEL_TYPE:
        raise RecipeError(
            f"{KEY} is for grouped-query attention ({MODEL_TYPE!r}), not for {found!r}: MindFormers itself builds YaRN "
            f"for multi-latent attention; write {KEY}: False",
            "model.model_config.model_type",
        )
    scaling = model.get("rope_scaling")
    if not isinstance(scaling, Mapping):
        raise RecipeError(
            f"{KEY} needs a mapping with rope_type, {', '.join(NUMBERS)}; write these keys, or {KEY}: False", SCALING
        )
    if (named := scaling.get("type", scaling.get("rope_type"))) != "yarn":
        raise RecipeError(f"{named!r} is not YaRN; write 'yarn', or {KEY}: False", f"{SCALING}.rope_type")
    numbers = {name: _number(scaling, name) for name in NUMBERS}
    if all_dim := numbers["mscale_all_dim"]:
        wrong = f"the value {all_dim:g} has no effect, because only multi-latent attention reads this key; write 0"
        raise RecipeError(wrong, f"{SCALING}.mscale_all_dim")
    if numbers["factor"] < 1 or numbers["original_max_position_embeddings"] < 1:
        raise RecipeError("factor and original_max_position_embeddings must be at least 1", SCALING)
    if not 0 < numbers["beta_slow"] < numbers["beta_fast"]:
        wrong = (
            f"{numbers['beta_slow']:g} is not between 0 and beta_fast, {numbers['beta_fast']:g}; write a number "
            "between them, such as 1 for the usual beta_fast of 32"
        )
        raise RecipeError(wrong, f"{SCALING}.beta_slow")
    return Yarn(
        numbers["factor"],
        int(numbers["original_max_position_embeddings"]),
        numbers["beta_fast"],
        numbers["beta_slow"],
        numbers["mscale"],
        kind,
    )


def _number(scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        said = "the key is missing" if value is None else f"{value!r} is not a number that can be"
        usual = "0" if name == "mscale_all_dim" else "1" if name == "mscale" else "that of the weights' config.json"
        raise RecipeError(f"{said}; write {usual}", f"{SCALING}.{name}")
    return float(value)
