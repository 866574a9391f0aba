"""This module computes the FLOPs and the memory traffic of one device in a layer of each kind (see
`tools.model.KINDS`).

Elementwise traffic is counted from the tensors that operators read and write, with fused norms, rotations and
activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from plugins.hyper_connections import plan as hyper_connections
from tools.estimate.configuration import ATTENTION, EXPERTS, MLP, Configuration
from tools.model import attention_weights

# read and written for each attention score by an unfused forward beside its matmuls: softmax; dropout
_SCORE_BYTES, _DROPPED_SCORE_BYTES = 4, 5
# read and written for each number that a matmul in fp8 or fp4 takes in: read once, or twice where the largest is found
# first (one scale a tensor: fp8, and nvfp4 beside those of its blocks), written by rows and by columns
_CAST_BYTES = {"fp8": 6, "mxfp8": 4, "nvfp4": 6}
_LOGIT_BYTES = 12  # read and written for each logit by the loss's forward, partly in fp32


@dataclass(frozen=True)
class Matmul:
    """A `Matmul` stands for a number (`times`) of matrix products [rows, depth] x [depth, columns] in the forward pass;
    the backward pass computes twice as much.

    If `high` is True, the products are computed in bf16, even if the run's other matmuls are in fp8 or fp4 (this holds
    for logits and routers).
    """

    rows: float
    columns: float
    depth: float
    times: float = 1
    high: bool = False

    @property
    def flops(self) -> float:
        """Return the FLOPs of all matrix products in the forward pass."""
        return 2 * self.rows * self.columns * self.depth * self.times


@dataclass(frozen=True)
class Part:
    """A `Part` is the work of a part of a layer in the forward pass: the matmuls, the bytes that other operators move,
    and the number of token copies sent to experts. The field `sorting` holds the bytes that sorting moves.
    """

    matmuls: tuple[Matmul, ...]
    elementwise: float = 0.0
    copies: float = 0.0
    sorting: float = 0.0


@dataclass(frozen=True)
class Work:
    """A `Work` is the work of one layer on one device for one micro-batch's forward pass."""

    matmuls: tuple[Matmul, ...]
    attention: float = 0.0  # FLOPs of the attention scores and of their product with the values
    elementwise: float = 0.0  # bytes that operators other than matmuls read and write
    # bytes of the whole activation, the output of a tensor-parallel AllGather or the input of a ReduceScatter
    gathered: float = 0.0
    collectives: int = 0  # the number of these AllGathers and ReduceScatters
    # bytes of keys and values of the device's part of the sequence, which context parallelism sends
    moved_keys: float = 0.0
    copies: float = 0.0  # rows that a device sends to experts
    # bytes of queries, keys, values and results, which Ulysses sends to the ranks of their heads
    turned_heads: float = 0.0
    # of `elementwise`, to sort rows by expert and back; the backward pass moves as many, not twice as many
    sorting: float = 0.0

    @property
    def flops(self) -> float:
        """Return the FLOPs of matmuls and attention in the forward pass."""
        return sum(matmul.flops for matmul in self.matmuls) + self.attention


@lru_cache(maxsize=8192)
def work(config: Configuration, kind: str) -> Work:
    """Return the work of a device in one layer of the given kind for one micro-batch."""
    model, tokens = config.model, config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    h, item = model.hidden, config.item
    keys = item if model.latent else 2  # grouped-query attention rounds what its kernel reads to half precision
    residual = 4 if config.fp32_residual else item
    if kind == "embedding":
        return Work((), elementwise=3 * held * h * residual)
    if kind == "head":
        products: tuple[Matmul, ...] = (Matmul(tokens, model.vocab / config.tp, h, high=True),)
        logits = tokens * model.vocab / config.tp
        return Work(products, elementwise=_LOGIT_BYTES * logits, gathered=tokens * h * item, collectives=1)
    if kind == "mtp":
        layer = work(replace(config, model=replace(model, streams=1)), model.last_kind)
        more = Matmul(held if config.shared_whole else tokens, h / (1 if config.shared_whole else config.tp), 2 * h)
        head = work(config, "head")
        products = (*layer.matmuls, more, *head.matmuls)
        traffic = layer.elementwise + head.elementwise + 6 * held * h * item
        exchanged = (layer.moved_keys, layer.copies, layer.turned_heads, layer.sorting)
        return Work(products, layer.attention, traffic, layer.gathered, 5, *exchanged)
    mlp = _mlp_work(config, kind, tokens, held)
    # two norms and two residual sums; dropout reads, writes and masks what it drops
    rows = 2 * (residual + item) + 2 * (item + 2 * residual) + (2 * (2 * item + 1) if model.dropout else 0)
    attention = _attention(config)
    if config.layer_only:
        return Work(mlp.matmuls, elementwise=mlp.elementwise, copies=mlp.copies, sorting=mlp.sorting)
    mixing = mixing_part(config, held)
    return Work(
        matmuls=(*_projections(config, tokens, held), *mlp.matmuls, *mixing.matmuls),
        attention=attention,
        elementwise=rows * held * h + turned_bytes(config) + mlp.elementwise + mixing.elementwise,
        gathered=tokens * h * item,
        collectives=2 if kind == "moe" and not config.expert_tp else 4,
        moved_keys=tokens * model.kv_heads * (model.qk_dim + model.v_dim) / config.tp * keys,
        copies=mlp.copies,
        turned_heads=tokens * (model.heads + model.kv_heads) * (model.qk_dim + model.v_dim) / config.tp * keys,
        sorting=mlp.sorting,
    )


def mixing_part(config: Configuration, held: float) -> Part:
    """Return the work of both hyper-connections of a layer; the work is empty if the model has only one residual
    stream.

    The traffic is the sum over the operators of `plugins/hyper_connections`, none of which is fused: the cast to fp32,
    square, mean, H_pre x, the cast to the type of the residual, H_res x, H_post y, their sum and its cast; and for each
    division of Sinkhorn a sum, the addition of epsilon and the division. The matrix products with the gates are narrow,
    so their time is the time to move their operands.
    """
    model, n = config.model, config.model.streams
    if n == 1:
        return Part(())
    item = config.item
    residual = 4 if config.fp32_residual else item
    cast = item + 4 if config.fp32_residual else 0
    wide = n * model.hidden * ((item + 4) + (4 + 4) + 4 + item + cast + 6 * residual + (residual + item))
    narrow = model.hidden * (2 * item + residual)
    divisions = 2 * model.sinkhorn * 4 * (3 * n * n + 4 * n)
    sublayers, gates = len(hyper_connections.SUBLAYERS), hyper_connections.gates(n)
    products = (Matmul(held, gates, n * model.hidden, sublayers), Matmul(held, gates, model.hidden, sublayers))
    return Part(products, sublayers * held * (wide + narrow + divisions))


def repeated_parts(config: Configuration, kind: str) -> dict[str, Part]:
    """Return for each group of operators that can be recomputed (attention, MLP, experts) the work that a layer repeats
    if it recomputes this group.
    """
    model, tokens = config.model, config.rank_tokens
    up = [weight for weight in attention_weights(model) if weight.name in ("kv_up", "q_up", "q") and weight.multiplies]
    products = tuple(Matmul(tokens, weight.rows / config.tp, weight.columns) for weight in up)
    attention = Part(products if model.latent else (), turned_bytes(config))
    if kind != "moe":
        return {ATTENTION: attention, MLP: Part(_two(config, tokens, model.ffn / config.tp)[:1]), EXPERTS: Part(())}
    return {ATTENTION: attention, MLP: Part(shared_part(config).matmuls[:1]), EXPERTS: routed_part(config)}


def turned_bytes(config: Configuration) -> float:
    """Return the bytes of queries and keys that rotary position embeddings read and write in the forward pass."""
    model = config.model
    return 2 * config.item * (model.heads + model.kv_heads) * model.qk_dim / config.tp * config.rank_tokens


def cast_bytes(config: Configuration, matmuls: Iterable[Matmul]) -> float:
    """Return the bytes of HBM traffic for casts of activations in the forward pass. The casts of the backward pass have
    twice as many bytes as the casts of the forward pass. Casts of weights are not included, because the optimizer casts
    the weights once in a step.
    """
    each = _CAST_BYTES.get(config.dtype, 0)
    # rows x depth forward, rows x columns backward: a third of their sum, as backward counts twice
    return each / 3 * sum(m.times * m.rows * (m.depth + m.columns) for m in matmuls if not m.high)


def accumulated_bytes(config: Configuration, matmul: Matmul) -> float:
    """Return the bytes of HBM traffic for adding one micro-batch's gradient of a matmul's weights to the accumulated
    gradient, which is read and written. The result is 0 for FSDP, which reduces gradients as they are computed. The
    result is also 0 for MindFormers, because the fitted efficiencies of other operators include the time of adding
    gradients.
    """
    if config.shard_weights or config.keep_gathered or config.layer_only:
        return 0.0
    return (8 if config.wide_gradients else 4) * matmul.times * matmul.depth * matmul.columns


def score_bytes(config: Configuration) -> float:
    """Return the bytes of HBM traffic for attention scores in the forward pass; return 0 for attention with a fused
    kernel.
    """
    if config.flash:
        return 0.0
    each = _SCORE_BYTES + (_DROPPED_SCORE_BYTES if config.model.dropout else 0)
    return each * pairs(config, causal=False) * config.model.heads / config.tp


def score_passes(config: Configuration) -> float:
    """Return the HBM traffic for attention scores in the backward pass, divided by the traffic in the forward pass, for
    attention without a fused kernel. The backward passes of dropout and softmax also read the tensors that their
    forward passes kept.
    """
    return (6 + 5) / (_SCORE_BYTES + _DROPPED_SCORE_BYTES) if config.model.dropout else 6 / _SCORE_BYTES


def pairs(config: Configuration, causal: bool = True) -> float:
    """Return the number of query-key pairs that one attention head computes for a device's micro-batch. If every second
    layer has an attention window, the result is the average over all layers. Query-key pairs of different documents are
    masked, so a causal kernel spends no time on these pairs (`attended`).
    """
    sequence, window = config.sequence, config.model.window
    whole = sequence / 2 * config.attended if causal else sequence
    seen = (whole + min(window, whole)) / 2 if window else whole
    return config.rank_tokens * seen


def _attention(config: Configuration) -> float:
    """Return forward FLOPs of the slowest rank; an unfused attention computes the masked half, too."""
    model = config.model
    # of parts that follow each other the last one has cp - 1/2 of the cp / 2 that it would have on average
    slowest = (2 * config.cp - 1) / config.cp if config.contiguous and config.flash else 1.0
    return slowest * 2 * pairs(config, config.flash) * model.heads / config.tp * (model.qk_dim + model.v_dim)


def _projections(config: Configuration, tokens: float, held: float) -> tuple[Matmul, ...]:
    found = []
    for weight in attention_weights(config.model):
        if weight.multiplies:
            rows = weight.rows / (config.tp if weight.split == "rows" else 1)
            depth = weight.columns / (config.tp if weight.split == "columns" else 1)
            found.append(Matmul(tokens if weight.split else held, rows, depth))
    return tuple(found)


def _mlp_work(config: Configuration, kind: str, tokens: float, held: float) -> Part:
    """Return the MLP: dense, or routed and shared experts with the router."""
    if kind == "dense":
        width = config.model.ffn / config.tp
        return Part(_two(config, tokens, width), _activated(config) * width * tokens)
    routed, shared = routed_part(config), shared_part(config)
    products = (*routed.matmuls, *shared.matmuls, Matmul(held, config.model.experts, config.model.hidden, high=True))
    return Part(products, routed.elementwise + shared.elementwise, routed.copies, routed.sorting)


def routed_part(config: Configuration, share: float = 1.0) -> Part:
    """Return the work of the routed experts on the busiest device, including sorting the token copies by expert and
    back. The argument `share` is the fraction of a micro-batch's tokens that is processed, such as one chunk.
    """
    model, h = config.model, config.model.hidden
    # without expert_tp a rank routes its own part of the sequence, whether norms are cut along it or not
    tokens = share * config.rank_tokens / (1 if config.expert_tp else config.tp)
    copies, local = tokens * model.top_k, model.experts / config.ep
    computed = copies * config.skew
    width = model.expert_ffn / (config.tp if config.expert_tp else 1)
    # copies are sorted by expert and back, on the way (HybridEP), by separate kernels or, in global mode, at both ends
    sorting = 8 if config.ep_mode == "global" and config.ep > 1 else 0 if config.ep_mode == "hybridep" else 4
    moved = sorting * config.item * h * copies
    traffic = _activated(config) * width * computed + moved
    if model.biased:
        # the clamped, biased activation in separate kernels, and a bias to each product
        traffic += computed * config.item * (19 * width + 2 * h)
    return Part(_two(config, computed / local, width, local), traffic, copies, moved)


def shared_part(config: Configuration) -> Part:
    """Return the work of the shared expert; the work is empty if the model has no shared expert."""
    model, tokens = config.model, config.rank_tokens
    if not model.shared_ffn:
        return Part(())
    held = tokens / config.tp if config.sequence_parallel else tokens
    rows, width = (held, model.shared_ffn) if config.shared_whole else (tokens, model.shared_ffn / config.tp)
    return Part(_two(config, rows, width), _activated(config) * width * rows)


def _activated(config: Configuration) -> int:
    """Return bytes of the activation function for each unit of width and row."""
    return config.item * (3 if config.model.gated else 2)


def _two(config: Configuration, rows: float, width: float, times: float = 1) -> tuple[Matmul, ...]:
    h, gates = config.model.hidden, 2 if config.model.gated else 1
    return (Matmul(rows, gates * width, h, times), Matmul(rows, h, width, times))
