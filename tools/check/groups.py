"""This module says which parallel degrees MindSpore 2.9.0 refuses because of the communication groups that they make.

MindSpore shards a graph for Ascend only over 1, 2, 4 or a multiple of 8 devices (`CheckDeviceConfig` in its
device_manager.cc). On a host without an NPU it also makes no group of ranks that lies differently on different servers
of 8 devices (`CheckDeviceList`, same file); for devices of the kinds 910B and 910C it skips this check. Degrees that
are powers of two always pass. The sharded graph on CPU processes is compiled as for Ascend without an NPU.
"""

from __future__ import annotations

from typing import NamedTuple

SERVER = 8  # devices, whatever the hardware has
SIZES = "1, 2, 4 or a multiple of 8"


class Group(NamedTuple):
    """A `Group` is a number of ranks at equal distances; `key` is the degree of `parallel_config` that makes it."""

    key: str
    ranks: int
    stride: int


def splits_over(devices: int) -> bool:
    """Return whether MindSpore splits a model over this number of devices."""
    return devices in (1, 2, 4) or devices % SERVER == 0


def refused_group(dp: int, cp: int, tp: int, ep: int = 1) -> Group | None:
    """Return a group of a pipeline stage's ranks that MindSpore refuses on a host without an NPU; None if it refuses no
    group of these parallel degrees. The groups consist of ranks that divide a tensor, or of ranks that have copies of a
    weight or of an expert.

    Tensor-parallel ranks are neighbours; an EP group is `ep` neighbours, and its experts' copies are `ep` ranks apart.
    """
    groups = [
        Group("model_parallel", tp, 1),
        Group("context_parallel", cp, tp),
        Group("data_parallel", dp * cp, tp),
        Group("data_parallel", dp * cp * tp, 1),
        Group("expert_parallel", dp * cp * tp // ep, ep),
    ]
    return next((group for group in groups if group.ranks > 1 and not _made(group)), None)


def _made(group: Group) -> bool:
    """Return whether a group is made of powers of two, or of whole servers in which every part looks the same."""
    _, ranks, stride = group
    if _is_power(ranks) and _is_power(stride):
        return True
    return ranks * stride % SERVER == 0 and (stride % SERVER == 0 or SERVER % stride == 0)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
