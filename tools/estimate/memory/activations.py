"""Activations that a layer leaves for its backward, under every recompute option. Bytes of one micro-batch and device.

Counted tensor by tensor as Korthikanti et al. (arXiv 2205.05198) do; without gates, with dropout and unfused attention
this is their s b h (10 / t + 24 / t + 5 a s / (h t)) with sequence parallelism, and 10 instead of 10 / t without it.
"""

from __future__ import annotations

from tools.estimate.configuration import Configuration
from tools.estimate.layer_model import ITEM
from tools.estimate.memory.training_graph import kept, layer_pass, loss_pass
from tools.model.architecture import Model
from tools.pipeline.schedules import is_v_shaped

_SCORE = 5  # bytes kept for each score of an unfused attention: softmax, its dropout and the mask


def saved(config: Configuration, kind: str, option: str = "none") -> float:
    """Bytes that one layer keeps; option: "none", "select", "communication" or "full"."""
    if config.training_graph:
        return kept(config, kind, option)
    model = config.model
    h, residual = model.hidden, 4 if config.fp32_residual else ITEM
    tokens = config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    if kind == "embedding":
        return tokens * 4 / config.tp
    if kind == "head":
        return (2 * ITEM + residual) * held * h
    if kind == "mtp":
        head = saved(config, "head")
        return saved(config, model.last_kind, option) + head + 3 * ITEM * held * h
    if option == "full":
        return residual * held * h
    if option == "select" and config.recompute.selective == "operators":
        return residual * held * h + _halved(model) * tokens / config.tp
    cheap = option == "select" and config.recompute.selective != "attention"
    gathered = config.keep_gathered and config.sequence_parallel and option != "communication"
    normed = tokens if gathered else held  # rows of a norm's result, if it is kept as gathered
    rows = 2 * residual * held + (0 if cheap else 2 * ITEM * (normed if kind == "dense" else (normed + held) / 2))
    masks = 2 * held if model.dropout else 0
    scores = 0.0
    if not (config.flash or (option == "select" and config.recompute.selective == "attention")):
        scores = _SCORE * tokens * config.sequence * model.heads / config.tp
    mlp = _routed(config, tokens, held, cheap) if kind == "moe" else _dense(config, tokens, cheap)
    return (rows + masks) * h + tokens * _attention(model) / config.tp + scores + mlp


def _attention(model: Model) -> float:
    """Bytes of a token: queries, keys, values, the result, and what MLA compresses."""
    heads = model.heads * (model.qk_dim + model.v_dim)
    if model.latent is None:
        return ITEM * (heads + 2 * model.kv_heads * model.head_dim)
    ranks = 2 * (model.latent.query_rank + model.latent.kv_rank)
    return ITEM * (2 * heads + ranks)


def _halved(model: Model) -> float:
    """Bytes of a token where every second matmul's result is kept, and the attention's (torchtitan)."""
    heads = (model.heads + model.kv_heads) * model.qk_dim + model.kv_heads * model.v_dim
    width = model.ffn if not model.experts else model.top_k * model.expert_ffn + model.shared_ffn
    products = heads + 2 * model.hidden + (2 if model.gated else 1) * width
    return ITEM * (products / 2 + model.heads * model.v_dim)


def _units(config: Configuration, cheap: bool) -> float:
    """Bytes for each unit of an MLP's width: the first product, and the activation's result unless it is repeated."""
    gates = 2 if config.model.gated else 1
    inner = 1 if config.model.gated and not config.fused else 0
    return ITEM * (gates + (0 if cheap else 1 + inner))


def _dense(config: Configuration, tokens: float, cheap: bool) -> float:
    return tokens * config.model.ffn / config.tp * _units(config, cheap)


def _routed(config: Configuration, tokens: float, held: float, cheap: bool) -> float:
    """Router scores in fp32, what experts take, make inside and give back, and the shared expert."""
    model = config.model
    routed = tokens if config.expert_tp else tokens / config.tp
    width = model.expert_ffn / (config.tp if config.expert_tp else 1)
    copies = routed * model.top_k * (2 * ITEM * model.hidden + width * _units(config, cheap))
    rows = held if config.shared_whole else tokens / config.tp
    return copies + rows * model.shared_ffn * _units(config, cheap) + 2 * 4 * held * model.experts


def mtp_option(config: Configuration) -> str:
    """What MTP layers recompute: "full", if the last layer does, or "none".

    MindFormers sets them up as the last layer; the operators of a partial recomputation are none of an MTP layer's own.
    """
    places = []
    for chunk, row in enumerate(config.layers):
        order = range(len(row))
        turned = is_v_shaped(config.schedule) and chunk % 2
        places += [(chunk, stage) for stage in (reversed(order) if turned else order) if row[stage]]
    chunk, stage = places[-1]
    return "full" if config.recompute.layers("full", chunk, stage) >= config.layers[chunk][stage] else "none"


def working(config: Configuration, kinds: list[str]) -> float:
    """Most bytes that one pass of a chunk needs beside what is kept: a layer run again, or the loss."""
    found = [0.0]
    for kind in kinds:
        again = bool(config.recompute.full) and (kind != "mtp" or mtp_option(config) == "full")
        if kind in ("dense", "moe", "mtp") and config.training_graph:
            found.append(layer_pass(config, kind, again))
        elif kind in ("dense", "moe", "mtp"):
            # activations of one layer and their gradients; without recomputation the former are among what is kept
            found.append(saved(config, kind) * (2 if again else 1))
        elif kind == "head" and config.training_graph:
            found.append(loss_pass(config, "mtp" in kinds))
        elif kind == "head":
            found.append(config.logit_bytes * config.rank_tokens * config.model.vocab / config.tp)
    return max(found)
