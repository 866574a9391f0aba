"""What this process knows of the run it belongs to: how many ranks, and the train step they share."""

from __future__ import annotations

from mindspore import nn
from mindspore.communication import get_group_size

_train_step: list[nn.Cell] = []


def distributed() -> bool:
    """True when MindSpore's communication is up and more than one rank trains."""
    from mindspore.communication._comm_helper import _is_initialized

    return _is_initialized() and get_group_size() > 1


def register_train_step(cell: nn.Cell) -> None:
    """Remember the train step: it owns every parameter, the optimizer's too."""
    _train_step[:] = [cell]


def train_step() -> nn.Cell:
    """The train step of this process; only after the trainer built it."""
    return _train_step[0]
