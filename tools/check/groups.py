"""This module says which parallel degrees MindSpore 2.9.0 refuses because of the communication groups that they make.

MindSpore shards a graph for Ascend only over 1, 2, 4 or a multiple of 8 devices (`CheckDeviceConfig` in its
device_manager.cc). On a host without an NPU it also makes no group of ranks that lies differently on different servers
of 8 devices (`CheckDeviceList`, same file); for devices of the kinds 910B and 910C it skips this check. Degrees that
are powers of two always pass. The sharded graph on CPU processes is compiled as for Ascend without an NPU.
"""

from __future__ import annotations

from typing import NamedTuple

SERVER = 8  # devices, whatever the hardware has
SHARD = "optimizer_weight_shard_size"
SIZES = "1, 2, 4 or a multiple of 8"


class Group(NamedTuple):
    """A `Group` is a communication group whose ranks lie at equal distances; `key` is the parallel degree in
    `parallel_config` that leads to the group, or `SHARD`.
    """

    key: str
    ranks: int
    stride: int


def splits_over(devices: int) -> bool:
    """Return whether MindSpore splits a model over this number of devices."""
    return devices in (1, 2, 4) or devices % SERVER == 0


def refused_group(dp: int, cp: int, tp: int, ep: int = 1, shard: int = 0) -> Group | None:
    """Return a communication group that MindSpore refuses on a host without an NPU, or None if it accepts all groups
    that these parallel degrees need in a pipeline stage: the groups of ranks that divide a tensor, and the groups of
    ranks that hold copies of a weight or of an expert.

    Tensor-parallel ranks are neighbours; an EP group is `ep` neighbours, and its experts' copies are `ep` ranks apart.

    Args:
        shard: `optimizer_weight_shard_size`, if the optimizer is sharded. MindSpore cuts the ranks with copies into
            parts of this size, each of which shards a weight, and also makes groups of the ranks with the same shard
            (`CreateGroupForOptShard`).
    """
    copies = [
        Group("data_parallel", dp * cp, tp),
        Group("data_parallel", dp * cp * tp, 1),
        Group("expert_parallel", dp * cp * tp // ep, ep),
    ]
    groups = [Group("model_parallel", tp, 1), Group("context_parallel", cp, tp), *copies]
    for _, ranks, stride in copies:
        if shard > 1 and ranks % shard == 0:
            groups += [Group(SHARD, shard, stride), Group(SHARD, ranks // shard, stride * shard)]
    return next((group for group in groups if group.ranks > 1 and not _made(group)), None)


def _made(group: Group) -> bool:
    """Return whether a group is made of powers of two, or of whole servers in which every part looks the same."""
    _, ranks, stride = group
    if _is_power(ranks) and _is_power(stride):
        return True
    return ranks * stride % SERVER == 0 and (stride % SERVER == 0 or SERVER % stride == 0)


def _is_power(number: int) -> bool:
    return number & (number - 1) == 0
