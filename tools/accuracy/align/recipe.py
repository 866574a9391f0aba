"""Recipes as an alignment runs them: on one CPU worker, a few steps, nothing that only watches."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.errors import RecipeError
from tools.auto.resolve import resolve
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini import CORPUS, load_mini
from tools.recipe.override import apply_overrides
from tools.recipe.view import LOADER, MODEL, View, look
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.weights.hugging_face.sizes import Sizes, sizes_of

BIAS = "TopkBiasBalanceCallback"
WATCHERS = ("CheckpointMonitor",)
ALONE = {
    **dict.fromkeys(("data_parallel", "model_parallel", "context_parallel", "pipeline_stage", "expert_parallel"), 1),
    **{"micro_batch_num": 1, "use_seq_parallel": False, "vocab_emb_dp": False},
}
_DATA = "train_dataset.data_loader.config.data_path"


def written(path: Path, overrides: tuple[str, ...], data: str | None) -> Recipe:
    """The recipe at its own size, with overrides applied and `data` as its corpus.

    Raises:
        RecipeError: the file or an override is wrong.
    """
    recipe = load_recipe(path)
    return resolve(apply_overrides(recipe, (*overrides, *_corpus(recipe, data))))


def load(path: Path, overrides: tuple[str, ...], data: str | None, steps: int, workers: int | None = None) -> Recipe:
    """The recipe, or the CPU mini of one for Ascend, with overrides applied and `data` as its corpus.

    Args:
        workers: of a mini that keeps its parallel strategy; None for one that does not.

    Raises:
        RecipeError: the file or an override is wrong.
    """
    recipe = load_mini(path, data or CORPUS, steps, workers) if is_mini(path) else load_recipe(path)
    return resolve(apply_overrides(recipe, (*overrides, *_corpus(recipe, data))))


def _corpus(recipe: Recipe, data: str | None) -> list[str]:
    """The override that makes `data` the recipe's whole corpus; of a blend it replaces the list."""
    if not data:
        return []
    if len(look(recipe, (*LOADER, "config", "data_path"), [])) == 2:
        return [f"{_DATA}.1={data}"]
    return [f"{_DATA}={json.dumps(['1', data])}"]


def is_mini(path: Path) -> bool:
    """Whether `load` makes a mini of it."""
    return not View(load_recipe(path)).on_cpu


def alone(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The recipe on one worker with the same global batch; the sections it shares with `recipe` are copies.

    Raises:
        RecipeError: a plugin without which it would be another computation.
    """
    if (recipe.get("plugins") or {}).get("group_aux_loss"):
        raise RecipeError("plugins.group_aux_loss: the reference balances each sample by itself: False")
    view = View(recipe)
    plain = copy.deepcopy(dict(recipe))
    samples = view.global_batch
    plain["use_parallel"] = False
    plain["runner_config"]["batch_size"] = plain["model"]["model_config"]["batch_size"] = samples
    plain["context"].pop("dataset_broadcast_opt_level", None)
    plain["parallel_config"].pop("context_parallel_algo", None)
    plain["parallel_config"].update(ALONE)
    plain["model"]["model_config"].update(offset=0, pp_interleave_num=1)
    if view.pp > 1:
        plain["recompute_config"] = {"recompute": False, "select_recompute": False}  # what it has is by stage
    for name in ("pipeline_config", "parallel_optimizer_config"):
        plain["parallel"].pop(name, None)
    rows = [[1, 1], [1, 1], [1, 1], [1, 1], [1, 1, 1, 1]]
    plain["parallel"].update(parallel_mode=0, enable_parallel_optimizer=False, dataset_strategy=rows)
    loader = look(plain, LOADER)
    loader["sizes"] = [steps * samples, 0, 0]
    plain["train_dataset_task"]["dataset_config"] = plain["train_dataset"]
    plain["plugins"] = {}
    plain["callbacks"] = [callback for callback in plain["callbacks"] if callback["type"] not in WATCHERS]
    for callback in plain["callbacks"]:
        if "micro_batch_num" in callback:
            callback["micro_batch_num"] = 1
    plain["checkpoint"] = {"save_path": "", "load_path": ""}
    return plain


def shortened(recipe: Recipe, steps: int) -> dict[str, Any]:
    """The recipe with its own workers and schedule, ended after `steps` steps."""
    short = copy.deepcopy(dict(recipe))
    look(short, LOADER)["sizes"] = [steps * View(recipe).global_batch, 0, 0]
    short["train_dataset_task"]["dataset_config"] = short["train_dataset"]
    short["plugins"] = {**(short.get("plugins") or {}), "held_out_loss": False}
    return short


def reference_sizes(recipe: Mapping[str, Any]) -> Sizes:
    """The reference's model for a recipe; raises RecipeError for what Hugging Face does not have."""
    config = look(recipe, (*LOADER, "config"), {})
    for key in ("reset_attention_mask", "reset_position_ids", "create_compressed_eod_mask"):
        if config.get(key):
            raise RecipeError(f"{'.'.join(LOADER)}.config.{key}: the reference attends to the whole sample: False")
    built = convert(View(Recipe(recipe)), load_schema())
    return sizes_of(built.fields, bool(built.fields["moe_router_enable_expert_bias"]) and moves_bias(recipe))


def moves_bias(recipe: Mapping[str, Any]) -> bool:
    """Whether a callback of the recipe updates the routers' aux-free bias."""
    return any(callback["type"] == BIAS for callback in recipe.get("callbacks") or [])


def write(recipe: Mapping[str, Any], file: Path, recorder: dict[str, Any]) -> None:
    """The recipe as a file, with the recorder as one of its plugins."""
    dump_recipe({**recipe, "plugins": {**(recipe.get("plugins") or {}), "align_recorder": recorder}}, file)


def workers(recipe: Recipe) -> int:
    """Workers that the recipe itself asks for."""
    return View(recipe).devices


def rope_dimensions(recipe: Mapping[str, Any]) -> int:
    """Rotated dimensions of a head."""
    return int(look(recipe, (*MODEL, "qk_pos_emb_head_dim"), 0) or 0)


def numbers(recipe: Mapping[str, Any], *beside: str) -> dict[str, Any]:
    """A recipe without what says where it writes, and without the sections `beside`."""
    return {key: value for key, value in recipe.items() if key not in ("output_dir", "checkpoint", *beside)}
