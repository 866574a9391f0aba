"""This module checks for settings that exclude each other; each rule names the line of MindFormers that would fail, or
that would silently accept both settings.

The rules also cover settings that a recipe for CPU cannot have, either data parallel (plugins/cpu_backend) or sharded
(plugins/semi_auto_cpu), and the cases in which MindFormers' own balancing of experts refuses to start or moves experts
to wrong slots.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from plugins.cpu_backend.plan import refused_dtype
from plugins.hierarchical_ep.settings import DEFAULT_DISPATCHER, DISPATCHER_OF
from plugins.pipeline_layout import fewest_to_fill
from plugins.yarn import plan as yarn
from tools.check.muon import check_averages, check_muon
from tools.recipe.findings import Findings
from tools.recipe.load import KeyPath
from tools.recipe.view import LOADER, MODEL, PARALLEL, RUNNER, View
from tools.schema.converter import Built

_PIPELINE = ("parallel", "pipeline_config")
_CONFIG = (*LOADER, "config")
# train_dataset keys that MindFormers overwrites (mindformers/dataset/utils.py, check_dataset_config)
_REPLACED = {key: key for key in ("seed", "profile", "auto_tune", "filepath_prefix", "autotune_per_step")}
_REPLACED |= {"batch_size": "runner_config.batch_size", "micro_batch_num": "parallel_config.micro_batch_num"}
_BY_TOKEN = "calculate_per_token_loss"
_SPEED_UP = ("context", "ascend_config", "parallel_speed_up_json_path")
_YARN = ("plugins", "yarn")
_NORMS = ("input_layernorm", "pre_mlp_layernorm", *(f"self_attention.{kind}_layernorm" for kind in ("q", "k", "kv")))
_BIASED = ("add_bias_linear", "linear_proj")  # with the part of attention that has a bias then
_DRAWN = "decoder.layers.*(linear|experts|router).*weight"
_FLAGS = 127  # ranks that an int8 can count
NOT_AGAIN = (  # of a padding id in the text
    "where a sample has it, the loader takes that place out of the loss of all later samples, too, because it makes "
    "their loss mask only once (without reset_position_ids, reset_attention_mask and eod_mask_loss)"
)


def check_conflicts(view: View, built: Built, found: Findings) -> None:
    """Check every rule about two settings that exclude each other, and add the violations to `found`."""
    _attention(view, built, found)
    _router(view, built, found)
    _initial_weights(view, built, found)
    _masks(view, built, found)
    _positions(view, built, found)
    if view.parallel:
        _pipeline(view, built, found)
        _sequence(view, built, found)
    _callbacks(view, built, found)
    _trainer(view, found)
    _by_token(view, built, found)
    if view.get(("optimizer", "type")) == "Muon":
        check_muon(view, built, found)
    if view.get(("optimizer", "type")) == "PmaAdamW":
        check_averages(view, found)
    if view.on_cpu:
        _on_cpu(view, built, found)


def _m(key: str) -> KeyPath:
    return (*MODEL, key)


def _attention(view: View, built: Built, found: Findings) -> None:
    fields, seq = built.fields, built.number("seq_length")
    flash = fields.get("use_flash_attention") is True
    only = ("the key works only with flash attention", "write use_flash_attention: True")
    for key in ("use_attn_mask_compression", "use_eod_attn_mask_compression"):
        if fields.get(key) and not flash:
            found.error(_m(key), *only, rule="mask_flash")
        elif fields.get(key) and seq < 2048:
            wrong = f"the compressed mask needs sequences of at least 2048 tokens, but seq_length is {seq}"
            found.error(_m(key), wrong, f"write {key}: False", rule="mask_2048")
    if fields.get("use_attn_mask_compression") and fields.get("use_eod_attn_mask_compression"):
        wrong = "use_eod_attn_mask_compression replaces this mask"
        found.warning(_m("use_attn_mask_compression"), wrong, "write use_attn_mask_compression: False")
    if fields.get("use_ring_attention") and not flash:
        found.error(_m("use_ring_attention"), *only, rule="ring_flash")
    if view.parallel and view.cp > 1 and not flash:
        wrong = "context parallelism works only with flash attention"
        found.error(_m("use_flash_attention"), wrong, "write True", rule="cp_flash")
    grouped = built.number("num_query_groups") not in (0, built.number("num_attention_heads"))
    if grouped and not flash and fields.get("multi_latent_attention") is not True:
        wrong = "grouped-query attention compiles only with flash attention"
        found.error(_m("use_flash_attention"), wrong, "write True", rule="grouped_flash")
    if fields.get("multi_latent_attention") is True:
        for key, kind, rule in (
            ("apply_rope_fusion", "fused", "rope_fusion_mla"),
            ("rotary_interleaved", "interleaved", "rotary_interleaved_mla"),
        ):
            if fields.get(key):
                found.error(_m(key), f"multi-latent attention has no {kind} RoPE", "write False", rule=rule)


def _router(view: View, built: Built, found: Findings) -> None:
    fields = built.fields
    if not built.number("num_moe_experts"):
        return
    dispatcher = fields.get("moe_token_dispatcher_type")
    if fields.get("add_bias_linear"):
        found.error(_m("add_bias_linear"), "MindFormers' experts have no bias", "write False", rule="moe_bias_linear")
    if fields.get("moe_router_enable_expert_bias") and fields.get("moe_router_score_function") != "sigmoid":
        wrong = "the router's bias works only with sigmoid scores"
        right = "write moe_router_score_function: sigmoid"
        found.error(_m("moe_router_enable_expert_bias"), wrong, right, rule="expert_bias_sigmoid")
    _relocation(view, built, found)
    if dispatcher == DISPATCHER_OF["hierarchical"]:
        ep, node = built.number("expert_model_parallel_size", 1), built.number("npu_nums_per_device", 1)
        if ep < node:
            wrong = (
                f"{dispatcher} needs expert groups of whole nodes, but expert_parallel {ep} is less than "
                f"npu_nums_per_device {node}"
            )
            right = f"write {DEFAULT_DISPATCHER}, or a larger expert_parallel"
            found.error(_m("moe_token_dispatcher_type"), wrong, right, rule="deredundency_ep")
    if view.parallel and view.tp > 1 and not view.flag((*PARALLEL, "use_seq_parallel")):
        wrong = "a model with experts and tensor parallelism needs sequence parallelism"
        found.error((*PARALLEL, "use_seq_parallel"), wrong, "write True", rule="moe_tp_sequence")


def _initial_weights(view: View, built: Built, found: Findings) -> None:
    """Check that rules of initial weights match no parameter that begins with ones or zeros."""
    layers = [f"decoder.layers.{layer}." for layer in range(built.number("num_layers"))]
    layers += [f"mtp.layers.{layer}.transformer_layer." for layer in range(built.number("mtp_num_layers"))]
    end = "gamma" if built.fields.get("normalization") == "LayerNorm" else "weight"
    norms = [f"{layer}{name}.{end}" for layer in layers for name in _NORMS] + [f"decoder.final_layernorm.{end}"]
    latent = built.fields.get("multi_latent_attention") is True
    key, part = ("add_qkv_bias", "linear_qkv") if built.fields.get("add_qkv_bias") and not latent else _BIASED
    biases = [f"{layer}self_attention.{part}.bias" for layer in layers] * bool(built.fields.get(key))
    routed = layers[built.number("first_k_dense_replace") :] * bool(built.number("num_moe_experts"))
    routed *= bool(built.fields.get("moe_router_enable_expert_bias"))
    path, right = _m("param_init_std_rules"), "match neither biases nor norms, as with " + _DRAWN
    with suppress(TypeError, KeyError, re.error):  # MindFormers refuses these rules, see check_built
        for rule in view.get(path) or []:
            target, drawn = rule["target"], bool(rule["init_method_std"])
            if drawn and any(re.match(target, f"{layer}mlp.router.expert_bias") for layer in routed):
                wrong = f"{target!r} also matches the routers' biases, which would begin with random numbers"
                found.error(path, wrong, right, rule="drawn_biases")
            elif other := next((name for name in norms + biases * drawn if re.match(target, name)), None):
                begins = f"begin {'around' if drawn else 'with'} zero, not with one"
                begins = "begin with random numbers, not with zero" if other in biases else begins
                found.warning(path, f"{target!r} also matches {other}, which would {begins}", right)


def _masks(view: View, built: Built, found: Findings) -> None:
    """Check the dataset's mask against the attention's."""
    if not view.megatron:
        return
    compressed = view.flag((*_CONFIG, "create_compressed_eod_mask"))
    documents = built.fields.get("use_eod_attn_mask_compression") is True
    if documents and not compressed:
        wrong = "the model asks for end-of-document positions, but the dataset does not return them"
        found.error(
            _m("use_eod_attn_mask_compression"), wrong, "write create_compressed_eod_mask: True", rule="eod_compression"
        )
    if compressed and built.number("seq_length") < 2048:
        wrong = f"the key needs sequences of at least 2048 tokens, but seq_length is {built.number('seq_length')}"
        found.error((*_CONFIG, "create_compressed_eod_mask"), wrong, "write False", rule="mask_2048")
    if compressed and view.masks_once:
        wrong = "without reset_position_ids or reset_attention_mask the loader fails at the second sample"
        found.error((*_CONFIG, "create_compressed_eod_mask"), wrong, "write reset_position_ids: True", rule="mask_once")
    _padding(view, found)
    if compressed and view.flag((*_CONFIG, "create_attention_mask")):
        wrong = "the compressed mask replaces this mask"
        found.warning((*_CONFIG, "create_attention_mask"), wrong, "write create_attention_mask: False")
    if view.flag((*_CONFIG, "reset_attention_mask")) and not compressed:
        needs = view.flag((*_CONFIG, "create_attention_mask"), True)
        if not needs or built.fields.get("use_attn_mask_compression"):
            wrong = "the attention does not read this mask, so that tokens attend to other documents"
            found.error((*_CONFIG, "reset_attention_mask"), wrong, "write create_compressed_eod_mask: True")


def _padding(view: View, found: Findings) -> None:
    """Check that the padding id is not the end of documents: Megatron's loader leaves it out of the loss, and replaces
    it by token 0.
    """
    pad = view.get((*_CONFIG, "pad"))
    if type(pad) is not int or pad < 0 or pad != view.get((*_CONFIG, "eod")):
        return
    wrong = f"{pad} is also eod, so that the loss leaves out the ends of documents"
    wrong += ", and the model reads token 0 in their place" * (pad > 0)
    wrong += f"; {NOT_AGAIN}" * view.masks_once
    tell = found.error if view.masks_once else found.warning
    tell((*_CONFIG, "pad"), wrong, "write -1, because Megatron's samples are full", rule="padding")


def _positions(view: View, built: Built, found: Findings) -> None:
    fields = built.fields
    scaling = view.get(_m("rope_scaling"))
    if isinstance(scaling, dict):
        _rope_scaling(scaling, fields, found)
    kind, factor = fields.get("position_embedding_type"), fields.get("rotary_scaling_factor")
    latent = fields.get("multi_latent_attention")
    if kind == "yarn" and not latent and view.get(_YARN) in (None, False):
        wrong = "MindFormers' YaRN reads qk_pos_emb_head_dim, which only multi-latent attention has"
        right = f"{yarn.KEY}: {{attention_factor: {' or '.join(yarn.RATES)}}} computes YaRN for grouped-query attention"
        if (
            "qk_pos_emb_head_dim" in fields
        ):  # of a mixture of experts: its type's default, with which the run would train
            turned, head = built.number("qk_pos_emb_head_dim"), built.number("kv_channels")
            wrong += f", and would rotate {turned} of the {head} numbers of a head"
            right = "write rope: no plugin computes YaRN for grouped-query attention in a model with experts"
        found.error(_m("position_embedding_type"), wrong, right, rule="yarn_mla")
    if not latent or not isinstance(factor, (int, float)):
        return
    seq, trained = built.number("seq_length"), built.number("max_position_embeddings")
    if kind == "rope" and factor != 1:
        wrong = f"RoPE does not use this factor, but MindFormers still scales the attention by mscale({factor:g})"
        found.warning(_m("rotary_scaling_factor"), wrong, "write rotary_scaling_factor: 1")
    if kind == "yarn" and trained and seq > factor * trained:
        wrong = f"{factor:g} x max_position_embeddings {trained} is less than seq_length {seq}"
        found.warning(_m("rotary_scaling_factor"), wrong, f"write at least {-(-seq // trained)}")
    if kind == "rope" and trained and seq > trained:
        wrong = f"seq_length {seq} is larger than the {trained} positions for which RoPE is built"
        found.warning(
            _m("max_position_embeddings"), wrong, 'write position_embedding_type: "yarn", or a larger number here'
        )


def _rope_scaling(scaling: dict[str, Any], fields: dict[str, Any], found: Findings) -> None:
    """Check the mapping `rope_scaling`, which needs every key for which the model's fields have no default."""
    kind = scaling.get("type") or scaling.get("rope_type")
    more = [key for key in yarn.NUMBERS if key.startswith(("beta", "mscale")) and kind == "yarn"]
    missing = [key for key in ("factor", *more) if key not in scaling and fields.get(key) is None]
    if kind is None:
        wrong = "rope_type is missing in this section"
        found.error(_m("rope_scaling"), wrong, 'write rope_type: "yarn"', rule="position_embedding")
    if missing:
        wrong = f"MindFormers needs {', '.join(missing)}"
        found.error(_m("rope_scaling"), wrong, "write these keys in this section", rule="rope_scaling")


def _pipeline(view: View, built: Built, found: Findings) -> None:
    interleaved = view.flag((*_PIPELINE, "pipeline_interleave"))
    written = view.number(_m("pp_interleave_num"), 1)
    if view.pp > 1 and written > 1 and not interleaved:
        wrong = f"the pipeline is not interleaved, so that MindFormers replaces {written} chunks per stage by 1"
        found.error(_m("pp_interleave_num"), wrong, "write pipeline_interleave: True", rule="offset_chunks")
    if view.has(_PIPELINE) and not interleaved and view.scheduler != "1f1b":
        right = "write pipeline_interleave: True, or 1f1b here"
        found.error(
            (*_PIPELINE, "pipeline_scheduler"),
            f"{view.scheduler} needs an interleaved pipeline",
            right,
            rule="scheduler",
        )
    elif view.scheduler == "seqvpp":
        wrong = "the trainer refuses seqvpp without seq_split_num, and seq_split_num in graph mode"
        right = "write 1f1b (which can also be interleaved) or seqpipe"
        found.error((*_PIPELINE, "pipeline_scheduler"), wrong, right, rule="seqvpp_split")
    elif view.scheduler == "seqsmartvpp" and view.pp % 2:
        wrong = f"MindSpore's seqsmartvpp needs an even number of stages, not {view.pp}"
        right = "write 1f1b (which can also be interleaved) or seqpipe"
        found.error((*_PIPELINE, "pipeline_scheduler"), wrong, right, rule="smart_even")
    if view.scheduler == "zero_bubble_v":
        if written != 2:
            found.error(
                _m("pp_interleave_num"), "zero_bubble_v needs two chunks per stage", "write 2", rule="zbv_interleave"
            )
        least = fewest_to_fill(view.pp, view.scheduler)
        if view.number((*PARALLEL, "micro_batch_num"), 1) < least:
            wrong = f"zero_bubble_v needs {least} micro-batches for {view.pp} stages"
            found.error((*PARALLEL, "micro_batch_num"), wrong, f"write at least {least}", rule="zbv_micro")
    kept = (None, "MFTrainOneStepCell", "MFPipelineWithLossScaleCell")
    if view.pp > 1 and view.get(("runner_wrapper", "type")) not in kept:
        found.warning(
            ("runner_wrapper", "type"), "MindFormers replaces this type by MFPipelineWithLossScaleCell in a pipeline"
        )


def _sequence(view: View, built: Built, found: Findings) -> None:
    if view.flag((*PARALLEL, "use_seq_parallel")) and view.tp <= 1:
        wrong = "sequence parallelism works only with tensor parallelism"
        found.error((*PARALLEL, "use_seq_parallel"), wrong, "write False", rule="sequence_parallel_tp")
    if view.number((*PARALLEL, "seq_split_num"), 1) > 1:
        found.error(
            (*PARALLEL, "seq_split_num"),
            "MindFormers does not support this setting in graph mode",
            "write 1",
            rule="seq_split",
        )
    algorithm = view.get((*PARALLEL, "context_parallel_algo"))
    degree = view.number((*PARALLEL, "ulysses_degree_in_cp"), 1)
    if view.cp == 1 and (algorithm not in (None, "colossalai_cp") or degree > 1):
        found.warning(
            (*PARALLEL, "context_parallel"),
            "the value is 1, so that context_parallel_algo and ulysses_degree_in_cp have no effect",
        )


def _callbacks(view: View, built: Built, found: Findings) -> None:
    """Check that TopkBiasBalanceCallback has the model's numbers; others would train the router differently."""
    callbacks = view.get(("callbacks",), [])
    if not isinstance(callbacks, list):
        return
    twins = {
        "expert_num": (built.fields.get("num_moe_experts"), "n_routed_experts"),
        "balance_via_topk_bias": (built.fields.get("moe_router_enable_expert_bias"), "moe_router_enable_expert_bias"),
        "topk_bias_update_rate": (built.fields.get("moe_router_bias_update_rate"), "moe_router_bias_update_rate"),
        "micro_batch_num": (view.number((*PARALLEL, "micro_batch_num"), 1), "parallel_config.micro_batch_num"),
    }
    kinds = [item.get("type") for item in callbacks if isinstance(item, dict)]
    for index, item in enumerate(callbacks):
        if isinstance(item, dict) and item.get("type") == "TopkBiasBalanceCallback":
            for key, (value, name) in twins.items():
                if key in item and item[key] != value:
                    wrong = f"is {item[key]!r}, but {name} is {value!r}"
                    found.error(("callbacks", index, key), wrong, f"write {value!r}, or a YAML anchor")
            # it compares the loads of all micro-batches with the share that so many should have; one unless written
            key, right = "gradient_accumulation_steps", view.accumulation
            written = item.get(key, 1)
            if built.fields.get("moe_router_enable_expert_bias") and written != right:
                wrong = (
                    f"the value is {written!r}, but runner_config.{key} is {right}, so that the routers' biases are "
                    "updated wrongly"
                )
                found.error(
                    ("callbacks", index, key), wrong, f"write {right}, or a YAML anchor", rule="accumulated_loads"
                )
    bias = built.number("num_moe_experts") and built.fields.get("moe_router_enable_expert_bias")
    if bias and callbacks and "TopkBiasBalanceCallback" not in kinds:
        wrong = "without TopkBiasBalanceCallback the router's bias stays zero"
        found.error(("callbacks",), wrong, "add this callback, or write moe_router_enable_expert_bias: False")


def _trainer(view: View, found: Findings) -> None:
    for key, owner in _REPLACED.items():
        value = view.get(("train_dataset", key))
        if value is not None and value != view.get(tuple(owner.split("."))):
            wrong, right = f"MindFormers overwrites this key with {owner}", f"write {owner}"
            found.error(("train_dataset", key), wrong, right, rule="dataset_overwritten")
    _background_save(view, found)
    sink = view.flag((*RUNNER, "sink_mode"), True)
    level = view.get(("context", "dataset_broadcast_opt_level"))
    interleaved, sliced = ("micro_batch_interleave_num",), ("recompute_config", "recompute_slice_activation")
    unsupported = "MindFormers does not support this setting in graph mode"
    if view.flag(("use_legacy",), True):
        wrong = "MindFormers' default is the legacy models, among which there is no TeleChat3"
        found.error(("use_legacy",), wrong, "write use_legacy: False")
    elif view.number(interleaved, 1) > 1:
        found.error(interleaved, unsupported, "write 1", rule="micro_interleave")
    if view.flag(sliced):
        found.error(sliced, unsupported, "write False", rule="slice_activation")
    if type(level) is int and level > 0 and not sink:
        wrong = f"dataset_broadcast_opt_level {level} works only with sink mode"
        found.error((*RUNNER, "sink_mode"), wrong, "write True", rule="broadcast_sink")
    if view.parallel and view.megatron and not view.on_cpu and not view.ramp.stages:  # which has a rule of its own
        if type(level) is int and level < 3:
            path = ("context", "dataset_broadcast_opt_level")
            found.error(path, f"the Megatron loader needs 3, not {level}", "write 3", rule="broadcast_level")
        elif level is None and not view.get(_SPEED_UP):
            wrong = "dataset_broadcast_opt_level is missing, but the Megatron loader needs 3"
            found.error(("context",), wrong, "write dataset_broadcast_opt_level: 3", rule="broadcast_level")


def _by_token(view: View, built: Built, found: Findings) -> None:
    """Check `calculate_per_token_loss`, with which a step's loss is divided by its tokens. MindFormers' cells that add
    up the results of micro-batches return at most five, and the model then has six, but five with zero_bubble_v.
    """
    chosen = view.flag((_BY_TOKEN,))
    for path in (_m(_BY_TOKEN), ("runner_wrapper", _BY_TOKEN)):
        if view.flag(path, chosen) != chosen:
            wrong = f"the model gets the recipe's top-level {_BY_TOKEN} instead, which is {chosen}"
            found.error(path, wrong, "write this key only at the top level", rule="by_token")
    several = chosen and max(view.accumulation, view.micro_batches) > 1
    if several and view.scheduler != "zero_bubble_v":
        wrong = "MindFormers cannot add up these losses of several micro-batches, and the run ends while it compiles"
        found.error((_BY_TOKEN,), wrong, "write False", rule="by_token_summed")
    elif several and built.number("num_moe_experts") and built.fields.get("moe_aux_loss_coeff"):
        wrong = f"the gradient of the auxiliary loss is divided by the {view.micro_batches} micro-batches twice"
        found.error((_BY_TOKEN,), wrong, "write False, or moe_aux_loss_coeff: 0", rule="by_token_twice")


def _background_save(view: View, found: Findings) -> None:
    """Check `async_save`: MindFormers counts the ranks that still write in an int8, where 256 of them are 0."""
    path = ("checkpoint", "async_save")
    if not view.flag(path) or view.flag(("use_legacy_format",), True):
        return
    if view.on_cpu and view.devices > 1:
        wrong = (
            "MindFormers asks all ranks with an operator that CPU lacks, and the run ends one step after its first save"
        )
        found.error(path, wrong, "write False, or use one worker", rule="async_save_ranks")
    elif view.devices > _FLAGS:
        wrong = (
            f"MindFormers counts the ranks that are still writing in an int8, which cannot hold {view.devices:,}, so "
            "that a save may count as complete while ranks are still writing"
        )
        found.error(path, wrong, f"write False, or use at most {_FLAGS} devices", rule="async_save_ranks")


Rule = tuple[bool, KeyPath, str, str]  # whether it holds, where, what is right, why


def _on_cpu(view: View, built: Built, found: Findings) -> None:
    """Report settings that a CPU refuses deep inside MindSpore, and settings that only a CPU silently computes
    wrongly.
    """
    mode, clip = view.get(("context", "mode"), 0), ("runner_wrapper", "use_clip_grad")
    unclipped = "True, with a max_grad_norm above every gradient"
    rules: list[Rule] = [
        (mode in (0, "GRAPH_MODE"), ("context", "mode"), "0", "PyNative is 20 times slower"),
        (
            not view.flag((*RUNNER, "sink_mode"), True),
            (*RUNNER, "sink_mode"),
            "False",
            "sink mode multiplies the epochs there",
        ),
        (view.flag(clip, True), clip, unclipped, "a step cannot return None for the norm"),
    ]
    if view.sharded_on_cpu:
        level = ("context", "dataset_broadcast_opt_level")
        rules.append((view.get(level) == 0, level, "0", "the other tensor-parallel ranks would get no data"))
    else:
        rules += _data_parallel(view, built)
    for holds, path, right, why in rules:
        if not holds:
            found.error(
                path, "this setting cannot run on CPU" + f": {why}" * bool(why), f"device_target CPU needs {right}"
            )
    if view.get(("monitor_config", "monitor_on")) is True:
        found.error(("monitor_config", "monitor_on"), "this setting cannot run on CPU", "write False")


def _data_parallel(view: View, built: Built) -> list[Rule]:
    """Check what `plugins.cpu_backend.adapter.check` checks."""
    fields, wrapper = built.fields, ("runner_wrapper", "type")
    mode = view.get(("parallel", "parallel_mode"), 1)
    return [
        (not (why := refused_dtype(fields.get("compute_dtype"))), (*MODEL, "compute_dtype"), "float32", why),
        (fields.get("fused_norm") is False, (*MODEL, "fused_norm"), "False", "there is no RmsNorm kernel"),
        (
            fields.get("hidden_act") == "swiglu",
            (*MODEL, "hidden_act"),
            "'swiglu'",
            "there is no kernel of the fused activation",
        ),
        (mode in (0, "DATA_PARALLEL"), ("parallel", "parallel_mode"), "0 (data parallel) or 1 (semi-auto)", ""),
        (view.get(wrapper) == "MFTrainOneStepCell", wrapper, "MFTrainOneStepCell", ""),
        *(
            (
                view.get((*PARALLEL, key), 1) == 1,
                (*PARALLEL, key),
                "1, or parallel.parallel_mode: 1",
                "the recipe is only data parallel",
            )
            for key in ("model_parallel", "pipeline_stage", "context_parallel")
        ),
        (
            view.ep == 1 or bool(view.get(("plugins", "hierarchical_ep"))),
            (*PARALLEL, "expert_parallel"),
            "1, or plugins.hierarchical_ep, or parallel.parallel_mode: 1",
            "MindFormers' dispatchers have no kernels in data-parallel mode",
        ),
    ]


KEYS = ("print_expert_load", "enable_expert_relocation")
_SHARDED = ("parallel", "enable_parallel_optimizer")
_OURS = "leave the key out; plugins.expert_balance moves experts"
# mindformers 1.9.0, moe_layer.py: the rows that a rank sends are sorted by np.argsort, which keeps no order among the
# experts that go to one device, and the slots that the router's map gives them are popped from a set
_MISPLACED = (
    "moved experts do not arrive in the slots of the router's map, because an unstable sort orders the experts that "
    "go to one device (with 192 experts on 8 devices 100 were misplaced, in 20 of 20 trials; with 16 on 4 some were in "
    "5 of 20, with AVX-512)"
)


def _relocation(view: View, built: Built, found: Findings) -> None:
    """Check rules of `print_expert_load` and `enable_expert_relocation`; the trainer stops at some of them. Without
    checkpoints it starts, and what it trains is lost.
    """
    on = [(*MODEL, key) for key in KEYS if built.fields.get(key)]
    if not on:
        return
    dispatcher = built.fields.get("moe_token_dispatcher_type")
    if dispatcher != DEFAULT_DISPATCHER:
        for key in on:
            only = f"the key works only with the {DEFAULT_DISPATCHER} dispatcher, not with {dispatcher}"
            found.error(key, only, rule="relocation")
    key, optimizer = on[0], view.get(("optimizer", "type"))
    if optimizer != "AdamW":
        found.error(key, f"the key works only with AdamW, not with {optimizer}", _OURS, rule="relocation_adamw")
    if view.flag(_SHARDED):
        found.error(key, f"the key does not work with {'.'.join(_SHARDED)}", _OURS, rule="relocation_sharded")
    if built.number("moe_router_num_groups") > 1:
        found.error(key, "the key does not work with n_group above 1", _OURS, rule="relocation_groups")
    callbacks = view.get(("callbacks",)) or []
    if any(isinstance(each, dict) and each.get("type") == "CheckpointMonitor" for each in callbacks):
        found.error(key, "the key does not work with CheckpointMonitor", _OURS, rule="relocation_saves")
    else:
        found.warning(key, "the key does not allow a CheckpointMonitor, so that this run saves no checkpoint", _OURS)
    relocation = (*MODEL, "enable_expert_relocation")
    if relocation in on and built.number("num_moe_experts") > max(view.ep, 1):
        found.error(relocation, _MISPLACED, _OURS, rule="relocation_order")
