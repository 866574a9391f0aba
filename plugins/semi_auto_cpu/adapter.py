"""This module makes MindFormers' Trainer train a sharded recipe on CPU. `launch/train.py` calls this module for recipes
that `chosen` accepts.

A `Host` executes in this process the operators for which MindSpore's graph calls Python: collectives with the other
workers, and operators that have no CPU kernel. `enable_checkpoints` patches code of MindFormers 1.9.0 that prevents a
sharded run on CPU from saving and resuming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np

from plugins import all_ranks
from plugins.cpu_backend import transport
from plugins.cpu_backend.transport import Mesh
from plugins.errors import RecipeError, TC3Error
from plugins.private_hooks import replace
from plugins.semi_auto_cpu import library
from plugins.semi_auto_cpu.collectives import NAMES, Collectives
from plugins.semi_auto_cpu.communication import stand_in
from plugins.semi_auto_cpu.compile import FrontEnd
from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.library import store
from plugins.semi_auto_cpu.ranks import WORLD, Ranks

# These get another name. MindSpore has CPU kernels of them, and remembers at first use which types they take; of
# AlltoAllV it infers the shape () for a rank that receives nothing, the library (0)
RENAMED = ("AllReduce", "AllGather", "Broadcast", "Barrier", "AlltoAllV")
_host: list[Host] = []


def enable_checkpoints(ranks: Ranks) -> None:
    """Make MindFormers save and resume the slices of this rank; call this function after importing MindFormers.

    * `checkpoint/utils.py:compile_model` compiles the graph before it loads slices, but only in sink mode, which does
      not exist on CPU.
    * `checkpoint/sharded_tensor.py` asks MindSpore for the layouts of this rank, but gets those of rank 0 if there is
      no communication library that tells MindSpore the rank. The layouts of all ranks are right, with one pipeline
      stage and with several.
    """
    from mindformers.checkpoint import sharded_tensor
    from mindformers.trainer import base_trainer

    def of_this_rank(network: Any) -> dict[int, Any]:
        """Return this rank's metadata in the form of `mindspore.parallel.strategy.get_current_strategy_metadata`; the
        key is always 0.
        """
        return {0: sharded_tensor.get_strategy_metadata(network)[ranks.rank]}

    replace(base_trainer, "compile_model", "'sink_mode' must be set to True", compile_without_sink)
    replace(sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", of_this_rank)


def compile_without_sink(model: Any, dataset: Any, **_: Any) -> None:
    """Compile the train step of a `mindspore.train.Model`, because MindSpore knows the layout of slices only after a
    compilation.
    """
    batch = next(iter(dataset.create_tuple_iterator(num_epochs=1)))
    model._train_network.set_train()
    model._train_network.compile(*batch)


class Host:
    """A `Host` connects the plugin's C++ library with Python in one process: it computes the operators and collectives
    for which the library calls Python.

    Args:
        ranks: this rank and all others.
        mesh: the connection to all ranks.
        front_end_done: a function that is called when MindSpore has sharded a graph, before it makes kernels.

    Raises:
        ClusterError: the library cannot be built or loaded.
    """

    def __init__(self, ranks: Ranks, mesh: Mesh, front_end_done: Callable[[], None]):
        self.ranks = ranks
        self.collectives = Collectives(mesh, ranks)
        self.kernels = {**LOW_PRECISION, **KERNELS}
        self.library = library.load()
        self.library.set_host(self.run, ranks.rank)
        self.library.set_cluster(ranks)
        for name in (*KERNELS, *RENAMED):
            self.library.replace(name)
        for name in LOW_PRECISION.keys() - KERNELS.keys():
            self.library.replace(name, low=True)
        # the backend copies some of what is loaded from weights and from tensors that operators change in place, by
        # TensorMove, which the pass never sees and whose own kernel takes no bfloat16
        self.library.register("TensorMove")
        for name in NAMES:
            if name not in RENAMED:
                self.library.register(name)
        self.library.add_pass(front_end_done, refuse_missing)

    def run(self, name: str, attrs: dict[str, str], inputs: list[Any], outputs: list[np.ndarray]) -> None:
        """Compute one operator of a graph (a collective or a kernel), and write its results into MindSpore's memory."""
        if name not in self.kernels:
            self.collectives.run(name, attrs, inputs, outputs)
            return
        try:
            store(self.kernels[name](attrs, *inputs), outputs)
        except Exception as error:  # the others wait for this rank: they are to know why
            self.collectives.mesh.tell(f"failed: {name}: {error}")
            raise

    def sum_over_ranks(self, value: float) -> float:
        """Return the float32 sum of every rank's `value`; call this outside a graph."""
        total = np.zeros(1, np.float32)
        self.collectives.run(
            "AllReduce", {"group": WORLD, "op": "sum"}, [np.array([value], np.float32)], [total], record=False
        )
        return float(total[0])

    def barrier(self, group: str | None = None) -> None:
        """Wait for every rank of a group; call this outside a graph."""
        self.collectives.run("Barrier", {"group": group or WORLD}, [], [], record=False)

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Within the `with` block, raise the original error of a kernel instead of the error that MindSpore raises as a
        consequence.
        """
        try:
            yield
        except Exception:
            if isinstance(self.library.failure, TC3Error):
                raise self.library.failure from None
            raise


def refuse_missing(nodes: dict[str, int]) -> None:
    """Raise RecipeError, before anything runs, if the graph has operators that the plugin cannot compute; the message
    names these operators and says how often each occurs.
    """
    if nodes:
        told = ", ".join(f"{name} ({count} node{'s' * (count > 1)})" for name, count in sorted(nodes.items()))
        raise RecipeError(
            f"device_target CPU: there is no CPU kernel for these operators of the graph: {told}; see "
            "docs/semi-auto-cpu.md"
        )


def before_mindformers(recipe: Mapping[str, Any]) -> Host:
    """Connect to the other workers, and make every graph of this process run on CPU; call this before importing
    mindformers.

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
    """Replace functions of MindFormers; call this function after importing MindFormers, before `build_context`."""
    from mindformers.core.callback import callback
    from mindformers.core.context import parallel

    from plugins.cpu_backend import train_step

    def separate_losses() -> tuple[np.ndarray, ...]:
        return tuple(np.split(train_step.losses_of_this_rank(), len(train_step.PARTS)))

    replace(parallel, "init", "def init(backend_name=None)", lambda: None)  # the workers have joined already
    replace(callback, "_get_separate_loss", 'parameter_register.get("lm_loss").asnumpy()', separate_losses)
    enable_checkpoints(_host[0].ranks)


def after_context() -> None:
    """Set the rank in MindSpore's Python code, which would otherwise ask a communication library for the rank; call
    this function after `build_context`.
    """
    from mindspore._c_expression import AutoParallelContext

    AutoParallelContext.get_instance().set_global_rank(_host[0].ranks.rank)


def _join() -> Mesh:
    from mindspore.communication import init

    init()
    transport.connect()
    return transport.mesh()
