"""This module adds facts that MindFormers' annotations leave out: the values that a key may take, and the types of the
keys in sections that MindFormers' code reads from dictionaries.

Each entry names, by its key in `tools.schema.extract.SNIPPETS`, the line of MindFormers that refuses the value, if
there is one. `of_plugin` returns the keys and values of a plugin, from the class of its settings.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from types import NoneType
from typing import Any

from plugins.hierarchical_ep.settings import DISPATCHERS
from plugins.settings import Section
from plugins.yarn import plan as yarn
from tools.hardware.units import BOTH, LONG

Spec = dict[str, Any]


def _enum(*values: Any, rule: str = "") -> Spec:
    return {"enum": list(values), **({"rule": rule} if rule else {})}


def _bools(*keys: str) -> dict[str, Spec]:
    return {key: {"types": ["bool"]} for key in keys}


def _texts(*keys: str) -> dict[str, Spec]:
    return {key: {"types": ["null", "str"]} for key in keys}


def _least(least: float, *keys: str, types: tuple[str, ...] = ("int",)) -> dict[str, Spec]:
    return {key: {"types": sorted(types), "min": least} for key in keys}


_SHAPED = {"types": ["bool", "dict", "list"]}  # recompute settings: checked by `tools.schema.stages`
_MAPPING = {"types": ["dict"]}
_ROPE = _enum("rope", "yarn", "none", "relative", "learned_absolute", "partial_rope", rule="position_embedding")
_NO_SUCH = (
    f'the training graph has no positions of this kind; it has "rope", and "yarn" (by {yarn.KEY} for grouped queries)'
)
_SCALED = _ROPE | {
    "instead": {
        **dict.fromkeys(("linear", "dynamic", "llama3", "longrope", "proportional"), _NO_SUCH),
        "default": "leave rope_scaling out, because this is plain RoPE",
        yarn.ROPE_TYPES[yarn.TELECHAT3]: f'write "yarn", and {yarn.KEY}: {{attention_factor: {yarn.TELECHAT3}}}',
    }
}
_FORMATS = {"types": ["list", "null", "str"]}
_TEXT_LIST = {"types": ["list"], "items": ["str"]}

TOP: dict[str, Spec] = {
    "run_mode": _enum("train", "finetune", "predict", "predict_with_train_model", "eval", rule="run_mode"),
    "load_ckpt_format": _enum("ckpt", "safetensors"),
    **_bools(
        *("use_parallel", "use_legacy", "use_legacy_format", "auto_trans_ckpt", "only_save_strategy", "profile"),
        *("load_ckpt_async", "do_eval", "ignore_data_skip", "remove_redundancy", "calculate_per_token_loss"),
        *("check_for_nan_in_loss_and_grad", "use_checkpoint_health_monitor", "use_skip_data_by_global_norm"),
        *("resume_by_last_timestamp_ckpt", "auto_tune", "use_graceful_exit", "print_separate_loss", "lr_scale"),
    ),
    **{key: {"types": ["bool", "null"]} for key in ("train_precision_sync", "infer_precision_sync")},
    **_texts("output_dir", "load_checkpoint", "src_strategy_path_or_dir", "pretrained_model_dir", "remote_save_url"),
    **_least(0, "seed"),
    **_least(1, "micro_batch_interleave_num", "transform_process_num", "eval_step_interval"),
    "resume_training": {"types": ["bool", "str"]},
    "profiler_level": _enum(-1, 0, 1, 2),
    "profile_level": _enum(-1, 0, 1, 2),
    "callbacks": {"types": ["list"]},
    "eval_callbacks": {"types": ["list"]},
}

SECTIONS: dict[str, dict[str, Spec]] = {
    "runner_config": {
        **_least(1, "batch_size", "epochs", "sink_size", "gradient_accumulation_steps", "num_classes"),
        **_least(0, "stop_step"),
    },
    "parallel_config": {
        **_least(1, "data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage"),
        **_least(1, "micro_batch_num", "seq_split_num", "gradient_aggregation_group", "ulysses_degree_in_cp"),
        "context_parallel_algo": _enum("colossalai_cp", "ulysses_cp", rule="cp_algo"),
        "optimizer_shard": {"types": ["bool", "null"]},
    },
    "recompute_config": {
        **_bools("parallel_optimizer_comm_recompute", "mp_comm_recompute", "recompute_slice_activation"),
        "recompute": {"types": ["bool", "list"]},
        "select_recompute": _SHAPED,
        "select_comm_recompute": _SHAPED,
        "select_recompute_exclude": _SHAPED,
        "select_comm_recompute_exclude": _SHAPED,
    },
    "swap_config": {"layer_swap": {"types": ["list", "null"]}, "op_swap": {"types": ["dict", "null"]}},
    "context": {
        "mode": {"choices": "mode", "rule": "context_mode"},
        "device_target": _enum("Ascend", "CPU"),
        "deterministic": _enum("ON", "OFF"),
        "memory_optimize_level": _enum("O0", "O1"),
        "max_device_memory": {"types": ["str"], "pattern": r"\d+(\.\d+)?GB"},
        "mempool_block_size": {"types": ["str"], "pattern": r"\d+(\.\d+)?GB"},
        "save_graphs": _enum(False, True, 0, 1, 2, 3),
        "save_graphs_path": {"types": ["str"]},
        "affinity_cpu_list": {"types": ["dict", "null"], "rule": "affinity_list", "severity": "warning"},
        "affinity_config": {"types": ["dict", "str"]},
        "jit_config": _MAPPING,
        "ascend_config": _MAPPING,
        "dataset_broadcast_opt_level": _enum(0, 1, 2, 3),
        **_least(1, "max_call_depth"),
        **_least(0, "device_id"),
    },
    "context.ascend_config": {
        "parallel_speed_up_json_path": {"types": ["null", "str"]},
        "precision_mode": _enum(
            *("force_fp16", "allow_fp32_to_fp16", "allow_mix_precision", "must_keep_origin_dtype", "force_fp32"),
            *("allow_fp32_to_bf16", "allow_mix_precision_fp16", "allow_mix_precision_bf16"),
        ),
        **_bools("jit_compile", "matmul_allow_hf32", "conv_allow_hf32", "hccl_watchdog", "need_ckpt"),
    },
    "parallel": {
        "parallel_mode": {"choices": "parallel_mode", "rule": "parallel_mode"},
        "search_mode": _enum("recursive_programming", "dynamic_programming", "sharding_propagation"),
        "auto_parallel_search_mode": _enum("recursive_programming", "dynamic_programming", "sharding_propagation"),
        "dataset_strategy": {"types": ["list", "str"]},
        **_bools(
            *("gradients_mean", "gradient_fp32_sync", "loss_repeated_mean", "enable_alltoall", "full_batch"),
            *("enable_parallel_optimizer", "parameter_broadcast", "optimizer_weight_shard_aggregated_save"),
            *("force_fp32_communication",),
        ),
        **_texts("strategy_ckpt_save_file", "strategy_ckpt_load_file", "group_ckpt_save_file"),
        **dict.fromkeys(
            ("pipeline_config", "parallel_optimizer_config", "strategy_ckpt_config", "comm_fusion"), _MAPPING
        ),
    },
    "parallel.pipeline_config": {
        "pipeline_interleave": {"types": ["bool"]},
        "pipeline_scheduler": _enum("1f1b", "gpipe", "seqpipe", "seqvpp", "seqsmartvpp", "zero_bubble_v"),
    },
    "parallel.parallel_optimizer_config": {
        "gradient_accumulation_shard": {"types": ["bool"]},
        "optimizer_level": _enum("level1", "level2", "level3", rule="optimizer_level"),
        **_least(0, "parallel_optimizer_threshold"),
        "optimizer_weight_shard_size": {"types": ["int"]},
    },
    "parallel.strategy_ckpt_config": {**_texts("load_file", "save_file"), **_bools("only_trainable_params")},
    "checkpoint": {
        **_bools("async_save", "load_balanced", "no_load_optim", "no_save_optim", "save_remove_redundancy"),
        **_texts("load_path", "save_path", "prefix"),
        **_least(1, "save_interleaved_steps", "save_max", "reshard_worker_num"),
    },
    "train_dataset": {
        "data_loader": _MAPPING,
        **_bools("python_multiprocessing", "drop_remainder", "numa_enable", "dynamic_batch", "eod_reset", "shuffle"),
        **_bools("do_eval", "auto_tune", "profile"),
        "input_columns": _TEXT_LIST,
        "output_columns": _TEXT_LIST,
        "construct_args_key": _TEXT_LIST,
        **_least(1, "num_parallel_workers", "prefetch_size", "repeat", "batch_size"),
        **_least(0, "seed"),
    },
    "gpt_dataset": {
        **_least(1, "seq_length", "eod_pad_length", "compressed_eod_mask_length", "num_dataset_builder_threads"),
        "data_path": {"types": ["list"]},
        "eod": {"types": ["int"]},
        "pad": {"types": ["int"]},
        "split": {"types": ["str"], "pattern": r"\s*\d+(\.\d+)?\s*(,\s*\d+(\.\d+)?\s*){0,2}"},
    },
    "hf_loader": {
        **_bools("create_attention_mask", "create_compressed_eod_mask", "use_broadcast_data", "shuffle", "streaming"),
        **_least(1, "compressed_eod_mask_length", "size", "save_step", "batch_size"),
        "data_files": {"types": ["dict", "list", "str"]},
        "adaptor_config": {"types": ["dict", "null"]},
        "packing": _enum("pack", "truncate", None),
        **_texts("path", "split", "load_func", "data_dir", "name", "cache_dir", "dataset_state_dir"),
    },
    "tokenizer": {
        **_texts("pretrained_model_dir"),
        "trust_remote_code": {"types": ["bool"]},
        "padding_side": _enum("left", "right"),
    },
    "handlers": {
        **_least(1, "seq_length"),
        "padding": {"types": ["bool"]},
        "pack_strategy": _enum("pack", "truncate"),
        **{key: {"types": ["int", "null"]} for key in ("pad_token_id", "ignore_token_id")},
    },
    "rope_scaling": {
        "type": _SCALED,
        "rope_type": _SCALED,
        "factor": {"types": ["float"], "min": 1},
        **_least(1, "original_max_position_embeddings"),
        **_least(0, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", types=("float",)),
    },
    "monitor_config": {
        **_bools("monitor_on", "invert", "print_struct", "check_for_global_norm"),
        **_least(1, "step_interval", "global_norm_spike_count_threshold"),
        "device_local_loss_format": _FORMATS,
        "device_local_norm_format": _FORMATS,
        "local_loss_format": _FORMATS,
        "local_norm_format": _FORMATS,
    },
    "model": {"model_config": _MAPPING},
}

TYPED: dict[str, dict[str, Spec]] = {
    "optimizer": {
        "betas": {"types": ["list"], "items": ["float"], "length": 2, "min": 0, "below": 1},
        "eps": {"types": ["float"], "min": 0},
        "weight_decay": {"types": ["float"], "min": 0},
        "learning_rate": {"types": ["float", "null"], "min": 0},
        **_bools("use_fused", "amsgrad", "maximize", "swap", "nesterov"),
        "adamw_betas": {"types": ["list"], "items": ["float"], "length": 2, "min": 0, "below": 1},
        "adamw_eps": {"types": ["float"], "min": 0},
        "momentum": {"types": ["float"], "min": 0, "below": 1},
        "matched_adamw_rms": {"types": ["float"], "min": 0},
        "qk_clip_threshold": {"types": ["float"]},
    },
    "lr_schedule": {
        "learning_rate": {"types": ["float"], "min": 0},
        **_least(0, "lr_end", "warmup_lr_init", types=("float",)),
        **{key: {"types": ["int", "null"], "min": 0} for key in ("warmup_steps", "warmup_epochs", "decay_steps")},
        "warmup_ratio": {"types": ["float", "null"], "min": 0, "most": 1},
        "total_steps": {"types": ["int", "null"], "min": -1},
    },
    "runner_wrapper": {
        "scale_sense": {"types": ["dict", "float"]},
        "max_grad_norm": {"types": ["float"], "min": 0},
        **_bools("use_clip_grad", "local_norm", "calculate_per_token_loss", "use_skip_data_by_global_norm"),
        "loss_scale_value": {"types": ["float"], "min": 1},
        **_least(1, "scale_factor", "scale_window"),
    },
    "callbacks": {
        "checkpoint_format": _enum("ckpt", "safetensors"),
        **_texts("prefix", "directory"),
        **_least(1, "expert_num", "micro_batch_num", "gradient_accumulation_steps", "per_print_times"),
        **_least(0, "save_checkpoint_steps", "keep_checkpoint_max"),
        "topk_bias_update_rate": {"types": ["float"], "min": 0},
    },
    "data_loader": {
        "datasets_type": _enum("GPTDataset"),
        "sizes": {"types": ["list"], "items": ["int"], "length": 3, "min": 0},
        "config": _MAPPING,
    },
    "dataset_task": {"dataset_config": _MAPPING},
    "trainer": {"model_name": {"types": ["null", "str"]}},
}

_DTYPE = _enum(*BOTH, rule="dtype")
MODEL: dict[str, Spec] = {
    "compute_dtype": _DTYPE,
    "layernorm_compute_dtype": _DTYPE,
    "params_dtype": _DTYPE,
    "router_dense_type": _DTYPE,
    "softmax_compute_dtype": _DTYPE,
    "rotary_dtype": _enum(*(name for name in BOTH if name not in ("fp16", LONG["fp16"])), rule="rotary_fp16"),
    "hidden_act": {"choices": "hidden_act"},
    "normalization": _enum("LayerNorm", "RMSNorm", "FusedLayerNorm", "FusedRMSNorm"),
    "position_embedding_type": _ROPE,
    "moe_token_dispatcher_type": _enum(*DISPATCHERS, "alltoall_zero_redundancy", rule="dispatcher"),
    "moe_router_load_balancing_type": {"choices": "balancing", "rule": "balancing"},
    "moe_router_score_function": _enum("sigmoid", "softmax"),
    "scoring_func": _enum("sigmoid", "softmax"),
    "moe_token_drop_policy": _enum(False, True, "probs", "position"),
    "topk_method": _enum("noaux_tc", "greedy", "group_limited_greedy"),
    "model_architecture": _enum("decoder_only", "yoco"),
    "mask_func_type": _enum("attn_mask_fill"),
    "architectures": _TEXT_LIST,
    "num_nextn_predict_layers": {"types": ["int", "null"], "min": 0, "most": 1, "rule": "mtp_layers"},
    "offset": {"types": ["int", "list", "str"]},  # text: `auto` or a Megatron layout, which `tools.layout` resolves
    "moe_layer_freq": {"types": ["int", "list"]},
    "rope_scaling": {"types": ["dict", "null"]},
    **{
        key: {"types": ["float"], "min": 0, "below": 1, "rule": "dropout"}
        for key in ("attention_dropout", "hidden_dropout")
    },
    **{
        key: {"types": ["int", "null"], "min": 1}
        for key in (
            "n_routed_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "q_lora_rank",
            "num_key_value_heads",
            "moe_shared_expert_intermediate_size",
        )
    },
    **_least(
        1,
        *("batch_size", "seq_length", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "max_position_embeddings", "pp_interleave_num", "kv_lora_rank", "head_dim"),
        *("qk_head_dim", "qk_nope_head_dim", "qk_pos_emb_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *("npu_nums_per_device", "expert_relocation_freq"),
    ),
    **_least(
        0, "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group", "expert_relocation_initial_iteration"
    ),
    **_least(0, "rms_norm_eps", "initializer_range", "mtp_loss_factor", "moe_aux_loss_coeff", types=("float",)),
    **_least(
        0, "rope_theta", "rotary_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", types=("float",)
    ),
    **_least(0, "routed_scaling_factor", "moe_router_bias_update_rate", types=("float",)),
    "moe_z_loss_coeff": {"types": ["float", "null"], "min": 0},
    "input_sliced_sig": {"types": ["bool"]},
    "model_type": {"types": ["str"]},
    "checkpoint_name_or_path": {"types": ["null", "str"]},
    **_bools("norm_topk_prob", "use_past"),
}

_NAMES = {tuple: "list", NoneType: "null"}
_LIMITS = {"least": "min", "below": "below"}


def of_plugin(section: type[Section]) -> dict[str, Spec]:
    """Return the keys of a plugin, which follow from the class of its settings."""
    keys: dict[str, Spec] = {}
    for each in fields(section):
        limits, spec = each.metadata, dict[str, Any](description=each.metadata["meaning"])
        kinds = [*section.kinds(each.name), *([NoneType] if limits.get("null") else [])]
        if "choices" in limits:
            spec["enum"] = [*limits["choices"], *limits.get("bare", ())[:1]]
        else:
            names = {_NAMES.get(kind, kind.__name__) for kind in kinds}
            spec["types"] = sorted({*names, "int"} if "float" in names else names)
        spec.update({_LIMITS[name]: limits[name] for name in _LIMITS if name in limits})
        if each.default is not MISSING and each.default != ():
            spec["default"] = each.default
        keys[each.name] = spec
    return keys
