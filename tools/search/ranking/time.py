"""Seconds of a step for a whole block of candidates at once, with the numbers of `time_model`.

A layer's time depends on tp, cp, ep, samples and dispatch mode (a head's on dp, too), a stage's gradients and optimizer
on what it holds and how that is spread; both are computed once by the functions of `time_model` and looked up for all
candidates. The reference is `TimeModel.step` of a candidate's configuration (the closed form of the pipeline).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.layer_time import LayerTime
from tools.estimate.time_model import TimeModel, has_closed_form, pipeline_of
from tools.model.weights import KINDS
from tools.pipeline.in_flight import enough
from tools.pipeline.simulate import filling
from tools.search.ranking.memory import Memo, groups, kind_counts, stage_keys
from tools.search.space.candidates import Block, configuration
from tools.search.space.limits import POLICIES
from tools.search.space.request import Request

_LAYERS = [KINDS.index("dense"), KINDS.index("moe"), KINDS.index("mtp")]


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch on each stage of each candidate.

    Args:
        work: [rows, policies, stages] forward and backward of a stage.
        sending: [rows] of one activation to the next stage.
    """

    work: np.ndarray
    sending: np.ndarray


class TimeTable(TimeModel):
    """Times of candidates of one request."""

    def __init__(self, request: Request):
        super().__init__(request.hardware)
        self.request = request
        self._memo = Memo()
        model = request.base.model
        without = {"moe"} if not model.experts else set()
        without |= set() if model.mtp else {"mtp"}
        self.kinds = [kind for kind in KINDS if kind not in without]

    def stages(self, block: Block) -> StageTimes:
        """Times of the stages of each candidate and uniform policy."""
        example = self._config(block, 0)
        counts = kind_counts(example).sum(axis=0)
        layers = np.zeros_like(counts)
        layers[:, _LAYERS] = counts[:, _LAYERS]
        first, place = groups(block, "tp", "cp", "ep", "mbs", "mode")
        found, sending = np.empty((len(first), len(POLICIES), block.pp)), np.empty(len(first))
        for index, row in enumerate(first):
            works, recomputed = self._layers(block, row)
            found[index] = (counts @ works) + recomputed @ layers.T
            sending[index] = self._sending(block, row)
        return StageTimes(found[place], sending[place])

    def totals(self, block: Block, work: np.ndarray, sending: np.ndarray) -> np.ndarray:
        """[rows] seconds of a step.

        Args:
            work: [rows, stages] forward and backward of one micro-batch.
            sending: as `StageTimes`.
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
        """What divides the other stages' work in `pipeline_of`: the chunks, or [rows] for what has no closed form."""
        schedule = self.request.schedule
        if not schedule or has_closed_form(schedule):
            return block.vpp
        m = enough(schedule, block.pp, block.columns["m"])
        found = {int(one): filling(schedule, block.pp, block.vpp, int(one)) for one in np.unique(m)}
        return (block.pp - 1) / np.maximum(1e-9, [found[int(one)] for one in m])

    def least(self, block: Block, work: np.ndarray) -> np.ndarray:
        """[rows] seconds that no layout of these candidates' layers is under, whatever memory a device has.

        Of a stage's own work and of what comes before its first and after its last pass, averaged over the stages so
        that each layer counts the same wherever it is: with one chunk a stage s needs at least m w_s + sum of w_j of
        the stages j before it. With several chunks only the stages' work counts. Gradients and optimizer count
        nothing, for they hang on the layers.

        Args:
            work: [rows, stages] forward and backward of one micro-batch that recomputes nothing.
        """
        m = block.columns["m"]
        each = m / block.pp if block.vpp > 1 else 1 / (1 - (1 - 1 / m) ** block.pp)
        return each * work.sum(axis=1) + self.fixed

    def _config(self, block: Block, row: int) -> Configuration:
        return configuration(self.request, block.candidate(row, "none"))

    def _layers(self, block: Block, row: int) -> tuple[np.ndarray, np.ndarray]:
        """[kinds] seconds of forward and backward, [policies, kinds] what recomputation adds."""
        tp, cp, ep, mbs, mode = (int(block.columns[name][row]) for name in ("tp", "cp", "ep", "mbs", "mode"))
        works, recomputed = np.zeros(len(KINDS)), np.zeros((len(POLICIES), len(KINDS)))
        for kind in self.kinds:
            # what has no experts knows neither ep nor mode, what has no logits does not know dp
            key = (kind, tp, cp, mbs, *((ep, mode) if kind in ("moe", "mtp") else ()))
            key += (int(block.columns["dp"][row]),) if kind in ("head", "mtp") else ()
            layer = self._memo.get(key, self._one_layer, block, row, kind)
            index = KINDS.index(kind)
            works[index] = layer.forward.total + layer.backward.total
            recomputed[:, index] = [layer.recomputed[policy].total for policy in POLICIES]
        return works, recomputed

    def _sending(self, block: Block, row: int) -> float:
        if self.request.base.overlap_pp:
            return 0.0
        key = ("sending", block.pp > 1, *(int(block.columns[name][row]) for name in ("tp", "cp", "mbs")))
        return self._memo.get(key, self._transfer, block, row)

    def _once(self, block: Block, stage: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[rows] seconds of a stage [rows]: weights and gradients once, again for each micro-batch; the optimizer."""
        first, place = groups(block, "tp", "ep", "shard", stage=stage)
        found = np.array([self._stage_once(self._config(block, row), int(stage[row])) for row in first])[place]
        return found[:, 0], found[:, 1], found[:, 2]

    def _stage_once(self, config: Configuration, stage: int) -> tuple[float, float, float]:
        sharded = (config.shard_optimizer, config.shard_gradients)
        key = (stage_keys(config)[stage], config.pp, config.tp, config.ep, *sharded)
        return self._memo.get(key, self._new_once, config, stage)

    def _one_layer(self, block: Block, row: int, kind: str) -> LayerTime:
        return self.layer(self._config(block, row), kind)

    def _transfer(self, block: Block, row: int) -> float:
        return self.transfer(self._config(block, row))

    def _new_once(self, config: Configuration, stage: int) -> tuple[float, float, float]:
        return *self.once_and_each(config, stage), self.optimizer(config, stage)
