"""The sections of a recipe that every tool takes apart: each a mapping, the callbacks a list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError

_LOADER = ("train_dataset", "data_loader")
SECTIONS = (
    *((name,) for name in ("checkpoint", "context", "grouped_lr_schedule", "lr_schedule", "model", "optimizer")),
    *((name,) for name in ("parallel", "parallel_config", "plugins", "recompute_config", "runner_config")),
    *((name,) for name in ("runner_wrapper", "swap_config", "train_dataset", "train_dataset_task", "trainer")),
    *(("model", "model_config"), ("parallel", "pipeline_config"), ("parallel", "parallel_optimizer_config")),
    *(_LOADER, (*_LOADER, "config")),
)


def refuse_sections(recipe: Mapping[str, Any]) -> None:
    """Raise for the first section that is there and is something else; `tc3 check` finds them all.

    Raises:
        RecipeError: with file, line and key path.
    """
    for path in SECTIONS:
        if not isinstance(_at(recipe, path), Mapping | None):
            _refuse(recipe, path, "must be a mapping")
    callbacks = recipe.get("callbacks")
    if not isinstance(callbacks, list | None):
        _refuse(recipe, ("callbacks",), "must be a list")
    for index, callback in enumerate(callbacks or []):
        if not isinstance(callback, Mapping):
            _refuse(recipe, ("callbacks", index), "must be a mapping with a `type`")


def _at(recipe: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = recipe
    for key in path:
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _refuse(recipe: Mapping[str, Any], path: tuple[Any, ...], wrong: str) -> None:
    mark = getattr(recipe, "marks", {}).get(path)
    place = str(mark) if mark else getattr(recipe, "source", "")
    raise RecipeError(f"{place + ': ' if place else ''}{'.'.join(map(str, path))}: {wrong}")
