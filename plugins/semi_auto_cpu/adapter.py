"""Make MindFormers' Trainer train a sharded recipe on CPU. Called by `launch/train.py` where `chosen` says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mindspore as ms
import numpy as np

from plugins import all_ranks
from plugins.cpu_backend.network import peers
from plugins.cpu_backend.network.transport import Mesh
from plugins.private_hooks import replace
from plugins.semi_auto_cpu import checkpoints
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.compile import FrontEnd
from plugins.semi_auto_cpu.host import Host
from plugins.semi_auto_cpu.ranks import Ranks

SLOWEST = 600.0  # seconds that a rank waits for another: one may compile while the other waits already
_host: list[Host] = []


def before_mindformers(recipe: Mapping[str, Any]) -> Host:
    """Join the other workers, and have every graph of this process run on CPU; call before importing mindformers.

    Raises:
        ClusterError: a worker cannot be reached, or the library of kernels cannot be built or loaded.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    mesh = _join() if recipe.get("use_parallel") else Mesh(0, 1)
    ranks = Ranks(mesh.size, mesh.rank)
    stand_in(ranks)
    front_end = FrontEnd(ranks)
    host = Host(ranks, mesh, front_end.done)
    front_end.around_compiles()
    all_ranks.use(host.sum_over_ranks)
    from mindspore.communication import comm_func

    replace(comm_func, "barrier", "_get_cache_prim(P.Barrier)(group)", lambda group=None: host.barrier(group))
    _host[:] = [host]
    return host


def after_import() -> None:
    """What stands in for lines of MindFormers itself; call after importing it, before `build_context`."""
    from mindformers.core.callback import callback
    from mindformers.core.context import parallel

    from plugins.cpu_backend import losses

    def separate_losses() -> tuple[np.ndarray, ...]:
        return tuple(np.split(losses.of_this_rank(), len(losses.PARTS)))

    replace(parallel, "init", "def init(backend_name=None)", lambda: None)  # the workers have joined already
    replace(callback, "_get_separate_loss", 'parameter_register.get("lm_loss").asnumpy()', separate_losses)
    checkpoints.enable(_host[0].ranks)


def after_context() -> None:
    """MindSpore's Python sets no rank that it has not asked of a communication library; call after `build_context`."""
    from mindspore._c_expression import AutoParallelContext

    AutoParallelContext.get_instance().set_global_rank(_host[0].ranks.rank)


def _join() -> Mesh:
    from mindspore.communication import init

    init()
    peers.connect(timeout=SLOWEST)
    return peers.mesh()
