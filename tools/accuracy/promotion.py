"""Data types of a test, and what the golden baseline computes in (report section 3.1 (1)).

tested    device gets   golden computes in
float16   float16       float32
bfloat16  bfloat16      float32
hfloat32  float32       float32 (the device's matmul rounds its factors)
float32   float32       float64, or float32 with wide=False
"""

from __future__ import annotations

import numpy as np

from tools.hardware.units import LONG

NAMES = {**LONG, "hf32": "hfloat32"}
DEFAULT = ("float32", "float16", "bfloat16")
# half the distance of 1 to the next number; hf32's 11 fraction bits are from memory
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "hfloat32": 2.0**-12}
# smallest normal number
SMALLEST = {"float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126, "hfloat32": 2.0**-126}
# largest finite number
LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": 65504.0,
    "bfloat16": 2.0**127 * (2 - 2.0**-7),
    "hfloat32": float(np.finfo(np.float32).max),
}


def golden_dtype(dtype: str, wide: bool = True) -> type[np.floating]:
    """What the golden baseline of inputs of `dtype` is computed in."""
    return np.float64 if dtype == "float32" and wide else np.float32


def round_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 of each float32, ties to even, as float32 (any shape); NaN stays NaN."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    # the upper half of a float32 is a bfloat16: add just under half of its last place, one more where it is odd
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), np.float32(np.nan), rounded.view(np.float32))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as `dtype` holds them: float16 as such, all others as float32; integers and booleans as they are."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "float16":
            return values.astype(np.float16)
        values = values.astype(np.float32)
    return round_bfloat16(values) if dtype == "bfloat16" else values


def promoted(values: np.ndarray, dtype: str, wide: bool = True) -> np.ndarray:
    """Values of a test input in the golden baseline's type; integers and booleans as they are."""
    return values.astype(golden_dtype(dtype, wide)) if np.issubdtype(values.dtype, np.floating) else values
