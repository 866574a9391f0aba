"""This module gives MindSpore's front end the rank and the device target that it needs to shard a graph for Ascend.

MindSpore's front end for Ascend needs the rank of the process and the sizes of groups. No communication library
provides them here, so a rank's `Ranks` answers instead of MindSpore's C++ code. The front end also shards a graph only
for the target Ascend: `target_ascend` and `target_cpu` change the device for which MindSpore compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.ranks import WORLD, Ranks


class CollectiveManager:
    """A `CollectiveManager` replaces the class `mindspore._c_expression.CollectiveManager` and its only instance."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def get_instance(self) -> CollectiveManager:
        """Return the only manager of this process."""
        return self

    def initialized(self) -> bool:
        """Return True, because communication counts as initialised."""
        return True

    def get_rank_id(self, group: str) -> int:
        """Return this rank's index in a communication group."""
        return self.ranks.rank_in(group)

    def get_group_size(self, group: str) -> int:
        """Return the number of ranks in a communication group."""
        return self.ranks.size_of(group)

    def create_group(self, group: str, ranks: list[int], options: Any = None) -> bool:
        """Create a communication group, and report success."""
        self.ranks.create(group, ranks)
        return True

    def get_group_ranks(self, group: str) -> list[int]:
        """Return the global ranks of a communication group."""
        return list(self.ranks.known(group))

    def get_group_map(self) -> dict[str, list[int]]:
        """Return all communication groups that were created."""
        return {group: list(ranks) for group, ranks in self.ranks.groups.items()}

    def get_world_rank_from_group_rank(self, group: str, rank: int) -> int:
        """Return the global rank of a group's member, given by the member's index in the group."""
        return self.get_group_ranks(group)[rank]

    def get_group_rank_from_world_rank(self, rank: int, group: str) -> int:
        """Return the index of a global rank in a communication group."""
        return self.get_group_ranks(group).index(rank)

    get_local_rank_id, get_local_group_size = get_rank_id, get_group_size  # all ranks are on this host


def stand_in(ranks: Ranks, stack: ExitStack | None = None) -> None:
    """Let `ranks` answer MindSpore's calls about communication until `stack` closes, or permanently if no stack is
    given.

    Raises:
        ClusterError: another `Ranks` already answers these calls.
    """
    from mindspore.communication import _comm_helper
    from mindspore.ops.function import comm_func

    if isinstance(_comm_helper.CollectiveManager, CollectiveManager):
        raise ClusterError("a virtual cluster is already open in this process; only one can be open at a time")
    manager, world = CollectiveManager(ranks), _comm_helper.GlobalComm
    undo: Callable[..., Any] = stack.callback if stack is not None else lambda *_: None
    # the only two modules through which Python asks; get_rank(), create_group() and the like all end here, so that it
    # does not matter who has copied them by `from ... import`
    for owner, name, value in (
        (_comm_helper, "CollectiveManager", manager),
        (comm_func, "CollectiveManager", manager),
        (comm_func, "_GROPU_SIZE_CACHE", {}),
        (_comm_helper._ExistingGroup, "ITEMS", {}),
        (_comm_helper._ExistingGroup, "GROUP_RANKS", {}),
        (world, "INITED", True),
        (world, "BACKEND", "hccl"),
        (world, "WORLD_COMM_GROUP", WORLD),
    ):
        undo(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)


def target_ascend() -> None:
    """Compile for Ascend from now on; eager operators crash until `target_cpu` is called.

    MindSpore's `set_device_target_inner` would look for the Ascend plugin, and would refuse a number of ranks that
    differs from that of the (absent) communication library (`GetCommInfo` in step_parallel_utils.cc).
    """
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    AutoParallelContext.get_instance().set_hccl_test_avaible(True)
    DeviceManagerConf.get_instance().set_device("Ascend", 0, True)


def target_cpu() -> None:
    """Set MindSpore's device target back to CPU."""
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    DeviceManagerConf.get_instance().set_device("CPU", 0, True)
    AutoParallelContext.get_instance().set_hccl_test_avaible(False)
