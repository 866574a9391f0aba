"""A row of a measurements file, held against what a run can be, before anything is calculated with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import DataError, did_you_mean, refuse_unknown
from tools.ranges import RANGES, Range

# sizes by the name that rows give them; others may be any number that fits a model
_SIZES = {
    **dict.fromkeys(("layers", "num_layers"), RANGES["layers"]),
    **dict.fromkeys(("devices", "tp", "pp", "cp", "dp", "ep"), RANGES["devices"]),
    **dict.fromkeys(("gbs", "global_batch", "batch_size", "local_batch"), RANGES["global_batch_size"]),
    **dict.fromkeys(("micro_batch", "micro_batches", "micro_batch_num"), RANGES["micro_batches"]),
    **dict.fromkeys(("vpp", "pp_interleave_num"), RANGES["layers"]),
}
# everything that a row may have: a misspelt key would be left out in silence. Some are notes, which nothing reads.
FILE_KEYS = ("rows", "about", "dryrun_memory")
_ROW = ("id", "group", "source", "certainty", "use", "hardware", "config", "measured", "note", "about", "first")
_USES = ("fit", "context_only")
_MEASURED = (
    *("step_time_s", "derived_step_time_s", "implied_step_time_s", "step_time_ms", "forward_ms", "backward_ms"),
    *("tokens_per_s_per_gpu", "tokens_per_s_per_device", "tokens_per_s", "derived_tokens_per_s"),
    *("tflops_per_gpu", "achieved_tflops_per_gpu_incl_recompute", "aggregate_pflops"),
    *("mfu_percent", "mfu_baseline_percent", "hfu_percent", "percent_peak", "gpu_hours_per_trillion_tokens"),
    *("peak_memory_GiB", "param_opt_grad_GiB", "activation_GiB_first_stage", "activation_GiB_no_recompute_no_sp"),
    *("activation_percent", "max_allocated_MiB", "bubble_before", "bubble_after", "interleaved_1f1b_overlap"),
    "hierarchical_ep_ep16",
)
_CONFIG = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "dense_ffn", "gated", "vocab", "model", "params"),
    *("experts", "topk", "moe_ffn", "shared", "shared_ffn", "dense_layers", "mtp", "mla", "attention"),
    *("devices", "dp", "tp", "pp", "cp", "ep", "vpp", "fsdp", "parallel", "schedule", "dispatcher"),
    *("seq", "gbs", "batch_per_dp", "local_batch", "micro_batch", "micro_batches"),
    *("precision", "recompute", "technique", "memory_cap_GB"),
)
_CARD = ("model", "moe", "parallel", "recompute", "lora", "devices", "batch_size", "global_batch", "max_device_memory")
_BLOCKS = {  # of `config`
    "mla": ("q_lora", "kv_lora", "nope", "rope", "v"),
    "model": (
        *("type", "num_layers", "hidden_size", "num_heads", "n_kv_heads", "intermediate_size", "ffn_dim_multiplier"),
        *("multiple_of", "vocab_size", "seq_length", "compute_dtype", "param_init_type", "offset"),
        *("use_flash_attention", "pp_interleave_num"),
    ),
    "moe": ("expert_num", "num_experts_chosen", "shared_expert_num", "capacity_factor"),
    "parallel": (
        *("dp", "tp", "pp", "cp", "ep", "micro_batch_num", "micro_batch_interleave_num", "gradient_accumulation"),
        *("use_seq_parallel", "enable_parallel_optimizer"),
    ),
    "recompute": (
        *("recompute", "select_recompute", "select_comm_recompute", "mp_comm_recompute"),
        *("parallel_optimizer_comm_recompute", "recompute_slice_activation"),
    ),
}
_TEXTS = ("type", "compute_dtype", "param_init_type")  # of those blocks: the rest are numbers, lists, true or false
_ANY = Range(0, 1e15, whole=False)
_NEGATIVE = Range(-10_000, 10_000, whole=False)


def check_row(row: Mapping[str, Any], place: str) -> None:
    """Refuse what no row can hold.

    Raises:
        DataError: no id, a block of the wrong kind, a number that is none; names the key.
    """
    if "id" not in row:
        raise DataError(f"{place}.id: missing")
    if isinstance(row["id"], bool) or not isinstance(row["id"], str | int):
        raise DataError(f"{place}.id: want a text")
    for key in ("group", "use", "hardware"):
        if not isinstance(row.get(key, ""), str):
            raise DataError(f"{place}.{key}: want a text")
    for key in ("config", "measured"):
        if row.get(key) is not None and not isinstance(row[key], Mapping):
            raise DataError(f"{place}.{key}: want a mapping")
    _keys(row, place)
    if row.get("use", "fit") not in _USES:
        raise DataError(f"{place}.use: {row['use']!r}: want {' or '.join(_USES)}{did_you_mean(row['use'], [*_USES])}")
    _numbers(row.get("config"), f"{place}.config", _SIZES)
    _numbers(row.get("measured"), f"{place}.measured", {})


def _keys(row: Mapping[str, Any], place: str) -> None:
    refuse_unknown(f"{place}.", row, _ROW, DataError)
    refuse_unknown(f"{place}.measured.", row.get("measured") or {}, _MEASURED, DataError)
    config = row.get("config") or {}
    known = _CARD if isinstance(config.get("model"), Mapping) else _CONFIG
    refuse_unknown(f"{place}.config.", config, known, DataError)
    for block, names in _BLOCKS.items():
        if isinstance(config.get(block), Mapping):
            refuse_unknown(f"{place}.config.{block}.", config[block], names, DataError)
            for name, value in config[block].items():
                if isinstance(value, str | Mapping) and name not in _TEXTS:
                    raise DataError(f"{place}.config.{block}.{name}: {value!r}: want a number, a list, true or false")


def _numbers(value: Any, place: str, sizes: Mapping[str, Range], span: Range = _ANY) -> None:
    """Every number at or below a place; zero passes, as a way to say that there is none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _numbers(inner, f"{place}.{key}", sizes, _NEGATIVE if key == "offset" else sizes.get(key, _ANY))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _numbers(inner, f"{place}[{index}]", sizes, span)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
        if refusal := span.refusal(value):
            raise DataError(f"{place}: {_short(value)} {refusal}")
    elif isinstance(value, str) and _is_number(value):
        raise DataError(f"{place}: {value!r} is text, not a number: write it with a dot and a sign, such as 1.0e+3")


def _is_number(text: str) -> bool:
    try:
        float(text)
        return True
    except ValueError:
        return False


def _short(value: float) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"{text[:12]}... ({len(text)} digits)"
