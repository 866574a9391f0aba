"""This module counts the activations that a layer of MindFormers' training_graph models keeps for its backward pass,
under MindSpore 2.9.0.

The tensors were counted in compiled graphs (`tc3 dryrun`: the tensors that a forward subgraph passes to its backward),
for alltoall_deredundency and fused kernels. MindFormers keeps more tensors than the mathematics needs:

* norms compute in fp32, and their input and result are kept; the MLP's first product is kept in fp32, and in bf16 in
  routed experts;
* SwiGLU is always computed again in the backward pass, so its result is not kept under any recompute option;
* with context parallelism the gathered keys and values of the whole sequence are kept and not gathered again (also with
  ulysses_degree_in_cp, which is not passed to flash attention);
* each permutation and exchange of routed copies keeps its tensor, because only routing decides the number of copies,
  and the backward pass reads the shape from the tensor;
* `select_recompute` of the norms saves the memory of their results, and `select_comm_recompute` saves no memory in a
  compiled graph; `tools.estimate.configuration` describes the memory that recomputing other operators saves.

* all tensors that are not fp32 in this list have the type `compute_dtype`; if this is fp32, no tensor is cast and kept
  twice. With fp32, the flash kernel of grouped-query attention gets fp16 inputs (attention.py:332), and the flash
  kernel of MLA gets fp32 inputs;
* a pass of a pipeline copies the weights that already have the compute dtype, unless they are gathered from optimizer
  shards, and each pass casts narrower weights (`params_dtype`); a layer that is not recomputed keeps these copies for
  its backward pass.

In the backward pass the gradient of a layer's largest weight, or of the output weight, exists in the compute dtype and
in the weight's dtype, before it is accumulated. Two tensors of the embedding's size in the embedding's dtype exist
while the gradient of the embedding is computed.

The kept bytes are within 1 % of the bytes in the compiled graphs of the 438B recipe; the additional bytes of a pass are
between 15 % below and 14 % above the bytes in the graphs of 36B, 105B, 438B and 1119B. MindFormers' alltoall pads the
copies (those of the 105B by 38 %). The padding of the token copies, 6 to 9 % of a layer's bytes, is not counted.

The modules to which memory belongs (`MODULES`) have the same names for modelled bytes and for the bytes of a compiled
graph.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache

from plugins.hyper_connections import plan as hyper_connections
from tools.estimate import configuration
from tools.estimate.configuration import Configuration, joined, parts_of
from tools.model import Weight, weights

ATTENTION, MLP, EXPERTS, SHARED, ROUTER = "attention", "dense MLP", "experts", "shared experts", "router"
DISPATCH, NORMS, EMBEDDING, HEAD, MTP = "dispatch", "norms", "embedding", "head and logits", "MTP"
STREAMS = "residual streams"
LAYER_INPUT, SPARE, OTHER = "inputs of recomputed layers", "spare gradients", "other"
MODULES = (
    *(ATTENTION, MLP, EXPERTS, SHARED, ROUTER, DISPATCH, NORMS, STREAMS, EMBEDDING, HEAD, MTP),
    *(LAYER_INPUT, SPARE, OTHER),
)

_WEIGHTS = (  # of `tools.model`, first match
    (r"_hc\.", STREAMS),
    (r"expert", EXPERTS),
    (r"shared", SHARED),
    (r"router", ROUTER),
    (r"final_norm|output", HEAD),
    (r"mtp_norm|projection", MTP),
    (r"norm", NORMS),
    (r"embedding", EMBEDDING),
    (r"mlp", MLP),
)
_PARAMETERS = (  # of MindFormers' names of parameters and paths of cells, first match
    (r"(attn|ffn)_hc\b", STREAMS),
    (r"shared_expert", SHARED),
    (r"router", ROUTER),
    (r"token_dispatcher", DISPATCH),
    (r"\bexperts\b|experts-", EXPERTS),
    (r"self_attention|core_attention", ATTENTION),
    (r"\bmtp\b|mtp[-.]|eh_proj|enorm|hnorm", MTP),
    (r"final_layernorm|output_layer|loss", HEAD),
    (r"layernorm", NORMS),
    (r"embedding", EMBEDDING),
    (r"\bmlp\b|mlp-", MLP),
)


@lru_cache(maxsize=256)
def module_of_weight(name: str) -> str:
    """Return the module (such as experts) to which a weight of `tools.model` belongs; weights whose names match no
    pattern belong to attention.
    """
    return next((module for pattern, module in _WEIGHTS if re.search(pattern, name)), ATTENTION)


def module_of_path(path: str) -> str:
    """Return the module of the model to which a parameter's name or an operator's path in MindFormers belongs."""
    return next((module for pattern, module in _PARAMETERS if re.search(pattern, path)), OTHER)


_WIDE = 4  # bytes of an element in fp32
_FLASH = 2  # of what the grouped-query attention hands to its flash kernel, whatever computes
# (of a device's own copies, of those that it receives): permuted, sent back; exchanged, sorted by expert, made by the
# experts, sorted back. plugins/hierarchical_ep's two steps each way, and fp32 sums: counted as if no row were dropped
# as a duplicate; its own copies are those for a node, taken to be as uneven as those for a device (more than they are)
_ROUTED = {"global": (2, 4), "hierarchical": (0, 6), "deduplicated": (0, 13)}
_LOGIT = 8  # bytes of a logit between the loss's forward and backward: log-softmax in fp32 and one-hot labels
_GRADIENTS = 1 / 3  # of what a layer keeps: the gradients that are there at once
_STATISTICS = 64  # bytes of a head and token that flash attention keeps beside its result


def kept_parts(config: Configuration, kind: str, option: str = "none") -> dict[str, float]:
    """Return, for each of `MODULES`, the bytes of activations that one layer keeps for one micro-batch on one device.
    The arguments `kind` and `option` are the same as for `tools.estimate.memory.activations.saved`.
    """
    parts = _activations(config, kind, option)
    # a layer that runs again copies its weights again; the head does not run again
    for weight in () if option == "full" and kind != "head" else _weights(config, kind):
        if size := _copied(config, weight):
            parts[module_of_weight(weight.name)] = parts.get(module_of_weight(weight.name), 0.0) + size
    return parts


def _weights(config: Configuration, kind: str) -> tuple[Weight, ...]:
    return weights(config.model, kind, config.shared_whole)


def _copied(config: Configuration, weight: Weight) -> float:
    """Return bytes of a matmul's weight that each pass casts or copies (`Configuration.copies_weights`)."""
    if not config.copies_weights or not weight.multiplies or weight.wide:
        return 0.0
    as_wide = config.weight_item == config.item
    if as_wide and (weight.split == "experts" or configuration.weight_shards(weight, config) > 1):
        return 0.0  # the grouped product reads the parameter itself; what is cut is gathered once for the step
    return config.item * weight.size / configuration.weight_cut(weight, config)


def _activations(config: Configuration, kind: str, option: str) -> dict[str, float]:
    """Return `kept_parts` without weights."""
    model, item = config.model, config.item
    tokens = config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    rows = held * model.hidden
    if kind == "embedding":
        return {EMBEDDING: tokens * 4 / config.tp}
    if kind == "head":
        return {HEAD: 2 * _WIDE * rows + tokens * (item * model.hidden + _LOGIT * model.vocab / config.tp)}
    if kind == "mtp":
        # two more norms and the rows that they give, side by side
        own = {MTP: (4 * _WIDE + 2 * item) * rows}
        layer = replace(config, model=replace(model, streams=1))
        return _activations(layer, model.last_kind, option) | _activations(config, "head", "none") | own
    if option == "full":
        if model.streams > 1:  # streams are in the type that computes, also if their sum is made in fp32
            return {LAYER_INPUT: item * rows * model.streams}
        # a layer casts its result to the type that computes (transformer_layer.py); alltoall_deredundency's stays
        result = {EXPERTS: item * rows} if kind == "moe" and config.ep_mode == "hierarchical" else {}
        return {LAYER_INPUT: item * rows} | result
    again = parts_of(option)
    norms = (2 if configuration.NORMS in again else 4) * _WIDE * rows + _cast(config) * rows
    mlp = _routed(config, tokens, held) if kind == "moe" else {MLP: _dense(config, tokens)}
    every = {NORMS: norms, ATTENTION: _attention(config, tokens, held), **mlp}
    if model.streams > 1:
        every[STREAMS] = _streams(config, held)
    for group in set(again) & set(configuration.PATTERNS):
        for module, size in _freed(config, kind, group, tokens, held).items():
            every[module] -= size
    return every


def _cast(config: Configuration) -> int:
    """Return bytes of an element of an fp32 tensor's copy in the type that computes; there is none in fp32."""
    return 0 if config.item == _WIDE else config.item


def _flash_item(config: Configuration) -> int:
    """Return bytes of an element of what the flash kernel takes and gives."""
    return config.item if config.model.latent else _FLASH


def _freed(config: Configuration, kind: str, group: str, tokens: float, held: float) -> dict[str, float]:
    """Return module -> bytes that a layer of a kind does not keep where a group of its operators runs again."""
    model = config.model
    if group == configuration.ATTENTION:
        heads = model.heads * (2 * model.qk_dim + model.v_dim)
        return {ATTENTION: _flash_item(config) * tokens / config.tp * heads}
    if group == configuration.MLP and kind != "moe":
        # the cast of what a product takes runs again with it: what was gathered is then kept in fp32
        return {MLP: _dense(config, tokens) - (_WIDE * tokens * model.hidden if config.tp > 1 else 0)}
    routed = _routed(config, tokens, held) if kind == "moe" else {}
    if group == configuration.MLP:
        return {SHARED: routed[SHARED], ROUTER: _WIDE * held * model.hidden} if model.shared_ffn else {}
    return {module: routed[module] for module in (DISPATCH, EXPERTS) if module in routed}


def layer_pass(config: Configuration, kind: str, option: str) -> float:
    """Return the peak memory in bytes that the backward pass of a layer needs in addition to the activations kept by
    the forward pass. The returned bytes include the results of the operators that the layer's recompute option runs
    again.
    """
    again, groups = option == "full", [name for name in parts_of(option) if name in configuration.PATTERNS]
    gradients = config.item + config.weight_item
    largest = max(
        weight.size / configuration.weight_cut(weight, config) for weight in _weights(config, kind) if weight.multiplies
    )
    own = _own(config, kind, "none") - (_own(config, "head", "none") if kind == "mtp" else 0.0)
    copies = sum(_copied(config, weight) for weight in _weights(config, kind) if again and not _second(weight))
    if again or not groups:
        return gradients * largest + (own + copies if again else _GRADIENTS * own)
    left = _own(config, kind, joined(groups))
    return gradients * largest + _GRADIENTS * left + (own - left)


def _second(weight: Weight) -> bool:
    """Return whether it is an MLP's second: in backward its copy is gone when the gradient of the first is made."""
    return weight.name.endswith(("fc2", "experts_2"))


def _own(config: Configuration, kind: str, option: str) -> float:
    """Return bytes of the activations only."""
    return sum(_activations(config, kind, option).values())


def loss_pass(config: Configuration, mtp: bool) -> float:
    """Return the peak memory in bytes that the loss needs in addition to kept activations. If `mtp` is True, the
    gradient of the MTP layers' logits is included. With few tokens, the backward pass of the output projection needs
    more than the loss itself: the gradients of the logits and of the output weight.
    """
    local = config.rank_tokens * config.model.vocab / config.tp
    moved = max((size for size, _, _ in logit_exchanges(config)), default=0.0)
    projection = 0.0 if config.adapters else config.model.vocab * config.model.hidden / config.tp
    gradients = config.item * local + (config.item + config.weight_item) * projection
    return max(3 * _WIDE * local, 2 * moved, gradients) + config.item * local * mtp


def embedding_pass(config: Configuration) -> float:
    """Return the peak memory in bytes that the backward pass of the embedding needs in addition to kept activations:
    the gradient of the embedding and a tensor of zeros of the same size. A frozen embedding has no gradient.
    """
    (embedding,) = _weights(config, "embedding")
    whole = embedding.size / configuration.weight_cut(embedding, config)
    return 0.0 if config.adapters else 2 * config.weight_item * whole


def logit_exchanges(config: Configuration) -> list[tuple[float, int, int]]:
    """Return (bytes of the result, ranks, stride) of every collective that transposes one micro-batch's logits for the
    loss.

    Logits have the shape [sequence, batch], and the loss needs [batch, sequence]. If both dimensions are cut, MindSpore
    moves all logits to ranks in another order to transpose them, and back. MindSpore uses an AllGather or AlltoAll over
    every digit of the rank's number, twice; the base of the digits is the largest number of which dp and cp are powers
    (8 for 8 x 8; 2 for 32 x 4, 16 x 8 and 64 x 2, as compiled graphs show; if dp and cp are not such powers, the result
    is an assumption).
    """
    if not config.training_graph or config.cp == 1 or config.dp == 1:
        return []
    large, base = max(config.dp, config.cp), min(config.dp, config.cp)
    while large > base and large % base == 0:
        large, base = max(large // base, base), min(large // base, base)
    local = config.item * config.rank_tokens * config.model.vocab / config.tp
    digits = math.ceil(round(math.log(config.dp * config.cp, base), 6))
    return 2 * [(base * local, base, config.tp * base**digit) for digit in range(digits)]


def _attention(config: Configuration, tokens: float, held: float) -> float:
    """Return queries, keys, values, the result in both of its forms, and MLA's ranks, gathered and not."""
    model, item, flash = config.model, config.item, _flash_item(config)
    keys = config.cp * (model.heads if model.latent else model.kv_heads)
    heads = model.heads * (model.qk_dim + 2 * model.v_dim) + keys * (model.qk_dim + model.v_dim)
    sizes = flash * heads + (item - flash) * model.heads * model.v_dim + _STATISTICS * model.heads
    ranks = model.latent.query_rank + model.latent.kv_rank if model.latent else 0
    gathered = tokens * (ranks if model.latent else model.hidden)
    if config.keeps_scores:
        sizes += _WIDE * model.heads * config.sequence
    return tokens / config.tp * sizes + 2 * _WIDE * held * ranks + item * gathered


def _streams(config: Configuration, held: float) -> float:
    """Return the bytes that both sublayers keep of the residual streams: the streams in the computing type and in fp32
    (a copy for the gates and, if sums are in fp32, one for the sum), the sublayer's output, the gates, and each
    division of Sinkhorn's iterations.
    """
    model, n = config.model, config.model.streams
    residual = _WIDE if config.fp32_residual else config.item
    copies = 0 if config.item == _WIDE else 1 + bool(config.fp32_residual)
    wide = n * model.hidden * (config.item + copies * _WIDE)
    gates = _WIDE * hyper_connections.gates(n)
    divisions = _WIDE * model.sinkhorn * 2 * (n * n + n)
    return len(hyper_connections.SUBLAYERS) * held * (wide + residual * model.hidden + gates + divisions)


def _dense(config: Configuration, tokens: float) -> float:
    """Return the gathered rows, the first product in fp32 and in the type that computes its activation."""
    model, item = config.model, config.item
    gates = 2 if model.gated else 1
    return item * tokens * model.hidden + (gates * _WIDE + item) * tokens * model.ffn / config.tp


def _routed(config: Configuration, tokens: float, held: float) -> dict[str, float]:
    """Return copies on their way, their first product, the router in fp32 and the (whole) shared expert."""
    model, item = config.model, config.item
    gates = 2 if model.gated else 1
    copies = tokens / config.tp * model.top_k
    own, received = _ROUTED[config.ep_mode]
    return {
        DISPATCH: item * copies * (own + received * config.skew) * model.hidden,
        EXPERTS: item * copies * gates * model.expert_ffn * config.skew,
        ROUTER: held * ((_WIDE + _cast(config)) * model.hidden + 2 * _WIDE * model.experts),
        SHARED: (gates * _WIDE + item) * held * model.shared_ffn,
    }
