"""What `auto` stands for under `plugins.hierarchical_ep` and `plugins.ep_overlap`: what the model of `advise` picks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from plugins.errors import RecipeError
from tools.auto.advise import advise, left_open
from tools.hardware import DEFAULT_HARDWARE, Hardware, load_hardware
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import dotted
from tools.recipe.unresolved import AUTO, CHUNKS, DISPATCH, MODE, OVERLAP
from tools.recipe.view import View, look

Values = dict[KeyPath, Any]
_STRIDE = (*OVERLAP, "stride")


def dispatch_values(recipe: Recipe) -> tuple[Values, list[str]]:
    """The values in the place of `auto`, and what to say of them, a line each; nothing where there is no `auto`.

    They depend on the recipe and the hardware file it names alone.

    Args:
        recipe: its layout is resolved; or even, where it is open.

    Raises:
        RecipeError: a setting that cannot be, or sizes that do not fit each other.
    """
    dispatch = look(recipe, DISPATCH)
    if not dispatch:
        if look(recipe, CHUNKS) == AUTO:
            raise RecipeError("plugins.ep_overlap: it cuts what plugins.hierarchical_ep does; switch that on too")
        return {}, []
    modes, cuts, stride = left_open(recipe)
    if len(modes) == 1 and cuts:
        return {}, []
    advice = advise(recipe, _hardware(recipe, dispatch), modes=modes, cuts=cuts, stride=stride)
    values: Values = {}
    lines = []
    if look(recipe, MODE) == AUTO:
        values[MODE] = advice.mode
        lines.append(f"{dotted(MODE)}: auto -> {advice.mode} (modelled on {advice.hardware.name}; tc3 ep-report)")
    if not cuts:
        values[CHUNKS], values[_STRIDE] = list(advice.chunks), advice.stride if stride is None else stride
        lines.append(f"plugins.ep_overlap: auto -> chunks {values[CHUNKS]}, stride {values[_STRIDE]}")
    return values, lines


def _hardware(recipe: Recipe, dispatch: dict[str, Any]) -> Hardware:
    """The cluster that `auto` is for; CPU workers act as its devices, on nodes as large as the recipe says."""
    hardware = load_hardware(dispatch.get("hardware", DEFAULT_HARDWARE))
    view = View(recipe)
    return replace(hardware, devices_per_node=view.node) if view.on_cpu else hardware
