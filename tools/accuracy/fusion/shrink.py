"""A kernel at toy size: the same operators on fewer numbers, for a training's tensors have gigabytes."""

from __future__ import annotations

from dataclasses import replace

from tools.accuracy.fusion.kernel import Kernel, UnreadableError
from tools.dryrun.graph.text import TensorType

_KEPT = 32  # a dimension up to this stays; each larger size becomes a number of its own above it


def shrunk(kernel: Kernel) -> Kernel:
    """The kernel with every size above 32, and one that is known at run time only, made small.

    Sizes that were equal are equal, and those that differed differ: what broadcasts does so still. Sums become shorter.

    Raises:
        UnreadableError: a Reshape of sizes that would be cut, for their products must stay equal.
    """
    given = [step.output for step in kernel.steps]
    sizes = sorted({size for kind in (*kernel.inputs, *given) for size in kind.shape if not 0 <= size <= _KEPT})
    if sizes and any(step.op == "Reshape" for step in kernel.steps):
        raise UnreadableError("a Reshape, which is not made smaller")
    small = {size: _KEPT + 1 + place for place, size in enumerate(sizes)}

    def cut(kind: TensorType) -> TensorType:
        return TensorType(kind.dtype, tuple(small.get(size, size) for size in kind.shape))

    steps = tuple(replace(step, output=cut(step.output)) for step in kernel.steps)
    return replace(kernel, inputs=tuple(map(cut, kernel.inputs)), steps=steps)
