"""This module predicts the peak memory of every stage and the step time for many candidate strategies at once, with
NumPy arrays.

The results are those of `tools.estimate.memory.model` and `tools.estimate.time_model`. The functions of these modules
compute each term once, and the term is then looked up for all candidates. Memory is a sum of terms, each of which
depends only on a few degrees:

    static        weights, gradients, optimizer state      by stage, tp, ep, sharding (and devices of a stage)
    activations   kept by micro-batches in flight          by stage, tp, cp, samples, number of micro-batches, policy
    working       of one pass                              by stage, all degrees, samples, whether layers run again
                  (both also by ep and sharding where passes copy weights)
    buffers       of communication                         by stage, tp, cp, samples, whether experts are spread

A layer's time depends on tp, cp, ep, samples and dispatch mode (the time of a head also on dp), the time of a stage's
gradients and optimizer depends on its weights and their sharding. The reference results are `all_stages` and
`TimeModel.step` (the closed form of the pipeline) for a candidate's configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.memory.activations import saved, working
from tools.estimate.memory.model import held_micro_batches, stage_memory, static_memory, update_memory
from tools.estimate.time_model import CLOSED, TimeModel, pipeline_of
from tools.model import KINDS
from tools.pipeline.schedules import pairs_up, splits_backward
from tools.pipeline.simulate import enough, filling
from tools.search.candidates import Block, configuration
from tools.search.request import POLICIES, Request

_LAYERS = ("dense", "moe")
_PASS = ("tp", "cp", "mbs", "mode")  # what a micro-batch's activations depend on
Value = TypeVar("Value")


class Memo:
    """A `Memo` stores values that were computed for the candidates of a search under keys, so that each value is
    computed only once.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._known: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[..., Value], *arguments: Any) -> Value:
        """Return the stored value of a key. If the key is new, compute its value with the function `make`, and store
        the value.
        """
        if key not in self._known:
            self._known[key] = make(*arguments)
        return self._known[key]  # type: ignore[return-value]

    def config(self, block: Block, row: int) -> Configuration:
        """Return the configuration of the candidate strategy in one row of a block, without recomputation."""
        return configuration(self.request, block.candidate(row, "none"))

    def of(self, key: Hashable, function: Callable[..., Value], block: Block, row: int, *more: Any) -> Value:
        """Return the stored value of a key. If the key is new, compute the value from the configuration of the
        candidate in one row of a block.
        """
        return self.get(key, lambda: function(self.config(block, row), *more))


def degrees(block: Block, row: int, *names: str) -> tuple[int, ...]:
    """Return the values of one candidate (a row of a block) in the given columns as integers."""
    return tuple(int(block.columns[name][row]) for name in names)


def groups(block: Block, *names: str, **more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group the candidates (rows) of a block that are equal in the named columns. Return the first row of each group,
    and the group number of each row.
    """
    columns = [block.columns[name] for name in names] + list(more.values())
    codes = np.zeros(len(block), np.int64)
    for column in columns:
        distinct, place = np.unique(column, return_inverse=True)
        codes = codes * len(distinct) + place
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    return first, inverse


def stage_keys(config: Configuration) -> list[tuple[str, ...]]:
    """Return for each stage a key, such that stages with the same kinds of layers (and therefore the same weights) have
    equal keys.
    """
    return [tuple(sorted(kind for chunk in config.stage_kinds(stage) for kind in chunk)) for stage in range(config.pp)]


class MemoryTable:
    """A `MemoryTable` predicts the memory of the candidate strategies of one search."""

    def __init__(self, request: Request):
        self._memo = Memo(request)
        self._config = self._memo.config
        self._loaded = ("ep",) if request.skews else ()  # what a pass depends on, too, if loads differ by it

    def peaks(self, block: Block) -> np.ndarray:
        """Return the peak bytes of each candidate's stages for each recompute policy, as an array [candidates,
        policies, stages]. All layers are assumed to follow the same recompute policy.
        """
        example, static = self._config(block, 0), self.static(block)
        first, place = groups(block, *_PASS, *self._loaded, spread=block.columns["ep"] > 1)
        buffers = np.array([self._buffers(block, row, stage_keys(example)) for row in first])[place]
        work = self._working(block, example)
        passes = self._activations(block, example) + work + (static + buffers)[:, None, :]
        return np.maximum(passes, (self._by_spread(block, "update", _updated) + buffers)[:, None, :])

    def static(self, block: Block) -> np.ndarray:
        """Return the bytes [candidates, stages] of weights, gradients and optimizer state, which do not depend on
        recomputation.
        """
        return self._by_spread(block, "static", lambda config, stage: sum(static_memory(config, stage)))

    def _by_spread(self, block: Block, name: str, bytes_of: Callable[[Configuration, int], float]) -> np.ndarray:
        """Return [rows, stages] bytes that depend only on a stage's weights and on how these are spread."""
        at_once = (block.columns["m"] == 1) & np.bool_(block.pp == 1)
        first, place = groups(block, "tp", "ep", "shard", at_once=at_once)
        return np.array([self._stages(self._config(block, row), name, bytes_of) for row in first])[place]

    def _stages(self, config: Configuration, name: str, bytes_of: Callable[[Configuration, int], float]) -> list[float]:
        at_once = config.pp == 1 and config.micro_batches == 1
        spread = (config.pp, config.tp, config.ep, config.shard_optimizer, config.shard_gradients, at_once)
        return [
            self._memo.get((name, key, *spread), bytes_of, config, stage)
            for stage, key in enumerate(stage_keys(config))
        ]

    def _buffers(self, block: Block, row: int, keys: list[tuple[str, ...]]) -> list[float]:
        own = (*degrees(block, row, *_PASS, *self._loaded), block.columns["ep"][row] > 1)
        each = {
            kind: self._memo.of(("buffers", kind, *own), _buffers, block, row, kind)
            for kind in {kind for key in keys for kind in key}
        }
        return [max(each[kind] for kind in key) for key in keys]

    def _copying(self, block: Block) -> bool:
        """Return whether the passes of any candidate of a block copy weights, which depends on its sharding."""
        first, _ = groups(block, "shard")
        return any(self._config(block, int(row)).copies_weights for row in first)

    def _copies(self, block: Block, row: int) -> tuple[int, ...]:
        """Return what the passes' copies of weights depend on; () if the passes make none."""
        copies = self._memo.of(
            ("copies", block.pp == 1, *degrees(block, row, "shard")), lambda config: config.copies_weights, block, row
        )
        return degrees(block, row, "dp", "ep", "shard") if copies else ()

    def _activations(self, block: Block, example: Configuration) -> np.ndarray:
        """Return [rows, policies, stages] kept for backward."""
        m = block.columns["m"]
        classes = enough(example.schedule, block.pp, m)
        more = ("ep", "shard") if self._copying(block) else self._loaded
        first, place = groups(block, *_PASS, *more, m=classes)
        kinds = np.array([self._saved(block, row) for row in first])
        found = np.empty((len(first), len(POLICIES), block.pp))
        for number in np.unique(classes[first]):
            own = classes[first] == number
            held = self._memo.get(("held", block.pp, block.vpp, int(number)), _held, example, int(number))
            for stage, weights in enumerate(held):
                found[own, :, stage] = (kinds[own] @ weights.T).max(axis=-1)
        return found[place]

    def _saved(self, block: Block, row: int) -> np.ndarray:
        """Return [policies, kinds] bytes of one micro-batch and layer."""
        own = (*degrees(block, row, *_PASS, *self._loaded), block.pp == 1, *self._copies(block, row))
        return self._memo.of(("saved", *own), _saved, block, row)

    def _working(self, block: Block, example: Configuration) -> np.ndarray:
        """Return [rows, policies, stages] of the passes of each stage's chunks: the fullest of its kinds."""
        stages = [set().union(*map(_passes, example.stage_kinds(stage))) for stage in range(block.pp)]
        copies = self._copying(block)
        each = {kinds: self._pass(block, kinds, copies) for kinds in set().union(*stages)}
        return np.stack([np.max([each[kinds] for kinds in held], axis=0) for held in stages], axis=-1)

    def _pass(self, block: Block, kinds: tuple[str, ...], copies: bool) -> np.ndarray:
        """Return [rows, policies] bytes of a pass of layers of these kinds."""
        names = ["tp", "cp", "mbs"] + ["ep", "mode"] * bool({"moe", "mtp"} & set(kinds))
        names += ["dp", "ep", "shard"] * copies
        # the loss exchanges logits between data- and context-parallel ranks
        ranks = np.where((block.columns["cp"] > 1) & np.bool_("head" in kinds), block.columns["dp"], 1)
        first, place = groups(block, *names, ranks=ranks)
        keys = (("working", kinds, block.pp == 1, *degrees(block, row, *names), int(ranks[row])) for row in first)
        found = [self._memo.of(key, _working, block, row, kinds) for key, row in zip(keys, first, strict=True)]
        return np.array(found)[place]


def _passes(kinds: Iterable[str]) -> set[tuple[str, ...]]:
    """Return the kinds of a chunk, each by itself, but the loss beside that of MTP layers."""
    mtp = ("mtp",) if "mtp" in kinds else ()
    return {(kind, *mtp) if kind == "head" else (kind,) for kind in kinds}


def _saved(config: Configuration) -> np.ndarray:
    """Return [policies, kinds]; ends, which are not layers, are kept whole unless layers are recomputed fully."""
    kinds = [kind for kind in KINDS if kind != "moe" or config.model.experts]
    rows = np.zeros((len(POLICIES), len(KINDS)))
    for policy, option in enumerate(POLICIES):
        for kind in kinds:
            used = option if kind in _LAYERS or option == "full" else "none"
            rows[policy, KINDS.index(kind)] = saved(config, kind, used)
    return rows


def _updated(config: Configuration, stage: int) -> float:
    """Return bytes of a stage in clipping and the optimizer, without buffers."""
    weights, state, accumulated, _ = static_memory(config, stage)
    return weights + state + accumulated + update_memory(config, stage)


def _working(config: Configuration, kinds: tuple[str, ...]) -> list[float]:
    """Return [policies] bytes of a pass of layers of these kinds; MTP layers recompute only as whole layers."""
    return [working(config, [(kind, policy) for kind in kinds]) for policy in POLICIES]


def _buffers(config: Configuration, kind: str) -> float:
    """Return bytes of communication buffers of a stage that holds one layer of a kind; other kinds have none."""
    if kind not in _LAYERS:
        return 0.0
    model = replace(config.model, pattern=(kind,), mtp=0)
    return stage_memory(replace(config, model=model, pp=1, layers=((1,),)), 0).buffers


def kind_counts(config: Configuration) -> np.ndarray:
    """Return the number of layers of each kind for each chunk and stage, [chunks, stages, kinds]."""
    counts = np.zeros((config.chunks, config.pp, len(KINDS)), int)
    for stage in range(config.pp):
        for chunk, kinds in enumerate(config.stage_kinds(stage)):
            for kind in kinds:
                counts[chunk, stage, KINDS.index(kind)] += 1
    return counts


def _held(config: Configuration, micro_batches: int) -> list[np.ndarray]:
    """Return for each stage [vectors, kinds]: layers whose activations are held at the schedule's fullest moments."""
    counts = kind_counts(config)
    config = replace(config, micro_batches=micro_batches)
    return [held_micro_batches(config, stage) @ counts[:, stage] for stage in range(config.pp)]


_LAYER_COLUMNS = [KINDS.index("dense"), KINDS.index("moe"), KINDS.index("mtp")]


@dataclass(frozen=True)
class StageTimes:
    """A `StageTimes` holds the seconds of one micro-batch on each stage of each candidate."""

    work: np.ndarray  # [rows, policies, stages] forward and backward of a stage
    sending: np.ndarray  # [rows] of one activation to the next stage


class TimeTable(TimeModel):
    """A `TimeTable` predicts the step times of the candidate strategies of one search."""

    def __init__(self, request: Request):
        super().__init__(request.hardware)
        self.request, self._memo = request, Memo(request)
        self._config = self._memo.config
        model = request.base.model
        without = {"moe"} if not model.experts else set()
        without |= set() if model.mtp else {"mtp"}
        self.kinds = [kind for kind in KINDS if kind not in without]

    def stages(self, block: Block) -> StageTimes:
        """Return the times of each candidate's stages for each recompute policy. All layers are assumed to follow the
        same recompute policy.
        """
        example = self._config(block, 0)
        counts = kind_counts(example).sum(axis=0)
        layers = np.zeros_like(counts)
        layers[:, _LAYER_COLUMNS] = counts[:, _LAYER_COLUMNS]
        first, place = groups(block, "tp", "cp", "ep", "mbs", "mode")
        found, sending = np.empty((len(first), len(POLICIES), block.pp)), np.zeros(len(first))
        for index, row in enumerate(first):
            works, recomputed = self._layers(block, row)
            found[index] = (counts @ works) + recomputed @ layers.T
            if not self.request.base.overlap_pp:
                key = ("sending", block.pp > 1, *degrees(block, row, "tp", "cp", "mbs"))
                sending[index] = self._memo.of(key, self.transfer, block, row)
        return StageTimes(found[place], sending[place])

    def totals(self, block: Block, work: np.ndarray, sending: np.ndarray) -> np.ndarray:
        """Return the predicted seconds of each candidate's step. The argument `work` [candidates, stages] holds the
        seconds of one micro-batch on each stage, and `sending` holds the seconds of sending a micro-batch to the next
        stage. For uneven loads the result is approximate, because it wrongly assumes that gradient communication is
        hidden while devices wait for the fullest device.
        """
        m = block.columns["m"]
        pipeline = pipeline_of(work, self._filling(block), m, sending, block.vpp)
        once, each, optimizer = self._once(block, work.argmax(axis=1))
        data = once + each * m
        if self.request.base.overlap_dp:
            rounds = np.minimum(block.pp, m) if block.vpp > 1 else np.ones_like(m)
            data = self.waited(once, each, work.max(axis=1), m, rounds)
        return pipeline + data + optimizer + self.fixed

    def _filling(self, block: Block) -> Any:
        """Return what divides the other stages' work in `pipeline_of`: chunks, or [rows] without a closed form."""
        schedule = self.request.schedule
        if not schedule or schedule in CLOSED:
            return block.vpp
        m = enough(schedule, block.pp, block.columns["m"])
        found = {int(one): filling(schedule, block.pp, block.vpp, int(one)) for one in np.unique(m)}
        return (block.pp - 1) / np.maximum(1e-9, [found[int(one)] for one in m])

    def least(self, block: Block, work: np.ndarray) -> np.ndarray:
        """Return for each candidate a lower bound in seconds on the step time of all placements of its layers. The
        lower bound ignores the memory limit.

        The bound is the mean over the stages of a stage's own work plus the time before its first and after its last
        pass, so that each layer has the same weight on every stage: with one chunk, stage s needs at least m w_s plus
        the sum of w_j over the stages j before s. With several chunks, or if weight gradients are split off the
        backward passes (they may run while others wait), only the work of the stages counts. The bound is 0 for
        schedules with pairs, whose passes hide parts of each other. Gradients and optimizer are left out, because they
        depend on the layout of the layers.

        Args:
            work: [rows, stages] the seconds of the forward and backward pass of one micro-batch without recomputation.
        """
        m, schedule = block.columns["m"], self.request.schedule
        if pairs_up(schedule):
            return np.zeros(len(m))
        plain = block.vpp > 1 or splits_backward(schedule)
        each = m / block.pp if plain else 1 / (1 - (1 - 1 / m) ** block.pp)
        return each * work.sum(axis=1) + self.fixed

    def _layers(self, block: Block, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Return [kinds] seconds of forward and backward, [policies, kinds] what recomputation adds."""
        tp, cp, ep, mbs, mode = degrees(block, row, "tp", "cp", "ep", "mbs", "mode")
        works, recomputed = np.zeros(len(KINDS)), np.zeros((len(POLICIES), len(KINDS)))
        for kind in self.kinds:
            # what has no experts knows neither ep nor mode, what has no logits does not know dp
            key = (kind, tp, cp, mbs, *((ep, mode) if kind in ("moe", "mtp") else ()))
            key += degrees(block, row, "dp") if kind in ("head", "mtp") else ()
            layer = self._memo.of(key, self.layer, block, row, kind)
            index = KINDS.index(kind)
            works[index] = layer.forward.total + layer.backward.total
            recomputed[:, index] = [layer.recomputed[policy].total for policy in POLICIES]
        return works, recomputed

    def _once(self, block: Block, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [rows] seconds of a stage [rows]: gradients once, for each micro-batch; the optimizer."""
        first, place = groups(block, "tp", "ep", "shard", stage=stage)
        found = np.array([self._stage_once(self._config(block, row), int(stage[row])) for row in first])[place]
        return found[:, 0], found[:, 1], found[:, 2]

    def _stage_once(self, config: Configuration, stage: int) -> tuple[float, float, float]:
        sharded = (config.shard_optimizer, config.shard_gradients)
        key = (stage_keys(config)[stage], config.pp, config.tp, config.ep, *sharded)
        return self._memo.get(key, lambda: (*self.once_and_each(config, stage), self.optimizer(config, stage)))
