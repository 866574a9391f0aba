"""This module describes one training run in neutral terms: model, parallel layout, batch, recomputation and types.

A `Configuration` is made from a MindFormers recipe (`tools.estimate.from_recipe`) or from a row of a measurements file
(`tools.estimate.published.rows`); all code that predicts memory or time reads only the configuration.

MindFormers recomputes groups of a layer's operators by pattern (`recompute_config.select_recompute`).

Which operators a pattern must name for memory to be freed was found by compiling (`tc3 dryrun --quick` of the 105B,
MindFormers 1.9.0). A cell's name recomputes what is inside of it and keeps its result, so that a projection's own name
frees nothing; operators are named one by one, the last one whose result attention or activation keeps included. An
operator that two patterns name, or that MindFormers recomputes anyway (`reshape` of linear layers), ends the build with
"'bool' object is not callable".

`Recompute.select` with "norms" is a group of its own; the groups here come beside it. An option that a layer has is
the names that apply to it, joined: "select+attention".

`weight_cut` and the functions beside it say how a run cuts one weight over its devices, and which of them share the
optimizer's state for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from plugins.errors import RecipeError
from tools.model import Adapters, Model, Weight
from tools.pipeline.schedules import is_v_shaped

Table = tuple[tuple[int, ...], ...]  # [chunks][stages]
# load of the busiest rank over the mean: assumed to be balanced, which the routers' biases aim at; efficiencies are
# fitted to whole runs, so they hold what unevenness those had
DEFAULT_SKEW = 1.0


class Cut(NamedTuple):
    """A `Cut` says into how many chunks `plugins.ep_overlap` cuts a micro-batch, and in which order it issues their
    steps.

    Args:
        chunks: parts of the batch and of a sequence; None: the best that fit, as `chunks: auto` asks for.
        stride: the order of issue; None: the best.
    """

    chunks: tuple[int, int] | None = None
    stride: int | None = None


@dataclass(frozen=True)
class Recompute:
    """A `Recompute` says how many layers of each chunk and stage, [chunks][stages], the backward pass recomputes, and
    which part of them; None means no layers.

    Args:
        full: whole layers.
        select: some operators, by `selective`: "norms" and activation functions (MindFormers' `select_recompute`),
            the core of "attention" (Megatron's), or half of all "operators" (torchtitan's).
        communication: what tensor-parallel AllGathers made (`select_comm_recompute`).
        replay_tp: full recomputation repeats tensor-parallel communication (`mp_comm_recompute`).
        operators: groups of `PATTERNS` beside norms, each with its layers.
    """

    full: Table | None = None
    select: Table | None = None
    communication: Table | None = None
    selective: str = "norms"
    replay_tp: bool = True
    operators: tuple[tuple[str, Table], ...] = ()

    def layers(self, option: str, chunk: int, stage: int) -> int:
        """Return the number of layers of a chunk and stage with an option ("full", "select" or "communication")."""
        table = getattr(self, option)
        return table[chunk][stage] if table else 0


@dataclass(frozen=True)
class Configuration:
    """A `Configuration` is one training run; RecipeError is raised if its degrees or layers do not fit together.

    Args:
        layers: [chunks][stages] layers of each chunk on each stage.
        batch: samples of a micro-batch on a data-parallel rank.
        micro_batches: runs of the pipeline, or accumulation steps, in a step.
        dtype: the dtype of the matmuls: "bf16", "fp16", "fp32", "fp8", or in blocks with a scale each "mxfp8", "nvfp4".
        weight_item: bytes of an element of a weight as the optimizer updates it (MindFormers' params_dtype); the
            accumulated gradient of a MindFormers recipe has them as well.
        state_item: bytes of optimizer state for such an element; matrix_state_item: for one of a layer's matrices,
            where that is another number (Muon).
        ep_mode: a mode of `plugins.hierarchical_ep`; or "deepep": deduplicated inside nodes, too; or "hybridep": that,
            and its kernels sort the rows by expert on the way.
        expert_tp: expert weights are also cut over tp (without it the EP group takes tp ranks in).
        shard_optimizer: fp32 weights and moments are sharded over the ranks that hold copies (ZeRO-1, MindFormers'
            enable_parallel_optimizer); shard_gradients: accumulated gradients, too; shard_weights: and the weights
            that compute (FSDP).
        shard_threshold: bytes below which a weight is not sharded.
        shard_size: copies that share one weight's shards (optimizer_weight_shard_size); 0: all of them.
        wide_gradients: gradients are reduced and summed in fp32.
        flash: attention is one fused kernel; fused: elementwise operators are fused (a compiler or fused kernels).
        ep_cut: chunks and order of `plugins.ep_overlap`; None: nothing is cut.
        shared_beside: the shared expert runs beside communication without chunks (moe_shared_expert_overlap).
        skew: load of the busiest rank of an EP group over the mean.
        overlap_tp, overlap_dp, overlap_pp, overlap_ep: this communication runs beside computation; of expert
            parallelism a fitted share, where chunks are not known (`ep_cut`).
        overlap_tp_backward: gradients of weights hide the reduction of gradients of inputs (Megatron).
        shared_whole: router, shared experts and MTP projection are whole on every tp rank (MindFormers' graph mode).
        keep_gathered: what tensor-parallel AllGathers made is kept for backward, not gathered again (MindFormers).
        training_graph: activations as MindFormers' training_graph models keep them, see `activations_graph`.
        fp32_residual: the residual stream is kept in fp32.
        ulysses: parts of the heads that MindFormers' ulysses_degree_in_cp cuts. MindFormers 1.9.0 exchanges heads for
            it, but does not tell its flash attention (flash_attention.py:384), which gathers keys and values over the
            whole of cp all the same: compiled graphs hold as much memory as without it, to the byte.
        contiguous: context parallelism cuts a sequence into parts that follow each other, and all ranks wait for the
            last one, which attends to everything before it (else each rank has a part of both ends).
        graphs: what the host does not launch operator by operator: "" nothing, "layers" attention and routers of each
            layer (CUDA graphs by scope), "step" all of it, in one graph of fused operators.
        logit_bytes: for each logit while the loss runs: compute precision and fp32, in which Megatron's cross entropy
            makes the softmax and its gradient in place.
        spare_gradients: Transformer Engine keeps a gradient of every weight's shape (`memory.megatron`).
        cp_exchanges_heads: context parallelism exchanges heads and sequences (Transformer Engine's a2a), not keys.
        layer_only: only one MoE layer's MLP (a layer benchmark), no model around it.
        adapters: the adapters of `plugins.lora`; None trains all weights.
        attended: pairs of tokens that attend to each other over those of samples of one document.
    """

    model: Model
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    layers: Table = ()
    schedule: str = "1f1b"
    sequence: int = 4096
    batch: int = 1
    micro_batches: int = 1
    dtype: str = "bf16"
    weight_item: int = 4
    state_item: int = 8
    matrix_state_item: int | None = None
    recompute: Recompute = field(default_factory=Recompute)
    sequence_parallel: bool = True
    expert_tp: bool = False
    ep_mode: str = "global"
    shard_optimizer: bool = True
    shard_gradients: bool = False
    shard_weights: bool = False
    shard_threshold: int = 0
    shard_size: int = 0
    wide_gradients: bool = True
    flash: bool = True
    fused: bool = True
    overlap_tp: bool = False
    overlap_tp_backward: bool = False
    overlap_dp: bool = False
    overlap_pp: bool = False
    overlap_ep: bool = False
    ep_cut: Cut | None = None
    shared_beside: bool = False
    skew: float = DEFAULT_SKEW
    shared_whole: bool = False
    keep_gathered: bool = False
    training_graph: bool = False
    fp32_residual: bool = False
    logit_bytes: int = 6
    spare_gradients: bool = False
    cp_exchanges_heads: bool = False
    layer_only: bool = False
    adapters: Adapters | None = None
    attended: float = 1.0
    ulysses: int = 1
    contiguous: bool = False
    graphs: str = ""

    def __post_init__(self) -> None:
        ranks = self.dp * self.tp * self.cp
        if min(ranks, self.pp, self.ep, self.batch, self.micro_batches) < 1 or ranks % self.ep:
            raise RecipeError(
                f"dp {self.dp} tp {self.tp} pp {self.pp} cp {self.cp} ep {self.ep}, micro-batches of {self.batch} x "
                f"{self.micro_batches}: each number must be at least 1, and ep must divide dp x tp x cp"
            )
        if any(len(row) != self.pp for row in self.layers) or sum(map(sum, self.layers)) != self.model.layers:
            raise RecipeError(
                f"layers {self.layers}: the table must have {self.pp} stages in each chunk, and {self.model.layers} "
                "layers in all"
            )

    def stage_kinds(self, stage: int) -> list[list[str]]:
        """Return for each chunk of a stage its kinds of layers, in model order; see `tools.model.KINDS`."""
        if self.layer_only:
            return [[self.model.last_kind]]
        return [list(row[stage]) for row in _kinds(self.model, self.layers, self.schedule)]

    def layer_numbers(self, stage: int) -> list[int]:
        """Return the decoder layers of a stage, counted from 0, in the order of `stage_kinds`."""
        firsts = _first_layers(self.layers, self.schedule)
        spans = [(row[stage], self.layers[chunk][stage]) for chunk, row in enumerate(firsts)]
        return [first + place for first, count in spans for place in range(count)]

    @property
    def head_parts(self) -> int:
        """Return the number of parts into which context parallelism cuts the heads; 1 if it does not cut them."""
        return self.ulysses if self.cp % self.ulysses == 0 else 1

    @property
    def muon(self) -> bool:
        """Return whether Muon updates the matrices of layers."""
        return self.matrix_state_item is not None

    @property
    def item(self) -> int:
        """Return the bytes of an element in the computing type; fp8 and fp4 values are made from bf16 values."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def copies_weights(self) -> bool:
        """Return whether each pass makes its own copy of weights in the computing type.

        MindFormers' graphs make a narrower one once for the whole step if the optimizer is sharded; in a pipeline
        without shards, and of what is narrower itself, each pass makes its own. What is as wide already is gathered
        once from the optimizer's shards; where there are none, a pipeline's passes copy it (TensorMove, which MindSpore
        puts where a subgraph reads a parameter).
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
        """Return the number of samples in a step."""
        return self.dp * self.batch * self.micro_batches

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a step."""
        return self.global_batch * self.sequence

    @property
    def rank_sequence(self) -> int:
        """Return the number of tokens of a sequence that one device routes."""
        return self.sequence // (self.tp * self.cp)

    @property
    def rank_tokens(self) -> int:
        """Return the number of tokens of a micro-batch that a tensor-parallel group computes."""
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
    """Return [chunks][stages] the number of the first layer there."""
    found = [[0] * len(row) for row in layers]
    first = 0
    for chunk, row in enumerate(layers):
        order = range(len(row))
        for stage in reversed(order) if is_v_shaped(schedule) and chunk % 2 else order:
            found[chunk][stage] = first
            first += row[stage]
    return tuple(map(tuple, found))


def even_layers(total: int, stages: int, chunks: int, mtp: int = 0) -> Table:
    """Return numbers of layers [chunks][stages] that are as even as possible. If the layers cannot be divided equally,
    the last chunk of the model gets one layer less, then the first chunk, then the last but one, and so on.

    The ends hold the embedding and the head, so frameworks leave them the fewer layers (Llama 3: 126 on 16 stages).
    With MTP the last chunk is emptied for the head, where that is possible, and then the one before for MTP; else all
    that is missing is missing at the last chunk (so does Megatron-Bridge for DeepSeek-V3: 15 times 4 layers, then 1).
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
    """Return numbers of layers [chunks][stages] for a recompute value, which is a flag, numbers of layers by stage, or
    numbers by chunk and stage.

    One number a stage is dealt to its chunks in turns, chunk 0 first, as MindFormers does (LayerSetting). A list of
    operators counts as all layers, a mapping of operators as the most layers that one of them names. True is all.
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
    """Return `want` layers of a stage whose chunks have `own`: one to each chunk in turn, as long as it has one
    left.
    """
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
    """Return the groups of operators that a run could recompute and whose activation bytes are known.

    None outside of MindFormers' training_graph. Attention's are those of MLA without context parallelism, which keeps
    keys and values as gathered; the MLP's those of gated ones; experts' those that `plugins.ep_overlap` does not cut.
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
    """Return the name of a layer's recompute option that joins several options, such as "select+attention"; "none" if
    there are none.
    """
    return "+".join(names) or "none"


def parts_of(option: str) -> tuple[str, ...]:
    """Return the names of the options that a joined recompute option consists of; () for "none"."""
    return () if option == "none" else tuple(option.split("+"))


def weight_cut(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks over which the weight itself is cut, before the optimizer shards it."""
    if weight.split == "experts":
        return config.ep * (config.tp if config.expert_tp else 1)
    return config.tp if weight.split else 1


def weight_copies(weight: Weight, config: Configuration) -> int:
    """Return the number of ranks of a stage that hold the same part of the weight."""
    return config.dp * config.tp * config.cp // weight_cut(weight, config)


# what MindFormers' Muon keeps whole on every copy (gpt_model.py, get_op_groups_info)
_UNSHARDED = ("q", "q_up", "q_down", "kv_up", "kv_down", "projection")


def shard_group(weight: Weight, config: Configuration) -> int:
    """Return how many of the ranks with the same part of the weight share its shards; MindSpore shards nothing if
    `shard_size` does not divide their number.
    """
    if config.muon and weight.name in _UNSHARDED:
        return 1
    held, size = weight_copies(weight, config), config.shard_size
    return held if not config.shard_optimizer or not size else 1 if held % size else size


def weight_shards(weight: Weight, config: Configuration) -> int:
    """Return over how many ranks the optimizer spreads the weight: the ranks of its group, or 1 if their number does
    not divide the weight or the weight is small.
    """
    sharing = shard_group(weight, config)
    rows = weight.rows // (1 if weight.split == "columns" else weight_cut(weight, config))
    small = 4 * weight.size // weight_cut(weight, config) < config.shard_threshold
    return 1 if not config.shard_optimizer or small or rows % sharing else sharing
