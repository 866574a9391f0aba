"""This module counts the bytes of activations that a layer keeps for its backward pass, for each recompute option. All
sizes are bytes of one micro-batch on one device.

Activations are counted tensor by tensor, as by Korthikanti et al. (arXiv 2205.05198). For a model without gated MLPs,
with dropout and with unfused attention, the sum equals their formula s b h (10 / t + 24 / t + 5 a s / (h t)) with
sequence parallelism, and the formula with 10 instead of 10 / t without sequence parallelism.

If the weights in the compute dtype are not sharded, Megatron holds more tensors than the activations kept for the
backward pass.

The following tensors were found in Megatron's sources, and their sizes are not fitted:

* Transformer Engine keeps one spare gradient in the compute dtype for every shape that the weight of a matmul has
  (`get_dummy_wgrad` in its pytorch/module/base.py; linear layers since 2.3, grouped ones since 2.10). Megatron Core
  also takes the spare gradient of the output layer from this function (core/tensor_parallel/layers.py). The spare
  gradients are never freed.
* Without Transformer Engine, Megatron allocates such a gradient for each weight, and frees it after it is accumulated.
* The backward pass of a layer needs the most memory when the MLP's activation function is differentiated: then the
  gradients of the first matrix products and of the activation function's result exist, and the result itself is freed.
* In the backward pass of the loss the output layer computes the gradient of its input, and gathers this input again.
"""

from __future__ import annotations

from collections.abc import Iterable

from tools.estimate.configuration import Configuration, places, weight_cut
from tools.estimate.layer_model import work
from tools.estimate.memory.training_graph import (
    ATTENTION,
    DISPATCH,
    EMBEDDING,
    EXPERTS,
    HEAD,
    LAYER_INPUT,
    MLP,
    MTP,
    NORMS,
    ROUTER,
    SHARED,
    embedding_pass,
    kept_parts,
    layer_pass,
    loss_pass,
)
from tools.model import Weight, weights


def spare_gradients(config: Configuration, every: Iterable[Weight]) -> float:
    """Return the bytes of the spare gradient buffers of Transformer Engine, which has one such buffer for all weights
    of the same shape.
    """
    if not config.spare_gradients:
        return 0.0
    shapes = {_shape(weight, config) for weight in every if weight.multiplies and not weight.wide}
    return ITEM * sum(rows * columns for rows, columns in shapes)


def megatron_layer_pass(config: Configuration, kind: str) -> float:
    """Return the peak memory of gradients, in bytes, during the backward pass of a layer in Megatron."""
    model, done, tokens = config.model, work(config, kind), config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    gates = 2 if model.gated else 1
    if kind == "dense":
        units = tokens * model.ffn / config.tp
    else:
        width = model.expert_ffn / (config.tp if config.expert_tp else 1)
        units = done.copies * width * config.skew + tokens / config.tp * model.shared_ffn
    sent = (1 + config.skew) * done.copies * model.hidden  # rows of the experts, permuted and sent back
    gathered = (1 if config.overlap_tp else 2) * done.gathered if config.tp > 1 else 0.0
    return ITEM * (gates * units + held * model.hidden + sent) + gathered + _made_anew(config, kind)


def megatron_loss_pass(config: Configuration) -> float:
    """Return the bytes that the loss needs in Megatron: the bytes of the logits, of the gathered input of the output
    layer, and of the gradient of this input.
    """
    tokens, model = config.rank_tokens, config.model
    rows = ITEM * tokens * model.hidden * (2 if config.tp > 1 else 1)
    return config.logit_bytes * tokens * model.vocab / config.tp + rows + _made_anew(config, "head")


def _shape(weight: Weight, config: Configuration) -> tuple[float, float]:
    """Return rows and columns that a device holds of a weight; of experts those of one."""
    if weight.split == "experts":
        return weight.rows / config.model.experts, weight.columns / (config.tp if config.expert_tp else 1)
    rows = weight.rows / (config.tp if weight.split == "rows" else 1)
    return rows, weight.columns / (config.tp if weight.split == "columns" else 1)


def _made_anew(config: Configuration, kind: str) -> float:
    """Return bytes of the largest weight's gradient where none is spare; each expert has its own."""
    if config.spare_gradients:
        return 0.0
    found = [0.0]
    for weight in weights(config.model, kind, config.shared_whole):
        if weight.multiplies:
            parts = config.model.experts // config.ep if weight.split == "experts" else 1
            found.append(weight.size / weight_cut(weight, config) / parts)
    return ITEM * max(found)


_WORDS = {"dense": "a dense layer", "moe": "a MoE layer", "mtp": "the MTP layer"}
ITEM = 2  # bytes of an activation of other software, which computes in half precision
_WIDE = 4  # bytes of a gradient that adds up in fp32
_SCORE = 2  # bytes kept for each score of an unfused attention: its softmax
_DROPPED = 3  # and where some are dropped: what is left, and the mask


def saved(config: Configuration, kind: str, option: str = "none") -> float:
    """Return the bytes that one layer keeps for its backward pass, under one of the recompute options."""
    return sum(saved_parts(config, kind, option).values())


def saved_parts(config: Configuration, kind: str, option: str = "none") -> dict[str, float]:
    """Return the bytes of activations that a layer keeps for its backward pass, as a dictionary module (such as
    attention) -> bytes.
    """
    if config.training_graph:
        return kept_parts(config, kind, option)
    model = config.model
    h, residual = model.hidden, 4 if config.fp32_residual else ITEM
    tokens = config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    if kind == "embedding":
        return {EMBEDDING: tokens * 4 / config.tp}
    if kind == "head":
        return {HEAD: (2 * ITEM + residual) * held * h}
    if kind == "mtp":
        own = {MTP: 3 * ITEM * held * h}
        return saved_parts(config, model.last_kind, option) | saved_parts(config, "head") | own
    if option == "full":
        return {LAYER_INPUT: residual * held * h}
    if option == "select" and config.recompute.selective == "operators":
        return {LAYER_INPUT: residual * held * h, ATTENTION: _halved(config) * tokens / config.tp}
    cheap = option == "select" and config.recompute.selective != "attention"
    gathered = config.keep_gathered and config.sequence_parallel and option != "communication"
    normed = tokens if gathered else held  # rows of a norm's result, if it is kept as gathered
    rows = 2 * residual * held + (0 if cheap else 2 * ITEM * (normed if kind == "dense" else (normed + held) / 2))
    masks = 2 * held if model.dropout else 0
    scores = 0.0
    if not (config.flash or (option == "select" and config.recompute.selective == "attention")):
        scores = (_SCORE + _DROPPED * model.dropout) * tokens * config.sequence * model.heads / config.tp
    mlp = _routed(config, tokens, held, cheap) if kind == "moe" else {MLP: _dense(config, tokens, cheap)}
    return {NORMS: (rows + masks) * h, ATTENTION: tokens * _attention(config) / config.tp + scores, **mlp}


def _attention(config: Configuration) -> float:
    """Return bytes of a token: queries, keys, values, the result, and what MLA compresses."""
    model = config.model
    heads = model.heads * (model.qk_dim + model.v_dim)
    if config.cp_exchanges_heads and config.cp > 1:
        heads += model.heads * model.v_dim  # the result before and after its exchange
    if model.latent is None:
        return ITEM * (heads + 2 * model.kv_heads * model.head_dim)
    ranks = 2 * (model.latent.query_rank + model.latent.kv_rank)
    return ITEM * (heads + model.heads * (model.qk_dim + model.v_dim) + ranks)


def _halved(config: Configuration) -> float:
    """Return bytes of a token where every second matmul's result is kept, and the attention's (torchtitan). Without a
    compiler the first, third ... are kept as they come, the layer's last one too, which no gradient needs.
    """
    model = config.model
    heads = [model.heads * model.qk_dim, model.kv_heads * model.qk_dim, model.kv_heads * model.v_dim]
    width = model.ffn if not model.experts else model.top_k * model.expert_ffn + model.shared_ffn
    products = [*heads, model.hidden, *[width] * (2 if model.gated else 1), model.hidden]
    half = sum(products) / 2 if config.fused else sum(products[::2])
    return ITEM * (half + model.heads * model.v_dim)


def _units(config: Configuration, cheap: bool) -> float:
    """Return bytes for each unit of an MLP's width: its first product, and the activation's if it is kept."""
    gates = 2 if config.model.gated else 1
    inner = 1 if config.model.gated and not config.fused else 0
    return ITEM * (gates + (0 if cheap else 1 + inner))


def _dense(config: Configuration, tokens: float, cheap: bool) -> float:
    return tokens * config.model.ffn / config.tp * _units(config, cheap)


def _routed(config: Configuration, tokens: float, held: float, cheap: bool) -> dict[str, float]:
    """Return router scores in fp32, what experts take, make inside and give back, and the shared expert."""
    model = config.model
    routed = tokens if config.expert_tp else tokens / config.tp
    width = model.expert_ffn / (config.tp if config.expert_tp else 1)
    copies = routed * model.top_k
    rows = held if config.shared_whole else tokens / config.tp
    return {
        DISPATCH: copies * 2 * ITEM * model.hidden * config.skew,
        EXPERTS: copies * width * _units(config, cheap) * config.skew,
        SHARED: rows * model.shared_ffn * _units(config, cheap),
        ROUTER: 2 * 4 * held * model.experts,
    }


def _gathered_gradients(config: Configuration, kind: str) -> float:
    """Return bytes of a layer's gradients where computing weights are sharded: whole, and as they are sent."""
    wide = _WIDE if config.wide_gradients else ITEM
    own = [weight for weight in weights(config.model, kind, config.shared_whole) if weight.multiplies]
    return (ITEM + wide) * sum(weight.size / weight_cut(weight, config) for weight in own)


def buffers(config: Configuration, kind: str) -> float:
    """Return the bytes of a layer's communication buffers. Communication buffers hold activations that tensor
    parallelism gathers, and token copies that are dispatched to experts and come back. The output of a tensor-parallel
    AllGather and the input of a ReduceScatter exist at the same time, unless the collectives are fused with the matmul.
    """
    done = work(config, kind)
    both = 1 if config.training_graph or config.overlap_tp else 2
    gathered = both * done.gathered if config.tp > 1 else 0.0
    return gathered + (1 + config.skew) * done.copies * config.model.hidden * config.item * (config.ep > 1)


def mtp_option(config: Configuration) -> str:
    """Return the recompute option of MTP layers: "full" if the last decoder layer is recomputed fully, and "none"
    otherwise. MindFormers gives MTP layers the setting of the last decoder layer, but partial recomputation does not
    apply to the operators of MTP layers.
    """
    chunk, stage, _ = places(config.layers, config.schedule)[-1]
    return "full" if config.recompute.layers("full", chunk, stage) >= config.layers[chunk][stage] else "none"


def working(config: Configuration, layers: Iterable[tuple[str, str]]) -> float:
    """Return the peak memory in bytes that a pass through a chunk needs in addition to the kept activations. The
    argument `layers` holds a pair (kind, recompute option) for each layer of the chunk.
    """
    return fullest_pass(config, layers)[1]


def fullest_pass(config: Configuration, layers: Iterable[tuple[str, str]]) -> tuple[str, float]:
    """Return the part of a chunk (a kind of layer, or the loss) that needs the most memory in addition to the kept
    activations, with the number of bytes.
    """
    found = [("", 0.0)]
    pairs = dict.fromkeys(layers)
    for kind, option in pairs:
        words = f"{_WORDS.get(kind, kind)} {'run again' if option == 'full' else 'backward'}"
        if kind in _WORDS:
            found.append((words, (layer_pass if config.training_graph else _layer_pass)(config, kind, option)))
        elif kind == "head":
            mtp = any(other == "mtp" for other, _ in pairs)
            found.append(("the loss", loss_pass(config, mtp) if config.training_graph else _loss_pass(config)))
        if kind in ("embedding", "mtp") and config.training_graph:  # MTP layers use the embedding, too
            found.append(("the embedding's gradient", embedding_pass(config)))
    return max(found, key=lambda pair: pair[1])


def _layer_pass(config: Configuration, kind: str, option: str) -> float:
    """Return what a layer made again keeps, and the gradients of its activations and weights."""
    layer = saved(config, kind) if option == "full" else 0.0
    if config.shard_weights:
        return layer + saved(config, kind) + _gathered_gradients(config, kind) + buffers(config, kind)
    return layer + megatron_layer_pass(config, config.model.last_kind if kind == "mtp" else kind)


def _loss_pass(config: Configuration) -> float:
    if not config.shard_weights:
        return megatron_loss_pass(config)
    logits = config.logit_bytes * config.rank_tokens * config.model.vocab / config.tp
    return logits + _gathered_gradients(config, "head") + buffers(config, "head")
