"""A pipeline-balance problem in the neutral schema pp-balance/1, and what a solution of it costs.

A model's layers go to stages x chunks. Chunk (v, s) is the v-th chunk of stage s; the model's order is v-major: chunk 0
of all stages, then chunk 1, ...; of V-shaped schedules odd chunks go from the last stage to the first. Layers of one
type are alike; each has one of its type's recompute options. A solution says n[type][v][s][option], the number of
layers. Arrays of this module have the types' options in one column each (K of them, `columns`) and the chunks in model
order (C = V x P; `by_stage` puts chunk (v, s) at v * P + s).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tools.pipeline.critical_path import critical_path
from tools.pipeline.in_flight import peak_vectors
from tools.pipeline.schedules import is_v_shaped, splits_backward
from tools.pipeline.simulate import makespans
from tools.pipeline.timetable import Timetable, timetable

CAP_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Option:
    """A way to recompute a layer: time added to its backward, activation memory of a micro-batch in flight."""

    name: str
    extra_backward: float
    activation: float


@dataclass(frozen=True)
class LayerType:
    """Layers that are alike: how many, times of a micro-batch, memory of parameters (with gradients and so on).

    `weight` is the part of `backward` that is weight gradients, which some schedules split off.
    """

    name: str
    count: int
    forward: float
    backward: float
    parameters: float
    options: tuple[Option, ...]
    weight: float = 0.0


@dataclass(frozen=True)
class Instance:
    """One problem. Times and memory in the file's units.

    static      [stages] memory of a stage that no layer causes
    head, tail  (forward, backward) added to the first and the last chunk
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    schedule: str
    cap: float
    static: np.ndarray
    head: tuple[float, float]
    tail: tuple[float, float]
    types: tuple[LayerType, ...]

    @cached_property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """(type, option) of each column."""
        return tuple((t, o) for t, kind in enumerate(self.types) for o in range(len(kind.options)))

    @cached_property
    def costs(self) -> np.ndarray:
        """[4, K] forward, backward, parameters and activation of a layer in each column."""
        pairs = [(self.types[t], self.types[t].options[o]) for t, o in self.columns]
        rows = [(k.forward, k.backward + o.extra_backward, k.parameters, o.activation) for k, o in pairs]
        return np.array(rows, float).T

    @cached_property
    def ends(self) -> np.ndarray:
        """[2, C] forward and backward of the head and the tail."""
        fixed = np.zeros((2, self.chunks * self.stages))
        fixed[:, 0] += self.head
        fixed[:, -1] += self.tail
        return fixed

    @cached_property
    def table(self) -> Timetable:
        """The schedule's timetable."""
        return timetable(self.schedule, self.stages, self.chunks, self.micro_batches)

    @cached_property
    def peaks(self) -> tuple[np.ndarray, ...]:
        """For each stage [vectors, chunks]: micro-batches in flight that no other moment of the stage exceeds."""
        return tuple(peak_vectors(order, self.chunks) for order in self.table.orders)

    @cached_property
    def least_layers(self) -> int:
        """Layers that each chunk but the first and the last must hold: 1 where the model has enough."""
        return int(sum(kind.count for kind in self.types) >= self.chunks * self.stages - 2)

    @cached_property
    def places(self) -> np.ndarray:
        """[C] v * P + s of the chunk (v, s) at each place of the model's order."""
        numbers = np.arange(self.chunks * self.stages).reshape(self.chunks, self.stages)
        if is_v_shaped(self.schedule):
            numbers[1::2] = numbers[1::2, ::-1].copy()
        return numbers.ravel()

    @cached_property
    def stage_of(self) -> np.ndarray:
        """[C] stage of each chunk."""
        return self.places % self.stages

    def by_stage(self, values: np.ndarray) -> np.ndarray:
        """[..., C] in the model's order as [..., C] by v * P + s, or back again."""
        return values[..., self.places] if is_v_shaped(self.schedule) else values

    @cached_property
    def rows(self) -> np.ndarray:
        """[2, K] forward and backward of a layer in each column; [3, K] with weight gradients where they are split."""
        if not splits_backward(self.schedule):
            return self.costs[:2]
        return np.vstack([self.costs[:2], [self.types[t].weight for t, _ in self.columns]])

    @cached_property
    def fixed(self) -> np.ndarray:
        """[rows, C] of what no layer causes: `ends`, whose weight gradients are not split off."""
        return np.vstack([self.ends, np.zeros((len(self.rows) - 2, self.ends.shape[1]))])

    def times(self, plans: np.ndarray) -> np.ndarray:
        """Return [..., rows, C] times of the chunks of plans [..., K, C], as `rows`."""
        return np.einsum("ik,...kc->...ic", self.rows, plans) + self.fixed

    def step_times(self, plans: np.ndarray) -> np.ndarray:
        """Return the simulated step time [N] of plans [N, K, C]."""
        times = self.by_stage(self.times(plans)).reshape(len(plans), -1, self.chunks, self.stages)
        return makespans(self.table, *times.transpose(1, 0, 2, 3))

    def longest_chain(self, plan: np.ndarray) -> tuple[float, np.ndarray]:
        """Return (step time, visits [rows, C]) of a plan [K, C] (`tools.pipeline.critical_path`)."""
        time, visits = critical_path(self.table, self.by_stage(self.times(plan)))
        return time, self.by_stage(visits)

    def peak_memory(self, plans: np.ndarray) -> np.ndarray:
        """Return [N, stages] peak memory of plans [N, K, C]."""
        shape = (len(plans), self.chunks, self.stages)
        every, kept = (self.by_stage(np.einsum("k,nkc->nc", cost, plans)) for cost in self.costs[2:])
        parameters = every.reshape(shape).sum(axis=1) + self.static
        activation = kept.reshape(shape)
        held = [(activation[:, :, s] @ peaks.T).max(axis=1) for s, peaks in enumerate(self.peaks)]
        return parameters + np.array(held).T

    def fits(self, plans: np.ndarray) -> np.ndarray:
        """Return [N]: whether no stage of a plan exceeds the cap."""
        return self.kept(self.peak_memory(plans)).all(axis=1)

    def kept(self, memory: np.ndarray) -> np.ndarray:
        """Return, for each memory, whether it is within the cap."""
        return memory <= self.cap + CAP_TOLERANCE

    def well_formed(self, plans: np.ndarray) -> np.ndarray:
        """Return [N]: whether every layer is placed once, types keep the model's order and no inner chunk is empty."""
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
        return good

    def type_columns(self, index: int) -> slice:
        """Return the columns of a type."""
        first = sum(len(kind.options) for kind in self.types[:index])
        return slice(first, first + len(self.types[index].options))

    def from_solution(self, solution: list) -> np.ndarray:
        """Return the plan [K, C] of n[type][v][s][option]."""
        size = self.chunks * self.stages
        return self.by_stage(np.concatenate([np.asarray(part).reshape(size, -1).T for part in solution]))

    def to_solution(self, plan: np.ndarray) -> list:
        """Return n[type][v][s][option] of a plan [K, C]."""
        parts = [self.by_stage(plan)[self.type_columns(t)] for t in range(len(self.types))]
        return [part.T.reshape(self.chunks, self.stages, -1).tolist() for part in parts]
