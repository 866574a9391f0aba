"""Seconds of weights and gradients on their way, and of the optimizer, once a step.

Weights travel during the first forward and gradients during the last backward, FSDP's all the time. With
`gradient_accumulation_shard` every micro-batch's gradients are reduced to the shards as they are added up (MindSpore's
documentation of the key: "additional communication (ReduceScatter) at each step when accumulate the gradients"), not
once a step, as published runs of others are taken to. As of other communication that overlaps, the share
`Efficiency.hidden` of it is taken to run beside the micro-batch that made them (assumed: no published run has it).
Where `optimizer_weight_shard_size` makes groups, the groups' shards are summed once a step.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np

from tools.estimate import sharding
from tools.estimate.configuration import Configuration
from tools.estimate.layer_time import LayerTimes
from tools.estimate.memory.model import stage_weights
from tools.model.weights import Weight

_OPTIMIZER_BYTES = 28  # of a number: gradient, weight and two moments read, weight and moments written


class GradientTimes(LayerTimes):
    """Weights, gradients and the optimizer on one cluster."""

    def once_and_each(self, config: Configuration, stage: int) -> tuple[float, float]:
        """Seconds of a stage's weights and gradients: once a step, and again for each micro-batch.

        FSDP's weights, which travel for each pass, count to the first.
        """
        runs = config.micro_batches if config.shard_weights else 1
        gather = 2 * (2 * runs if config.shard_weights else 1) if config.shard_optimizer else 0
        apart = config.training_graph and config.shard_gradients and not config.shard_weights
        scattered = apart or config.shard_optimizer  # else an AllReduce
        reduce = (4 if config.wide_gradients else 2) * (1 if scattered else 2) * runs
        once = each = 0.0
        for weight, count in _counted(config, stage):
            cut, group = sharding.cut(weight, config), sharding.group(weight, config)
            local, groups = weight.size / cut, sharding.copies(weight, config) // group
            if apart:
                once += count * 2 * self._collective(2 * local, group, cut)
                each += count * self._collective(reduce * local, group, cut)
            else:
                once += count * self._collective(local * (gather + reduce), group, cut)
            # sums of the groups' shards
            once += count * 2 * self._collective(local / group * reduce, groups, cut * group)
        return once, each

    def waited(self, once: Any, each: Any, work: Any, micro_batches: Any, rounds: Any) -> Any:
        """Seconds of `once_and_each` that nothing hides; numbers or arrays.

        Args:
            work: seconds of a micro-batch on the stage, beside which all this runs.
            rounds: of the pipeline, beside which what travels once a step does.
        """
        beside = work * np.where(np.asarray(each) > 0, micro_batches, rounds)
        every = each * micro_batches
        return np.maximum((1 - self.reached.hidden) * every, once + every - beside)

    def _data(self, config: Configuration, stage: int, work: float) -> float:
        """Exposed seconds of gradients and weights."""
        once, each = self.once_and_each(config, stage)
        if not config.overlap_dp:
            return once + each * config.micro_batches
        # a chunk of several is done with its micro-batches, and waits for its first, as long as a round takes
        rounds = min(config.pp, config.micro_batches) if config.chunks > 1 else 1
        rounds = config.micro_batches if config.shard_weights else rounds
        return float(self.waited(once, each, work, config.micro_batches, rounds))

    def optimizer(self, config: Configuration, stage: int) -> float:
        """Seconds of the update: its bytes, and the host's time for each weight."""
        counted = _counted(config, stage)
        held = sum(
            count * weight.size / sharding.cut(weight, config) / sharding.shards(weight, config)
            for weight, count in counted
        )
        speed = self.hardware.hbm_bytes_per_s * self.reached.memory * self.reached.update
        return _OPTIMIZER_BYTES * held / speed + self.reached.weight_s * sum(count for _, count in counted)


@lru_cache(maxsize=4096)
def _counted(config: Configuration, stage: int) -> tuple[tuple[Weight, int], ...]:
    """The different weights of a stage, with how many of each it holds."""
    return tuple(Counter(stage_weights(config, stage)).items())
