"""Replace `auto` under `plugins.hierarchical_ep` and `plugins.ep_overlap` by what the model of `advise` picks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plugins.errors import RecipeError
from tools.ep_report.advise import Advice, advise, left_open
from tools.hardware import DEFAULT_HARDWARE, Hardware, load_hardware
from tools.recipe.load import Recipe
from tools.recipe.view import View


def settle(recipe: Recipe) -> list[str]:
    """Settle `auto` in `recipe` (in place); says what became of it, one line each, nothing when there was none.

    The same on every rank: it depends on the recipe and a hardware file alone.

    Raises:
        RecipeError: a setting that cannot be, or sizes that do not fit each other.
    """
    plugins = recipe.get("plugins") or {}
    dispatch, overlap = plugins.get("hierarchical_ep"), plugins.get("ep_overlap") or {}
    if not dispatch:
        return []
    try:
        return _settle(recipe, dispatch, overlap)
    except RecipeError as error:
        raise RecipeError(f"{recipe.source}: {error}") from None


def _settle(recipe: Recipe, dispatch: dict[str, Any], overlap: dict[str, Any]) -> list[str]:
    modes, cuts, stride = left_open(recipe)
    if len(modes) == 1 and cuts:
        return []
    advice = advise(recipe, _hardware(recipe, dispatch), modes=modes, cuts=cuts, stride=stride)
    return [*_mode(dispatch, advice), *([] if cuts else _chunks(overlap, advice))]


def _mode(dispatch: dict[str, Any], advice: Advice) -> list[str]:
    if dispatch["mode"] != "auto":
        return []
    dispatch["mode"] = advice.mode
    return [f"plugins.hierarchical_ep.mode: auto -> {advice.mode} (modelled on {advice.hardware.name}; tc3 ep-report)"]


def _chunks(overlap: dict[str, Any], advice: Advice) -> list[str]:
    overlap["chunks"], overlap["stride"] = list(advice.chunks), advice.stride
    return [f"plugins.ep_overlap: auto -> chunks {overlap['chunks']}, stride {overlap['stride']}"]


def _hardware(recipe: Recipe, dispatch: dict[str, Any]) -> Hardware:
    """The cluster that `auto` is settled for; CPU workers act as its devices, on nodes as large as the recipe says."""
    hardware = load_hardware(dispatch.get("hardware", DEFAULT_HARDWARE))
    view = View(recipe)
    if view.on_cpu:
        return replace(hardware, devices_per_node=view.node)
    return hardware
