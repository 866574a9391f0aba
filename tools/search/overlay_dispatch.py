"""How tokens travel to experts, as keys of a recipe: MindFormers' own dispatchers or `plugins.hierarchical_ep`."""

from __future__ import annotations

from typing import Any

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES
from tools.check.view import MODEL, View
from tools.recipe.load import KeyPath
from tools.search.configuration import Configuration

_DISPATCHER = (*MODEL, "moe_token_dispatcher_type")
_PLUGIN, _OVERLAP = ("plugins", "hierarchical_ep"), ("plugins", "ep_overlap")
_OWN = {"global": "alltoall", "hierarchical": "alltoall_deredundency"}


def dispatch_values(view: View, config: Configuration) -> dict[KeyPath, Any]:
    """The keys to change; none where the recipe sends tokens this way already, or has no experts.

    A recipe with the plugin keeps it, one without gets it for the mode that MindFormers lacks. One device for all
    experts has nothing to dispatch, so there the plugin is off.

    Raises:
        RecipeError: no such mode for MindFormers.
    """
    if not config.model.experts:
        return {}
    if config.ep_mode not in MODES:
        near = did_you_mean(config.ep_mode, list(MODES))
        raise RecipeError(f"EP mode {config.ep_mode!r}: want one of {', '.join(MODES)}{near}")
    plugged = bool(view.get(_PLUGIN))
    if plugged and config.ep > 1:
        now = view.get((*_PLUGIN, "mode"))
        settled = now == config.ep_mode or (now == "auto" and config.ep_mode == "deduplicated")
        return {} if settled else {(*_PLUGIN, "mode"): config.ep_mode}
    values: dict[KeyPath, Any] = {}
    if plugged:
        values[_PLUGIN] = False
        values.update({_OVERLAP: False} if view.get(_OVERLAP) else {})
    mode = config.ep_mode
    if config.ep == 1 or (mode == "hierarchical" and config.ep < view.number((*MODEL, "npu_nums_per_device"), 8)):
        mode = "global"  # MindFormers' hierarchical dispatch wants whole nodes
    if mode == "deduplicated":
        values[_PLUGIN] = {"mode": mode}
    dispatcher = _OWN.get(mode, "alltoall")
    if view.get(_DISPATCHER, "alltoall") != dispatcher:
        values[_DISPATCHER] = dispatcher
    return values
