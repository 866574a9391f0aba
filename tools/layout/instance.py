"""This module describes a pipeline-balance problem in the file format pp-balance/1. The module reads the problem's
file, and computes the step time and the memory of a solution.

The layers of a model are distributed over P stages with V chunks each. Chunk (v, s) is the v-th chunk of stage s. The
model runs through chunk 0 of all stages, then chunk 1 of all stages, and so on; in V-shaped schedules odd chunks run
from the last stage to the first. All layers of one type have equal costs, and each layer has one of the recompute
options of its type. A solution gives the numbers of layers n[type][v][s][option]. The arrays of this module have one
column for each option of each type (K `columns`), and the chunks in the order of the model (C = V x P; `by_stage` moves
chunk (v, s) to position v * P + s).

The JSON file gives P stages, V chunks, M micro-batches, `schedule`, `memory_cap`, `static_mem`[P], `head` and `tail`
({fwd, bwd} added to the first and the last chunk) and `body`: layer types in model order with `count`, `fwd`, `bwd`,
`param_mem` and recompute `options` of `extra_bwd` and `act_mem`. The keys of `_NOTES`, and all that begin with `about`,
are notes; any other key is refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from plugins.errors import DataError, RecipeError, did_you_mean, not_json
from tools.files.atomic import what_is
from tools.layout.json_value import JsonValue
from tools.pipeline.schedules import check_schedule, is_v_shaped, splits_backward
from tools.pipeline.simulate import makespans, stage_peaks
from tools.pipeline.timetable import Timetable, critical_path, timetable

CAP_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Option:
    """An `Option` is a recompute option of a layer. An `Option` holds the time that recomputation adds to the backward
    pass, and the activation memory that each micro-batch in flight keeps.

    `working` is the memory that one pass needs while it runs: a stage needs the largest of its layers and ends once.
    """

    name: str
    extra_backward: float
    activation: float
    working: float = 0.0


@dataclass(frozen=True)
class LayerType:
    """A `LayerType` describes equal layers: their number, the times of one micro-batch, and the memory of parameters,
    gradients and optimizer state.

    `weight` is the part of `backward` that is weight gradients, which some schedules split off. `buffers` is memory
    that a stage with such layers needs once; a stage with several types needs the largest. `updated` is the memory of a
    layer in the optimizer's update after the passes, which keeps no activations. `zeroed` is memory that the update
    needs once beside `updated` and `buffers`; a stage with several types needs the largest.
    """

    name: str
    count: int
    forward: float
    backward: float
    parameters: float
    options: tuple[Option, ...]
    weight: float = 0.0
    buffers: float = 0.0
    updated: float = 0.0
    zeroed: float = 0.0


@dataclass(frozen=True)
class Instance:
    """An `Instance` is one pipeline-balance problem: which layers go to which pipeline stage, and what they recompute.
    Times and memory are in the units of the file that describes the problem.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    schedule: str
    cap: float
    static: np.ndarray  # [stages] the memory of a stage that does not depend on its layers
    head: tuple[float, float]  # (forward, backward) times that are added to the first chunk
    tail: tuple[float, float]  # the same of the last chunk
    types: tuple[LayerType, ...]
    last_layers: int = 0  # the smallest number of layers of the last chunk (0 or 1)
    last_option: str = ""  # of all layers of the last chunk whose types have this option; "" if any option is allowed
    # the options, the strongest first, in the order that the layers of a chunk must have; () if any order is allowed
    order: tuple[str, ...] = ()
    working: np.ndarray | float = 0.0  # [stages] what passes of work of no layer need, like `Option.working`
    kept: np.ndarray | float = 0.0  # [C] activation memory of a micro-batch in flight for work of no layer
    updated: np.ndarray | float = 0.0  # [stages] memory of the optimizer's update without layers
    zeroed: np.ndarray | float = 0.0  # [stages] what work of no layer needs once there, like `LayerType.zeroed`

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Return for each of the K rows of a plan [K, C] the layer type and the recompute option of the layers that the
        row counts.
        """
        return tuple((t, o) for t, kind in enumerate(self.types) for o in range(len(kind.options)))

    @cached_property
    def costs(self) -> np.ndarray:
        """Return an array [4, K] with the costs of a layer for each layer type and recompute option: forward time,
        backward time (with recomputation), memory of parameters, and activation memory.
        """
        pairs = [(self.types[t], self.types[t].options[o]) for t, o in self.columns]
        rows = [(k.forward, k.backward + o.extra_backward, k.parameters, o.activation) for k, o in pairs]
        return np.array(rows, float).T

    @cached_property
    def ends(self) -> np.ndarray:
        """Return for each chunk the forward and backward times of work outside of layers, as an array [2, C]. Work
        outside of layers is the embedding in the first chunk and the head in the last chunk.
        """
        fixed = np.zeros((2, self.chunks * self.stages))
        fixed[:, 0] += self.head
        fixed[:, -1] += self.tail
        return fixed

    @property
    def transfer(self) -> float:
        """Return the time for which a stage is busy when it sends an activation or a gradient to another stage."""
        return 0.0

    @cached_property
    def received(self) -> np.ndarray:
        """Return for each stage the part of `ends` that is spent on receiving from other stages, which is 0 here."""
        return np.zeros(self.stages)

    @cached_property
    def table(self) -> Timetable:
        """Return the timetable of the pipeline schedule: the order of the operations on each stage."""
        return timetable(self.schedule, self.stages, self.chunks, self.micro_batches)

    @cached_property
    def peaks(self) -> tuple[np.ndarray, ...]:
        """Return for each stage how many micro-batches of each chunk are in flight when the schedule keeps the most
        activations. If there are several such moments, the array [moments, chunks] has a row for each moment.
        """
        sizes = self.stages, self.chunks, self.micro_batches
        return tuple(stage_peaks(self.schedule, stage, *sizes) for stage in range(self.stages))

    @cached_property
    def least_layers(self) -> int:
        """Return how many layers a chunk between the first and the last must have: 1 if there are enough, else 0."""
        return int(sum(kind.count for kind in self.types) >= self.chunks * self.stages - 2 + self.last_layers)

    @cached_property
    def kept_by_ends(self) -> tuple[np.ndarray, ...]:
        """Return for each stage the activation memory that work outside of layers (embedding, head) keeps at each
        moment of the peak (see `peaks`).
        """
        kept = self.by_stage(np.broadcast_to(self.kept, self.stage_of.shape)).reshape(self.chunks, self.stages)
        return tuple(peaks @ kept[:, stage] for stage, peaks in enumerate(self.peaks))

    def _least_and_more(
        self, types: list[int], needs: list[tuple[float, float]], ends: np.ndarray | float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the memory [2, stages] that each stage needs at least once, and how much more it needs for each row of
        `needs`, [2, stages, rows]. Each row holds two needs of layers of the type in `types`; `ends` holds what work
        outside of layers needs of the first.
        """
        own = np.stack([np.broadcast_to(ends, self.stages), np.zeros(self.stages)])
        rows = np.maximum(np.array(needs).T[:, None], own[:, :, None])
        inner = np.full(len(self.stage_of), self.least_layers)
        inner[[0, -1]] = 0, self.last_layers
        sure = self.by_stage(inner).reshape(self.chunks, self.stages).any(axis=0)
        # if each inner chunk has a layer, the first type's layers do not reach stages after so many chunks
        early = np.array([t == 0 and len(self.types) > 1 for t in types])
        late = np.arange(self.stages) > (self.types[0].count if self.least_layers else self.stages)
        least = np.where(late[:, None] & early, np.inf, rows).min(axis=2)
        least = np.where(sure, least, own)
        return least, np.maximum(0.0, rows - least[:, :, None])

    @cached_property
    def _once(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (`least_static`, `more`)."""
        needs = [(self.types[t].options[o].working, self.types[t].buffers) for t, o in self.columns]
        least, more = self._least_and_more([t for t, _ in self.columns], needs, self.working)
        return self.static + least.sum(axis=0), more

    @cached_property
    def _update(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for `in_update` the memory of each stage [stages], of a layer of each type [types], and what a stage
        needs once for each type [2, types, stages].
        """
        needs = [(kind.zeroed, kind.buffers) for kind in self.types]
        least, more = self._least_and_more(list(range(len(self.types))), needs, self.zeroed)
        return self.updated + least.sum(axis=0), np.array([kind.updated for kind in self.types]), more.swapaxes(1, 2)

    @cached_property
    def updates(self) -> bool:
        """Return whether the optimizer's update needs memory that is known."""
        return bool(np.any(self.updated)) or any(kind.updated for kind in self.types)

    def in_update(self, layers: np.ndarray, stages: slice = slice(None)) -> np.ndarray:
        """Return the memory [..., S] in the optimizer's update of S `stages` (default: all), given their numbers of
        layers of each type [..., types, S].
        """
        least, each, more = self._update
        once = sum(((layers > 0) * row[:, stages]).max(axis=-2) for row in more)
        return each @ layers + least[stages] + once

    @property
    def least_static(self) -> np.ndarray:
        """Return for each stage the memory that every plan needs, whichever layers it places on the stage: `static`,
        and the least memory for a running pass and for buffers.
        """
        return self._once[0]

    @property
    def more(self) -> np.ndarray:
        """Return how much more memory than `least_static` a stage needs for a running pass and for buffers if it holds
        layers of a given type and recompute option, as an array [2, stages, K].
        """
        return self._once[1]

    @property
    def least_updated(self) -> np.ndarray:
        """Return for each stage the memory in the optimizer's update that does not depend on the plan."""
        return self._update[0]

    @property
    def more_updated(self) -> np.ndarray:
        """Return how much more memory than `least_updated` a stage needs once in the optimizer's update if it holds
        layers of a given type and recompute option, as an array [2, stages, K].
        """
        return self._update[2].swapaxes(1, 2)[:, :, [t for t, _ in self.columns]]

    @cached_property
    def kept_out(self) -> np.ndarray:
        """Return for each layer type and recompute option whether the key `last_option` forbids the option in the last
        chunk, as bool [K].
        """
        has = [any(option.name == self.last_option for option in kind.options) for kind in self.types]
        names = [(t, self.types[t].options[o].name) for t, o in self.columns]
        return np.array([has[t] and name != self.last_option for t, name in names])

    @cached_property
    def strengths(self) -> np.ndarray:
        """Return for each layer type and recompute option the position of the option in the list `order`; the position
        is 0 if any order is allowed.
        """
        names = [self.types[t].options[o].name for t, o in self.columns]
        return np.array([self.order.index(name) if self.order else 0 for name in names])

    @cached_property
    def places(self) -> np.ndarray:
        """Return the number v * P + s of each chunk, in the order in which the model runs the chunks. Here P is the
        number of stages, s is the stage, and v is the chunk's number on the stage.
        """
        numbers = np.arange(self.chunks * self.stages).reshape(self.chunks, self.stages)
        if is_v_shaped(self.schedule):
            numbers[1::2] = numbers[1::2, ::-1].copy()
        return numbers.ravel()

    @cached_property
    def stage_of(self) -> np.ndarray:
        """Return the stage on which each chunk runs, [C]."""
        return self.places % self.stages

    def by_stage(self, values: np.ndarray) -> np.ndarray:
        """Reorder values by chunk [..., C] from the model's order to the order of numbers in `places`, or back."""
        return values[..., self.places] if is_v_shaped(self.schedule) else values

    @cached_property
    def rows(self) -> np.ndarray:
        """Return the times of a layer for each layer type and recompute option as an array [2, K] or [3, K]: forward,
        backward, and weight gradients if the schedule splits them off.
        """
        if not splits_backward(self.schedule):
            return self.costs[:2]
        return np.vstack([self.costs[:2], [self.types[t].weight for t, _ in self.columns]])

    @cached_property
    def fixed(self) -> np.ndarray:
        """Return for each chunk the times [rows, C] of work outside of layers: forward, backward and 0."""
        return np.vstack([self.ends, np.zeros((len(self.rows) - 2, self.ends.shape[1]))])

    def times(self, plans: np.ndarray) -> np.ndarray:
        """Return the times of each chunk in the given plans [..., K, C], as an array [..., rows, C]. The rows are
        forward, backward, and weight gradients if the schedule splits them off.
        """
        return np.einsum("ik,...kc->...ic", self.rows, plans) + self.fixed

    def step_times(self, plans: np.ndarray) -> np.ndarray:
        """Return the simulated step time [N] of N plans, which are given as an array [N, K, C]."""
        times = self.by_stage(self.times(plans)).reshape(len(plans), -1, self.chunks, self.stages)
        return makespans(self.table, *times.transpose(1, 0, 2, 3))

    @cached_property
    def _short(self) -> Instance:
        """Return the same problem with no more micro-batches than fill the pipeline and two rounds."""
        few = 2 * self.stages + self.micro_batches % self.stages
        return replace(self, micro_batches=min(self.micro_batches, few)) if self.schedule in SCHEDULES else self

    def short_times(self, plans: np.ndarray) -> np.ndarray:
        """Return approximate step times [N] of N plans [N, K, C]. The function simulates a step with few micro-batches,
        and adds the time of the slowest stage for each further micro-batch.
        """
        short = self._short
        works = self.by_stage(self.times(plans)[:, :2].sum(axis=1)).reshape(len(plans), self.chunks, self.stages)
        lacking = self.micro_batches - short.micro_batches
        return short.step_times(plans) + lacking * works.sum(axis=1).max(axis=1)

    def longest_chain(self, plan: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the step time of a plan, and how often its longest chain of dependent operations runs the forward and
        the backward pass of each chunk, as an array [rows, C].
        """
        time, visits = critical_path(self.table, self.by_stage(self.times(plan)))
        return time, self.by_stage(visits)

    def peak_memory(self, plans: np.ndarray) -> np.ndarray:
        """Return the peak memory [N, stages] of N plans, which are given as an array [N, K, C]."""
        shape = (len(plans), self.chunks, self.stages)
        every, kept = (self.by_stage(np.einsum("k,nkc->nc", cost, plans)) for cost in self.costs[2:])
        there = np.stack([plans[:, :, self.stage_of == s].any(axis=2) for s in range(self.stages)], axis=1)
        once = sum((there * more).max(axis=2) for more in self.more)
        parameters = every.reshape(shape).sum(axis=1) + self.least_static + once
        activation = kept.reshape(shape)
        held = [
            (activation[:, :, s] @ peaks.T + self.kept_by_ends[s]).max(axis=1) for s, peaks in enumerate(self.peaks)
        ]
        in_passes = parameters + np.array(held).T
        if not self.updates:
            return in_passes
        types = [self.by_stage(plans[:, self.type_columns(t)].sum(axis=1)) for t in range(len(self.types))]
        layers = np.stack([number.reshape(shape).sum(axis=1) for number in types], axis=1)
        return np.maximum(in_passes, self.in_update(layers))

    def fits(self, plans: np.ndarray) -> np.ndarray:
        """Return for each plan whether all of its stages fit within the memory cap."""
        return self.within(self.peak_memory(plans)).all(axis=1)

    def within(self, memory: np.ndarray) -> np.ndarray:
        """Return for each given amount of memory whether it is within the memory cap."""
        return memory <= self.cap + CAP_TOLERANCE

    def well_formed(self, plans: np.ndarray) -> np.ndarray:
        """Return for each plan whether it obeys all rules except the memory limit, as bool [N]. Every layer must be
        placed once and in the model's order, no inner chunk may be empty, and `last_layers`, `last_option` and `order`
        must be obeyed.
        """
        layers = np.stack([plans[:, self.type_columns(t)].sum(axis=1) for t in range(len(self.types))], axis=1)
        counts = np.array([kind.count for kind in self.types])
        good = (plans >= 0).all(axis=(1, 2)) & (layers.sum(axis=2) == counts).all(axis=1)
        if self.least_layers:
            good &= (layers.sum(axis=1)[:, 1:-1] > 0).all(axis=1)
        before = layers[:, 0] > 0
        for later in layers.transpose(1, 0, 2)[1:]:
            # none of the earlier types may come after the first layer of this one
            started = np.cumsum(later, axis=1) - later > 0
            good &= ~(started & before).any(axis=1)
            before = before | (later > 0)
        good &= layers[:, :, -1].sum(axis=1) >= self.last_layers
        good &= ~plans[:, self.kept_out, -1].any(axis=1)
        return good & self.in_order(plans) if self.order else good

    def in_order(self, plans: np.ndarray) -> np.ndarray:
        """Return for each plan whether the recompute options in every chunk never become stronger from one layer type
        to the next, as bool [N].
        """
        good, weakest = np.ones(len(plans), bool), np.full((len(plans), plans.shape[2]), -1)
        for index in range(len(self.types)):
            columns = self.type_columns(index)
            there, places = plans[:, columns] > 0, self.strengths[columns][None, :, None]
            good &= (np.where(there, places, len(self.order)).min(axis=1) >= weakest).all(axis=1)
            weakest = np.maximum(weakest, np.where(there, places, -1).max(axis=1))
        return good

    def type_columns(self, index: int) -> slice:
        """Return the range of the rows of a plan [K, C] that count layers of the given type."""
        first = sum(len(kind.options) for kind in self.types[:index])
        return slice(first, first + len(self.types[index].options))

    def to_solution(self, plan: np.ndarray) -> list:
        """Return a plan [K, C] as the nested lists n[type][v][s][option] of a solution file."""
        parts = [self.by_stage(plan)[self.type_columns(t)] for t in range(len(self.types))]
        return [part.T.reshape(self.chunks, self.stages, -1).tolist() for part in parts]


SCHEMA = "pp-balance/1"
_MOST = {"P": 1_000, "V": 100, "M": 100_000}  # more is a slip of the keyboard, and would never end
_KEYS = ("schema", "name", "P", "V", "M", "schedule", "memory_cap", "static_mem", "head", "tail", "body")
# what others found, and where the numbers come from: not read
_ANSWERS = ("published_optimum", "fast_tuner", "sapp", "best_known", "lower_bound_trivial", "solution_layout")
_NOTES = ("doc", "units", "source", "provenance", *_ANSWERS)
_PASSES = 1_000_000
# the schema's names; with one chunk all of them are 1F1B
SCHEDULES = ("1f1b", "interleaved_1f1b", "interleaved_1f1b_less_memory")


def read_instance(path: Path) -> Instance:
    """Read a pipeline-balance instance from the file `path`.

    Raises:
        DataError: the file does not exist or is not JSON, or a value in it is missing or wrong; the message names the
            file and the key path.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):  # /dev/zero never ends
        raise DataError(f"{path}: {what_is(path)}")
    try:
        content = json.loads(path.read_text("utf-8"), object_pairs_hook=_once)
    except OSError as error:
        raise DataError(f"{path}: the file cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        recipe = path.suffix in (".yaml", ".yml")
        advice = f"; for a recipe, run `tc3 search {path}`" if recipe else ""
        raise DataError(f"{path}: the file {not_json(error)}{advice}") from None
    root = JsonValue(path, "", content)
    schema = root.key("schema")
    if schema.value != SCHEMA:
        schema.refuse(f"the schema must be {SCHEMA!r}")
    root.only(*_KEYS, *_NOTES)
    stages, chunks, micro_batches = (root.key(name).whole(most) for name, most in _MOST.items())
    if stages * chunks * micro_batches > _PASSES:
        passes = f"{stages * chunks * micro_batches:,} passes, of which at most {_PASSES:,} can be simulated"
        root.key("M").refuse(f"P x V x M is {passes}")
    static = root.key("static_mem").items()
    if len(static) != stages:
        root.key("static_mem").refuse(f"the list has {len(static)} entries, but P is {stages}")
    return Instance(
        name=root.key("name").text(),
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        schedule=_schedule(root.key("schedule"), stages, chunks, micro_batches),
        cap=root.key("memory_cap").number(),
        # what other stages hold more may stand in the layers: static memory can be negative
        static=np.array([place.number(least=-math.inf) for place in static]),
        head=_both(root.key("head")),
        tail=_both(root.key("tail")),
        types=tuple(_layer_type(place) for place in _named_apart(root.key("body"))),
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a mapping of JSON, of which the parser would keep the last of two values in silence."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for number, (key, _) in enumerate(pairs) if key in dict(pairs[:number]))
        raise ValueError(f"the key {twice!r} is written twice in one mapping")
    return found


def _schedule(place: JsonValue, stages: int, chunks: int, micro_batches: int) -> str:
    name = place.text()
    if name not in SCHEDULES:
        place.refuse(f"the schedule must be one of {', '.join(SCHEDULES)}{did_you_mean(name, list(SCHEDULES))}")
    if chunks == 1:
        return "1f1b"
    # the schema's warm-up, (V-1)P + ..., says nothing of rounds that are not full
    if rest := micro_batches % stages and f"{micro_batches} is not a multiple of {stages}":
        place.refuse(f"because V is {chunks}, M must be a multiple of P, but {rest}")
    try:
        check_schedule(name, stages, chunks, micro_batches)
    except RecipeError as error:
        place.refuse(str(error))
    return name


def _named_apart(place: JsonValue) -> list[JsonValue]:
    """Return the mappings of a list, of which no two may have one name: a plan could not say which of them it means."""
    first: dict[str, str] = {}
    for item in place.items():
        name = item.key("name")
        if name.text() in first:
            name.refuse(f"{first[name.value]} has the same name")
        first[name.value] = item.where
    return place.items()


def _layer_type(place: JsonValue) -> LayerType:
    place.only("name", "count", "fwd", "bwd", "param_mem", "options")
    options = []
    for option in _named_apart(place.key("options")):
        option.only("name", "extra_bwd", "act_mem")
        numbers = option.key("extra_bwd").number(), option.key("act_mem").number()
        options.append(Option(option.key("name").text(), *numbers))
    times = place.key("fwd").number(), place.key("bwd").number()
    count, memory = place.key("count").whole(10_000), place.key("param_mem").number()
    return LayerType(place.key("name").text(), count, *times, memory, tuple(options))


def _both(place: JsonValue) -> tuple[float, float]:
    place.only("fwd", "bwd")
    return place.key("fwd").number(), place.key("bwd").number()
