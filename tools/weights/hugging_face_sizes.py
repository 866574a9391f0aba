"""This module describes TeleChat3-MoE in the terms of Hugging Face's DeepseekV3Config, and lists what that class
cannot express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from plugins.errors import CheckpointError, RecipeError, not_json
from plugins.yarn import plan as yarn_plan
from plugins.yarn.plan import Yarn

MODEL = "model.model_config"
LATENT_EPS = 1e-6  # of the two norms inside latent attention in Hugging Face, whatever DeepseekV3Config says


@dataclass(frozen=True)
class Sizes:
    """A `Sizes` holds the sizes of the reference's model.

    Args:
        hf: keyword arguments of DeepseekV3Config; of LlamaConfig for a model that `is_dense`.
        latent_eps: epsilon of the two norms inside latent attention. DeepseekV3Config cannot say it: Hugging Face
            builds them with LATENT_EPS, MindFormers with rms_norm_eps.
        interleaved: whether the rows of a dense `linear_fc1` alternate between gate and up.
        mtp_layers: MTP layers; the class has none, `model.Reference` adds them from its decoder layer.
        mtp_factor: weight of the MTP loss.
        aux_coefficient: of the sequence-wise balance loss (DeepSeek-V3 technical report, section 2.1.2).
        bias_rate: step of the aux-free bias after each training step; 0 leaves the bias unchanged.
    """

    hf: dict[str, Any]
    latent_eps: float
    interleaved: bool
    mtp_layers: int
    mtp_factor: float
    aux_coefficient: float
    bias_rate: float

    def as_json(self) -> dict[str, Any]:
        """Return plain data from which `Sizes(**data)` rebuilds this object."""
        return asdict(self)

    @property
    def layers(self) -> int:
        """Return the number of decoder layers, without MTP."""
        return int(self.hf["num_hidden_layers"])

    def is_moe(self, layer: int) -> bool:
        """Return whether a layer, counted from 0 with the MTP layers last, has experts."""
        return not self.is_dense and layer >= int(self.hf["first_k_dense_replace"])

    @property
    def is_dense(self) -> bool:
        """Return whether the model is Llama: without experts, and with grouped queries."""
        return "n_routed_experts" not in self.hf


# TransformerConfig field -> keyword of DeepseekV3Config
_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "shared_expert_num": "n_shared_experts",
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
    "norm_topk_prob": "norm_topk_prob",
    "first_k_dense_replace": "first_k_dense_replace",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
}


def sizes_of(fields: Mapping[str, Any], bias_updated: bool) -> Sizes:
    """Return the sizes of the reference for a TransformerConfig.

    Args:
        fields: of MindFormers' TransformerConfig, as `tools.schema.converter.convert` finds them.
        bias_updated: whether the recipe's callbacks move the router's bias.

    Raises:
        RecipeError: DeepSeek-V3 in Hugging Face has no such thing.
    """
    for holds, key, right in _rules(fields):
        if not holds:
            raise RecipeError(f"{MODEL}.{key}: the reference (Hugging Face DeepseekV3) {right}")
    groups = fields["moe_router_num_groups"] or 1
    hf = {name: fields[field] for field, name in _SAME.items()}
    hf.update(
        num_key_value_heads=fields["num_attention_heads"],
        n_group=groups,
        topk_group=fields["moe_router_group_topk"] if groups > 1 else 1,
        hidden_act="silu",
        max_position_embeddings=_positions(fields),
        rope_scaling=_rope_scaling(fields),
        rope_interleave=True,  # the weights' layout of both; MindFormers takes even and odd columns apart as well
        attention_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    return Sizes(
        hf=hf,
        latent_eps=fields["layernorm_epsilon"],
        interleaved=bool(fields["use_interleaved_weight_layout_mlp"]),
        mtp_layers=fields["mtp_num_layers"] or 0,
        mtp_factor=fields["mtp_loss_scaling_factor"] or 0.0,
        aux_coefficient=fields["moe_aux_loss_coeff"] or 0.0,
        bias_rate=fields["moe_router_bias_update_rate"] if bias_updated else 0.0,
    )


def _positions(fields: Mapping[str, Any]) -> int:
    """Hugging Face takes YaRN's factor for the attention scale from the ratio of both lengths: make them agree."""
    if fields["position_embedding_type"] == "rope":
        return int(fields["seq_length"])
    return int(fields["max_position_embeddings"] * fields["rotary_scaling_factor"])


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """YaRN in DeepseekV3Config's words; None for plain RoPE."""
    if fields["position_embedding_type"] == "rope":
        return None
    return {
        "rope_type": "yarn",
        "factor": float(fields["rotary_scaling_factor"]),
        "original_max_position_embeddings": fields["max_position_embeddings"],
        "beta_fast": float(fields["beta_fast"]),
        "beta_slow": float(fields["beta_slow"]),
        "mscale": float(fields["mscale"]),
        "mscale_all_dim": float(fields["mscale_all_dim"]),
    }


def _rules(fields: Mapping[str, Any]) -> list[tuple[bool, str, str]]:
    """(holds, key of model_config, what the reference does)."""
    shared = (fields["shared_expert_num"] or 0) * (fields["moe_ffn_hidden_size"] or 0)
    plain = fields["position_embedding_type"] == "rope"
    return [
        (bool(fields["multi_latent_attention"]), "multi_latent_attention", "has latent attention only: True"),
        (bool(fields["num_moe_experts"]), "n_routed_experts", "is a mixture of experts"),
        (bool(fields["qk_layernorm"]), "qk_layernorm", "normalises the latents: True"),
        (not fields["mla_qkv_concat"], "mla_qkv_concat", "is compared by separate projections: False"),
        (not fields["use_shared_expert_gating"], "use_shared_expert_gating", "does not gate the shared expert: False"),
        (not fields["add_bias_linear"], "add_bias_linear", "has no biases: False"),
        (bool(fields["gated_linear_unit"]), "gated_linear_unit", "has gated layers: True"),
        (fields["hidden_act"] in ("swiglu", "fusedswiglu"), "hidden_act", "computes SwiGLU: 'swiglu'"),
        (not fields["hidden_dropout"], "hidden_dropout", "has none: 0.0"),
        (not fields["attention_dropout"], "attention_dropout", "is run without: 0.0"),
        (fields["moe_router_score_function"] == "sigmoid", "moe_router_score_function", "scores by 'sigmoid'"),
        (fields["moe_shared_expert_intermediate_size"] == shared > 0, "moe_shared_expert_intermediate_size",
         f"has n_shared_experts x moe_intermediate_size = {shared}, and at least one shared expert"),
        ((fields["mtp_num_layers"] or 0) <= 1, "num_nextn_predict_layers", "is given at most 1 MTP layer"),
        (not fields["moe_aux_loss_coeff"] or fields["moe_router_load_balancing_type"] == "seq_aux_loss",
         "moe_router_load_balancing_type", "takes only 'seq_aux_loss'"),
        (not fields["moe_z_loss_coeff"], "moe_z_loss_coeff", "has no z-loss: 0.0"),
        (fields["position_embedding_type"] in ("rope", "yarn"), "position_embedding_type", "knows 'rope' and 'yarn'"),
        (not plain or fields["rotary_scaling_factor"] in (None, 1, 1.0), "rotary_scaling_factor",
         "scales nothing without YaRN: 1 (MindFormers would scale the softmax)"),
        (not fields["calculate_per_token_loss"], "calculate_per_token_loss", "means over all tokens: False"),
    ]  # fmt: skip


# config.json: what transformers' DeepseekV3ForCausalLM, of a dense model LlamaForCausalLM, builds the model from.

FILE = "config.json"
# change no number of a forward pass, or (tied embeddings) are looked at apart
_UNCOMPARED = ("pad_token_id", "max_position_embeddings", "attention_dropout", "tie_word_embeddings")


def config_of(sizes: Sizes, dtype: str) -> dict[str, Any]:
    """Return the content of config.json for a model whose weights are of type `dtype` (float32, bfloat16)."""
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
    """Compare the config.json of a Hugging Face folder with the recipe's model. Return whether the file exists.

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
    wanted = {name: value for name, value in config_of(sizes, "").items() if name in sizes.hf}
    wrong = _wrong_positions(given, wanted.pop("rope_scaling")) if sizes.is_dense else []
    wrong += [
        f"{name} is {_get(given, name)!r}, the recipe's {value!r}"
        for name, value in wanted.items()
        if name not in _UNCOMPARED and _differs(_get(given, name), value)
    ]
    if wrong:
        raise CheckpointError(f"{file}: this is another model than the recipe's: {'; '.join(wrong)}")
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
    return bool(given != wanted)


# TeleChat3 36B and its like in Hugging Face's words: dense layers of grouped-query attention, which are Llama's.
#
# Names and mathematics of the public weights: Tele-AI's own converter (github.com/Tele-AI/TeleChat3 at 8a4b6d2,
# mindformers_telechat3/research/telechat3/convert_weight.py), vLLM (pull request 38510: `TeleChat3ForCausalLM` is
# served by its Llama) and mlx-lm (pull request 773, which runs TeleChat3-36B-Thinking under these names, with
# 36,239.579 million parameters). Their index was not read.

# TransformerConfig field -> keyword of LlamaConfig
_DENSE_SAME = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "rotary_base": "rope_theta",
    "max_position_embeddings": "max_position_embeddings",
}


def dense_sizes_of(fields: Mapping[str, Any], yarn: Yarn | None) -> Sizes:
    """Return the sizes of a TransformerConfig that has neither experts nor latent attention.

    Args:
        fields: of MindFormers' TransformerConfig, as `tools.schema.converter.convert` finds them.
        yarn: what `plugins.yarn` makes of it; None for plain RoPE.

    Raises:
        RecipeError: Llama in Hugging Face has no such thing.
    """
    for holds, key, right in _dense_rules(fields, yarn):
        if not holds:
            raise RecipeError(f"{MODEL}.{key}: Hugging Face's Llama, which TeleChat3's dense models are, {right}")
    hf = {name: fields[field] for field, name in _DENSE_SAME.items()}
    if yarn:  # MindFormers' field has the length before the extension, Hugging Face's the length after it
        hf["max_position_embeddings"] = int(yarn.factor * yarn.original)
    hf.update(
        hidden_act="silu",
        rope_scaling=_dense_rope_scaling(yarn),
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    interleaved = bool(fields["use_interleaved_weight_layout_mlp"])
    return Sizes(hf, fields["layernorm_epsilon"], interleaved, 0, 0.0, 0.0, 0.0)


def _dense_rope_scaling(yarn: Yarn | None) -> dict[str, Any] | None:
    if yarn is None:
        return None
    return {
        "rope_type": yarn_plan.ROPE_TYPES[yarn.kind],
        "factor": yarn.factor,
        "original_max_position_embeddings": yarn.original,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }


def _dense_rules(fields: Mapping[str, Any], yarn: Yarn | None) -> list[tuple[bool, str, str]]:
    """(holds, key of model_config, what Llama does)."""
    return [
        (not fields["add_bias_linear"] and not fields["add_qkv_bias"], "add_bias_linear", "has no biases: False"),
        (bool(fields["gated_linear_unit"]), "gated_linear_unit", "has gated layers: True"),
        (fields["hidden_act"] in ("swiglu", "fusedswiglu"), "hidden_act", "computes SwiGLU: 'swiglu'"),
        (not fields["qk_layernorm"], "qk_layernorm", "does not normalise queries and keys: False"),
        (fields["normalization"] == "RMSNorm", "normalization", "has RMSNorm"),
        (fields["rotary_cos_format"] == "rotate_half", "rotary_cos_format", "turns halves of a head: 'rotate_half'"),
        (not fields["mtp_num_layers"], "num_nextn_predict_layers", "has no MTP layer: 0"),
        (fields["position_embedding_type"] in ("rope", "yarn"), "position_embedding_type",
         "is converted with 'rope' or 'yarn'"),
        ((fields["position_embedding_type"] == "yarn") == bool(yarn), "position_embedding_type",
         f"has YaRN ('yarn') where {yarn_plan.KEY} builds it, and only there"),
        (yarn is None or yarn.mscale == 1, "rope_scaling.mscale", "has no word for it beside YaRN's own factor: 1"),
        (not fields["use_contiguous_weight_layout_attention"], "use_contiguous_weight_layout_attention",
         "is converted from a group's query, key and value side by side: False"),
        (not fields["hidden_dropout"] and not fields["attention_dropout"], "hidden_dropout", "is run without: 0.0"),
    ]  # fmt: skip
