"""This module replaces the value `auto` in a recipe by computed values, and is the only module that does so. Every
command calls `resolve` after it has read its recipe.

    1. A Megatron layout string at `model.model_config.offset` is replaced by the offset that places the layers in this
       way (`offsets`).
    2. `plugins.hierarchical_ep.mode: auto` and `plugins.ep_overlap.chunks: auto` are replaced by the values that `tc3
       ep-report` recommends (`advise`); if `offset` is also `auto`, they are computed for an even layout without
       recomputation.
    3. `model.model_config.offset: auto` is replaced by the layout and recompute tables in the file beside the recipe
       (`LayoutFile`), which is made for the dispatch mode of step 2.
    4. If the recipe gives no costs of samples, the costs with which `plugins.attention_balance` weighs samples are
       added.

The values depend only on the recipe, the hardware file that it names and the layout file, so every rank, node and
command gets the same values. `tools.recipe.view` refuses a recipe that is not resolved.

For `plugins.attention_balance` the cost of a sample of n tokens is `per_token` x n, plus `per_pair` for each pair of
its tokens that attend to each other. The plugin assigns samples to ranks by these costs, and with `window` above 1 also
to steps. The two numbers are computed from the model, written into the effective recipe when a run starts, and kept
when the run is resumed, so that its samples keep their order even if a later version of this repository counts FLOPs in
another way. Recipes in recipes/ leave the two numbers out, because they follow from the model's sizes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from plugins.attention_balance.plan import COST, KEY, recomputed_share
from plugins.attention_balance.samples import COMPUTED, Cost
from plugins.errors import RecipeError
from plugins.pipeline_layout import counts_of_offset, is_layout, layout_of, offset_of
from tools.estimate.efficiency import cluster as load_cluster
from tools.estimate.from_recipe import DEGREE, from_recipe, plain_value, require_ulysses
from tools.estimate.memory.model import peak_memory
from tools.estimate.memory.room import Room, known_errors, room_of
from tools.estimate.time_model import TimeModel
from tools.files.atomic import check_writable
from tools.hardware import DEFAULT_HARDWARE
from tools.hardware.units import GIB
from tools.layout.advise import dispatch_values
from tools.layout.budget import EFFORTS, Budget
from tools.layout.offsets import (
    LayoutFile,
    Values,
    digest_of,
    even_layout,
    even_values,
    file_values,
    inputs_of,
    layout_at,
    path_of,
    put,
    read_layout,
    remedy,
    string_values,
    write_layout,
)
from tools.model import PASSES, linear_flops, model_of, pair_flops
from tools.pipeline.schedules import is_v_shaped
from tools.recipe.findings import in_file
from tools.recipe.load import KeyPath, Recipe, dotted
from tools.recipe.view import AUTO, CHUNKS, MODE, OFFSET, View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import fewer_than_chunks

SECTION = ("plugins", "attention_balance")


def sample_cost(recipe: Recipe) -> Cost:
    """Return the training FLOPs of one token (without attention scores), and the training FLOPs of attention for one
    query-key pair. If the recipe recomputes the forward pass, the FLOPs of the forward pass count twice.

    Raises:
        RecipeError: the recipe's sizes do not describe a possible model.
    """
    try:
        model = model_of(convert(View(recipe), load_schema()).fields)
        pair, token = pair_flops(model) // PASSES, linear_flops(model) // PASSES  # forward
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model.model_config: {KEY} cannot compute the cost of a sample, because these sizes do not describe a "
            f"model ({error}); see tc3 check, or write measured per_pair and per_token under {KEY}"
        ) from None
    passes = PASSES + recomputed_share(recipe)
    return Cost(passes * pair, passes * token, COMPUTED)


def write_sample_cost(recipe: Recipe) -> None:
    """Add the FLOPs per token and per query-key pair (see `sample_cost`) to `recipe` in place, if
    `plugins.attention_balance` is on and the recipe does not set these FLOPs. This function raises the same errors as
    `sample_cost`. Call this function after the layout and the recomputation are resolved, because the FLOPs include
    recomputation.
    """
    section = look(recipe, SECTION)
    if not isinstance(section, dict) or any(name in section for name in COST):
        return  # what else is wrong with it the plugin's reader says
    cost = sample_cost(recipe)
    # FLOPs are whole but for odd shares of recomputed layers
    pair, token = (int(one) if one.is_integer() else one for one in (cost.per_pair, cost.per_token))
    put(recipe, {(*SECTION, "per_pair"): pair, (*SECTION, "per_token"): token, (*SECTION, "unit"): cost.unit})


def keep_sample_cost(recipe: Recipe, first: Recipe) -> list[str]:
    """Copy the cost of a token and of a query-key pair, by which `plugins.attention_balance` orders samples, from
    `first` (the recipe with which the run began) to `recipe`, in place. Return a note for the user if the copied costs
    differ from those that `recipe` had. A recipe that states measured costs keeps them, and a recipe without
    `plugins.attention_balance` gets no costs.
    """
    mine, theirs = look(recipe, SECTION), look(first, SECTION)
    if not isinstance(mine, dict) or not isinstance(theirs, dict) or mine.get("unit") != COMPUTED:
        return []
    kept = {name: theirs[name] for name in COST if name in theirs}
    changed = [name for name in kept if kept[name] != mine.get(name)]
    if not changed:
        return []
    rest = {name: value for name, value in mine.items() if name not in COST}
    put(recipe, {SECTION: {**rest, **kept}})
    was = ", ".join(f"{name} {kept[name]}" for name in changed)
    return [f"{KEY}: the samples keep the order in which this run began ({was}, as {first.source} says)"]


EFFORT, TIME_LIMIT = "high", 600.0  # and seconds, where nobody says
_KEY = dotted(OFFSET)


class NothingFits(RecipeError):
    """This error means that no layout of the recipe's layers fits within the memory limit."""


def make_layout(
    recipe: Recipe,
    cluster: str,
    budget: Budget,
    seed: int = 0,
    margin: float | None = None,
    path: Path | None = None,
) -> LayoutFile:
    """Find a layout of a recipe's layers with the pipeline optimiser; the recipe's `offset` and recompute keys are not
    read. The memory limit is reduced by `margin`, whose default is the known error of the memory model. The function
    returns the layout in the layout file `path` if this layout is for the same run and cluster, fits into the memory
    limit, and is faster (or, if the time limit ended this search, as fast); its step time is predicted again, because
    the cluster's efficiencies may have changed. The field `cut` of `budget` says whether the time limit ended this
    search, and the entry `ended_by_time_limit` of the returned layout says whether the time limit ended the search that
    made this layout.

    Raises:
        NothingFits: no layout fits the memory limit; the message says how much memory is missing.
        RecipeError: the cluster is unknown, or the pipeline schedule cannot run.
    """
    even = _even(recipe)
    hardware = load_cluster(cluster)
    try:
        base, room = from_recipe(even), room_of(even, hardware, margin=margin)
        if base.adapters:
            wrong = f"{_KEY}: auto: the step time of training with adapters cannot be predicted, so no layout is found"
            raise RecipeError(f"{wrong}; write the number of extra layers of each stage, or 0 for even stages")
        if base.model.layers < base.pp * base.chunks:  # `tc3 check` refuses each layout
            raise RecipeError(f"{_KEY}: auto: {'; '.join(fewer_than_chunks(base.model.layers, base.pp, base.chunks))}")
    except RecipeError as error:
        raise in_file(recipe, error) from None
    require_ulysses(recipe, base.model, View(recipe).number(DEGREE, 1))
    from tools.layout.place import place  # a solver comes with it, which ranks and checks need not load

    times = TimeModel(hardware)
    found = place(base, times, room.bytes, budget, seed)
    budget.cut |= found.cut
    before = layout_at(path) if path else None  # now, because another search may have written it meanwhile
    seconds = _seconds(even, before, times, room) if before and before.cluster == cluster else math.inf
    # of equally fast layouts that of a whole search stays, whose bound and answer are the same on every machine
    if before and seconds < found.step_s * (1 + _LESS if found.cut else 1 - _LESS):
        bound = min(found.bound_s, seconds) if found.configuration else 0.0
        step, bound = round(seconds, 4), round(bound, 4)
        if before.predicted["step_s"] == step:
            return before
        return replace(before, predicted={**before.predicted, "step_s": step, "bound_s": bound})  # other efficiencies
    if found.configuration is None:
        smaller = "; tc3 search layout --memory-margin takes a smaller one" if room.margin else ""
        raise NothingFits(
            f"{_KEY}: auto: {found.why}; a stage may hold {room.words}, the limit is {room.source}{smaller}"
        )
    inputs, laid = inputs_of(even), found.configuration
    recomputed = (laid.recompute.full, laid.recompute.select, laid.recompute.communication)
    full, select, again = (plain_value(table, laid.layers) for table in recomputed)
    predicted = {
        "step_s": round(found.step_s, 4),
        "bound_s": round(found.bound_s, 4),
        "ended_by_time_limit": found.cut,
        "stage_gib": [round(peak / GIB, 2) for peak in found.peak_bytes],
        "cap_gib": round(room.cap / GIB, 2),
        "memory_margin": room.margin,
        "fits": known_errors().fits(max(found.peak_bytes), room.cap),
    }
    offset = offset_of([list(row) for row in laid.layers])
    return LayoutFile(digest_of(inputs), inputs, cluster, offset, full, select, again, predicted)


_LESS = 1e-6  # relative: two layouts are equally fast


def _seconds(even: Recipe, layout: LayoutFile, times: TimeModel, room: Room) -> float:
    """Return the predicted seconds of a step with a layout; return infinity if the layout is not for this run, holds
    values that are not possible, or does not fit.
    """
    laid = copy.deepcopy(even)
    try:
        put(laid, file_values(even, layout))
        config, _ = from_recipe(laid), float(layout.predicted["step_s"])
        return times.step(config, simulated=True).total if peak_memory(config) <= room.bytes else math.inf
    except (RecipeError, *_BROKEN):
        return math.inf


def layout_text(recipe: Recipe, found: LayoutFile) -> str | None:
    """Return a layout in the form of Megatron's layout strings; return None for a V-shaped pipeline."""
    config = from_recipe(_even(recipe))
    if is_v_shaped(config.schedule):
        return None
    counts = counts_of_offset(found.offset, config.model.layers, config.pp, config.chunks)
    return layout_of(counts, config.model.mtp)


def _even(recipe: Recipe) -> Recipe:
    """Return the recipe whatever its layout: an even one, and the dispatch that `auto` stands for with it."""
    even = even_layout(recipe)
    put(even, dispatch_values(even)[0])
    return even


Say = Callable[[str], None]
Layout = Literal["file", "search", "found", "even"]
Step = Callable[[Recipe], tuple[Values, list[str]]]  # values for what is open, and what to say of them
_BROKEN = (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError)  # by values that `tc3 check` refuses
_PLAIN = {MODE: "global", CHUNKS: [1, 1]}


class UnresolvedError(RecipeError):
    """This error means that the value `auto` of the key `path` cannot be replaced by a computed value. The field `why`
    holds the reason, which may name another key.
    """

    def __init__(self, source: str, path: KeyPath, why: str):
        super().__init__(why if why.startswith(f"{source}:") else f"{source}: {why}")
        self.path, self.why = path, why.removeprefix(f"{source}: ").removeprefix(f"{dotted(path)}: ")


def resolve(recipe: Recipe, say: Say = lambda line: None, layout: Layout = "file", dispatch: bool = True) -> Recipe:
    """Return a copy of `recipe` in which every `auto` is replaced by a computed value. The FLOPs per token and
    query-key pair for `plugins.attention_balance` are filled in, too. All other values of the recipe are unchanged.

    Args:
        say: a function that receives a line for each value that replaced `auto`.
        layout: the source of the layout that replaces `offset: auto`. "file": the layout file beside the recipe.
            "search": the layout file, or the result of a search if there is no file. "found": the layout file, or as
            "even" if there is no file or the file is for another run. "even": evenly spread layers without
            recomputation, for callers that search for a layout or whose results do not depend on the layout.
        dispatch: False leaves the dispatch mode and the chunks as `auto`, for callers that compare their possible
            values.

    Raises:
        RecipeError: the layout file is missing or was made for another run; MindFormers cannot express the layout; or
            settings or sizes fit no dispatch mode.
    """
    return _resolved(recipe, say, layout, dispatch, None)


def resolve_for_check(recipe: Recipe) -> tuple[Recipe, list[UnresolvedError]]:
    """Return a copy of the recipe in which every `auto` is replaced, and the errors of the keys for which no value
    could be computed. A key with an error gets a simple value.
    """
    failed: list[UnresolvedError] = []
    return _resolved(recipe, lambda line: None, "file", True, failed), failed


def _resolved(recipe: Recipe, say: Say, layout: Layout, dispatch: bool, failed: list[UnresolvedError] | None) -> Recipe:
    resolved = copy.deepcopy(recipe)

    def plain_dispatch(recipe: Recipe) -> Values:
        return {path: value for path, value in _PLAIN.items() if look(recipe, path) == AUTO}

    steps: list[tuple[KeyPath, Step, Callable[[Recipe], Values]]] = [
        (OFFSET, _string, even_values),
        *([(MODE, _dispatch, plain_dispatch)] if dispatch else []),
        (OFFSET, partial(_auto_layout, layout=layout, say=say), even_values),
    ]
    for path, step, plain in steps:
        try:
            values, lines = step(resolved)
        except RecipeError as error:
            problem = UnresolvedError(recipe.source, path, _why(recipe, path, error))
            if failed is None:
                raise problem from None
            failed.append(problem)
            values, lines = plain(resolved), []
        put(resolved, values)
        for line in lines:
            say(line)
    if layout in ("found", "even"):  # not what a run recomputes, which counts
        return resolved
    try:
        write_sample_cost(resolved)
    except RecipeError as error:
        if failed is None:  # `tc3 check` says itself which sizes make no model
            raise RecipeError(f"{recipe.source}: {error}") from None
    return resolved


def _why(recipe: Recipe, path: KeyPath, error: RecipeError) -> str:
    text = str(error).removeprefix(f"{recipe.source}: ")
    return f"{_KEY}: {text.removeprefix(f'{_KEY}: ')}" if path == OFFSET else text


def _string(recipe: Recipe) -> tuple[Values, list[str]]:
    """Do step 1 of `resolve`: replace layout strings by offsets."""
    text = look(recipe, OFFSET)
    if not is_layout(text):
        return {}, []
    values = string_values(recipe, text)
    return values, [f"{_KEY}: {text} -> {values[OFFSET]}"]


def _dispatch(recipe: Recipe) -> tuple[Values, list[str]]:
    """Do step 2 of `resolve`: replace `auto` in the dispatch settings."""
    try:
        return dispatch_values(even_layout(recipe) if look(recipe, OFFSET) == AUTO else recipe)
    except RecipeError:
        raise
    except _BROKEN:
        wrong = f"auto could not be resolved, because the recipe has errors; tc3 check {recipe.source} lists them"
        raise RecipeError(f"{dotted(MODE)}: {wrong}") from None


def _auto_layout(recipe: Recipe, layout: Layout, say: Say) -> tuple[Values, list[str]]:
    """Do step 3 of `resolve`: replace `offset: auto`."""
    if look(recipe, OFFSET) != AUTO:
        return {}, []
    why = ""
    if layout == "found":
        try:
            with_dispatch = copy.deepcopy(recipe)  # the file was made for what an open dispatch becomes
            put(with_dispatch, _dispatch(recipe)[0])
            return _auto_layout(with_dispatch, "file", say)
        except RecipeError as error:
            why = f": {_why(recipe, OFFSET, error)}" if recipe.source and path_of(recipe.source).is_file() else ""
            layout = "even"
    if layout == "even":
        return even_values(recipe), [f"{_KEY}: auto -> an even layout here, nothing recomputed{why}"]
    found = _layout_file(recipe, layout == "search", say)
    values = file_values(recipe, found)
    return values, [f"{_KEY}: auto -> {found.offset}, recompute_config with it ({path_of(recipe.source)})"]


def _layout_file(recipe: Recipe, search: bool, say: Say) -> LayoutFile:
    """Return the answer that is kept beside the recipe, made where there is none and `search` says so."""
    if not recipe.source:
        raise RecipeError(
            "offset: auto takes the layout from a file beside the recipe, but this recipe was not loaded from a file"
        )
    path = path_of(recipe.source)
    if path.is_file():
        return read_layout(path)
    if not search:
        raise RecipeError(f"auto: the layout is read from {path}, but this file does not exist; {remedy(recipe)}")
    check_writable(path)
    say(f"{path} does not exist: searching about {EFFORTS[EFFORT]:g} s for the layout that `{_KEY}: auto` asks for")
    found = make_layout(recipe, DEFAULT_HARDWARE, Budget(EFFORTS[EFFORT], TIME_LIMIT))
    write_layout(found, path, f"tc3 train {recipe.source}")
    return found
