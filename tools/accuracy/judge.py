"""This module judges whether a computed tensor is near enough to its golden tensor: it defines data types, tolerances
and errors.

The golden baseline computes in a wider type than the one that is tested (report, section 3.1 (1)):

tested    device gets   golden computes in
float16   float16       float32
bfloat16  bfloat16      float32
hfloat32  float32       float32 (the device's matmul rounds its factors)
float32   float32       float64, or float32 with wide=False

Table 2 of the report states the tolerance by data type and by the number of terms that an element accumulates. Its
values are in tolerance.yaml, and `systematic` returns the tolerance of a factor that scales a whole tensor. The report
requires "the actual error" to be within Table 2, and does not define this error. This module defines the error of each
element as

    error = |got - want| / max(|want|, rms(want), smallest)

Here rms is the root mean square of the finite elements of the tensor, and smallest is the type's smallest normal
number. The error is relative to the element if the element is large, relative to the scale of the tensor if the element
nearly cancels to zero, and relative to the smallest normal number if all elements are denormal. The largest error of
the tensor is compared with the tolerance (`judge`). Infinities and NaN must be where the baseline has them
(`judge_special`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml

from tools.hardware.units import LONG

NAMES = {**LONG, "hf32": "hfloat32"}
DEFAULT = ("float32", "float16", "bfloat16")
# half the distance of 1 to the next number; hf32's 11 fraction bits are from memory
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "hfloat32": 2.0**-12}
# smallest normal number
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126, "hfloat32": 2.0**-126}
# largest finite number
LARGEST = {**dict.fromkeys(("float32", "hfloat32"), float(np.finfo(np.float32).max)), "float16": 65504.0}
LARGEST["bfloat16"] = 2.0**127 * (2 - 2.0**-7)


def golden_dtype(dtype: str, wide: bool = True) -> type[np.floating]:
    """Return the NumPy type in which golden results are computed for inputs of `dtype`."""
    return np.float64 if dtype == "float32" and wide else np.float32


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the nearest bfloat16 of each float32, ties to even, as float32 (any shape); NaN stays NaN."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values rounded to `dtype`: float16 is returned as float16, all other floats as float32, and integers and
    booleans are unchanged.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return values
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            return values.astype(np.float16)
        values = values.astype(np.float32)
    return round_bfloat16(values) if dtype == "bfloat16" else values


def promoted(values: np.ndarray, dtype: str, wide: bool = True) -> np.ndarray:
    """Return the values of a test input in the NumPy type in which golden results are computed; integers and booleans
    are unchanged.
    """
    return values.astype(golden_dtype(dtype, wide)) if np.issubdtype(values.dtype, np.floating) else values


FILE = Path(__file__).with_name("tolerance.yaml")


@cache
def table() -> dict[str, Any]:
    """Return the content of tolerance.yaml: the tolerances by data type and accumulation count, and the limits that
    belong to them.
    """
    return yaml.safe_load(FILE.read_text("utf-8"))


def tolerance(dtype: str, count: int, roundings: int = 1) -> float:
    """Return the largest allowed error of an operator's result by Table 2; `judge.errors` computes the error to which
    this limit applies.

    Args:
        dtype: the dtype of the operator's inputs: float32, float16, bfloat16 or hfloat32.
        count: the number of terms that one output element accumulates; 0 for an operator that only moves values.
            roundings: the number of times that a value is stored in `dtype` on its way to the output.
    """
    if count == 0:
        return 0.0
    content = table()
    rows = content["columns"][content["alias"].get(dtype, dtype)]
    reached = [row["tolerance"] for row in rows if row["count"] <= count]
    return reached[-1] + (roundings - 1) * ROUNDOFF[dtype]


def systematic(dtype: str) -> tuple[float, float]:
    """Return the tolerance for a factor that all elements of a tensor have in common: the allowed distance of the
    factor from 1, and the number of standard deviations that is allowed in addition (tools/accuracy/dumps/errors.py).
    """
    content = table()
    found = content["systematic"]
    return found["floor"][content["alias"].get(dtype, dtype)], found["sigmas"]


def lower_bound() -> float:
    """Return the smallest magnitude that an element of a test input may have."""
    return table()["lower_bound"]


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` is the judgement of one tensor against its golden tensor: `error` is the largest error of an element,
    `outside` the number of elements over the tolerance, `detail` a description of the worst element.
    """

    passed: bool
    error: float
    outside: int
    detail: str


def errors(got: np.ndarray, want: np.ndarray, smallest: float) -> np.ndarray:
    """Return the error of each element of a tensor as float64; the error is inf if the element or the right value is
    not finite and they differ.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    rms = np.sqrt(np.mean(np.square(want[finite]))) if finite.any() else 0.0
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        error = np.abs(got - want) / np.maximum(np.abs(want), max(rms, smallest))
    return np.where(same, 0.0, np.where(np.isfinite(got) & finite & np.isfinite(error), error, np.inf))


def judge(got: np.ndarray, want: np.ndarray, tolerance: float, dtype: str) -> Verdict:
    """Compare a tensor that a device computed with the golden tensor, element by element; `dtype` is the tested
    type.
    """
    if got.shape != want.shape:
        return Verdict(False, np.inf, want.size, f"shape {list(got.shape)}, should be {list(want.shape)}")
    if not want.size:
        return Verdict(True, 0.0, 0, "")
    return _verdict(errors(got, want, SMALLEST[dtype]), got, want, tolerance)


def _verdict(error: np.ndarray, got: np.ndarray, want: np.ndarray, tolerance: float) -> Verdict:
    outside = int((error > tolerance).sum())
    worst = np.unravel_index(int(error.argmax()), error.shape)
    detail = f"at {[int(i) for i in worst]}: {got[worst]:.6g}, should be {want[worst]:.6g}" if outside else ""
    return Verdict(not outside, float(error[worst]), outside, detail)


def judge_special(
    got: np.ndarray, wants: list[np.ndarray], tolerance: float, dtype: str, floor: float = 0.0
) -> Verdict:
    """Compare an operator's results for special inputs with the golden results: each error is relative to the element,
    and NaN and infinities must be in the same places.

    Args:
        wants: the right golden results, for a device that keeps denormals and for a device that does not. They are
            rounded to `dtype`, so a value that overflows must be infinite.
        floor: the smallest magnitude to which errors are relative; it is needed for reductions, whose ordinary elements
            may cancel.
    """
    got = got.astype(np.float64)
    held = [rounded(want, dtype).astype(np.float64) for want in wants]
    error = np.min([_special_errors(got, want, SMALLEST[dtype], floor) for want in held], axis=0)
    return _verdict(error, got, held[0], tolerance)


def _special_errors(got: np.ndarray, want: np.ndarray, smallest: float, floor: float) -> np.ndarray:
    """Return relative errors; 0 where both are within the smallest normal number of each other, however wrong
    relatively.
    """
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(all="ignore"):
        apart = np.abs(got - want)
        error = np.where(apart <= smallest, 0.0, apart / np.maximum(np.abs(want), floor))
    return np.where(same, 0.0, np.where(finite, error, np.inf))


def same_bits(first: np.ndarray, other: np.ndarray) -> int:
    """Return the number of elements in which two runs of an operator differ in any bit; a NaN equals a NaN of the same
    bits.
    """
    kind = np.dtype(f"u{first.dtype.itemsize}")
    return int((first.view(kind) != other.view(kind)).sum())
