"""This module makes MindSpore's semi-auto-parallel front end compile for N virtual devices with the CPU package of
MindSpore.

MindSpore's own dry run needs CANN. MindSpore's front end needs only a few facts about a cluster: the rank of the
process, the sizes of groups, and the target device. `virtual_cluster` provides these, stops the compile before the
backend, and restores everything:

    with virtual_cluster(devices=256, rank=0, graphs=folder) as cluster:
        ...                       # set the auto-parallel context, build model and optimizer: still on CPU
        cluster.target_ascend()   # eager operators crash from here on
        _cell_graph_executor.compile(step, *inputs, phase="train")
        read_collectives(final_graph(folder), cluster)

The module relies on private code of one MindSpore release, and any other release is refused (`tools.schema.versions`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from plugins.errors import ClusterError
from plugins.semi_auto_cpu.communication import stand_in, target_ascend
from plugins.semi_auto_cpu.ranks import Ranks
from tools.schema.versions import require_verified

FINAL_PASS = "backend_pass"  # the last stage of the front end: Morph is expanded and gradients are in it
_DUMP_FILTER = "MS_DEV_DUMP_IR_PASSES"  # read by MindSpore's C++: without it a compile writes 96 files


class VirtualCluster(Ranks):
    """A `VirtualCluster` describes a cluster of `devices` devices that do not exist. This process compiles as one rank
    of the virtual cluster.
    """

    def target_ascend(self) -> None:
        """Make MindSpore compile for Ascend instead of CPU; call this method after the model is built."""
        target_ascend()


@contextmanager
def virtual_cluster(devices: int, rank: int, graphs: Path | None = None) -> Iterator[VirtualCluster]:
    """Make this process rank `rank` of a cluster of `devices` virtual Ascend devices, so that MindSpore's front end
    compiles for them in graph mode; nothing can be executed.

    Args:
        devices: the world size of the virtual cluster.
        rank: the rank whose graph is compiled.
        graphs: an empty folder for the text of the final graph (see `final_graph`); without this argument no text is
            written.

    All changed settings of MindSpore are restored on exit, except that the auto-parallel context is reset to its
    defaults, so set the auto-parallel context only inside the `with` block. A compile leaves caches in MindSpore's C++
    code, so compile only once in a process.

    Raises:
        VersionError: MindSpore or MindFormers is not of the verified version.
        ClusterError: the rank is impossible, or a virtual cluster is already active.
    """
    require_verified()
    cluster = VirtualCluster(devices, rank)
    with ExitStack() as stack:
        stand_in(cluster, stack)
        _forget_groups()
        stack.callback(_forget_groups)
        stack.callback(_unregister, cluster)
        stack.callback(_leave_lazy_inline)
        _front_end_only(graphs, stack)
        yield cluster


def final_graph(graphs: Path) -> Path:
    """Return the path of the file to which a compile wrote the graph after the front end's last pass. The compile must
    run in a `virtual_cluster` with the folder `graphs`.

    Raises:
        ClusterError: no compile has finished in the folder, or more than one has.
    """
    found = sorted(graphs.glob(f"[0-9]*_{FINAL_PASS}_*.ir"))  # its sub-steps' names begin with a word
    if len(found) != 1:
        raise ClusterError(
            f"{graphs}: a finished compile leaves exactly one *_{FINAL_PASS}_*.ir, but the folder has {len(found)}"
        )
    return found[0]


def _front_end_only(graphs: Path | None, stack: ExitStack) -> None:
    """Set graph mode so that a compile stops before the backend, and dumps only its last stage."""
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
    """Remove the groups' names and ranks from MindSpore's C++ code, to which `create_group` has passed them."""
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
    """Empty MindFormers' caches of group names, which would hide new groups from the next cluster."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("mindformers."):
            for name, value in vars(module).items():
                if name.endswith("GROUP_NAME") and isinstance(value, dict):
                    value.clear()
