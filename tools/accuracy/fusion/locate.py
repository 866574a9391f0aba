"""Which operator of a kernel is wrong: each is held against the exact result of what it really took.

A kernel's own error grows on the way, or is lost in a sum; so the kernel is run again, giving every step's result, and
each operator is judged alone. Where nothing can cancel, each element is held to its own size (`judge.judge_special`):
the small results of an Exp are as right as the large ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tools.accuracy.fusion.kernel import Argument, Kernel
from tools.accuracy.fusion.replay import EXACT, FUSED, allowances, run, verdict
from tools.accuracy.judge import Verdict, judge_special
from tools.dryrun.graph.text import TensorType

_RELATIVE = frozenset(("Div", "Exp", "Mul", "Pow", "RealDiv", "Reciprocal", "Rsqrt", "Sqrt"))  # nothing cancels


@dataclass(frozen=True)
class Culprit:
    """An operator of a kernel, by its place, and how wrong it is."""

    place: int
    op: str
    verdict: Verdict


def first_wrong(kernel: Kernel, inputs: list[np.ndarray], observed: Sequence[np.ndarray]) -> Culprit | None:
    """The first operator out of its own tolerance; None where each is within it.

    Args:
        observed: the result of every step.
    """
    for place, step in enumerate(kernel.steps):
        alone, taken = alone_of(kernel, place), [_observed(each, inputs, observed) for each in step.arguments]
        values = [value for value in taken if value is not None]
        found = _judged(alone, observed[place], run(alone, values, EXACT)[0])
        if not found.passed:
            return Culprit(place, step.op, found)
    return None


def _judged(alone: Kernel, got: np.ndarray, want: np.ndarray) -> Verdict:
    allowed = allowances(alone)[0]
    if alone.steps[0].op not in _RELATIVE:
        return verdict(got, want, allowed, FUSED)
    return judge_special(got.reshape(want.shape), [want], allowed.tolerance(FUSED), allowed.dtype)


def alone_of(kernel: Kernel, place: int) -> Kernel:
    """One operator as a kernel of its own; each of its operands is an input."""
    step, inputs, arguments = kernel.steps[place], list[TensorType](), list[Argument]()
    for kind, what in step.arguments:
        if kind == "constant":
            arguments.append((kind, what))
            continue
        assert isinstance(what, int)
        arguments.append(("input", len(inputs)))
        inputs.append(kernel.inputs[what] if kind == "input" else kernel.steps[what].output)
    return Kernel(tuple(inputs), (replace(step, arguments=tuple(arguments)),), (0,), kernel.where)


def _observed(argument: Argument, inputs: list[np.ndarray], observed: Sequence[np.ndarray]) -> np.ndarray | None:
    kind, what = argument
    if kind == "constant":
        return None
    assert isinstance(what, int)
    return inputs[what] if kind == "input" else observed[what]
