"""What MindFormers lacks or does differently. A recipe switches a plugin on under its `plugins:` key."""

from __future__ import annotations

import importlib

from plugins.errors import RecipeError, did_you_mean

# recipe key -> module with `enable(config, settings)`, in the order of enabling; sealed checkpoints are always on
ADAPTERS = {
    "finite_loss": "plugins.finite_loss.adapter",
    "held_out_loss": "plugins.held_out_loss.adapter",
    "hierarchical_ep": "plugins.hierarchical_ep.adapter",
    "ep_overlap": "plugins.ep_overlap.adapter",
    "attention_balance": "plugins.attention_balance.adapter",
}
UNWRITTEN: dict[str, dict] = {"finite_loss": {}}  # what is on in a recipe that does not name it, with its settings


def enable_plugins(config) -> None:
    """Switch on what `config.plugins` (of a MindFormerConfig) names, and sealed checkpoints.

    `name: False` leaves a plugin off, for a recipe that inherits it from its base, or that wants none of `UNWRITTEN`.

    Raises:
        RecipeError: for a plugin that does not exist.
    """
    importlib.import_module("plugins.sealed_checkpoint.adapter")
    chosen = config.get("plugins") or {}
    for name in chosen:
        if name not in ADAPTERS:
            raise RecipeError(f"plugins.{name}: no such plugin{did_you_mean(name, list(ADAPTERS))}")
    for name, module in ADAPTERS.items():
        settings = chosen.get(name, UNWRITTEN.get(name, False))
        if settings is not False:
            importlib.import_module(module).enable(config, settings)
