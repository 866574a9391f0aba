"""The loss over all ranks: what it is divided by, and its parts, read without the zero-copy trap."""

from __future__ import annotations

import numpy as np
from mindformers.utils.parameter_register import parameter_register
from mindspore import Tensor, nn, ops
from mindspore.communication import get_group_size

from plugins.cpu_backend import world


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
    values = of_this_rank()
    if world.distributed():
        values = ops.AllReduce()(Tensor(values)).asnumpy() / get_group_size()
    return tuple(values[i : i + 1] for i in range(len(PARTS)))


def of_this_rank() -> np.ndarray:
    """This rank's `PARTS` of the last step, float32 [4]; clears them for the next."""
    values = np.concatenate([parameter_register.get(name).asnumpy() for name in PARTS])  # a copy: see above
    for name in PARTS:
        parameter_register.clear(name)
    return values
