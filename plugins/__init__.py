"""A plugin adds a function that MindFormers lacks, or changes a function of MindFormers. A recipe switches a plugin on
under its `plugins:` key.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError, did_you_mean
from plugins.hugging_face_weights.plan import is_hugging_face

# recipe key -> module with `enable(config, settings)`, in the order of enabling; sealed checkpoints are always on
ADAPTERS = {
    "finite_loss": "plugins.finite_loss.adapter",
    "packed_labels": "plugins.packed_labels.adapter",
    "mtp_documents": "plugins.mtp_documents.adapter",
    "held_out_loss": "plugins.held_out_loss.adapter",
    "yarn": "plugins.yarn.adapter",
    "output_biases": "plugins.output_biases.adapter",
    "hyper_connections": "plugins.hyper_connections.adapter",
    "lora": "plugins.lora.adapter",
    "hierarchical_ep": "plugins.hierarchical_ep.adapter",
    "ep_overlap": "plugins.ep_overlap.adapter",
    "group_aux_loss": "plugins.group_aux_loss.adapter",
    "expert_balance": "plugins.expert_balance.adapter",
    "attention_balance": "plugins.attention_balance.adapter",
    "batch_ramp": "plugins.batch_ramp.adapter",
    "grouped_gradient": "plugins.grouped_gradient.adapter",
    "operator_fusion": "plugins.operator_fusion.adapter",  # flags of MindSpore, there before it was imported
    "spike_guard": "plugins.spike_guard.adapter",  # what it leaves out it counts in the order of attention_balance
    "step_record": "plugins.step_record.adapter",  # before what changes state in callbacks of its own
    "straggler_probe": "plugins.straggler_probe.adapter",  # last: its callback sees the end of a step after all others
}
UNWRITTEN: dict[str, dict] = {"finite_loss": {}}  # what is on in a recipe that does not name it, with its settings
# what a model computes: kept where a tool takes the others out
OF_THE_MODEL = ("yarn", "output_biases", "hyper_connections", "lora")
REPLACED = {"finite_loss": "spike_guard"}  # what is off where another one is on, which does its work


def of_the_model(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a recipe's `plugins` section that are switched on and belong to `OF_THE_MODEL`: the plugins
    that change what the model computes.
    """
    chosen = recipe.get("plugins") or {}
    return {name: chosen[name] for name in OF_THE_MODEL if chosen.get(name, False) is not False}


def enable_model(config) -> None:
    """Enable only the plugins that change what the model computes, for tools that build a model and do not train it."""
    for name, settings in of_the_model(config).items():
        importlib.import_module(ADAPTERS[name]).enable(config, settings)


def enable_plugins(config) -> None:
    """Enable every plugin that `config.plugins` (of a MindFormerConfig) switches on. Some parts are enabled without a
    setting: the seals of checkpoints (recorded checksums), the callback MFLossMonitor and, if `checkpoint.load_path`
    holds Hugging Face weights, the plugin that reads them.

    An entry `name: False` switches a plugin off, for a recipe that inherits the plugin from its base, or that does not
    want a plugin of `UNWRITTEN`.

    Raises:
        RecipeError: the recipe names a plugin that does not exist.
    """
    # the monitor logs and counts steps for the metrics and for other plugins, whichever callbacks a recipe names
    callbacks = config.get("callbacks") or []
    if not any(each["type"] == "MFLossMonitor" for each in callbacks):
        config["callbacks"] = [*callbacks, {"type": "MFLossMonitor"}]
    sealed = importlib.import_module("plugins.sealed_checkpoint.adapter")
    sealed.SealingCheckpointMonitor.run_dir = config.get("output_dir")
    chosen = config.get("plugins") or {}
    guard = chosen.get("spike_guard", False)
    sealed.SealingCheckpointMonitor.skip = (guard.get("skip") or 1) if isinstance(guard, dict) else 1
    sealed.SealingCheckpointMonitor.skipped = (guard.get("skipped") or []) if isinstance(guard, dict) else None
    for name in chosen:
        if name not in ADAPTERS:
            raise RecipeError(f"plugins.{name}: there is no such plugin{did_you_mean(name, list(ADAPTERS))}")
    for name, module in ADAPTERS.items():
        settings = chosen.get(name, UNWRITTEN.get(name, False))
        replaced = chosen.get(REPLACED.get(name, ""), False) is not False
        if settings is not False and not replaced:
            importlib.import_module(module).enable(config, settings)
    if is_hugging_face((config.get("checkpoint") or {}).get("load_path")):
        importlib.import_module("plugins.hugging_face_weights.adapter").enable(config)
