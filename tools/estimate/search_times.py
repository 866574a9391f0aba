"""The time model of the search: `TimeModel`, and what sharded gradients cost in MindSpore.

With `gradient_accumulation_shard` every micro-batch's gradients are reduced to the shards as they are added up
(MindSpore's documentation of the key: "additional communication (ReduceScatter) at each step when accumulate the
gradients"), not once a step. As of other communication that overlaps, the share `Efficiency.hidden` of it is taken to
run beside the micro-batch that made them (assumed: no published run has it). Where `optimizer_weight_shard_size` makes
groups, the groups' shards are summed once a step.
"""

from __future__ import annotations

from dataclasses import replace

from tools.estimate import sharding
from tools.estimate.configuration import Configuration
from tools.estimate.memory_model import stage_weights
from tools.estimate.time_model import TimeModel


class SearchTimes(TimeModel):
    """The time of runs on one cluster."""

    def once_and_each(self, config: Configuration, stage: int) -> tuple[float, float]:
        """Seconds of a stage's weights and gradients: once a step, and again for each micro-batch."""
        if not config.shard_gradients or config.shard_weights:
            return super()._data(replace(config, overlap_dp=False), stage, 0.0), 0.0
        gathered = reduced = summed = 0.0
        item = 4 if config.wide_gradients else 2
        for weight in stage_weights(config, stage):
            cut, group = sharding.cut(weight, config), sharding.group(weight, config)
            size, groups = weight.size / cut, sharding.copies(weight, config) // group
            gathered += self._collective(2 * size, group, cut)
            reduced += self._collective(item * size, group, cut)
            summed += 2 * self._collective(item * size / group, groups, cut * group)
        return 2 * gathered + summed, reduced

    def _data(self, config: Configuration, stage: int, micro_batch: float) -> float:
        if not config.shard_gradients or config.shard_weights:
            return super()._data(config, stage, micro_batch)
        once, each = self.once_and_each(config, stage)
        every = each * config.micro_batches
        if not config.overlap_dp:
            return once + every
        return max((1 - self.reached.hidden) * every, once + every - micro_batch * config.micro_batches)
