"""This module counts the memory of one device of a compiled pipeline stage, in bytes and by purpose (such as weights).
All bytes are exact, except the bytes of activations.

A layout is the decision of MindSpore's front end for one parameter: its slice under tensor and expert parallelism, and
the group over which the optimizer shards this slice again (ZeRO). A rank holds the elements of the slice divided by the
size of the group. The bytes of parameters, optimizer state and accumulated gradients follow from the layouts.

`line_of` returns the live bytes over a step, pass by pass. The tensors, their bytes, and the tensors that a forward
pass keeps for its backward pass are read from the graph. Inside a pass, operators are assumed to run in the order of
the graph's text, and a tensor is assumed to need memory from the operator that computes it to the last operator that
reads it; the order on a device, its reuse of memory and fragmentation are unknown. The durations of passes are unknown,
too: each pass has the duration 1.

The graph assumes even routing. `under_loads` adds the memory for uneven loads, which `tools.estimate` models;
`exchange` is the memory that moving experts needs between two steps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plugins.sealed_checkpoint.router_state import AVERAGES, MOMENTS
from tools.dryrun.graph_text import Pass, most_saved, waiting
from tools.estimate.configuration import Configuration
from tools.estimate.loads import Loads
from tools.estimate.memory.loaded import Even, Judged, judge
from tools.estimate.memory.model import IN_WORDS, UPDATED, exchange_of, updating
from tools.estimate.memory.room import DOES_NOT_FIT, NO_LIMIT, UNKNOWN, Room, fit_between
from tools.estimate.memory.time_line import (
    KEPT,
    WORKING,
    Bytes,
    Owner,
    Timed,
    TimeLine,
    stitch,
    updating_owners,
)
from tools.estimate.memory.training_graph import EXPERTS, OTHER, module_of_path
from tools.hardware.units import GIB
from tools.pipeline.schedules import Op

BYTES = {"Float64": 8, "Int64": 8, "Float32": 4, "Int32": 4, "Float16": 2, "BFloat16": 2, "Int8": 1, "UInt8": 1}
BYTES |= {"Bool": 1, "Int16": 2, "UInt16": 2, "UInt32": 4, "UInt64": 8}
HCCL_BUFFSIZE = 200 << 20  # bytes, unless that variable is set; a communicator has one to send and one to receive
# (hiascend.com: CANN 8.5, HCCL_BUFFSIZE). It does not depend on how many rows an AlltoAllV moves: one that is larger
# than the buffer takes longer
WEIGHT, STATE, ACCUMULATED = "weight", "state", "accumulated"
_PARTS = {WEIGHT: "weights", STATE: "state", ACCUMULATED: "accumulated"}  # of `Memory`
_PREFIXES = {"accu_grads": ACCUMULATED}  # of the weight's name, in MindFormers' wrapper and optimizers
_PREFIXES |= dict.fromkeys((moment.removesuffix(".") for moment in MOMENTS), STATE)


@dataclass(frozen=True)
class Held:
    """A `Held` describes one parameter (a weight, optimizer state or an accumulated gradient) on a rank: its type, its
    shape, its slice and the number of its shards.
    """

    name: str  # MindSpore's
    kind: str  # "weight", "state" (the optimizer's moments) or "accumulated" (gradients over micro-batches)
    dtype: str  # MindSpore's name, such as "Float32"
    shape: tuple[int, ...]  # of the whole tensor
    slice: tuple[int, ...]  # shape on a rank under tensor, expert and context parallelism
    shards: int  # ranks over which the optimizer shards the slice
    trainable: bool = True  # the optimizer updates it
    on_host: bool = False  # kept in the host's memory, as the optimizer's state is with `optimizer.swap`

    @property
    def elements(self) -> int:
        """Return the number of the parameter's elements that the rank keeps."""
        return math.prod(self.slice) // self.shards

    @property
    def bytes(self) -> int:
        """Return the number of the parameter's bytes that the rank keeps on its device."""
        return 0 if self.on_host else self.elements * BYTES[self.dtype]

    @property
    def host_bytes(self) -> int:
        """Return the number of the parameter's bytes that the rank keeps in the host's memory."""
        return self.elements * BYTES[self.dtype] if self.on_host else 0

    def copies(self, ranks: int) -> float:
        """Return the number of copies of each element of the parameter on the `ranks` devices of the stage."""
        return self.elements * ranks / math.prod(self.shape)


def kinds_of(step: Any) -> dict[str, str]:
    """Return a dictionary parameter name -> kind: weight, accumulated gradient or optimizer state. Parameters that only
    the optimizer holds are optimizer state.
    """
    state = {item.name for item in step.optimizer.get_parameters()} - {item.name for item in step.optimizer.parameters}
    return {item.name: STATE if item.name in state else kind_of(item.name) for item in step.get_parameters()}


def on_host(step: Any) -> set[str]:
    """Return the names of the parameters that a training step keeps in the host's memory, such as the optimizer's
    moments with `optimizer.swap`.
    """
    return {item.name for item in step.get_parameters() if item._get_user_data("parameter_device") == "CPU"}


def kind_of(name: str) -> str:
    """Return the kind of a training step's parameter (weight, accumulated gradient or optimizer state), read from the
    parameter's name.
    """
    prefix = name.partition(".")[0]
    return STATE if prefix.startswith(AVERAGES) else _PREFIXES.get(prefix, WEIGHT)


def total(held: Iterable[Held], kind: str) -> int:
    """Return the bytes of all parameters of one kind."""
    return sum(item.bytes for item in held if item.kind == kind)


@dataclass(frozen=True)
class Memory:
    """A `Memory` holds the bytes of each part of one device's memory, such as weights, optimizer state and
    activations.
    """

    weights: int  # parameters in their stored type, and buffers that no optimizer updates
    state: int  # of the optimizer
    accumulated: int  # gradients summed over micro-batches
    gathered: int  # weights in compute precision, gathered from the optimizer's shards for the whole step
    saved: int  # activations kept for backward passes, at the fullest moment (estimate)
    working: int  # other tensors that exist only inside a pass, at the moment of the largest sum (estimate)
    update: int  # of clipping and the optimizer after the last pass (`tools.estimate.memory.model.updating`)
    limit: int  # `context.max_device_memory`; 0 if the recipe does not set it

    @property
    def exact(self) -> int:
        """Return the bytes that follow exactly from the compiled layouts and graph."""
        return self.weights + self.state + self.accumulated + self.gathered

    @property
    def total(self) -> int:
        """Return the peak memory in bytes of a step. The peak is either in the forward and backward passes or in the
        optimizer's update.
        """
        updated = self.weights + self.state + self.accumulated + self.update
        return max(self.exact + self.saved + self.working, updated)

    def as_json(self) -> dict[str, Any]:
        """Return the bytes of each part of the memory as the dictionary that `--json` prints."""
        return asdict(self) | {"exact": self.exact, "total": self.total}


def update_of(held: Iterable[Held], sharded: bool) -> int:
    """Return the bytes that gradient clipping and the optimizer need in addition to weights, optimizer state and
    accumulated gradients; return 0 if gradients are not accumulated. If the optimizer is not `sharded`, MindFormers
    divides gradients in fp32, which needs more memory than division in their own type.
    """
    items = list(held)
    sums = {item.name.partition(".")[2]: item for item in items if item.kind == ACCUMULATED}
    pairs = [(item, sums[item.name]) for item in items if item.kind == WEIGHT and item.name in sums]
    wide = BYTES["Float32"]
    return int(updating((one.elements * (BYTES[sum_.dtype] if sharded else wide), sum_.bytes) for one, sum_ in pairs))


def memory_of(
    held: Sequence[Held], graph: Mapping[str, Any], passes: Sequence[Pass], limit: int, update: int = 0
) -> Memory:
    """Return the memory of a stage that has the layers of the compiled `graph` and runs its passes in the given order.
    The total is the peak of the time line that `line_of` returns.
    """
    chunks = graph["activations"]
    saved = most_saved(passes, [chunk["saved"] for chunk in chunks])
    exact = {name: total(held, kind) for kind, name in _PARTS.items()} | {"gathered": sum(graph["kept"].values())}
    return Memory(**exact, saved=saved, working=most_alive(passes, chunks) - saved, update=update, limit=limit)


def most_alive(passes: Sequence[Pass], chunks: Sequence[Mapping[str, Any]]) -> int:
    """Return the peak memory of activations in bytes: the activations kept for later backward passes, plus the
    activations of the running pass. A tensor that the running forward pass keeps is counted only once. The kept
    activations include the tensors received from the previous stage, although no operator of this stage computes them.
    """
    backward = [chunk["backward"] for chunk in chunks]  # all that counts where no passes are known
    forward = [max(chunk["forward"], chunk["saved"]) for chunk in chunks]
    before = waiting(passes, [chunk["saved"] for chunk in chunks])
    inside = ((forward if item.kind == "F" else backward)[item.chunk] for item in passes)
    return max([*backward, *map(sum, zip(before, inside, strict=True))], default=0)


def fit_of(memory: Mapping[str, int], limit: int, error: float = 0.0) -> str:
    """Return whether a stage's memory fits the limit: `FITS`, `UNKNOWN`, `DOES_NOT_FIT` or `NO_LIMIT`. The real total
    memory may differ from the predicted total by the fraction `error`, but is never below the bytes that are known
    exactly.
    """
    if not limit:
        return NO_LIMIT
    even = _even(0, memory, error)
    return fit_between(even.least, even.most, limit)


def _even(stage: int, memory: Mapping[str, int], error: float) -> Even:
    total = memory["total"]
    return Even(stage, max(memory["exact"], total * (1 - error)), total, total * (1 + error))


def under_loads(
    stages: Sequence[Mapping[str, Any]], config: Configuration, loads: Loads | None, limit: int, error: float
) -> Judged:
    """Return whether the stages of a dry run, which assumes even routing, also fit in memory if the router loads
    devices unevenly. The additional bytes for uneven loads are predicted as by `tc3 memory --loads`. The bytes that the
    dry run counts from the compiled graphs may be wrong by the fraction `error`.
    """
    room = Room(limit, "context.max_device_memory of the recipe", 0.0)
    return judge(config, room, loads, [_even(stage["stage"], stage["memory"], error) for stage in stages])


def hccl_buffers(results: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the memory that HCCL needs on a device beside `context.max_device_memory`: the number of "communicators"
    and the "bytes" of their buffers of default size. The number of communicators is the largest number of any compiled
    rank, without the communicators for Sends and Receives.
    """
    graphs = [result.get("graph", {}) for result in results]
    every = [
        {tuple(graph["groups"][item["group"]]) for item in graph.get("collectives", ()) if "peer" not in item}
        for graph in graphs
    ]
    most = max(map(len, every), default=0)
    return {"communicators": most, "bytes": 2 * HCCL_BUFFSIZE * most}


def exchange(stages: Sequence[tuple[int, Sequence[Held]]], limit: int) -> dict[str, Any] | None:
    """Return the stage that needs the most memory while experts move to other devices between two steps. The result
    holds the stage's number, the bytes for moving, the total bytes, and whether the total fits. Return None if the
    model has no experts.
    """
    found = []
    for number, held in stages:
        experts = [item for item in held if item.kind == WEIGHT and module_of_path(item.name) == EXPERTS]
        if experts:
            moving = exchange_of([item.elements for item in experts], max(BYTES[item.dtype] for item in experts))
            found.append((sum(item.bytes for item in held) + moving, number, moving))
    if not found:
        return None
    most, number, moving = max(found)
    fit = fit_between(most, most, limit) if limit else NO_LIMIT
    return {"stage": number, "bytes": moving, "held": most, "fit": fit}


def unsure(stages: Sequence[Mapping[str, Any]], limit: int, error: float) -> list[str]:
    """Return a line of text for each stage that may or may not fit, because its predicted memory differs from the limit
    by less than the prediction's error.
    """
    where = f"within {error:.0%} of the limit of {limit / GIB:.1f}, as far as --quick may be off"
    return [
        f"context.max_device_memory: stage {stage['stage']}: unknown whether it fits: "
        f"{stage['memory']['total'] / GIB:.1f} GiB per device is {where}: run it at full depth, without --quick"
        for stage in stages
        if fit_of(stage["memory"], limit, error) == UNKNOWN
    ]


def over_limit(stages: Sequence[Mapping[str, Any]], limit: int, error: float = 0.0) -> list[str]:
    """Return the stages that do not fit, with the recipe keys that reduce their memory; stages with the same advice
    share a line.
    """
    needs: dict[tuple[str, str, str], list[str]] = {}
    for stage in stages if limit else ():
        memory = stage["memory"]
        if fit_of(memory, limit, error) != DOES_NOT_FIT:
            continue
        sure = memory["exact"] > limit
        last = is_update(memory)
        largest = sorted(_MEND, key=lambda name: -at_fullest(memory, name))[:2]
        heavy = " and ".join(f"{_MEND[name][0]} ({memory[name] / GIB:.1f} GiB)" for name in largest)
        what = "without activations" if sure else f"{'in the update' if last else 'with activations'} (an estimate)"
        total = f"{memory['exact' if sure else 'total'] / GIB:.1f} GiB per device {what}"
        remedy = "; ".join(_MEND[name][1] for name in largest)
        needs.setdefault((total, heavy, remedy), []).append(str(stage["stage"]))
    return [
        f"context.max_device_memory: stage{'s' * (len(names) > 1)} {', '.join(names)}: {total}, the limit is "
        f"{limit / GIB:.1f}: most are {heavy}; {remedy}"
        for (total, heavy, remedy), names in needs.items()
    ]


_MEND = {  # part of memory -> its name, and the keys that make it smaller
    "weights": (IN_WORDS["weights"], "parallel.enable_parallel_optimizer: True shards them"),
    "state": (IN_WORDS["state"], "parallel.enable_parallel_optimizer: True shards it over data_parallel"),
    "accumulated": (IN_WORDS["accumulated"], "a larger parallel_config.expert_parallel or, without a pipeline, "
                    "parallel.parallel_optimizer_config.gradient_accumulation_shard: True makes them smaller"),
    "gathered": (IN_WORDS["gathered"],
                 "a larger parallel_config.expert_parallel, model_parallel or pipeline_stage makes them fewer"),
    "saved": ("kept activations", "recompute_config.recompute: True, or a larger model_parallel or context_parallel"),
    "working": ("activations in a pass",
                "a larger parallel_config.model_parallel or context_parallel, or a smaller runner_config.batch_size"),
    "update": (IN_WORDS["update"], "parallel.enable_parallel_optimizer: True shards them over data_parallel"),
}  # fmt: skip


def is_update(memory: Mapping[str, int]) -> bool:
    """Return whether a stage needs the most memory in the optimizer's update, and not in the forward and backward
    passes.
    """
    updated = sum(memory[part] for part in (*UPDATED, "update"))
    return memory["update"] > 0 and updated == memory["total"]


def at_fullest(memory: Mapping[str, int], part: str) -> int:
    """Return the bytes of one part of the memory (such as kept activations) at the peak of a step. The result is 0 if
    this part of the memory does not exist at the peak.
    """
    return memory[part] if part in UPDATED or (part == "update") == is_update(memory) else 0


def line_of(held: Sequence[Held], graph: Mapping[str, Any], passes: Sequence[Pass], update: int = 0) -> TimeLine:
    """Return a stage's memory over a step as a time line; its peak equals the total that `memory_of` returns. If the
    order of the passes is unknown, the time line shows one backward pass of each chunk, without kept activations.
    """
    constant: dict[Owner, float] = defaultdict(float)
    for part, name, size in (
        *((_PARTS[item.kind], item.name, item.bytes) for item in held),
        *(("gathered", name, size) for name, size in graph["kept"].items()),
    ):
        constant[Owner(part, module_of_path(name))] += size
    chunks = graph["activations"]
    order = [Op(*item) for item in passes] or [Op("B", 0, chunk) for chunk in range(len(chunks))]
    kept = [_kept(chunk) if passes else {} for chunk in chunks]
    timed = [Timed(op, float(place), float(place + 1)) for place, op in enumerate(order)]
    after = updating_owners(float(update))
    return stitch(timed, constant, kept, lambda op: _inside(op, chunks[op.chunk]), float(len(order)), "passes", after)


def _kept(chunk: Mapping[str, Any]) -> Bytes:
    """Return the bytes that a micro-batch keeps in a chunk, by module; if the modules of the chunk are not known, all
    bytes count as "other".
    """
    modules = chunk.get("modules") or {OTHER: chunk["saved"]}
    return {Owner(KEPT, module): float(size) for module, size in modules.items()}


def _inside(op: Op, chunk: Mapping[str, Any]) -> list[Bytes]:
    """Return what is alive in a pass beside what is kept, which a forward's own part already contains."""
    kind, name, own = ("F", "forward", chunk["saved"]) if op.kind == "F" else ("B", "backward", 0)
    curve = chunk.get("curves", {}).get(kind) or [chunk[name]]
    return [{Owner(WORKING, f"alive in a {name}"): float(max(0, size - own))} for size in curve]
