"""N devices that are not there: MindSpore's semi-auto-parallel front end compiles for them on the CPU wheel.

MindSpore's own dry run needs CANN. What its front end asks of a cluster is little: who am I, how large is a group,
which target is it. `virtual_cluster` answers that, stops the compile before the backend, and puts everything back:

    with virtual_cluster(devices=256, rank=0, graphs=folder) as cluster:
        ...                       # set the auto-parallel context, build model and optimizer: still on CPU
        cluster.target_ascend()   # eager operators crash from here on
        _cell_graph_executor.compile(step, *inputs, phase="train")
        read_collectives(final_graph(folder), cluster)

Private hooks of one MindSpore release: any other is refused (`tools.schema.versions`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError
from tools.schema.versions import require_verified

WORLD = "hccl_world_group"
FINAL_PASS = "backend_pass"  # the last stage of the front end: Morph is expanded and gradients are in it
_DUMP_FILTER = "MS_DEV_DUMP_IR_PASSES"  # read by MindSpore's C++: without it a compile writes 96 files
_GENERATED = re.compile(r"(\d+)-\d+")  # groups that MindSpore's C++ makes up: "<size>-<hash>"


class VirtualCluster:
    """A rank's view of `devices` devices: its communication groups in the order in which it created them."""

    def __init__(self, devices: int, rank: int):
        if not 0 <= rank < devices:
            raise ClusterError(f"rank {rank} is not one of {devices} virtual devices: 0 to {devices - 1}")
        self.devices = devices
        self.rank = rank
        self.groups: dict[str, tuple[int, ...]] = {}  # created ones, in order; the world is not among them

    def create(self, group: str, ranks: list[int]) -> None:
        """Remember a group, as every member does on a real cluster.

        Raises:
            ClusterError: this rank is no member (a real cluster would hang), or a rank does not exist.
        """
        outside = [rank for rank in ranks if not 0 <= rank < self.devices]
        if outside:
            raise ClusterError(f"group {group!r} names ranks {outside}, the cluster has 0 to {self.devices - 1}")
        if self.rank not in ranks:
            raise ClusterError(f"rank {self.rank} creates group {group!r} of ranks {ranks}, of which it is none")
        self.groups[group] = tuple(ranks)

    def ranks_of(self, group: str) -> tuple[int, ...] | None:
        """Global ranks of a group in the order of their ranks in it; None for one that MindSpore's C++ made up."""
        if group == WORLD:
            return tuple(range(self.devices))
        return self.groups.get(group)

    def size_of(self, group: str) -> int:
        """Number of ranks in a group.

        Raises:
            ClusterError: nobody created it.
        """
        ranks = self.ranks_of(group)
        if ranks is not None:
            return len(ranks)
        generated = _GENERATED.fullmatch(group)
        if generated is None:
            raise ClusterError(f"no group {group!r} was created; there are {[WORLD, *self.groups]}")
        return int(generated[1])

    def rank_in(self, group: str) -> int:
        """This rank's place in a group.

        A group that C++ made up reaches Python by name only, when a collective is inserted. Its place is then not known
        and not used: `comm_ops.py` only checks that it is below the size. Its ranks are in the graph's text.
        """
        ranks = self.ranks_of(group)
        return self.rank % self.size_of(group) if ranks is None else ranks.index(self.rank)

    def target_ascend(self) -> None:
        """From here on MindSpore compiles for Ascend; call it after the model is built, just before compiling.

        `set_device_target_inner` would look for the Ascend plugin, and a world of another size than the (absent)
        communication library's would be refused (`GetCommInfo` in step_parallel_utils.cc).
        """
        from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

        AutoParallelContext.get_instance().set_hccl_test_avaible(True)
        DeviceManagerConf.get_instance().set_device("Ascend", 0, True)


class _Collectives:
    """What MindSpore's Python asks of its C++ `CollectiveManager`, answered by a virtual cluster."""

    def __init__(self, cluster: VirtualCluster):
        self.cluster = cluster

    def get_instance(self) -> _Collectives:
        """The manager is a singleton: this object stands in for class and instance."""
        return self

    def initialized(self) -> bool:
        """A virtual cluster is always up."""
        return True

    def get_rank_id(self, group: str) -> int:
        """Rank in a group."""
        return self.cluster.rank_in(group)

    def get_group_size(self, group: str) -> int:
        """Size of a group."""
        return self.cluster.size_of(group)

    def create_group(self, group: str, ranks: list[int], options: Any = None) -> bool:
        """Create a group; the answer is success."""
        self.cluster.create(group, ranks)
        return True

    def get_group_ranks(self, group: str) -> list[int]:
        """Global ranks of a group."""
        return list(self.cluster.ranks_of(group) or ())

    def get_group_map(self) -> dict[str, list[int]]:
        """All created groups."""
        return {group: list(ranks) for group, ranks in self.cluster.groups.items()}

    def get_world_rank_from_group_rank(self, group: str, rank: int) -> int:
        """Global rank of a member."""
        return self.get_group_ranks(group)[rank]

    def get_group_rank_from_world_rank(self, rank: int, group: str) -> int:
        """Place of a global rank in a group."""
        return self.get_group_ranks(group).index(rank)


@contextmanager
def virtual_cluster(devices: int, rank: int, graphs: Path | None = None) -> Iterator[VirtualCluster]:
    """Make MindSpore in this process rank `rank` of `devices` Ascend devices, in graph mode, front end only.

    Args:
        devices: size of the world.
        rank: the rank whose graph is compiled.
        graphs: an empty folder for the text of the final graph (see `final_graph`); nothing is written without it.

    Everything is restored on exit, except that the auto-parallel context is reset to its defaults: enter before
    setting it. Compiles leave caches in MindSpore's C++ behind: one compile a process.

    Raises:
        VersionError: another MindSpore or MindFormers than the verified one.
        ClusterError: an impossible rank, a cluster inside a cluster.
    """
    require_verified()
    cluster = VirtualCluster(devices, rank)
    with ExitStack() as stack:
        _stand_in(cluster, stack)
        stack.callback(_leave_lazy_inline)
        _front_end_only(graphs, stack)
        yield cluster


def final_graph(graphs: Path) -> Path:
    """The one dump that a compile with ``graphs=`` leaves for `collectives`: the front end's last stage.

    Raises:
        ClusterError: no compile finished there, or more than one.
    """
    found = sorted(graphs.glob(f"[0-9]*_{FINAL_PASS}_*.ir"))  # its sub-steps' names begin with a word
    if len(found) != 1:
        raise ClusterError(f"{graphs}: one finished compile leaves one *_{FINAL_PASS}_*.ir, found {len(found)}")
    return found[0]


def _stand_in(cluster: VirtualCluster, stack: ExitStack) -> None:
    """Answer MindSpore's questions about communication; undone when `stack` closes."""
    from mindspore.communication import _comm_helper
    from mindspore.ops.function import comm_func

    if isinstance(_comm_helper.CollectiveManager, _Collectives):
        raise ClusterError("a virtual cluster is already open in this process: one at a time")
    manager, world = _Collectives(cluster), _comm_helper.GlobalComm
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
        stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)
    _forget_groups()
    stack.callback(_forget_groups)
    stack.callback(_unregister, cluster)


def _front_end_only(graphs: Path | None, stack: ExitStack) -> None:
    """Graph mode that stops before the backend, and dumps only its last stage."""
    import mindspore as ms
    from mindspore._c_expression import AutoParallelContext, DeviceManagerConf

    stack.callback(AutoParallelContext.get_instance().set_hccl_test_avaible, False)  # its value on CPU
    target = DeviceManagerConf.get_instance().get_device_target()
    stack.callback(DeviceManagerConf.get_instance().set_device, target, 0, True)
    stack.callback(ms.reset_auto_parallel_context)
    settings: dict[str, Any] = {"mode": ms.GRAPH_MODE, "precompile_only": True}
    if graphs is not None:
        settings |= {"save_graphs": 1, "save_graphs_path": str(graphs)}
        stack.callback(_set_variable, _DUMP_FILTER, os.environ.get(_DUMP_FILTER))
        _set_variable(_DUMP_FILTER, FINAL_PASS)
    before = {name: ms.get_context(name) for name in settings}
    stack.callback(lambda: ms.set_context(**before))
    ms.set_context(**settings)
    ms.reset_auto_parallel_context()


def _unregister(cluster: VirtualCluster) -> None:
    """`create_group` has also told MindSpore's C++ which name belongs to which ranks."""
    from mindspore._c_expression import ParallelCommManager

    for group, ranks in cluster.groups.items():
        ParallelCommManager.get_instance().set_hccl_groups(list(ranks), group, False)


def _leave_lazy_inline() -> None:
    """Compile one more graph: a compile with @lazy_inline sets a flag in C++ with which CPU refuses all operators."""
    import mindspore as ms

    class Nothing(ms.nn.Cell):
        def construct(self, x):
            return x + 1

    mode = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    Nothing()(ms.Tensor([0]))
    ms.set_context(mode=mode)


def _set_variable(name: str, value: str | None) -> None:
    """Set or remove an environment variable."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _forget_groups() -> None:
    """Empty MindFormers' own caches of group names: they would hide a group's creation from the next cluster."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("mindformers."):
            for name, value in vars(module).items():
                if name.endswith("GROUP_NAME") and isinstance(value, dict):
                    value.clear()
