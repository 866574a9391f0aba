"""Activations that a layer of MindFormers' training_graph models leaves for its backward, under MindSpore 2.9.0.

Counted in compiled graphs (`tc3 dryrun`: what a forward subgraph hands to its backward), for alltoall_deredundency and
fused kernels; it is more than the mathematics needs:

* norms compute in fp32 and keep input and result; the MLP's first product is kept in fp32, in bf16 in routed experts;
* SwiGLU repeats itself: its result is not kept, whatever is recomputed;
* of the routed copies every permutation and exchange is kept: their number is known to the routing alone, and the
  backward of each asks the tensor for its shape;
* `select_recompute` of the norms saves their results, `select_comm_recompute` nothing that a graph shows.

Within 1 % of the graphs of the 438B recipe. MindFormers' alltoall pads the copies (105B's by 38 %), which is not
counted: 6 to 9 % of a layer's bytes.
"""

from __future__ import annotations

from tools.search.configuration import Configuration

_LOW, _WIDE = 2, 4  # bytes of a number in the type that computes, and in fp32
# of the routed rows: permuted and gathered, exchanged, sorted by expert, made by the experts, sorted back, sent back;
# plugins/hierarchical_ep's two steps each way, and fp32 sums: counted as if no row were dropped as a duplicate
_ROUTED = {"global": 6, "hierarchical": 6, "deduplicated": 13}
_LOGIT = 8  # bytes of a logit between the loss's forward and backward: log-softmax in fp32 and one-hot labels
_STATISTICS = 64  # bytes of a head and token that flash attention keeps beside its result


def kept(config: Configuration, kind: str, option: str = "none") -> float:
    """Bytes of one micro-batch and device; kinds and options as `tools.search.activations.saved`."""
    model = config.model
    tokens = config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    rows = held * model.hidden
    if kind == "embedding":
        return tokens * 4 / config.tp
    if kind == "head":
        return 2 * _WIDE * rows + tokens * (_LOW * model.hidden + _LOGIT * model.vocab / config.tp)
    if kind == "mtp":
        # two more norms and the rows that they give, side by side
        return kept(config, model.last_kind, option) + kept(config, "head") + (4 * _WIDE + 2 * _LOW) * rows
    if option == "full":
        return (_WIDE if config.fp32_residual else _LOW) * rows
    norms = (2 if option == "select" else 4) * _WIDE * rows + _LOW * rows
    mlp = _routed(config, tokens, held) if kind == "moe" else _dense(config, tokens)
    return norms + _attention(config, tokens, held) + mlp


def _attention(config: Configuration, tokens: float, held: float) -> float:
    """Queries, keys, values, the result as attention and as the projection want it; MLA's ranks, gathered and not."""
    model = config.model
    keys = model.heads if model.latent else model.kv_heads
    heads = model.heads * (model.qk_dim + 2 * model.v_dim) + keys * (model.qk_dim + model.v_dim)
    ranks = model.latent.query_rank + model.latent.kv_rank if model.latent else 0
    gathered = tokens * (ranks if model.latent else model.hidden)
    return tokens / config.tp * (_LOW * heads + _STATISTICS * model.heads) + 2 * _WIDE * held * ranks + _LOW * gathered


def _dense(config: Configuration, tokens: float) -> float:
    """The gathered rows, the first product in fp32 and in the type that computes its activation."""
    model = config.model
    gates = 2 if model.gated else 1
    return _LOW * tokens * model.hidden + (gates * _WIDE + _LOW) * tokens * model.ffn / config.tp


def _routed(config: Configuration, tokens: float, held: float) -> float:
    """Copies on their way, their first product, the router in fp32 and the shared expert, whole on every rank."""
    model = config.model
    gates = 2 if model.gated else 1
    copies = tokens / config.tp * model.top_k
    experts = _LOW * copies * (_ROUTED[config.ep_mode] * model.hidden + gates * model.expert_ffn)
    router = held * ((_WIDE + _LOW) * model.hidden + 2 * _WIDE * model.experts)
    return experts + router + (gates * _WIDE + _LOW) * held * model.shared_ffn
