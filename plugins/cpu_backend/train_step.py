"""The train step on CPU: overflow found by looking at the gradients, one loss for all ranks."""

from __future__ import annotations

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import ops
from mindspore.communication import get_group_size

from plugins.cpu_backend import world
from plugins.cpu_backend.collectives import AllReduceMean


def _count_not_finite(gradient):
    return ops.reduce_sum(ops.cast(ops.logical_not(ops.isfinite(gradient)), ms.float32))


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class CpuTrainOneStepCell(MFTrainOneStepCell):
    """`MFTrainOneStepCell` without `NPUGetFloatStatusV2`; the loss it returns is the mean over all ranks."""

    def __init__(self, network, optimizer, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        self.mean = AllReduceMean(get_group_size()) if world.distributed() else None
        world.register_train_step(self)

    def grads_for_mcore(self, scaling_sens, *inputs):
        """Average the reported loss over the ranks, as the sharded graph on Ascend does."""
        loss, grads, factor = super().grads_for_mcore(scaling_sens, *inputs)
        if self.mean is not None:
            loss = self.mean(loss)
        return loss, grads, factor

    def get_overflow_status(self, status, compute_output):
        """True (as a tensor) when a gradient holds an inf or nan; gradients are reduced already."""
        flags = self.hyper_map(_count_not_finite, compute_output)
        return ops.less_equal(self.base, ops.AddN()(flags))
