"""This module compares a recipe with the TransformerConfig that MindFormers itself builds from it: a key of the recipe
that does not reach this TransformerConfig is an error.

The other checks emulate MindFormers (`tools.schema.converter`, `tools.schema.stages`); this module gets the
TransformerConfig and the layer split from MindFormers itself, on CPU, without building a network. It runs as `python -m
tools.check.build`, with recipes as input and fields as output in JSON, because importing mindformers takes seconds,
prints on stdout and writes log files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.hardware.units import same_dtype
from tools.recipe.findings import Findings, Report
from tools.recipe.override import dotted
from tools.recipe.view import MODEL, PARALLEL, RUNNER, View
from tools.schema.converter import Built, _apply, convert
from tools.schema.schema import Schema, load_schema
from tools.schema.stages import layers_of
from tools.schema.values import MODEL as MODEL_VALUES

_FUNCTIONS = {"moe_router_score_function": "is_use_gated_sigmoid", "moe_token_drop_policy": "get_drop_policy"}


def check_arrival(view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Report keys of a recipe that MindFormers drops or overwrites."""
    model = schema.model_type(view.recipe)
    known = schema.recipe(model).keys["model"].keys["model_config"].keys  # type: ignore[index]
    for path, target in built.conflicts:
        if path[:-1] == MODEL and path[-1] not in (known or {}):
            continue  # an unknown key: reported as such
        other = built.origin.get(target)
        wrong = f"the key sets TransformerConfig.{target}, which {dotted(other) if other else 'a default'} sets too"
        if not view.has(path):
            path = other or path
        found.error(
            path, f"{wrong}; MindFormers refuses this", "keep only one of the two keys", rule="converter_conflict"
        )
    for key in built.unread:
        _unread(key, view, schema, built, found)
    _training_model(model, view, schema, built, found)
    _inert(view, schema, built, found)
    batch = view.get((*MODEL, "batch_size"))
    if type(batch) is int and batch != view.batch and view.has((*RUNNER, "batch_size")):
        right = f"write {view.batch}, or refer to that key with a YAML anchor"
        found.error(
            (*MODEL, "batch_size"), f"MindFormers replaces {batch} by runner_config.batch_size {view.batch}", right
        )
    _left_out(view, built, found)
    _tied(view, schema, found)
    _not_computed(view, schema, found)


# fields that decide the size or the arithmetic of every model, of grouped queries, of latent attention, of experts
_OF_ALL = (
    *("vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads", "mtp_num_layers"),
    *("layernorm_epsilon", "rotary_base"),
)
_OF_GROUPED = ("num_query_groups", "kv_channels")
_OF_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
_SCALE = "moe_router_topk_scaling_factor"
_OF_EXPERTS = (
    *("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "first_k_dense_replace", "shared_expert_num"),
    *("moe_router_num_groups", "moe_router_group_topk", _SCALE, "norm_topk_prob"),
)
# fields of which TransformerConfig has values of its own
_NOT_DERIVED = ("qk_head_dim", "qk_pos_emb_head_dim", "moe_router_topk")


def _left_out(view: View, built: Built, found: Findings) -> None:
    """Warn of sizes that the recipe does not state, and that MindFormers takes from the class of another model."""
    latent = bool(built.fields.get("multi_latent_attention"))
    if built.number("num_moe_experts") and built.fields.get(_SCALE) is None:  # Qwen3-MoE's class has no default
        key = built.origin.get(_SCALE, (*MODEL, "routed_scaling_factor"))
        wrong = "the routers multiply by this number, which is missing, so that MindFormers cannot compile the model"
        found.error(key, wrong, "write 1.0 for a model without such a factor", rule="router_scale")
    attention, experts = _OF_LATENT if latent else _OF_GROUPED, _OF_EXPERTS if built.number("num_moe_experts") else ()
    taken = {}
    for name in (*_OF_ALL, *attention, *experts):
        path, value = built.origin.get(name), built.fields.get(name)
        if value is not None and (name in _NOT_DERIVED if path is None else not view.has(path)):
            taken[name if path is None else str(path[-1])] = value
    if not taken:
        return
    values = ", ".join(f"{key} {value}" for key, value in taken.items())
    wrong = f"MindFormers takes its own values for keys that are missing: {values}"
    if view.get(("pretrained_model_dir",)) or view.get(("model", "pretrained_model_dir")):
        wrong = f"tc3 does not read the config.json of pretrained_model_dir, and takes {values}"
    right = "write these keys"
    if latent and {*_OF_LATENT} & {*taken}:
        right += ", or multi_latent_attention: False for a model without latent attention"
    found.warning(MODEL, wrong, right)


def _unread(key: str, view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Report a key that no converter rule maps, unless the model has the wanted value in any case."""
    model, path = schema.model_type(view.recipe), (*MODEL, key)
    ignored = key in schema.models[model]["ignored"]
    value, target = view.get(path), schema.intended.get(key)
    rule = "config_ignored" if ignored else "converter_unmapped"
    if target is None or target not in built.fields:
        if not ignored and key in schema.models[model]["defaults"]:
            found.warning(
                path, "the key does not reach TransformerConfig, so that MindFormers does not use the value", rule=rule
            )
        return
    arrived = built.fields[target]
    if same(_apply(_FUNCTIONS.get(target), value), arrived):
        if value and not ignored and not view.has((*MODEL, target)):  # what is off needs no second spelling
            wrong = f"the key does not reach the model ({model} does not map it); {target} is {arrived} only by default"
            found.warning(path, wrong, f"write {target}: {arrived} as well", rule=rule)
        return
    wrong = f"{value!r} does not reach the model, which MindFormers builds with {target} = {arrived!r}"
    choices = MODEL_VALUES.get(target, {}).get("enum", (value,))
    right = f"write {target}: {value}" if value in choices else ""
    if target in schema.models[model]["fixed"]:  # the other key would be refused, too
        right = "leave the key out, or write another model_type that reads it"
    elif (said := view.get((*MODEL, target))) is not None:  # perhaps as this message told, and this key is of a base
        right = f"write the same value under both keys, either {key}: {said} or {target}: {value}"
    found.error(path, wrong, right, rule=rule)


def _training_model(model: str, view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Report keys whose fields the training model does not read."""
    for target, value in schema.models[model]["fixed"].items():
        path = built.origin.get(target)
        written = view.get(path) if path is not None and view.has(path) else None
        if written is None or (written or None) == (value or None):
            continue
        wrong = f"the training model of {model} does not read this key, and always has {target} = {value!r}"
        found.error(path, wrong, "leave the key out, or write another model_type that reads it")  # type: ignore[arg-type]


def _inert(view: View, schema: Schema, built: Built, found: Findings) -> None:
    """Report keys that ask for something, and arrive in a field that no training code reads."""
    transformer = schema.data["transformer"]
    defaults = {**transformer["fields"], **transformer["mla_fields"]}
    for name in transformer["unread"]:
        path, value = built.origin.get(name), built.fields.get(name)
        if path is not None and view.has(path) and value and value != defaults[name]["default"]:
            wrong = f"the key has no effect, because no training code reads TransformerConfig.{name}"
            found.warning(path, wrong, "leave the key out", rule="inert")
    path = (*PARALLEL, "vocab_emb_dp")
    if view.get(path) is True:
        wrong = "the key has no effect: MindFormers changes True to False, so tensor parallelism splits the embedding"
        found.warning(path, wrong, "write False", rule="vocab_emb_dp")


def _tied(view: View, schema: Schema, found: Findings) -> None:
    """Warn of keys that ask to tie the output layer to the embedding, which only some models read."""
    ties = schema.models[schema.model_type(view.recipe)]["ties"]
    how = "ties these weights only by tie_word_embeddings" if ties else "never ties these weights"
    for key, tied in (("tie_word_embeddings", True), ("untie_embeddings_and_output_weights", False)):
        if view.get((*MODEL, key)) is tied and not (ties and key == "tie_word_embeddings"):
            right = "leave the key out" if ties else f"write {not tied}"
            found.warning((*MODEL, key), f"the key does not reach the training model, which {how}", right)


# of public models: keys of a model that MindFormers' configuration takes and ignores
_DROPPED = ("mlp_bias", "logn", "share_attention", "share_ffn", "embed_layernorm", "output_router_logits")


def _not_computed(view: View, schema: Schema, found: Findings) -> None:
    """Report keys that a public config.json may have, and that MindFormers' training graph accepts but does not
    compute.
    """
    every = "MindFormers drops this key, and every token attends to all tokens before it"
    if view.flag((*MODEL, "use_sliding_window")):
        found.error((*MODEL, "use_sliding_window"), every, "write False")
    elif view.get((*MODEL, "sliding_window")) is not None and not view.has((*MODEL, "use_sliding_window")):
        right = "leave the key out, or add use_sliding_window: False"
        found.error((*MODEL, "sliding_window"), every, right)
    types = view.get((*MODEL, "layer_types"))
    if types and any(kind != "full_attention" for kind in (types if isinstance(types, list) else [types])):
        found.error((*MODEL, "layer_types"), every, "leave the key out")
    if view.get((*MODEL, "softmax_scale")) is not None:
        wrong = "training does not read this key: attention divides the scores by the square root of the head's size"
        found.error((*MODEL, "softmax_scale"), wrong, "leave the key out")
    ignored = schema.models[schema.model_type(view.recipe)]["ignored"]  # any other key is reported as unknown
    for key, nothing in (("decoder_sparse_step", (None, 1)), ("mlp_only_layers", (None, []))):
        if key in ignored and view.get((*MODEL, key)) not in nothing:
            wrong = "MindFormers drops this key, and every layer of this model has experts"
            right = "leave the key out, or write a model_type with first_k_dense_replace or moe_layer_freq"
            found.error((*MODEL, key), wrong, right)
    for key in _DROPPED:
        if key in ignored and view.get((*MODEL, key)) not in (None, False):
            found.error(
                (*MODEL, key), "MindFormers drops this key, and its training graph has no such thing", "write False"
            )
    if view.flag((*MODEL, "attention_bias")) and not view.flag((*MODEL, "add_bias_linear")):
        wrong = (
            "the key gives a bias only to queries, keys and values; in Llama, Qwen3 and GPT-OSS the output of "
            "attention also gets a bias"
        )
        found.note((*MODEL, "attention_bias"), wrong, "see docs/stock-differences.md")
    if view.get((*MODEL, "quantization_config")):
        wrong = "MindFormers would quantise the model that it builds, and trains no such model"
        found.error(
            (*MODEL, "quantization_config"), wrong, "leave the key out, and train weights that are not quantised"
        )
    if view.get((*MODEL, "partial_rotary_factor")) not in (None, 1):
        found.error(
            (*MODEL, "partial_rotary_factor"), "training does not read this key", "write 1.0, or leave the key out"
        )


def same(written: Any, arrived: Any) -> bool:
    """Return whether two values have the same meaning in a recipe, such as 1 and 1.0, bf16 and bfloat16, or a tuple and
    a list.
    """
    if isinstance(written, (list, tuple)) and isinstance(arrived, (list, tuple)):
        return len(written) == len(arrived) and all(same(*pair) for pair in zip(written, arrived, strict=True))
    if isinstance(written, str) and isinstance(arrived, str):
        return same_dtype(written, arrived)
    return bool(written == arrived)


# fields that MindFormers is right to derive: offset and recompute are compared as layers, rope_scaling is taken apart
_DERIVED = {
    *("offset", "moe_layer_freq", "rope_scaling", "param_init_std_rules", "moe_router_num_groups", "hidden_act"),
    *("position_embedding_type", "rotary_scaling_factor", "max_position_embeddings", "pad_token_id"),
}


def check_built(reports: list[Report]) -> str:
    """Add to each report the settings that MindFormers builds with other values than the recipe's; return a note if
    MindFormers could not be started.
    """
    if not reports:
        return ""
    results = built_by_mindformers([report.recipe for report in reports])
    if results is None:
        return (
            "MindFormers could not be started, so only the emulation of its converter was checked (--no-build "
            "hides this line)"
        )
    for report, result in zip(reports, results, strict=True):
        found = Findings(report.recipe, load_schema().line)
        _compare(View(report.recipe), load_schema(), result, found)
        report.findings += found.found
    return ""


def _compare(view: View, schema: Schema, result: dict[str, Any], found: Findings) -> None:
    """Check one recipe against one build."""
    if "error" in result:
        message = result["error"].replace("\n", " ")
        found.error(MODEL, f"MindFormers refuses to build this model: {message}")
        return
    model, built = schema.model_type(view.recipe), convert(view, schema)
    for key, value in view.get(MODEL, {}).items():
        for target, function in schema.targets(model, key):
            arrived = result["fields"].get(target)
            if function is None and target not in _DERIVED and value is not None and not same(value, arrived):
                wrong = f"{value!r} does not reach the model, which MindFormers built with {target} = {arrived!r}"
                found.error((*MODEL, key), wrong)
    layers = layers_of(view, built)
    if layers is not None and result["layers"] != layers:
        found.error(
            (*MODEL, "offset"),
            f"MindFormers splits the layers as {result['layers']}, but tc3 reads the recipe as {layers}",
        )


ROOT = Path(__file__).resolve().parents[2]
_MARK = "tc3-built "  # MindFormers prints on stdout too
_OF_A_JOB = ("RANK_ID", "RANK_SIZE", "DEVICE_ID")  # MindFormers reads them on import; they say nothing of a recipe


def built_by_mindformers(recipes: list[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return what MindFormers builds from each recipe: ``{"fields": ..., "layers": ...}`` or ``{"error": text}``;
    return None if MindFormers cannot be started.
    """
    command = [sys.executable, "-m", "tools.check.build"]
    environ = {key: value for key, value in os.environ.items() if key not in _OF_A_JOB}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, input=json.dumps([dict(recipe) for recipe in recipes]), text=True, cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "LOCAL_DEFAULT_PATH": folder},
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else None


def main() -> None:
    """Read recipes on stdin, and print the configurations that MindFormers builds from them."""
    results: list[dict[str, Any]] = []
    for recipe in json.load(sys.stdin):
        try:
            results.append(build(recipe))
        except Exception as error:  # whatever MindFormers raises is the finding
            results.append({"error": f"{type(error).__name__}: {error}"})
    print(_MARK + json.dumps(results))


def build(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the TransformerConfig that MindFormers builds from a recipe, and its layers [chunk][stage];
    this function imports mindformers.
    """
    import copy
    import dataclasses

    import mindspore as ms
    from mindformers.core.context.build_context import MFContextOperator
    from mindformers.core.parallel_config import build_parallel_config
    from mindformers.models.build_config import get_model_config
    from mindformers.parallel_core.training_graph.transformer.utils import LayerSetting
    from mindformers.tools.register import MindFormerConfig
    from mindformers.tools.register.template import ConfigTemplate

    plain = copy.deepcopy(recipe)
    semi = bool(plain.get("use_parallel")) and plain.get("parallel", {}).get("parallel_mode", 1) in (
        *(1, 2, "SEMI_AUTO_PARALLEL", "AUTO_PARALLEL"),
    )
    if not semi:  # as the trainer resets them
        sizes = ("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage")
        plain["parallel_config"] = {**plain.get("parallel_config", {}), "micro_batch_num": 1, "use_seq_parallel": False}
        plain["parallel_config"].update(dict.fromkeys(sizes, 1))
    ConfigTemplate.apply_template(plain)
    config = MindFormerConfig(**plain)
    ms.reset_auto_parallel_context()
    pipeline = (recipe.get("parallel") or {}).get("pipeline_config") if semi else None
    if pipeline:
        ms.set_auto_parallel_context(pipeline_config=dict(pipeline))
    # MindFormers asks its context whether it builds legacy models; without one the answer is yes
    operator = MFContextOperator.get_mf_ctx_instance() or MFContextOperator(config)
    operator.set_context(use_legacy=config.get("use_legacy", True))
    build_parallel_config(config)
    arguments = {"parallel_config": config.parallel_config, "batch_size": config.runner_config.batch_size}
    model = get_model_config(config.model, default_args=arguments)
    built = model.convert_to_transformer_config()
    setting = LayerSetting(built.num_layers, built.offset, built, built.virtual_pipeline_model_parallel_size or 1)
    fields = {item.name: _plain(getattr(built, item.name, None)) for item in dataclasses.fields(built)}
    return {"fields": fields, "layers": setting.layer_list.tolist()}


def _plain(value: Any) -> Any:
    """Return a field as JSON; MindSpore's dtypes by name."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


if __name__ == "__main__":
    main()
