"""This module controls how MindSpore compiles: its front end shards every graph for Ascend, and the graph then runs on
CPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mindspore import get_auto_parallel_context
from mindspore.graph import api

from plugins.errors import ClusterError
from plugins.private_hooks import relies_on, replace
from plugins.semi_auto_cpu.communication import target_ascend, target_cpu
from plugins.semi_auto_cpu.kept import REMEDY, Entry, KeptGraphs, described
from plugins.semi_auto_cpu.ranks import Ranks

SHARDED = ("semi_auto_parallel", "auto_parallel")


@dataclass
class Turn:
    """A `Turn` is one call of MindSpore's compile function, which returns immediately if MindSpore already has the
    graph.

    Attributes:
        what: a description of the compile; None if nothing was compiled or loaded.
        entry: the cache entry of the graph that is loaded; None: the graph is compiled.
        passed: whether the library's pass has run.
        whole: for each weight that the compile cuts, its values before.
    """

    cell: Any
    inputs: tuple[Any, ...]
    phase: str
    what: Entry | None = None
    entry: Entry | None = None
    passed: bool = False
    whole: dict[str, np.ndarray] = field(default_factory=dict)


class FrontEnd:
    """A `FrontEnd` sets MindSpore's device target to Ascend before each compile of a sharded graph; the method `done`
    sets the target back to CPU.

    The library's pass calls `done` when the front end has finished: the rest of the compilation is for CPU. A graph
    from the compile cache is already a graph for CPU and does not go through the front end: for such a graph the target
    is not changed.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.kept = KeptGraphs(ranks)
        self.running = False
        self._turn: Turn | None = None

    def begin(self) -> None:
        """Set the device target to Ascend and set this process's rank in MindSpore, before a compilation."""
        self._tell_rank()
        target_ascend()
        self.running = True

    def done(self) -> None:
        """Record that MindSpore's front end has finished the graph, and set the device target back to CPU."""
        if self._turn is not None:
            self._turn.passed = True
        self._back_to_cpu()

    def around_compiles(self) -> None:
        """Patch MindSpore so that every compilation in this process begins with a call of `begin` and ends with the
        target set to CPU.
        """
        executor = api._CellGraphExecutor
        compile_graph, before_compile = executor.compile, executor._set_compile_cache_dep_files

        def compile_sharded(executor: Any, cell: Any, *args: Any, **settings: Any) -> Any:
            if get_auto_parallel_context("parallel_mode") not in SHARDED:
                return compile_graph(executor, cell, *args, **settings)
            turn = self._turn = Turn(cell, args, str(settings.get("phase")))
            try:
                result = compile_graph(executor, cell, *args, **settings)
            except RuntimeError as error:
                refuse_compiling(turn, error)
                raise
            finally:
                self._turn = None
                self._back_to_cpu()
            self._end(turn)
            return result

        def begin_or_load(executor: Any, phase: str) -> None:
            before_compile(executor, phase)
            if self._turn is not None:
                self._begin_or_load(self._turn)

        relies_on(compile_graph, "self._set_compile_cache_dep_files(phase)")
        replace(executor, "compile", "result = self._graph_executor.compile(", compile_sharded)
        replace(executor, "_set_compile_cache_dep_files", "_get_compile_cache_dep_files()", begin_or_load)

    def _begin_or_load(self, turn: Turn) -> None:
        """Prepare a compile or a load of a graph that MindSpore does not have in this process yet."""
        initialise_by_name(turn.cell)
        turn.whole = {each.name: np.array(each.asnumpy()) for each in turn.cell.get_parameters() if not each.sliced}
        turn.what = described(turn.cell, turn.inputs, turn.phase)
        turn.entry = self.kept.to_load(turn.what)
        if turn.entry is None:
            self.begin()
        else:
            self._tell_rank()

    def _end(self, turn: Turn) -> None:
        """After a compile, store the information that belongs to the graph; after a load, restore this information.

        Raises:
            ClusterError: MindSpore compiled a graph that it should have loaded, or the reverse.
        """
        if turn.what is None:
            return
        if self.kept.folder is not None and turn.passed != (turn.entry is None):
            raise ClusterError(_contrary(turn, *(("compiled", "loaded") if turn.passed else ("loaded", "compiled"))))
        if turn.entry is None:
            self.kept.keep(turn.cell, turn.what)
        else:
            self.kept.restore(turn.cell, turn.entry)
        refuse_wrong_slices(turn.cell, turn.whole, self.ranks.rank)

    def _tell_rank(self) -> None:
        from mindspore._c_expression import AutoParallelContext

        parallel = AutoParallelContext.get_instance()
        parallel.set_device_num(self.ranks.devices)  # which C++ would ask of a communication library
        parallel.set_global_rank(self.ranks.rank)  # otherwise every rank compiles rank 0's part, and nobody says so

    def _back_to_cpu(self) -> None:
        if self.running:
            self.running = False
            target_cpu()


def refuse_compiling(turn: Turn, error: RuntimeError) -> None:
    """Raise ClusterError if MindSpore did not accept a graph of the compile cache, and then failed to compile the graph
    for CPU, because the front end had not split the graph.
    """
    if turn.entry is not None and "Invalid backend" in str(error):
        raise ClusterError(_contrary(turn, "compiled", "loaded")) from error


def _contrary(turn: Turn, did: str, told: str) -> str:
    what = f"MindSpore {did} the graph of {type(turn.cell).__name__}"
    return f"{what}, although by the compile cache it should have {told} it; {REMEDY}"


def initialise_by_name(cell: Any) -> None:
    """Draw the initial values of each whole weight from a seed made of the weight's name and the run's seed, so that
    they do not depend on the layout.

    MindSpore initialises each slice separately, so that another layout would start from other weights. This function
    initialises the whole weight, and a graph that is compiled cuts its slices out of the whole weight.
    """
    from mindspore import get_seed

    before = np.random.get_state()
    try:
        for weight in cell.get_parameters():
            if weight.has_init:
                np.random.seed(zlib.crc32(f"{get_seed()} {weight.name}".encode()))
                weight.init_data()
    finally:
        np.random.set_state(before)


def refuse_wrong_slices(cell: Any, whole: Mapping[str, np.ndarray], rank: int) -> None:
    """Raise ClusterError if, after a compile, a rank's slice of a weight does not match the weight's layout.

    MindSpore cuts slices by the ranks of groups that a communication library reports. Here `Ranks` reports them: if its
    ranks were wrong, training would start from other weights, and no other check would notice it.

    Args:
        whole: for each weight that this compile cuts, its values before the compile.

    Raises:
        ClusterError: a weight holds another slice.
    """
    layouts = cell.parameter_layout_dict
    for weight in cell.get_parameters():
        layout = layouts.get(weight.name)
        if layout is None or weight.name not in whole:
            continue
        held = weight.asnumpy()
        if held.tobytes() != slice_of(whole[weight.name], layout, rank, held.size).tobytes():
            raise ClusterError(
                f"rank {rank}: the slice that MindSpore cut out of {weight.name} is not the slice that this rank has "
                f"in the weight's layout (mesh {list(layout[0])}, map {list(layout[1])}, group {layout[5]!r}); "
                "training would start from wrong weights"
            )


def slice_of(whole: np.ndarray, layout: tuple[Any, ...], rank: int, size: int) -> np.ndarray:
    """Return the slice of a weight that `rank` holds.

    Args:
        layout: an entry of MindSpore's `parameter_layout_dict`: [0] the mesh of a stage's devices, [1] for each axis of
            the weight the axis of the mesh that cuts it, counted from the last, or -1; [6] the weight's shape.
        size: the number of elements of the slice. If the slice by the mesh has more elements than `size`, neighbouring
            ranks with the same slice share it (optimizer sharding).
    """
    mesh, cuts = layout[0], [axes if isinstance(axes, (list, tuple)) else (axes,) for axes in layout[1]]
    coordinates = np.unravel_index(rank % int(np.prod(mesh)), mesh)
    part = whole.reshape(layout[6]) if cuts else whole
    shared = list(range(len(mesh)))
    for dimension, axes in enumerate(cuts):
        for axis in (len(mesh) - 1 - each for each in axes if each != -1):
            part = np.split(part, mesh[axis], dimension)[coordinates[axis]]
            shared.remove(axis)
    copies = [mesh[axis] for axis in shared]
    place = int(np.ravel_multi_index([coordinates[axis] for axis in shared], copies)) if copies else 0
    shards = part.size // size
    return part.reshape(shards, -1)[place % shards]
