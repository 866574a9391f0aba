"""The cost of a sample from a recipe's model: `model.model_config` -> `Cost`. Pure.

Letters: h hidden size, n heads, f MLP width. Multiplications of one token, without those of attention itself:

    MLA        q: h r + r n (d_nope + d_rope), or h n (d_nope + d_rope) without q_lora_rank;
               kv: h (c + d_rope) + c n (d_nope + d_v);    output: n d_v h
    attention  h n d + 2 h g d + n d h    (g key-value heads of width d)
    MLP        3 h f gated, 2 h f plain
    MoE        top-k experts and the shared one, each an MLP, and the router h E
    head       h V, once more for each multi-token-prediction (MTP) layer, which also projects 2 h to h
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plugins.attention_balance.samples.cost import Cost, cost_of_model
from plugins.errors import RecipeError


def model_cost(model: Mapping[str, Any], recompute: Any = False) -> Cost:
    """FLOPs of training for `model.model_config`.

    Args:
        model: keys as in recipes; a head dimension may have either of its two spellings.
        recompute: `recompute_config.recompute`: True, False, or numbers of layers by stage. Selective recompute
            is left out: it repeats cheap operators.

    Raises:
        RecipeError: a size is missing.
    """
    layers, extra = _size(model, "num_hidden_layers"), _count(model, "num_nextn_predict_layers")
    heads = _size(model, "num_attention_heads")
    if model.get("multi_latent_attention"):
        nope, rope = _size(model, "qk_head_dim", "qk_nope_head_dim"), _rope(model)
        qk_dim, v_dim = nope + rope, _size(model, "v_head_dim")
    else:
        qk_dim = v_dim = _count(model, "head_dim") or _size(model, "hidden_size") // heads
    return cost_of_model(
        layers=layers + extra,
        heads=heads,
        qk_dim=qk_dim,
        v_dim=v_dim,
        linear_parameters=_linear(model, layers, extra),
        recomputed=recomputed_share(model, recompute),
    )


def recomputed_share(model: Mapping[str, Any], recompute: Any) -> float:
    """Share of the forward pass that `recompute_config.recompute` repeats, 0 to 1; see `model_cost`."""
    if not isinstance(recompute, (list, tuple)):
        return float(bool(recompute))
    chunks, layers = _flat(recompute), _size(model, "num_hidden_layers")
    # True is a whole chunk, taken here as an equal part of the model
    repeated = sum(layers / len(chunks) if chunk is True else chunk for chunk in chunks if isinstance(chunk, int))
    return min(repeated / layers, 1.0)


def _flat(rows: Any) -> list[Any]:
    return [item for row in rows for item in _flat(row)] if isinstance(rows, (list, tuple)) else [rows]


def _linear(model: Mapping[str, Any], layers: int, extra: int) -> int:
    """Multiplications of one token, see the module."""
    hidden, head = _size(model, "hidden_size"), _size(model, "hidden_size") * _size(model, "vocab_size")
    attention = _mla(model) if model.get("multi_latent_attention") else _grouped(model)
    experts = _count(model, "n_routed_experts")
    dense = _count(model, "first_k_dense_replace") if experts else layers
    sparse = _moe(model, hidden, experts) if experts else 0
    plain = _mlp(model, _size(model, "intermediate_size")) if dense else 0
    last = sparse if experts else plain
    blocks = (layers + extra) * attention + dense * plain + (layers - dense) * sparse + extra * last
    return blocks + (1 + extra) * head + extra * 2 * hidden * hidden


def _moe(model: Mapping[str, Any], hidden: int, experts: int) -> int:
    shared = _count(model, "n_shared_experts")
    width = _size(model, "num_experts_per_tok") * _size(model, "moe_intermediate_size")
    if shared:
        width += _count(model, "moe_shared_expert_intermediate_size") or shared * _size(model, "moe_intermediate_size")
    return _mlp(model, width) + hidden * experts


def _mlp(model: Mapping[str, Any], width: int) -> int:
    return (3 if model.get("gated_linear_unit") else 2) * _size(model, "hidden_size") * width


def _mla(model: Mapping[str, Any]) -> int:
    hidden, heads = _size(model, "hidden_size"), _size(model, "num_attention_heads")
    nope, rope, value = _size(model, "qk_head_dim", "qk_nope_head_dim"), _rope(model), _size(model, "v_head_dim")
    rank, latent = _count(model, "q_lora_rank"), _size(model, "kv_lora_rank")
    query = (hidden * rank + rank * heads * (nope + rope)) if rank else hidden * heads * (nope + rope)
    return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _rope(model: Mapping[str, Any]) -> int:
    return _size(model, "qk_pos_emb_head_dim", "qk_rope_head_dim")


def _grouped(model: Mapping[str, Any]) -> int:
    hidden, heads = _size(model, "hidden_size"), _size(model, "num_attention_heads")
    width = _count(model, "head_dim") or hidden // heads
    groups = _count(model, "num_key_value_heads") or heads
    return 2 * hidden * (heads + groups) * width


def _count(model: Mapping[str, Any], name: str) -> int:
    """A number that may be left out; 0 then."""
    value = model.get(name)
    return value if type(value) is int else 0


def _size(model: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that the model writes."""
    for name in names:
        if _count(model, name) > 0:
            return _count(model, name)
    raise RecipeError(
        f"model.model_config.{names[0]}: plugins.attention_balance computes the cost of a sample from it; write it, "
        "or write measured per_pair and per_token under the plugin"
    )
