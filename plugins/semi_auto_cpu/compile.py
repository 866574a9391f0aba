"""Every sharded graph is compiled for Ascend and run on CPU: what happens around MindSpore's compile."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from mindspore import get_auto_parallel_context
from mindspore.graph import api

from plugins.private_hooks import replace
from plugins.semi_auto_cpu.ranks import Ranks
from plugins.semi_auto_cpu.target import target_ascend, target_cpu

SHARDED = ("semi_auto_parallel", "auto_parallel")


class FrontEnd:
    """Turns the target to Ascend before each compile of a sharded graph; `done` turns it back.

    The library's pass calls `done` when the front end is through: the rest of the compile is for CPU.
    """

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        self.running = False

    def begin(self) -> None:
        """Compile for Ascend, as the rank that this is."""
        from mindspore._c_expression import AutoParallelContext

        parallel = AutoParallelContext.get_instance()
        parallel.set_device_num(self.ranks.devices)  # which C++ would ask of a communication library
        parallel.set_global_rank(self.ranks.rank)  # otherwise every rank compiles rank 0's part, and nobody says so
        target_ascend()
        self.running = True

    def done(self) -> None:
        """The front end is through."""
        if self.running:
            self.running = False
            target_cpu()

    def around_compiles(self) -> None:
        """Have every compile of this process begin and end so."""
        original = api._CellGraphExecutor.compile

        def compile_for_ascend(executor: Any, cell: Any, *args: Any, **settings: Any) -> Any:
            if get_auto_parallel_context("parallel_mode") not in SHARDED:
                return original(executor, cell, *args, **settings)
            initialise_by_name(cell)
            self.begin()
            try:
                return original(executor, cell, *args, **settings)
            finally:
                self.done()

        replace(api._CellGraphExecutor, "compile", "result = self._graph_executor.compile(", compile_for_ascend)


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
