"""This module takes from the text of a compiled graph the fused kernels that DVM (Ascend's Device Virtual Machine)
would build, makes their sizes small, computes each from seeded inputs in NumPy in three ways, and judges the results by
Table 2 of the TeleChat3-MoE report.

exact: every float in float64. unfused: each operator's result is rounded to its type, as if it were written to memory.
fused: 16-bit chains in float32, rounded where a result leaves the kernel, and by a Cast (DVM, report section 4.5). An
operator outside of a fused kernel computes in float32 or wider, and so do its sums.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from plugins.operator_fusion.plan import EXPANDED, Fusion
from tools.accuracy.judge import Verdict, judge, lower_bound, plain, rounded, tolerance
from tools.dryrun.graph_text import GraphText, Node, TensorType, arguments_of, tensors
from tools.fusion.tally import kernels_of, read_outside, users_of

Argument = tuple[str, object]  # ("input", place), ("step", place) or ("constant", number, tuple or array)

_KEEP_DIMS = re.compile(r"keep_dims: Bool\((\d)\)")
_ARRAY = re.compile(r"Tensor\(shape=\[([\d, ]*)\], dtype=(\w+), value=\s*\[?([^\]\[]*)\]?\)$")
_NUMBER = re.compile(r"[A-Z]\w*\(([-+\w.]+)\)")
_STEP = re.compile(r"%(\d+)$")
_SHAPED = ("BroadcastTo", "Reshape", "Cast")  # the result's type says what their other arguments do
_MOVES = ("Transpose", "BroadcastTo", "Reshape", "Assign")  # values stay as they are
_OTHERS = ("Assign", "BroadcastTo", "Cast", "ReduceSum", "Reshape", "Transpose")
_KEPT = 32  # a dimension up to this stays; each larger size becomes a number of its own above it


class UnreadableError(Exception):
    """This error means that a group of operators cannot be computed in NumPy; the message says why."""


@dataclass(frozen=True)
class Step:
    """A `Step` is one operator of a fused kernel."""

    op: str  # the name of its primitive
    output: TensorType  # the type and shape of its result
    arguments: tuple[Argument, ...]  # the arguments in order; constants are given as values
    keep_dims: bool = False  # whether a reduction keeps the dimension

    @property
    def moves(self) -> bool:
        """Return whether the operator only moves or renames values."""
        return self.op in _MOVES


@dataclass(frozen=True)
class Kernel:
    """A `Kernel` is a group of operators that DVM (Ascend's Device Virtual Machine) fuses into one kernel."""

    inputs: tuple[TensorType, ...]  # the types and shapes of its inputs
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]  # the indices in `steps` of the results that leave the kernel
    where: str = ""  # MindSpore's path of its last operator

    @property
    def name(self) -> str:
        """Return the names of the kernel's operators, as ``"Mul-Mul-Add"``; a long name counts repeated operators."""
        names = [step.op for step in self.steps]
        if len(names) <= 8:
            return "-".join(names)
        return "-".join(f"{op} x{names.count(op)}" for op in dict.fromkeys(names))

    @property
    def key(self) -> str:
        """Return a text that is equal for kernels of the same operators and shapes."""
        return repr((self.inputs, self.steps, self.outputs))


def of_nodes(nodes: Sequence[Node], places: Collection[int], outputs: Collection[int]) -> Kernel:
    """Return the nodes with the indices `places` as one kernel, of which the results `outputs` are used outside. Raise
    UnreadableError if the text leaves out a constant, or if an input is not a tensor.
    """
    chosen = sorted(places)
    number = {place: step for step, place in enumerate(chosen)}
    names: dict[str, tuple[int, TensorType]] = {}
    steps = []
    for place in chosen:
        node = nodes[place]
        types = node.types[0].removeprefix("(<").removesuffix(">)").split(">, <")
        pairs = list(zip(arguments_of(node.head), types, strict=False))
        values = [pair for pair in pairs if "Monad" not in pair[1]]  # a monad is an order, and no value
        values = values[:1] if node.op in _SHAPED else values
        taken = [_argument(text, kind, number, names) for text, kind in values]
        keeps = _KEEP_DIMS.search(node.text)
        steps.append(Step(node.op, node.outputs[0], tuple(taken), bool(keeps and keeps[1] == "1")))
    kept = tuple(number[place] for place in sorted(outputs))
    inputs = tuple(kind for _, kind in sorted(names.values(), key=lambda pair: pair[0]))
    return Kernel(inputs, tuple(steps), kept, nodes[chosen[-1]].scope)


def _argument(text: str, kind: str, steps: dict[int, int], names: dict[str, tuple[int, TensorType]]) -> Argument:
    """Return what an operator takes; a value from outside gets the next number in `names` when it is first seen."""
    match = _STEP.match(text)
    if match and int(match[1]) in steps:
        return "step", steps[int(match[1])]
    if not text.startswith("%") and "value=..." not in text:
        return "constant", constant(text)
    if not text.startswith("%"):
        raise UnreadableError("the text of the graph leaves out the values of a constant of this fused kernel")
    found = tensors(f"<{kind}>")
    if len(found) != 1:
        raise UnreadableError(f"an input of this fused kernel is not a tensor, but {kind[:60]}")
    place, _ = names.setdefault(text, (len(names), found[0]))
    return "input", place


def constant(text: str) -> object:
    """Return a constant of MindSpore's form, such as ``F32(0.5)``, ``(I64(1), I64(0))`` or ``Tensor(shape=[1],
    dtype=Float32, value=[1])``; raise UnreadableError for another form or a truncated text.
    """
    array = _ARRAY.match(text)
    try:
        if array:
            shape = [int(size) for size in re.findall(r"\d+", array[1])]
            words = array[3].split()
            values = [word == "True" if word in ("True", "False") else float(word) for word in words]
            return np.array(values, "bool" if array[2] == "Bool" else numpy_type(array[2])).reshape(shape)
        numbers = [_plain(word) for word in _NUMBER.findall(text)]
    except ValueError:
        raise UnreadableError(f"a constant {text[:60]}") from None
    if text.startswith("(") and (numbers or text == "()"):
        return tuple(numbers)
    if len(numbers) != 1:
        raise UnreadableError(f"a constant {text[:60]}")
    return numbers[0]


def _plain(word: str) -> float | int:
    return int(word) if re.fullmatch(r"[-+]?\d+", word) else float(word)


def numpy_type(dtype: str) -> str:
    """Return the NumPy type for a type of MindSpore; bfloat16 values are stored as float32."""
    return {"BFloat16": "float32"}.get(dtype, dtype.lower())


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Abs": np.abs, "Add": np.add, "Ceil": np.ceil, "Div": np.divide, "Equal": np.equal, "Exp": np.exp,
    "Floor": np.floor, "Greater": np.greater, "GreaterEqual": np.greater_equal, "IsFinite": np.isfinite,
    "Less": np.less, "LessEqual": np.less_equal, "Log": np.log, "LogicalAnd": np.logical_and,
    "LogicalNot": np.logical_not, "LogicalOr": np.logical_or, "Maximum": np.maximum, "Minimum": np.minimum,
    "Mul": np.multiply, "Neg": np.negative, "NotEqual": np.not_equal, "Pow": np.power, "RealDiv": np.divide,
    "Reciprocal": lambda x: 1 / x, "Rsqrt": lambda x: 1 / np.sqrt(x), "Select": np.where, "Sqrt": np.sqrt,
    "Sub": np.subtract, "Trunc": np.trunc,
}  # fmt: skip
KNOWN = frozenset((*_ELEMENTWISE, *_OTHERS))


def compute(step: Step, values: list[Any]) -> np.ndarray:
    """Return the result of one operator in NumPy's type; a Cast between float types does nothing. The `values` are
    arrays, or numbers and tuples. Raise UnreadableError for an operator outside `KNOWN`.
    """
    first, *rest = values
    if step.op in _ELEMENTWISE:
        with np.errstate(all="ignore"):
            return np.asarray(_ELEMENTWISE[step.op](*values))
    if step.op == "ReduceSum":
        axes = tuple(np.atleast_1d(np.asarray(rest[0] if rest else (), np.int64)).tolist())
        return np.asarray(first).sum(axis=axes or None, keepdims=step.keep_dims)  # none given: all of them
    if step.op == "Transpose":
        return np.transpose(first, tuple(np.asarray(rest[0], np.int64).tolist()))
    if step.op in ("Reshape", "BroadcastTo"):
        return (np.reshape if step.op == "Reshape" else np.broadcast_to)(first, step.output.shape)
    if step.op == "Assign":
        return np.asarray(rest[0])
    if step.op == "Cast":
        return _cast(np.asarray(first), step.output.dtype)
    raise UnreadableError(f"the operator {step.op}")


def _cast(value: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "Bool":
        return value != 0
    if dtype.startswith(("Int", "UInt")):
        with np.errstate(all="ignore"):
            return value.astype(dtype.lower())
    return value  # who calls decides what floats are held in


def shrunk(kernel: Kernel) -> Kernel:
    """Return the kernel with each size above 32 or known only at run time made small; equal sizes stay equal. Raise
    UnreadableError if a kernel with a Reshape would change.
    """
    given = [step.output for step in kernel.steps]
    sizes = sorted({size for kind in (*kernel.inputs, *given) for size in kind.shape if not 0 <= size <= _KEPT})
    if sizes and any(step.op == "Reshape" for step in kernel.steps):
        raise UnreadableError(
            "this fused kernel has a Reshape, so it cannot be checked on smaller tensors: its shapes must keep their "
            "numbers of elements"
        )
    small = {size: _KEPT + 1 + place for place, size in enumerate(sizes)}

    def cut(kind: TensorType) -> TensorType:
        return TensorType(kind.dtype, tuple(small.get(size, size) for size in kind.shape))

    steps = tuple(replace(step, output=cut(step.output)) for step in kernel.steps)
    return replace(kernel, inputs=tuple(map(cut, kernel.inputs)), steps=steps)


@dataclass
class Found:
    """A `Found` collects one fused kernel of each kind, and the reasons why other kernels cannot be computed."""

    kernels: dict[str, Kernel] = field(default_factory=dict)  # one kernel of each kind, by `Kernel.key`
    counts: Counter[str] = field(default_factory=Counter)  # the number of kernels of each kind
    skipped: Counter[str] = field(default_factory=Counter)  # kernels that cannot be computed, by the reason

    def add(self, nodes: Sequence[Node], places: Sequence[int], outputs: Collection[int]) -> None:
        """Add one fused kernel, made small."""
        try:
            if strange := [nodes[place].op for place in places if nodes[place].op not in KNOWN]:
                raise UnreadableError(f"the operator {strange[0] or 'call'}")
            kernel = shrunk(of_nodes(nodes, places, outputs))
        except UnreadableError as error:
            self.skipped[str(error)] += 1
            return
        self.kernels.setdefault(kernel.key, kernel)
        self.counts[kernel.key] += 1


OPENED = Fusion("vector", EXPANDED)  # composites are kept whole, because the text does not show what is in them


def predicted(graphs: Sequence[GraphText]) -> Found:
    """Return the kernels of several operators that DVM (Ascend's Device Virtual Machine) would build, made small."""
    found = Found()
    for nodes in (nodes for text in graphs for nodes in text.graphs.values()):
        users = users_of(nodes)
        for places in kernels_of(nodes, OPENED):
            if len(places) > 1:
                found.add(nodes, places, read_outside(nodes, users, places))
    return found


EXACT, UNFUSED, FUSED = "exact", "unfused", "fused"
_HALVES = ("Float16", "BFloat16")
_POSITIVE = frozenset(("Log", "Sqrt", "Rsqrt", "Pow", "Div", "RealDiv", "Reciprocal"))
_LARGEST = 2.0


def inputs_of(kernel: Kernel, seed: int) -> list[np.ndarray]:
    """Return random inputs for a kernel: floats from `lower_bound` to 2 in magnitude that their type represents
    exactly, positive if the kernel has a root or a division. The inputs depend only on the seed and the kernel.
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
    """Return floats rounded to MindSpore's type `dtype`, and stored as float32; integers, booleans and values of the
    type Float64 are returned unchanged.
    """
    if not np.issubdtype(values.dtype, np.floating) or dtype == "Float64":
        return values
    return np.asarray(rounded(values, dtype.lower())).astype(np.float32)


def run(kernel: Kernel, inputs: list[np.ndarray], way: str) -> list[np.ndarray]:
    """Return the results of all operators of a kernel."""
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
    """An `Allowance` holds the values from which the tolerance of one result is computed by Table 2 of the
    TeleChat3-MoE report.
    """

    dtype: str  # the type with the fewest bits on which it depends
    count: int  # the number of elements that it sums; 0 if values are only moved
    stores: int  # how often a value is rounded to 16 bits at most, if each operator's result is stored
    casts: int  # the number of times that a Cast rounds the value to 16 bits

    def tolerance(self, way: str) -> float:
        """Return the tolerance of a result that was computed fused or unfused."""
        roundings = self.stores if way == UNFUSED else min(self.stores, self.casts + 1)
        return tolerance(self.dtype, self.count, max(roundings, 1))


def allowances(kernel: Kernel) -> list[Allowance]:
    """Return the allowance of each operator's result."""
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
    if step.op != "ReduceSum":
        return 1
    kind, what = step.arguments[0]
    assert isinstance(what, int)
    taken = kernel.inputs[what] if kind == "input" else kernel.steps[what].output
    return max(int(np.prod(taken.shape)) // max(int(np.prod(step.output.shape)), 1), 1)


def verdict(got: np.ndarray, want: np.ndarray, allowance: Allowance, way: str) -> Verdict:
    """Compare one result of a kernel with the exact result, by `judge`; booleans and integers must be equal."""
    if not np.issubdtype(want.dtype, np.floating):
        got, want = got.astype(np.float64), want.astype(np.float64)
    return judge(got.reshape(want.shape), want, allowance.tolerance(way), allowance.dtype)


@dataclass(frozen=True)
class Row:
    """A `Row` is the judgement of one kind of kernel, computed fused and operator by operator (unfused)."""

    name: str  # the names of its operators
    where: str  # the path of one such kernel
    times: int  # the number of such kernels in the graphs
    dtype: str  # in which the kernel was judged
    fused: float  # the largest error against float64
    unfused: float
    allowed: float  # by Table 2, of the fused kernel
    passed: bool
    unfused_passed: bool
    detail: str  # the worst element

    @property
    def used(self) -> float:
        """Return the fused kernel's error as a share of its tolerance."""
        return _share(self.fused, self.allowed)


@dataclass
class Report:
    """A `Report` holds the judgements of all fused kernels of a recipe's graphs."""

    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)  # kernels that were not computed again, by the reason

    @property
    def wrong(self) -> list[Row]:
        """Return the kernels out of tolerance, in the order of the graphs."""
        return [row for row in self.rows if not row.passed]

    @property
    def unknown(self) -> int:
        """Return the number of kernels that could not be computed."""
        return sum(self.skipped.values())

    @property
    def passed(self) -> bool | None:
        """Return False if a kernel is out of tolerance. If no kernel is, return None if some kernels could not be
        computed or if there are none, and otherwise True.
        """
        if self.wrong:
            return False
        return None if self.unknown or not self.rows else True

    def as_json(self) -> dict[str, Any]:
        """Return the judgements as values for JSON."""
        rows = [plain(row) for row in self.rows]
        return {"passed": self.passed, "unknown": self.unknown, "rows": rows, "skipped": self.skipped}


def replayed(found: Found, seed: int) -> Report:
    """Return the judgements of predicted kernels, fused and unfused."""
    rows, skipped = [], Counter(found.skipped)
    for key, kernel in found.kernels.items():
        try:
            rows.append(_row(kernel, found.counts[key], seed))
        except UnreadableError as error:
            skipped[str(error)] += found.counts[key]
    return Report(rows, dict(skipped))


def _row(kernel: Kernel, times: int, seed: int) -> Row:
    """Return the judgement of the result that used most of its tolerance; raise UnreadableError if none is finite."""
    inputs = inputs_of(kernel, seed)
    exact, fused, unfused = (
        [results[place] for place in kernel.outputs]
        for results in (run(kernel, inputs, way) for way in (EXACT, FUSED, UNFUSED))
    )
    if not all(np.isfinite(result).any() for result in exact if result.size):
        raise UnreadableError("with random inputs, a result of this fused kernel holds no finite number")
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
