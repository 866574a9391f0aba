"""Prepare MindSpore and MindFormers for what a recipe trains on; launch/train.py calls the steps in this order.

An Ascend device needs nothing. A CPU process takes operators without a CPU kernel from `plugins.cpu_backend`. A CPU
process that runs its part of a sharded graph (`parallel.parallel_mode: 1`) joins the other processes before MindFormers
is imported, and keeps MindFormers' own classes (`plugins.semi_auto_cpu`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from plugins.semi_auto_cpu.chosen import chosen


class Ascend:
    """An Ascend device: MindFormers is used unchanged."""

    collectives: Any = None  # the record of executed collectives, for the metrics of a sharded run on CPU

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Prepare the process; MindFormers is not imported yet."""

    def after_import(self) -> None:
        """Replace what has to be replaced in MindFormers before its context is built."""

    def after_context(self) -> None:
        """Finish once MindFormers has built MindSpore's context."""

    def enable(self, config: Any) -> None:
        """Point the MindFormerConfig at the classes of this backend."""

    def own_errors(self) -> AbstractContextManager[Any]:
        """Return the context to train in; it turns errors of the backend into errors with words of their own."""
        return nullcontext()


class Cpu(Ascend):
    """A CPU process with the whole model, or with its share of the data or the experts."""

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Replace what MindFormers copies while it is imported and has no CPU kernel for."""
        from plugins.cpu_backend import adapter

        adapter.before_mindformers(distributed=recipe.get("use_parallel", False))

    def enable(self, config: Any) -> None:
        """Point the config at classes whose operators have CPU kernels."""
        from plugins.cpu_backend import adapter

        adapter.enable(config)


class ShardedCpu(Ascend):
    """A CPU process that runs its part of MindSpore's sharded graph."""

    def before_mindformers(self, recipe: Mapping[str, Any]) -> None:
        """Join the other processes, and let every graph of this one run on CPU."""
        from plugins.semi_auto_cpu import adapter

        self._adapter, self._host = adapter, adapter.before_mindformers(recipe)
        self.collectives = self._host.collectives

    def after_import(self) -> None:
        """Stand in for lines of MindFormers that ask for a device."""
        self._adapter.after_import()

    def after_context(self) -> None:
        """Set the rank of this process, which MindSpore asks only of a communication library."""
        self._adapter.after_context()

    def own_errors(self) -> AbstractContextManager[Any]:
        """Return a context that raises what failed here, instead of MindSpore's words for it."""
        return self._host.own_errors()


def backend_of(recipe: Mapping[str, Any]) -> Ascend:
    """Return the backend that the recipe's target and parallel mode ask for."""
    if chosen(recipe):
        return ShardedCpu()
    return Cpu() if recipe["context"]["device_target"] == "CPU" else Ascend()
