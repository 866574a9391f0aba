"""What a layer of each kind consists of on one device: weights, matmuls, attention, memory traffic.

Kinds: "embedding", "dense", "moe", "mtp" (a layer, its projection and the norms) and "head" (last norm, output
projection and loss). Letters: h hidden, f MLP width, n heads, g key-value heads, k top-k, E experts, V vocabulary.

Weights are exact for MindFormers' graph mode without biases (compiled layouts agree, see `tools.dryrun`); elementwise
traffic is counted from the tensors that operators read and write, with fused norms, rotations and activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tools.search.configuration import Configuration, Model

KINDS = ("embedding", "dense", "moe", "mtp", "head")
ITEM = 2  # bytes of an activation in compute precision
# read and written for each attention score by an unfused forward: product, softmax, second product; dropout
_SCORE_BYTES, _DROPPED_SCORE_BYTES = 8, 5
_LOGIT_BYTES = 12  # read and written for each logit by the loss's forward, partly in fp32


@dataclass(frozen=True)
class Weight:
    """A matrix of rows x columns, as the framework stores it.

    Args:
        split: what is cut: "rows" or "columns" over tp, "experts" over ep, "" nothing.
        wide: used in fp32 (router, norms, embedding), so not cast to the compute precision.
        multiplies: it is the right side of a matmul.
    """

    name: str
    rows: int
    columns: int
    split: str = ""
    wide: bool = False
    multiplies: bool = True

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.rows * self.columns

    def cut(self, config: Configuration) -> int:
        """Over how many ranks it is cut."""
        if self.split == "experts":
            return config.ep * (config.tp if config.expert_tp else 1)
        return config.tp if self.split else 1

    def copies(self, config: Configuration) -> int:
        """Ranks of a stage that hold the same part of it."""
        return config.dp * config.tp * config.cp // self.cut(config)

    def group(self, config: Configuration) -> int:
        """How many of these share shards; MindSpore shards nothing where `shard_size` does not divide them."""
        copies, size = self.copies(config), config.shard_size
        return copies if not config.shard_optimizer or not size else 1 if copies % size else size

    def shards(self, config: Configuration) -> int:
        """Over how many the optimizer spreads it: its group, or none where it does not divide or is small."""
        group = self.group(config)
        rows = self.rows // (1 if self.split == "columns" else self.cut(config))
        small = 4 * self.size // self.cut(config) < config.shard_threshold
        return 1 if not config.shard_optimizer or small or rows % group else group


@lru_cache(maxsize=4096)
def weights(model: Model, kind: str, shared_whole: bool = False) -> tuple[Weight, ...]:
    """All weights of one layer of a kind (not cut)."""
    h = model.hidden
    if kind == "embedding":
        return (Weight("embedding", model.vocab, h, "rows", wide=True, multiplies=False),)
    if kind == "head":
        out = () if model.tied else (Weight("output", model.vocab, h, "rows"),)
        return (*out, _norm("final_norm", h))
    if kind == "mtp":
        extra = Weight("projection", h, 2 * h, "" if shared_whole else "rows")
        norms = tuple(_norm(f"mtp_norm_{index}", h) for index in range(3))
        return (*weights(model, model.last_kind, shared_whole), extra, *norms)
    mlp = _moe(model, shared_whole) if kind == "moe" else _mlp("mlp", h, model.ffn, model.gated, "rows", "columns")
    return (*attention_weights(model), *mlp, _norm("norm_1", h), _norm("norm_2", h))


@lru_cache(maxsize=256)
def attention_weights(model: Model) -> tuple[Weight, ...]:
    """The attention's part of a layer's weights."""
    h, n = model.hidden, model.heads
    if model.latent is None:
        norms = (_norm("qk_norm", 2 * model.head_dim),) if model.qk_norm else ()
        projected = (n + 2 * model.kv_heads) * model.head_dim
        return (Weight("qkv", projected, h, "rows"), Weight("proj", h, n * model.head_dim, "columns"), *norms)
    mla = model.latent
    found = [
        Weight("kv_down", mla.kv_rank + mla.rope, h),
        Weight("kv_up", n * (mla.nope + mla.value), mla.kv_rank, "rows"),
        Weight("proj", h, n * mla.value, "columns"),
    ]
    if mla.query_rank:
        found += [Weight("q_down", mla.query_rank, h), Weight("q_up", n * model.qk_dim, mla.query_rank, "rows")]
    else:
        found += [Weight("q", n * model.qk_dim, h, "rows")]
    if model.qk_norm:
        found += [_norm("kv_norm", mla.kv_rank), *([_norm("q_norm", mla.query_rank)] if mla.query_rank else [])]
    return tuple(found)


def _norm(name: str, width: int) -> Weight:
    return Weight(name, width, 1, wide=True, multiplies=False)


def _mlp(name: str, h: int, width: int, gated: bool, first: str, second: str) -> tuple[Weight, ...]:
    return (
        Weight(f"{name}_fc1", (2 if gated else 1) * width, h, first),
        Weight(f"{name}_fc2", h, width, second),
    )


def _moe(model: Model, shared_whole: bool) -> tuple[Weight, ...]:
    h, width = model.hidden, model.expert_ffn
    found = [
        Weight("router", model.experts, h, wide=True),
        Weight("experts_1", model.experts * h, (2 if model.gated else 1) * width, "experts"),
        Weight("experts_2", model.experts * width, h, "experts"),
    ]
    if model.shared_ffn:
        first, second = ("", "") if shared_whole else ("rows", "columns")
        found += _mlp("shared", h, model.shared_ffn, model.gated, first, second)
    return tuple(found)


def parameters(model: Model) -> int:
    """All weights of the model."""
    layers = [model.kind(index) for index in range(model.layers)]
    kinds = ["embedding", "head", *layers, *["mtp"] * model.mtp]
    return sum(weight.size for kind in kinds for weight in weights(model, kind))


@dataclass(frozen=True)
class Matmul:
    """`times` products of [rows, depth] and [depth, columns], forward; backward is twice that."""

    rows: float
    columns: float
    depth: float
    times: float = 1

    @property
    def flops(self) -> float:
        """Of all of them, forward."""
        return 2 * self.rows * self.columns * self.depth * self.times


@dataclass(frozen=True)
class Work:
    """One layer on one micro-batch and device, forward.

    Args:
        attention: FLOPs of scores and their product with the values.
        elementwise: bytes that operators other than matmuls read and write.
        gathered: bytes of the whole activation that a tensor-parallel AllGather or ReduceScatter makes or takes.
        collectives: such AllGathers and ReduceScatters, forward.
        moved_keys: bytes of keys and values of the device's part of the sequence, for context parallelism.
        turned_heads: bytes of its queries, keys, values and results, which Ulysses sends to the ranks of their heads.
        copies: rows that a device hands to experts; 0 without experts.
    """

    matmuls: tuple[Matmul, ...]
    attention: float = 0.0
    elementwise: float = 0.0
    gathered: float = 0.0
    collectives: int = 0
    moved_keys: float = 0.0
    copies: float = 0.0
    turned_heads: float = 0.0

    @property
    def flops(self) -> float:
        """Matmul and attention FLOPs."""
        return sum(matmul.flops for matmul in self.matmuls) + self.attention


def work(config: Configuration, kind: str) -> Work:
    """What a device does in one layer of a kind for one micro-batch."""
    model, tokens = config.model, config.rank_tokens
    held = tokens / config.tp if config.sequence_parallel else tokens
    h = model.hidden
    residual = 4 if config.fp32_residual else ITEM
    if kind == "embedding":
        return Work((), elementwise=3 * held * h * residual)
    if kind == "head":
        products: tuple[Matmul, ...] = (Matmul(tokens, model.vocab / config.tp, h),)
        logits = tokens * model.vocab / config.tp
        return Work(products, elementwise=_LOGIT_BYTES * logits, gathered=tokens * h * ITEM, collectives=1)
    if kind == "mtp":
        layer = work(config, model.last_kind)
        more = Matmul(held if config.shared_whole else tokens, h / (1 if config.shared_whole else config.tp), 2 * h)
        head = work(config, "head")
        products = (*layer.matmuls, more, *head.matmuls)
        traffic = layer.elementwise + head.elementwise + 6 * held * h * ITEM
        exchanged = (layer.moved_keys, layer.copies, layer.turned_heads)
        return Work(products, layer.attention, traffic, layer.gathered, 5, *exchanged)
    mlp, activated, copies = _mlp_work(config, kind, tokens, held)
    # two norms and two residual sums; dropout reads, writes and masks what it drops
    rows = 2 * (residual + ITEM) + 2 * (ITEM + 2 * residual) + (2 * (2 * ITEM + 1) if model.dropout else 0)
    turned = 2 * ITEM * (model.heads + model.kv_heads) * model.qk_dim / config.tp * tokens
    attention = _attention(config)
    if config.layer_only:
        return Work(mlp, elementwise=activated, copies=copies)
    return Work(
        matmuls=(*_projections(config, tokens, held), *mlp),
        attention=attention,
        elementwise=rows * held * h + turned + activated,
        gathered=tokens * h * ITEM,
        collectives=2 if kind == "moe" and not config.expert_tp else 4,
        moved_keys=tokens * model.kv_heads * (model.qk_dim + model.v_dim) / config.tp * ITEM,
        copies=copies,
        turned_heads=tokens * (model.heads + model.kv_heads) * (model.qk_dim + model.v_dim) / config.tp * ITEM,
    )


def score_bytes(config: Configuration) -> float:
    """Bytes that an unfused attention reads and writes for its scores, forward."""
    if config.flash:
        return 0.0
    each = _SCORE_BYTES + (_DROPPED_SCORE_BYTES if config.model.dropout else 0)
    return each * pairs(config, causal=False) * config.model.heads / config.tp


def pairs(config: Configuration, causal: bool = True) -> float:
    """Query-key pairs of a device's micro-batch and one head; windows taken as every other layer's."""
    sequence, window = config.sequence, config.model.window
    whole = sequence / 2 if causal else sequence
    seen = (whole + min(window, whole)) / 2 if window else whole
    return config.rank_tokens * seen


def _attention(config: Configuration) -> float:
    """Forward FLOPs; an unfused attention computes the masked half, too."""
    model = config.model
    return 2 * pairs(config, config.flash) * model.heads / config.tp * (model.qk_dim + model.v_dim)


def _projections(config: Configuration, tokens: float, held: float) -> tuple[Matmul, ...]:
    found = []
    for weight in attention_weights(config.model):
        if weight.multiplies:
            rows = weight.rows / (config.tp if weight.split == "rows" else 1)
            depth = weight.columns / (config.tp if weight.split == "columns" else 1)
            found.append(Matmul(tokens if weight.split else held, rows, depth))
    return tuple(found)


def _mlp_work(config: Configuration, kind: str, tokens: float, held: float) -> tuple[tuple[Matmul, ...], float, float]:
    """Matmuls, elementwise bytes and expert copies of the MLP."""
    model, gates = config.model, 2 if config.model.gated else 1
    moved = ITEM * (gates + 1)  # bytes of the activation function for each unit of width
    h = model.hidden
    if kind == "dense":
        width = model.ffn / config.tp
        return _two(tokens, h, width, gates), moved * width * tokens, 0.0
    # without expert_tp a rank routes its own part of the sequence, whether norms are cut along it or not
    routed = tokens if config.expert_tp else tokens / config.tp
    copies, local = routed * model.top_k, model.experts / config.ep
    width = model.expert_ffn / (config.tp if config.expert_tp else 1)
    products = _two(copies / local, h, width, gates, local)
    # copies are sorted by expert and back, by the All-to-All's own kernels or, in global mode, at both of its ends
    sorting = 8 if config.ep_mode == "global" and config.ep > 1 else 4
    traffic = moved * width * copies + sorting * ITEM * h * copies
    if model.biased:
        # the clamped, biased activation in separate kernels, and a bias to each product
        traffic += copies * ITEM * (19 * width + 2 * h)
    if model.shared_ffn:
        rows, shared = (held, model.shared_ffn) if config.shared_whole else (tokens, model.shared_ffn / config.tp)
        products += _two(rows, h, shared, gates)
        traffic += moved * shared * rows
    return (*products, Matmul(held, model.experts, h)), traffic, copies


def _two(rows: float, h: int, width: float, gates: int, times: float = 1) -> tuple[Matmul, ...]:
    return (Matmul(rows, gates * width, h, times), Matmul(rows, h, width, times))


def model_flops(config: Configuration, masked: bool = False) -> float:
    """FLOPs of a token in forward and backward without recomputation: 6 for each weight that multiplies and causal
    attention. With `masked` attention counts the masked half, too, as Megatron-LM's published numbers do."""
    model = config.model
    kinds = [model.kind(index) for index in range(model.layers)] + ["head"] + ["mtp", "head"] * model.mtp
    size = 0.0
    for kind in kinds:
        for weight in weights(model, kind):
            used = model.top_k / model.experts if weight.split == "experts" else 1
            size += weight.size * used if weight.multiplies else 0
    if model.tied:
        size += model.vocab * model.hidden * (1 + model.mtp)
    seen = config.sequence if masked else config.sequence / 2
    if model.window:
        seen = (seen + min(seen, model.window)) / 2
    attention = 2 * seen * model.heads * (model.qk_dim + model.v_dim) * (model.layers + model.mtp)
    return 6 * size + 3 * attention
