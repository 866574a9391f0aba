"""This module writes the config.json of a Hugging Face folder, and compares a given one with the recipe's model.

It is what transformers' DeepseekV3ForCausalLM, of a dense model LlamaForCausalLM, and vLLM's TeleChat3ForCausalLM and
TeleChat2ForCausalLM build the model from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, not_json
from plugins.output_biases import plan as output_biases
from plugins.yarn import plan as yarn_plan
from tools.weights.hugging_face_sizes import MODEL, Sizes

FILE = "config.json"
# change no number of a forward pass, or (tied embeddings) are looked at apart
_UNCOMPARED = ("pad_token_id", "max_position_embeddings", "attention_dropout", "tie_word_embeddings")


def config_of(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for a model whose weights are of type `dtype` (float32, bfloat16)."""
    if sizes.telechat2:
        return _telechat2_config(sizes, dtype)
    if sizes.is_dense and stretched_as_telechat3(sizes):
        own: dict[str, Any] = {"architectures": ["TeleChat3ForCausalLM"], "model_type": "telechat3"}
    elif sizes.is_dense:
        own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    else:
        own = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        own["num_nextn_predict_layers"] = sizes.mtp_layers
    return {**own, "torch_dtype": dtype, "use_cache": True, **sizes.hf}


def stretched_as_telechat3(sizes: Sizes) -> bool:
    """Return whether RoPE is stretched as TeleChat3's public weights have it, which Llama's classes cannot compute."""
    scaling = sizes.hf.get("rope_scaling") or {}
    return bool(scaling.get("rope_type") == yarn_plan.ROPE_TYPES[yarn_plan.TELECHAT3])


def check_config(folder: Path, sizes: Sizes) -> bool:
    """Compare the config.json of a Hugging Face folder with the recipe's model. Return whether the folder has a
    config.json.

    Raises:
        CheckpointError: it cannot be read, or describes another model: its weights would fit and compute another thing.
    """
    file = folder / FILE
    if not file.exists():
        return False
    try:
        given = dict(json.loads(file.read_text("utf-8")))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: this is not the configuration of a model: it {not_json(error)}") from None
    wanted = dict(sizes.hf)
    wrong = _other_family(given, sizes)
    if sizes.telechat2:
        wrong += _wrong_of_telechat2(given, wanted)
        given = _in_llamas_words(given)
    if sizes.is_dense:
        wrong += _wrong_positions(given, wanted.pop("rope_scaling"))
    wrong += [
        f"{name} is {_get(given, name)!r}, the recipe's {value!r}"
        for name, value in wanted.items()
        if name not in _UNCOMPARED and _differs(_get(given, name), value)
    ]
    if wrong:
        raise CheckpointError(f"{file}: this file describes another model than the recipe: {'; '.join(wrong)}")
    return True


_KINDS = {name: kind for kind, name in yarn_plan.ROPE_TYPES.items()}


def _wrong_positions(given: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> list[str]:
    """What a dense model's config.json says of its positions that the recipe's `rope_scaling` does not compute."""
    scaling = _get(given, "rope_scaling")
    if scaling is None:
        return [] if wanted is None else [f"rope_scaling is None, the recipe's {wanted!r}"]
    kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, Mapping) else None
    if kind not in _KINDS:
        known = f"the training graph has plain RoPE and, with {yarn_plan.KEY}, {' and '.join(_KINDS)}"
        return [f"rope_scaling is {scaling!r}, the recipe's {wanted!r}; {known}"]
    if wanted is None:
        advice = f"write the recipe's rope_scaling, and {yarn_plan.KEY}: {{attention_factor: {_KINDS[kind]}}}"
        return [f"rope_scaling is {scaling!r}, the recipe's None; {advice}"]
    theirs, ours = (_positions_of(each, given.get("max_position_embeddings")) for each in (scaling, wanted))
    return [
        f"rope_scaling.{name} is {theirs[name]!r}, the recipe's {value!r}"
        for name, value in ours.items()
        if not _same(theirs[name], value)
    ]


def _positions_of(scaling: Mapping[str, Any], longest: Any) -> dict[str, Any]:
    """What decides positions, of YaRN in Hugging Face's words; keys that are not there have their default."""
    factor, attention = scaling.get("factor"), scaling.get("attention_factor")
    kind = _KINDS[scaling.get("rope_type", scaling.get("type", ""))]
    if attention is None and isinstance(factor, (int, float)):
        above, below = (scaling.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
        if kind == yarn_plan.STANDARD and not (above and below):
            above, below = 1.0, 0.0  # transformers reads these two only together
        elif kind == yarn_plan.TELECHAT3:
            below = 0.0  # Tele-AI's code divides by nothing
        attention = yarn_plan.attention_factor(kind, factor, above or 1.0)
        attention /= yarn_plan.attention_factor(kind, factor, below)
    return {
        "factor": factor,
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings", longest),
        "beta_fast": scaling.get("beta_fast", 32.0),
        "beta_slow": scaling.get("beta_slow", 1.0),
        "truncate": scaling.get("truncate", True),
        "attention_factor": attention,
    }


def _same(given: Any, wanted: Any) -> bool:
    """Whether two values are equal, numbers but for their last places in JSON."""
    numbers = all(isinstance(each, (int, float)) for each in (given, wanted))
    return math.isclose(given, wanted, rel_tol=1e-6) if numbers else given == wanted


def tied(folder: Path) -> bool:
    """Return whether config.json says that the output layer and the embedding are one weight."""
    try:
        return bool(json.loads((folder / FILE).read_text("utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _get(given: Mapping[str, Any], name: str) -> Any:
    """transformers 5 keeps the base of RoPE beside its scaling, earlier ones beside the sizes."""
    rope = given.get("rope_parameters") or {}
    if name == "rope_theta":
        return given.get(name, rope.get(name))
    if name == "rope_scaling" and rope:
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return scaling if scaling.get("rope_type", "default") != "default" else None
    return given.get(name)


def _differs(given: Any, wanted: Any) -> bool:
    """What config.json leaves out is transformers' default, which is not known here."""
    if given is None and wanted is not None:
        return False
    if isinstance(given, Mapping) and isinstance(wanted, Mapping):
        kind = given.get("rope_type", given.get("type"))
        return kind != wanted["rope_type"] or any(
            key in given and given[key] != value for key, value in wanted.items() if key != "rope_type"
        )
    return not _same(given, wanted)


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
    """config.json of Tele-AI's class; RoPE is not stretched within the length of training."""
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
    """TeleChat2's weights for a recipe without its biases."""
    if not sizes.is_dense or sizes.telechat2 or not (given.get("model_type") == "telechat" or "n_head" in given):
        return []
    return [
        "these are TeleChat2's weights, which have biases, and the recipe has none; write "
        f"{MODEL}.add_bias_linear: True, and {output_biases.KEY}: {{}}"
    ]


def _in_llamas_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """TeleChat2's config.json with LlamaConfig's keywords, and the base of RoPE that its lengths amount to."""
    known = {ours: given[theirs] for theirs, ours in _TELECHAT2.items() if theirs in given}
    heads = known.get("num_attention_heads", given.get("num_attention_heads"))
    return {
        **given,
        **known,
        "num_key_value_heads": given.get("num_key_value_heads") or heads,
        "rope_theta": _stretched_base(given, _get(given, "rope_theta") or BASE, _width(given, heads)),
    }


def _width(given: Mapping[str, Any], heads: Any) -> int:
    """How wide a head is; 0 where config.json does not say."""
    hidden = given.get("hidden_size")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else 0


def _stretched_base(given: Mapping[str, Any], base: float, width: int) -> float:
    """The base of RoPE up to `training_seqlen` tokens, which Tele-AI's class stretches from `base_seqlen` (NTK)."""
    trained, first = given.get("training_seqlen"), given.get("base_seqlen")
    if not isinstance(trained, int) or not isinstance(first, int) or not 0 < first < trained or width <= 2:
        return base
    alpha = 2 ** math.ceil(math.log2(trained / first) + 1) - 1
    return base * float(alpha) ** (width / (width - 2))


def _wrong_of_telechat2(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What TeleChat2's config.json says that the training graph does not compute."""
    wrong = [f"{name} is {given[name]!r}, which is not supported" for name in _NOT_COMPUTED if given.get(name)]
    trained, length = given.get("training_seqlen"), wanted["max_position_embeddings"]
    if isinstance(trained, int) and trained < length:
        wrong.append(
            f"training_seqlen is {trained}, and the recipe's max_position_embeddings {length}: beyond it Tele-AI's "
            "class stretches RoPE by the length of each text"
        )
    return wrong
