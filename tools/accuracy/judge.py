"""This module judges whether a computed tensor is close enough to its golden tensor, which is computed in a wider type
than the tested type (section 3.1 (1) of the TeleChat3-MoE report).

tested    device gets   golden computes in
float16   float16       float32
bfloat16  bfloat16      float32
hfloat32  float32       float32 (the device's matmul rounds its factors)
float32   float32       float64, or float32 with wide=False

Table 2 of the report (tolerance.yaml) states the tolerance of "the actual error" by data type and by the number of
terms that an element accumulates, and does not define this error. Here it is

    error = |got - want| / max(|want|, rms(want), smallest)

with the root mean square of the finite elements and the type's smallest normal number: relative to the element if it
is large, to the scale of the tensor if the element nearly cancels to zero, and to the smallest normal number if all
elements are denormal. The largest error of the tensor counts. Infinities and NaN must be where the baseline has them.

Fills are left out of the root mean square: huge values, such as -10000 or -1e30, that a mask has put in place of the
computed ones. Beside them an error of all other elements would vanish. `fills` says which values are fills.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126, "hfloat32": 2.0**-126}
LARGEST = {**dict.fromkeys(("float32", "hfloat32"), float(np.finfo(np.float32).max)), "float16": 65504.0}
FILL, SPAN, GAP = 14, 3, 8  # in powers of two: the least fill, the width of a group of fills, and the gap below it
_LEAST = -1100  # the power of two that stands for zero; float64 has none below -1074
LARGEST["bfloat16"] = 2.0**127 * (2 - 2.0**-7)


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to the nearest bfloat16 (ties to even), stored as float32."""
    with np.errstate(all="ignore"):
        return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return floats rounded to `dtype`; values of float16 are stored as float16, and all other floats as float32.
    Integers are returned unchanged.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return values
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            return values.astype(np.float16)
        values = values.astype(np.float32)
    return round_bfloat16(values) if dtype == "bfloat16" else values


def promoted(values: np.ndarray, dtype: str, wide: bool = True) -> np.ndarray:
    """Return floats in the type in which golden results are computed; integers are unchanged."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    return values.astype(np.float64 if dtype == "float32" and wide else np.float32)


@cache
def facts(name: str) -> dict[str, Any]:
    """Return the content of `tolerance.yaml` or `causes.yaml`."""
    return yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text("utf-8"))


def plain(row: Any) -> dict[str, Any]:
    """Return a dataclass as values for JSON; a number that is not finite is a text, such as "inf"."""
    values = asdict(row).items()
    return {name: str(x) if isinstance(x, float) and not math.isfinite(x) else x for name, x in values}


def tolerance(dtype: str, count: int, roundings: int = 1) -> float:
    """Return the largest error (see `errors`) that Table 2 of the TeleChat3-MoE report allows for sums of `count`
    terms, 0 for values that are only moved (`count` 0). A value may be rounded to `dtype` up to `roundings` times.
    """
    if count == 0:
        return 0.0
    content = facts("tolerance")
    rows = content["columns"][content["alias"].get(dtype, dtype)]
    reached = [row["tolerance"] for row in rows if row["count"] <= count]
    return reached[-1] + (roundings - 1) * ROUNDOFF[dtype]


def systematic(dtype: str) -> tuple[float, float]:
    """Return the allowed distance of a whole tensor's factor from 1, and the number of standard deviations by which a
    factor must lie beyond this distance.
    """
    content = facts("tolerance")
    found = content["systematic"]
    return found["floor"][content["alias"].get(dtype, dtype)], found["sigmas"]


def lower_bound() -> float:
    """Return the smallest magnitude of an element of a test input."""
    return facts("tolerance")["lower_bound"]


@dataclass(frozen=True)
class Verdict:
    """A `Verdict` is the judgement of one tensor, with its largest error and a text about its worst element."""

    passed: bool
    error: float
    outside: int
    detail: str


def powers(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return two rows of counts: how many finite values of `want` have each power of two, and how many of these differ
    from `got`. Counts of several pieces may be added up.
    """
    finite = np.isfinite(want)
    values = np.abs(want[finite].astype(np.float64))
    place = np.where(values > 0, np.frexp(values)[1], _LEAST) - _LEAST
    return np.stack([np.bincount(each, minlength=2200) for each in (place, place[got[finite] != want[finite]])])


def fills(counts: np.ndarray) -> tuple[float, float]:
    """Return two magnitudes, from which it follows whether a value is a fill (a huge value that a mask has written):
    values of at least the first magnitude are fills, and values of at least the second may be fills. A magnitude is inf
    if no value can be a fill in this sense. `counts` is the result of `powers`.

    A group of huge values (8192 or more) lies within a factor of 8 and is at least 128 times as large as all smaller
    values. They are fills if they are the same in both tensors: what was computed would differ by rounding. They may be
    fills if some differ (a mask that was added to the scores), or if all other values are 0, because errors have no
    scale beside zeros.
    """
    present, apart = np.flatnonzero(counts[0]) + _LEAST, np.flatnonzero(counts[1]) + _LEAST
    sure = maybe = math.inf
    while present.size and present[-1] >= FILL:
        group = present[present > present[-1] - SPAN]
        rest = present[: -group.size]
        if not rest.size or group[0] - rest[-1] < GAP:
            break
        same = sure == maybe and rest[-1] > _LEAST and not ((apart >= group[0]) & (apart <= group[-1])).any()
        maybe = 2.0 ** int(group[0] - 1)
        sure, present = maybe if same else sure, rest
    return sure, maybe


def errors(got: np.ndarray, want: np.ndarray, smallest: float, floor: float | None = None) -> np.ndarray:
    """Return each element's error as float64; the error is infinite where the values differ and one of them is not
    finite. If `floor` is given, it takes the place of the root mean square, and a difference of at most the smallest
    normal number counts as no error.
    """
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    scaling = finite & (np.abs(want) < fills(powers(got, want))[0])
    rms = np.sqrt(np.mean(np.square(want[scaling]))) if scaling.any() else 0.0
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        apart = np.abs(got - want)
        error = apart / np.maximum(np.abs(want), max(rms, smallest) if floor is None else floor)
    if floor is not None:
        same |= apart <= smallest
    return np.where(same, 0.0, np.where(np.isfinite(got) & finite & np.isfinite(error), error, np.inf))


def judge(got: np.ndarray, want: np.ndarray, tolerance: float, dtype: str) -> Verdict:
    """Compare a tensor that was computed in `dtype` with the golden tensor."""
    if got.shape != want.shape:
        return Verdict(False, np.inf, want.size, f"the shape is {list(got.shape)}, but must be {list(want.shape)}")
    if not want.size:
        return Verdict(True, 0.0, 0, "")
    return _verdict(errors(got, want, SMALLEST[dtype]), got, want, tolerance)


def _verdict(error: np.ndarray, got: np.ndarray, want: np.ndarray, tolerance: float) -> Verdict:
    outside = int((error > tolerance).sum())
    worst = np.unravel_index(int(error.argmax()), error.shape)
    detail = (
        f"at {[int(i) for i in worst]} the value is {got[worst]:.6g}, but must be {want[worst]:.6g}" if outside else ""
    )
    return Verdict(not outside, float(error[worst]), outside, detail)


def judge_special(
    got: np.ndarray, wants: list[np.ndarray], tolerance: float, dtype: str, floor: float = 0.0
) -> Verdict:
    """Compare results for special inputs with `wants`: the golden results of devices that keep denormals, and the
    golden results of devices that flush denormals to zero. Errors are relative to the element's magnitude or, if
    `floor` is larger, to `floor`.
    """
    got = got.astype(np.float64)
    held = [rounded(want, dtype).astype(np.float64) for want in wants]
    error = np.min([errors(got, want, SMALLEST[dtype], floor) for want in held], axis=0)
    return _verdict(error, got, held[0], tolerance)


def same_bits(first: np.ndarray, other: np.ndarray) -> int:
    """Return the number of elements that differ in any bit between two runs."""
    kind = np.dtype(f"u{first.dtype.itemsize}")
    return int((first.view(kind) != other.view(kind)).sum())
