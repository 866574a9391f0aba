"""This module counts the memory of one device of each pipeline stage: weights, gradients, optimizer state, the
activations that the pipeline schedule keeps, and communication buffers.

Weights are kept in fp32 with two Adam moments; a sharded optimizer shards weights and moments over the ranks that hold
copies. Gradients are accumulated in fp32, and the passes compute with a copy of the weights in the compute dtype.
Accumulated gradients and this copy are cut only over tp and ep, unless gradients (`shard_gradients`) or the copied
weights (`shard_weights`) are sharded, too. For MindFormers recipes the bytes of weights, moments, accumulated gradients
and copied weights equal the bytes in MindSpore's compiled graph (`tc3 dryrun`). Together, weights, moments, gradients
and the copy need 18 bytes per parameter, as in Megatron. A MindFormers recipe may keep weights in another type
(`params_dtype`); then there is no fp32 copy of the weights. AdamW still keeps its moments in fp32 (core/optim/adamw.py,
`clone_state`), and the accumulated gradients are clones of the weights (wrapper.py, `accu_grads`).

`tools.estimate.from_recipe` sets the bytes of an element; this module multiplies them by the number of elements.

Activations are counted tensor by tensor (`tools.estimate.memory.activations`) and held according to the schedule's
order of operations. Fragmentation by the allocator is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tools.estimate.configuration import Configuration, joined, parts_of, weight_cut, weight_shards
from tools.estimate.memory.activations import buffers, fullest_pass, mtp_option, saved_parts, spare_gradients
from tools.estimate.memory.training_graph import SPARE, module_of_weight
from tools.estimate.muon import orthogonal
from tools.model import Weight, weights, with_adapters
from tools.pipeline.simulate import stage_peaks

UPDATED = ("weights", "state", "accumulated")  # parts that the update has, too; all others are of passes
STATIC = (*UPDATED, "gathered")  # parts that do not depend on the micro-batch
IN_WORDS = {
    **dict(zip(STATIC, ("weights", "optimizer state", "accumulated gradients", "gathered weights"), strict=True)),
    "update": "divided gradients",
}
_LOW, _WIDE = 2, 4  # bytes of a number in half precision and in fp32
_BUCKET = 2  # layers whose weights are gathered at once where computing weights are sharded


@dataclass(frozen=True)
class StageMemory:
    """A `StageMemory` holds the bytes that one device of a stage needs at its peak, by part."""

    weights: float  # that the optimizer updates
    state: float  # the optimizer's moments
    accumulated: float  # gradients, and the spare gradients of Transformer Engine
    gathered: float  # weights in the compute dtype, if they are kept for the whole step
    activations: float  # kept for the backward pass, at the fullest moment of the schedule
    working: float  # what one pass needs in addition to the kept activations
    buffers: float  # of communication
    # of clipping and the optimizer after the last pass, beside weights, state and accumulated gradients; then no
    # weights are gathered and no activations are kept
    update: float = 0.0

    @property
    def static(self) -> float:
        """Return the bytes of weights, gradients and optimizer state, which do not depend on the micro-batch."""
        return self.weights + self.state + self.accumulated + self.gathered

    @property
    def in_passes(self) -> float:
        """Return the peak memory in bytes during the forward and backward passes of a step."""
        return self.static + self.activations + self.working + self.buffers

    @property
    def in_update(self) -> float:
        """Return the peak memory in bytes during gradient clipping and the optimizer's update."""
        return self.weights + self.state + self.accumulated + self.update + self.buffers

    @property
    def peak(self) -> float:
        """Return the peak memory in bytes of a device of the stage during a step."""
        return max(self.in_passes, self.in_update)

    def as_json(self) -> dict[str, float]:
        """Return the bytes of each part of the memory, and the peak memory in bytes during a step under the key
        "peak".
        """
        return asdict(self) | {"peak": self.peak}


def stage_weights(config: Configuration, stage: int) -> list[Weight]:
    """Return the weights of a pipeline stage; the last stage also holds the embedding if the model has MTP layers or a
    tied head.
    """
    return [weight for weight, count in counted_weights(config, stage) for _ in range(count)]


def counted_weights(config: Configuration, stage: int) -> list[tuple[Weight, int]]:
    """Return each weight of a stage's layers once for each kind of layer, with the number of layers of this kind on the
    stage.
    """
    kinds = Counter(kind for chunk in config.stage_kinds(stage) for kind in chunk)
    if kinds["head"] and not kinds["embedding"] and (config.model.mtp or config.model.tied):
        kinds["embedding"] = 1
    return [(weight, count) for kind, count in kinds.items() if count for weight in kind_weights(config, kind)]


def kind_weights(config: Configuration, kind: str) -> Sequence[Weight]:
    """Return the weights of one layer of a kind, with those of its adapters."""
    model, whole, adapters = config.model, config.shared_whole, config.adapters
    return with_adapters(model, kind, adapters, whole) if adapters else weights(model, kind, whole)


def static_memory(config: Configuration, stage: int) -> tuple[float, float, float, float]:
    """Return the bytes on one device of a stage as (weights, optimizer state, accumulated gradients, gathered
    weights).
    """
    rows = np.array(list(_static_rows(config, stage)[0].values()) or [[0.0] * len(STATIC)])
    held, state, summed, gathered = map(float, rows.sum(axis=0))
    summed += spare_gradients(config, stage_weights(config, stage))
    return held, state, summed, _in_turn(config, stage) if _resharded(config) else gathered


def update_memory(config: Configuration, stage: int) -> float:
    """Return the bytes that gradient clipping and the optimizer need on one device of a stage, in addition to weights,
    optimizer state and accumulated gradients. The result is 0 if gradients are not accumulated. The result is also 0
    for software other than MindFormers, which scales gradients in place.
    """
    return updating(update_gradients(config, counted_weights(config, stage)))


def update_gradients(config: Configuration, counted: Iterable[tuple[Weight, int]]) -> list[tuple[float, float]]:
    """Return for each trained weight two numbers of bytes, in the form that `updating` takes: those of its divided
    gradients, and those of one accumulated gradient. `counted` lists each weight with the number of weights of its
    kind. Return [] if the update makes no new tensors.
    """
    if not config.training_graph or _at_once(config):
        return []
    copy = config.weight_item if config.shard_optimizer else _WIDE
    gradients = []
    for weight, count in counted:
        local, shards = weight.size / weight_cut(weight, config), weight_shards(weight, config)
        if not weight.frozen:
            summed = local / (shards if config.shard_gradients else 1)
            gradients.append((count * local / shards * copy, summed * config.weight_item))
    return gradients


def updating(gradients: Iterable[tuple[float, float]]) -> float:
    """Return the bytes that a device needs for clipping and the optimizer, in addition to weights, optimizer state and
    accumulated gradients.

    MindFormers (wrapper.py, `shard_grad_scale` and `grad_scale`) divides each accumulated gradient by the loss scale
    into a new tensor. All of these new tensors exist at the same time, because clipping needs the norm of all gradients
    before the first weight is updated. Each accumulated gradient is then set to zero by operators that make two tensors
    of its size.

    Args:
        gradients: the bytes of the divided gradient and of the accumulated gradient, for each trained weight.
    """
    pairs = list(gradients)
    return sum(divided for divided, _ in pairs) + 2 * max((summed for _, summed in pairs), default=0)


def static_modules(config: Configuration, stage: int) -> dict[tuple[str, str], float]:
    """Return the bytes of weights, optimizer state and gradients on a device as a dictionary that maps (part, module)
    to bytes.
    """
    every, _ = _static_rows(config, stage)
    found = {(part, name): size for name, row in every.items() for part, size in zip(STATIC, row, strict=True)}
    if spare := spare_gradients(config, stage_weights(config, stage)):
        found["accumulated", SPARE] = spare
    if _resharded(config):
        found = {key: size for key, size in found.items() if key[0] != "gathered"}
        found["gathered", "layers in turn"] = _in_turn(config, stage)
    return found


def exchanged(config: Configuration, stage: int) -> float:
    """Return the bytes that a device needs in addition to the model while `plugins.expert_balance` moves experts to
    other devices.
    """
    slices = [
        weight.size / weight_cut(weight, config) / weight_shards(weight, config)
        for weight in stage_weights(config, stage)
        if module_of_weight(weight.name) == "experts"
    ]
    return exchange_of(slices, config.weight_item)


def exchange_of(slices: Iterable[float], item: int) -> float:
    """Return the peak memory in bytes of the tensors that a device sends and receives while experts move to other
    devices. Because the device exchanges one tensor after another, the peak is twice the bytes of the largest slice of
    a tensor: one slice that is sent and one that is received. The argument `slices` holds the number of elements of
    each slice, and `item` is the number of bytes of an element. The optimizer's moments have four bytes for each
    element.
    """
    return 2.0 * max(slices, default=0.0) * max(item, _WIDE)


def _static_rows(config: Configuration, stage: int) -> tuple[dict[str, list[float]], float]:
    """Return module -> bytes of each part of `STATIC`, computing weights being whole; bytes of the largest one."""
    rows: dict[str, list[float]] = {}
    largest = 0.0
    at_once = _at_once(config)
    # MindFormers clones its parameters for the sums
    cloned = config.weight_item if config.training_graph else _WIDE if config.wide_gradients else _LOW
    wide = _WIDE if at_once and config.training_graph else cloned
    for weight, count in counted_weights(config, stage):
        local, shards = weight.size / weight_cut(weight, config), weight_shards(weight, config)
        # in a pipeline FSDP adds gradients up whole and reduces them after the last micro-batch
        waiting = config.shard_weights and config.pp > 1
        summed = local / (shards if at_once or (config.shard_gradients and not waiting) else 1)
        held = local / shards
        row = rows.setdefault(module_of_weight(weight.name), [0.0] * len(STATIC))
        trained = 0 if weight.frozen else 1
        state = trained * held * _state(weight, config)
        parts = (held * config.weight_item, state, trained * summed * wide, _computing(weight, config))
        for place, size in enumerate(parts):
            row[place] += count * size
        largest = max(largest, local * config.item)
    return rows, largest


def _at_once(config: Configuration) -> bool:
    """Return whether gradients are reduced to the optimizer's shards as they come, and divided by the loss scale in
    fp32: MindSpore has no accumulator without accumulation (wrapper.py, `tensor_grad_scale`).
    """
    return config.keep_gathered and config.pp == 1 and config.micro_batches == 1


def _state(weight: Weight, config: Configuration) -> int:
    """Return bytes of optimizer state for each element of a weight; Muon's matrices are those of layers."""
    if config.matrix_state_item is not None and orthogonal(weight, config):
        return config.matrix_state_item
    return config.state_item


def _computing(weight: Weight, config: Configuration) -> float:
    """Return bytes of a weight as it computes, where it is there beside the optimizer's for the whole step."""
    local, shards = weight.size / weight_cut(weight, config), weight_shards(weight, config)
    # in MindFormers norms, router and embedding are used as they are; others are cast before they are gathered where
    # that makes them narrower, and by each pass where it makes them wider (`Configuration.copies_weights`)
    as_stored = config.weight_item <= config.item or (weight.wide and config.keep_gathered)
    if config.training_graph and as_stored:
        return local * config.weight_item * (shards > 1)
    if config.copies_weights:  # by each pass, which counts it
        return 0.0
    if config.item == _WIDE or (weight.wide and config.keep_gathered):
        return local * _WIDE * (shards > 1)
    return local * config.item


def _resharded(config: Configuration) -> bool:
    """Return whether computing weights are dropped after each layer; torchtitan's pipeline keeps them."""
    return config.shard_weights and config.pp == 1


def _in_turn(config: Configuration, stage: int) -> float:
    """Return bytes of the computing weights that are gathered at once where they are sharded, too."""
    largest = max(
        sum(w.size / weight_cut(w, config) for w in weights(config.model, kind, config.shared_whole))
        for kind in set(config.model.pattern)
    )
    return _BUCKET * largest * config.item + _static_rows(config, stage)[1]


def held_micro_batches(config: Configuration, stage: int) -> np.ndarray:
    """Return how many micro-batches of each chunk are in flight when the pipeline schedule keeps the most activations.
    If the schedule keeps the most activations at several moments, the result [moments, chunks] has a row for each
    moment.
    """
    if config.pp == 1:
        return np.ones((1, config.chunks), int)  # accumulation finishes one micro-batch before the next
    return stage_peaks(config.schedule, stage, config.pp, config.chunks, config.micro_batches)


def chunk_activations(config: Configuration, stage: int) -> list[float]:
    """Return the bytes of activations that one micro-batch of each chunk keeps for the backward pass."""
    return [sum(chunk.values()) for chunk in chunk_modules(config, stage)]


def chunk_modules(config: Configuration, stage: int) -> list[dict[str, float]]:
    """Return for each chunk of a stage the bytes of activations that one micro-batch keeps for the backward pass, as a
    dictionary module -> bytes.
    """
    found = []
    for pairs in stage_layers(config, stage):
        own: dict[str, float] = {}
        for (kind, option), count in Counter(pairs).items():
            for module, size in saved_parts(config, kind, option).items():
                own[module] = own.get(module, 0.0) + count * size
        found.append(own)
    return found


def stage_layers(config: Configuration, stage: int) -> list[list[tuple[str, str]]]:
    """Return for each chunk of a stage the kind and the recompute option of each layer, in the order of
    `Configuration.stage_kinds`; the recompute option of the embedding and the head has no effect.
    """
    found, ends = [], mtp_option(config)
    for chunk, kinds in enumerate(config.stage_kinds(stage)):
        options = iter(layer_options(config, chunk, stage, len(kinds)))
        found.append([(kind, next(options) if kind in ("dense", "moe") else ends) for kind in kinds])
    return found


def layer_options(config: Configuration, chunk: int, stage: int, count: int) -> list[str]:
    """Return the recompute option of each layer of a chunk: "full" for the first layers, "select" for the next layers,
    and "communication" for some further layers.

    MindFormers counts each option from the chunk's first layer, and the stronger option wins. If a layer is not
    recomputed as a whole, groups of operators are added to its option, as in "select+attention"
    (`tools.estimate.configuration`).
    """
    recompute = config.recompute
    full = recompute.layers("full", chunk, stage)
    select = recompute.layers("select", chunk, stage)
    again = recompute.layers("communication", chunk, stage)
    options = ["full"] * full + ["select"] * (select - full)
    options += ["communication"] * (again - len(options))
    options = (options + ["none"] * count)[:count]
    if not recompute.operators:
        return options
    groups = [(name, table[chunk][stage]) for name, table in recompute.operators]
    return [
        joined([*parts_of(option), *(name for name, layers in groups if place < layers and option != "full")])
        for place, option in enumerate(options)
    ]


def stage_memory(config: Configuration, stage: int) -> StageMemory:
    """Return the memory of one device of a stage at its peak."""
    kept = held_micro_batches(config, stage) @ np.array(chunk_activations(config, stage))
    kinds = config.stage_kinds(stage)
    every = [kind for chunk in kinds for kind in chunk]
    return StageMemory(
        *static_memory(config, stage),
        activations=float(kept.max()),
        working=working_of(config, stage)[1],
        buffers=buffers_of(config, every),
        update=update_memory(config, stage),
    )


def buffers_of(config: Configuration, kinds: Iterable[str]) -> float:
    """Return the bytes of a stage's communication buffers. The result is 0 for other software than MindFormers, for
    which the bytes of the passes include the buffers.
    """
    if not config.training_graph:
        return 0.0
    return max((buffers(config, kind) for kind in set(kinds) if kind in ("dense", "moe")), default=0.0)


def working_of(config: Configuration, stage: int) -> tuple[str, float]:
    """Return the part of a stage (a kind of layer, or the loss) that needs the most memory in addition to the kept
    activations, with the number of bytes.
    """
    return max((fullest_pass(config, layers) for layers in stage_layers(config, stage)), key=lambda found: found[1])


def all_stages(config: Configuration) -> list[StageMemory]:
    """Return the memory of a device of each stage."""
    return [stage_memory(config, stage) for stage in range(config.pp)]


def peak_memory(config: Configuration) -> float:
    """Return the peak memory in bytes of the stage that needs the most memory."""
    return max(memory.peak for memory in all_stages(config))
