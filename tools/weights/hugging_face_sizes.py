"""This module describes the model of a recipe with the fields of a Hugging Face configuration: DeepseekV3Config for
TeleChat3-MoE, and LlamaConfig for dense models. The module also lists the settings that Hugging Face's classes cannot
express.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.hyper_connections import plan as hyper_connections
from plugins.output_biases import plan as output_biases
from plugins.yarn import plan as yarn_plan
from plugins.yarn.plan import Yarn
from tools.schema.converter import ONLY_OUTPUTS, SINKHORN, STREAMS

MODEL = "model.model_config"
LATENT_EPS = 1e-6  # of the two norms inside latent attention in Hugging Face, whatever DeepseekV3Config says


@dataclass(frozen=True)
class Sizes:
    """A `Sizes` holds the sizes and settings of a model in Hugging Face's terms.

    Args:
        hf: the keyword arguments of DeepseekV3Config, or of LlamaConfig for a model that `is_dense`.
        latent_eps: the epsilon of the two norms inside latent attention. DeepseekV3Config cannot express it: Hugging
            Face builds these norms with LATENT_EPS, MindFormers with rms_norm_eps.
        interleaved: whether the rows of a dense `linear_fc1` alternate between gate and up.
        mtp_layers: the number of MTP layers; Hugging Face's class has no MTP layers, and the reference model adds them.
        mtp_factor: the weight of the MTP loss.
        aux_coefficient: the coefficient of the sequence-wise balance loss (DeepSeek-V3 technical report, section
            2.1.2).
        bias_rate: the amount by which aux-free balancing moves a router's bias after each training step; 0 leaves the
            bias unchanged.
        telechat2: whether the model is TeleChat2: Llama with biases on the outputs of attention and of the MLP, under
            TeleChat2's names of weights; `hf` nevertheless holds arguments of LlamaConfig.
    """

    hf: dict[str, Any]
    latent_eps: float
    interleaved: bool
    mtp_layers: int
    mtp_factor: float
    aux_coefficient: float
    bias_rate: float
    telechat2: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the fields as a dict from which `Sizes(**data)` rebuilds this object. The field `telechat2` is left
        out if it is False, because golden files keep this dict as text.
        """
        return {name: value for name, value in asdict(self).items() if name != "telechat2" or value}

    @property
    def layers(self) -> int:
        """Return the number of decoder layers, not counting the layers of MTP."""
        return int(self.hf["num_hidden_layers"])

    def is_moe(self, layer: int) -> bool:
        """Return whether the layer with this number has experts; layers are counted from 0, and the MTP layers come
        last.
        """
        return not self.is_dense and layer >= int(self.hf["first_k_dense_replace"])

    @property
    def streams(self) -> int:
        """Return the number of residual streams of the model: 1, or several with hyper-connections (as in Xing4.0)."""
        return int(self.hf.get("hc_mult", 1))

    @property
    def is_dense(self) -> bool:
        """Return whether the model has Llama's architecture, without experts and with grouped-query attention."""
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
    """Return the sizes of the Hugging Face model that corresponds to a TransformerConfig of MindFormers with the given
    fields.

    Args:
        fields: the fields of MindFormers' TransformerConfig, as `tools.schema.converter.convert` finds them.
        bias_updated: whether the recipe's callbacks update the router's bias.

    Raises:
        RecipeError: Hugging Face's DeepSeek-V3 classes cannot express a setting of the model.
    """
    for holds, key, right in _rules(fields):
        if not holds:
            raise RecipeError(f"{MODEL}.{key}: this value cannot be used, because Hugging Face's DeepseekV3 {right}")
    groups = fields["moe_router_num_groups"] or 1
    hf = {name: fields[field] for field, name in _SAME.items()} | _streams(fields)
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
    """Return the number of positions; Hugging Face takes YaRN's factor for the attention scale from the ratio of two
    lengths, which must agree.
    """
    if fields["position_embedding_type"] == "rope":
        return int(fields["seq_length"])
    return int(fields["max_position_embeddings"] * fields["rotary_scaling_factor"])


def _rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return YaRN in DeepseekV3Config's words; None for plain RoPE."""
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


def one_stream(fields: Mapping[str, Any], what: str) -> None:
    """Raise RecipeError if a recipe's model has several residual streams, because `what` (a model of Hugging Face) has
    only one residual stream.

    Raises:
        RecipeError: the recipe's model has several residual streams.
    """
    if (streams := fields.get(STREAMS, 1)) > 1:
        raise RecipeError(
            f"plugins.hyper_connections.streams: {streams} residual streams cannot be used, because {what} has one"
        )


def _streams(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of Xing4.0's configuration for its residual streams; none for one stream."""
    if fields.get(STREAMS, 1) == 1:
        return {}
    return {
        "hc_mult": fields[STREAMS],
        "hc_sinkhorn_iters": fields[SINKHORN],
        "hc_eps": hyper_connections.EPSILON,
        "mhc_h_res_clamp_min": -hyper_connections.CLIP,
        "mhc_h_res_clamp_max": hyper_connections.CLIP,
    }


def _rules(fields: Mapping[str, Any]) -> list[tuple[bool, str, str]]:
    """Return (holds, key of model_config, what the reference does)."""
    shared = (fields["shared_expert_num"] or 0) * (fields["moe_ffn_hidden_size"] or 0)
    plain = fields["position_embedding_type"] == "rope"
    layers, dense = fields["num_layers"], fields["first_k_dense_replace"] or 0
    return [
        (bool(fields["multi_latent_attention"]), "multi_latent_attention", "has latent attention only: True"),
        (bool(fields["num_moe_experts"]), "n_routed_experts", "is a mixture of experts"),
        (bool(fields["qk_layernorm"]), "qk_layernorm", "normalises the latents: True"),
        (not fields["mla_qkv_concat"], "mla_qkv_concat", "is compared with separate projections: False"),
        (not fields["use_shared_expert_gating"], "use_shared_expert_gating", "does not gate the shared expert: False"),
        (not fields["add_bias_linear"], "add_bias_linear", "has no biases: False"),
        (bool(fields["gated_linear_unit"]), "gated_linear_unit", "has gated layers: True"),
        (fields["hidden_act"] in ("swiglu", "fusedswiglu"), "hidden_act", "computes SwiGLU: 'swiglu'"),
        (not fields["hidden_dropout"], "hidden_dropout", "has no dropout: 0.0"),
        (not fields["attention_dropout"], "attention_dropout", "is run without dropout: 0.0"),
        (fields["moe_router_score_function"] == "sigmoid", "moe_router_score_function", "scores by 'sigmoid'"),
        (fields["moe_shared_expert_intermediate_size"] == shared > 0, "moe_shared_expert_intermediate_size",
         f"has n_shared_experts x moe_intermediate_size = {shared}, and at least one shared expert"),
        (fields["moe_layer_freq"] in (1, [0] * dense + [1] * (layers - dense)), "moe_layer_freq",
         "has experts in every layer after the first dense ones: 1"),
        ((fields["mtp_num_layers"] or 0) <= 1, "num_nextn_predict_layers", "is given at most 1 MTP layer"),
        (not fields["mtp_num_layers"] or dense < layers, "first_k_dense_replace",
         f"has experts in its MTP layer: at most {layers - 1}"),
        (not fields["moe_aux_loss_coeff"] or fields["moe_router_load_balancing_type"] == "seq_aux_loss",
         "moe_router_load_balancing_type", "takes only 'seq_aux_loss'"),
        (not fields["moe_z_loss_coeff"], "moe_z_loss_coeff", "has no z-loss: 0.0"),
        (fields["position_embedding_type"] in ("rope", "yarn"), "position_embedding_type", "knows 'rope' and 'yarn'"),
        (not plain or fields["rotary_scaling_factor"] in (None, 1, 1.0), "rotary_scaling_factor",
         "scales nothing without YaRN: 1 (MindFormers would scale the softmax)"),
        (not fields["calculate_per_token_loss"], "calculate_per_token_loss",
         "averages the loss over all tokens: False"),
        *_attention_rules(fields),
    ]  # fmt: skip


def _attention_rules(fields: Mapping[str, Any]) -> list[tuple[bool, str, str]]:
    """Return (holds, key of model_config, what every class of Hugging Face here does): what leaves no trace in the
    weights.
    """
    return [
        (fields["normalization"] == "RMSNorm", "normalization", "has RMSNorm"),
        (not fields["window_size"], "window_size", "attends to all tokens: leave it out"),
        (not fields["nope_layer_interval"], "nope_layer_interval", "has RoPE in every layer: leave it out"),
        (not fields["use_alibi_mask"], "use_alibi_mask", "has RoPE only: False"),
        (not fields["rotary_interleaved"], "rotary_interleaved", "has no such layout: False"),
        (not fields["apply_residual_connection_post_layernorm"], "apply_residual_connection_post_layernorm",
         "adds what came before the norm: False"),
        (fields["rotary_seq_len_interpolation_factor"] in (None, 1), "rotary_seq_len_interpolation_factor",
         "is converted without: leave it out"),
    ]  # fmt: skip


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
    """Return the sizes of the Hugging Face model for a TransformerConfig with neither experts nor latent attention: a
    Llama model, or a TeleChat2 model if linear layers have biases.

    Args:
        fields: the fields of MindFormers' TransformerConfig, as `tools.schema.converter.convert` finds them.
        yarn: the scaling of RoPE that `plugins.yarn` sets; None for plain RoPE.

    Raises:
        RecipeError: the Hugging Face classes of Llama (or TeleChat2) cannot express a setting of the model.
    """
    telechat2 = bool(fields["add_bias_linear"] and fields[ONLY_OUTPUTS])
    named = "TeleChat2" if telechat2 else "Llama, which TeleChat3's dense models are,"
    one_stream(fields, "Hugging Face's Llama")
    for holds, key, right in [*_dense_rules(fields, yarn), *(_telechat2_rules(fields, yarn) if telechat2 else ())]:
        if not holds:
            raise RecipeError(f"{MODEL}.{key}: this value cannot be converted, because Hugging Face's {named} {right}")
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
    return Sizes(hf, fields["layernorm_epsilon"], interleaved, 0, 0.0, 0.0, 0.0, telechat2)


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
    """Return (holds, key of model_config, what Llama does)."""
    return [
        (not fields["add_bias_linear"] or fields[ONLY_OUTPUTS], "add_bias_linear",
         f"has no biases: False (or TeleChat2's: {output_biases.KEY}: {{}})"),
        (not fields["add_qkv_bias"], "add_qkv_bias", "has no biases there: False"),
        (bool(fields["gated_linear_unit"]), "gated_linear_unit", "has gated layers: True"),
        (fields["hidden_act"] in ("swiglu", "fusedswiglu"), "hidden_act", "computes SwiGLU: 'swiglu'"),
        (not fields["qk_layernorm"], "qk_layernorm", "does not normalise queries and keys: False"),
        (fields["rotary_cos_format"] == "rotate_half", "rotary_cos_format", "turns halves of a head: 'rotate_half'"),
        (not fields["mtp_num_layers"], "num_nextn_predict_layers", "has no MTP layer: 0"),
        (fields["position_embedding_type"] in ("rope", "yarn"), "position_embedding_type",
         "is converted with 'rope' or 'yarn'"),
        ((fields["position_embedding_type"] == "yarn") == bool(yarn), "position_embedding_type",
         f"has YaRN ('yarn') where {yarn_plan.KEY} builds it, and only there"),
        (yarn is None or yarn.mscale == 1, "rope_scaling.mscale", "has no word for it beside YaRN's own factor: 1"),
        (not fields["use_contiguous_weight_layout_attention"], "use_contiguous_weight_layout_attention",
         "is converted from a group's query, key and value side by side: False"),
        (not fields["hidden_dropout"] and not fields["attention_dropout"], "hidden_dropout",
         "is run without dropout: 0.0"),
        *_attention_rules(fields),
    ]  # fmt: skip


def _telechat2_rules(fields: Mapping[str, Any], yarn: Yarn | None) -> list[tuple[bool, str, str]]:
    """Return (holds, key of model_config, what TeleChat2 does)."""
    width = fields["num_attention_heads"] * fields["kv_channels"]
    return [
        (yarn is None, "position_embedding_type", "has only plain RoPE; write 'rope'"),
        (width == fields["hidden_size"], "head_dim", f"has heads of hidden_size / heads: {fields['hidden_size']} / "
         f"{fields['num_attention_heads']}"),
    ]  # fmt: skip
