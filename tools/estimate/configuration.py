"""This module describes one training run independently of the software that runs it: model, parallel layout, batch,
recomputation and types.

A `Configuration` is made from a MindFormers recipe (`tools.estimate.from_recipe`) or from a row of a measurements file
(`tools.estimate.published.rows`); all code that predicts memory or time reads only the configuration.

MindFormers recomputes groups of a layer's operators by pattern (`recompute_config.select_recompute`).

Compiling the 105B recipe (`tc3 dryrun --quick`, MindFormers 1.9.0) showed which operators a pattern must name for
memory to be freed. A pattern that names a cell recomputes the operators inside of it and keeps the cell's result, so
the name of a projection frees nothing. Operators must therefore be named one by one, up to the last one whose result
attention or the activation function would keep. If two patterns name one operator, or a pattern names an operator that
MindFormers recomputes anyway (`reshape` of linear layers), the build ends with "'bool' object is not callable".

`Recompute.select` with "norms" is a separate group of operators, to which the groups of this module are added. The
recompute option of a layer joins the names that apply to it, for example "select+attention".

`weight_cut` and the functions after it compute how a run cuts one weight over its devices, and which devices share the
optimizer's state of the weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from plugins.errors import RecipeError
from tools.model import Adapters, Model, Weight
from tools.pipeline.schedules import is_v_shaped

# of the model of time and memory: layout files and bundles of `tc3 firsthour` of another version are refused, and
# fitted cluster files of another version are used with a warning. It is the digest of
# tests/tools/estimate/data/predictions.yaml, so that it changes with any prediction
MODEL_VERSION = "bb43f0c16b19"

Table = tuple[tuple[int, ...], ...]  # [chunks][stages]
# load of the busiest rank over the mean: assumed to be balanced, which the routers' biases aim at; efficiencies are
# fitted to whole runs, so they hold what unevenness those had
DEFAULT_SKEW = 1.0


class Cut(NamedTuple):
    """A `Cut` describes how `plugins.ep_overlap` cuts a micro-batch into chunks. The field `chunks` holds the numbers
    of parts of the batch and of a sequence, and `stride` determines the order of the chunks. If `chunks` or `stride` is
    None, the fastest choice is used.
    """

    chunks: tuple[int, int] | None = None
    stride: int | None = None


@dataclass(frozen=True)
class Recompute:
    """A `Recompute` holds the numbers of recomputed layers [chunks][stages] for each recompute option; None means that
    no layer has this option.
    """

    full: Table | None = None  # as a whole
    select: Table | None = None  # some operators, which `selective` names
    # repeat tensor-parallel AllGathers in the backward pass (`select_comm_recompute`)
    communication: Table | None = None
    # "norms" and activation functions (MindFormers' `select_recompute`), the core of "attention" (Megatron's), or half
    # of all "operators" (torchtitan's)
    selective: str = "norms"
    replay_tp: bool = True  # full recomputation repeats tensor-parallel communication (`mp_comm_recompute`)
    # (group of operators of `PATTERNS` other than norms, layers that recompute it)
    operators: tuple[tuple[str, Table], ...] = ()

    def layers(self, option: str, chunk: int, stage: int) -> int:
        """Return the number of layers of a chunk and stage that a recompute option ("full", "select" or
        "communication") covers.
        """
        table = getattr(self, option)
        return table[chunk][stage] if table else 0


@dataclass(frozen=True)
class Configuration:
    """A `Configuration` describes one training run: its model, layout, batch and settings. The constructor raises
    RecipeError if parallel degrees or layers do not fit together.
    """

    model: Model
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    layers: Table = ()  # of each chunk on each stage
    schedule: str = "1f1b"
    sequence: int = 4096
    batch: int = 1  # samples in a micro-batch of one data-parallel rank
    micro_batches: int = 1  # in a step of one data-parallel rank (with pipeline parallelism or gradient accumulation)
    # of the matmuls: "bf16", "fp16", "fp32", "fp8", or "mxfp8" and "nvfp4" (blocks that have a scale each)
    dtype: str = "bf16"
    # bytes of an element of the weight that the optimizer updates (MindFormers' params_dtype); the accumulated
    # gradients of a MindFormers recipe have the same type
    weight_item: int = 4
    state_item: int = 8  # bytes of optimizer state for each element of a weight
    matrix_state_item: int | None = None  # the same for a matrix of a layer, if it differs (Muon)
    recompute: Recompute = field(default_factory=Recompute)
    sequence_parallel: bool = True
    # tensor parallelism also cuts expert weights; if not, an EP group includes the ranks of a tensor-parallel group
    expert_tp: bool = False
    # a mode of `plugins.hierarchical_ep`; or "deepep" (tokens are also deduplicated inside nodes); or "hybridep" (as
    # "deepep", and the kernels of dispatch also sort the rows by expert)
    ep_mode: str = "global"
    # fp32 weights and moments, over the ranks that hold copies (ZeRO-1, MindFormers' enable_parallel_optimizer)
    shard_optimizer: bool = True
    shard_gradients: bool = False  # accumulated gradients, too
    shard_weights: bool = False  # the weights in the computing type, too (FSDP)
    shard_threshold: int = 0  # bytes below which a weight is not sharded
    shard_size: int = 0  # ranks over which one weight is sharded (optimizer_weight_shard_size); 0: all that hold a copy
    wide_gradients: bool = True  # gradients are reduced and summed in fp32
    flash: bool = True  # attention is one fused kernel
    # each layer of a MindFormers graph keeps the softmax of all scores, in fp32, for its backward pass (`CoreAttention`
    # of plugins/cpu_backend)
    keeps_scores: bool = False
    fused: bool = True  # elementwise operators are fused (by a compiler or by fused kernels)
    # communication of tp, dp, pp or ep overlaps with computation; of that of ep, a fitted share does, unless the chunks
    # are known (`ep_cut`)
    overlap_tp: bool = False
    # computing weight gradients hides the tensor-parallel reduction of input gradients (Megatron)
    overlap_tp_backward: bool = False
    overlap_dp: bool = False
    overlap_pp: bool = False
    overlap_ep: bool = False
    ep_cut: Cut | None = None  # the chunks of `plugins.ep_overlap` and their order; None: tokens are not cut
    # the shared expert runs during the communication of experts, without chunks (moe_shared_expert_overlap)
    shared_beside: bool = False
    skew: float = DEFAULT_SKEW  # load of the busiest rank of an EP group over the mean
    # router, shared experts and MTP projection are replicated on every tp rank (MindFormers' graph mode)
    shared_whole: bool = False
    # results of tensor-parallel AllGathers are kept for the backward pass and not gathered again (MindFormers)
    keep_gathered: bool = False
    # layers keep the activations of MindFormers' models (`tools.estimate.memory.training_graph`)
    training_graph: bool = False
    fp32_residual: bool = False
    # for each logit in the loss: a copy in the compute precision, and one in fp32, in which Megatron's cross entropy
    # computes the softmax and its gradient in place
    logit_bytes: int = 6
    # Transformer Engine keeps a spare gradient for each shape of a weight (`tools.estimate.memory.activations`)
    spare_gradients: bool = False
    # cp exchanges heads for parts of the sequence (Transformer Engine's a2a), and does not send keys and values
    cp_exchanges_heads: bool = False
    layer_only: bool = False  # a benchmark that executes only the MLP of one MoE layer, and no other part of a model
    adapters: Adapters | None = None  # that `plugins.lora` trains; None: all weights are trained
    attended: float = 1.0  # token pairs that attend to each other, over that number for samples of one document each
    # parts into which MindFormers' ulysses_degree_in_cp cuts the heads. MindFormers 1.9.0 exchanges heads for it, but
    # does not pass it to flash attention (flash_attention.py:384), which still gathers keys and values over all ranks
    # of cp. Compiled graphs therefore need exactly as much memory as without it.
    ulysses: int = 1
    # each rank of context parallelism has one part of the sequence, and all wait for the last rank, whose tokens attend
    # to all earlier ones; otherwise each rank has one part from the start and one from the end
    contiguous: bool = False
    # operators that run as captured graphs: "" none, "layers" attention and router of each layer (CUDA graphs by
    # scope), "step" all operators in one graph of fused operators
    graphs: str = ""

    def __post_init__(self) -> None:
        ranks = self.dp * self.tp * self.cp
        if min(ranks, self.pp, self.ep, self.batch, self.micro_batches) < 1 or ranks % self.ep:
            raise RecipeError(
                f"dp {self.dp} tp {self.tp} pp {self.pp} cp {self.cp} ep {self.ep}, micro-batches of {self.batch} x "
                f"{self.micro_batches}: each number must be at least 1, and ep must divide dp x tp x cp"
            )
        if self.expert_tp and self.model.experts and ranks % (self.ep * self.tp):
            raise RecipeError(
                f"dp {self.dp} tp {self.tp} cp {self.cp} ep {self.ep}: if tensor parallelism also cuts the experts "
                "(expert_tp), ep x tp must divide dp x tp x cp"
            )
        if any(len(row) != self.pp for row in self.layers) or sum(map(sum, self.layers)) != self.model.layers:
            raise RecipeError(
                f"layers {self.layers}: the table of layers by chunk and stage must have {self.pp} stages in each "
                f"chunk and {self.model.layers} layers in all"
            )

    def stage_kinds(self, stage: int) -> list[list[str]]:
        """Return for each chunk of a stage the kinds of its layers (`tools.model.KINDS`), in model order."""
        if self.layer_only:
            return [[self.model.last_kind]]
        return [list(row[stage]) for row in _kinds(self.model, self.layers, self.schedule)]

    def layer_numbers(self, stage: int) -> list[int]:
        """Return the numbers of the decoder layers of a stage, counted from 0, in the order of `stage_kinds`."""
        firsts = _first_layers(self.layers, self.schedule)
        spans = [(row[stage], self.layers[chunk][stage]) for chunk, row in enumerate(firsts)]
        return [first + place for first, count in spans for place in range(count)]

    @property
    def head_parts(self) -> int:
        """Return the number of parts into which context parallelism cuts the attention heads; return 1 if the heads are
        not cut.
        """
        return self.ulysses if self.cp % self.ulysses == 0 else 1

    @property
    def muon(self) -> bool:
        """Return whether the Muon optimizer updates the weight matrices of layers."""
        return self.matrix_state_item is not None

    @property
    def item(self) -> int:
        """Return the bytes of an element in the compute dtype; fp8 and fp4 count as bf16, from which they are
        converted.
        """
        return 4 if self.dtype == "fp32" else 2

    @property
    def copies_weights(self) -> bool:
        """Return whether each forward or backward pass makes its own copy of weights in the compute dtype.

        If the compute dtype is narrower than the weight's dtype and the optimizer is sharded, MindFormers' graphs make
        one copy for the whole step. In a pipeline without a sharded optimizer, and for weights whose dtype is narrower
        than the compute dtype, each pass makes its own copy. Weights that already have the compute dtype are gathered
        once from the optimizer's shards; without shards the passes of a pipeline copy these weights (TensorMove, which
        MindSpore inserts where a subgraph reads a parameter).
        """
        narrower, as_wide = self.weight_item < self.item, self.weight_item == self.item
        return self.training_graph and (narrower or (self.pp > 1 and (as_wide or not self.shard_optimizer)))

    @property
    def devices(self) -> int:
        """Return the number of devices of the run."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def chunks(self) -> int:
        """Return the number of model chunks on a stage."""
        return len(self.layers)

    @property
    def global_batch(self) -> int:
        """Return the number of samples in a step over all data-parallel ranks."""
        return self.dp * self.batch * self.micro_batches

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step."""
        return self.global_batch * self.sequence

    @property
    def rank_sequence(self) -> int:
        """Return the number of tokens of one sequence that one device routes to experts."""
        return self.sequence // (self.tp * self.cp)

    @property
    def rank_tokens(self) -> int:
        """Return the number of tokens of a micro-batch that a tensor-parallel group processes."""
        return self.batch * self.sequence // self.cp


@lru_cache(maxsize=1024)
def _kinds(model: Model, layers: Table, schedule: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return [chunks][stages] kinds: embedding first, MTP and head on the last chunk."""
    firsts = _first_layers(layers, schedule)
    found = [
        [model.pattern[first : first + count] for first, count in zip(*rows, strict=True)]
        for rows in zip(firsts, layers, strict=True)
    ]
    found[0][0] = ("embedding", *found[0][0])
    turned = is_v_shaped(schedule) and len(layers) % 2 == 0
    end, before = (0, 1) if turned else (len(layers[0]) - 1, len(layers[0]) - 2)
    found[-1][end] = (*found[-1][end], "head")
    # an empty last chunk is left to the head
    place = before if not layers[-1][end] and len(layers[0]) > 1 else end
    found[-1][place] = (*found[-1][place], *["mtp"] * model.mtp)
    return tuple(tuple(row) for row in found)


@lru_cache(maxsize=1024)
def _first_layers(layers: Table, schedule: str) -> Table:
    """Return the number of the first layer of each chunk and stage, [chunks][stages]."""
    found = [[0] * len(row) for row in layers]
    first = 0
    for chunk, row in enumerate(layers):
        order = range(len(row))
        for stage in reversed(order) if is_v_shaped(schedule) and chunk % 2 else order:
            found[chunk][stage] = first
            first += row[stage]
    return tuple(map(tuple, found))


def places(layers: Table, schedule: str) -> list[tuple[int, int, int]]:
    """Return for each layer of the model, in order, a triple (chunk, stage, position in the chunk)."""
    found = []
    for chunk, row in enumerate(layers):
        order = range(len(row))
        for stage in reversed(order) if is_v_shaped(schedule) and chunk % 2 else order:
            found += [(chunk, stage, place) for place in range(row[stage])]
    return found


def even_layers(total: int, stages: int, chunks: int, mtp: int = 0) -> Table:
    """Distribute layers over chunks and stages as evenly as possible, and return the numbers of layers
    [chunks][stages]. If the layers cannot be divided equally, the last chunk of the model gets one layer less, then the
    first chunk, then the last but one, and so on.

    The first and the last chunk hold the embedding and the head, so frameworks place fewer layers in these chunks
    (Llama 3: 126 layers on 16 stages). With MTP, if possible, the last chunk has the head and no layers, and the chunk
    before it has the MTP layers and as few other layers as possible. If this is not possible, only the last chunk gets
    fewer layers (as in Megatron-Bridge for DeepSeek-V3: 15 chunks of 4 layers, then a chunk of 1 layer).
    """
    places = stages * chunks
    most = -(-total // places)
    counts = [most] * places
    missing = most * places - total
    if mtp and places > 2 and missing >= most:
        counts[-1], counts[-2] = 0, max(0, 2 * most - missing)
        missing -= most + (most - counts[-2])
    elif mtp and places > 2:
        counts[-1], missing = most - missing, 0
    ends = (index // 2 if index % 2 else places - 1 - index // 2 for index in range(places))
    for place in [place for place in ends if counts[place] == most][:missing]:
        counts[place] -= 1
    return tuple(tuple(counts[first : first + stages]) for first in range(0, places, stages))


def spread(value: Any, layers: Table) -> Table | None:
    """Return the numbers of layers [chunks][stages] that the value of a recompute key selects. The value is a flag, a
    list with a number for each stage, or one list for each chunk.

    A single number for a stage is distributed over its chunks in turns, beginning with chunk 0, as in MindFormers
    (LayerSetting). A list of operators selects all layers, and a mapping from operators to numbers selects the largest
    of these numbers. True selects all layers.
    """
    if isinstance(value, dict):
        tables = [table for table in (spread(inner, layers) for inner in value.values()) if table]
        return max(tables, key=lambda table: sum(map(sum, table)), default=None)
    if not value:
        return None
    if not isinstance(value, (list, tuple)) or isinstance(value[0], str):
        return layers
    if not any(isinstance(row, (list, tuple)) for row in value):
        columns = [_dealt(want, own) for want, own in zip(value, zip(*layers, strict=True), strict=True)]
        return tuple(zip(*columns, strict=True))
    rows = [row if isinstance(row, (list, tuple)) else [row] * len(layers[0]) for row in value]
    return tuple(
        tuple(_at_most(*pair) for pair in zip(row, own, strict=True)) for row, own in zip(rows, layers, strict=True)
    )


def _at_most(want: int | bool, have: int) -> int:
    return have * want if isinstance(want, bool) else min(int(want), have)


def _dealt(want: int | bool, own: Sequence[int]) -> list[int]:
    """Return `want` layers of a stage with chunks `own`: one to each chunk in turn, while it has one left."""
    taken, left = [0] * len(own), _at_most(want, sum(own))
    while left:
        for chunk in [chunk for chunk, have in enumerate(own) if taken[chunk] < have][:left]:
            taken[chunk] += 1
            left -= 1
    return taken


ATTENTION, MLP, EXPERTS = "attention", "mlp", "experts"
NORMS = "select"
PATTERNS = {
    # queries, keys and values from what MLA compresses; flash attention and its result are not repeated
    ATTENTION: (
        r"self_attention\.linear_(q_up_proj|kv_up_proj|qb|kvb)\.(cast|matmul)",
        r"self_attention\.apply_rotary_emb2?\.(add|mul|mul_mscale|neg|cast|rope)",
        r"self_attention\.apply_rotary_emb2?\.(split|cat|stack|slice|strideslice|reshape)",
        r"self_attention\.(split|pe_concat|tile_kv|reshape|expand_dims|cast)",
        r"self_attention\.core_attention\.(bnsd_transpose|bsh_transpose)",
    ),
    # the first product of a dense MLP and of the shared expert, and what the second takes; SwiGLU repeats itself anyway
    MLP: (
        r"mlp\.linear_fc1\.(cast|matmul)",
        r"mlp\.transpose",
        r"mlp\.linear_fc2\.cast",
        r"mlp\.shared_experts\.linear_fc1\.(cast|matmul)",
        r"mlp\.shared_experts\.transpose",
        r"mlp\.shared_experts\.linear_fc2\.cast",
    ),
    # dispatch, routed experts and combine, their communication included
    EXPERTS: (r"mlp\.experts",),
}


def offered(config: Configuration) -> tuple[str, ...]:
    """Return the groups of operators that a run could recompute, and whose activation bytes the estimator knows. Return
    no groups of operators for models that are not built from `mindformers.parallel_core.training_graph`. The group
    "attention" is returned only for models with MLA in runs without context parallelism, because context parallelism
    keeps the gathered keys and values. The group "mlp" is returned only for models with a gated MLP, and the group
    "experts" only for runs in which `plugins.ep_overlap` does not cut micro-batches into chunks.
    """
    model = config.model
    if not config.training_graph:
        return ()
    known = {
        ATTENTION: model.latent is not None and config.cp == 1,
        MLP: model.gated,
        EXPERTS: bool(model.experts) and config.ep_cut is None,
    }
    return tuple(name for name, fits in known.items() if fits)


def joined(names: Iterable[str]) -> str:
    """Join the names of a layer's recompute options, such as "select+attention"; return "none" for a layer without
    options.
    """
    return "+".join(names) or "none"


def parts_of(option: str) -> tuple[str, ...]:
    """Return the parts of a combined recompute option, such as ("select", "attention") for "select+attention"; return
    () for "none".
    """
    return () if option == "none" else tuple(option.split("+"))


def tensor_cuts(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a model that the degree of tensor parallelism must divide, each group of sizes under the
    words for a degree that does not.
    """
    widths = (model.vocab, model.hidden, model.ffn, model.shared_ffn)
    return {
        "does not divide the heads": (model.heads,),
        "does not divide the key-value heads": () if model.latent else (model.kv_heads,),
        "does not divide vocabulary, hidden size or an MLP's width": widths,
    }


def weight_cut(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks over which tensor and expert parallelism cut a weight, before the optimizer shards
    it.
    """
    if weight.split == "experts":
        return config.ep * (config.tp if config.expert_tp else 1)
    return config.tp if weight.split else 1


def weight_copies(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks of a stage that hold the same part of a weight."""
    return config.dp * config.tp * config.cp // weight_cut(weight, config)


# what MindFormers' Muon keeps whole on every copy (gpt_model.py, get_op_groups_info)
_UNSHARDED = ("q", "q_up", "q_down", "kv_up", "kv_down", "projection")


def shard_group(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks over which the optimizer shards a weight. The result is 1 if `shard_size` does not
    divide the number of ranks that hold the same part of the weight, because MindSpore shards nothing in this case.
    """
    if config.muon and weight.name in _UNSHARDED:
        return 1
    held, size = weight_copies(weight, config), config.shard_size
    return held if not config.shard_optimizer or not size else 1 if held % size else size


def weight_shards(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks over which the optimizer shards a weight; return 1 if the weight is too small, or if
    the number of its rows is not divisible by `shard_group`.
    """
    sharing = shard_group(weight, config)
    rows = weight.rows // (1 if weight.split == "columns" else weight_cut(weight, config))
    small = 4 * weight.size // weight_cut(weight, config) < config.shard_threshold
    return 1 if not config.shard_optimizer or small or rows % sharing else sharing
