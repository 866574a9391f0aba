"""This module replays a kernel from seeded inputs in NumPy, in three ways, and judges the results by Table 2.

exact     every float in float64
unfused   each operator's result is rounded to its type, as if it were written to memory
fused     16-bit chains in float32, rounded where a result leaves the kernel, and by a Cast (DVM, report section 4.5)

An operator outside of a fused kernel computes in float32 or wider, whatever its type, and so do its sums. `allowances`
is what Table 2 allows each result.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tools.accuracy.fusion.kernels import Found, Kernel, Step, compute, numpy_type
from tools.accuracy.judge import Verdict, judge, lower_bound, rounded, tolerance

EXACT, UNFUSED, FUSED = "exact", "unfused", "fused"
_HALVES = ("Float16", "BFloat16")
_POSITIVE = frozenset(("Log", "Sqrt", "Rsqrt", "Pow", "Div", "RealDiv", "Reciprocal"))
_LARGEST = 2.0


def inputs_of(kernel: Kernel, seed: int) -> list[np.ndarray]:
    """Return random inputs: floats of magnitude `lower_bound` to 2, positive where a root or a division may take them.

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
    """Return the nearest values of MindSpore's `dtype`, as float32 where they have 16 bits; other types are
    unchanged.
    """
    if not np.issubdtype(values.dtype, np.floating) or dtype == "Float64":
        return values
    return np.asarray(rounded(values, dtype.lower())).astype(np.float32)


def run(kernel: Kernel, inputs: list[np.ndarray], way: str) -> list[np.ndarray]:
    """Return the results of all steps, including those that stay inside the kernel."""
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
    """An `Allowance` says what Table 2 (`tools.accuracy.judge`) allows for a result.

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
        """Return the tolerance of a result that was computed in this way."""
        roundings = self.stores if way == UNFUSED else min(self.stores, self.casts + 1)
        return tolerance(self.dtype, self.count, max(roundings, 1))


def allowances(kernel: Kernel) -> list[Allowance]:
    """Return the tolerance of each step's result."""
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
    """Return numbers that one of its results is the sum of."""
    if step.op != "ReduceSum":
        return 1
    kind, what = step.arguments[0]
    assert isinstance(what, int)
    taken = kernel.inputs[what] if kind == "input" else kernel.steps[what].output
    return max(int(np.prod(taken.shape)) // max(int(np.prod(step.output.shape)), 1), 1)


def verdict(got: np.ndarray, want: np.ndarray, allowance: Allowance, way: str) -> Verdict:
    """Return the judgement of one result against the exact result by `judge`; booleans and integers must be equal."""
    if not np.issubdtype(want.dtype, np.floating):
        got, want = got.astype(np.float64), want.astype(np.float64)
    return judge(got.reshape(want.shape), want, allowance.tolerance(way), allowance.dtype)


@dataclass(frozen=True)
class Row:
    """A `Row` is the judgement of one kind of kernel: computed as a fused kernel, and computed one operator after the
    other.

    Args:
        name: its operators. where: the path of one. times: how many there are in the graphs.
        dtype: that it was judged in.
        fused, unfused: the largest error of its results against float64. allowed: of the fused one, by Table 2.
        passed, unfused_passed: whether they are within it.
        detail: the worst element.
    """

    name: str
    where: str
    times: int
    dtype: str
    fused: float
    unfused: float
    allowed: float
    passed: bool
    unfused_passed: bool
    detail: str

    @property
    def used(self) -> float:
        """Return the share of its tolerance that the error uses."""
        return _share(self.fused, self.allowed)


@dataclass
class Report:
    """A `Report` holds the judgements of all kernels.

    Args:
        skipped: why kernels were not computed again -> how many.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> list[Row]:
        """Return the kernels whose fused results are out of tolerance, in the order of the graphs."""
        return [row for row in self.rows if not row.passed]

    @property
    def unknown(self) -> int:
        """Return the number of kernels that could not be computed."""
        return sum(self.skipped.values())

    @property
    def passed(self) -> bool | None:
        """Return whether every kernel is within tolerance; None if no kernel is known to be out of it, but some are
        unknown.
        """
        if self.wrong:
            return False
        return None if self.unknown or not self.rows else True

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [asdict(row) for row in self.rows]
        return {"passed": self.passed, "unknown": self.unknown, "rows": rows, "skipped": self.skipped}


def replayed(found: Found, seed: int) -> Report:
    """Return the judgements of predicted kernels, fused as DVM does and unfused."""
    rows = []
    for key, kernel in found.kernels.items():
        inputs = inputs_of(kernel, seed)
        exact, fused, unfused = (
            [results[place] for place in kernel.outputs]
            for results in (run(kernel, inputs, way) for way in (EXACT, FUSED, UNFUSED))
        )
        rows.append(_row(kernel, found.counts[key], exact, fused, unfused))
    return Report(rows, dict(found.skipped))


def _row(
    kernel: Kernel, times: int, exact: list[np.ndarray], fused: list[np.ndarray], unfused: list[np.ndarray]
) -> Row:
    """The result that used most of its tolerance stands for the kernel."""
    allowed = [allowances(kernel)[place] for place in kernel.outputs]
    ones = [verdict(got, want, each, FUSED) for got, want, each in zip(fused, exact, allowed, strict=True)]
    others = [verdict(got, want, each, UNFUSED) for got, want, each in zip(unfused, exact, allowed, strict=True)]
    worst = max(range(len(ones)), key=lambda place: _share(ones[place].error, allowed[place].tolerance(FUSED)))
    numbers = ones[worst].error, others[worst].error, allowed[worst].tolerance(FUSED)
    fused_passed, unfused_passed = (all(each.passed for each in side) for side in (ones, others))
    return Row(
        kernel.name, kernel.where, times, allowed[worst].dtype, *numbers, fused_passed, unfused_passed,
        ones[worst].detail,
    )  # fmt: skip


def _share(error: float, tolerance: float) -> float:
    return error / tolerance if tolerance else (np.inf if error else 0.0)
