"""How tokens travel to experts, as keys of a recipe: MindFormers' own dispatchers or `plugins.hierarchical_ep`."""

from __future__ import annotations

from typing import Any

from plugins.errors import RecipeError, did_you_mean
from plugins.hierarchical_ep.plan import MODES
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER, DISPATCHER_OF
from tools.estimate.configuration import Configuration
from tools.recipe.load import KeyPath
from tools.recipe.unresolved import DISPATCH, MODE, OVERLAP
from tools.recipe.view import MODEL, View
from tools.search.overlay.site import stays_plugged

_DISPATCHER = (*MODEL, "moe_token_dispatcher_type")


def dispatch_values(view: View, config: Configuration, node: int | None = None) -> dict[KeyPath, Any]:
    """The keys to change; none where the recipe sends tokens this way already, or has no experts.

    `node` is the number of devices of a node, where it is not the recipe's. `auto` is written out: it stands for the
    recipe's own degrees and cluster.

    A recipe with the plugin keeps it, one without gets it for the mode that MindFormers lacks. One device for all
    experts has nothing to dispatch, and groups that straddle nodes are refused by the plugin, so there it is off.

    Raises:
        RecipeError: no such mode for MindFormers.
    """
    if not config.model.experts:
        return {}
    if config.ep_mode not in MODES:
        near = did_you_mean(config.ep_mode, list(MODES))
        raise RecipeError(f"EP mode {config.ep_mode!r}: want one of {', '.join(MODES)}{near}")
    node = node or view.node
    if stays_plugged(view, config, node):
        return {} if view.get(MODE) == config.ep_mode else {MODE: config.ep_mode}
    values: dict[KeyPath, Any] = {}
    if view.get(DISPATCH):
        values[DISPATCH] = False
        values.update({OVERLAP: False} if view.get(OVERLAP) else {})
    mode = config.ep_mode
    if config.ep == 1 or (mode == "hierarchical" and config.ep < node):
        mode = "global"  # MindFormers' hierarchical dispatch wants whole nodes
    if mode == "deduplicated":
        values[DISPATCH] = {"mode": mode}
    dispatcher = DISPATCHER_OF.get(mode, DEFAULT_DISPATCHER)
    if view.get(_DISPATCHER, DEFAULT_DISPATCHER) != dispatcher:
        values[_DISPATCHER] = dispatcher
    return values
