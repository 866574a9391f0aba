"""This module counts the memory of the fullest device of a pipeline stage if the router loads the devices unevenly.

A device that receives more tokens keeps more rows for its backward pass, and needs more working memory and larger
receive buffers. These three parts of a device's memory grow in proportion to the device's load in each layer. The
fullest device is searched among all devices of a group, because a single device is rarely the fullest device in every
layer. For even loads the result equals `stage_memory` exactly.

* Each layer has its own load, and the micro-batches in flight are those of the schedule's fullest moment. If the loads
  differ by micro-batch, all micro-batches in flight are assumed to be as full as the step's fullest micro-batch in each
  chunk, which is an upper bound.
* If only the load of the fullest device of each layer is known (one max/mean), the same device is assumed to be the
  fullest in all layers, which is an upper bound, too.
* The memory that HCCL reserves does not depend on the rows that an AlltoAllV moves: HCCL has two buffers for each
  communicator, which are not part of the job's memory (`tools.dryrun.memory.hccl_buffers`).

`limit_ratio` computes the max/mean up to which a stage fits, and `judge` counts the steps of given loads in which it
does not fit. A compile (`tc3 dryrun`) gives more exact bytes for even loads; then only the bytes that uneven loads add
are modelled (`Even`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.loads import Loads, moe_layers
from tools.estimate.memory.activations import buffers, fullest_pass, saved
from tools.estimate.memory.model import StageMemory, chunk_activations, held_micro_batches, stage_layers, stage_memory
from tools.estimate.memory.room import DOES_NOT_FIT, FITS, UNKNOWN, Room, known_errors
from tools.hardware.units import GIB

_HALVINGS = 60
_TWICE = 2.0  # the load at which bytes are counted, beside the even one; they are linear in between and beyond


@dataclass(frozen=True)
class _Grown:
    """A `_Grown` is an MoE layer of a stage: its chunk, its place among layers, bytes for each 1 of load above 1."""

    chunk: int
    layer: int
    kept: float
    working: tuple[float, float]  # at even loads, and for each 1 above
    buffers: tuple[float, float]


@lru_cache(maxsize=4096)
def _grown(config: Configuration, stage: int) -> tuple[_Grown, ...]:
    even, twice = replace(config, skew=1.0), replace(config, skew=_TWICE)
    found = []
    for chunk, layer, kind, option in _places(config, stage):
        working = fullest_pass(even, [(kind, option)])[1], fullest_pass(twice, [(kind, option)])[1]
        sent = (buffers(even, kind), buffers(twice, kind)) if config.training_graph and kind == "moe" else (0.0, 0.0)
        kept = saved(twice, kind, option) - saved(even, kind, option)
        found.append(_Grown(chunk, layer, kept, (working[0], working[1] - working[0]), (sent[0], sent[1] - sent[0])))
    return tuple(found)


def _places(config: Configuration, stage: int) -> Iterator[tuple[int, int, str, str]]:
    """Yield (chunk, place on the axis of layers, kind, what it recomputes) of each MoE layer."""
    decoder = {number: place for place, number in enumerate(moe_layers(config))}
    numbers = iter(config.layer_numbers(stage))
    for chunk, layers in enumerate(stage_layers(config, stage)):
        extra = iter(range(len(decoder), len(decoder) + config.model.mtp))
        for kind, option in layers:
            number = next(numbers) if kind in ("dense", "moe") else -1
            if kind == "moe":
                yield chunk, decoder[number], kind, option
            elif kind == "mtp" and config.model.last_kind == "moe":
                yield chunk, next(extra), kind, option


def peaks(config: Configuration, stage: int, shares: np.ndarray) -> np.ndarray:
    """Return the peak memory in bytes of the fullest device of a stage in each step, as an array [steps]. The argument
    `shares` holds the loads of the devices, divided by the mean load.
    """
    memory, held, chunks = _even(config, stage)
    grown = _grown(config, stage)
    steps, parts, layers, devices = shares.shape
    kept = np.zeros((steps, parts, config.chunks, devices))
    working = np.full((steps, devices), memory.working)
    sent = np.full((steps, devices), memory.buffers)
    for one in grown:
        above = shares[:, :, min(one.layer, layers - 1)] - 1.0  # [steps, micro-batches, devices]
        kept[:, :, one.chunk] += one.kept * above
        most = above.max(axis=1)
        working = np.maximum(working, one.working[0] + one.working[1] * most)
        sent = np.maximum(sent, one.buffers[0] + one.buffers[1] * most)
    # [vectors, steps, devices]: the moments of the schedule, with the fullest micro-batch of each chunk
    moments = np.einsum("vc,scd->vsd", held.astype(float), kept.max(axis=1))
    base = (held @ chunks)[:, None, None]
    activations = (base + moments).max(axis=0)
    # clipping and the optimizer hold no rows of experts; of the buffers the step has the largest
    after = memory.in_update - memory.buffers + sent
    return np.maximum(memory.static + activations + working + sent, after).max(axis=1)


@lru_cache(maxsize=4096)
def _even(config: Configuration, stage: int) -> tuple[StageMemory, np.ndarray, np.ndarray]:
    """Return the memory of a stage at even loads; [vectors, chunks] micro-batches in flight; [chunks] bytes of one."""
    even = replace(config, skew=1.0)
    chunks = np.array(chunk_activations(even, stage))
    return stage_memory(even, stage), held_micro_batches(even, stage), chunks


def most_possible(config: Configuration) -> float:
    """Return the largest possible max/mean (the fullest device's load over the mean load). This ratio has a limit,
    because a token goes to each expert of a device at most once.
    """
    model = config.model
    return config.ep * min(model.top_k, model.experts // config.ep) / model.top_k if model.experts else 1.0


@dataclass(frozen=True)
class Even:
    """An `Even` holds the memory that a compile has counted for a device of a stage at even loads: the total bytes, and
    the smallest and the largest total within the known error.
    """

    stage: int
    least: float
    total: float
    most: float


class Needs(NamedTuple):
    """A `Needs` holds the smallest possible, the expected and the largest possible number of bytes on the fullest
    device, each as an array [steps].
    """

    least: np.ndarray
    total: np.ndarray
    most: np.ndarray


def needs_of(config: Configuration, stage: int, shares: np.ndarray, even: Even | None = None) -> Needs:
    """Return the memory of a stage under the given loads of the devices. If a compile has counted the bytes at even
    loads (`even`), the memory model computes only the additional bytes of uneven loads. If no compile has counted
    bytes, the memory model computes all bytes, and the memory limit is reduced by a margin for the model's error.
    """
    found = peaks(config, stage, shares)
    if even is None:
        return Needs(found, found, found)
    more, error = found - _even(config, stage)[0].peak, known_errors().margin
    return Needs(even.least + (1 - error) * more, even.total + more, even.most + (1 + error) * more)


def limit_ratio(config: Configuration, stage: int, limit: float, even: Even | None = None) -> float:
    """Return the largest max/mean (the fullest device's load over the mean load, the same in every layer and
    micro-batch) at which a stage surely needs at most `limit` bytes. The result is 0 if the stage may not fit even at
    even loads, and `most_possible` if the stage fits for every routing.
    """

    def taken(ratio: float) -> float:
        return float(needs_of(config, stage, np.full((1, 1, 1, 1), ratio), even).most[0])

    low, high = 1.0, most_possible(config)
    if taken(low) > limit:
        return 0.0
    if taken(high) <= limit:
        return high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if taken(middle) <= limit else (low, middle)
    return low


@dataclass(frozen=True)
class Judged:
    """A `Judged` holds whether a run fits into memory at even loads, up to which max/mean of the loads it fits, and
    which steps of the given loads fit.
    """

    fits: bool  # at even loads, surely, given the model's known error
    up_to: float  # the largest max/mean in every layer with which the run surely fits; 0 if it does not at even loads
    full: int  # the stage that exceeds the limit first if max/mean grows
    most: float  # the largest max/mean that a router can cause
    loads: Loads | None  # that the user gave
    stages: tuple[int, ...]  # that are judged
    needs: tuple[Needs, ...]  # the memory of each stage under `loads`
    room: Room  # that the run may use on a device

    @property
    def total(self) -> np.ndarray:
        """Return the expected bytes of the fullest device of each stage in each step of the loads, [steps, stages]."""
        return np.stack([one.total for one in self.needs], axis=1)

    @property
    def over(self) -> np.ndarray:
        """Return for each step of the loads whether it surely needs more memory than the limit, as bool [steps]."""
        return np.max([one.least for one in self.needs], axis=0) > self.room.cap

    @property
    def open(self) -> np.ndarray:
        """Return for each step of the loads whether it is uncertain, because of the memory model's known error, that
        the step fits, as bool [steps].
        """
        return (np.max([one.most for one in self.needs], axis=0) > self.room.bytes) & ~self.over

    @property
    def verdict(self) -> str:
        """Return whether all steps of the given expert loads fit in memory: `FITS`, `UNKNOWN` or `DOES_NOT_FIT`."""
        return DOES_NOT_FIT if self.over.any() else UNKNOWN if self.open.any() else FITS

    @property
    def lines(self) -> list[str]:
        """Return sentences that say up to which max/mean (the fullest device's load over the mean load) the run fits,
        and how many steps of the given loads do not fit.
        """
        if not self.fits:
            found = ["loads: it does not surely fit at even loads, and uneven loads need more"]
        elif self.up_to >= self.most:
            found = [f"loads: it fits at even loads, and at every load that a router can give (max/mean {self.most:g})"]
        else:
            found = [
                f"loads: it fits at even loads, and up to a max/mean of {_floor(self.up_to):.2f} in every layer; stage "
                f"{self.full} is full first"
            ]
        return found if self.loads is None else [*found, self._of_loads(self.loads)]

    def _of_loads(self, loads: Loads) -> str:
        """Return in how many steps the loads need more memory than the limit, and on which stage."""
        every = self.total
        step, place = np.unravel_index(int(every.argmax()), every.shape)
        steps, over, between = len(every), int(self.over.sum()), int(self.open.sum())
        one = "step" if steps == 1 else "steps"
        fullest = f"step {loads.steps[step]} on stage {self.stages[place]}, {every[step, place] / GIB:.1f} GiB"
        if not over and not between:
            return f"{loads.words}: all of {steps} {one} fit; the fullest is {fullest}"
        doubt = f"{between} more within the model's known error of it" if between else "no more within the known error"
        where = ""
        if over:
            often = np.sum([one.least > self.room.cap for one in self.needs], axis=1)
            rate = "" if over in (1, steps) else f"1 step in {_floor(steps / over, 1):,g}, "
            where = f" ({rate}most often on stage {self.stages[int(often.argmax())]})"
        return (
            f"{loads.words}: {over} of {steps} {one} {'needs' if over == 1 else 'need'} more than the limit{where}, "
            f"{doubt}; the fullest is {fullest}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return, as values for `--json`, up to which load the run fits, how many steps do not fit, and for each stage
        the step that needs the most memory.
        """
        found: dict[str, Any] = {"fits_up_to": self.up_to, "full_first": self.full, "most_possible": self.most}
        if self.loads is None:
            return found
        every = self.total
        counts = {"all": len(every), "need_more": int(self.over.sum()), "open": int(self.open.sum())}
        stages = [
            {"stage": self.stages[place], "step": self.loads.steps[step], "bytes": float(every[step, place])}
            for place, step in enumerate(every.argmax(axis=0))
        ]
        return {**found, **self.loads.as_json(), "steps": counts, "stages": stages}


def _floor(ratio: float, digits: int = 2) -> float:
    scale = 10**digits
    return int(ratio * scale) / scale


def judge(config: Configuration, room: Room, loads: Loads | None = None, compiled: Sequence[Even] = ()) -> Judged:
    """Return whether a run with experts fits into memory at even loads, up to which max/mean (the fullest device's load
    over the mean load) it fits, and which steps of `loads` fit. If a compile has counted the bytes of some stages, only
    these stages are judged. If no compile has counted bytes, the memory of all stages is modelled.
    """
    evens: dict[int, Even | None] = {one.stage: one for one in compiled} or dict.fromkeys(range(config.pp))
    ratios = [limit_ratio(config, stage, room.bytes, even) for stage, even in evens.items()]
    asked = np.ones((1, 1, 1, 1)) if loads is None else loads.shares
    needs = tuple(needs_of(config, stage, asked, even) for stage, even in evens.items())
    full = list(evens)[int(np.argmin(ratios))]
    return Judged(min(ratios) >= 1, min(ratios), full, most_possible(config), loads, tuple(evens), needs, room)
