"""A few steps of a recipe's sharded graph on CPU processes, which note the collectives of their first step."""

from __future__ import annotations

import copy
from pathlib import Path

from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import chosen
from tools.accuracy.equivalence.runs import launch, make_corpus
from tools.auto.resolve import resolve
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.override import apply_overrides
from tools.recipe.parallel_mini import WORKERS
from tools.recipe.view import LOADER, View, look

STEPS = 2  # trained; the first one's collectives are compared
_WATCHERS = ("CheckpointMonitor",)


def sharded_recipe(path: Path, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, or of one for Ascend the mini that keeps its parallel strategy.

    Raises:
        RecipeError: the file or an override is wrong, or MindSpore shards nothing of it.
    """
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path, CORPUS, STEPS, WORKERS)
    recipe = resolve(apply_overrides(recipe, overrides))
    refuse_unsharded(recipe)
    return recipe


def refuse_unsharded(recipe: Recipe) -> None:
    """Raise RecipeError for a recipe that is not executed as a sharded graph, on two processes or more."""
    if not chosen(recipe):
        wants = "context.device_target: CPU and parallel.parallel_mode: 1 (semi-auto parallel; docs/semi-auto-cpu.md)"
        raise RecipeError(f"{recipe.source}: MindSpore inserts no collectives into it on CPU: that wants {wants}")
    if View(recipe).devices == 1:
        raise RecipeError(
            f"{recipe.source}: it has one process, which sends nothing: see use_parallel, parallel_config"
        )


def train(recipe: Recipe, folder: Path) -> Path:
    """Train `STEPS` steps on a made-up corpus; returns the run's folder.

    Raises:
        RunFailedError: the training failed, or was refused.
    """
    short = copy.deepcopy(recipe)
    view = View(recipe)
    loader = look(short, LOADER)
    steps = STEPS * -(-view.global_batch // view.batch)  # of one rank's samples, which `make_corpus` counts
    loader["config"]["data_path"] = ["1", make_corpus((folder / "corpus").absolute(), recipe, steps)]
    loader["sizes"] = [STEPS * view.global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    short["callbacks"] = [each for each in short["callbacks"] if each["type"] not in _WATCHERS]
    short["checkpoint"] = {"save_path": "", "load_path": ""}
    launch(short, folder / "run")
    return folder / "run"
