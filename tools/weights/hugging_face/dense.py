"""TeleChat3 36B and its like in Hugging Face's words: dense layers of grouped-query attention, which are Llama's.

Names and mathematics of the public weights: Tele-AI's own converter (github.com/Tele-AI/TeleChat3 at 8a4b6d2,
mindformers_telechat3/research/telechat3/convert_weight.py), vLLM (pull request 38510: `TeleChat3ForCausalLM` is served
by its Llama) and mlx-lm (pull request 773, which runs TeleChat3-36B-Thinking under these names, with 36,239.579 million
parameters). Their index was not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.errors import RecipeError
from tools.weights.hugging_face.sizes import MODEL, Sizes

# TransformerConfig field -> keyword of LlamaConfig
_SAME = {
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


def dense_sizes_of(fields: Mapping[str, Any]) -> Sizes:
    """The model of a TransformerConfig without experts and latent attention.

    Args:
        fields: of MindFormers' TransformerConfig, as `tools.schema.converter.convert` finds them.

    Raises:
        RecipeError: Llama in Hugging Face has no such thing.
    """
    for holds, key, right in _rules(fields):
        if not holds:
            raise RecipeError(f"{MODEL}.{key}: Hugging Face's Llama, which TeleChat3's dense models are, {right}")
    hf = {name: fields[field] for field, name in _SAME.items()}
    hf.update(
        hidden_act="silu",
        rope_scaling=None,
        attention_bias=False,
        mlp_bias=False,
        attention_dropout=0.0,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    interleaved = bool(fields["use_interleaved_weight_layout_mlp"])
    return Sizes(hf, fields["layernorm_epsilon"], interleaved, 0, 0.0, 0.0, 0.0)


def _rules(fields: Mapping[str, Any]) -> list[tuple[bool, str, str]]:
    """(holds, key of model_config, what Llama does)."""
    return [
        (not fields["add_bias_linear"] and not fields["add_qkv_bias"], "add_bias_linear", "has no biases: False"),
        (bool(fields["gated_linear_unit"]), "gated_linear_unit", "has gated layers: True"),
        (fields["hidden_act"] in ("swiglu", "fusedswiglu"), "hidden_act", "computes SwiGLU: 'swiglu'"),
        (not fields["qk_layernorm"], "qk_layernorm", "does not normalise queries and keys: False"),
        (fields["normalization"] == "RMSNorm", "normalization", "has RMSNorm"),
        (fields["rotary_cos_format"] == "rotate_half", "rotary_cos_format", "turns halves of a head: 'rotate_half'"),
        (not fields["mtp_num_layers"], "num_nextn_predict_layers", "has no MTP layer: 0"),
        (fields["position_embedding_type"] == "rope", "position_embedding_type",
         "is converted with plain RoPE ('rope'): MindFormers cannot build these models with YaRN"),
        (not fields["use_contiguous_weight_layout_attention"], "use_contiguous_weight_layout_attention",
         "is converted from a group's query, key and value side by side: False"),
        (not fields["hidden_dropout"] and not fields["attention_dropout"], "hidden_dropout", "is run without: 0.0"),
    ]  # fmt: skip
