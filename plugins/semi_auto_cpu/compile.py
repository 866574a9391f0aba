"""Every sharded graph is compiled for Ascend and run on CPU: what happens around MindSpore's compile."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from mindspore import get_auto_parallel_context
from mindspore.graph import api

from plugins.errors import ClusterError
from plugins.private_hooks import relies_on, replace
from plugins.semi_auto_cpu.kept import REMEDY, Entry, KeptGraphs, described
from plugins.semi_auto_cpu.ranks import Ranks
from plugins.semi_auto_cpu.target import target_ascend, target_cpu

SHARDED = ("semi_auto_parallel", "auto_parallel")


@dataclass
class Turn:
    """One call of MindSpore's compile, which returns at once for a graph that it has.

    Attributes:
        what: of what it is; None: nothing was compiled, nor loaded.
        entry: what was kept of the graph that is loaded; None: it is compiled.
        passed: the library's pass has run.
    """

    cell: Any
    inputs: tuple[Any, ...]
    phase: str
    what: Entry | None = None
    entry: Entry | None = None
    passed: bool = False


class FrontEnd:
    """Turns the target to Ascend before each compile of a sharded graph; `done` turns it back.

    The library's pass calls `done` when the front end is through: the rest of the compile is for CPU. A graph of the
    compile cache is one for CPU already and goes through no front end: for that one the target stays.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.kept = KeptGraphs(ranks)
        self.running = False
        self._turn: Turn | None = None

    def begin(self) -> None:
        """Compile for Ascend, as the rank that this is."""
        self._tell_rank()
        target_ascend()
        self.running = True

    def done(self) -> None:
        """The front end is through."""
        if self._turn is not None:
            self._turn.passed = True
        self._back_to_cpu()

    def around_compiles(self) -> None:
        """Have every compile of this process begin and end so."""
        executor = api._CellGraphExecutor
        compile_graph, before_compile = executor.compile, executor._set_compile_cache_dep_files

        def compile_sharded(executor: Any, cell: Any, *args: Any, **settings: Any) -> Any:
            if get_auto_parallel_context("parallel_mode") not in SHARDED:
                return compile_graph(executor, cell, *args, **settings)
            turn = self._turn = Turn(cell, args, str(settings.get("phase")))
            try:
                result = compile_graph(executor, cell, *args, **settings)
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
        """MindSpore has no graph of this in the process: it compiles one, or loads it."""
        initialise_by_name(turn.cell)
        turn.what = described(turn.cell, turn.inputs, turn.phase)
        turn.entry = self.kept.to_load(turn.what)
        if turn.entry is None:
            self.begin()
        else:
            self._tell_rank()

    def _end(self, turn: Turn) -> None:
        """Keep what goes with a graph, or restore it.

        Raises:
            ClusterError: MindSpore compiled what it was to load, or the other way round.
        """
        if turn.what is None:
            return
        if self.kept.folder is not None and turn.passed != (turn.entry is None):
            did, told = ("compiled", "load") if turn.passed else ("loaded", "compile")
            raise ClusterError(
                f"MindSpore {did} the graph of {type(turn.cell).__name__}, which it was to {told}; {REMEDY}"
            )
        if turn.entry is None:
            self.kept.keep(turn.cell, turn.what)
        else:
            self.kept.restore(turn.cell, turn.entry)

    def _tell_rank(self) -> None:
        from mindspore._c_expression import AutoParallelContext

        parallel = AutoParallelContext.get_instance()
        parallel.set_device_num(self.ranks.devices)  # which C++ would ask of a communication library
        parallel.set_global_rank(self.ranks.rank)  # otherwise every rank compiles rank 0's part, and nobody says so

    def _back_to_cpu(self) -> None:
        if self.running:
            self.running = False
            target_cpu()


def initialise_by_name(cell: Any) -> None:
    """Draw the initial values of every weight whole, from a seed that its name and the run's seed give.

    MindSpore draws each slice by itself, so that another layout would start from other weights. A graph that is
    compiled cuts its slices out of the whole.
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
