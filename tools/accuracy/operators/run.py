"""This module tests one operator in one data type: forward, backward, special values and reruns. Small magnitudes of
inputs are clipped (section 3.1 (3) of the TeleChat3-MoE report); golden results are computed in NumPy, in a wider type.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from tools.accuracy.judge import (
    LARGEST,
    SMALLEST,
    Verdict,
    judge,
    judge_special,
    lower_bound,
    promoted,
    rounded,
    same_bits,
    tolerance,
)
from tools.accuracy.operators.device import MindSporeDevice, NotRunnableError, first_line
from tools.accuracy.operators.spec import Array, Spec, as_tuple

PASS, FAIL, NOT_RUNNABLE = "pass", "fail", "not runnable"


def clip_lower(values: np.ndarray, bound: float) -> np.ndarray:
    """Return the values, in which magnitudes below `bound` are replaced by `bound`; each value, also a zero, keeps its
    sign.
    """
    return np.copysign(np.maximum(np.abs(values), values.dtype.type(bound)), values)


def specials(dtype: str) -> np.ndarray:
    """Return 13 special values: zero, denormals, the smallest normal, small whole numbers, half the largest number (so
    that the order of products does not decide whether they overflow), infinities and NaN. Training does not depend on
    the sign of zero, which kernels handle differently.
    """
    low, high = SMALLEST[dtype], LARGEST[dtype] / 2
    values = [0.0, low / 4, -low / 4, low, -low, 1.0, -1.0, 2.0, high, -high, np.inf, -np.inf, np.nan]
    return rounded(np.array(values), dtype)


def grid(dtype: str, inputs: int) -> list[np.ndarray]:
    """Return a vector for each input of an elementwise operator, with every combination of special values."""
    return [np.array(column) for column in zip(*product(specials(dtype), repeat=inputs), strict=True)]


def poke(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return a copy of an array [..., n] with a special value in each of its first 13 rows."""
    poked = values.copy()
    rows = poked.reshape(-1, poked.shape[-1])
    special = specials(dtype)
    assert len(rows) >= len(special)
    rows[: len(special), rows.shape[1] // 2] = special
    return poked


def flushed(values: np.ndarray, dtype: str, signed: bool) -> np.ndarray:
    """Return the values, in which denormals are replaced by zeros; the zeros keep the sign if `signed`."""
    zero = values.dtype.type(0)
    return np.where(np.abs(values) < SMALLEST[dtype], np.copysign(zero, values) if signed else zero, values)


@dataclass(frozen=True)
class Case:
    """A `Case` is one test of an operator: inputs and incoming gradients in the tested type, and golden results."""

    inputs: tuple[np.ndarray, ...]
    outputs: tuple[np.ndarray, ...]
    douts: tuple[np.ndarray, ...]  # gradients of the float outputs; empty without a backward
    grads: tuple[np.ndarray, ...]
    extreme: int  # the number of elements of the device's inputs that are below the lower bound or not finite


def generator(spec: Spec, shape: tuple[int, ...], seed: int) -> np.random.Generator:
    """Return random numbers that depend only on the operator's base name, the shape and the seed."""
    return np.random.default_rng([seed, zlib.crc32(spec.name.split(".")[0].encode()), *shape])


def make_case(spec: Spec, shape: tuple[int, ...], dtype: str, seed: int) -> Case:
    """Return one test of the sizes `shape`."""
    rng = generator(spec, shape, seed)
    inputs, extreme = [], 0
    for number, values in enumerate(spec.make(rng, *shape)):
        if is_float(values):
            if spec.clip:
                values = clip_lower(values, lower_bound())
            values = rounded(values, "float32" if number in spec.fixed else dtype)
            extreme += int((~np.isfinite(values) | (np.abs(values.astype(np.float64)) < lower_bound())).sum())
        inputs.append(values)
    outputs = forward(spec, tuple(inputs), dtype)
    if spec.grad is None:
        return Case(tuple(inputs), outputs, (), (), extreme)
    douts = tuple(rounded(rng.standard_normal(out.shape).astype(np.float32), dtype) for out in outputs if is_float(out))
    return Case(tuple(inputs), outputs, douts, backward(spec, tuple(inputs), douts, dtype), extreme)


def forward(spec: Spec, inputs: tuple[np.ndarray, ...], dtype: str) -> tuple[np.ndarray, ...]:
    """Return the golden outputs; invalid operations give inf and NaN as in IEEE 754."""
    with np.errstate(all="ignore"):
        return tuple(np.asarray(out) for out in as_tuple(spec.golden(*(promoted(values, dtype) for values in inputs))))


def backward(
    spec: Spec, inputs: tuple[np.ndarray, ...], douts: tuple[np.ndarray, ...], dtype: str
) -> tuple[np.ndarray, ...]:
    """Return the golden gradients with respect to `spec.wrt`."""
    assert spec.grad is not None
    grads = spec.grad(*(promoted(values, dtype) for values in (*inputs, *douts)))
    return tuple(np.asarray(grad) for grad in as_tuple(grads))


def is_float(values: np.ndarray) -> bool:
    """Return whether an array holds floats."""
    return bool(np.issubdtype(values.dtype, np.floating))


@dataclass(frozen=True)
class Row:
    """A `Row` is the result of one check of an operator."""

    op: str
    dtype: str
    shape: tuple[int, ...]  # the sizes of the case
    phase: str  # forward, backward, special (infinities, NaN, denormals, zeros) or rerun (bit-identical?)
    tensor: int  # the number of the output, or of the input to which the gradient belongs
    status: str  # pass, fail or not runnable
    # count, tolerance, error: see accumulation, tolerance and judge
    count: int = 0
    tolerance: float = 0.0
    error: float = 0.0
    outside: int = 0  # the number of elements that are over the tolerance, or that differ between runs
    detail: str = ""  # the worst element and the number of extreme inputs, or MindSpore's message


def verify(spec: Spec, dtype: str, device: MindSporeDevice, reruns: int = 3, seed: int = 0) -> list[Row]:
    """Return a row for each check of an operator in one data type. If `reruns` is 1, the operator runs only once, and
    the check that compares its reruns is left out.
    """
    rows: list[Row] = []
    for shape in spec.shapes:
        rows += _case(spec, shape, dtype, device, reruns, make_case(spec, shape, dtype, seed))
        if rows[-1].status == NOT_RUNNABLE and rows[-1].phase == "forward":
            return rows  # nor any other shape
    if spec.special:
        rows += _special(spec, dtype, device, seed)
    return rows


def _case(
    spec: Spec, shape: tuple[int, ...], dtype: str, device: MindSporeDevice, reruns: int, case: Case
) -> Iterator[Row]:
    """Yield the results of the forward and the backward of one shape, and of their reruns."""
    once = partial(device.forward, spec, case.inputs, dtype)
    phases = {"forward": (once, case.outputs, tuple(range(len(case.outputs))))}
    if spec.grad:
        phases["backward"] = (partial(device.backward, spec, case.inputs, case.douts, dtype), case.grads, spec.wrt)
    counts = spec.counts(*case.inputs)
    for phase, (run, wants, names) in phases.items():
        row = partial(Row, spec.name, dtype, shape, phase)
        try:
            first, *others = (run() for _ in range(reruns))
        except NotRunnableError as error:
            yield row(0, NOT_RUNNABLE, detail=str(error))
            return
        except Exception as error:
            yield row(0, FAIL, error=np.inf, detail=_told(error))
            return
        if len(first) != len(wants):
            yield row(0, FAIL, error=np.inf, detail=f"the number of tensors is {len(first)}, but must be {len(wants)}")
            return
        for number, (got, want, name) in enumerate(zip(first, wants, names, strict=True)):
            count = counts.of(phase, number)
            allowed = tolerance(dtype, count, spec.roundings) if is_float(want) else 0.0
            verdict = judge(got, want, allowed, dtype)
            if case.extreme and not verdict.passed:
                note = f"{verdict.detail}; {case.extreme} inputs are below {lower_bound():g} or not finite"
                verdict = replace(verdict, detail=note)
            yield _judged(row, name, count, allowed, verdict)
        if others:
            differing = sum(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))
            detail = f"{phase}: elements differ between runs of the same inputs" if differing else phase
            again = partial(Row, spec.name, dtype, shape, "rerun")
            yield again(0, FAIL if differing else PASS, outside=differing, detail=detail)


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def _special(spec: Spec, dtype: str, device: MindSporeDevice, seed: int) -> Iterator[Row]:
    """Yield the results of special values; the golden baseline may flush denormals or not."""
    inputs = special_inputs(spec, dtype, seed)
    wants = _special_goldens(spec, inputs, dtype)
    allowed = tolerance(dtype, max(spec.counts(*inputs).of("forward", 0), 1), spec.roundings)
    row = partial(Row, spec.name, dtype, tuple(inputs[0].shape), "special")
    try:
        gots = device.forward(spec, inputs, dtype)
    except NotRunnableError:
        return  # said already by the cases
    except Exception as error:
        yield row(0, FAIL, error=np.inf, detail=_told(error))
        return
    for number, got in enumerate(gots):
        right = [want[number] for want in wants]
        floor = float(np.median(np.abs(right[0][np.isfinite(right[0])]))) if spec.special == "row" else 0.0
        verdict = judge_special(got, right, allowed, _held_in(got, dtype), floor)
        yield _judged(row, number, 1, allowed, verdict)


def special_inputs(spec: Spec, dtype: str, seed: int) -> tuple[Array, ...]:
    """Return inputs with all combinations of special values ("each"), or with one in each row ("row")."""
    case = make_case(spec, spec.shapes[0], dtype, seed)
    if spec.special == "each":
        return tuple(grid(dtype, len(case.inputs)))
    return poke(case.inputs[0], dtype), *case.inputs[1:]


def _special_goldens(spec: Spec, inputs: tuple[Array, ...], dtype: str) -> list[tuple[Array, ...]]:
    """Return goldens with denormals kept and flushed; for float32 also computed in float32, where squares overflow."""

    def without_denormals(signed: bool) -> tuple[Array, ...]:
        return tuple(flushed(value, dtype, signed) if is_float(value) else value for value in inputs)

    wants = []
    for values in (inputs, without_denormals(True), without_denormals(False)):
        wants.append(forward(spec, values, dtype))
        with np.errstate(all="ignore"):
            narrow = spec.golden(*(promoted(value, dtype, wide=False) for value in values))
        wants.append(tuple(np.asarray(out) for out in as_tuple(narrow)))
    return wants


def _held_in(got: Array, dtype: str) -> str:
    """Return the type that decides about overflow of an output: casts and losses leave the tested type."""
    if got.dtype == np.float16:
        return "float16"
    return "float32" if dtype == "float16" else dtype


def _judged(row: Callable[..., Row], tensor: int, count: int, allowed: float, found: Verdict) -> Row:
    status = PASS if found.passed else FAIL
    return row(tensor, status, count, allowed, found.error, found.outside, found.detail)
