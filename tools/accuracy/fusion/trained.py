"""A few steps of a recipe on CPU with graph kernels and without, and the kernels that MindSpore made."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path

from plugins.errors import ClusterError, RecipeError
from plugins.operator_fusion.plan import VARIABLE
from tools.accuracy.equivalence.runs import launch, make_corpus, read_steps
from tools.accuracy.fusion.cells import OFF, ON
from tools.auto.resolve import resolve
from tools.dryrun.graph.text import GraphText
from tools.fusion.oracle import read_text
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, View, look

STEPS = 2
PACKAGE = "decorator"  # AKG imports it, and no requirement of MindSpore's wheel brings it
_BEFORE, _AFTER = "cluster_3_graph_kernel_expander", "split_4_graph_kernel_splitter"


@dataclass(frozen=True)
class Steps:
    """Losses of the steps with graph kernels and without, and the graphs before and after MindSpore's passes."""

    on: list[float]
    off: list[float]
    before: list[GraphText]
    after: list[GraphText]


def recipe_of(path: Path, overrides: tuple[str, ...]) -> Recipe:
    """The recipe, or of one for Ascend its mini, as one process that trains `STEPS` steps.

    Raises:
        RecipeError: the file or an override is wrong, or it wants several processes.
    """
    recipe = load_recipe(path)
    if not View(recipe).on_cpu:
        recipe = load_mini(path, CORPUS)
    recipe = resolve(apply_overrides(recipe, overrides))
    if View(recipe).devices > 1:
        raise RecipeError(f"{path}: it trains on {View(recipe).devices} processes; want a recipe of one, or its --mini")
    if "operator_fusion" in (recipe.get("plugins") or {}):
        del recipe["plugins"]["operator_fusion"]
    return recipe


def require_akg() -> None:
    """Raise ClusterError where MindSpore could not build CPU graph kernels."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ClusterError(
            f"no package {PACKAGE!r}, without which MindSpore builds no CPU graph kernels: "
            f"pip install -c constraints.txt {PACKAGE}"
        )


def train_both(recipe: Recipe, folder: Path) -> Steps:
    """Train the same steps twice, on a made-up corpus.

    Raises:
        RunFailedError: a training failed. ClusterError: it left no text of its kernels.
    """
    off = _train(recipe, folder / "off", {VARIABLE: OFF})
    saved = {
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "graphs"),
        "MS_DEV_DUMP_IR_PASSES": "stage1_cluster,stage3_split",
    }
    on = _train(recipe, folder / "on", {VARIABLE: ON, **saved})
    return Steps(on, off, _texts(folder / "graphs", _BEFORE), _texts(folder / "graphs", _AFTER))


def _train(recipe: Recipe, folder: Path, variables: dict[str, str]) -> list[float]:
    short = copy.deepcopy(recipe)
    loader = look(short, LOADER)
    loader["config"]["data_path"] = ["1", make_corpus((folder / "corpus").absolute(), recipe, STEPS)]
    loader["sizes"] = [STEPS * View(recipe).global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    short["callbacks"] = [each for each in short["callbacks"] if each["type"] != "CheckpointMonitor"]
    short["checkpoint"] = {"save_path": "", "load_path": ""}
    (short.get("plugins") or {}).pop("held_out_loss", None)
    launch(short, folder / "run", variables, folder)  # AKG writes its objects where it runs
    return [step["loss"] for step in read_steps(folder / "run" / "metrics" / "rank_0.jsonl")]


def _texts(folder: Path, stage: str) -> list[GraphText]:
    files = sorted(folder.rglob(f"*_{stage}*.ir"))
    if not files:
        raise ClusterError(f"{folder}: no text of {stage}: MindSpore's graph kernels did not run")
    with tempfile.TemporaryDirectory() as scratch:
        return [read_text(file, Path(scratch)) for file in files]
