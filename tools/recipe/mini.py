"""This module shrinks any TeleChat recipe, dense or a mixture of experts, to a recipe that a CPU trains in a minute.

Sizes are scaled down and what CPU lacks is replaced. What makes it that recipe is kept: the kind of attention, how many
query heads share keys and values, dense-first layers, shared expert, router, MTP, YaRN's factor, document masks,
optimizer, schedules' shape and plugins.

`derive_mini` makes a mini for one worker. A parallel mini gives back what that takes from a recipe, for a few CPU
workers that run the sharded graph with its own operators: the parallel degrees (scaled down), the pipeline's schedule,
recomputation, optimizer sharding, dispatcher and precision.
"""

from __future__ import annotations

import copy
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugins.errors import RecipeError
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER
from tools.recipe.dump import dump_recipe
from tools.recipe.findings import in_file
from tools.recipe.load import Recipe, load_recipe
from tools.recipe.view import MODEL, View

CORPUS = "output/data/stdlib"  # the corpus of launch/quickstart

SEQ_LENGTH = 128
CONVERSATIONS = 512  # tokens of a sample of packed conversations: two or three, with what Alpaca's template says
VOCABULARY = 2048
BATCH = 4  # samples per step
WORKERS = 4  # of a recipe with expert-parallel dispatch; one otherwise
HIDDEN = 128
EXPERTS = 16
TOPK = 4
HEADS = 4
GROUPS = 2  # heads of keys and values where query heads share them, so that tensor parallelism can cut them
HEAD_SCALE = 4  # head and rank dimensions are divided by this, ranks by four times as much
COLUMNS = ["input_ids", "labels", "loss_mask", "position_ids", "attention_mask"]

# what CPU imposes; keys of a section that the recipe lacks are added, all others stay
ON_CPU: dict[str, Any] = {
    "runner_config": {"sink_mode": False, "sink_size": 1, "batch_size": BATCH, "epochs": 1},
    "parallel_config": {
        "data_parallel": 1,
        "model_parallel": 1,
        "pipeline_stage": 1,
        "expert_parallel": 1,
        "context_parallel": 1,
        "micro_batch_num": 1,
        "use_seq_parallel": False,
        "vocab_emb_dp": False,
    },
    "parallel": {
        "parallel_mode": 0,
        "gradients_mean": True,
        "full_batch": False,
        "enable_alltoall": False,
        "enable_parallel_optimizer": False,
        "dataset_strategy": [[1, 1], [1, 1], [1, 1], [1, 1], [1, 1, 1, 1]],
    },
    "recompute_config": {"recompute": False, "select_recompute": False},
}
CONTEXT: dict[str, Any] = {
    "mode": 0,
    "device_target": "CPU",
    "device_id": 0,
    "max_call_depth": 10000,
    "max_device_memory": "8GB",
    "jit_config": {"jit_level": "O0"},
}
TOP_LEVEL: dict[str, Any] = {
    "use_parallel": False,
    "use_legacy": False,
    "use_legacy_format": False,
    "profile": False,
    "micro_batch_interleave_num": 1,
    "load_checkpoint": "",
    "resume_training": False,
    "auto_trans_ckpt": False,
    "remove_redundancy": False,
}
ASCEND_ONLY = ("monitor_config", "swap_config")
MODEL_ON_CPU: dict[str, Any] = {
    "hidden_act": "swiglu",
    "compute_dtype": "float32",
    "params_dtype": "float32",
    "fused_norm": False,
    "use_flash_attention": True,
    "use_attn_mask_compression": False,
    "use_eod_attn_mask_compression": False,
    "apply_rope_fusion": False,
    "bias_swiglu_fusion": False,
    "offset": 0,
    "pp_interleave_num": 1,
    "batch_size": BATCH,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
EXPERTS_ON_CPU: dict[str, Any] = {
    "moe_permute_fusion": False,
    "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": DEFAULT_DISPATCHER,
}
OPTIMIZER = ("optimizer", "type")
MOVES, SENDS = ("expert_balance",), ("hierarchical_ep", "ep_overlap")  # plugins that move experts, or send tokens
LATENT, GROUPED = "telechat3_moe", "telechat3"  # model types: multi-latent and grouped-query attention


def derive_mini(
    recipe: Recipe, data_path: str, steps: int = 10, workers: int | None = None, length: int = SEQ_LENGTH
) -> dict[str, Any]:
    """Return a flat recipe for CPU that trains `steps` steps on `data_path` (a Megatron prefix), or on the instructions
    beside it.

    With a number of `workers` it keeps the recipe's parallel strategy, scaled to them (`keep_strategy`). A sample has
    `length` tokens, but not one of packed conversations.

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
        raise RecipeError(f"{recipe.source}: --parallel cannot read packed conversations; train them with --mini only")
    leave_ascend(mini)
    shrink_model(model, CONVERSATIONS if packs else length)
    if workers is None and model.get("n_routed_experts") and (mini.get("plugins") or {}).get("hierarchical_ep"):
        spread_experts(mini, model)
    shrink = shrink_instructions if packs else shrink_data
    shrink(mini, model, data_path, steps)
    if evaluation := (mini.get("plugins") or {}).get("held_out_loss"):
        held_out = f"{data_path}_instructions_heldout.jsonl" if packs else f"{data_path}_heldout"
        evaluation.update(data_path=held_out, samples=2 * BATCH, every=steps)
    (mini.get("plugins") or {}).pop("batch_ramp", None)  # its stages are longer than the mini
    shrink_schedules(mini, steps)
    mini["runner_config"].pop("gradient_accumulation_steps", None)  # 1: a step is one small batch
    shrink_callbacks(mini, model)
    if workers is not None:
        keep_strategy(mini, recipe, BATCH, workers)
    elif View(recipe).get(OPTIMIZER) == "Muon":  # it asks for groups of ranks: on CPU only the sharded graph has them
        mini["use_parallel"] = True
        mini["parallel"].update(parallel_mode=1, search_mode="sharding_propagation")
        mini["context"]["dataset_broadcast_opt_level"] = 0
    return mini


def load_mini(
    path: str | os.PathLike[str], data_path: str = CORPUS, steps: int = 10, workers: int | None = None
) -> Recipe:
    """Return the mini of a recipe's file, as a Recipe to which overrides can be applied.

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
            wrong = f"--mini cannot shrink this recipe; tc3 check {path} says what is wrong with it"
            raise RecipeError(f"{path}: {wrong}") from error
        dump_recipe(Recipe(derived), file)
        mini = load_recipe(file)
    mini.source = f"{path} (mini)"  # its line numbers are those of `tc3 recipe show --mini`
    mini.marks = {key: mark._replace(file=mini.source) for key, mark in mini.marks.items()}
    return mini


def leave_ascend(recipe: dict[str, Any]) -> None:
    """Change a recipe (in place) into one for a single CPU process. The constant `MODEL_ON_CPU` holds the changes of
    the model's keys.
    """
    for name, section in ON_CPU.items():
        recipe[name] = {**recipe.get(name, {}), **copy.deepcopy(section)}
    for name in ("pipeline_config", "parallel_optimizer_config", "strategy_ckpt_config"):
        recipe["parallel"].pop(name, None)
    for name in ASCEND_ONLY:
        recipe.pop(name, None)
    recipe.update(copy.deepcopy(TOP_LEVEL), context=copy.deepcopy(CONTEXT))


def shrink_model(model: dict[str, Any], length: int = SEQ_LENGTH) -> None:
    """Scale a `model_config` down in place. Ratios of sizes that define the architecture, such as heads per group, are
    kept where the small sizes allow it.
    """
    hidden, seq_length = model["hidden_size"], model["seq_length"]
    dense = min(model.get("first_k_dense_replace") or 0, 1)
    model["num_hidden_layers"] = 2
    if model["model_type"] == GROUPED:
        _shrink_groups(model)
    else:
        _shrink_latent(model)
        model["first_k_dense_replace"] = dense
        model["num_hidden_layers"] = dense + 1
    for key in ("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size"):
        if model.get(key):
            model[key] = max(32, round(model["hidden_size"] * model[key] / hidden / 32) * 32)
    if model.get("n_routed_experts"):
        model["n_routed_experts"] = min(EXPERTS, model["n_routed_experts"])
        model["num_experts_per_tok"] = min(TOPK, model["num_experts_per_tok"])
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


def compute_on_cpu(model: dict[str, Any]) -> None:
    """Replace (in place) the operators that a CPU lacks."""
    model.update(MODEL_ON_CPU)
    if model.get("n_routed_experts"):
        model.update(EXPERTS_ON_CPU)


def spread_experts(mini: dict[str, Any], model: dict[str, Any]) -> None:
    """Give each of `WORKERS` CPU workers one sample (in place). The workers act as two nodes and share the experts."""
    mini["use_parallel"] = True
    mini["parallel_config"].update(data_parallel=WORKERS, expert_parallel=WORKERS)
    mini["parallel"]["dataset_strategy"] = [[WORKERS, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)]
    mini["runner_config"]["batch_size"] = model["batch_size"] = BATCH // WORKERS
    model["npu_nums_per_device"] = WORKERS // 2


def shrink_data(mini: dict[str, Any], model: dict[str, Any], data_path: str, steps: int) -> None:
    """Point the dataset at `data_path`, with full masks instead of compressed ones."""
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
    config.update(seq_length=model["seq_length"], create_attention_mask=True, data_path=["1", data_path], eod=0)
    dataset.update(input_columns=COLUMNS, construct_args_key=list(COLUMNS), num_parallel_workers=1)
    mini["train_dataset_task"]["dataset_config"] = dataset


def shrink_instructions(mini: dict[str, Any], model: dict[str, Any], data_path: str, steps: int) -> None:
    """Point HFDataLoader at the instructions and the tokenizer beside `data_path`, with full masks."""
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
    """Shorten every schedule to `steps`, with a warm-up in the first steps. The type of each learning-rate schedule
    stays the same.
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
    """Print every step, save at the end, and count the experts of the mini."""
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


# of a recipe for Ascend, and kept: operators, precision, the way tokens go
_OWN = (
    *("hidden_act", "compute_dtype", "fused_norm", "apply_rope_fusion", "bias_swiglu_fusion", "moe_permute_fusion"),
    *("moe_token_dispatcher_type", "moe_shared_expert_overlap", "use_fused_ops_permute"),
)


@dataclass(frozen=True)
class Degrees:
    """A `Degrees` holds the parallel degrees: pipeline, tensor, data, context and expert."""

    pp: int = 1
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def workers(self) -> int:
        """Return the number of processes that these degrees need."""
        return self.pp * self.tp * self.dp * self.cp


def scale_degrees(own: Degrees, workers: int) -> Degrees:
    """Return degrees whose product is at most `workers`. Each degree is a power of two and no larger than the recipe's.

    In turn the pipeline, tensor, data and context degree is doubled where the recipe allows it, until no doubling fits.
    Experts are shared by as many data- and tensor-parallel ranks of a stage as the recipe's degree allows.
    """
    sizes = {"pp": 1, "tp": 1, "dp": 1, "cp": 1}
    room, grows = workers, True
    while grows:
        grows = False
        for name in sizes:
            if room >= 2 and sizes[name] * 2 <= getattr(own, name):
                sizes[name] *= 2
                room //= 2
                grows = True
    ep, most = 1, sizes["tp"] * sizes["dp"]  # as MindFormers' ffn.py shares them
    while ep * 2 <= min(own.ep, most):
        ep *= 2
    return Degrees(**sizes, ep=ep)


def keep_strategy(mini: dict[str, Any], recipe: Recipe, batch: int, workers: int = WORKERS) -> None:
    """Give the mini of `recipe` (in place) the recipe's parallel strategy at `workers` processes. A step of this mini
    has `batch` samples.

    Raises:
        RecipeError: the recipe splits nothing, or the batch does not serve the data-parallel ranks.
    """
    view = View(recipe)
    if not view.parallel:
        wrong = "--parallel keeps how a recipe splits its model, but this recipe does not split it; leave it out"
        raise RecipeError(f"{recipe.source}: {wrong}")
    degrees = degrees_for(mini, view, workers)
    if degrees.workers == 1:
        wrong = f"--parallel needs a parallel degree above 1 that fits {workers} workers; give more, or leave it out"
        raise RecipeError(f"{recipe.source}: {wrong}")
    give_strategy(mini, view, degrees, batch, degrees)
    for name in (*MOVES, *SENDS) if degrees.ep == 1 else ():  # they need experts on other workers
        (mini.get("plugins") or {}).pop(name, None)


def degrees_for(mini: dict[str, Any], view: View, workers: int) -> Degrees:
    """Return a recipe's degrees (`view`), scaled down to at most `workers` processes that train its mini."""
    model = mini["model"]["model_config"]
    # tensor parallelism deals whole heads; those of keys and values, where query heads share them
    heads = model["num_key_value_heads" if model["model_type"] == GROUPED else "num_attention_heads"]
    experts = min(view.ep, model.get("n_routed_experts") or 1)
    return scale_degrees(Degrees(view.pp, min(view.tp, heads), view.dp, view.cp, experts), workers)


def give_strategy(mini: dict[str, Any], view: View, degrees: Degrees, batch: int, deepest: Degrees) -> None:
    """Give the mini (in place) these degrees and the own operators of the recipe that `view` shows.

    Args:
        batch: samples of a step. deepest: the degrees whose pipeline the layers suffice for; minis with other degrees
            then have the same weights.
    """
    model = mini["model"]["model_config"]
    for key in _OWN:
        if (value := view.get((*MODEL, key))) is None:
            model.pop(key, None)
        else:
            model[key] = value
    _degrees(mini, view, degrees, batch)
    _layers(mini, model, view, degrees, deepest)
    _memory(mini, view, degrees)


def _degrees(mini: dict[str, Any], view: View, degrees: Degrees, batch: int) -> None:
    """Set degrees, micro-batches, and where samples go."""
    mini["use_parallel"] = True
    mini["context"]["dataset_broadcast_opt_level"] = 0  # CPU: otherwise some ranks read no data
    micro_batches = max(batch // degrees.dp, degrees.pp) if degrees.pp > 1 else 1
    size = max(1, batch // (degrees.dp * micro_batches))
    mini["runner_config"]["batch_size"] = mini["model"]["model_config"]["batch_size"] = size
    mini["parallel_config"].update(
        data_parallel=degrees.dp,
        model_parallel=degrees.tp,
        pipeline_stage=degrees.pp,
        context_parallel=degrees.cp,
        expert_parallel=degrees.ep,
        micro_batch_num=micro_batches,
        use_seq_parallel=degrees.tp > 1 and view.flag(("parallel_config", "use_seq_parallel")),
        vocab_emb_dp=view.flag(("parallel_config", "vocab_emb_dp")),
    )
    mini["parallel"].update(
        parallel_mode=1,
        gradients_mean=view.flag(("parallel", "gradients_mean")),
        enable_alltoall=view.flag(("parallel", "enable_alltoall")),
        dataset_strategy=[[degrees.dp, *[1] * (axes - 1)] for axes in (2, 2, 2, 2, 4)],
    )
    for callback in mini["callbacks"]:
        if "micro_batch_num" in callback:
            callback["micro_batch_num"] = micro_batches


def _layers(mini: dict[str, Any], model: dict[str, Any], view: View, degrees: Degrees, deepest: Degrees) -> None:
    """Set at least one layer for each chunk of each stage of the deepest pipeline; no layer less than the mini has."""
    if model.get("n_routed_experts"):
        model["npu_nums_per_device"] = max(1, degrees.ep // 2)  # workers act as two nodes
    chunks = view.chunks
    if deepest.pp > 1:
        model["num_hidden_layers"] = max(model["num_hidden_layers"], deepest.pp * chunks)
    if degrees.pp == 1:
        return
    first = model["num_hidden_layers"] % (degrees.pp * chunks)
    rows = [[first * (chunk == stage == 0) for stage in range(degrees.pp)] for chunk in range(chunks)]
    model.update(pp_interleave_num=chunks, offset=rows if chunks > 1 else rows[0])
    mini["parallel"]["pipeline_config"] = copy.deepcopy(view.get(("parallel", "pipeline_config"), {}))


def _memory(mini: dict[str, Any], view: View, degrees: Degrees) -> None:
    """Set recomputation as the recipe has it, layer for layer, and optimizer sharding."""
    shape = (view.chunks, degrees.pp) if view.chunks > 1 and degrees.pp > 1 else (degrees.pp,)
    for key, value in (view.get(("recompute_config",)) or {}).items():
        mini["recompute_config"][key] = _recomputed(value, shape)
    sharding = view.get(("parallel", "parallel_optimizer_config"))
    muon = view.get(OPTIMIZER) == "Muon"  # it refuses shards of one rank
    cuts = view.flag(("parallel", "enable_parallel_optimizer")) and not (muon and degrees.dp == 1)
    mini["parallel"]["enable_parallel_optimizer"] = cuts
    if sharding and cuts:
        own = mini["parallel"]["parallel_optimizer_config"] = {**sharding, "parallel_optimizer_threshold": 0}  # toys
        if muon:
            own["optimizer_weight_shard_size"] = math.gcd(own.get("optimizer_weight_shard_size") or 0, degrees.dp)


def _recomputed(value: Any, shape: tuple[int, ...]) -> Any:
    """Return a recomputation setting for one layer of each chunk: its counts become 0 or 1, in the mini's shape."""
    if isinstance(value, dict):
        return {key: _recomputed(each, shape) for key, each in value.items()}
    if isinstance(value, list) and all(isinstance(each, (int, list)) and not isinstance(each, bool) for each in value):
        one = int(any(sum(each) if isinstance(each, list) else each for each in value))
        row = [one] * shape[-1]
        return [list(row) for _ in range(shape[0])] if len(shape) > 1 else row
    return value
