"""This module describes a transformer independently of a framework: its sizes, the kinds of its layers, the weights of
each layer and stage, and the FLOPs of a token.

Kinds of layers: "embedding", "dense", "moe", "mtp" (a layer of the last kind, its projection and three norms) and
"head" (last norm and output projection). Letters: h hidden, n heads.

Counts are those of MindFormers' graph mode, to the last number; the router's aux-free bias is not a weight.

Model FLOPs are what a token's forward and backward multiply, with nothing recomputed: exact integers.

A weight that multiplies costs 2 FLOPs per token forward and twice that backward. Attention costs, per layer and head,
2 (d_qk + d_v) FLOPs forward for each pair of tokens that attend, and twice that backward; causal attention over a
sequence has seq / 2 such pairs a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from plugins.hyper_connections import plan as hyper_connections

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
        node_limit: the most nodes (or groups, see `groups`) on which a token's experts lie; 0: no limit
            (DeepSeek-V3: 4).
        groups: the number of groups of consecutive experts, which `node_limit` counts; 0: it counts nodes.
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
    groups: int = 0
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

    def nodes_of_token(self, nodes: int) -> int:
        """Return the largest number of nodes on which a token's experts can lie, if `nodes` nodes share the experts."""
        if not self.node_limit:
            return nodes
        touched = 1
        if self.groups and self.groups % nodes:  # a group may lie across the border of two nodes
            touched = -(-nodes // self.groups) + bool(nodes % self.groups)
        return min(nodes, touched * self.node_limit)

    @property
    def alternates(self) -> bool:
        """Return whether dense and MoE layers alternate within the model (more than two runs of equal layers)."""
        return len(list(groupby(self.pattern))) > 2


def pattern_of(layers: int, experts: int = 0, dense: int = 0, frequency: int | Sequence[int] = 1) -> tuple[str, ...]:
    """Return the kind (dense or MoE) of each of the model's layers, as MindFormers derives it from the keys
    `first_k_dense_replace` and `moe_layer_freq`.

    Args:
        experts: 0: all layers are dense.
        dense: the number of first layers that are dense, while all others are MoE; `frequency` counts only where it is
            0.
        frequency: one layer in `frequency` is MoE, beginning with the first; or for each layer 1 (MoE) or 0.

    Raises:
        ValueError: a list has another length.
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
    """Return the numbers of a model's dense and MoE layers in words, such as ``"1 dense, 53 moe"``."""
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
    groups, chosen = number("moe_router_num_groups"), number("moe_router_group_topk")
    limited = experts > 0 and 0 < chosen < groups
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
        node_limit=chosen if limited else 0,
        groups=groups if limited else 0,
        norm_bias=fields.get("normalization") == "LayerNorm",
        bias=bool(fields.get("add_bias_linear")),
        qkv_bias=bool(fields.get("add_qkv_bias")),
        only_outputs=bool(fields.get("biases_of_outputs_only")),
        streams=number("residual_streams") or 1,
        sinkhorn=number("sinkhorn_iterations"),
        joint_latent=mla and bool(fields.get("mla_qkv_concat")),
    )


CONNECTIONS = "hyper-connections"
# weights of no layer -> MindFormers' names of them, without ".weight"
ENDS = {"embedding": "embedding.word_embeddings", "output": "output_layer", "final_norm": "decoder.final_layernorm"}
KINDS = ("embedding", "dense", "moe", "mtp", "head")


@dataclass(frozen=True)
class Weight:
    """A `Weight` is a matrix of rows x columns, as the framework stores it.

    Args:
        split: what is cut: "rows" or "columns" over tp, "experts" over ep, "" nothing.
        wide: used in fp32 (router, norms, embedding), so not cast to the compute precision.
        multiplies: whether the weight is the right side of a matmul.
        frozen: whether the weight is not trained, and so has neither a gradient nor an optimizer state.
    """

    name: str
    rows: int
    columns: int
    split: str = ""
    wide: bool = False
    multiplies: bool = True
    frozen: bool = False

    @property
    def size(self) -> int:
        """Return the number of elements in the weight."""
        return self.rows * self.columns


@lru_cache(maxsize=4096)
def weights(model: Model, kind: str, shared_whole: bool = False) -> tuple[Weight, ...]:
    """Return all weights of one layer of a kind, before any sharding.

    Args:
        shared_whole: the shared expert and the MTP projection are whole on every tensor-parallel rank.
    """
    h = model.hidden
    if kind == "embedding":
        return (Weight("embedding", model.vocab, h, "rows", wide=True, multiplies=False),)
    if kind == "head":
        out = () if model.tied else (Weight("output", model.vocab, h, "rows"),)
        return (*out, *_norm(model, "final_norm", h))
    if kind == "mtp":
        extra = Weight("projection", h, 2 * h, "" if shared_whole else "rows")
        norms = [norm for index in range(3) for norm in _norm(model, f"mtp_norm_{index}", h)]
        return (*weights(replace(model, streams=1), model.last_kind, shared_whole), extra, *norms)
    mlp = _moe(model, shared_whole) if kind == MOE else _mlp(model, "mlp", model.ffn, "rows", "columns", model.bias)
    both = (*_norm(model, "norm_1", h), *_norm(model, "norm_2", h))
    return (*attention_weights(model), *mlp, *both, *connection_weights(model))


def connection_weights(model: Model) -> tuple[Weight, ...]:
    """Return the weights of a layer's hyper-connections, before attention and before the MLP; the list is empty with
    one residual stream.
    """
    mixing = []
    for sublayer in hyper_connections.SUBLAYERS if model.streams > 1 else ():
        for name, shape in hyper_connections.shapes(model.streams, model.hidden).items():
            rows, columns = (*shape, 1)[:2]
            mixing.append(Weight(f"{sublayer}.{name}", rows, columns, wide=columns == 1, multiplies=columns > 1))
    return tuple(mixing)


@lru_cache(maxsize=256)
def attention_weights(model: Model) -> tuple[Weight, ...]:
    """Return the weights of a layer's attention."""
    return _latent(model) if model.latent else _grouped(model)


def _grouped(model: Model) -> tuple[Weight, ...]:
    h, n = model.hidden, model.heads
    projected = (n + 2 * model.kv_heads) * model.head_dim
    found = [Weight("qkv", projected, h, "rows"), Weight("proj", h, n * model.head_dim, "columns")]
    into = model.bias and not model.only_outputs
    found += _bias("qkv", projected, "rows", into or model.qkv_bias) + _bias("proj", h, "", model.bias)
    if model.qk_norm:
        found += [*_norm(model, "q_norm", model.head_dim), *_norm(model, "k_norm", model.head_dim)]
    return tuple(found)


def _latent(model: Model) -> tuple[Weight, ...]:
    mla, h, n = model.latent, model.hidden, model.heads
    assert mla is not None
    biased = model.joint_latent and (model.bias or model.qkv_bias)
    down, query, up = mla.kv_rank + mla.rope, n * model.qk_dim, n * (mla.nope + mla.value)
    found = [
        Weight("kv_down", down, h),
        Weight("kv_up", up, mla.kv_rank, "rows"),
        Weight("proj", h, n * mla.value, "columns"),
        *_bias("kv_down", down, "", biased),
        *_bias("kv_up", up, "rows", biased),
        *_bias("proj", h, "", model.joint_latent and model.bias),
    ]
    if mla.query_rank:
        found += [Weight("q_down", mla.query_rank, h), Weight("q_up", query, mla.query_rank, "rows")]
        found += _bias("q_down", mla.query_rank, "", biased) + _bias("q_up", query, "rows", biased)
    else:
        split = "" if model.joint_latent else "rows"  # MindFormers keeps the fused matrix whole
        found += [Weight("q", query, h, split), *_bias("q", query, split, biased)]
    if model.qk_norm:
        found += _norm(model, "kv_norm", mla.kv_rank)
        found += _norm(model, "q_norm", mla.query_rank) if mla.query_rank else ()
    return tuple(found)


@dataclass(frozen=True)
class Adapters:
    """An `Adapters` describes the LoRA adapters that `plugins.lora` trains while all other weights are frozen.

    Args:
        rank: the rank of each adapter.
        adapted: for each linear layer the names of its `weights`, which MindFormers has in one matrix.
    """

    rank: int
    adapted: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=4096)
def with_adapters(model: Model, kind: str, adapters: Adapters, shared_whole: bool = False) -> tuple[Weight, ...]:
    """Return all weights of one layer of the given kind, marked as frozen, and the weights A and B of the layer's LoRA
    adapters. Tensor parallelism cuts A [rank, inputs] like the inputs of the adapted linear layer, and B [outputs,
    rank] like the outputs of this layer.
    """
    own = weights(model, kind, shared_whole)
    found = [replace(weight, frozen=True) for weight in own]
    by_name = {weight.name: weight for weight in own}
    for names in adapters.adapted if kind not in ("embedding", "head") else ():
        if parts := [by_name[name] for name in names if name in by_name]:
            first, rows = parts[0], sum(part.rows for part in parts)
            across, along = (split if first.split == split else "" for split in ("columns", "rows"))
            found += [
                Weight(f"{first.name}_lora_A", adapters.rank, first.columns, across),
                Weight(f"{first.name}_lora_B", rows, adapters.rank, along),
            ]
    return tuple(found)


def adapter_parameters(model: Model, adapters: Adapters) -> int:
    """Return the number of trained elements of a model with LoRA, which are the elements of all adapters."""
    kinds = (*model.pattern, *["mtp"] * model.mtp)
    return sum(w.size for kind in kinds for w in with_adapters(model, kind, adapters) if not w.frozen)


def _norm(model: Model, name: str, width: int) -> tuple[Weight, ...]:
    scale = Weight(name, width, 1, wide=True, multiplies=False)
    return (scale, Weight(f"{name}_bias", width, 1, wide=True, multiplies=False)) if model.norm_bias else (scale,)


def _bias(name: str, width: int, split: str, there: bool) -> list[Weight]:
    return [Weight(f"{name}_bias", width, 1, split, multiplies=False)] if there else []


def _mlp(model: Model, name: str, width: int, first: str, second: str, bias: bool = False) -> tuple[Weight, ...]:
    h, inner = model.hidden, (2 if model.gated else 1) * width
    matrices = (Weight(f"{name}_fc1", inner, h, first), Weight(f"{name}_fc2", h, width, second))
    into = bias and not model.only_outputs
    return (*matrices, *_bias(f"{name}_fc1", inner, first, into), *_bias(f"{name}_fc2", h, "", bias))


def _moe(model: Model, shared_whole: bool) -> tuple[Weight, ...]:
    h, width = model.hidden, model.expert_ffn
    found = [
        Weight("router", model.experts, h, wide=True),
        Weight("experts_1", model.experts * h, (2 if model.gated else 1) * width, "experts"),
        Weight("experts_2", model.experts * width, h, "experts"),
    ]
    if model.shared_ffn:
        first, second = ("", "") if shared_whole else ("rows", "columns")
        found += _mlp(model, "shared", model.shared_ffn, first, second)
    if model.shared_gate:
        found.append(Weight("shared_gate", 1, h, wide=True))
    return tuple(found)


def layer_size(model: Model, kind: str) -> int:
    """Return the number of elements in the weights of one layer of a kind."""
    return sum(weight.size for weight in weights(model, kind))


def used_size(model: Model, kind: str) -> int:
    """Return the number of weight elements that one token uses in a layer; only the top-k routed experts count."""
    idle = sum(weight.size for weight in weights(model, kind) if weight.split == "experts")
    return layer_size(model, kind) - (idle // model.experts * (model.experts - model.top_k) if idle else 0)


def parameters(model: Model) -> int:
    """Return the number of elements in all weights of the model."""
    return sum(layer_size(model, kind) for kind in ("embedding", "head", *model.pattern, *["mtp"] * model.mtp))


def active_parameters(model: Model) -> int:
    """Return the number of weight elements that one token passes through, with the embedding and without MTP. In a
    model's name such as 105B-A4.7B, the number after the A is the number of active parameters.
    """
    return sum(used_size(model, kind) for kind in ("embedding", "head", *model.pattern))


def stage_parameters(model: Model, layers: Sequence[Sequence[int]]) -> list[int]:
    """Return the number of weight elements on each stage (on all devices of the stage together). The argument `layers`
    holds the number of layers of each [chunk][stage].

    The embedding is on the first stage, head and MTP on the last. With an MTP layer the last stage also looks tokens up
    in the embedding, which MindFormers shares between the stages: it is counted once.
    """
    stages, first = [0] * len(layers[0]), 0
    for row in layers:
        for stage, count in enumerate(row):
            stages[stage] += sum(layer_size(model, kind) for kind in model.pattern[first : first + count])
            first += count
    stages[0] += layer_size(model, "embedding")
    stages[-1] += layer_size(model, "head") + model.mtp * layer_size(model, "mtp")
    return stages


PASSES = 3  # forward, and backward at twice its cost
FORMULA = "6 x (weights and gates that multiply a token) + 3 x seq x heads x (d_qk + d_v) x (layers + MTP layers)"


def multiplied(model: Model) -> dict[str, int]:
    """Return the number of weight elements that multiply one token, by module: "attention", "mlp", "experts", "router",
    "mtp" and "head". For a model with several residual streams, the result also has the key "hyper-connections".

    Of the routed experts the top-k. An MTP layer counts as "mtp" but for its prediction, which is another head.
    """
    found = dict.fromkeys(("attention", "mlp", "experts", "router", "mtp", "head"), 0)
    if model.streams > 1:
        sublayers = len(hyper_connections.SUBLAYERS) * model.layers
        found[CONNECTIONS] = sublayers * hyper_connections.mixing_flops(model.streams, model.hidden) // 2
    for kind in model.pattern:
        for weight in weights(model, kind):
            found[_module(weight)] += _used(model, weight)
    found["mtp"] = model.mtp * sum(_used(model, weight) for weight in weights(model, "mtp"))
    found["head"] = (1 + model.mtp) * model.vocab * model.hidden
    return found


def linear_flops(model: Model) -> int:
    """Return the FLOPs of one token, forward and backward, without the products of queries, keys and values in
    attention.
    """
    return 2 * PASSES * sum(multiplied(model).values())


def pair_flops(model: Model) -> int:
    """Return the FLOPs of attention for one query-key pair, forward and backward, in all layers together."""
    return 2 * PASSES * model.heads * (model.qk_dim + model.v_dim) * (model.layers + model.mtp)


def flops_per_token(model: Model, sequence: int, masked: bool = False) -> int:
    """Return the FLOPs of one token of a sequence, forward and backward.

    Args:
        masked: attention counts the masked half, too, as Megatron-LM's published numbers do.
    """
    seen = sequence if masked else sequence / 2
    if model.window:  # every other layer sees only it
        seen = (seen + min(seen, model.window)) / 2
    return linear_flops(model) + int(pair_flops(model) * seen)


def _used(model: Model, weight: Weight) -> int:
    if not weight.multiplies:
        return 0
    return weight.size // model.experts * model.top_k if weight.split == "experts" else weight.size


def _module(weight: Weight) -> str:
    if weight.split == "experts":
        return "experts"
    if "_hc." in weight.name:
        return CONNECTIONS
    if weight.name in ("router", "shared_gate"):
        return "router"
    return "mlp" if weight.name.startswith(("mlp_", "shared_")) else "attention"
