"""This module prepares MindSpore and MindFormers for the device target of a recipe; launch/train.py calls the methods
in the order in which they are defined.

An Ascend device needs no preparation. A CPU process without a sharded graph uses `plugins.cpu_backend`, which replaces
operators that have no CPU kernel. A CPU process that runs its part of a sharded graph (`parallel.parallel_mode: 1`)
joins the other processes before MindFormers is imported, and keeps MindFormers' own classes (`plugins.semi_auto_cpu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from plugins.semi_auto_cpu.chosen import chosen


class Ascend:
    """This backend is for Ascend devices: MindFormers is used unchanged."""

    collectives: Any = None  # the record of executed collectives, for the metrics of a sharded run on CPU

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Make the preparations of this backend that are needed before MindFormers is imported."""

    def after_import(self) -> None:
        """Replace parts of MindFormers before its context is built."""

    def after_context(self) -> None:
        """Finish the preparation after MindFormers has built MindSpore's context."""

    def enable(self, config: Any) -> None:
        """Change the MindFormerConfig so that it names the classes of this backend."""

    def own_errors(self) -> AbstractContextManager[Any]:
        """Return the context manager in which to train. A backend may use it to raise its own errors; this one changes
        no error.
        """
        return nullcontext()


class Cpu(Ascend):
    """This backend is for CPU runs without a sharded graph: each process has the whole model (with expert parallelism,
    only a part of the experts) and trains on its share of the data.
    """

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Replace functions that MindFormers copies when it is imported and that have no CPU kernel."""
        from plugins.cpu_backend import adapter

        adapter.before_mindformers(distributed=recipe.get("use_parallel", False))

    def enable(self, config: Any) -> None:
        """Change the config so that it names classes whose operators have CPU kernels."""
        from plugins.cpu_backend import adapter

        adapter.enable(config)


class ShardedCpu(Ascend):
    """This backend is for a CPU process that runs its part of MindSpore's sharded graph."""

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Connect to the other processes, and make all graphs of this process run on CPU."""
        from plugins.semi_auto_cpu import adapter

        self._adapter, self._host = adapter, adapter.before_mindformers(recipe)
        self.collectives = self._host.collectives

    def after_import(self) -> None:
        """Replace the functions of MindFormers that need a device."""
        self._adapter.after_import()

    def after_context(self) -> None:
        """Set the rank of this process, because MindSpore would otherwise ask a communication library for the rank."""
        self._adapter.after_context()

    def own_errors(self) -> AbstractContextManager[Any]:
        """Return a context manager that raises the errors of this backend instead of the errors that MindSpore raises
        as a consequence.
        """
        return self._host.own_errors()


def backend_of(recipe: Mapping[str, Any]) -> Ascend:
    """Return the backend for the recipe's device target and parallel mode."""
    if chosen(recipe):
        return ShardedCpu()
    return Cpu() if recipe["context"]["device_target"] == "CPU" else Ascend()
