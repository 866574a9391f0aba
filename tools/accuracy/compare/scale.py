"""Is a whole tensor a little too large or too small? Element by element Table 2 cannot tell.

In 16 bits and at real widths Table 2 allows 7 to 20 % for each element, because errors of an accumulation add up. They
have either sign: over the tensor they cancel, and a factor that all elements share (a softmax scaled by 1.01) does not.
With d = got - want and sums over the tensor:

    low  = <got, want> / <want, want> = 1 + <want, d> / <want, want>     least squares, if all errors are got's
    high = <got, got> / <got, want>                                      the same the other way, if all are want's

Errors of `want` make `low` too small by their mean square, errors of `got` make `high` too large by theirs. Whoever's
they are, the factor is between the two, so that independent errors of any size are no fault by themselves. It is one if

    distance of 1 from [low, high]  >  floor + sigmas sqrt(sum(want^2 d^2)) / sum(want^2)

The root is the standard deviation of `low` when errors of those sizes have independent signs; floor and sigmas stand in
tolerance.yaml, with their derivation. A factor s is seen when n' = sum(want^2)^2 / sum(want^4), the number of elements
that count, is above (sigmas / (1 - floor / s))^2: 140 for a factor of 1.01 in 16 bits, 420 normally distributed values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.accuracy.dumps.npy import CHUNK, WIDEST, NpyFile
from tools.accuracy.tolerance import systematic


@dataclass(frozen=True)
class Scale:
    """A tensor that is scaled. `factor`: least squares; `error`: distance of 1 from [low, high]; `allowed` for it."""

    factor: float
    error: float
    allowed: float


def scaled(sums: tuple[float, float, float], golden: Path, bench: Path, dtype: str) -> Scale | None:
    """The factor between two .npy files of one shape, if there is one.

    Args:
        sums: `Measured.sums` of the two; the files are read again only if these say that the factor is over the floor.
        dtype: the judged type.
    """
    floor, sigmas = systematic(dtype)
    error = distance(sums)
    if not floor < error < math.inf:
        return None
    allowed = floor + sigmas * deviation(golden, bench)
    return Scale(1 + sums[1] / sums[0], error, allowed) if error > allowed else None


def distance(sums: tuple[float, float, float]) -> float:
    """How far 1 is outside of [low, high]; sums of want^2, want d and d^2."""
    want, along, apart = sums
    if want <= 0 or want + along <= 0:
        return 0.0  # nothing to scale, or not even the same sign: no question of a factor
    low, high = along / want, (along + apart) / (want + along)  # both less 1
    return max(low, -high, 0.0)


def deviation(golden: Path, bench: Path) -> float:
    """sqrt(sum(want^2 d^2)) / sum(want^2) of two files, over the values that are finite in both."""
    squares = products = 0.0
    with NpyFile(golden) as want, NpyFile(bench) as got, np.errstate(all="ignore"):
        buffers = [np.empty(CHUNK * WIDEST, np.uint8) for _ in range(2)]
        for a, b in zip(want.chunks(buffers[0]), got.chunks(buffers[1]), strict=True):
            w, d = a.astype(np.float64), b.astype(np.float64)
            d -= w
            usable = np.isfinite(d)
            w = np.where(usable, w, 0.0)
            d = np.where(usable, d, 0.0) * w
            squares += float(np.dot(w, w))
            products += float(np.dot(d, d))
    return math.sqrt(products) / squares
