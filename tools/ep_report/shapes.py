"""The sizes of a recipe that expert-parallel communication depends on, or a `RecipeError` that says what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from plugins.errors import RecipeError
from plugins.hierarchical_ep.topology import DEVICES_PER_NODE
from tools.hardware import Hardware
from tools.hardware.units import short_dtype
from tools.model.architecture import MOE, Model, model_of
from tools.model.flops import flops_per_token, multiplied
from tools.model.weights import parameters, weights
from tools.recipe.load import KeyPath, Recipe
from tools.recipe.override import dotted
from tools.recipe.view import MODEL, PARALLEL, View
from tools.schema.converter import Built, convert
from tools.schema.schema import load_schema

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Shape:
    """Sizes of one recipe on its mesh. Lengths in elements, `itemsize` in bytes.

    Args:
        batch, sequence: samples of a micro-batch on a data-parallel rank; tokens of one.
        rank_sequence: tokens of a sequence that one device holds in the MoE layer, sequence / (tp * cp).
        micro_batches: runs of the pipeline (or accumulation steps) in a step.
        dtype, itemsize: of activations.
        layers, moe_layers: all and MoE layers, MTP layers included.
        recompute: whole layers are recomputed in backward; replay_tp: tensor-parallel communication with them.
        weights_dense, weights_expert: weights of the model outside and inside the routed experts.
        flops_per_token: forward and backward, nothing recomputed.
        head_flops_per_token: the output projections' part of it, which recomputation leaves alone.
        attention_bytes: keys and values of one token, all heads, for context parallelism.
        query_bytes: queries and results of one token, all heads, which Ulysses sends with them.
        ulysses: parts of the heads that context parallelism cuts.
    """

    batch: int
    sequence: int
    rank_sequence: int
    micro_batches: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    chunks: int
    dtype: str
    itemsize: int
    hidden: int
    experts: int
    top_k: int
    expert_width: int
    shared_width: int
    layers: int
    moe_layers: int
    recompute: bool
    replay_tp: bool
    shared_beside: bool
    optimizer_shard: bool
    weights_dense: int
    weights_expert: int
    flops_per_token: int
    head_flops_per_token: int
    attention_bytes: int
    query_bytes: int = 0
    ulysses: int = 1

    @property
    def rank_tokens(self) -> int:
        """Tokens of a micro-batch that one device routes."""
        return self.batch * self.rank_sequence

    @property
    def devices(self) -> int:
        """Devices of the run."""
        return self.dp * self.tp * self.pp * self.cp


def shape_of(recipe: Recipe, hardware: Hardware | None = None) -> Shape:
    """The sizes of `recipe`, checked for what the model of communication needs, and against `hardware`'s node if given.

    Raises:
        RecipeError: no experts, no expert parallelism, degrees that do not divide, or a node of another size.
    """
    view = View(recipe)
    built = convert(view, load_schema())
    try:
        model = model_of(built.fields)
        flops = flops_per_token(model, built.fields["seq_length"])
    except (KeyError, TypeError, ValueError) as error:
        raise _wrong(recipe, MODEL, f"its sizes do not make a model ({error}); `tc3 check` says more") from None
    _check(recipe, view, built, model, hardware)
    fields = built.fields
    moe_layers = model.pattern.count(MOE) + model.mtp * (model.last_kind == MOE)
    weights_expert = moe_layers * sum(weight.size for weight in weights(model, MOE) if weight.split == "experts")
    dtype = short_dtype(fields.get("compute_dtype"), "fp32")
    recompute = _any(view.get(("recompute_config", "recompute")))
    return Shape(
        batch=view.batch,
        sequence=built.number("seq_length"),
        rank_sequence=built.number("seq_length") // (view.tp * view.cp),
        micro_batches=view.micro_batches * view.accumulation,
        **{name: getattr(view, name) for name in ("dp", "tp", "pp", "cp", "ep", "chunks")},
        dtype=dtype,
        itemsize=_BYTES[dtype],
        hidden=model.hidden,
        experts=model.experts,
        top_k=model.top_k,
        expert_width=model.expert_ffn,
        shared_width=model.shared_ffn,
        layers=model.layers + model.mtp,
        moe_layers=moe_layers,
        recompute=recompute,
        replay_tp=recompute and view.flag(("recompute_config", "mp_comm_recompute"), True),
        shared_beside=fields.get("moe_shared_expert_overlap") is True,
        optimizer_shard=view.flag(("parallel", "enable_parallel_optimizer")),
        weights_dense=parameters(model) - weights_expert,
        weights_expert=weights_expert,
        flops_per_token=flops,
        head_flops_per_token=6 * multiplied(model)["head"],
        attention_bytes=model.kv_heads * (model.qk_dim + model.v_dim) * _BYTES[dtype],
        query_bytes=model.heads * (model.qk_dim + model.v_dim) * _BYTES[dtype],
        ulysses=view.number((*PARALLEL, "ulysses_degree_in_cp"), 1),
    )


def _check(recipe: Recipe, view: View, built: Built, model: Model, hardware: Hardware | None) -> None:
    """Raise RecipeError for a recipe that has no expert-parallel communication to report on."""
    experts, path = model.experts, (*PARALLEL, "expert_parallel")
    if MOE not in model.pattern:
        raise _wrong(recipe, (*MODEL, "n_routed_experts"), "the model has no routed experts: nothing to report")
    if not view.flag(("use_parallel",)):
        raise _wrong(recipe, ("use_parallel",), "one device has nobody to send tokens to; set it to True")
    if view.ep == 1:
        raise _wrong(recipe, path, f"1 sends no token anywhere; try --ep {_smallest(experts, view.dp * view.tp)}")
    if experts % view.ep:
        right = f"use a divisor, for instance {_near(experts, view.ep)}"
        raise _wrong(recipe, path, f"{view.ep} does not divide {experts} experts; {right}")
    if view.dp * view.tp % view.ep:
        times = -(-view.dp * view.tp // view.ep)
        while times * view.ep % view.tp:
            times += 1
        right = f"a divisor of {view.dp * view.tp}, or data_parallel: {times * view.ep // view.tp}"
        text = f"{view.ep} does not divide data_parallel x model_parallel = {view.dp} x {view.tp}; use {right}"
        raise _wrong(recipe, path, text)
    if built.number("seq_length") % (view.tp * view.cp):
        text = f"{built.number('seq_length')} tokens cannot be divided over tp {view.tp} x cp {view.cp}"
        raise _wrong(recipe, (*MODEL, "seq_length"), text)
    node = built.number("npu_nums_per_device", DEVICES_PER_NODE)
    if hardware and node != hardware.devices_per_node:
        text = f"{node}, but a node of {hardware.name} has {hardware.devices_per_node} devices; set it to that"
        raise _wrong(recipe, (*MODEL, "npu_nums_per_device"), f"{text}, or pass another --cluster")


def _wrong(recipe: Recipe, path: KeyPath, text: str) -> RecipeError:
    """The error at a key path, with file and line as far as known."""
    mark = recipe.marks.get(path)
    source = f"{mark}: " if mark else f"{recipe.source}: " if recipe.source else ""
    return RecipeError(f"{source}{dotted(path)}: {text}")


def _smallest(experts: int, ranks: int) -> int:
    """The largest degree up to 16 that divides both."""
    return max(degree for degree in range(1, 17) if experts % degree == 0 and ranks % degree == 0)


def _near(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, above 1."""
    divisors = [divisor for divisor in range(2, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _any(recompute: Any) -> bool:
    """Whether any layer is recomputed: a flag, or numbers of layers by stage and chunk."""
    return any(map(_any, recompute)) if isinstance(recompute, list) else bool(recompute)
