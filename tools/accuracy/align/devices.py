"""Rung 6, "more devices": each side with its own workers, by the losses of their steps.

Recipes that split data alone train on data-parallel CPU workers. Where one splits its model (tensor, pipeline, context
parallel), both sides are executed as MindSpore's sharded graph, in which every layout starts from the same weights.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import RecipeError
from tools.accuracy.align import bisect as align_bisect
from tools.accuracy.align import recipe as align_recipe
from tools.accuracy.align import sides as align_sides
from tools.accuracy.align.compare import FAILED, LOSS, Row, Rung
from tools.accuracy.align.record import read_metrics
from tools.accuracy.equivalence.sharding import NEVER_CLIPPED
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.override import apply_overrides
from tools.recipe.parallel_mini import WORKERS
from tools.recipe.view import MODEL, View
from tools.schema.stages import loss_rank

MORE_DEVICES = "more devices"
NOT_RUN, SAME = "not run", "same"
_MTP = ("num_nextn_predict_layers", "mtp_num_layers")
_TC3 = "from launch.cli import main; main()"


@dataclass(frozen=True)
class Sides:
    """What is trained. about: how it differs from the recipes, in one sentence; empty where it does not."""

    recipes: list[Recipe]
    about: str = ""


def data_parallel(recipe: Recipe, other: Recipe | None, steps: int) -> Sides:
    """The recipes as they are; one worker beside a recipe alone."""
    return Sides([recipe, other if other is not None else Recipe(align_recipe.alone(recipe, steps))])


def split_model(paths: Sequence[Path], overrides: tuple[str, ...], data: str | None, steps: int) -> Sides | None:
    """Recipes as MindSpore's sharded graph, those for Ascend as minis that keep their strategy; None where none splits.

    One path is compared with one process of its own graph. What MindFormers computes otherwise in another layout is
    left out on both sides (docs/stock-differences.md).
    """
    split = [_splits(path, overrides) for path in paths]
    if not any(split):
        return None
    workers = [WORKERS if one else None for one in split]
    recipes = [
        _sharded(align_recipe.load(path, overrides, data, steps, count))
        for path, count in zip(paths, workers, strict=True)
    ]
    if len(recipes) == 1:
        recipes.append(_sharded(Recipe(align_recipe.alone(recipes[0], steps))))
    views = [View(recipe) for recipe in recipes]
    told = ["the sharded graph on " + " and ".join(_processes(view) for view in views)]
    if any(view.dp * view.cp * view.micro_batches * view.accumulation > 1 for view in views):
        told.append("without the auxiliary loss, which MindFormers takes over each rank's and micro-batch's own tokens")
        for recipe in recipes:
            recipe["model"]["model_config"]["moe_aux_loss_coeff"] = 0.0
    if any(view.pp > 1 and any(view.get((*MODEL, key)) for key in _MTP) for view in views):
        told.append("without clipping, whose norm counts the embedding of a pipeline with MTP twice")
        for recipe in recipes:
            recipe["runner_wrapper"].update(use_clip_grad=True, max_grad_norm=NEVER_CLIPPED)
    return Sides(recipes, "; ".join(told))


def _splits(path: Path, overrides: tuple[str, ...]) -> bool:
    """Whether a recipe, as it is written, has a degree that cuts the model or its sequences."""
    view = View(apply_overrides(load_recipe(path), overrides))
    return view.parallel and view.tp * view.pp * view.cp > 1


def _processes(view: View) -> str:
    degrees = {"tp": view.tp, "pp": view.pp, "dp": view.dp, "cp": view.cp, "ep": view.ep}
    split = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
    return f"{view.devices} process{'es' * (view.devices > 1)}" + f" ({split})" * bool(split)


def _sharded(recipe: Recipe) -> Recipe:
    """The recipe in float32 as MindSpore's sharded graph on CPU, its degrees kept."""
    sharded = copy.deepcopy(recipe)
    dp = View(recipe).dp
    sharded["use_parallel"] = True
    sharded["context"]["dataset_broadcast_opt_level"] = 0  # otherwise some ranks read no data
    rows = [[dp, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    sharded["parallel"].update(parallel_mode=1, gradients_mean=False, dataset_strategy=rows)
    sharded["model"]["model_config"].update(compute_dtype="float32", params_dtype="float32")
    return sharded


def train_and_compare(sides: Sides, steps: int, folder: Path, say: Callable[[str], None]) -> Rung:
    """The rung: both sides by `tc3 train`, and their losses.

    Raises:
        SideFailedError: a side failed, or was refused: the five rungs before have run, and are not given up for that.
    """
    counts = [align_recipe.workers(side) for side in sides.recipes]
    if max(counts) == 1:
        reason = "one CPU worker on both sides; give a recipe of another layout by --against"
        return Rung(MORE_DEVICES, state=NOT_RUN, reason=reason)
    if align_recipe.numbers(sides.recipes[0]) == align_recipe.numbers(sides.recipes[1]):
        return Rung(
            MORE_DEVICES, state=SAME, reason="what CPU runs of the two recipes is the same, with all workers too"
        )
    losses = []
    for name, side, count in zip(("layout_ours", "layout_theirs"), sides.recipes, counts, strict=True):
        say(f"training on {count} worker{'s' * (count > 1)}")
        losses.append(_train(side, folder / name, steps))
    rows = [
        Row(f"loss of step {step}", abs(one - two), LOSS, "|difference|")
        for step, (one, two) in enumerate(zip(*losses, strict=True), 1)
    ]
    rung = Rung(MORE_DEVICES, rows)
    told = [align_bisect.explain_curve(rung)] if rung.status == FAILED else []
    rung.reason = "; ".join([*told, *filter(None, [sides.about])])
    return rung


def _train(recipe: Recipe, folder: Path, steps: int) -> list[float]:
    """Losses of the first steps, by `tc3 train` in a process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    dump_recipe(align_recipe.shortened(recipe, steps), folder / "recipe_in.yaml")
    command = [sys.executable, "-c", _TC3, "train", str(folder / "recipe_in.yaml")]
    try:
        align_sides.start([*command, "--run-dir", str(folder / "run"), "--force"], folder / "train.log", folder)
    except RecipeError as error:
        raise align_sides.SideFailedError(f"`tc3 train` refuses the recipe: {error}") from None
    return [float(step["loss"]) for step in read_metrics(folder / "run", loss_rank(View(recipe)))]
