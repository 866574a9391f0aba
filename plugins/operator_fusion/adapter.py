"""This module passes `plugins.operator_fusion` of a recipe to MindSpore as environment flags.

MindFormers passes no flags to graph kernels, and MindSpore 2.9.0 reads them only from the environment. So the plugin
sets an environment variable, which must be set before MindSpore compiles. `tc3 train`, `tc3 agent` and `--script`
export this variable; `before_mindspore` also sets it when a user starts msrun by hand.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from plugins.operator_fusion import plan


def before_mindspore(recipe: Mapping[str, Any], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the flags of `recipe` in this worker's environment.

    Raises:
        RecipeError, ClusterError: see `plan.environment`.
    """
    environ.update(plan.environment(recipe, environ))


def enable(config, settings) -> None:
    """Refuse invalid settings; `before_mindspore` has already set the flags.

    Raises:
        RecipeError: see `plan.Fusion`.
    """
    plan.Fusion.read(settings)
