"""Which ranks of a recipe to compile, and with how many micro-batches: one rank for each kind of pipeline stage."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

from plugins.errors import RecipeError
from tools.dryrun.compile.job import Job
from tools.dryrun.stages import Stage, stages_of
from tools.recipe.load import Recipe
from tools.recipe.override import apply_overrides
from tools.recipe.view import View

ROUNDS = 2  # micro-batches to compile, in numbers of stages: each schedule reaches its steady state within


@dataclass(frozen=True)
class Plan:
    """What to compile.

    Args:
        stages: of the pipeline.
        jobs: compiles, by stage and rank.
        job_of: stage -> the job that stands for it.
        micro_batches: compiled, of those of a step.
    """

    stages: list[Stage]
    jobs: list[Job]
    job_of: list[int]
    micro_batches: int


def plan_jobs(recipe: Recipe, ranks: tuple[int, ...] | None = None, micro_batches: int | None = None) -> Plan:
    """The compiles of a recipe.

    Args:
        ranks: global ranks to compile; by default the first of each stage that no earlier stage equals, and the last
            stage, whose schedule differs most from the first's.
        micro_batches: how many to compile; by default `ROUNDS` for each stage. A pass through a chunk is one subgraph
            that each micro-batch calls, so that a step of more repeats what a step of few does.

    Raises:
        RecipeError: a rank outside the recipe.
    """
    view = View(recipe)
    stages = stages_of(view)
    compiled = min(view.micro_batches, micro_batches or ROUNDS * view.pp) if view.pp > 1 else view.micro_batches
    small = copy.deepcopy(recipe)
    if view.pp > 1:
        small["parallel_config"]["micro_batch_num"] = compiled
    per_stage = view.devices // view.pp
    if ranks is None:
        first: dict[object, int] = {}
        for stage in stages:
            first.setdefault(stage.signature, stage.number)
        ranks = tuple(number * per_stage for number in sorted(first.values()))
    outside = [rank for rank in ranks if not 0 <= rank < view.devices]
    if outside:
        raise RecipeError(f"--ranks {','.join(map(str, outside))}: the recipe has ranks 0 to {view.devices - 1}")
    jobs = [Job(small, rank, rank // per_stage) for rank in ranks]
    stands_for = {stages[job.stage].signature: place for place, job in reversed(list(enumerate(jobs)))}
    return Plan(stages, jobs, [stands_for.get(stage.signature, -1) for stage in stages], compiled)


def resized(recipe: Recipe, devices: int | None) -> Recipe:
    """The recipe for another number of devices, by its data-parallel degree.

    Raises:
        RecipeError: the other degrees do not divide the devices.
    """
    if devices is None:
        return recipe
    view = View(recipe)
    other = view.tp * view.pp * view.cp
    if devices % other:
        degrees = f"model_parallel x pipeline_stage x context_parallel = {other}"
        near = devices // other * other or other
        raise RecipeError(f"--devices {devices} is no multiple of {degrees}; {near} is one")
    dp = devices // other
    changes = [f"parallel_config.data_parallel={dp}"]
    rows = view.get(("parallel", "dataset_strategy"))
    if isinstance(rows, list):
        wanted = [[dp, *row[1:]] if isinstance(row, list) and row else row for row in rows]
        if wanted != rows:
            changes.append(f"parallel.dataset_strategy={json.dumps(wanted, default=str)}")
    return apply_overrides(recipe, changes)


def without_files(recipe: Recipe) -> Recipe:
    """The recipe without what it says of files of the host.

    That is where graphs are dumped, which the dry run decides, and the settings file of Ascend hosts, which
    MindFormers' public recipes name and do not ship: of what it sets, the graph knows the data's broadcast level alone.
    """
    context = recipe.get("context") or {}
    for key in ("save_graphs", "save_graphs_path"):
        context.pop(key, None)
    ascend = context.get("ascend_config")
    if isinstance(ascend, dict) and ascend.pop("parallel_speed_up_json_path", None) is not None:
        context.setdefault("dataset_broadcast_opt_level", 3)
    return recipe
