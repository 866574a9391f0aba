"""This module defines the strategies that `tc3 accuracy equivalence` executes as MindSpore's sharded graph on CPU.

`parallel.parallel_mode: 1` on CPU (plugins/semi_auto_cpu) runs MindFormers' own graph for Ascend. Every layout starts
from the same weights, so each is compared with one process that runs the same graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tools.accuracy.equivalence.runs import MUON
from tools.data.index import read_whole
from tools.recipe.load import Recipe
from tools.recipe.mini_strategy import shares_keys

CLIP = 0.05  # far below any norm of a model that has just begun: a clipping by the wrong norm must change something
COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids", "actual_seq_len")
# AdamW turns a gradient that is next to nothing, whose sign is rounding, into a whole step of either sign; with large
# steps both sides would soon take their gradients from other weights
RATE = 1e-4
BIAS_CALLBACK = "TopkBiasBalanceCallback"
# MindFormers rounds float32 queries, keys and values of grouped-query attention to float16, and so their gradients
# (docs/stock-differences.md). That would hide what a layout does: this callback leaves the rounding out, on both sides
UNROUNDED_MUON = {"type": "UnroundedMuon", "auto_register": "unrounded.UnroundedMuon"}
UNROUNDED = {"type": "UnroundedAttention", "auto_register": "unrounded.UnroundedAttention"}
NEVER_CLIPPED = 1e6  # a max_grad_norm
SINKHORN = 5  # iterations, which are compiled one by one
DOCUMENTS = 2048  # tokens of a sample from which MindSpore takes the compressed mask
RAMP_PARTS = 4  # micro-batches of a batch whose half still has two, as few as a growing batch may have
# adapters of attention, which every model has; the factor lets their gradients be clipped
ADAPTERS = {"rank": 4, "alpha": 64, "targets": ["self_attention.*"]}
PMA = {"type": "PmaAdamW", "fused_algo": "sma", "fused_num": 2, "interleave_step": 1}  # after steps 2, 4, ...
# fields of a `Sharding` that one process has in common with it
MODEL = (
    *("moe", "sparse", "mtp", "layers", "aux", "documents"),
    *("known", "groups", "shared", "length", "held_out", "streams"),
    *("together", "lora", "averages", "ramp"),
)


@dataclass(frozen=True)
class Sharding:
    """A `Sharding` describes how several processes share the model and the samples of a step."""

    tp: int = 1  # tensor parallelism
    dp: int = 1  # data parallelism
    cp: int = 1  # context parallelism
    pp: int = 1  # pipeline parallelism
    ep: int = 1  # expert parallelism
    sp: bool = False  # sequence parallelism over tp
    vpp: int = 1  # the number of chunks of layers of a stage
    micro: int = 1  # the number of micro-batches of the pipeline
    schedule: str = "1f1b"  # the order of micro-batches, a `pipeline_scheduler` of MindSpore
    zero: bool = False  # whether the optimizer's state is sharded over dp
    recompute: bool = False  # whether all activations are recomputed
    accumulate: int = 1  # the steps of gradient accumulation; 0: one for each sample of a rank
    moe: bool = False  # whether the model has experts
    mtp: bool = False  # whether the model has an MTP layer
    layers: int = 2  # the number of layers
    sparse: int = 1  # the number of layers with experts, which are the last ones
    # whether the router has its auxiliary loss. This loss is computed for each rank and micro-batch, so it is off if
    # tokens are split between these, unless each sample is a micro-batch of its own, both here and in one process
    aux: bool = False
    together: bool = False  # whether that loss is of all samples of an EP group (group_aux_loss plugin)
    # the number of groups of experts (`n_group`); the experts of a token are chosen from half of the groups. 0 means
    # the recipe's own number, also in the next two fields
    groups: int = 0
    shared: int = 0  # the number of shared experts
    length: int = 0  # the tokens of a sample
    mode: str = ""  # the mode of the hierarchical_ep plugin, as it runs on Ascend; "": MindFormers' own dispatcher
    chunks: int = 1  # the number of chunks of tokens in a layer (ep_overlap plugin); 1: without the plugin
    documents: bool = False  # whether documents are apart by the compressed mask, in samples of `DOCUMENTS` tokens
    held_out: bool = False  # whether the held_out_loss plugin evaluates after every step
    streams: int = 1  # the number of residual streams (hyper_connections plugin); 1: without the plugin
    moves: bool = False  # whether the expert_balance plugin shuffles the experts after every step
    lora: bool = False  # whether only adapters are trained (lora plugin)
    averages: bool = False  # whether the optimizer is PmaAdamW, which replaces the weights by their averages
    ramp: bool = False  # whether the first step has half the samples of the others (batch_ramp plugin)
    uneven: bool = False  # whether the first stage has one layer more than the others, and the last stage one less
    known: bool = False  # whether stock MindFormers counts a gradient twice (`TWO_STAGES`): reported, and not judged

    @property
    def workers(self) -> int:
        """Return the number of processes that share the model."""
        return self.tp * self.dp * self.cp * self.pp

    @property
    def node(self) -> int:
        """Return the number of expert-parallel ranks on a simulated node for hierarchical_ep: all ranks in the mode
        "global", and in other modes the largest number that gives at least two equal nodes.
        """
        whole = self.mode == "global"
        return self.ep if whole else max(size for size in range(1, self.ep) if self.ep % size == 0)

    @property
    def alone(self) -> Sharding:
        """Return the `Sharding` with which one process trains the same model."""
        same = {name: getattr(self, name) for name in MODEL}
        parts = RAMP_PARTS if self.ramp else 1
        return Sharding(**same, accumulate=parts if self.accumulate else 0)

    @property
    def against(self) -> str:
        """Return the name of the training in one process that is the baseline."""
        parts = ["moe" * self.moe, "mtp" * self.mtp, "without_auxiliary_loss" * (self.moe and not self.aux)]
        parts += [
            f"{self.layers}_layers" * (self.layers != 2),
            f"{self.sparse}_with_experts" * (self.sparse != 1),
            "documents" * self.documents,
            "held_out" * self.held_out,
            f"{self.streams}_streams" * (self.streams > 1),
            *(name * getattr(self, name) for name in ("together", "lora", "averages", "ramp")),
        ]
        sizes = {"groups": self.groups, "shared": self.shared, "tokens": self.length}
        parts += [f"{size}_{name}" for name, size in sizes.items() if size]
        parts += ["unclipped" * self.known, "sample_by_sample" * (not self.accumulate)]
        return "_".join(["one_process", *filter(None, parts)])

    @property
    def sample(self) -> int:
        """Return the number of tokens in a sample; 0 stands for the recipe's own number."""
        return DOCUMENTS if self.documents else self.length

    @property
    def words(self) -> str:
        """Return the fields that differ from their defaults, such as ``"dp 2, tp 2, sp, zero"``."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "known"}
        changed = {name: value for name, value in told.items() if value != getattr(Sharding, name)}
        return ", ".join(name if value is True else f"{name} {value}" for name, value in changed.items())

    def micro_steps(self, batch: int) -> int:
        """Return the number of gradient-accumulation steps in a training step of `batch` samples."""
        return self.accumulate or max(batch // (self.dp * self.micro), 1)

    def misfit(self, batch: int) -> str:
        """Return why `batch` samples cannot be divided among ranks and micro-batches; return "" if they can."""
        parts = self.dp * self.micro * self.micro_steps(batch)
        return f"{batch} samples of a step cannot be cut into {parts}" if batch % parts else ""


# what a run without --only executes: one strategy of each kind, as each takes a minute
USUAL = ("executed_tp2_sp", "executed_pp2")


def derive_sharded(base: Recipe, sharding: Sharding, steps: int, corpus: str) -> Recipe:
    """Return a recipe that trains the first `steps` steps of `base` (from `one_worker`) as a sharded graph on a
    Megatron corpus. The returned recipe saves a checkpoint after each step, from which gradients and optimizer state
    can be read; its first learning rate is 0, so that the first checkpoint holds the initial weights.
    """
    recipe = copy.deepcopy(base)
    batch = recipe["runner_config"]["batch_size"]
    loader = recipe["train_dataset"]["data_loader"]
    loader["sizes"] = [steps * batch - batch // 2 * sharding.ramp, 0, 0]
    read_whole(loader["config"], corpus)
    recipe["train_dataset_task"]["dataset_config"] = recipe["train_dataset"]
    clip = NEVER_CLIPPED if sharding.known else CLIP
    recipe["runner_wrapper"].update(use_clip_grad=True, max_grad_norm=clip)
    warmup = {"type": "ConstantWarmUpLR", "warmup_lr_init": 0.0, "learning_rate": RATE, "warmup_steps": 2}
    recipe["lr_schedule"] = {**warmup, "total_steps": steps}
    saves = {"save_path": "", "save_interleaved_steps": 1, "save_max": steps + 1}
    recipe["checkpoint"] = {**(recipe.get("checkpoint") or {}), **saves}
    recipe["recompute_config"] = {"recompute": sharding.recompute}
    _model(recipe, sharding)
    if sharding.documents:
        _apart(recipe)
    if sharding.averages:
        recipe["optimizer"].update(PMA)
    if sharding.lora:
        recipe["plugins"]["lora"] = copy.deepcopy(ADAPTERS)
    if sharding.ramp:
        recipe["plugins"]["batch_ramp"] = {"stages": [[1, batch // 2]]}
    if sharding.held_out:
        recipe["plugins"]["held_out_loss"] = {"data_path": corpus, "samples": 2 * batch, "every": 1}
    _degrees(recipe, sharding, batch)
    return recipe


def _model(recipe: Recipe, sharding: Sharding) -> None:
    model = recipe["model"]["model_config"]
    model.update(num_hidden_layers=sharding.layers, num_nextn_predict_layers=int(sharding.mtp))
    if model.get("n_routed_experts"):
        _experts(recipe, model, sharding)
    if sharding.streams > 1:
        recipe["plugins"]["hyper_connections"] = {"streams": sharding.streams, "sinkhorn_iterations": SINKHORN}
    if sharding.length:
        loader = recipe["train_dataset"]["data_loader"]["config"]
        loader["seq_length"] = model["seq_length"] = model["max_position_embeddings"] = sharding.length
    kept = [entry for entry in recipe["callbacks"] if entry["type"] != "CheckpointMonitor"]
    if not sharding.moe:
        kept = [entry for entry in kept if entry["type"] != BIAS_CALLBACK]
    if shares_keys(model):
        kept.append(dict(UNROUNDED))
    if recipe["optimizer"]["type"] == MUON:
        kept.append(dict(UNROUNDED_MUON))
    recipe["callbacks"] = [*kept, {"type": "CheckpointMonitor", "checkpoint_format": "safetensors"}]


def _experts(recipe: Recipe, model: dict[str, Any], sharding: Sharding) -> None:
    model["first_k_dense_replace"] = sharding.layers - sharding.sparse if sharding.moe else sharding.layers
    if not sharding.aux:
        model["moe_aux_loss_coeff"] = 0.0
    if sharding.together:
        recipe["plugins"]["group_aux_loss"] = True
    if sharding.groups:
        model.update(n_group=sharding.groups, topk_group=sharding.groups // 2)
    if sharding.shared:
        width = sharding.shared * model["moe_intermediate_size"]
        model.update(n_shared_experts=sharding.shared, moe_shared_expert_intermediate_size=width)
    if not sharding.moe:
        model.update(n_routed_experts=None, moe_router_enable_expert_bias=False)


def _apart(recipe: Recipe) -> None:
    config, model = recipe["train_dataset"]["data_loader"]["config"], recipe["model"]["model_config"]
    # MindFormers makes the mask of the first sample only unless one of the reset_* keys is on
    config.update(create_compressed_eod_mask=True, reset_position_ids=True, eod_pad_length=DOCUMENTS // 8)
    recipe["train_dataset"]["input_columns"] = recipe["train_dataset"]["construct_args_key"] = [*COLUMNS]
    config["seq_length"] = model["seq_length"] = model["max_position_embeddings"] = DOCUMENTS
    model.update(use_attn_mask_compression=False, use_eod_attn_mask_compression=True)


def shard_size(sharding: Sharding, recipe: Mapping[str, Any]) -> int:
    """Return a layout's `optimizer_weight_shard_size`.

    The size is 0 if the optimizer is not sharded, or is sharded over all ranks.
    """
    # Muon wants the ranks of a group, at most those of data parallelism
    return sharding.dp if sharding.zero and recipe["optimizer"]["type"] == MUON else 0


def _degrees(recipe: Recipe, sharding: Sharding, batch: int) -> None:
    model = recipe["model"]["model_config"]
    micro_steps = sharding.micro_steps(batch)
    size = batch // (sharding.dp * sharding.micro * micro_steps)
    recipe["use_parallel"] = True
    recipe["context"]["dataset_broadcast_opt_level"] = 0  # CPU: otherwise some ranks read no data
    recipe["runner_config"]["batch_size"] = model["batch_size"] = size
    recipe["runner_config"]["gradient_accumulation_steps"] = micro_steps
    recipe["parallel_config"].update(
        data_parallel=sharding.dp, model_parallel=sharding.tp, context_parallel=sharding.cp, pipeline_stage=sharding.pp,
        expert_parallel=sharding.ep, micro_batch_num=sharding.micro, use_seq_parallel=sharding.sp, vocab_emb_dp=False,
        context_parallel_algo="colossalai_cp",
    )  # fmt: skip
    axes = (2, 2, 2, 2, 2 if sharding.documents else 4)
    recipe["parallel"].update(
        parallel_mode=1,
        gradients_mean=False,
        dataset_strategy=[[sharding.dp, *[1] * (each - 1)] for each in axes],
        enable_parallel_optimizer=sharding.zero,
    )
    if sharding.zero:
        config = {"parallel_optimizer_threshold": 0}
        if size := shard_size(sharding, recipe):
            config["optimizer_weight_shard_size"] = size
        recipe["parallel"]["parallel_optimizer_config"] = config
    if sharding.pp > 1:
        interleaved, row = sharding.vpp > 1, [0] * sharding.pp
        first = [1, *row[2:], -1] if sharding.uneven else row
        pipeline = {"pipeline_interleave": interleaved, "pipeline_scheduler": sharding.schedule}
        recipe["parallel"]["pipeline_config"] = pipeline
        model.update(
            pp_interleave_num=sharding.vpp, offset=[first, *[row] * (sharding.vpp - 1)] if interleaved else first
        )
    if sharding.mode:
        recipe["plugins"]["hierarchical_ep"] = {"mode": sharding.mode}
        model["npu_nums_per_device"] = sharding.node
    if sharding.moves:
        recipe["plugins"]["expert_balance"] = {"every": 1, "method": "random"}
    if sharding.chunks > 1:
        recipe["plugins"]["ep_overlap"] = {"chunks": [1, sharding.chunks]}
    for callback in recipe["callbacks"]:
        if "micro_batch_num" in callback:
            callback["micro_batch_num"] = sharding.micro
        if callback["type"] == BIAS_CALLBACK:  # it compares loads of all micro-batches with the share of so many
            callback["gradient_accumulation_steps"] = micro_steps
