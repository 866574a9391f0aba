"""This module plans a dry run: which ranks of a recipe to compile, and which pipeline stages each rank represents.

Stages that hold the same layers in each chunk, with the same recomputation and swapping, have the same graph. One rank
of each such kind of stage is compiled, with two micro-batches a stage. A `Job` is one compile in its own process, and a
`Plan` holds all of them. `resized` and `without_files` prepare the recipe: they set another number of devices, and
remove the keys that name files of the host.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from tools.model import model_of
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import MODEL, View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import EXCLUDE, RECOMPUTE, layers_of, runs_back, swaps


@dataclass(frozen=True)
class Job:
    """A `Job` describes one compile, which runs in a separate process: the recipe to compile, a global rank, and the
    rank's pipeline stage. The recipe of a `Job` already has the number of micro-batches and layers that are to be
    compiled.
    """

    recipe: Recipe
    rank: int
    stage: int


SWAP = tuple((*MODEL, key) for key in ("layer_swap", "op_swap"))


@dataclass(frozen=True)
class Stage:
    """A `Stage` describes one pipeline stage: its number, its model chunks as (first layer, kinds of layers), and its
    recompute and swap settings. The field `ends` names the stage's other parts: "embedding", or "head" (with MTP
    layers).
    """

    number: int
    chunks: tuple[tuple[int, tuple[str, ...]], ...]
    ends: tuple[str, ...]
    recompute: tuple[Any, ...]

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return a key that is equal for two stages if their compiled graphs differ only in layer numbers, ranks and
        the order of passes.
        """
        return tuple(kinds for _, kinds in self.chunks), self.ends, self.recompute

    @property
    def kinds(self) -> list[str]:
        """Return the kinds of all layers of the stage."""
        return [kind for _, kinds in self.chunks for kind in kinds]


def stages_of(view: View) -> list[Stage]:
    """Return the pipeline's stages in order.

    Raises:
        RecipeError: `offset` does not fit the number of layers; `tc3 check` shows the reason.
    """
    built = convert(view, load_schema())
    layers = layers_of(view, built)
    if layers is None:
        raise RecipeError(
            f"{'.'.join(MODEL)}.offset: the offset does not fit the layers and stages; run tc3 check to see why"
        )
    pattern = model_of(built.fields).pattern
    rows = [list(row) for row in layers]
    back = 1 if runs_back(view) else -1  # the chunk that goes from the last stage to the first
    if 0 < back < len(rows):
        rows[1].reverse()  # `layers_of` counts in the order of MindFormers' tables; the model runs back up the pipeline
    found: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in rows[0]]
    first = 0
    for chunk, row in enumerate(rows):
        order = range(len(row))
        for stage in reversed(order) if chunk == back else order:
            kinds = pattern[first : first + row[stage]]
            found[stage].append((first, kinds))
            first += row[stage]
    last = 0 if len(rows) - 1 == back else len(rows[0]) - 1
    stages = []
    for number, chunks in enumerate(map(tuple, found)):
        ends = ("embedding",) * (number == 0) + ("head",) * (number == last)
        stages.append(Stage(number, chunks, ends, _settings(view, number, chunks)))
    return stages


def _settings(view: View, stage: int, chunks: tuple[tuple[int, tuple[str, ...]], ...]) -> tuple[Any, ...]:
    """Return all that the recipe says of one stage's recomputation and swapping, as something to compare."""
    excluded = tuple(_setting(view.get(("recompute_config", key)), stage) for key in EXCLUDE)
    written = [view.get(("recompute_config", key)) for key in RECOMPUTE]
    if not swaps(view):
        return tuple(_setting(value, stage) for value in written) + excluded
    layers = {
        first + place: (chunk, place) for chunk, (first, kinds) in enumerate(chunks) for place in range(len(kinds))
    }
    written += [view.get(path) for path in SWAP]
    return tuple(_own_layers(value, layers) for value in written) + excluded


def _own_layers(value: Any, layers: Mapping[int, tuple[int, int]]) -> Any:
    """Return a setting that names layers, with those of one stage by their places in its chunks."""
    if isinstance(value, dict):
        return tuple(sorted((key, _own_layers(inner, layers)) for key, inner in value.items()))
    if isinstance(value, list):
        if all(type(item) is int for item in value):
            return tuple(layers[item] for item in sorted(value) if item in layers)
        return tuple(_own_layers(item, layers) for item in value)
    return value


def _setting(value: Any, stage: int) -> Any:
    """Return what of a recompute setting concerns one stage, as something to compare."""
    if isinstance(value, dict):
        return tuple(sorted((key, _setting(inner, stage)) for key, inner in value.items()))
    if isinstance(value, list) and value and not any(isinstance(item, str) for item in value):
        if any(isinstance(row, list) for row in value):
            return tuple(row[stage] if isinstance(row, list) else row for row in value)
        return value[stage] if stage < len(value) else None
    return tuple(value) if isinstance(value, list) else value


ROUNDS = 2  # micro-batches to compile, in numbers of stages: each schedule reaches its steady state within


@dataclass(frozen=True)
class Plan:
    """A `Plan` holds the compiles (jobs) of a dry run in the order of stages and ranks, and the number of micro-batches
    to compile. The field `job_of` holds for each pipeline stage the index of the job that represents the stage.
    """

    stages: list[Stage]
    jobs: list[Job]
    job_of: list[int]
    micro_batches: int


def plan_jobs(recipe: Recipe, ranks: tuple[int, ...] | None = None, micro_batches: int | None = None) -> Plan:
    """Return the plan of a recipe's dry run: the ranks to compile, and the pipeline stages that each of these ranks
    represents.

    Args:
        ranks: global ranks to compile; by default the first rank of each stage that has no equal earlier stage, and of
            the last stage, whose schedule differs most from that of the first stage.
        micro_batches: the number of micro-batches to compile; by default `ROUNDS` for each stage. A pass through a
            chunk is one subgraph that each micro-batch calls, so a few micro-batches are enough.

    Raises:
        RecipeError: the recipe does not have this rank.
    """
    view = View(recipe)
    stages = stages_of(view)
    compiled = min(view.micro_batches, micro_batches or ROUNDS * view.pp) if view.pp > 1 else view.micro_batches
    small = copy.deepcopy(recipe)
    if view.pp > 1:
        small["parallel_config"]["micro_batch_num"] = compiled
    per_stage = view.devices // view.pp
    if ranks is None:
        first = {stage.signature: stage.number for stage in reversed(stages)}
        ranks = tuple(number * per_stage for number in sorted(first.values()))
    outside = [rank for rank in ranks if not 0 <= rank < view.devices]
    if outside:
        raise RecipeError(
            f"--ranks {','.join(map(str, outside))}: this rank does not exist; the recipe has ranks 0 to "
            f"{view.devices - 1}"
        )
    jobs = [Job(small, rank, rank // per_stage) for rank in ranks]
    stands_for = {stages[job.stage].signature: place for place, job in reversed(list(enumerate(jobs)))}
    return Plan(stages, jobs, [stands_for.get(stage.signature, -1) for stage in stages], compiled)


def resized(recipe: Recipe, devices: int | None) -> Recipe:
    """Return the recipe for another number of devices, with a changed data-parallel degree.

    Raises:
        RecipeError: the other degrees do not divide the devices.
    """
    return apply_overrides(recipe, resizing(recipe, devices))


def resizing(recipe: Recipe, devices: int | None) -> list[str]:
    """Return the changes of `resized` as texts of `--set`; the function raises the same errors as `resized`."""
    if devices is None:
        return []
    view = View(recipe)
    other = view.tp * view.pp * view.cp
    if devices % other:
        degrees = f"model_parallel x pipeline_stage x context_parallel = {other}"
        least = devices // other * other or other
        raise RecipeError(f"--devices {devices} is not a multiple of {degrees}; {least} would be a multiple")
    dp = devices // other
    changes = [f"parallel_config.data_parallel={dp}"]
    rows = view.get(("parallel", "dataset_strategy"))
    if isinstance(rows, list):
        wanted = [[dp, *row[1:]] if isinstance(row, list) and row else row for row in rows]
        if wanted != rows:
            changes.append(f"parallel.dataset_strategy={json.dumps(wanted, default=str)}")
    return changes


def without_files(recipe: Recipe) -> Recipe:
    """Return the recipe without the keys that name files of the host. The keys that are removed name the folder for
    graph dumps and a settings file for Ascend hosts. The dry run sets its own folder for graph dumps, and the settings
    file does not exist in MindFormers' public recipes.
    """
    context = recipe.get("context") or {}
    for key in ("save_graphs", "save_graphs_path"):
        context.pop(key, None)
    ascend = context.get("ascend_config")
    if isinstance(ascend, dict) and ascend.pop("parallel_speed_up_json_path", None) is not None:
        context.setdefault("dataset_broadcast_opt_level", 3)
    return recipe
