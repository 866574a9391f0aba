"""Ask the pipeline optimiser for the layout that `offset: auto` of a recipe stands for."""

from __future__ import annotations

from collections.abc import Callable

from plugins.errors import RecipeError
from plugins.pipeline_layout.plan import counts_of_offset, layout_of, offset_of
from tools.auto.dispatch import dispatch_values
from tools.auto.layout import even_layout, inputs_of, put
from tools.auto.layout_file import LayoutFile, digest_of, path_of, write_layout
from tools.estimate.efficiency import cluster as load_cluster
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory.error import known_errors
from tools.estimate.memory.room import room_of
from tools.estimate.recompute_keys import plain_value
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.model.ulysses import DEGREE, require_ulysses
from tools.pipeline.schedules import is_v_shaped
from tools.placement.budget import EFFORTS, Budget
from tools.placement.place import place
from tools.recipe.load import Recipe
from tools.recipe.override import dotted
from tools.recipe.unresolved import OFFSET
from tools.recipe.view import View

EFFORT, TIME_LIMIT = "high", 600.0  # and seconds, where nobody says
_KEY = dotted(OFFSET)


class NothingFits(RecipeError):
    """No layout keeps the memory limit."""


def make_layout(recipe: Recipe, cluster: str, budget: Budget, seed: int = 0, margin: float | None = None) -> LayoutFile:
    """Ask the pipeline optimiser; the recipe's own offset and recompute tables are not read.

    Args:
        margin: share of the memory limit to leave free; the estimator's known error by default.

    Raises:
        NothingFits: and what is missing.
        RecipeError: there is no such cluster, or the schedule cannot run.
    """
    even = _even(recipe)
    hardware = load_cluster(cluster)
    try:
        base, room = from_recipe(even), room_of(even, hardware, margin=margin)
    except RecipeError as error:
        raise RecipeError(f"{recipe.source}: {error}") from None
    require_ulysses(recipe, base.model, View(recipe).number(DEGREE, 1))
    found = place(base, TimeModel(hardware), room.bytes, budget, seed)
    if found.configuration is None:
        smaller = "; tc3 search layout --memory-margin takes a smaller one" if room.margin else ""
        raise NothingFits(
            f"{_KEY}: auto: {found.why}; a stage may hold {room.words}, the limit is {room.source}{smaller}"
        )
    inputs, laid = inputs_of(even), found.configuration
    full, select, again = laid.recompute.full, laid.recompute.select, laid.recompute.communication
    return LayoutFile(
        digest=digest_of(inputs),
        inputs=inputs,
        cluster=cluster,
        offset=offset_of([list(row) for row in laid.layers]),
        recompute=plain_value(full, laid.layers),
        select_recompute=plain_value(select, laid.layers),
        select_comm_recompute=plain_value(again, laid.layers),
        predicted={
            "step_s": round(found.step_s, 4),
            "bound_s": round(found.bound_s, 4),
            "ended_by_time_limit": found.cut,
            "stage_gib": [round(peak / GIB, 2) for peak in found.peak_bytes],
            "cap_gib": round(room.cap / GIB, 2),
            "memory_margin": room.margin,
            "fits": known_errors().fits(max(found.peak_bytes), room.cap),
        },
    )


def make_beside(recipe: Recipe, say: Callable[[str], None]) -> LayoutFile:
    """Make the layout of a recipe, for the default cluster, keep it beside the recipe, and say so."""
    path = path_of(recipe.source)
    say(f"{path}: not there; about {EFFORTS[EFFORT]:g} s of search for the layout that `{_KEY}: auto` asks for")
    layout = make_layout(recipe, DEFAULT_HARDWARE, Budget(EFFORTS[EFFORT], TIME_LIMIT))
    write_layout(layout, path, f"tc3 train {recipe.source}")
    return layout


def layout_text(recipe: Recipe, found: LayoutFile) -> str | None:
    """A layout as Megatron writes it; None for a pipeline that runs back up."""
    config = from_recipe(_even(recipe))
    if is_v_shaped(config.schedule):
        return None
    counts = counts_of_offset(found.offset, config.model.layers, config.pp, config.chunks)
    return layout_of(counts, config.model.mtp)


def _even(recipe: Recipe) -> Recipe:
    """The recipe whatever its layout: an even one, and the dispatch that `auto` stands for with it."""
    even = even_layout(recipe)
    put(even, dispatch_values(even)[0])
    return even
