"""This module describes the sizes of a transformer and the pattern of its layers, without the words of a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

DENSE, MOE = "dense", "moe"


@dataclass(frozen=True)
class Latent:
    """A `Latent` holds the ranks and head widths of MLA. Queries are not compressed if `query_rank` is 0."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Model:
    """A `Model` holds the sizes of a transformer, in elements.

    Args:
        pattern: for each layer, in order, "dense" or "moe".
        kv_heads: key-value heads (`num_query_groups`).
        head_dim: width of a query, key and value head (without `latent`).
        experts, top_k, expert_ffn, shared_ffn: routed experts, those a token uses, their width, the shared one's width.
        shared_gate: the shared expert's output is multiplied by a learnt gate.
        mtp: multi-token-prediction layers, after the last layer.
        window: tokens that every other layer looks back at; 0: all layers look at everything.
        tied: the output projection is the embedding.
        norm_bias: norms have a bias (LayerNorm).
        bias, qkv_bias: all linear layers outside experts have biases; those that make queries, keys and values do.
        only_outputs: of the former, only attention's output and the MLP's second do (`plugins.output_biases`).
        joint_latent: one matrix makes the compressed queries, keys and values (MindFormers' `mla_qkv_concat`); only
            this form of MLA has biases.
        dropout: masks are kept for backward (GPT-2 and GPT-3).
        biased: experts have biases and a clamped activation, which no kernel fuses (GPT-OSS).
        streams, sinkhorn: residual streams of each layer but MTP's (`plugins.hyper_connections`), and the iterations of
            their mapping; 1 is an ordinary residual.
        node_limit: most nodes that a token's experts lie on; 0: any (DeepSeek-V3: 4).
    """

    pattern: tuple[str, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    gated: bool = True
    tied: bool = False
    latent: Latent | None = None
    qk_norm: bool = False
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    shared_gate: bool = False
    mtp: int = 0
    window: int = 0
    norm_bias: bool = False
    bias: bool = False
    qkv_bias: bool = False
    only_outputs: bool = False
    joint_latent: bool = False
    dropout: bool = False
    biased: bool = False
    node_limit: int = 0
    streams: int = 1
    sinkhorn: int = 0

    @property
    def layers(self) -> int:
        """Return the number of layers without MTP layers."""
        return len(self.pattern)

    @property
    def qk_dim(self) -> int:
        """Return the width of a query head."""
        return self.latent.nope + self.latent.rope if self.latent else self.head_dim

    @property
    def v_dim(self) -> int:
        """Return the width of a value head."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def last_kind(self) -> str:
        """Return the kind of the last layer, which is also the kind of an MTP layer's transformer layer."""
        return self.pattern[-1]

    @property
    def alternates(self) -> bool:
        """Return whether the layers form more than two runs of one kind, so that kinds alternate within the model."""
        return len(list(groupby(self.pattern))) > 2


def pattern_of(layers: int, experts: int = 0, dense: int = 0, frequency: int | Sequence[int] = 1) -> tuple[str, ...]:
    """Return the kind (dense or MoE) of each of `layers` layers. `first_k_dense_replace` and `moe_layer_freq` are read
    as MindFormers reads them.

    Args:
        experts: 0: all layers are dense.
        dense: that many first layers are dense and all others MoE; `frequency` counts only where it is 0.
        frequency: one layer in `frequency` is MoE, beginning with the first; or for each layer 1 (MoE) or 0.

    Raises:
        ValueError: a list of another length.
    """
    if not experts:
        return (DENSE,) * layers
    if dense:
        return tuple(MOE if index >= dense else DENSE for index in range(layers))
    if isinstance(frequency, int):
        return tuple(DENSE if index % frequency else MOE for index in range(layers))
    if len(frequency) != layers:
        raise ValueError(f"moe_layer_freq has {len(frequency)} entries for {layers} layers")
    return tuple(MOE if item else DENSE for item in frequency)


def words_of(pattern: Sequence[str]) -> str:
    """Return a pattern in words, such as ``"1 dense, 53 moe"``."""
    return ", ".join(f"{len(list(alike))} {kind}" for kind, alike in groupby(pattern))


def model_of(fields: Mapping[str, Any]) -> Model:
    """Return the model that MindFormers builds from the fields of a TransformerConfig (see `converter.Built.fields`).

    Raises:
        TypeError, KeyError, ValueError: a field that a size needs is missing, of another kind or no size.
    """

    def number(name: str) -> int:
        value = fields.get(name)
        return value if type(value) is int else 0

    def size(name: str) -> int:
        value = fields[name]
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}")
        return value

    experts = number("num_moe_experts")
    # MindFormers builds the shared expert wherever this width is set, whatever the number says (moe_layer.py)
    shared = number("moe_shared_expert_intermediate_size")
    mla = bool(fields.get("multi_latent_attention"))
    widths = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    return Model(
        pattern=pattern_of(
            size("num_layers"), experts, number("first_k_dense_replace"), fields.get("moe_layer_freq") or 1
        ),
        hidden=size("hidden_size"),
        heads=size("num_attention_heads"),
        kv_heads=size("num_attention_heads") if mla else size("num_query_groups"),
        head_dim=0 if mla else size("kv_channels"),
        ffn=size("ffn_hidden_size"),
        vocab=size("vocab_size"),
        gated=bool(fields.get("gated_linear_unit")),
        tied=fields.get("tie_word_embeddings") is True,
        latent=Latent(number("q_lora_rank"), *(size(name) for name in widths)) if mla else None,
        qk_norm=bool(fields.get("qk_layernorm")),
        experts=experts,
        top_k=size("moe_router_topk") if experts else 0,
        expert_ffn=size("moe_ffn_hidden_size") if experts else 0,
        shared_ffn=shared if experts else 0,
        shared_gate=bool(experts and shared and fields.get("use_shared_expert_gating")),
        mtp=number("mtp_num_layers"),
        norm_bias=fields.get("normalization") == "LayerNorm",
        bias=bool(fields.get("add_bias_linear")),
        qkv_bias=bool(fields.get("add_qkv_bias")),
        only_outputs=bool(fields.get("biases_of_outputs_only")),
        streams=number("residual_streams") or 1,
        sinkhorn=number("sinkhorn_iterations"),
        joint_latent=mla and bool(fields.get("mla_qkv_concat")),
    )
