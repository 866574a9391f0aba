"""This module pairs each tensor of one dump with the same tensor of another dump, and judges each pair.

**The number of terms that an element accumulates chooses the row of Table 2.** It follows from shapes, and is known for
these operators (a name is matched by a part of its class or function, in lower case):

    matrix products   of a cell, forward: the last axis of the input; gradient of the input: the last axis of the
                      gradient that arrives; gradient of the weight: the rows of all calls. Of a function or kernel,
                      which may transpose: sqrt(values of a x values of b / values of the product), by matrix of a batch
    norms             the last axis; gradients of scale and shift: the rows
    softmax           the last axis
    attention         the longest axis of its inputs (a sum over keys)
    embeddings        forward 1; gradient of the table: all indices, which is the most that one row can be summed from
    losses            all values of the largest input
    sums and means    values of the input for each of the output

A cell that contains other cells gets the largest count among these. Everything else is judged by `DEFAULT`, the
strictest row, also what only moves values, because in a chain of operators its inputs are no longer exact.

**Parameters that no gradient trains are state**: counters, a router's bias, running statistics, caches. msprobe dumps a
parameter after its cell's forward pass, which may have changed a counter, so a counter that differs in the first step
does not mean that the initial weights differ. A parameter counts as trained if one of the dumps holds a gradient of it,
in any step and on any rank, or states that it is trained (`requires_grad`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.accuracy.dumps.errors import Measured, filled, measure, scaled, scaled_norm, statistics_error
from tools.accuracy.dumps.read import BACKWARD, FORWARD, GRADIENT, KIND, STATE, WEIGHTS, Entry, Item
from tools.accuracy.judge import SMALLEST, tolerance

DEFAULT = 1
PRODUCTS = ("linear", "dense", "matmul", "gemm", "bmm", "baddbmm", "addmm")
ADDED = ("addmm", "baddbmm")  # products whose first input is what they add to
SUMS = ("sum", "mean", "cumsum")
LOSSES = ("loss", "crossentropy", "cross_entropy")
# kinds of finding; a row without one passed
VALUE, SCALED, UPDATE, SHAPE, DTYPE = "value", "scaled", "update", "shape", "dtype"
NAN, INF, MISSING, EXTRA = "nan", "inf", "missing", "extra"
NARROW = ("float16", "bfloat16")
FLOATS = ("float64", "float32", *NARROW)
NOTHING = "nothing"  # the dumps say too little of a tensor to judge it
_BITS = re.compile(r"b?(float|int|uint)(\d+)$")  # the kind and the bits of a type


class Counter:
    """A `Counter` computes, from the golden dump's calls in one step, how many terms each element of a tensor sums."""

    def __init__(self, entries: list[Entry]):
        own: dict[str, tuple[int, int, int]] = {}
        for entry in entries:
            if entry.name.phase == FORWARD or entry.name.kind == KIND:
                place, counts = _place(entry), _counts(entry)
                # a cell that is called several times adds up their gradients; a call may be of no row at all
                known = own.get(place, (DEFAULT, DEFAULT, 0))
                own[place] = max(known[0], counts[0]), max(known[1], counts[1]), known[2] + counts[2]
        own = {place: (one, two, max(rows, DEFAULT)) for place, (one, two, rows) in own.items()}
        self._counts = dict(own)
        for place, counts in own.items():
            while "." in place:  # the cells around it
                place = place.rpartition(".")[0]
                if place in self._counts:
                    self._counts[place] = tuple(map(max, self._counts[place], counts))  # type: ignore[assignment]

    def of(self, entry: Entry, item: Item) -> int:
        """Return the accumulation count of a tensor of a call."""
        forward, backward, gradient = self._counts.get(_place(entry), (DEFAULT,) * 3)
        if entry.name.phase == GRADIENT:
            return gradient
        if item.role in ("input", "parameters"):
            return DEFAULT  # the tensor as it is, whoever made it
        if entry.name.kind == KIND:
            return forward  # a kernel of the backward pass is an operator like any other
        return backward if entry.name.phase == BACKWARD else forward


def _place(entry: Entry) -> str:
    """Return the place of a call: a cell's path, or a function with its call, whose shapes change."""
    name = entry.name
    return f"Cell.{name.path}" if name.kind == "Cell" else f"{name.kind}.{name.path}#{name.call}"


def _counts(entry: Entry) -> tuple[int, int, int]:
    """Return (forward, gradient of the input, gradient of a parameter)."""
    kind = entry.name.type.lower()
    inputs = [item.shape for item in entry.items if item.role == "input" and item.is_tensor]
    outputs = [item.shape for item in entry.items if item.role == "output" and item.is_tensor]
    if not inputs or not outputs or not inputs[0]:
        return (DEFAULT,) * 3
    first, last = inputs[0], outputs[0]
    rows = math.prod(first[:-1])
    if any(word in kind for word in PRODUCTS) and entry.name.kind != "Cell" and len(inputs) > 1 and len(last) > 1:
        behind = any(word in kind for word in ADDED) and len(inputs) > 2
        return _terms(inputs[behind], inputs[1 + behind], last), last[-1], DEFAULT
    if any(word in kind for word in PRODUCTS):
        return first[-1], last[-1] if last else DEFAULT, rows
    if "norm" in kind:
        return first[-1], first[-1], rows
    if "softmax" in kind:
        return first[-1], first[-1], DEFAULT
    if "attention" in kind:
        longest = max(size for shape in inputs for size in shape)
        return longest, longest, DEFAULT
    if "embedding" in kind:
        return DEFAULT, DEFAULT, math.prod(first)
    if any(word in kind for word in LOSSES):
        return max(map(math.prod, inputs)), DEFAULT, DEFAULT
    if any(word in kind for word in SUMS):
        return max(1, math.prod(first) // max(1, math.prod(last))), DEFAULT, DEFAULT
    return (DEFAULT,) * 3


def _terms(one: tuple[int, ...], other: tuple[int, ...], product: tuple[int, ...]) -> int:
    """Return the number of terms in an element of a matrix product, from the shapes of its factors and its result.

    A batch that both factors have is in their sizes twice, and in that of the result once. If only the result has one,
    each of its matrices is the sum over a part of the rows.
    """
    if len(one) == 1:  # a vector, also with a batch of matrices
        return one[0]
    first, second, third = (max(math.prod(shape[:-2]), 1) for shape in (one, other, product))
    batch = first * second / third if len(other) > 2 else third / first
    size = math.prod(one) * math.prod(other) / max(math.prod(product), 1) / max(batch, 1.0)
    return max(1, round(math.sqrt(size)))


class Trained:
    """A `Trained` says which parameters have a gradient in one of the dumps, if this is `known`."""

    def __init__(self, entries: Iterable[Entry]):
        self._trained: set[tuple[str, str]] = set()
        self.known = False
        for entry in entries:
            gradient = entry.name.phase == GRADIENT
            for item in entry.items:
                if gradient or (item.role == "parameters" and item.trained is not None):
                    self.known = True
                    if gradient or item.trained:
                        self._trained.add((entry.name.path, item.parameter))

    def has(self, entry: Entry, item: Item) -> bool:
        """Return whether a parameter is trained; return True if the dumps do not say which parameters are trained."""
        return not self.known or (entry.name.path, item.parameter) in self._trained


@dataclass(frozen=True)
class Row:
    """A `Row` is the judgement of one tensor that two dumps have in common, or of one call that only one dump has."""

    step: int
    rank: int
    order: int  # the number of the call within the step
    phase: str  # forward, backward, weights, or state (parameters that no gradient trains)
    place: str  # the path and class of the cell, or the name of the function
    name: str  # the name that msprobe gives to the tensor
    role: str  # input, output, parameters or gradient; "call" for a call that only one dump has
    dtype: str = ""
    shape: tuple[int, ...] = ()
    count: int = 1  # the accumulation count of the tensor (the number of summed terms)
    tolerance: float = 0.0  # the largest allowed error by Table 2
    error: float = 0.0  # the largest of `judge.errors`, or the error of the quantity that `by` names
    kind: str = ""  # the kind of difference; empty if the tensor passed
    detail: str = ""  # a description of the worst value, or of what is wrong
    by: str = "values"  # what was judged: values, statistics, update, factor (`errors.scaled`), or nothing
    cause: str = ""  # the usual cause of a wrong update of this kind


@dataclass(frozen=True)
class Pair:
    """A `Pair` holds the entries of two dumps for one tensor; the entry of a dump that lacks the tensor is None."""

    step: int
    rank: int
    order: int
    golden: tuple[Entry, Item | None] | None
    bench: tuple[Entry, Item | None] | None
    count: int = 1

    @property
    def sides(self) -> tuple[Entry, Item | None]:
        """Return the call and the tensor in the golden dump or, if the golden dump lacks them, in the other dump."""
        side = self.golden or self.bench
        assert side is not None
        return side


def pairs(step: int, rank: int, golden: list[Entry], bench: list[Entry]) -> Iterator[Pair]:
    """Yield a pair for each tensor of a step in the order of the golden dump's calls. If only the other dump has a
    call, the pairs of this call follow those of the last call before it that both dumps have.
    """
    counter = Counter(golden)
    for order, (want, got) in enumerate(_aligned(golden, bench)):
        if want is None or got is None:
            yield Pair(step, rank, order, (want, None) if want else None, (got, None) if got else None)
            continue
        items = {item.label: item for item in got.items}
        for item in want.items:
            other = items.pop(item.label, None)
            second = (got, other) if other else None
            yield Pair(step, rank, order, (want, item), second, counter.of(want, item))
        for item in items.values():
            yield Pair(step, rank, order, None, (got, item))


def _aligned(golden: list[Entry], bench: list[Entry]) -> list[tuple[Entry | None, Entry | None]]:
    left = {entry.name.key: entry for entry in bench}
    known = {entry.name.key for entry in golden}
    behind: dict[object, list[Entry]] = {}  # what only `bench` calls, by the common call before it
    last: object = None
    for entry in bench:
        if entry.name.key in known:
            last = entry.name.key
        else:
            behind.setdefault(last, []).append(entry)
    found: list[tuple[Entry | None, Entry | None]] = [(None, extra) for extra in behind.get(None, [])]
    for entry in golden:
        found.append((entry, left.get(entry.name.key)))
        found += [(None, extra) for extra in behind.get(entry.name.key, [])]
    return found


def judged(pair: Pair, promoted: bool, trained: Trained) -> Row | None:
    """Return the judgement of one tensor or plain value; return None for plain values that are equal."""
    entry, item = pair.sides
    label = f".{item.label}" if item else ""
    head = {
        "step": pair.step,
        "rank": pair.rank,
        "order": pair.order,
        "phase": phase_of(entry, item, trained),
        "place": entry.name.place,
        "name": f"{entry.name.text}{label}",
        "role": item.role if item else "call",
    }
    if pair.golden is None or pair.bench is None or item is None:
        kind = EXTRA if pair.golden is None else MISSING
        plain = item is not None and not item.is_tensor
        if plain and item.value is None:  # type: ignore[union-attr]
            return None  # an argument that is None, or is left out
        side = "BENCH" if kind == EXTRA else "GOLDEN"
        return Row(**head, error=math.inf, kind=kind, detail=f"only {side} has it")  # type: ignore[arg-type]
    other = pair.bench[1]
    assert other is not None
    if not (item.is_tensor and other.is_tensor):
        return _plain(head, item, other)
    return _tensors(head, item, other, pair.count, promoted)


def phase_of(entry: Entry, item: Item | None, trained: Trained) -> str:
    """Return "weights" for a trained parameter, "state" for any other, and otherwise the pass of the call."""
    if item and item.role == "parameters":
        return WEIGHTS if trained.has(entry, item) else STATE
    return BACKWARD if entry.name.phase == GRADIENT else entry.name.phase


def _plain(head: dict, golden: Item, bench: Item) -> Row | None:
    """Compare two Python values: floats to the precision of float32, all others exactly."""
    a, b = golden.value, bench.value
    if golden.is_tensor != bench.is_tensor:
        detail = f"the data type is {bench.dtype}, but must be {golden.dtype}"
        return Row(**head, dtype=golden.dtype, error=math.inf, kind=DTYPE, detail=detail)
    if a == b:
        return None
    if isinstance(a, float) and isinstance(b, float) and (math.isclose(a, b, rel_tol=1e-6) or (a != a and b != b)):
        return None
    return Row(**head, dtype=golden.dtype, error=math.inf, kind=VALUE, detail=f"the value is {b!r}, but must be {a!r}")


def judged_type(golden: str, bench: str) -> str:
    """Return the data type by which a tensor is judged: the 16-bit type that it has in one of the dumps, or "float32"
    if it has no 16-bit type.
    """
    return next((dtype for dtype in (bench, golden) if dtype in NARROW), "float32")


def _tensors(head: dict, golden: Item, bench: Item, count: int, promoted: bool) -> Row:
    dtype = judged_type(golden.dtype, bench.dtype)
    exact = golden.dtype not in FLOATS and bench.dtype not in FLOATS
    allowed = 0.0 if exact else tolerance(dtype, count)
    fixed = {**head, "dtype": bench.dtype, "shape": bench.shape, "count": count, "tolerance": allowed}
    if golden.shape != bench.shape:
        detail = f"the shape is {list(bench.shape)}, but must be {list(golden.shape)}"
        return Row(**fixed, error=math.inf, kind=SHAPE, detail=detail)
    if golden.file and bench.file:
        found, by = measure(golden.file, bench.file, allowed, SMALLEST[dtype]), "values"
        scale = scaled(found, golden.file, bench.file, dtype)
    else:
        told = _is_told(golden) or _is_told(bench) or not math.prod(golden.shape)
        found, by = _by_statistics(golden, bench, SMALLEST[dtype]), "statistics" if told else NOTHING
        scale = None if exact else scaled_norm(golden, bench, allowed, dtype)
    kind = NAN if found.nans else INF if found.infinities else VALUE if found.error > allowed else ""
    detail = _detail(found, bench.shape, golden, bench) if kind else found.hidden
    by = NOTHING if detail and not kind else by
    if scale and kind == VALUE:
        detail += f"; all of it scaled by {scale.factor:.6g}"
    if scale and not kind:
        fixed["tolerance"] = scale.allowed
        detail = f"scaled by {scale.factor:.6g}; value by value within Table 2's {allowed:.3g}"
        return Row(**fixed, error=scale.error, kind=SCALED, detail=detail, by="factor")
    if not kind and golden.dtype != bench.dtype and not (promoted and _is_wider(golden.dtype, bench.dtype)):
        kind, detail = DTYPE, f"the data type is {bench.dtype}, but must be {golden.dtype}"
    return Row(**fixed, error=found.error, kind=kind, detail=detail, by=by)


def _is_wider(one: str, other: str) -> bool:
    sides = [_BITS.match(name) for name in (one, other)]
    kinds, bits = ([side[place] for side in sides if side] for place in (1, 2))
    return len(bits) == 2 and kinds[0] == kinds[1] and int(bits[0]) > int(bits[1])


def _is_told(item: Item) -> bool:
    """Return whether statistics say something of all values: mean and norm beside an infinity or fills do not, nor do
    max and min of a boolean mask with both values.
    """
    known = [each for each in item.statistics if each is not None]
    endless = bool(known) and isinstance(known[-1], float) and math.isinf(known[-1])
    return bool(known) and known != [True, False] and not endless and not filled(item)


def _by_statistics(golden: Item, bench: Item, smallest: float) -> Measured:
    nans = sum(isinstance(x, float) and math.isnan(x) for x in bench.statistics)
    error = statistics_error(golden, bench, smallest)
    differing = [got for want, got in zip(golden.statistics, bench.statistics, strict=True) if got != want]
    infinite = sum(isinstance(x, float) and math.isinf(x) for x in differing)
    return Measured(error, int(error > 0), nans=int(nans), infinities=infinite)


def _detail(found: Measured, shape: tuple[int, ...], golden: Item, bench: Item) -> str:
    if not golden.file or not bench.file:
        texts = zip(("max", "min", "mean", "norm"), bench.statistics, golden.statistics, strict=True)
        return "; ".join(f"{name} is {got}, but must be {want}" for name, got, want in texts if got != want)
    place = found.where
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.insert(0, rest)
    parts = [f"{found.nans} NaN"] * bool(found.nans) + [f"{found.infinities} infinite"] * bool(found.infinities)
    parts.append(f"{found.outside} of {math.prod(shape)} values outside")
    return ", ".join(parts) + f"; at {index} the value is {found.got:.6g}, but must be {found.want:.6g}"
