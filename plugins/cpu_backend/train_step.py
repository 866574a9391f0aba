"""The train step on CPU: overflow found by looking at the gradients, one loss for all ranks."""

from __future__ import annotations

import mindspore as ms
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank

from plugins.cpu_backend import host_functions, world


def _count_not_finite(gradient):
    return ops.reduce_sum(ops.cast(ops.logical_not(ops.isfinite(gradient)), ms.float32))


class AllReduceMean(nn.Cell):
    """Mean over all ranks of the run; not meant to be differentiated."""

    def __init__(self, size: int):
        super().__init__(auto_prefix=False)
        self.sum = ops.AllReduce()
        self.size = size

    def construct(self, x):
        """[...] -> [...]."""
        return self.sum(x) / self.size


class ClipSplitGradNorm(nn.Cell):
    """`ClipGradNorm` where some weights (experts) are split over the ranks: their squares are added up over the ranks.

    Args:
        max_norm: norm to clip to; split: for each gradient, whether it is of a split weight.
    """

    def __init__(self, max_norm, split):
        super().__init__(auto_prefix=False)
        self.max_norm, self.split = max_norm, split
        self.sum = ops.AllReduce()

    def construct(self, gradients):
        """Gradients of this rank's weights -> the same clipped, global norm [1]."""
        shared, own = Tensor([0.0], ms.float32), Tensor([0.0], ms.float32)
        for index in range(len(self.split)):
            square = ops.reshape(ops.reduce_sum(ops.square(gradients[index])), (1,))
            if self.split[index]:
                own = own + square
            else:
                shared = shared + square
        norm = ops.sqrt(shared + self.sum(own))
        # as MindFormers' ClipGradNorm, its epsilon included
        scale = ops.minimum(self.max_norm / (ops.maximum(norm, self.max_norm) + 1e-6), 1.0)
        return ops.HyperMap()(ops.partial(_scaled, scale), gradients), norm


def _scaled(scale, gradient):
    return gradient * scale


@MindFormerRegister.register(MindFormerModuleType.WRAPPER)
class CpuTrainOneStepCell(MFTrainOneStepCell):
    """`MFTrainOneStepCell` without `NPUGetFloatStatusV2`; the loss it returns is the mean over all ranks."""

    def __init__(self, network, optimizer, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        host_functions.require(get_rank() if world.distributed() else 0)  # the network has made all that it calls
        self.mean = AllReduceMean(get_group_size()) if world.distributed() else None
        split = tuple(weight.layerwise_parallel for weight in self.weights)
        self.split = any(split)
        if self.split:
            self.clip_grad_norm = ClipSplitGradNorm(kwargs.get("max_grad_norm", 1.0), split)
            self.sum = ops.AllReduce()
        world.register_train_step(self)

    def grads_for_mcore(self, scaling_sens, *inputs):
        """Average the reported loss over the ranks, as the sharded graph on Ascend does."""
        loss, grads, factor = super().grads_for_mcore(scaling_sens, *inputs)
        if self.mean is not None:
            loss = self.mean(loss)
        return loss, grads, factor

    def get_overflow_status(self, status, compute_output):
        """True (as a tensor) when a gradient holds an inf or nan on any rank; shared ones are reduced already."""
        flags = ops.AddN()(self.hyper_map(_count_not_finite, compute_output))
        if self.split:
            flags = ops.reshape(self.sum(ops.reshape(flags, (1,))), ())
        return ops.less_equal(self.base, flags)
