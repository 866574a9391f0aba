"""What MindFormers lacks or does differently. A recipe switches a plugin on under its `plugins:` key."""

from __future__ import annotations

import importlib

from plugins.errors import RecipeError, did_you_mean

# recipe key -> module with `enable(config, settings)`; sealed checkpoints are always on
ADAPTERS = {
    "held_out_loss": "plugins.held_out_loss.adapter",
}


def enable_plugins(config) -> None:
    """Switch on what `config.plugins` (of a MindFormerConfig) names, and sealed checkpoints.

    `name: False` leaves a plugin off, for a recipe that inherits it from its base.

    Raises:
        RecipeError: for a plugin that does not exist.
    """
    importlib.import_module("plugins.sealed_checkpoint.adapter")
    for name, settings in (config.get("plugins") or {}).items():
        if name not in ADAPTERS:
            raise RecipeError(f"plugins.{name}: no such plugin{did_you_mean(name, list(ADAPTERS))}")
        if settings is not False:
            importlib.import_module(ADAPTERS[name]).enable(config, settings)
