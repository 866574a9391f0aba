"""This module is the data-parallel train step on CPU: it detects overflow in the gradients, and reports the loss
averaged over all ranks.

The file has four parts: the number of ranks of the run and the train step that they share; the divisor of the sum of
losses, and the parts of the loss, read as copies; the part of each parameter that a rank holds; and the train step
itself.

MindSpore derives the parts of parameters from a sharded graph. In data-parallel mode there is no sharded graph, and
without it MindFormers 1.9.0 can neither write metadata.json nor load the files of several ranks:
`strategy_of_all_ranks` returns the parts in the form that MindFormers' checkpoints expect.
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

_train_step: list[nn.Cell] = []  # which owns every parameter, the optimizer's too; there once the trainer has built it


def distributed() -> bool:
    """Return whether MindSpore's communication is initialised and more than one rank trains."""
    from mindspore.communication._comm_helper import _is_initialized

    return _is_initialized() and get_group_size() > 1


class TokensOfARank(nn.Cell):
    """A `TokensOfARank` computes the number by which each rank divides its sum of losses: the counted tokens of all
    ranks divided by the number of ranks.

    Losses and gradients are averaged over the ranks. If each rank divided by its own count, the tokens of a rank with
    few counted tokens (`eod_mask_loss`, packed conversations) would weigh more than the tokens of other ranks, and the
    loss would depend on the number of ranks.
    """

    def __init__(self, ranks: int):
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self.sum = ops.AllReduce()

    def construct(self, tokens, least):
        """Return the divisor [1]: the counted tokens of all ranks divided by the number of ranks, plus `least`. The
        argument `tokens` is float32 [], the counted tokens of this rank; `least` [1] is a small number that avoids a
        division by 0.
        """
        return self.sum(ops.reshape(ops.stop_gradient(tokens), (1,))) / self.ranks + least


class MeanOfSamples(nn.Cell):
    """A `MeanOfSamples` computes the mean over the samples of all ranks (each rank has equally many); `gbs_aux_loss`
    needs this mean for the share of tokens that each expert gets.
    """

    def __init__(self, ranks: int):
        super().__init__(auto_prefix=False)
        self.ranks = ranks
        self.sum = ops.AllReduce() if ranks > 1 else None

    def construct(self, shares, axis):
        """Return the mean over all samples for each expert, [experts], of values [samples, experts]; `axis` is 0."""
        mean = ops.reduce_mean(ops.stop_gradient(shares), axis)
        return mean if self.sum is None else self.sum(mean) / self.ranks


PARTS = ("lm_loss", "aux_loss", "mtp_loss", "indexer_loss")


def separate_losses() -> tuple[np.ndarray, ...]:
    """Return the language-model, auxiliary, MTP and indexer losses of the last step, averaged over the ranks, each
    float32 [1]; clear them for the next step.
    """
    values = losses_of_this_rank()
    if distributed():
        values = ops.AllReduce()(Tensor(values)).asnumpy() / get_group_size()
    return tuple(values[i : i + 1] for i in range(len(PARTS)))


def losses_of_this_rank() -> np.ndarray:
    """Return this rank's parts of the loss of the last step, float32 [4], in the order of `PARTS`; clear them for the
    next step.
    """
    values = np.concatenate([parameter_register.get(name).asnumpy() for name in PARTS])  # a copy: see above
    for name in PARTS:
        parameter_register.clear(name)
    return values


def strategy_of_all_ranks(network, rank_id=None) -> dict[int, dict[str, list]]:
    """Return a nested dictionary rank -> parameter name -> [layout, dtype, full shape], as
    `mindspore.parallel.get_strategy_metadata` does.

    The parameters come from the train step, because `network` may lack the optimizer's. Parameters marked
    `layerwise_parallel` (expert weights) are split along axis 0, all others are whole.
    """
    ranks = get_group_size()
    step = _train_step[0]
    params = {**step.network.parameters_dict(), **step.optimizer.parameters_dict()}
    entries = {name: _strategy_of(param, ranks) for name, param in params.items()}
    return dict.fromkeys(range(ranks) if rank_id is None else [rank_id], entries)


def strategy_of_this_rank(network) -> dict[int, dict[str, list]]:
    """Return this rank's metadata in the form of `mindspore.parallel.get_current_strategy_metadata`: a dictionary whose
    only key is 0.
    """
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
    """An `AllReduceMean` computes the mean of a tensor over all ranks of the run; it has no gradient."""

    def __init__(self, size: int):
        super().__init__(auto_prefix=False)
        self.sum = ops.AllReduce()
        self.size = size

    def construct(self, x):
        """Return the mean of the input over all ranks, in the shape of the input."""
        return self.sum(x) / self.size


class ClipSplitGradNorm(nn.Cell):
    """This is MindFormers' `ClipGradNorm` for models of which some weights (experts) are split over the ranks: it adds
    up the squared gradients of those weights over the ranks.

    Args:
        max_norm: the norm to which gradients are clipped.
        split: for each gradient, whether its weight is split over ranks.
    """

    def __init__(self, max_norm, split):
        super().__init__(auto_prefix=False)
        self.max_norm, self.split = max_norm, split
        self.sum = ops.AllReduce()

    def construct(self, gradients):
        """Return the clipped gradients of this rank's weights, and the global norm [1]."""
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
    """This is MindFormers' `MFTrainOneStepCell` without `NPUGetFloatStatusV2`; it returns the loss averaged over all
    ranks.
    """

    def __init__(self, network, optimizer, **kwargs):
        super().__init__(network, optimizer, **kwargs)
        host_functions.require(get_rank() if distributed() else 0)  # the network has made all that it calls
        self.mean = AllReduceMean(get_group_size()) if distributed() else None
        split = tuple(weight.layerwise_parallel for weight in self.weights)
        self.split = any(split)
        if self.split:
            self.clip_grad_norm = ClipSplitGradNorm(kwargs.get("max_grad_norm", 1.0), split)
            self.sum = ops.AllReduce()
        _train_step[:] = [self]

    def grads_for_mcore(self, scaling_sens, *inputs):
        """Compute loss and gradients as MindFormers' class does, and average the reported loss over the ranks, as the
        sharded graph on Ascend does.
        """
        loss, grads, factor = super().grads_for_mcore(scaling_sens, *inputs)
        if self.mean is not None:
            loss = self.mean(loss)
        return loss, grads, factor

    def get_overflow_status(self, status, compute_output):
        """Return True (as a tensor) if a gradient on any rank holds an inf or nan; gradients of shared weights are
        already reduced over the ranks.
        """
        flags = ops.AddN()(self.hyper_map(_count_not_finite, compute_output))
        if self.split:
            flags = ops.reshape(self.sum(ops.reshape(flags, (1,))), ())
        return ops.less_equal(self.base, flags)
