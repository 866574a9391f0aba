"""This module enables `plugins.ep_overlap` of a recipe, which sends the tokens of a micro-batch through the experts in
chunks, so that communication and computation overlap.
"""

from __future__ import annotations

from functools import partial

from plugins.ep_overlap import plan
from plugins.errors import UNRESOLVED, RecipeError
from plugins.hierarchical_ep import adapter


def enable(config, settings) -> None:
    """Make `plugins.hierarchical_ep`, which must be enabled first, dispatch the tokens of a micro-batch in chunks.

    Raises:
        RecipeError: the settings are impossible, or no plugin is on whose dispatch could be cut into chunks.
    """
    if not (config.plugins or {}).get("hierarchical_ep"):
        raise RecipeError(
            "this plugin splits the token dispatch of plugins.hierarchical_ep into chunks; switch on "
            "plugins.hierarchical_ep, too",
            plan.KEY,
        )
    chunks, stride = plan.read(settings)
    if chunks == "auto":
        raise RecipeError(UNRESOLVED, f"{plan.KEY}.chunks")
    ours = adapter.current()
    ours.slices = partial(plan.slices, config.runner_config.batch_size, chunks)
    ours.order = partial(plan.issue_order, stride=stride)
