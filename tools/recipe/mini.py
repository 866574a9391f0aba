"""This module shrinks any TeleChat recipe, dense or a mixture of experts, to a recipe that a CPU trains in a minute.

The module scales sizes down and replaces operators that the CPU lacks. A mini recipe keeps the architecture and
training method of the recipe: the kind of attention, the number of query heads that share keys and values, dense-first
layers, shared expert, router, MTP, YaRN's factor, document masks, optimizer, the shape of schedules, and plugins.

`derive_mini` makes a mini recipe for one worker. A parallel mini recipe also keeps the parallel strategy of the recipe,
for a few CPU workers that run the sharded graph with the recipe's own operators: the parallel degrees (scaled down),
the pipeline schedule, recomputation, optimizer sharding, dispatcher and precision.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from plugins.errors import RecipeError
from plugins.expert_balance.settings import without_moves
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER
from tools.data.index import read_whole
from tools.recipe.dump import dump_recipe
from tools.recipe.findings import in_file
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.mini_strategy import GROUPED, LATENT, OPTIMIZER, WORKERS, keep_strategy, shares_keys
from tools.recipe.view import View

CORPUS = "output/data/stdlib"  # the corpus of launch/quickstart

SEQ_LENGTH = 128
CONVERSATIONS = 512  # tokens of a sample of packed conversations: two or three, with what Alpaca's template says
VOCABULARY = 2048
BATCH = 4  # samples per step
HIDDEN = 128
EXPERTS = 16
TOPK = 4
HEADS = 4
GROUPS = 2  # heads of keys and values where query heads share them, so that tensor parallelism can cut them
HEAD_SCALE = 4  # head and rank dimensions are divided by this, ranks by four times as much
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids", "attention_mask"]

_ON_CPU = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_ASCEND_ONLY = ("monitor_config", "swap_config")


def derive_mini(
    recipe: Recipe, data_path: str, steps: int = 10, workers: int | None = None, length: int = SEQ_LENGTH
) -> dict[str, Any]:
    """Return a flat recipe for CPU that trains `steps` steps on the Megatron corpus `data_path`, or on the instruction
    data beside this corpus.

    With a number of `workers`, the flat recipe keeps the parallel strategy, scaled down to this number of workers
    (`keep_strategy`). A sample has `length` tokens, except if samples are packed conversations.

    Raises:
        RecipeError: the recipe's model or dataset has no CPU counterpart.
    """
    mini = copy.deepcopy(dict(recipe))
    model = mini.get("model", {}).get("model_config", {})
    if model.get("model_type") not in (LATENT, GROUPED):
        wrong = f"--mini shrinks {GROUPED!r} and {LATENT!r} recipes, not {model.get('model_type')!r}"
        raise RecipeError(wrong, "model.model_config.model_type")
    packs = View(recipe).packs
    if packs and workers is not None:
        raise RecipeError(f"{recipe.source}: --parallel cannot read packed conversations; leave out --parallel")
    leave_ascend(mini)
    shrink_model(model, CONVERSATIONS if packs else length)
    if workers is None and model.get("n_routed_experts") and (mini.get("plugins") or {}).get("hierarchical_ep"):
        spread_experts(mini, model)
    shrink = shrink_instructions if packs else shrink_data
    shrink(mini, model, data_path, steps)
    if evaluation := (mini.get("plugins") or {}).get("held_out_loss"):
        held_out = f"{data_path}_instructions_heldout.jsonl" if packs else f"{data_path}_heldout"
        evaluation.update(data_path=held_out, samples=2 * BATCH, every=steps)
    _shrink_plugins(mini)
    shrink_schedules(mini, steps)
    mini["runner_config"].pop("gradient_accumulation_steps", None)  # 1: a step is one small batch
    shrink_callbacks(mini, model)
    if workers is not None:
        keep_strategy(mini, recipe, BATCH, workers)
    elif View(recipe).get(OPTIMIZER) == "Muon":  # it asks for groups of ranks: on CPU only the sharded graph has them
        mini["use_parallel"] = True
        mini["parallel"].update(parallel_mode=1, search_mode="sharding_propagation")
        mini["context"]["dataset_broadcast_opt_level"] = 0
    _cut_fewer_samples(mini)
    return mini


def _shrink_plugins(mini: dict[str, Any]) -> None:
    """Remove what is longer than the mini recipe; record the loads of experts (all on one worker), and move none."""
    plugins = mini.get("plugins") or {}
    plugins.pop("batch_ramp", None)
    balance, spread = plugins.get("expert_balance"), mini["parallel_config"]["expert_parallel"]
    if isinstance(balance, dict) and spread == 1:
        plugins["expert_balance"] = without_moves(balance)
    elif isinstance(balance, dict) and type(balance.get("spare")) is int:
        experts = mini["model"]["model_config"].get("n_routed_experts") or 0
        balance["spare"] = min(balance["spare"], experts - experts // spread)


def _cut_fewer_samples(mini: dict[str, Any]) -> None:
    """Let `plugins.ep_overlap` cut sequences (in place) where a rank has too few samples for its chunks."""
    overlap = (mini.get("plugins") or {}).get("ep_overlap")
    if isinstance(overlap, dict) and isinstance(overlap.get("chunks"), list):
        parts, length = overlap["chunks"]
        kept = math.gcd(parts, mini["runner_config"]["batch_size"])
        overlap["chunks"] = [kept, length * parts // kept]


def load_mini(
    path: str | os.PathLike[str], data_path: str = CORPUS, steps: int = 10, workers: int | None = None
) -> Recipe:
    """Return the mini recipe (a small version for CPU) of a recipe's file, as a Recipe to which overrides can be
    applied.

    Raises:
        RecipeError: the file is wrong, or cannot be shrunk.
    """
    loaded = load_recipe(path)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"mini of {Path(path).name}"
        try:
            derived = derive_mini(loaded, data_path, steps, workers)
        except RecipeError as error:
            raise in_file(loaded, error) from None
        except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:  # no recipe that check would pass
            wrong = f"--mini cannot shrink this recipe; run tc3 check {path} to see what is wrong with it"
            raise RecipeError(f"{path}: {wrong}") from error
        dump_recipe(Recipe(derived), file)
        mini = load_recipe(file)
    mini.source = f"{path} (mini)"  # its line numbers are those of `tc3 recipe show --mini`
    mini.marks = {key: mark._replace(file=mini.source) for key, mark in mini.marks.items()}
    return mini


def leave_ascend(recipe: dict[str, Any]) -> None:
    """Convert a recipe for Ascend (in place) to a recipe for a single CPU process. This function does not change
    `model.model_config`; `compute_on_cpu` does.
    """
    imposed = copy.deepcopy(_ON_CPU)
    for name, section in imposed["sections"].items():
        recipe[name] = {**recipe.get(name, {}), **section}
    recipe["runner_config"]["batch_size"] = BATCH
    recomputed = recipe["recompute_config"]  # counts of layers are those of the stages that are no more
    recomputed.update({key: False for key, value in recomputed.items() if isinstance(value, (list, dict))})
    for name in ("pipeline_config", "parallel_optimizer_config", "strategy_ckpt_config"):
        recipe["parallel"].pop(name, None)
    for name in _ASCEND_ONLY:
        recipe.pop(name, None)
    recipe.update(imposed["top_level"], context=imposed["context"])


def shrink_model(model: dict[str, Any], length: int = SEQ_LENGTH) -> None:
    """Scale a `model_config` down in place. Ratios of sizes that define the architecture, such as query heads per
    group, stay the same if the small sizes allow it.
    """
    hidden, seq_length = model["hidden_size"], model["seq_length"]
    dense = min(model.get("first_k_dense_replace") or 0, 1)
    model["num_hidden_layers"] = 2
    (_shrink_groups if shares_keys(model) else _shrink_latent)(model)
    if model["model_type"] == LATENT:
        model["first_k_dense_replace"] = dense
        model["num_hidden_layers"] = dense + 1
    elif model.get("first_k_dense_replace"):  # a dense model does not read it, but it may not exceed the layers
        model["first_k_dense_replace"] = dense
    routed, shared = model.get("moe_intermediate_size"), model.get("moe_shared_expert_intermediate_size")
    for key in ("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"):
        if model.get(key):
            model[key] = max(32, round(model["hidden_size"] * model[key] / hidden / 32) * 32)
    if routed and shared and shared % routed == 0:  # n shared experts together are n times as wide as a routed one
        model["moe_shared_expert_intermediate_size"] = shared // routed * model["moe_intermediate_size"]
    if model.get("n_routed_experts"):
        model["n_routed_experts"] = min(EXPERTS, model["n_routed_experts"])
        model["num_experts_per_tok"] = min(TOPK, model["num_experts_per_tok"])
        _shrink_router(model)
    # MindFormers' YaRN takes max_position_embeddings as the length that was trained before the extension
    trained = max(1, model["max_position_embeddings"] * length // seq_length)
    model["max_position_embeddings"] = trained
    if (model.get("rope_scaling") or {}).get("original_max_position_embeddings"):
        model["rope_scaling"]["original_max_position_embeddings"] = trained
    model["seq_length"] = length
    model["vocab_size"] = min(VOCABULARY, model["vocab_size"])
    compute_on_cpu(model)


def _shrink_latent(model: dict[str, Any]) -> None:
    """Scale hidden size, heads and ranks of multi-latent attention (in place)."""
    model["hidden_size"] = HIDDEN
    model["num_attention_heads"] = min(HEADS, model["num_attention_heads"])
    for key in ("qk_nope_head_dim", "qk_head_dim", "qk_rope_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        if model.get(key):
            model[key] //= HEAD_SCALE
    for key in ("q_lora_rank", "kv_lora_rank"):
        if model.get(key):
            model[key] //= 4 * HEAD_SCALE


def _shrink_groups(model: dict[str, Any]) -> None:
    """Scale hidden size and heads of grouped-query attention (in place).

    As many query heads as in the recipe share a head of keys and values, and all heads together stay as wide, against
    the hidden size, as they are. MindFormers wants a hidden size that is a multiple of the heads.

    Raises:
        RecipeError: the recipe leaves a size to MindFormers' default, which is for another model.
    """
    sizes = ("num_attention_heads", "num_key_value_heads", "head_dim")
    if missing := [key for key in sizes if not model.get(key)]:
        raise RecipeError(
            f"model.model_config.{missing[0]}: --mini scales this size, but the recipe does not give it; write the "
            "size that the model has"
        )
    heads, groups, head_dim = (model[key] for key in sizes)
    widened = heads * head_dim / model["hidden_size"]
    shared = heads // groups  # query heads of a group
    groups = min(groups, max(GROUPS, HEADS // shared))
    heads = groups * shared
    size = 2 ** max(1, (HIDDEN // heads).bit_length() - 1)  # RoPE turns pairs
    model.update(num_attention_heads=heads, num_key_value_heads=groups, hidden_size=heads * size)
    model["head_dim"] = max(2, round(widened * size / 2) * 2)


def _shrink_router(model: dict[str, Any]) -> None:
    """Scale down the groups of experts to which a router limits a token (in place), so that MindFormers builds them:
    groups divide the experts, a token's groups divide its experts, and each group has enough experts for a token.
    """
    experts, chosen = model["n_routed_experts"], model["num_experts_per_tok"]
    # MindFormers knows each of the two numbers under either name
    groups = next((name for name in ("n_group", "moe_router_num_groups") if model.get(name)), "")
    limit = next((name for name in ("topk_group", "moe_router_group_topk") if model.get(name)), "")
    if not groups or not limit or (most := model[groups]) <= 1:
        return
    limited = model[limit] < most
    model[groups], model[limit] = max(
        (
            (group, few)
            for group in range(1, most + 1)
            for few in range(1, min(model[limit], max(group - limited, 1)) + 1)
            if experts % group == 0 and chosen % few == 0 and experts // group >= chosen // few
        ),
        default=(most, model[limit]),  # tc3 check says what is wrong with them
    )


def compute_on_cpu(model: dict[str, Any]) -> None:
    """Change the model section of a recipe (in place) so that it uses no operators that do not exist on a CPU."""
    model.update(_ON_CPU["model"], batch_size=BATCH)
    if model.get("n_routed_experts"):
        model.update(_ON_CPU["experts"], moe_token_dispatcher_type=DEFAULT_DISPATCHER)


def spread_experts(mini: dict[str, Any], model: dict[str, Any]) -> None:
    """Change a mini recipe (in place) so that `WORKERS` CPU workers train it with expert parallelism over two simulated
    nodes. Each worker trains one sample per step.
    """
    mini["use_parallel"] = True
    mini["parallel_config"].update(data_parallel=WORKERS, expert_parallel=WORKERS)
    mini["parallel"]["dataset_strategy"] = [[WORKERS, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    mini["runner_config"]["batch_size"] = model["batch_size"] = BATCH // WORKERS
    model["npu_nums_per_device"] = WORKERS // 2


def shrink_data(mini: dict[str, Any], model: dict[str, Any], data_path: str, steps: int) -> None:
    """Change the dataset of a mini recipe (in place) so that it reads `data_path`, with full attention masks instead of
    compressed masks.
    """
    dataset = mini["train_dataset"]
    loader = dataset["data_loader"]
    if loader.get("type") != "BlendedMegatronDatasetDataLoader":
        raise RecipeError(
            f"train_dataset.data_loader.type: --mini needs BlendedMegatronDatasetDataLoader, not {loader.get('type')!r}"
        )
    loader["sizes"] = [steps * BATCH, 0, 0]
    config = loader["config"]
    if config.get("create_compressed_eod_mask"):
        # the same documents, as a full mask: attention ends at the end of a document
        config.update(create_compressed_eod_mask=False, reset_attention_mask=True)
    config.update(seq_length=model["seq_length"], create_attention_mask=True, eod=0)
    read_whole(config, data_path)
    dataset.update(input_columns=COLUMNS, construct_args_key=list(COLUMNS), num_parallel_workers=1)
    mini["train_dataset_task"]["dataset_config"] = dataset


def shrink_instructions(mini: dict[str, Any], model: dict[str, Any], data_path: str, steps: int) -> None:
    """Change the HFDataLoader of a mini recipe (in place) so that it reads the instructions and the tokenizer beside
    `data_path`, with full attention masks.
    """
    dataset = mini["train_dataset"]
    loader = dataset["data_loader"]
    loader.update(data_files=f"{data_path}_instructions.jsonl", create_compressed_eod_mask=False)
    loader.update(create_attention_mask=True, use_broadcast_data=False)
    handlers = [handler for handler in loader["handler"] if handler["type"] != "take"]
    for handler in handlers:
        if "seq_length" in handler:
            handler["seq_length"] = model["seq_length"]
        if handler.get("tokenizer"):
            handler["tokenizer"] = {"pretrained_model_dir": f"{data_path}_tokenizer", "padding_side": "right"}
    loader["handler"] = [*handlers, {"type": "take", "n": steps * BATCH}]
    dataset.update(input_columns=COLUMNS, construct_args_key=list(COLUMNS), num_parallel_workers=1)
    mini["train_dataset_task"]["dataset_config"] = dataset


def shrink_schedules(mini: dict[str, Any], steps: int) -> None:
    """Shorten every learning-rate schedule of a mini recipe (in place) to `steps` steps; the first fifth of the steps
    is the warm-up. The types of the schedules stay the same.
    """
    grouped = mini.get("grouped_lr_schedule") or {}
    schedules = [mini.get("lr_schedule"), grouped.get("default"), *(grouped.get("grouped") or [])]
    for schedule in filter(None, schedules):
        for key, value in (("warmup_steps", max(1, steps // 5)), ("total_steps", steps)):
            if key in schedule:
                schedule[key] = value
        if schedule.pop("warmup_ratio", None):
            schedule["warmup_steps"] = max(1, steps // 5)


def shrink_callbacks(mini: dict[str, Any], model: dict[str, Any]) -> None:
    """Change the callbacks of a mini recipe (in place) so that every step is printed and a checkpoint is saved at the
    end. Callbacks that count tokens per expert get the mini model's number of experts.
    """
    kept = []
    for callback in mini.get("callbacks", []):
        if callback["type"] == "MFLossMonitor":
            kept.append({"type": "MFLossMonitor", "per_print_times": 1})
        elif callback["type"] == "TopkBiasBalanceCallback":
            once = {"micro_batch_num": 1, "gradient_accumulation_steps": 1}
            kept.append({**callback, "expert_num": model["n_routed_experts"], **once})
    mini["callbacks"] = [*kept, {"type": "CheckpointMonitor", "checkpoint_format": "safetensors"}]
    mini["checkpoint"] = {
        "save_path": "",
        "save_interleaved_steps": 1000,
        "save_max": 1,
        "prefix": "mini",
        "load_path": "",
    }
