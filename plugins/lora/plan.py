"""This module reads `plugins.lora`, and says which linear layers of a model get adapters, and how adapters are merged
into the weights. The module is pure Python and NumPy.

LoRA (Hu et al., 2021, arXiv 2106.09685) freezes a trained model and learns for a linear layer y = x W^T the product of
two thin matrices: y = x W^T + (alpha / rank) x A^T B^T, with A [rank, inputs] and B [outputs, rank]. B begins with
zeros, so that at the beginning of training the model computes the same as before. Parameters have the names of
MindFormers' own LoRA layers: `decoder.layers.0.self_attention.linear_qkv.lora_A.weight` beside `...linear_qkv.weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from plugins.errors import RecipeError, did_you_mean
from plugins.settings import Section, graph_mode_only, setting, value_at

KEY, MODEL = "plugins.lora", "model.model_config"
WEIGHT, A, B = ".weight", ".lora_A.weight", ".lora_B.weight"  # behind a linear layer's name
FROZEN, TRAINED = ["*"], [f"*{A}", f"*{B}"]  # for MindFormers' freeze_mcore_pretrained_model
OPTIMIZER = "AdamW"
ATTENTION = ("self_attention.*",)
frozen: set[str] = set()  # the weights that keep their values, of the model that was built last


def _targets(written: Any) -> tuple[str, ...]:
    """Return the patterns of a recipe; `chosen` checks later whether each pattern matches a layer of the model."""
    entries = [written] if isinstance(written, str) else written
    if not isinstance(entries, Sequence) or not entries or not all(isinstance(each, str) and each for each in entries):
        raise RecipeError(f"{written!r} is not a list of patterns; write [{', '.join(ATTENTION)}]")
    return tuple(entries)


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says which LoRA adapters are trained, and their rank and scale."""

    KEY = KEY
    RIGHT = f"write {{rank: 16, alpha: 32}}, or {KEY}: False"
    CHANGE = ("numbers", "other adapters")

    rank: int = setting(8, "rows of A and columns of B", "write a number of at least 1", least=1)
    alpha: float = setting(16.0, "the product of B and A is multiplied by alpha / rank", "write a number > 0", above=0)
    targets: tuple[str, ...] = setting(
        ATTENTION,
        "patterns of the linear layers that get adapters, such as `self_attention.linear_qkv` or `mlp.*`",
        parse=_targets,
    )

    @property
    def scale(self) -> float:
        """Return the number by which the product of an adapter's matrices B and A is multiplied."""
        return self.alpha / self.rank


def layers_of(fields: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the linear layers of a transformer layer that may get adapters, each with the names of its weights in
    `tools.model`; a layer has several names if MindFormers stores several weights as one matrix.

    Routers, experts (routed and shared), embedding and output layer stay frozen.

    Args:
        fields: the fields of MindFormers' TransformerConfig.
    """
    found: dict[str, tuple[str, ...]] = {}
    low = fields.get("q_lora_rank") is not None
    if not fields.get("multi_latent_attention"):
        found["linear_qkv"] = ("qkv",)
    elif fields.get("mla_qkv_concat", True):
        found["linear_qkv"] = ("q_down", "kv_down") if low else ("q", "kv_down")
        found |= {"linear_qb": ("q_up",)} if low else {}
        found["linear_kvb"] = ("kv_up",)
    else:
        found |= (
            {"linear_q_down_proj": ("q_down",), "linear_q_up_proj": ("q_up",)} if low else {"linear_q_proj": ("q",)}
        )
        found |= {"linear_kv_down_proj": ("kv_down",), "linear_kv_up_proj": ("kv_up",)}
    found["linear_proj"] = ("proj",)
    named = {f"self_attention.{name}": weights for name, weights in found.items()}
    dense = not fields.get("num_moe_experts") or bool(fields.get("first_k_dense_replace"))
    return named | ({"mlp.linear_fc1": ("mlp_fc1",), "mlp.linear_fc2": ("mlp_fc2",)} if dense else {})


def chosen(settings: Settings, names: Iterable[str]) -> list[str]:
    """Return, in order, the linear layers in `names` that the setting `targets` of `plugins.lora` selects.

    Raises:
        RecipeError: a pattern matches none of them.
    """
    names = list(names)
    for pattern in settings.targets:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise RecipeError(
                f"{pattern!r} names no linear layer that can have an adapter{did_you_mean(pattern, names)}; "
                f"the layers that can have one are {', '.join(names)}",
                f"{KEY}.targets",
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in settings.targets)]


def check(written: Any, recipe: Mapping[str, Any], fields: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of `plugins.lora` in a recipe.

    Args:
        written: the recipe's `plugins.lora`.
        fields: the fields of the TransformerConfig that MindFormers makes of the recipe; None if the built model will
            show whether the patterns name layers of it.

    Raises:
        RecipeError: a setting is wrong, or the recipe has a feature that does not work with frozen weights.
    """
    settings = Settings.read(written)
    if fields is not None:
        chosen(settings, layers_of(fields))
    graph_mode_only(recipe, KEY)
    if value_at(recipe, f"{MODEL}.pet_config"):
        wrong = f"MindFormers' own LoRA, which this key switches on, cannot be combined with {KEY}; write null"
        raise RecipeError(wrong, f"{MODEL}.pet_config")
    if (optimizer := value_at(recipe, "optimizer.type")) not in (None, OPTIMIZER):  # None: nothing is trained
        raise RecipeError(
            f"{KEY} works only with {OPTIMIZER}, not with {optimizer!r}; write {OPTIMIZER}", "optimizer.type"
        )
    for other, why in (
        ("expert_balance", "moves experts together with their optimizer moments, which frozen experts do not have"),
        ("grouped_gradient", "replaces gradients of experts' weights, which frozen experts do not have"),
    ):
        if value_at(recipe, f"plugins.{other}", False) is not False:
            raise RecipeError(f"plugins.{other} {why}; write {other}: False", f"plugins.{other}")
    return settings


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a checkpoint belongs to an adapter, or to its optimizer state."""
    return name.endswith((A, B))


def merged(weight: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """Return W + scale x B A in float64; the caller rounds the sum once to the type of `weight`.

    Args:
        weight: [outputs, inputs].
        a: [rank, inputs].
        b: [outputs, rank].
    """
    return weight.astype(np.float64) + scale * (b.astype(np.float64) @ a.astype(np.float64))


def other_scale(before: Mapping[str, Any], after: Mapping[str, Any], place: str) -> str | None:
    """Return a sentence, with advice, if the recipe `after` would multiply the products of the adapters at `place` by
    another number than the recipe `before`, which trained them. Return None if the numbers are equal, or if one recipe
    has no adapters.
    """
    old, new = (Settings.look(value_at(recipe, KEY, False))[0] for recipe in (before, after))
    if old is None or new is None or math.isclose(old.scale, new.scale, rel_tol=1e-5):
        return None
    return (
        f"{KEY}.alpha: the adapters in {place} were trained with alpha / rank = {old.scale:g}, but this recipe would "
        f"multiply them by {new.scale:g}; write alpha: {old.scale * new.rank:g}"
    )


def adapters_of(shapes: Mapping[str, Sequence[int]], settings: Settings) -> dict[str, tuple[int, int]]:
    """Return a dictionary from the name of each adapter parameter to its shape. `shapes` holds the names and shapes of
    the model's parameters without adapters.
    """
    found: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        layer = layer_of(name)
        if layer is not None and any(fnmatchcase(layer, pattern) for pattern in settings.targets):
            base = name.removesuffix(WEIGHT)
            found |= {base + A: (settings.rank, shape[1]), base + B: (shape[0], settings.rank)}
    return found


def layer_of(name: str) -> str | None:
    """Return the linear layer to which a weight belongs, by the name that `targets` uses; return None for a weight that
    cannot have an adapter.
    """
    words = name.removesuffix(WEIGHT).split(".")
    fits = name.endswith(WEIGHT) and len(words) > 3 and words[-1].startswith("linear_")
    return ".".join(words[-2:]) if fits and words[-2] in ("self_attention", "mlp") else None
