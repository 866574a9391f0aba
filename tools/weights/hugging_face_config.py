"""This module writes the config.json of a Hugging Face folder, and compares an existing config.json with the model of a
recipe.

From this config.json, DeepseekV3ForCausalLM of transformers (LlamaForCausalLM for a dense model), and
TeleChat3ForCausalLM and TeleChat2ForCausalLM of vLLM, build the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, not_json, read_text
from plugins.output_biases import plan as output_biases
from plugins.yarn import plan as yarn_plan
from tools.weights.hugging_face_sizes import MODEL, Sizes

FILE = "config.json"
# sizes that the shapes of the weights tell, where config.json leaves them out
_IN_SHAPES = (
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers"),
    *("n_shared_experts", "n_routed_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank"),
)
# change no number of a forward pass, or (tied embeddings) are looked at apart
_UNCOMPARED = ("pad_token_id", "max_position_embeddings", "attention_dropout", "tie_word_embeddings")


def config_of(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for a model with given sizes, whose weights have the type `dtype` (float32 or
    bfloat16).
    """
    if sizes.telechat2:
        return _telechat2_config(sizes, dtype)
    if sizes.is_dense and stretched_as_telechat3(sizes):
        own: dict[str, Any] = {"architectures": ["TeleChat3ForCausalLM"], "model_type": "telechat3"}
    elif sizes.is_dense:
        own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        if sizes.streams > 1:
            own = {"architectures": ["Xing4_0ForCausalLM"], "model_type": _STREAMED[0]}
        own["num_nextn_predict_layers"] = sizes.mtp_layers
    return {**own, "torch_dtype": dtype, "use_cache": True, **sizes.hf}


def stretched_as_telechat3(sizes: Sizes) -> bool:
    """Return whether the model's RoPE is scaled as in TeleChat3's public weights. Hugging Face's Llama classes cannot
    compute this scaling.
    """
    scaling = sizes.hf.get("rope_scaling") or {}
    return bool(scaling.get("rope_type") == yarn_plan.ROPE_TYPES[yarn_plan.TELECHAT3])


def check_config(folder: Path, sizes: Sizes, extended: Callable[[str], None] | None = None) -> dict[str, Any] | None:
    """Return the content of the config.json of a Hugging Face folder, compared with the model of a recipe; return None
    if the folder has no config.json.

    Args:
        extended: called with what differs if it is only RoPE, which a run changes that extends the context.

    Raises:
        CheckpointError: config.json cannot be read, or describes another model, whose weights would have the same
            shapes but compute other results.
    """
    file = folder / FILE
    if not file.exists():
        return None
    text = read_text(file, CheckpointError)
    try:
        given = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: this is not the configuration of a model: it {not_json(error)}") from None
    if not isinstance(given, dict):
        raise CheckpointError(f"{file}: this is not the configuration of a model: it is a {type(given).__name__}")
    content, wanted = given, dict(sizes.hf)
    wrong = [*_other_family(given, sizes), *_wrong_words(given, sizes), *_unknown(given, sizes)]
    if sizes.telechat2:
        wrong += _wrong_of_telechat2(given, wanted)
        given = _in_llamas_words(given)
    compare = _wrong_positions if sizes.is_dense else _wrong_latent_positions
    positions = compare(given, wanted.pop("rope_scaling"))
    for name, value, found in _pairs(given, wanted, _left_out(given, sizes)):
        if not _same(found, value):
            said = positions if name == "rope_theta" else wrong
            said.append(f"{name} is {found!r}, but the recipe has {value!r}")
    if extended and positions and not wrong:
        extended(f"{file}: {'; '.join(positions)}")
    elif wrong := wrong + positions:
        raise CheckpointError(f"{file}: this file describes another model than the recipe: {'; '.join(wrong)}")
    return content


def differences(before: Sizes, after: Sizes) -> list[tuple[str, Any, Any]]:
    """Return the settings with which the model `after` would compute other results from the weights of the model
    `before`, each as (name, value before, value after); the shapes of weights are not compared.
    """
    old, new = ({**each.hf, "use_interleaved_weight_layout_mlp": each.interleaved} for each in (before, after))
    return [
        (name, old.get(name), new.get(name))
        for name in {**old, **new}
        if name not in _UNCOMPARED and name not in _IN_SHAPES and not _same(old.get(name), new.get(name))
    ]


_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # of transformers
_KINDS = {name: kind for kind, name in yarn_plan.ROPE_TYPES.items()}


def _kind(scaling: Any) -> str | None:
    """Return the name of a way to stretch RoPE; None if it has none."""
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    return kind if isinstance(kind, str) else None


def _wrong_positions(given: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> list[str]:
    """Return what a dense model's config.json says of its positions that the recipe's `rope_scaling` does not
    compute.
    """
    scaling = _get(given, "rope_scaling")
    if scaling is None:
        return [] if wanted is None else [f"rope_scaling is None, but the recipe has {wanted!r}"]
    kind = _kind(scaling)
    if kind not in _KINDS:
        known = f"the training graph has plain RoPE and, with {yarn_plan.KEY}, {' and '.join(_KINDS)}"
        return [f"rope_scaling is {scaling!r}, but the recipe has {wanted!r}; {known}"]
    if wanted is None:
        advice = f"write the recipe's rope_scaling, and {yarn_plan.KEY}: {{attention_factor: {_KINDS[kind]}}}"
        return [f"rope_scaling is {scaling!r}, but the recipe has None; {advice}"]
    theirs, ours = (_positions_of(each, given.get("max_position_embeddings")) for each in (scaling, wanted))
    return [
        f"rope_scaling.{name} is {theirs[name]!r}, but the recipe has {value!r}"
        for name, value in ours.items()
        if not _same(theirs[name], value)
    ]


def _wrong_latent_positions(given: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> list[str]:
    """Return the differences in RoPE for a model with latent attention, whose YaRN also has the two factors of its
    softmax.
    """
    scaling = _get(given, "rope_scaling")
    if scaling is None or wanted is None or _kind(scaling) != wanted["rope_type"]:
        return [] if scaling is wanted else [f"rope_scaling is {scaling!r}, but the recipe has {wanted!r}"]
    left_out: dict[str, Any] = {"mscale": 0, "mscale_all_dim": 0, **_YARN_DEFAULTS}
    left_out["original_max_position_embeddings"] = given.get("max_position_embeddings")
    ours = {**wanted, "truncate": True, "attention_factor": None}
    return [
        f"rope_scaling.{name} is {scaling.get(name, left_out.get(name))!r}, but the recipe has {value!r}"
        for name, value in ours.items()
        if name != "rope_type" and not _same(scaling.get(name, left_out.get(name)), value)
    ]


def _positions_of(scaling: Mapping[str, Any], longest: Any) -> dict[str, Any]:
    """Return what decides positions, of YaRN in Hugging Face's words; keys that are not there have their default."""
    attention = scaling.get("attention_factor")
    return {
        "factor": scaling.get("factor"),
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings", longest),
        **{name: scaling.get(name, value) for name, value in _YARN_DEFAULTS.items()},
        "attention_factor": _attention_factor(scaling) if attention is None else attention,
    }


def _attention_factor(scaling: Mapping[str, Any]) -> float | None:
    """Return what YaRN multiplies cos and sin by, where config.json does not say it; None if it cannot be computed."""
    kind, factor = _KINDS[_kind(scaling) or ""], scaling.get("factor")
    above, below = (scaling.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    if kind == yarn_plan.STANDARD and not (above and below):
        above, below = 1.0, 0.0  # transformers reads these two only together
    elif kind == yarn_plan.TELECHAT3:
        below = 0.0  # Tele-AI's code divides by nothing
    try:
        found = yarn_plan.attention_factor(kind, factor, above or 1.0)  # type: ignore[arg-type]
        return found / yarn_plan.attention_factor(kind, factor, below)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError):
        return None


def _same(given: Any, wanted: Any) -> bool:
    """Return whether two values are equal, numbers but for their last places in JSON."""
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (given, wanted))
    try:
        return math.isclose(given, wanted, rel_tol=1e-6) if numbers else bool(given == wanted)
    except OverflowError:  # an integer that no float holds
        return False


def _get(given: Mapping[str, Any], name: str) -> Any:
    """Return a value of config.json; transformers 5 keeps the base of RoPE beside its scaling, and earlier versions
    keep it beside the sizes.
    """
    rope = given.get("rope_parameters")
    rope = rope if isinstance(rope, Mapping) else {}
    if name == "rope_theta":
        own = given.get(name)
        return rope.get(name) if own is None else own
    if name == "rope_scaling":
        scaling = _plain(rope) or given.get(name) or None
        return None if isinstance(scaling, Mapping) and (_kind(scaling) or "default") == "default" else scaling
    return given.get(name)


def _pairs(
    given: Mapping[str, Any], wanted: Mapping[str, Any], left_out: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Name, the recipe's value and config.json's, of every key to compare; sizes that config.json does not say are
    left to the shapes of the weights."""
    for name, value in wanted.items():
        found = _get(given, name)
        found = left_out.get(name) if found is None else found
        if name not in _UNCOMPARED and (found is not None or name not in _IN_SHAPES):
            yield name, value, found


def _left_out(given: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return what the classes take for keys that config.json leaves out (transformers 4.57: LlamaConfig,
    DeepseekV3Config).
    """
    found: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    if not sizes.telechat2:
        found |= {"rms_norm_eps": 1e-6, "rope_theta": BASE}
    if sizes.is_dense:
        heads = given.get("num_attention_heads")
        return found | {"num_key_value_heads": heads, "head_dim": _width(given, heads)}
    return found | {
        **{"routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8},
        **{"norm_topk_prob": True, "rope_interleave": True},
    }


# A key that nothing here knows may change what the weights compute, and no shape would show it. Every key of a
# config.json is therefore compared, or known to change no number, or off; any other is refused by its name.

# keys that a forward pass does not read (transformers' own, DeepSeek's, and those that MindFormers 1.9.0 calls useless)
_UNREAD = frozenset({
    "architectures", "auto_map", "model_type", "transformers_version", "_name_or_path", "name_or_path", "torch_dtype",
    "dtype", "use_cache", "initializer_range", "pretraining_tp", "ep_size", "num_nextn_predict_layers",
    "aux_loss_alpha", "seq_aux", "router_aux_loss_coef", "output_router_logits", "attention_dropout",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "flash_attn", "attn_implementation", "_attn_implementation",
    "_attn_implementation_autoset", "masked_softmax_fusion", "bias_dropout_fusion", "slow_but_exact", "skip_bias_add",
    "skip_bias_add_qkv", "attention_softmax_in_fp32", "seq_length", "max_position_embeddings", "max_window_layers",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "finetuning_task", "id2label", "label2id", "num_labels", "task_specific_params",
    "problem_type", "prefix", "tokenizer_class", "cross_attention_hidden_size",
})  # fmt: skip
# key -> the value with which it changes nothing
_OFF: dict[str, Any] = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1),
    **dict.fromkeys(("lm_head_multiplier", "partial_rotary_factor", "rotary_pct", "moe_layer_freq"), 1),
    **dict.fromkeys(
        ("use_sliding_window", "logn", "share_attention", "share_ffn", "use_qk_norm", "qk_layernorm"), False
    ),
    **dict.fromkeys(("is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"), False),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias"), False),
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_type": "default",
}
_STREAMED = ("xing4_0",)
_LLAMA, _TELECHAT, _LATENT = (
    ("llama", "telechat3", "mistral"),
    ("telechat", "telechat2"),
    ("deepseek_v3", "telechat3_moe"),
)
_ROPE_KEYS = ("rope_type", "type", "rope_theta")
_YARN_KEYS = (
    *("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor"),
    *("mscale", "mscale_all_dim"),
)
_UNKNOWN = "this key is not known here and may change what the weights compute; if it does not, remove it from the file"


def _unknown(given: Mapping[str, Any], sizes: Sizes) -> list[str]:
    """Return keys of config.json that may change a number, and that the comparison with the recipe does not know."""
    hf = sizes.hf
    width = hf["head_dim"] if sizes.is_dense else hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]
    off = {**_OFF, "query_pre_attn_scalar": width, "attention_multiplier": width**-0.5}
    if not sizes.is_dense:
        off |= {"qk_head_dim": width, "head_dim": hf["qk_rope_head_dim"]}
    known = {*hf, *_UNREAD, "rope_scaling", "rope_parameters", "sliding_window", "layer_types"}
    if sizes.telechat2:
        known |= {*_TELECHAT2, *_NOT_COMPUTED, "base_seqlen", "training_seqlen"}
    else:
        off |= dict.fromkeys(_NOT_COMPUTED, False)
    found = []
    for name, value in given.items():
        if name in known or value is None or value in ("", [], {}):
            continue
        if name not in off:
            found.append(f"{_name(name)} is {_short(value)}: {_UNKNOWN}")
        elif not _same(value, off[name]):
            found.append(f"{name} is {_short(value)}, and the training graph computes {off[name]!r}")
    return found + _windows(given, hf["max_position_embeddings"])


def _windows(given: Mapping[str, Any], length: int) -> list[str]:
    """Return sliding windows that hide tokens within the recipe's `length`; a dense model of MindFormers attends to
    all.
    """
    types, window = given.get("layer_types"), given.get("sliding_window")
    if (window is None and not types) or (type(window) is int and window >= length):
        return []
    right = "and the training graph attends to all tokens before it"
    kinds = types if isinstance(types, list) else [types]
    found = [f"layer_types has {_short(kind)}, {right}" for kind in kinds if kind not in (None, "full_attention")][:1]
    if window is not None and not types and given.get("use_sliding_window") is None:
        found.append(f"sliding_window is {_short(window)}, {right}; use_sliding_window: false says that it is off")
    return found


def _wrong_words(given: Mapping[str, Any], sizes: Sizes) -> list[str]:
    """Return a family of another mathematics, and keys of positions that contradict each other or are not known."""
    found = []
    kind = given.get("model_type")
    latent = _STREAMED if sizes.streams > 1 else _LATENT
    known = _TELECHAT if sizes.telechat2 else _LLAMA if sizes.is_dense else latent
    if kind not in (None, *known) and not (known == _LLAMA and kind in _TELECHAT):  # which is said apart
        found.append(
            f"model_type is {_short(kind)}, whose layers may compute something else than {' and '.join(known)}"
        )
    spellings = [given[name] for name in ("rope_scaling", "rope_parameters") if given.get(name)]
    if not all(isinstance(each, Mapping) for each in spellings):
        return [*found, f"rope_scaling is {_short(spellings[0])}, which is not a mapping"]
    for scaling in spellings:
        kinds = [scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None]
        if kinds[1:] and kinds[0] != kinds[1]:
            found.append(f"rope_scaling.rope_type is {_short(kinds[0])}, but its type {_short(kinds[1])}")
        keys = (*_ROPE_KEYS, *(() if kinds in ([], ["default"]) else _YARN_KEYS))
        found += [
            f"rope_scaling.{_name(name)} is {_short(value)}: {_UNKNOWN}"
            for name, value in scaling.items()
            if name not in keys and value is not None and not (name in _OFF and _same(value, _OFF[name]))
        ]
    if spellings[1:] and _plain(spellings[0]) != _plain(spellings[1]):
        found.append("rope_scaling and rope_parameters differ; remove one of them")
    bases = [each for each in (given.get("rope_theta"), *(one.get("rope_theta") for one in spellings)) if each]
    if any(not _same(each, bases[0]) for each in bases):
        found.append("rope_theta differs from that of rope_parameters; remove one of them")
    return found


def _plain(scaling: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scaling.items() if name != "rope_theta"}


def _name(key: str) -> str:
    return key if key.isidentifier() else _short(key)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# TeleChat2 in Hugging Face's words: Llama with a bias behind attention's output and the MLP's second product.
#
# Names, biases and config.json: Tele-AI's own class (modeling_telechat2.py), vLLM (telechat2.py), and MindFormers'
# inference (models/telechat2). Their index was not read.

# Tele-AI's Telechat2Config -> keyword of LlamaConfig; a head is as wide as hidden_size / n_head
_TELECHAT2 = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
BASE = 10000.0  # of RoPE: fixed in Tele-AI's class, and what vLLM takes where config.json says nothing
_NOT_COMPUTED = ("embed_layernorm", "apply_residual_connection_post_layernorm")


def _telechat2_config(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return config.json of Tele-AI's class; RoPE is not stretched within the length of training."""
    hf, length = sizes.hf, sizes.hf["max_position_embeddings"]
    return {
        "architectures": ["TeleChat2ForCausalLM"],
        "model_type": "telechat",
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": hf["vocab_size"],
        "hidden_size": hf["hidden_size"],
        "num_key_value_heads": hf["num_key_value_heads"],
        **{theirs: hf[name] for theirs, name in _TELECHAT2.items()},
        "rope_theta": hf["rope_theta"],
        "max_position_embeddings": length,
        "base_seqlen": length,
        "training_seqlen": length,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "embed_layernorm": False,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
    }


def _other_family(given: Mapping[str, Any], sizes: Sizes) -> list[str]:
    """Return TeleChat2's weights for a recipe without its biases."""
    if not sizes.is_dense or sizes.telechat2 or not (given.get("model_type") in _TELECHAT or "n_head" in given):
        return []
    return [
        "these are TeleChat2's weights, which have biases, and the recipe has none; write "
        f"{MODEL}.add_bias_linear: True, and {output_biases.KEY}: {{}}"
    ]


def _in_llamas_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return TeleChat2's config.json with LlamaConfig's keywords, and the base of RoPE that its lengths amount to."""
    known = {ours: given[theirs] for theirs, ours in _TELECHAT2.items() if theirs in given}
    heads = known.get("num_attention_heads", given.get("num_attention_heads"))
    base = _get(given, "rope_theta")
    return {
        **given,
        **known,
        "num_key_value_heads": given.get("num_key_value_heads") or heads,
        "rope_theta": _stretched_base(given, BASE if base is None else base, _width(given, heads)),
    }


def _width(given: Mapping[str, Any], heads: Any) -> int:
    """Return how wide a head is; 0 where config.json does not say."""
    hidden = given.get("hidden_size")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else 0


def _stretched_base(given: Mapping[str, Any], base: Any, width: int) -> Any:
    """Return the base of RoPE up to `training_seqlen` tokens, which Tele-AI's class stretches from `base_seqlen`
    (NTK).
    """
    trained, first = given.get("training_seqlen"), given.get("base_seqlen")
    if not isinstance(trained, int) or not isinstance(first, int) or not 0 < first < trained:
        return base
    if width <= 2 or not isinstance(base, float | int):
        return base
    alpha = 2 ** math.ceil(math.log2(trained / first) + 1) - 1
    return base * float(alpha) ** (width / (width - 2))


def _wrong_of_telechat2(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return what TeleChat2's config.json says that the training graph does not compute."""
    wrong = [f"{name} is {given[name]!r}, which is not supported" for name in _NOT_COMPUTED if given.get(name)]
    trained, length = given.get("training_seqlen"), wanted["max_position_embeddings"]
    if isinstance(trained, int) and trained < length:
        wrong.append(
            f"training_seqlen is {trained}, and the recipe's max_position_embeddings {length}: beyond it Tele-AI's "
            "class stretches RoPE by the length of each text"
        )
    return wrong
