"""How many weights a model has, in closed form, by its parts and by pipeline stage.

Counts are of trainable numbers, exact for the models of MindFormers' graph mode (biases follow `add_bias_linear` and
`add_qkv_bias`; the router's aux-free bias is no weight). Letters: h hidden size, n heads, f MLP width, E experts.

    MLA        q: h r + r + r n (d_nope + d_rope)    (without q_lora_rank: h n (d_nope + d_rope))
               kv: h (c + d_rope) + c + c n (d_nope + d_v);    output: n d_v h
    attention  h n d + 2 h g d + n d h               (g key-value heads of width d)
    MLP        3 h f gated, 2 h f plain
    MoE        E experts of 3 h f_e, the shared expert 3 h f_s, the router h E
    layer      attention + MLP or MoE + two norms of h
    MTP        one layer of the last kind + 2 h h (projection) + 3 h (norms)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parts:
    """Weights of one instance of each part, and how many layers there are of each kind."""

    embedding: int
    head: int  # output projection and the last norm
    dense_layer: int
    moe_layer: int
    active_moe_layer: int  # what one token uses of it
    mtp: int
    active_mtp: int
    pattern: tuple[bool, ...]  # for each layer: whether it is MoE

    @property
    def total(self) -> int:
        """All weights."""
        return self.embedding + self.head + self.mtp + sum(self.layer(index) for index in range(len(self.pattern)))

    @property
    def active(self) -> int:
        """Weights that one token passes through, embedding included, MTP not: the A in a name such as 105B-A4.7B."""
        moe = sum(self.pattern)
        layers = moe * self.active_moe_layer + (len(self.pattern) - moe) * self.dense_layer
        return self.embedding + self.head + layers

    def layer(self, index: int) -> int:
        """Weights of one layer."""
        return self.moe_layer if self.pattern[index] else self.dense_layer

    def per_stage(self, layers: list[list[int]]) -> list[int]:
        """Weights on each stage (all its devices together), from layers [chunk][stage].

        The embedding is on the first stage, head and MTP on the last. With an MTP layer the last stage also looks
        tokens up in the embedding, which MindFormers shares between the stages: it is counted once.
        """
        stages, first = [0] * len(layers[0]), 0
        for row in layers:
            for stage, count in enumerate(row):
                stages[stage] += sum(self.layer(index) for index in range(first, first + count))
                first += count
        stages[0] += self.embedding
        stages[-1] += self.head + self.mtp
        return stages


def parts_of(fields: Mapping[str, Any]) -> Parts:
    """Count from the fields of a TransformerConfig (see `converter.Built.fields`).

    Raises:
        TypeError, KeyError: a field that the formula needs is missing or no number.
    """
    hidden, vocabulary = fields["hidden_size"], fields["vocab_size"]
    norm = hidden * (2 if fields.get("normalization") == "LayerNorm" else 1)
    experts = fields.get("num_moe_experts") or 0
    attention = _attention(fields)
    dense = attention + 2 * norm + _mlp(hidden, fields["ffn_hidden_size"], fields)
    moe = active = dense
    if experts:
        one = _mlp(hidden, fields["moe_ffn_hidden_size"], fields)
        shared = (fields.get("moe_shared_expert_intermediate_size") or 0) if fields.get("shared_expert_num") else 0
        common = attention + 2 * norm + hidden * experts + _mlp(hidden, shared, fields)
        common += hidden if fields.get("use_shared_expert_gating") and shared else 0
        moe, active = common + experts * one, common + fields["moe_router_topk"] * one
    pattern = _pattern(fields, bool(experts))
    last, used = (moe, active) if pattern and pattern[-1] else (dense, dense)
    depth = fields.get("mtp_num_layers") or 0
    extra = 2 * hidden * hidden + 3 * norm
    head = norm + vocabulary * hidden
    return Parts(vocabulary * hidden, head, dense, moe, active, depth * (last + extra), depth * (used + extra), pattern)


def _pattern(fields: Mapping[str, Any], experts: bool) -> tuple[bool, ...]:
    layers, frequency = fields["num_layers"], fields.get("moe_layer_freq") or 1
    dense = fields.get("first_k_dense_replace") or 0
    if not experts:
        return (False,) * layers
    if dense:
        return tuple(index >= dense for index in range(layers))
    if isinstance(frequency, list):
        return tuple(bool(item) for item in frequency)
    return tuple(index % frequency == 0 for index in range(layers))


def _mlp(hidden: int, width: int, fields: Mapping[str, Any]) -> int:
    gates = 2 if fields.get("gated_linear_unit") else 1
    bias = gates * width + hidden if fields.get("add_bias_linear") else 0
    if fields.get("add_mlp_fc2_bias_linear") and not fields.get("add_bias_linear"):
        bias = hidden
    return (gates + 1) * hidden * width + bias


def _attention(fields: Mapping[str, Any]) -> int:
    return _mla(fields) if fields.get("multi_latent_attention") else _grouped(fields)


def _mla(fields: Mapping[str, Any]) -> int:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    nope, rope, value = fields["qk_head_dim"], fields["qk_pos_emb_head_dim"], fields["v_head_dim"]
    rank, latent = fields.get("q_lora_rank") or 0, fields["kv_lora_rank"]
    norms = bool(fields.get("qk_layernorm"))
    query = hidden * rank + norms * rank + rank * heads * (nope + rope) if rank else hidden * heads * (nope + rope)
    key_value = hidden * (latent + rope) + norms * latent + latent * heads * (nope + value)
    return query + key_value + heads * value * hidden


def _grouped(fields: Mapping[str, Any]) -> int:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    width, groups = fields["kv_channels"], fields["num_query_groups"]
    projected = (heads + 2 * groups) * width
    bias = projected if fields.get("add_qkv_bias") or fields.get("add_bias_linear") else 0
    bias += hidden if fields.get("add_bias_linear") else 0
    norms = 2 * width if fields.get("qk_layernorm") else 0
    return hidden * projected + heads * width * hidden + bias + norms
