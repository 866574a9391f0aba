"""Is a result near enough to the golden baseline?

The report allows "the actual error" to be within Table 2 and does not define it. Ours, for each element:

    error = |got - want| / max(|want|, rms(want), smallest)

rms is over the finite elements of the tensor and smallest is the type's smallest normal number: relative where a
result is large, relative to the tensor's scale where it cancels to near zero, and no more than a type can hold where
everything is denormal. The largest error of the tensor is compared with the tolerance. Infinities and NaN must be
where the baseline has them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.accuracy.promotion import SMALLEST, rounded


@dataclass(frozen=True)
class Verdict:
    """One tensor. `error`: the largest; `outside`: elements over the tolerance; `detail`: the worst element."""

    passed: bool
    error: float
    outside: int
    detail: str


def errors(got: np.ndarray, want: np.ndarray, smallest: float) -> np.ndarray:
    """The error of each element, float64, shape of `want`; inf where one of the two is not finite and they differ."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(want)
    rms = np.sqrt(np.mean(np.square(want[finite]))) if finite.any() else 0.0
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    with np.errstate(all="ignore"):
        error = np.abs(got - want) / np.maximum(np.abs(want), max(rms, smallest))
    return np.where(same, 0.0, np.where(np.isfinite(got) & finite & np.isfinite(error), error, np.inf))


def judge(got: np.ndarray, want: np.ndarray, tolerance: float, dtype: str) -> Verdict:
    """Compare a device's tensor with the golden one; `dtype` is the tested type."""
    if got.shape != want.shape:
        return Verdict(False, np.inf, want.size, f"shape {list(got.shape)}, should be {list(want.shape)}")
    error = errors(got, want, SMALLEST[dtype])
    outside = int((error > tolerance).sum())
    worst = np.unravel_index(int(error.argmax()), error.shape)
    detail = f"at {[int(i) for i in worst]}: {got[worst]:.6g}, should be {want[worst]:.6g}" if outside else ""
    return Verdict(not outside, float(error[worst]), outside, detail)


def judge_special(
    got: np.ndarray, wants: list[np.ndarray], tolerance: float, dtype: str, floor: float = 0.0
) -> Verdict:
    """Compare results of special inputs: each element relative to itself, NaN and infinities where they belong.

    Args:
        wants: golden results that are right, for a device that keeps denormals and for one that does not. They are
            rounded to `dtype`, so what overflows must be infinite.
        floor: errors are relative to this at least; for reductions, whose ordinary elements may cancel.
    """
    got = got.astype(np.float64)
    held = [rounded(want, dtype).astype(np.float64) for want in wants]
    error = np.min([_special_errors(got, want, SMALLEST[dtype], floor) for want in held], axis=0)
    outside = int((error > tolerance).sum())
    worst = np.unravel_index(int(error.argmax()), error.shape)
    detail = f"at {[int(i) for i in worst]}: {got[worst]:.6g}, should be {held[0][worst]:.6g}" if outside else ""
    return Verdict(not outside, float(error[worst]), outside, detail)


def _special_errors(got: np.ndarray, want: np.ndarray, smallest: float, floor: float) -> np.ndarray:
    """Relative errors; 0 where both are within the smallest normal number of each other, however wrong relatively."""
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.isfinite(got) & np.isfinite(want)
    with np.errstate(all="ignore"):
        apart = np.abs(got - want)
        error = np.where(apart <= smallest, 0.0, apart / np.maximum(np.abs(want), floor))
    return np.where(same, 0.0, np.where(finite, error, np.inf))


def same_bits(first: np.ndarray, other: np.ndarray) -> int:
    """How many elements of a rerun differ in any bit (NaN equals itself)."""
    kind = np.dtype(f"u{first.dtype.itemsize}")
    return int((first.view(kind) != other.view(kind)).sum())
