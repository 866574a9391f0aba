"""The train step on CPU, data parallel: overflow found by looking at the gradients, and one loss for all ranks.

The file holds what a process knows of the run that it belongs to (how many ranks, and the train step that they share);
what the sum of losses is divided by, and its parts, read without the zero-copy trap; which part of each parameter a
rank holds; and the step itself.

MindSpore derives the parts of parameters from a sharded graph. In data-parallel mode there is none, and without it
MindFormers 1.9.0 can neither write metadata.json nor load the files of several ranks: `strategy_of_all_ranks` answers
in the form that MindFormers' checkpoints expect.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.utils.parameter_register import parameter_register
from mindformers.wrapper import MFTrainOneStepCell
from mindspore import Layout, Tensor, nn, ops
from mindspore.communication import get_group_size, get_rank

from plugins.cpu_backend import host_functions

_train_step: list[nn.Cell] = []


def distributed() -> bool:
    """True when MindSpore's communication is up and more than one rank trains."""
    from mindspore.communication._comm_helper import _is_initialized

    return _is_initialized() and get_group_size() > 1


def register_train_step(cell: nn.Cell) -> None:
    """Remember the train step: it owns every parameter, the optimizer's too."""
    _train_step[:] = [cell]


def registered_train_step() -> nn.Cell:
    """Return the train step of this process; only after the trainer built it."""
    return _train_step[0]


class TokensOfARank(nn.Cell):
    """What a rank divides its sum of losses by: the tokens that count of all ranks, over the ranks.

    Losses and gradients are averaged over the ranks. Divided by a rank's own count, the tokens of a rank with few of
    them (`eod_mask_loss`, packed conversations) would weigh more than others', and more ranks would be another loss.
    """

    def __init__(self, ranks: int):
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self.sum = ops.AllReduce()

    def construct(self, tokens, least):
        """(float32 [] tokens of this rank's mask, [1] a number that keeps 0 from being divided by) -> [1]."""
        return self.sum(ops.reshape(ops.stop_gradient(tokens), (1,))) / self.ranks + least


class MeanOfSamples(nn.Cell):
    """The mean over the samples of all ranks, which have equally many: experts' shares in `gbs_aux_loss`."""

    def __init__(self, ranks: int):
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self.sum = ops.AllReduce() if ranks > 1 else None

    def construct(self, shares, axis):
        """[samples, experts] -> [experts]; `axis` is 0."""
        mean = ops.reduce_mean(ops.stop_gradient(shares), axis)
        return mean if self.sum is None else self.sum(mean) / self.ranks


PARTS = ("lm_loss", "aux_loss", "mtp_loss", "indexer_loss")


def separate_losses() -> tuple[np.ndarray, ...]:
    """(lm, auxiliary, MTP, indexer) losses of the last step, each float32 [1]; clears them for the next."""
    values = losses_of_this_rank()
    if distributed():
        values = ops.AllReduce()(Tensor(values)).asnumpy() / get_group_size()
    return tuple(values[i : i + 1] for i in range(len(PARTS)))


def losses_of_this_rank() -> np.ndarray:
    """This rank's `PARTS` of the last step, float32 [4]; clears them for the next."""
    values = np.concatenate([parameter_register.get(name).asnumpy() for name in PARTS])  # a copy: see above
    for name in PARTS:
        parameter_register.clear(name)
    return values


def strategy_of_all_ranks(network, rank_id=None) -> dict[int, dict[str, list]]:
    """rank -> parameter name -> [layout, dtype, full shape], as `mindspore.parallel.get_strategy_metadata`.

    The parameters come from the train step, because `network` may lack the optimizer's. Parameters marked
    `layerwise_parallel` (expert weights) are split along axis 0, all others are whole.
    """
    ranks = get_group_size()
    step = registered_train_step()
    params = {**step.network.parameters_dict(), **step.optimizer.parameters_dict()}
    entries = {name: _strategy_of(param, ranks) for name, param in params.items()}
    return dict.fromkeys(range(ranks) if rank_id is None else [rank_id], entries)


def strategy_of_this_rank(network) -> dict[int, dict[str, list]]:
    """As `mindspore.parallel.get_current_strategy_metadata`: the key is always 0."""
    return {0: strategy_of_all_ranks(network, 0)[0]}


def _strategy_of(param, ranks: int) -> list:
    layout = Layout((ranks,), ("dp",))
    shape = tuple(param.shape)
    if param.layerwise_parallel:
        return [layout("dp", *["None"] * (len(shape) - 1)), param.dtype, (shape[0] * ranks,) + shape[1:]]
    return [layout(*["None"] * len(shape)), param.dtype, shape]


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
        host_functions.require(get_rank() if distributed() else 0)  # the network has made all that it calls
        self.mean = AllReduceMean(get_group_size()) if distributed() else None
        split = tuple(weight.layerwise_parallel for weight in self.weights)
        self.split = any(split)
        if self.split:
            self.clip_grad_norm = ClipSplitGradNorm(kwargs.get("max_grad_norm", 1.0), split)
            self.sum = ops.AllReduce()
        register_train_step(self)

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
