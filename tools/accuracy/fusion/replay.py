"""A kernel computed again from seeded inputs, exactly (float64), fused and unfused, and which operator of it is wrong.

Fused: 16-bit chains in float32, rounded where a result leaves the kernel and by a Cast. Unfused: each operator's result
is rounded. `allowances` is what Table 2 allows each result. `first_wrong` holds every operator of a kernel against the
exact result of what it took, so that the first one that is wrong is found where a sum hides it.

**A kernel computed three ways on the same inputs, in NumPy.**

exact     every float in float64
unfused   each operator's result is rounded to its type, as if it were written to memory
fused     16-bit chains in float32, rounded where a result leaves the kernel, and by a Cast (DVM, report section 4.5)

An operator alone computes in float32 at least, whatever its type, sums included.

**Which operator of a kernel is wrong: each is held against the exact result of what it really took.**

A kernel's own error grows on the way, or is lost in a sum; so the kernel is run again, giving every step's result, and
each operator is judged alone. Where nothing can cancel, each element is held to its own size (`judge.judge_special`):
the small results of an Exp are as right as the large ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tools.accuracy.fusion.kernels import Argument, Kernel, Step, compute, numpy_type
from tools.accuracy.judge import Verdict, judge, judge_special, lower_bound, rounded, tolerance
from tools.dryrun.graph_text import TensorType

EXACT, UNFUSED, FUSED = "exact", "unfused", "fused"
_HALVES = ("Float16", "BFloat16")
_POSITIVE = frozenset(("Log", "Sqrt", "Rsqrt", "Pow", "Div", "RealDiv", "Reciprocal"))
_LARGEST = 2.0
_RELATIVE = frozenset(("Div", "Exp", "Mul", "Pow", "RealDiv", "Reciprocal", "Rsqrt", "Sqrt"))  # nothing cancels


def inputs_of(kernel: Kernel, seed: int) -> list[np.ndarray]:
    """Random inputs: floats of magnitude `lower_bound` to 2, positive where a root or a division may take them.

    They depend on the seed and the kernel only, and are numbers that the inputs' types hold.
    """
    rng = np.random.default_rng([seed, zlib.crc32(kernel.key.encode())])
    positive = any(step.op in _POSITIVE for step in kernel.steps)
    return [_random(rng, dtype, shape, positive) for dtype, shape in kernel.inputs]


def _random(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], positive: bool) -> np.ndarray:
    if dtype == "Bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.startswith(("Int", "UInt")):
        return rng.integers(0, 16, shape).astype(numpy_type(dtype))
    values = rng.uniform(lower_bound(), _LARGEST, shape)
    if not positive:
        values *= rng.choice([-1.0, 1.0], shape)
    return hold(values, dtype)


def hold(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of MindSpore's `dtype`, as float32 where they have 16 bits; other types as they are."""
    if not np.issubdtype(values.dtype, np.floating) or dtype == "Float64":
        return values
    return np.asarray(rounded(values, dtype.lower())).astype(np.float32)


def run(kernel: Kernel, inputs: list[np.ndarray], way: str) -> list[np.ndarray]:
    """Return the results of all steps, those that stay inside included."""
    wide = np.float64 if way == EXACT else np.float32
    results: list[np.ndarray] = []
    for place, step in enumerate(kernel.steps):
        value = compute(step, [_value(kind, what, inputs, results, wide) for kind, what in step.arguments])
        if np.issubdtype(value.dtype, np.floating):
            value = value.astype(wide)
            leaves = place in kernel.outputs or step.op == "Cast"
            if way == UNFUSED or (way == FUSED and leaves):
                value = hold(value, step.output.dtype)
        results.append(value)
    return results


def _value(kind: str, what: Any, inputs: list[np.ndarray], results: list[np.ndarray], wide: type) -> Any:
    if kind == "constant":
        return what.astype(wide) if isinstance(what, np.ndarray) and what.dtype.kind == "f" else what
    value = inputs[what] if kind == "input" else results[what]
    return value.astype(wide) if np.issubdtype(value.dtype, np.floating) else value


@dataclass(frozen=True)
class Allowance:
    """What Table 2 allows a result (`tools.accuracy.judge`).

    Args:
        dtype: the type of fewest bits that it depends on.
        count: numbers that it sums; 0 where it is only moved.
        stores: how often a value is rounded to 16 bits on its longest way, each operator's result being stored.
        casts: how often it is rounded to 16 bits by a Cast.
    """

    dtype: str
    count: int
    stores: int
    casts: int

    def tolerance(self, way: str) -> float:
        """Of a result that was computed this way."""
        roundings = self.stores if way == UNFUSED else min(self.stores, self.casts + 1)
        return tolerance(self.dtype, self.count, max(roundings, 1))


def allowances(kernel: Kernel) -> list[Allowance]:
    """Of each step's result."""
    found: list[Allowance] = []
    for step in kernel.steps:
        before = [found[what] for kind, what in step.arguments if kind == "step" and isinstance(what, int)]
        types = [
            kernel.inputs[what].dtype for kind, what in step.arguments if kind == "input" and isinstance(what, int)
        ]
        types += [step.output.dtype, *(each.dtype for each in before)]
        low = next((half.lower() for half in ("BFloat16", "Float16") if {half, half.lower()} & set(types)), "float32")
        count = max((each.count for each in before), default=0)
        if not step.moves:
            count = max(count, 1) * _summed(step, kernel)
        rounds = step.output.dtype in _HALVES and not step.moves
        stores = max((each.stores for each in before), default=0) + rounds
        casts = max((each.casts for each in before), default=0) + (rounds and step.op == "Cast")
        found.append(Allowance(low, count, stores, casts))
    return found


def _summed(step: Step, kernel: Kernel) -> int:
    """Numbers that one of its results is the sum of."""
    if step.op != "ReduceSum":
        return 1
    kind, what = step.arguments[0]
    assert isinstance(what, int)
    taken = kernel.inputs[what] if kind == "input" else kernel.steps[what].output
    return max(int(np.prod(taken.shape)) // max(int(np.prod(step.output.shape)), 1), 1)


def verdict(got: np.ndarray, want: np.ndarray, allowance: Allowance, way: str) -> Verdict:
    """`judge` of one result against the exact one; booleans and integers must be the same."""
    if not np.issubdtype(want.dtype, np.floating):
        got, want = got.astype(np.float64), want.astype(np.float64)
    return judge(got.reshape(want.shape), want, allowance.tolerance(way), allowance.dtype)


@dataclass(frozen=True)
class Culprit:
    """An operator of a kernel, by its place, and how wrong it is."""

    place: int
    op: str
    verdict: Verdict


def first_wrong(kernel: Kernel, inputs: list[np.ndarray], observed: Sequence[np.ndarray]) -> Culprit | None:
    """Return the first operator out of its own tolerance; None where each is within it.

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
    """Return one operator as a kernel of its own; each of its operands is an input."""
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
