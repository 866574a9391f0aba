"""This module passes `plugins.grouped_gradient` to MindSpore: it registers a compiler pass of this repository through
MindSpore's hook for custom passes.

`mindspore.graph.register_custom_pass` (experimental in 2.9.0) runs the pass of `csrc/` on each graph that is compiled
later, between the pipeline scheduler and the validator. `tc3 dryrun` also compiles with this pass, and shows the effect
of the pass.
"""

from __future__ import annotations

from pathlib import Path

from mindspore.graph import CustomPassType, register_custom_pass

from plugins.errors import ClusterError
from plugins.grouped_gradient import plan
from plugins.semi_auto_cpu import build

PASS = "tc3_grouped_gradient"
SOURCES = Path(__file__).resolve().parent / "csrc"
WITHOUT = f"until this is solved, write {plan.KEY}: False"


def enable(config, settings) -> None:
    """Make graphs that are compiled later add the weight gradients of grouped matmuls in place; on a CPU this function
    does nothing.

    Raises:
        RecipeError: see `plan.check`.
        ClusterError: see `add_pass`.
    """
    if plan.check(config):
        add_pass()


def add_pass() -> None:
    """Compile the C++ pass if needed, and register it for this process. If the compiler pass cannot change a graph, an
    error is raised later, when the model is compiled.

    Raises:
        ClusterError: the pass cannot be compiled, or MindSpore refuses it.
    """
    path = build.ensure(SOURCES, WITHOUT)
    if not register_custom_pass(PASS, str(path), "all", CustomPassType.FULL_GRAPH):
        raise ClusterError(
            f"MindSpore refused to register the compiler pass {PASS} of {path}; MindSpore's log says why; {WITHOUT}"
        )
