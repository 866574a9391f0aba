"""Seconds of a training step: layers (`tools.estimate.layer_time`), the pipeline, gradients and weights, the optimizer.

A stage's micro-batch is the sum over its layers; the step is the slowest stage's work for all micro-batches, filling
and draining by schedule, then gradients and weights as far as nothing hides them, and the optimizer. `simulated`
replays the schedule instead. Data stalls are taken as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tools.estimate import sharding
from tools.estimate.activations import mtp_option
from tools.estimate.configuration import Configuration
from tools.estimate.layer_time import LayerTimes, Parts
from tools.estimate.memory_model import layer_options, stage_weights
from tools.model.weights import KINDS
from tools.pipeline.simulate import Durations, simulate

_OPTIMIZER_BYTES = 28  # of a number: gradient, weight and two moments read, weight and moments written
_CLOSED = ("gpipe", "1f1b", "interleaved_1f1b", "seqvpp", "seqsmartvpp")  # `closed_form` holds for these


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Args:
        pipeline: all micro-batches through the pipeline.
        bubble: the share of `pipeline` in which the slowest stage waits.
        data_parallel: gradients and weights that nothing hides.
        optimizer: the update.
        fixed: beside all that.
        parts: the slowest stage's work by kind.
    """

    pipeline: float
    bubble: float
    data_parallel: float
    optimizer: float
    fixed: float
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.pipeline + self.data_parallel + self.optimizer + self.fixed


class TimeModel(LayerTimes):
    """The time of runs on one cluster."""

    def chunks(self, config: Configuration) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        """Forward and backward seconds [chunks, stages] of one micro-batch, and the parts of their sum [stages]."""
        times = {kind: self.layer(config, kind) for kind in KINDS if kind != "moe" or config.model.experts}
        forward, backward = np.zeros((config.chunks, config.pp)), np.zeros((config.chunks, config.pp))
        parts = {name: np.zeros(config.pp) for name in (*Parts.__dataclass_fields__, "recompute")}
        for stage in range(config.pp):
            for chunk, every in enumerate(config.stage_kinds(stage)):
                options = iter(layer_options(config, chunk, stage, len(every)))
                for kind in every:
                    layer = times[kind]
                    again = layer.again[next(options) if kind in ("dense", "moe") else mtp_option(config)]
                    forward[chunk, stage] += layer.forward.total
                    backward[chunk, stage] += layer.backward.total + again
                    parts["recompute"][stage] += again
                    for name in Parts.__dataclass_fields__:
                        parts[name][stage] += getattr(layer.forward, name) + getattr(layer.backward, name)
        return forward, backward, parts

    def transfer(self, config: Configuration) -> float:
        """Seconds to send one micro-batch's activations to the next stage."""
        if config.pp == 1:
            return 0.0
        rows = config.rank_tokens / config.tp  # every rank of a tp group sends its part
        link = self._link(config.devices)
        # in the compute dtype, also where the residual stream is wider (seen in compiled graphs)
        size = rows * config.model.hidden * (4 if config.dtype == "fp32" else 2)
        return self.hardware.launch_s + link.latency_s + size / self._speed(link)

    def step(self, config: Configuration, simulated: bool = False) -> StepTime:
        """Seconds of a step; `simulated` replays the schedule operation by operation."""
        forward, backward, parts = self.chunks(config)
        sending = 0.0 if config.overlap_pp else self.transfer(config)
        if simulated or config.schedule not in _CLOSED:
            durations = Durations(forward, backward, backward / 2, sending, "none" if sending else "full")
            pipeline = simulate(config.schedule, config.micro_batches, durations).makespan
        else:
            pipeline = closed_form(forward, backward, config.micro_batches, sending)
        stages = (forward + backward).sum(axis=0)
        slowest = int(stages.argmax())
        busy = config.micro_batches * float(stages[slowest])
        return StepTime(
            pipeline=pipeline,
            bubble=1 - busy / pipeline,
            data_parallel=0.0 if config.layer_only else self._data(config, slowest, float(stages[slowest])),
            optimizer=0.0 if config.layer_only else self._optimizer(config, slowest),
            fixed=0.0 if config.layer_only else self.reached.step_s,
            parts={name: config.micro_batches * float(values[slowest]) for name, values in parts.items()},
        )

    def _data(self, config: Configuration, stage: int, micro_batch: float) -> float:
        """Exposed seconds of gradients and weights, once a step (FSDP: weights for each pass)."""
        total = 0.0
        runs = config.micro_batches if config.shard_weights else 1
        gather = 2 * (2 * runs if config.shard_weights else 1) if config.shard_optimizer else 0
        reduce = (4 if config.wide_gradients else 2) * (1 if config.shard_optimizer else 2) * runs
        for weight in stage_weights(config, stage):
            cut, group = sharding.cut(weight, config), sharding.group(weight, config)
            local, groups = weight.size / cut, sharding.copies(weight, config) // group
            total += self._collective(local * (gather + reduce), group, cut)
            total += 2 * self._collective(local / group * reduce, groups, cut * group)  # sums of the groups' shards
        # weights travel during the first forward and gradients during the last backward, FSDP's all the time; a chunk
        # of several is done with its micro-batches, and waits for its first, as long as a round of the pipeline takes
        rounds = min(config.pp, config.micro_batches) if config.chunks > 1 else 1
        return max(0.0, total - micro_batch * max(runs, rounds)) if config.overlap_dp else total

    def _optimizer(self, config: Configuration, stage: int) -> float:
        held = sum(w.size / sharding.cut(w, config) / sharding.shards(w, config) for w in stage_weights(config, stage))
        return _OPTIMIZER_BYTES * held / (self.hardware.hbm_bytes_per_s * self.reached.memory)


def closed_form(forward: np.ndarray, backward: np.ndarray, micro_batches: int, sending: float = 0.0) -> float:
    """Seconds of 1F1B, interleaved or not: all micro-batches on the slowest stage, and the others' first and last one.

    (m + (p - 1) / v) (f + b) for equal stages, as Narayanan et al. (arXiv 2104.04473) have it. Each micro-batch and
    chunk is sent and received once each way.
    """
    chunks, stages = forward.shape
    every = (forward + backward).sum(axis=0) + (2 * sending * chunks if stages > 1 else 0)
    slowest = every.max()
    return float(micro_batches * slowest + (every.sum() - slowest) / chunks)
