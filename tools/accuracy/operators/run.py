"""One operator in one data type: forward, backward, special values, reruns; every check is a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tools.accuracy.judge import Verdict, judge, judge_special, same_bits
from tools.accuracy.operators import extremes, golden
from tools.accuracy.operators.device import Device, NotRunnableError, first_line
from tools.accuracy.operators.spec import Array, Spec, as_tuple
from tools.accuracy.promotion import promoted
from tools.accuracy.tolerance import lower_bound, tolerance

PASS, FAIL, NOT_RUNNABLE = "pass", "fail", "not runnable"


@dataclass(frozen=True)
class Row:
    """One check.

    Args:
        shape: the sizes of the case.
        phase: forward, backward, special (infinities, NaN, denormals, zeros) or rerun (bit-identical?).
        tensor: number of the output or of the input that the gradient belongs to.
        status: pass, fail or not runnable.
        count, tolerance, error: see accumulation, tolerance and judge.
        outside: elements over the tolerance, or that differ between runs.
        detail: the worst element, and how many inputs are extreme; or MindSpore's message.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    phase: str
    tensor: int
    status: str
    count: int = 0
    tolerance: float = 0.0
    error: float = 0.0
    outside: int = 0
    detail: str = ""


def verify(spec: Spec, dtype: str, device: Device, reruns: int = 3, seed: int = 0, clip: bool = True) -> list[Row]:
    """All checks of an operator in one data type.

    Args:
        dtype: full name.
        reruns: how often each case runs in all; 1 checks no reruns.
        seed: of the inputs.
        clip: False leaves inputs as drawn, to see what the lower bound protects from.
    """
    rows: list[Row] = []
    for shape in spec.shapes:
        rows += _case(spec, shape, dtype, device, reruns, golden.make_case(spec, shape, dtype, seed, clip))
        if rows[-1].status == NOT_RUNNABLE and rows[-1].phase == "forward":
            return rows  # nor any other shape
    if spec.special:
        rows += _special(spec, dtype, device, seed)
    return rows


def _case(
    spec: Spec, shape: tuple[int, ...], dtype: str, device: Device, reruns: int, case: golden.Case
) -> Iterator[Row]:
    """Forward and backward of one shape, and their reruns."""
    phases = {"forward": (case.outputs, tuple(range(len(case.outputs))))}
    if spec.grad:
        phases["backward"] = (case.grads, spec.wrt)
    counts = spec.counts(*case.inputs)
    for phase, (wants, names) in phases.items():
        try:
            first, *others = (_run(phase, spec, dtype, device, case) for _ in range(reruns))
        except NotRunnableError as error:
            yield Row(spec.name, dtype, shape, phase, 0, NOT_RUNNABLE, detail=str(error))
            return
        except Exception as error:
            yield Row(spec.name, dtype, shape, phase, 0, FAIL, error=np.inf, detail=_told(error))
            return
        if len(first) != len(wants):
            detail = f"{len(first)} tensors, should be {len(wants)}"
            yield Row(spec.name, dtype, shape, phase, 0, FAIL, error=np.inf, detail=detail)
            return
        for number, (got, want, name) in enumerate(zip(first, wants, names, strict=True)):
            count = counts.of(phase, number)
            allowed = tolerance(dtype, count, spec.roundings) if golden.is_float(want) else 0.0
            verdict = judge(got, want, allowed, dtype)
            if case.extreme and not verdict.passed:
                note = f"{verdict.detail}; {case.extreme} inputs are below {lower_bound():g} or not finite"
                verdict = replace(verdict, detail=note)
            yield _row(spec, dtype, shape, phase, name, count, allowed, verdict)
        if others:
            yield _rerun(spec, dtype, shape, phase, first, others)


def _run(phase: str, spec: Spec, dtype: str, device: Device, case: golden.Case) -> tuple[Array, ...]:
    if phase == "forward":
        return device.forward(spec, case.inputs, dtype)
    return device.backward(spec, case.inputs, case.douts, dtype)


def _told(error: Exception) -> str:
    """What went wrong in a call, in one line."""
    return f"{type(error).__name__}: {first_line(str(error))}"


def _rerun(spec: Spec, dtype: str, shape: tuple[int, ...], phase: str, first, others) -> Row:
    """Whether every rerun gave the same bits."""
    differing = sum(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))
    status = FAIL if differing else PASS
    detail = f"{phase}: elements differ between runs of the same inputs" if differing else phase
    return Row(spec.name, dtype, shape, "rerun", 0, status, outside=differing, detail=detail)


def _special(spec: Spec, dtype: str, device: Device, seed: int) -> Iterator[Row]:
    """Forward with special values; right is what the golden baseline gives, with denormals or without."""
    inputs = special_inputs(spec, dtype, seed)
    wants = _special_goldens(spec, inputs, dtype)
    allowed = tolerance(dtype, max(spec.counts(*inputs).of("forward", 0), 1), spec.roundings)
    try:
        gots = device.forward(spec, inputs, dtype)
    except NotRunnableError:
        return  # said already by the cases
    except Exception as error:
        yield Row(spec.name, dtype, inputs[0].shape, "special", 0, FAIL, error=np.inf, detail=_told(error))
        return
    for number, got in enumerate(gots):
        right = [want[number] for want in wants]
        floor = float(np.median(np.abs(right[0][np.isfinite(right[0])]))) if spec.special == "row" else 0.0
        verdict = judge_special(got, right, allowed, _held_in(got, dtype), floor)
        yield _row(spec, dtype, inputs[0].shape, "special", number, 1, allowed, verdict)


def special_inputs(spec: Spec, dtype: str, seed: int) -> tuple[Array, ...]:
    """All combinations of special values for spec.special "each"; the first case with one in each row for "row"."""
    case = golden.make_case(spec, spec.shapes[0], dtype, seed)
    if spec.special == "each":
        return tuple(extremes.grid(dtype, len(case.inputs)))
    return extremes.poke(case.inputs[0], dtype), *case.inputs[1:]


def _special_goldens(spec: Spec, inputs: tuple[Array, ...], dtype: str) -> list[tuple[Array, ...]]:
    """Goldens with denormals kept and flushed; for float32 also computed in float32, where squares overflow."""

    def without_denormals(signed: bool) -> tuple[Array, ...]:
        return tuple(extremes.flushed(value, dtype, signed) if golden.is_float(value) else value for value in inputs)

    wants = []
    for values in (inputs, without_denormals(True), without_denormals(False)):
        wants.append(golden.forward(spec, values, dtype))
        with np.errstate(all="ignore"):
            narrow = spec.golden(*(promoted(value, dtype, wide=False) for value in values))
        wants.append(tuple(np.asarray(out) for out in as_tuple(narrow)))
    return wants


def _held_in(got: Array, dtype: str) -> str:
    """The type that decides about overflow of an output: casts and losses leave the tested type."""
    if got.dtype == np.float16:
        return "float16"
    return "float32" if dtype == "float16" else dtype


def _row(spec, dtype, shape, phase, tensor, count, allowed, verdict: Verdict) -> Row:
    status = PASS if verdict.passed else FAIL
    return Row(
        spec.name,
        dtype,
        tuple(shape),
        phase,
        tensor,
        status,
        count,
        allowed,
        verdict.error,
        verdict.outside,
        verdict.detail,
    )
