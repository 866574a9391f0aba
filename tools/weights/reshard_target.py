"""This module computes the layout of each tensor in a run of a recipe. A weight is cut over tensor- or expert-parallel
ranks, and the optimizer state of the weight is also cut over data-parallel ranks. Tensors have MindFormers' parameter
names.

`tools.estimate.configuration` computes the number of ranks over which a weight and its optimizer state are cut. This
module finds these ranks in MindSpore 2.9.0's order: the ranks of a stage form a matrix dp x cp x tp, or for experts a
matrix groups x ep, and the optimizer's shards are parts of a tensor-parallel slice, in the order of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from plugins.errors import RecipeError
from plugins.hyper_connections.plan import SUBLAYERS
from plugins.hyper_connections.plan import WEIGHTS as CONNECTIONS
from plugins.lora.plan import WEIGHT, is_adapter
from plugins.sealed_checkpoint.router_state import STATE
from tools.checkpoint.stored import LAYER_NORM, moments_of
from tools.estimate import configuration
from tools.estimate.configuration import Configuration
from tools.estimate.from_recipe import from_recipe
from tools.layout.resolve import resolve
from tools.model import ENDS, Weight, weights, with_adapters
from tools.recipe.findings import refusal
from tools.recipe.load import Recipe
from tools.recipe.view import PARALLEL, View

# Where the slices of a tensor lie: by rank in general, and by a matrix of devices as MindSpore says it.

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Lying:
    """A `Lying` says how a tensor is cut into slices of equal size, and which ranks hold each slice. Slices are counted
    in row-major order.

    Args:
        shape: the shape of the whole tensor.
        cuts: the number of parts into which each axis is cut.
        holders: for each slice the ranks that hold it.
    """

    shape: Shape
    cuts: Shape
    holders: tuple[tuple[int, ...], ...]

    @property
    def part(self) -> Shape:
        """Return the shape of one slice of the tensor."""
        return tuple(length // count for length, count in zip(self.shape, self.cuts, strict=True))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that hold at least one slice of the tensor."""
        return tuple(sorted({rank for ranks in self.holders for rank in ranks}))


@dataclass(frozen=True)
class Layout:
    """A `Layout` describes how a tensor is split over ranks, in the same form as MindSpore's tensor layouts.

    Args:
        devices: the shape of the matrix in which the ranks of a pipeline stage are arranged in row-major order.
        axes: for each axis of the tensor the axes of this matrix that cut it, the outermost axis first.
        first: the first rank of the pipeline stage.
    """

    devices: Shape
    axes: tuple[tuple[int, ...], ...]
    first: int

    @property
    def cuts(self) -> Shape:
        """Return the number of parts into which each axis of the tensor is cut."""
        return tuple(math.prod(self.devices[axis] for axis in own) for own in self.axes)

    def places(self) -> np.ndarray:
        """Return for each rank of a pipeline stage the number of the slice that it holds, as int [ranks of a stage]."""
        return _places(self.devices, self.axes)

    def lying(self, shape: Shape) -> Lying:
        """Return how this layout cuts a tensor of a given shape into slices, and which ranks hold each slice."""
        return Lying(shape, self.cuts, _holders(self.devices, self.axes, self.first))

    def as_metadata(self) -> dict[str, Any]:
        """Return the layout in the form in which MindFormers 1.9.0 writes it into metadata.json
        (`checkpoint/metadata.py`).
        """
        count = len(self.devices)
        maps: list[Any] = [[count - 1 - axis for axis in own] for own in self.axes]
        ranks = math.prod(self.devices)
        return {
            "device_matrix": list(self.devices),
            "tensor_map": [own if len(own) > 1 else own[0] if own else -1 for own in maps],
            "interleaved_parallel": False,
            "alias_name": [chr(ord("a") + axis) for axis in range(count)],
            "rank_list": list(range(self.first, self.first + ranks)),
        }


@lru_cache(maxsize=4096)
def _places(devices: Shape, axes: tuple[tuple[int, ...], ...]) -> np.ndarray:
    index = np.unravel_index(np.arange(math.prod(devices)), devices)
    place = np.zeros(math.prod(devices), np.int64)
    for own in axes:
        for axis in own:
            place = place * devices[axis] + index[axis]
    return place


@lru_cache(maxsize=4096)
def _holders(devices: Shape, axes: tuple[tuple[int, ...], ...], first: int) -> tuple[tuple[int, ...], ...]:
    places = _places(devices, axes)
    found: list[list[int]] = [[] for _ in range(int(places.max()) + 1)]
    for rank, place in enumerate(places.tolist(), start=first):
        found[place].append(rank)
    return tuple(map(tuple, found))


_EXPERTS_BIAS = "expert_bias"
# of tools.model -> of MindFormers' training_graph models, without ".weight" and ".bias"
_ATTENTION = ("kv_down", "kv_up", "q_down", "q_up", "q", "qkv")
_LAYER = {name: f"self_attention.linear_{name}_proj" for name in _ATTENTION} | {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "kv_norm": "self_attention.kv_layernorm",
    "q_norm": "self_attention.q_layernorm",
    "k_norm": "self_attention.k_layernorm",
    "norm_1": "input_layernorm",
    "norm_2": "pre_mlp_layernorm",
    "mlp_fc1": "mlp.linear_fc1",
    "mlp_fc2": "mlp.linear_fc2",
    "router": "mlp.router",
    "experts_1": "mlp.experts.weight1",
    "experts_2": "mlp.experts.weight2",
    "shared_fc1": "mlp.shared_experts.linear_fc1",
    "shared_fc2": "mlp.shared_experts.linear_fc2",
    "shared_gate": "mlp.shared_experts.shared_experts_gate",
}
# of latent attention whose projections are fused (`mla_qkv_concat`)
_FUSED = dict.fromkeys(("q_down", "q", "kv_down"), "linear_qkv") | {"q_up": "linear_qb", "kv_up": "linear_kvb"}
_FUSED_LAYER = _LAYER | {name: f"self_attention.{end}" for name, end in (_FUSED | {"kv_norm": "k_layernorm"}).items()}
_CONNECTIONS = {f"{cell}.{name}" for cell in SUBLAYERS for name in CONNECTIONS}  # their names have no ".weight" behind
_MTP = {"projection": "eh_proj", "mtp_norm_0": "enorm", "mtp_norm_1": "hnorm", "mtp_norm_2": "final_layernorm"}


@dataclass(frozen=True)
class Placed:
    """A `Placed` holds the shape of a whole tensor of the new checkpoint, and its layout."""

    shape: Shape
    layout: Layout

    @property
    def lying(self) -> Lying:
        """Return how this tensor of the new checkpoint is cut into slices, and which ranks hold each slice."""
        return self.layout.lying(self.shape)


@dataclass(frozen=True)
class Target:
    """A `Target` holds the layout of every tensor in a run of a recipe.

    Args:
        weights: the shape and layout of each weight, by name.
        states: the shape and layout of each state of routers and experts, by name; each rank of a stage holds a copy of
            them.
        world: the number of ranks of the run.
        stage: the number of ranks of a pipeline stage.
    """

    weights: dict[str, Placed]
    states: dict[str, Placed]
    world: int
    stage: int

    def place(self, name: str, shape: Shape) -> Placed:
        """Return the shape and layout that a checkpoint's tensor has in the run. A tensor of optimizer state gets the
        shape and the layout of its weight. A tensor that belongs to no weight is whole on all ranks.
        """
        if name in self.states:
            return Placed(shape, self.states[name].layout)
        weight = self.weights.get(name) or self.weights.get(name.partition(".")[2])  # a moment has the optimizer's name
        if weight is None:
            return Placed(shape, Layout((self.world,), ((),) * len(shape), 0))
        if weight.shape == shape:
            return weight
        return Placed(shape, Layout((self.stage,), ((),) * len(shape), weight.layout.first))


def target_of(recipe: Recipe) -> Target:
    """Return the layout of every tensor in a run of a recipe.

    Raises:
        RecipeError: the recipe has no model, or a model for whose weights this module does not know the names.
    """
    resolved = resolve(recipe)
    view, config = View(resolved), from_recipe(resolved)
    if view.cpu_classes:
        config = replace(config, shard_optimizer=False)  # only data parallel
    ranks = config.dp * config.tp * config.cp
    placed: dict[str, Placed] = {}
    for stage in range(config.pp):
        for name, weight in _held(config, stage):
            placed[name] = Placed(_shape(weight), Layout(*_cut(weight, config), stage * ranks))
    _refuse_uneven(resolved, config, placed)
    states = {}
    for name, item in placed.items():
        cell, _, last = name.rpartition(".")
        for state in (state for state, of in STATE.items() if of == last and cell.endswith(_owner(state))):
            states[f"{cell}.{state}"] = Placed((config.model.experts,), Layout((ranks,), ((),), item.layout.first))
    return Target(placed, states, config.devices, ranks)


def _refuse_uneven(recipe: Recipe, config: Configuration, placed: Mapping[str, Placed]) -> None:
    """Raise RecipeError if a layout, which no run would have, does not cut the weights into equal parts."""
    if config.model.experts and config.model.experts % config.ep:
        wrong = f"{config.model.experts} experts cannot be divided over {config.ep} ranks"
        raise refusal(recipe, (*PARALLEL, "expert_parallel"), f"{wrong}; write a divisor of the number of experts")
    for name, item in placed.items():
        if any(length % count for length, count in zip(item.shape, item.layout.cuts, strict=True)):
            wrong = f"{name} {list(item.shape)} cannot be cut into {list(item.layout.cuts)} equal parts"
            raise refusal(recipe, (*PARALLEL, "model_parallel"), f"{wrong}; write a divisor of the model's sizes")


def saved_by(recipe: Recipe) -> dict[str, tuple[str, Placed]]:
    """Return the type and layout of each tensor that a run of a recipe would save, by name. Weights and moments are
    saved in fp32. If the run trains adapters, the frozen weights have no moments.
    """
    target, optimizer = target_of(recipe), recipe.get("optimizer") or {}
    adapters = any(map(is_adapter, target.weights))
    found: dict[str, tuple[str, Placed]] = {}
    for name, item in target.weights.items():
        trained = is_adapter(name) or not adapters
        for each in (name, *(moments_of(optimizer, name, len(item.shape)) if trained else ())):
            found[each] = ("F32", item)
    biases = {name: item for name, item in target.states.items() if name.endswith(_EXPERTS_BIAS)}
    return found | {name: ("F32", item) for name, item in biases.items()}


def _owner(state: str) -> str:
    return ".experts" if STATE[state] == "weight1" else ".router"


def _held(config: Configuration, stage: int) -> Iterator[tuple[str, Weight]]:
    """Yield each weight of a stage under MindFormers' name.

    An embedding that another stage reads, too, is sent there in each step and saved by the first only.
    """
    numbers, mtp = iter(config.layer_numbers(stage)), 0
    layer = _FUSED_LAYER if config.model.joint_latent else _LAYER
    for kind in (kind for chunk in config.stage_kinds(stage) for kind in chunk):
        if kind in ("dense", "moe"):
            path, names = f"decoder.layers.{next(numbers)}.", layer
        elif kind == "mtp":
            path, names = (
                f"mtp.layers.{mtp}.",
                _MTP | {name: f"transformer_layer.{end}" for name, end in layer.items()},
            )
            mtp += 1
        else:
            path, names = "", ENDS
        found: dict[str, Weight] = {}
        for weight in _weights(config, kind):
            name = path + _name(weight, names, config.model.norm_bias)
            found[name] = replace(weight, rows=found[name].rows + weight.rows) if name in found else weight
        yield from found.items()


def _weights(config: Configuration, kind: str) -> tuple[Weight, ...]:
    if config.adapters:
        return with_adapters(config.model, kind, config.adapters, config.shared_whole)
    return weights(config.model, kind, config.shared_whole)


def _name(weight: Weight, names: dict[str, str], layer_norm: bool) -> str:
    if weight.name in _CONNECTIONS:
        return weight.name
    adapted, _, matrix = weight.name.rpartition("_lora_")
    if adapted in names:
        return f"{names[adapted]}.lora_{matrix}{WEIGHT}"
    plain = weight.name.removesuffix("_bias")
    if plain not in names:
        raise RecipeError(f"{weight.name}: tc3 does not know MindFormers' name of this weight, so no rank can store it")
    if weight.split == "experts":
        return names[plain]
    scale, shift = LAYER_NORM if layer_norm and "norm" in plain else ("weight", "bias")
    return f"{names[plain]}.{shift if plain != weight.name else scale}"


def _shape(weight: Weight) -> Shape:
    """Return the shape of a weight in MindFormers, which stores a weight that is not a matrix with one axis."""
    vector = weight.columns == 1 and not weight.multiplies
    return (weight.rows,) if vector else (weight.rows, weight.columns)


def _cut(weight: Weight, config: Configuration) -> tuple[Shape, tuple[tuple[int, ...], ...]]:
    """Return the matrix of a stage's devices, and by which of its axes each axis of the weight is cut: the copies of a
    part of the weight are consecutive rows of parts, and neighbours among them share its rows for the optimizer.
    """
    parts = 1 if not weight.split else config.ep if weight.split == "experts" else config.tp
    copies = config.dp * config.cp * config.tp // parts
    small = weight.name in _CONNECTIONS and weight.columns == 1  # the optimizer leaves these whole (their adapter.py)
    whole = small or (config.model.norm_bias and "norm" in weight.name)  # and those of a LayerNorm (norm.py)
    shards = 1 if whole else configuration.weight_shards(weight, config)
    cutting, sharding = (2,) * bool(weight.split), (1,) * (shards > 1)
    rows, columns = (sharding, cutting) if weight.split == "columns" else (cutting + sharding, ())
    return (copies // shards, shards, parts), (rows, columns)[: len(_shape(weight))]
