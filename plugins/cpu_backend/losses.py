"""The parts of the loss, read without the zero-copy trap and averaged over ranks."""

from __future__ import annotations

import numpy as np
from mindformers.utils.parameter_register import parameter_register
from mindspore import Tensor, ops
from mindspore.communication import get_group_size

from plugins.cpu_backend import world

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
