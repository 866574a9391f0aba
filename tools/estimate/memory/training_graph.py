"""Activations that a layer of MindFormers' training_graph models leaves for its backward, under MindSpore 2.9.0.

Counted in compiled graphs (`tc3 dryrun`: what a forward subgraph hands to its backward), for alltoall_deredundency and
fused kernels; it is more than the mathematics needs:

* norms compute in fp32 and keep input and result; the MLP's first product is kept in fp32, in bf16 in routed experts;
* SwiGLU repeats itself: its result is not kept, whatever is recomputed;
* under context parallelism the whole sequence's keys and values are kept as gathered; nothing gathers them again
  (with ulysses_degree_in_cp as well: flash attention is not told of it);
* of the routed copies every permutation and exchange is kept: their number is known to the routing alone, and the
  backward of each asks the tensor for its shape;
* `select_recompute` of the norms saves their results, `select_comm_recompute` nothing that a graph shows; what other
  operators save stands in `tools.estimate.operators`.

In backward the gradient of the largest weight is there in the type that computes and in fp32, before it is added up.

What is kept is within 1 % of the graphs of the 438B recipe, what a pass needs beside it within -15 and +14 % of
those of 36B, 105B, 438B and 1119B. MindFormers' alltoall pads the copies (105B's by 38 %), which is not counted: 6
to 9 % of a layer's bytes.
"""

from __future__ import annotations

import math

from tools.estimate import operators, sharding
from tools.estimate.configuration import Configuration
from tools.estimate.memory.modules import (
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
)
from tools.estimate.operators import joined, parts_of
from tools.model.weights import weights

_LOW, _WIDE = 2, 4  # bytes of a number in the type that computes, and in fp32
# of the routed rows: permuted and gathered, exchanged, sorted by expert, made by the experts, sorted back, sent back;
# plugins/hierarchical_ep's two steps each way, and fp32 sums: counted as if no row were dropped as a duplicate
_ROUTED = {"global": 6, "hierarchical": 6, "deduplicated": 13}
_LOGIT = 8  # bytes of a logit between the loss's forward and backward: log-softmax in fp32 and one-hot labels
_GRADIENTS = 1 / 3  # of what a layer keeps: the gradients that are there at once
_STATISTICS = 64  # bytes of a head and token that flash attention keeps beside its result


def kept(config: Configuration, kind: str, option: str = "none") -> float:
    """Bytes of one micro-batch and device; kinds and options as `tools.estimate.memory.activations.saved`."""
    return sum(kept_parts(config, kind, option).values())


def kept_parts(config: Configuration, kind: str, option: str = "none") -> dict[str, float]:
    """Module of `tools.estimate.memory.modules` -> bytes of one micro-batch and device."""
    model = config.model
    tokens = config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    rows = held * model.hidden
    if kind == "embedding":
        return {EMBEDDING: tokens * 4 / config.tp}
    if kind == "head":
        return {HEAD: 2 * _WIDE * rows + tokens * (_LOW * model.hidden + _LOGIT * model.vocab / config.tp)}
    if kind == "mtp":
        # two more norms and the rows that they give, side by side
        own = {MTP: (4 * _WIDE + 2 * _LOW) * rows}
        return kept_parts(config, model.last_kind, option) | kept_parts(config, "head") | own
    if option == "full":
        return {LAYER_INPUT: (_WIDE if config.fp32_residual else _LOW) * rows}
    again = parts_of(option)
    norms = (2 if operators.NORMS in again else 4) * _WIDE * rows + _LOW * rows
    mlp = _routed(config, tokens, held) if kind == "moe" else {MLP: _dense(config, tokens)}
    every = {NORMS: norms, ATTENTION: _attention(config, tokens, held), **mlp}
    for group in set(again) & set(operators.PATTERNS):
        for module, size in _freed(config, kind, group, tokens, held).items():
            every[module] -= size
    return every


def _freed(config: Configuration, kind: str, group: str, tokens: float, held: float) -> dict[str, float]:
    """Module -> bytes that a layer of a kind does not keep where a group of its operators runs again."""
    model = config.model
    if group == operators.ATTENTION:
        heads = model.heads * (2 * model.qk_dim + model.v_dim)
        return {ATTENTION: _LOW * tokens / config.tp * heads}
    if group == operators.MLP and kind != "moe":
        # the cast of what a product takes runs again with it: what was gathered is then kept in fp32
        return {MLP: _dense(config, tokens) - (_WIDE * tokens * model.hidden if config.tp > 1 else 0)}
    routed = _routed(config, tokens, held) if kind == "moe" else {}
    if group == operators.MLP:
        return {SHARED: routed[SHARED], ROUTER: _WIDE * held * model.hidden} if model.shared_ffn else {}
    return {module: routed[module] for module in (DISPATCH, EXPERTS) if module in routed}


def layer_pass(config: Configuration, kind: str, again: bool) -> float:
    """Most bytes that a layer's backward needs beside what is kept, where its forward runs again in it or does not.

    What groups of operators make again is there then, too, whether this layer has all of the run's groups or not.
    """
    every = weights(config.model, kind, config.shared_whole)
    largest = max(weight.size / sharding.cut(weight, config) for weight in every if weight.multiplies)
    own = kept(config, kind) - (kept(config, "head") if kind == "mtp" else 0.0)
    if again or kind == "mtp" or not config.recompute.operators:
        return (_LOW + _WIDE) * largest + (own if again else _GRADIENTS * own)
    left = kept(config, kind, joined(name for name, _ in config.recompute.operators))
    return (_LOW + _WIDE) * largest + _GRADIENTS * left + (own - left)


def loss_pass(config: Configuration, mtp: bool) -> float:
    """Most bytes that the loss needs beside what is kept; the gradient of MTP's logits waits for it."""
    local = config.rank_tokens * config.model.vocab / config.tp
    moved = max((size for size, _, _ in logit_exchanges(config)), default=0.0)
    return max(3 * _WIDE * local, 2 * moved) + _LOW * local * mtp


def logit_exchanges(config: Configuration) -> list[tuple[float, int, int]]:
    """(bytes of the result, ranks, stride) of every exchange of one micro-batch's logits on their way to the loss.

    Logits come as [sequence, batch] and the loss takes [batch, sequence]. Where both are cut, MindSpore moves all of
    them to ranks in another order to turn them, and back: an AllGather or AlltoAll over every digit of the rank, twice,
    with digits to the largest base of which dp and cp are powers (8 of 8 x 8; 2 of 32 x 4, 16 x 8 and 64 x 2, as
    compiled graphs show; assumed for numbers that are no such powers).
    """
    if not config.training_graph or config.cp == 1 or config.dp == 1:
        return []
    large, base = max(config.dp, config.cp), min(config.dp, config.cp)
    while large > base and large % base == 0:
        large, base = max(large // base, base), min(large // base, base)
    local = _LOW * config.rank_tokens * config.model.vocab / config.tp
    digits = math.ceil(round(math.log(config.dp * config.cp, base), 6))
    return 2 * [(base * local, base, config.tp * base**digit) for digit in range(digits)]


def _attention(config: Configuration, tokens: float, held: float) -> float:
    """Queries, keys, values, the result as attention and as the projection want it; MLA's ranks, gathered and not."""
    model = config.model
    keys = config.cp * (model.heads if model.latent else model.kv_heads)
    heads = model.heads * (model.qk_dim + 2 * model.v_dim) + keys * (model.qk_dim + model.v_dim)
    ranks = model.latent.query_rank + model.latent.kv_rank if model.latent else 0
    gathered = tokens * (ranks if model.latent else model.hidden)
    return tokens / config.tp * (_LOW * heads + _STATISTICS * model.heads) + 2 * _WIDE * held * ranks + _LOW * gathered


def _dense(config: Configuration, tokens: float) -> float:
    """The gathered rows, the first product in fp32 and in the type that computes its activation."""
    model = config.model
    gates = 2 if model.gated else 1
    return _LOW * tokens * model.hidden + (gates * _WIDE + _LOW) * tokens * model.ffn / config.tp


def _routed(config: Configuration, tokens: float, held: float) -> dict[str, float]:
    """Copies on their way, their first product, the router in fp32 and the shared expert, whole on every rank."""
    model = config.model
    gates = 2 if model.gated else 1
    copies = tokens / config.tp * model.top_k
    return {
        DISPATCH: _LOW * copies * _ROUTED[config.ep_mode] * model.hidden,
        EXPERTS: _LOW * copies * gates * model.expert_ffn,
        ROUTER: held * ((_WIDE + _LOW) * model.hidden + 2 * _WIDE * model.experts),
        SHARED: (gates * _WIDE + _LOW) * held * model.shared_ffn,
    }
