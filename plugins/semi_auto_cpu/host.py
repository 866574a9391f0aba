"""What MindSpore's graph asks of this process: collectives with the other workers, and operators that CPU lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from plugins.cpu_backend.network.transport import Mesh
from plugins.errors import RecipeError, TC3Error
from plugins.semi_auto_cpu import library
from plugins.semi_auto_cpu.call import store
from plugins.semi_auto_cpu.collectives import NAMES, Collectives
from plugins.semi_auto_cpu.kernels import KERNELS, LOW_PRECISION
from plugins.semi_auto_cpu.ranks import WORLD, Ranks

# These get another name. MindSpore has CPU kernels of them, and remembers at first use which types they take; of
# AlltoAllV it infers the shape () for a rank that receives nothing, the library (0)
RENAMED = ("AllReduce", "AllGather", "Broadcast", "Barrier", "AlltoAllV")


class Host:
    """The Python side of the library, for one process.

    Args:
        ranks: who this is; mesh: connected to all of them;
        front_end_done: called when MindSpore has sharded a graph and goes on to make kernels of it.

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
        """Compute one operator."""
        if name not in self.kernels:
            self.collectives.run(name, attrs, inputs, outputs)
            return
        try:
            store(self.kernels[name](attrs, *inputs), outputs)
        except Exception as error:  # the others wait for this rank: they are to know why
            self.collectives.mesh.tell(f"failed: {name}: {error}")
            raise

    def sum_over_ranks(self, value: float) -> float:
        """The float32 sum of every rank's `value`; outside a graph."""
        total = np.zeros(1, np.float32)
        self.collectives.run(
            "AllReduce", {"group": WORLD, "op": "sum"}, [np.array([value], np.float32)], [total], record=False
        )
        return float(total[0])

    def barrier(self, group: str | None = None) -> None:
        """Wait for every rank of a group; outside a graph."""
        self.collectives.run("Barrier", {"group": group or WORLD}, [], [], record=False)

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """MindSpore tells what failed here in words of its own; raise what it was instead."""
        try:
            yield
        except Exception:
            if isinstance(self.library.failure, TC3Error):
                raise self.library.failure from None
            raise


def refuse_missing(nodes: dict[str, int]) -> None:
    """Name operators that nothing here computes, and how many nodes of the graph need each, before anything runs."""
    if nodes:
        told = ", ".join(f"{name} ({count} node{'s' * (count > 1)})" for name, count in sorted(nodes.items()))
        raise RecipeError(f"device_target CPU: no kernel for {told}; see docs/semi-auto-cpu.md")
