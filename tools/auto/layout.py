"""Put tables in the place of `model.model_config.offset: auto`, or of a Megatron layout string, before a launch.

A layout string says where the layers run and is translated. `auto` asks the pipeline optimiser, once: its answer is
kept in a file beside the recipe (`tools.auto.layout_file`) with the tables of `recompute_config`, too, which `auto`
takes over. Launches read that file, so that every rank, node and day sees the same layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from plugins.errors import RecipeError
from plugins.pipeline_layout.plan import counts_of, counts_of_offset, offset_of
from tools.auto.layout_file import (
    MODEL_VERSION,
    LayoutFile,
    differences,
    digest_of,
    path_of,
    read_layout,
    write_layout,
)
from tools.ep_report.advise import DEFAULT_HARDWARE
from tools.estimate.configuration import Configuration, Recompute, Table, even_layers, spread
from tools.estimate.from_recipe import from_recipe
from tools.estimate.memory_error import known_errors
from tools.estimate.recompute_keys import plain_value, swapped_value, with_patterns
from tools.hardware.units import GIB
from tools.model.architecture import words_of
from tools.pipeline.schedules import is_v_shaped
from tools.placement.budget import Budget
from tools.recipe.load import Recipe
from tools.recipe.view import MODEL, View, limit_of
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import swaps

AUTO = "auto"
TIME_LIMIT = 60.0  # seconds, where nobody says
TABLES = ("recompute", "select_recompute", "select_comm_recompute")
_KEY = ".".join((*MODEL, "offset"))
_ANSWERS = ("layers", "recompute")  # what of a run is asked for


class NothingFits(RecipeError):
    """No layout keeps the memory limit."""


def is_auto(recipe: Recipe) -> bool:
    """Whether the recipe leaves its layout to the optimiser."""
    return View(recipe).get((*MODEL, "offset")) == AUTO


def settle_layout(recipe: Recipe, make: Callable[[Recipe], LayoutFile] | None = None) -> list[str]:
    """Settle the layout of `recipe` (in place); says what became of it, nothing when it is settled already.

    Args:
        make: makes and writes the file of `offset: auto` where there is none.

    Raises:
        RecipeError: a layout that MindFormers cannot express or that does not fit; a file that is missing or was made
            for another recipe.
    """
    written = View(recipe).get((*MODEL, "offset"))
    if not isinstance(written, str):
        return []
    try:
        return _from_file(recipe, make) if written == AUTO else _from_layout(recipe, written)
    except RecipeError as error:
        raise RecipeError(f"{recipe.source}: {_KEY}: {error}") from None


def _from_layout(recipe: Recipe, text: str) -> list[str]:
    view = View(recipe)
    built = convert(View(even_layout(recipe)), load_schema())
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    if is_v_shaped(view.scheduler):
        raise RecipeError(
            f"layout {text!r}: layouts run from the first stage to the last, {view.scheduler} runs back up"
        )
    counts, mtp = counts_of(text, stages)
    if len(counts) != chunks:
        raise RecipeError(
            f"layout {text!r}: {len(counts)} chunks on each of {stages} stages, but pp_interleave_num is {chunks} (it "
            "counts with parallel.pipeline_config.pipeline_interleave: True)"
        )
    for name, have, want in (
        ("decoder layers", sum(map(sum, counts)), built.number("num_layers")),
        ("MTP layers", mtp, built.number("mtp_num_layers")),
    ):
        if have != want:
            raise RecipeError(f"layout {text!r}: {have} {name}, but the model has {want}")
    offset = offset_of(counts)
    recipe["model"]["model_config"]["offset"] = offset
    return [f"{_KEY}: {text} -> {offset}"]


def _from_file(recipe: Recipe, make: Callable[[Recipe], LayoutFile] | None) -> list[str]:
    path = path_of(recipe.source)
    command = f"run tc3 search layout {recipe.source} (with the --set of this run, if any)"
    if path.is_file():
        layout = read_layout(path)
    elif make is None:
        raise RecipeError(f"{AUTO}: there is no {path}: {command}")
    else:
        layout = make(recipe)
    inputs = inputs_of(recipe)
    if layout.digest != digest_of(inputs):
        changed = "; ".join(differences(layout.inputs, inputs)) or "its digest is not that of its inputs"
        raise RecipeError(f"{AUTO}: {path} was made for another run ({changed}): {command}")
    view, config = View(recipe), from_recipe(even_layout(recipe))
    placed = replace(config, layers=_laid(layout, config), recompute=Recompute())
    recipe["model"]["model_config"]["offset"] = layout.offset
    section = recipe["recompute_config"] = {**(recipe.get("recompute_config") or {})}
    for name in TABLES:
        value, now = getattr(layout, name), view.get(("recompute_config", name))
        if swaps(view):  # the file counts layers, as launches without swapping read them
            section[name] = swapped_value(name, spread(value, placed.layers), placed, now)
        else:
            section[name] = with_patterns(name, value, now)
    return [f"{_KEY}: auto -> {layout.offset}, recompute_config with it ({path})"]


def _laid(layout: LayoutFile, config: Configuration) -> Table:
    """The layers of a file [chunks][stages]."""
    counts = counts_of_offset(layout.offset, config.model.layers, config.pp, config.chunks)
    return tuple(tuple(row) for row in counts)


def inputs_of(recipe: Recipe) -> dict[str, Any]:
    """What the answer depends on, but for the cluster: all that the model of time and memory reads, and its version."""
    config = from_recipe(even_layout(recipe))
    run = {name: value for name, value in asdict(config).items() if name not in (*_ANSWERS, "model")}
    sizes = {f"model.{name}": value for name, value in asdict(config.model).items() if name != "pattern"}
    sizes |= {"model.layers": config.model.layers, "model.pattern": words_of(config.model.pattern)}
    run |= {"chunks": config.chunks, "replay_tp": config.recompute.replay_tp}
    return {**run, **sizes, "max_device_memory": limit_of(recipe), "model_version": MODEL_VERSION}


def make_layout(recipe: Recipe, cluster: str, budget: Budget, seed: int = 0, margin: float | None = None) -> LayoutFile:
    """Ask the pipeline optimiser; the recipe's own offset and recompute tables are not read.

    Args:
        margin: share of the memory limit to leave free; the estimator's known error by default.

    Raises:
        NothingFits: and what is missing.
        RecipeError: there is no such cluster, or the schedule cannot run.
    """
    # imported where a search starts: ranks that only read an answer need no solver
    from tools.estimate.time_model import TimeModel
    from tools.placement.place import place
    from tools.search.space.request import request_of, require_ulysses

    asked = request_of(even_layout(recipe), cluster, margin=margin)
    require_ulysses(recipe, asked)
    found = place(asked.base, TimeModel(asked.hardware), asked.room, budget, seed)
    if found.configuration is None:
        smaller = "; tc3 search layout --memory-margin takes a smaller one" if asked.margin else ""
        raise NothingFits(
            f"{_KEY}: {AUTO}: {found.why}; a stage may hold {asked.room_words}, "
            f"the limit is {asked.cap_source}{smaller}"
        )
    inputs, laid = inputs_of(recipe), found.configuration
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
            "stage_gib": [round(peak / GIB, 2) for peak in found.peak_bytes],
            "cap_gib": round(asked.cap / GIB, 2),
            "memory_margin": asked.margin,
            "fits": known_errors().fits(max(found.peak_bytes), asked.cap),
        },
    )


def even_layout(recipe: Recipe) -> Recipe:
    """A copy with layers spread evenly and nothing recomputed: a recipe that can be read while its layout is open."""
    even = copy.deepcopy(recipe)
    even["model"]["model_config"]["offset"] = 0
    view = View(even)
    stages, chunks = (view.pp, view.chunks) if view.parallel else (1, 1)
    layers = even_layers(convert(view, load_schema()).number("num_layers"), stages, chunks)
    even["model"]["model_config"]["offset"] = offset_of([list(row) for row in layers])
    section = even["recompute_config"] = {**(even.get("recompute_config") or {})}
    section.update(dict.fromkeys(TABLES, False))
    return even


def make_here(say: Callable[[str], None]) -> Callable[[Recipe], LayoutFile]:
    """For `settle_layout`: makes the file of a recipe, for the default cluster, and says so."""

    def make(recipe: Recipe) -> LayoutFile:
        path = path_of(recipe.source)
        say(f"{path}: not there; {TIME_LIMIT:g} s of search for the layout that `{_KEY}: auto` asks for")
        layout = make_layout(recipe, DEFAULT_HARDWARE, Budget(TIME_LIMIT))
        write_layout(layout, path, f"tc3 train {recipe.source}")
        return layout

    return make
