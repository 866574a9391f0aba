"""This module makes `schema.json`, which lists every key that the installed MindFormers knows. The keys are read from
MindFormers' own sources.

    python -m tools.schema.extract          # rewrite tools/schema/schema.json and recipe.schema.json

`tc3 check` reads schema.json and does not import mindformers, which would take seconds. The keys come from these
sources: `ConfigTemplate` (YAML sections that allow no other keys), the code that reads a section
(`tools.schema.sources.reads`), signatures of registered classes, the dataclass fields of TransformerConfig, and each
model's ConfigConverter.

`SNIPPETS` holds the lines of MindFormers and MindSpore on which the rules of `tc3 check` are based, because they refuse
or silently ignore a value: a snippet of each line, or a message of MindSpore's compiled C++ code. Each snippet is
looked up in the installed version, and the extraction fails if a snippet is missing, so that no rule remains after its
line is gone.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import inspect
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.schema.schema import spec_of
from tools.schema.sources import handlers, models, reads, registered, transformer

_CONFIG = "mindformers/parallel_core/transformer_config.py"
_LAYERS = "mindformers/parallel_core/training_graph/transformer/utils.py"
_MOE = "mindformers/parallel_core/training_graph/transformer/moe/"
_MLA = "mindformers/parallel_core/training_graph/transformer/multi_latent_attention.py"
_ATTENTION = "mindformers/parallel_core/training_graph/transformer/attention.py"
_TRAINER = "mindformers/trainer/base_trainer.py"
_MUON = "mindformers/core/optim/muon.py"
_PMA = "mindformers/core/optim/pma_adamw.py"
_GPT = "mindformers/parallel_core/training_graph/base_models/gpt/gpt_model.py"
_FRONTEND = "mindspore/lib/libmindspore_frontend.so"
_AUTO = "mindspore/parallel/_auto_parallel_context.py"

# rule -> (file inside site-packages, text of the line)
SNIPPETS: dict[str, tuple[str, str]] = {
    "template_key": ("mindformers/tools/register/template.py", "gets an unexpected key: {key}"),
    "converter_unmapped": ("mindformers/parallel_core/config_converter.py", "missing_keys.add(src_key)"),
    "converter_conflict": ("mindformers/parallel_core/config_converter.py", '"Mapping Conflicts",'),
    "inert": (_CONFIG, "class TransformerConfig:"),
    "config_ignored": ("mindformers/models/model_config_utils.py", "merge_kwargs.pop(param_name, None)"),
    "context_excluded": (
        "mindformers/core/context/build_context.py",
        'groups["set_context_excluded"][param_key] = value',
    ),
    "speed_up_json": (
        "mindformers/core/context/build_context.py",
        "if not json_path or not os.path.isfile(json_path):",
    ),
    "packed_labels": (
        "mindformers/dataset/handler/packing_handler.py",
        "data[k] += sample[k][1:] + [config.pad_token]",
    ),
    "mtp_documents": (
        "mindformers/parallel_core/training_graph/transformer/multi_token_prediction.py",
        "tensor = self.slice(tensor, (0, 1), (bs, seq_len), (1, 1))",
    ),
    "masked_groups": (
        "mindformers/parallel_core/training_graph/transformer/moe/router.py",
        "masked_scores = ops.masked_fill(router_prob_with_bias, ~score_mask.bool(), 0.0)",
    ),
    "affinity_list": ("mindformers/core/context/build_context.py", "if not isinstance(affinity_cpu_list, dict):"),
    "run_mode": ("mindformers/core/context/validators.py", "if run_mode is not None and run_mode not in members:"),
    "context_mode": ("mindformers/core/context/validators.py", "if mode not in MODE:"),
    "parallel_mode": ("mindformers/core/context/validators.py", "if parallel_mode not in PARALLEL_MODE:"),
    "registry": ("mindformers/tools/register/register.py", "return obj_cls(**args)"),
    "dtype": (_CONFIG, "raise ValueError(f\"The value of 'type_str' must be in"),
    "sequence_parallel_tp": (_CONFIG, "Can not use sequence parallelism without tensor parallelism"),
    "dropout": (_CONFIG, "hidden_dropout should be a float within [0, 1)"),
    "mtp_layers": (_CONFIG, "if self.mtp_num_layers > 1:"),
    "shared_width": (_CONFIG, "if self.shared_expert_num == 0:"),
    "heads_tp": (_CONFIG, "if self.num_attention_heads % self.tensor_model_parallel_size != 0:"),
    "cp_flash": (_CONFIG, "if self.context_parallel_size > 1 and not self.use_flash_attention:"),
    "grouped_flash": (_ATTENTION, "bs, n_kv_head, seqlen, head_dim = self.shape(x)"),
    "mask_flash": (_CONFIG, "When use mask compression, use_flash_attention must be True."),
    "ring_flash": (_CONFIG, "When use ring attention, use_flash_attention must be True."),
    "deredundency_ep": (_CONFIG, 'if self.moe_token_dispatcher_type == "alltoall_deredundency" and \\'),
    "rope_fusion_mla": (_CONFIG, "multi_latent_attention does not support apply_rope_fusion."),
    "rotary_interleaved_mla": (_CONFIG, "rotary_interleaved does not work with multi_latent_attention."),
    "moe_bias_linear": (_CONFIG, "Bias is not supported for MoE"),
    "expert_bias_sigmoid": (_CONFIG, "Expert bias for aux-loss-free routing only supports sigmoid score function."),
    "group_topk": (_CONFIG, "When using group limited routing, moe_router_num_groups must be specified."),
    "group_experts": (_CONFIG, "assert self.num_moe_experts % self.moe_router_num_groups == 0, ("),
    "group_topk_fits": (_CONFIG, "assert self.moe_router_group_topk <= self.moe_router_num_groups, ("),
    "topk_group_divides": (_CONFIG, "assert self.moe_router_topk % self.moe_router_group_topk == 0, ("),
    "dense_replace": (_CONFIG, "if self.first_k_dense_replace > self.num_layers:"),
    "layer_freq": (_CONFIG, "used together with 'moe_layer_freq > 1'."),
    "layer_freq_list": (_CONFIG, "\"'moe_layer_freq' should be {moe_layer_freq_template}, \""),
    "position_embedding": (_CONFIG, "if self.position_embedding_type not in ["),
    "rope_scaling": (_CONFIG, 'self.rotary_scaling_factor = self.rope_scaling.pop("factor")'),
    "swiglu_fusion": (_CONFIG, '"When using bias_swiglu_fusion, hidden_act must be swiglu."'),
    "zbv_interleave": (_CONFIG, "When zero_bubble_v is enabled, pp_interleave_num must be set to 2."),
    "seqvpp_split": ("mindformers/tools/check_rules.py", "pipeline_scheduler is seqvpp when seq_split_num is 1"),
    "zbv_micro": (_CONFIG, "if self.micro_batch_num < 2 * self.pipeline_model_parallel_size:"),
    "zbv_recompute": (_CONFIG, "'recompute' must provide explicit 2D configuration for each interleave,"),
    "slice_activation": (_CONFIG, "`recompute_slice_activation` is not supported in Mcore."),
    "offset_stages": (_LAYERS, "if self.offset.ndim >= 1 and self.offset.shape[-1] != self.pp:"),
    "offset_chunks": (_LAYERS, "if self.offset.ndim >= 2 and self.offset.shape[-2] != self.pp_interleave_num:"),
    "offset_sum": (_LAYERS, "if self.offset.sum() != remainder_layers:"),
    "offset_head": (_LAYERS, "if actual_layers[0] < 0:"),
    "offset_middle": (_LAYERS, "if np.any(middle_layers < 1):"),
    "recompute_pattern": (_LAYERS, "return regex.fullmatch(pattern, string, timeout=timeout)"),
    "recompute_shape": (_LAYERS, "def _format_recompute_list(self, select_recompute):"),
    "recompute_by_number": (_LAYERS, "if layer_id in self.layer_recompute:"),
    "swap_conflict": (_LAYERS, "for layer_idx in recompute_layers:"),
    "exclude": (_LAYERS, "default_off_patterns = []"),
    "exclude_drops": (_LAYERS, "select_recompute.pop(repeat_key)"),
    "zbv_reversed": (_LAYERS, "select_recompute[1] = select_recompute[1][::-1]"),
    "recompute_lookup": (_LAYERS, "< self.layer_recompute[v_id][pp_id]:"),
    "ep_experts": (_MOE + "moe_layer.py", "if config.num_moe_experts % self.expert_parallel_size != 0:"),
    "ep_devices": (
        _MOE + "ffn.py",
        "if config.data_parallel_size * config.tensor_model_parallel_size % config.expert_model_parallel_size != 0:",
    ),
    "moe_tp_sequence": (_MOE + "moe_layer.py", "if self.tp > 1 and not self.use_seq_parallel:"),
    "dispatcher": (_MOE + "ffn.py", 'f"Unsupported moe_token_dispatcher_type: "'),
    "relocation": (_MOE + "ffn.py", "if self.config.print_expert_load or self.config.enable_expert_relocation:"),
    "relocation_order": (_MOE + "moe_layer.py", "new_local_expert_sorted_indices = np.argsort("),
    "relocation_adamw": (_TRAINER, 'if config.optimizer.type != "AdamW":'),
    "pma_begins": (_PMA, "ema_alpha * return_param"),
    "muon_latent": (_MUON, "if not config.multi_latent_attention:"),
    "muon_parts": (_GPT, "*self_attention.linear_q_up_proj.weight*"),
    "muon_threshold": (_GPT, "real_op_size, weight_sharded_size = compute_repeat_num_and_model_parallel_size("),
    "muon_experts": (_GPT, "if num_moe_experts % (real_op_size * ep) != 0:"),
    "muon_steps": (_MUON, "for _ in range(5):"),
    "muon_clip": (_GPT, "mask = ops.greater_equal(logits_row, logit_threshold_f32)"),
    "muon_moments": (_MUON, "op_mul(exp_avg, beta1)"),
    "muon_swap": (_MUON, "Muon does not support swap."),
    "muon_shard_size": (_MUON, "if self.op < 1:"),
    "muon_shard_ranks": (_MUON, "if self.dp < self.op:"),
    "relocation_sharded": (_TRAINER, '"is currently not supported with Optimizer Parallelism. '),
    "relocation_groups": (_TRAINER, "if transformer_config.moe_router_num_groups > 1:"),
    "relocation_saves": (_TRAINER, '"is currently not supported with CheckpointMonitor. "'),
    "balancing": (
        _MOE + "router.py",
        "if self.moe_router_load_balancing_type not in self.SUPPORTED_LOAD_BALANCING_TYPES:",
    ),
    "auxiliary_loss": (_MOE + "router.py", "scores = self.reshape(scores, (self.dp, -1, scores.shape[2]))"),
    "masked_mean": (
        "mindformers/parallel_core/training_graph/loss_func.py",
        "return self.div2(numerator, denominator)",
    ),
    "rounded_probabilities": (
        _MOE + "token_dispatcher.py",
        "router_coeff = self.squeeze_0(probs).astype(ms.bfloat16)",
    ),
    "accumulated_loads": (
        "mindformers/core/callback/callback.py",
        "expert_loads = network.update_topk_bias(self.gradient_accumulation_steps)",
    ),
    "async_save_ranks": ("mindformers/checkpoint/checkpoint.py", "ten = Tensor([is_alive], dtype=mstype.int8)"),
    "mtp_stage": (
        _GPT,
        "self.mtp.pipeline_stage = pipeline_stage - 1",
    ),
    "yarn_mla": (
        _GPT,
        "self.rotary_pos_emb = YarnRotaryEmbedding(",
    ),
    "heads_cp": (_MLA, "if self.num_attention_heads % (self.tp * self.cp_ds) != 0:"),
    "ulysses_latent": (_MLA, "new_shape = (seq_len, bs, self.tp, self.cp_ds, -1, self.q_head_dim)"),
    "rounded_queries": (_ATTENTION, "query = self.cast(query, mstype.float16)"),
    "ulysses_grouped": (_ATTENTION, "key = self._ulysses_kv_a2a(key)"),
    "v_head_dim": (_MLA, "if zero_pad_length < 0:"),
    "rotary_fp16": (
        _GPT,
        "rotary_dtype `float16` is not supported now.",
    ),
    "cp_algo": (
        "mindformers/parallel_core/transformer_config_utils.py",
        "if context_parallel_algo not in context_parallelism_mapping:",
    ),
    "micro_interleave": (_TRAINER, "micro_batch_interleave_num > 1, is not supported when use_legacy=False."),
    "seq_split": (_TRAINER, "seq_split_num > 1, is not supported when use_legacy=False."),
    "broadcast_level": (_TRAINER, 'if mf_get_context("dataset_broadcast_opt_level") < 3:'),
    "broadcast_sink": (_TRAINER, "if ds_broadcast_level > 0 and not config.runner_config.sink_mode:"),
    "dataset_size": (_TRAINER, "# reset dataset size to remove redundant data"),
    "strategy_dp": (_TRAINER, "if dp != ds_stra_dp:"),
    "strategy_list": (_TRAINER, "If set full_batch=False, dataset_strategy must be set as 'tuple', "),
    "accumulation_pipeline": (
        _TRAINER,
        "gradient_accumulation_steps will not take effect when using pipeline parallel, ",
    ),
    "lost_gradients": (
        "mindformers/wrapper/wrapper.py",
        "new_grad = grad * F.cast(reciprocal(scale), F.dtype(grad))",
    ),
    "accumulation_alone": (
        _TRAINER,
        "gradient_accumulation_steps currently need to be used in semi_auto_parallel mode, ",
    ),
    "micro_without_pipeline": (_TRAINER, "config.parallel_config.micro_batch_num does not take effect. Reset it to 1."),
    "eod_compression": (_TRAINER, "if self.config.train_dataset.data_loader.config.create_compressed_eod_mask:"),
    "columns": (_TRAINER, "column_names = config.train_dataset.get('input_columns', column_names)"),
    # C++: a message in the compiled library, from pipeline_transformer/{pipeline_scheduler,seqpipe_scheduler,
    # pipeline_transformer}.cc; without lazy inline the condition is `is_train_ && micro_size < stage_num`
    "micro_one": (
        _FRONTEND,
        "For pipeline parallelism, batch data must be split into micro batch along one dimension.",
    ),
    "micro_interleaved": (_FRONTEND, "For 1F1B Scheduler, MicroBatch num must be larger or equal than StageNum"),
    "micro_seqvpp": (_FRONTEND, "micro_num * seq_chunk_size should be greater than or equal to pp."),
    "micro_not_inlined": (_FRONTEND, "The size of micro_batch must be greater than or equal to stage_num."),
    "endless_compile": (_FRONTEND, "FindNodeWithMircoSize"),  # it does not remember where it has been
    # C++: stands beside "jit_level", "Ascend" and "O1" in GraphKernelFlags::GetGraphKernelConfig, which turns kernels
    # of graphs on for these two and lets the variable overrule the context
    "operator_fusion": ("mindspore/lib/libmindspore_hardware_abstract.so", "MS_DEV_GRAPH_KERNEL_FLAGS"),
    # the operator's page: "This API is only supported on KBK mode", and types and shapes of its inputs
    "grouped_gradient": (
        "mindspore/ops/auto_generate/gen_ops_def.py",
        "def grouped_matmul_add_(x, weight, group_list, out):",
    ),
    "smart_even": ("mindspore/context.py", "the pipeline parallel must be an even number."),
    "scheduler": (_AUTO, "When pipeline_interleave is False, {scheduler_val!r} is not supported, "),
    "optimizer_shard": (_AUTO, 'Validator.check_positive_int(value, prim_name="optimizer_weight_shard_size")'),
    "optimizer_level": (_AUTO, 'if optimizer_level not in ["level1", "level2", "level3"]:'),
    "optimizer_level_gradients": (_AUTO, 'f"The optimizer_level is set as {parallel_optimizer_config['),
    "eod_count": (
        "mindformers/dataset/blended_datasets/gpt_dataset.py",
        "if len(eod_positions) > compressed_eod_mask_length:",
    ),
    "mask_2048": (
        "mindformers/parallel_core/training_graph/transformer/mask_generate.py",
        "if seq_length < 2048:",
    ),
    "dataset_overwritten": ("mindformers/dataset/utils.py", "config.train_dataset.seed = config.seed"),
    "blend": ("mindformers/dataset/blended_datasets/utils.py", "def get_blend_from_list("),
}


SCHEMA = Path(__file__).with_name("schema.json")
_INTERNAL = {  # names that the trainer or another class sets on, or reads from, a `config` that is not the recipe
    *("batch_size", "data_loader", "data_size", "device_num", "divisor", "drop_remainder", "dynamic_batch"),
    *("eod_reset", "input_columns", "local_rank", "micro_batch_num", "num_parallel_workers", "pad_token_id"),
    *("profile_cb", "rank_id", "remainder", "top_k", "trust_remote_code", "npu_num_per_node", "image_processor"),
    "moe_config",
}
_TYPED = {  # section -> registry it is built from
    "callbacks": "callback",
    "runner_wrapper": "wrapper",
    "optimizer": "optimizer",
    "lr_schedule": "lr",
    "data_loader": "dataset_loader",
    "dataset_task": "dataset",
    "trainer": "trainer",
}


def main() -> None:
    """Write the committed schema files again."""
    from tools.schema.schema import SCHEMA_FILE, Schema, json_schema

    data = extract()
    SCHEMA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    SCHEMA_FILE.write_text(json_schema(Schema(data)), encoding="utf-8")
    print(f"{SCHEMA}: {SCHEMA.stat().st_size} bytes", file=sys.stderr)


def extract() -> dict[str, Any]:
    """Return the whole schema of the installed MindFormers and MindSpore; this function imports mindformers.

    Raises:
        LookupError: a line on which a rule of `tc3 check` is based is no longer in MindFormers.
    """
    import mindformers
    import mindspore

    site = Path(mindformers.__file__).parent.parent
    return {
        "versions": {"mindformers": importlib.metadata.version("mindformers"), "mindspore": mindspore.__version__},
        "sections": _sections(site),
        "typed": {section: registered(registry, site) for section, registry in _TYPED.items()},
        "handlers": handlers(site),
        "transformer": transformer(site),
        "models": models(site),
        "intended": _intended(),
        "choices": _choices(),
        "lines": _lines(site),
    }


def _lines(site: Path) -> dict[str, str]:
    found = {}
    for name, (file, snippet) in SNIPPETS.items():
        if file.endswith(".so"):
            if snippet.encode() not in (site / file).read_bytes():
                raise LookupError(
                    f"rule {name}: {file} no longer contains {snippet!r}; check whether the rule still holds"
                )
            found[name] = f"{file}: {snippet}"
            continue
        lines = (site / file).read_text(encoding="utf-8").splitlines()
        number = next((index for index, line in enumerate(lines, 1) if snippet in line), None)
        if number is None:
            raise LookupError(f"rule {name}: {file} no longer holds {snippet!r}")
        found[name] = f"{file}:{number}"
    return found


def _sections(site: Path) -> dict[str, Any]:
    """Return the keys of all sections without `type`, as ConfigTemplate and the code that reads them name them."""
    from mindformers.core.config_args import MFContextConfig
    from mindformers.core.context.build_context import _MSContextApplier
    from mindformers.tools.register.template import CONFIG_NAME_TO_CLASS as TEMPLATES
    from mindformers.tools.register.template import StableRankConfig

    mf = site / "mindformers"
    trainer = [mf / "trainer" / name for name in ("base_trainer.py", "trainer.py")]
    context = [mf / "core" / "context" / f"{name}.py" for name in ("build_context", "parallel", "validators")]
    read = reads([*trainer, *context, mf / "core" / "parallel_config.py"], ["config", "mf_config"])
    dataset = [*trainer, *sorted((mf / "dataset").glob("*.py"))]
    read[""] |= reads([mf / "dataset" / "utils.py"], ["config"])[""]
    sections = {name: _template(TEMPLATES[name], site) for name in TEMPLATES if name != "general_config"}
    top = _template(TEMPLATES["general_config"], site)
    names = {*read[""], *TEMPLATES, *MFContextConfig.get_supported_kwargs(), "checkpoint", "grouped_lr_schedule"}
    top.update({key: {} for key in sorted(names - _INTERNAL - {"general_config"}) if key not in top})
    sections["monitor_config.stable_rank_config"] = _template(StableRankConfig, site)
    sections["monitor_config.health_checkpoint"] = _any(_health_keys(mf))
    sections[""] = top
    sections["checkpoint"] = _any(read["checkpoint"])
    sections["tensorboard"] = _any(read["tensorboard"])
    sections["grouped_lr_schedule"] = _any(["default", "grouped"])
    sections["model"] = _any({*read["model"], "arch"})
    keys = {key for _, names, _ in _MSContextApplier._migrate for key in names}
    affinity = reads([context[0]], ["context_config"]).get("", set())
    sections["context"].update({key: {} for key in keys | read["context"] | affinity})
    sections.update(_mindspore_sections(site))
    sections["parallel"].update({key: {} for key in read["parallel"] if key not in sections["parallel"]})
    sections["train_dataset"] = _any(_dataset_keys(dataset, read))
    builder = reads([mf / "dataset" / "dataloader" / "blended_megatron_dataloader.py"], ["config"], True)
    sections.update(_hf_sections(mf / "dataset"))
    sections["gpt_dataset"] = {key: _gpt_spec(key) for key in sorted(builder[""])}
    return {
        name: {key: keys[key] for key in sorted(keys) if not key.startswith("_")} for name, keys in sections.items()
    }


def _any(keys: Iterable[str]) -> dict[str, Any]:
    """Return keys of which only the name is known."""
    return {key: {} for key in sorted(keys)}


def _template(cls: Any, site: Path) -> dict[str, Any]:
    """Return keys and defaults of one ConfigTemplate class."""
    if not cls._raise_error_for_unexpected_key and cls.__name__ not in ("MsParallelConfig", "ContextConfig"):
        return {}
    keys = [key for key in vars(cls) if not key.startswith("_") and key != "stable_rank_config"]
    return {key: spec_of(default=getattr(cls, key)) for key in keys}


def _health_keys(mf: Path) -> list[str]:
    files = [mf / "trainer" / "base_trainer.py", mf / "core" / "callback" / "callback.py"]
    found = reads(files, ["config"]).get("monitor_config.health_checkpoint", set())
    return sorted({*found, "embedding_local_norm_threshold"})


def _dataset_keys(files: list[Path], read: dict[str, set[str]]) -> set[str]:
    inner = reads(files, ["dataset_config"])
    utils = reads(files, ["config"])
    keys = inner[""] | read["train_dataset"] | utils.get("train_dataset", set()) | {"data_loader"}
    return keys - {"data_loader_type", "device_num", "rank_id", "do_eval", "shard_id", "num_shards"}


def _hf_sections(folder: Path) -> dict[str, Any]:
    """Return keys of HFDataLoader beside its signature (its own, and what it passes on to `datasets.load_dataset`)."""
    import datasets

    own = reads([folder / "dataloader" / "hf_dataloader.py"], ["kwargs"])[""]
    passed = inspect.signature(datasets.load_dataset).parameters
    legacy = {"dataset_dir", "column_names", "type"}  # popped by name and dropped
    tokenizer = reads([folder / "handler" / "base_handler.py"], ["config"])[""]
    names = {*own, "load_func", *(key for key, item in passed.items() if item.kind != item.VAR_KEYWORD)} - legacy
    return {"hf_loader": _any(names), "tokenizer": _any(tokenizer)}


def _gpt_spec(key: str) -> dict[str, Any]:
    """Return the type of a GPTDatasetConfig field that a `data_loader.config` key is passed to."""
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDatasetConfig

    renamed = {"seed": "random_seed", "seq_length": "sequence_length", "compressed_eod_mask_length": "eod_pad_length"}
    fields = {item.name: item for item in dataclasses.fields(GPTDatasetConfig)}
    item = fields.get(renamed.get(key, key))
    if item is None:
        return {}
    default = None if item.default is dataclasses.MISSING else item.default
    return spec_of(annotation=item.type, default=default)


def _mindspore_sections(site: Path) -> dict[str, Any]:
    """Return keys that MindSpore's own context takes: `parallel` and its parts, `jit_config`, `ascend_config`."""
    auto = (site / "mindspore" / "parallel" / "_auto_parallel_context.py").read_text(encoding="utf-8")
    tree = ast.parse(auto)
    setters = next(node for node in ast.walk(tree) if _assigns(node, "_set_auto_parallel_context_func_map"))
    parallel: dict[str, Any] = {key.value: {} for key in setters.value.keys}  # type: ignore[attr-defined]
    context = ast.parse((site / "mindspore" / "context.py").read_text(encoding="utf-8"))
    jit = next(node for node in ast.walk(context) if _assigns(node, "jit_cfgs"))
    ascend = next(node for node in ast.walk(context) if _assigns(node, "ascend_cfg_modes"))
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return {
        "parallel": parallel,
        "parallel.pipeline_config": _any(_constants(classes["_PipelineConfig"])),
        "parallel.parallel_optimizer_config": _any(_constants(classes["_ParallelOptimizerConfig"])),
        "parallel.strategy_ckpt_config": _any(["load_file", "save_file", "only_trainable_params"]),
        "context.jit_config": {key: {"enum": values} for key, values in ast.literal_eval(jit.value).items()},  # type: ignore[attr-defined]
        "context.ascend_config": {key.value: {} for key in ascend.value.keys},  # type: ignore[attr-defined]
    }


def _assigns(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
        and isinstance(node.value, ast.Dict)
    )


def _constants(node: ast.ClassDef) -> list[str]:
    return [item.value.value for item in node.body if isinstance(item, ast.Assign)]  # type: ignore[attr-defined]


def _intended() -> dict[str, str]:
    """Return MindFormers' other table of key names: what a key means where a model's converter forgot it."""
    from mindformers.parallel_core.transformer_config_utils import COMMON_CONFIG_MAPPING

    found = {}
    for sources, target in COMMON_CONFIG_MAPPING.items():
        for source in sources if isinstance(sources, tuple) else (sources,):
            found[source] = target if isinstance(target, str) else target[0]
    return found


def _choices() -> dict[str, list[Any]]:
    """Return enumerations that MindFormers holds in tables of its own."""
    from mindformers.parallel_core.training_graph.activation import ACTIVATION_MAP
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
    from mindformers.parallel_core.transformer_config import ms_dtype_mapping
    from mindformers.tools.utils import MODE, PARALLEL_MODE

    return {
        "hidden_act": sorted(ACTIVATION_MAP),
        "dtype": sorted(ms_dtype_mapping),
        "balancing": list(TopKRouter.SUPPORTED_LOAD_BALANCING_TYPES),
        "mode": list(MODE),
        "parallel_mode": list(PARALLEL_MODE),
    }


if __name__ == "__main__":
    main()
