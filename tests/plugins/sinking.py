"""This module makes the cells that MindSpore puts around the train step in sink mode; a CPU has no sink mode."""

from mindspore import nn
from mindspore.train.dataset_helper import _DataWrapper


def fetching(step):
    """A `_DataWrapper` around `step`, whatever that is."""
    wrapper = _DataWrapper.__new__(_DataWrapper)
    nn.Cell.__init__(wrapper)
    wrapper.__dict__["network"] = step
    return wrapper
