"""This module measures the error of a dumped tensor relative to the same tensor of the golden dump.

**First measure: the error of a tensor**, computed chunk by chunk, so that no tensor is held in memory as a whole.

    error = |got - want| / max(|want|, rms(want), smallest)

`judge.errors` is the slow reference. Here the mean square is summed in float32 within a chunk, so an error may differ
by about 1e-5 of its value; tensors whose squares float32 cannot hold, and tensors with NaN or infinities, are computed
in float64, as in the reference. Identical tensors, most of a rerun, are only compared bit by bit. Fills of a mask
(`judge.fills`) count neither in the scale nor in the sums below. Values that only may be fills count, but if the others
would fail without them, the result is unknown.

**Second measure: a factor that the whole tensor has.** In 16 bits and at real widths Table 2 allows 7 to 20 % for each
element, because errors of an accumulation add up. These have either sign and cancel over the tensor; a factor that all
elements share (for example a softmax scaled by 1.01) does not. With d = got - want and sums over the tensor:

    low  = <got, want> / <want, want> = 1 + <want, d> / <want, want>     least squares, if all errors are got's
    high = <got, got> / <got, want>                                      the same the other way, if all are want's

Errors of `want` make `low` too small by their mean square, and errors of `got` make `high` too large by theirs: the
factor lies between, so independent errors of any size are not a finding. The factor is a finding if

    distance of 1 from [low, high]  >  floor + sigmas sqrt(sum(want^2 d^2)) / sum(want^2)

The root is the standard deviation of `low` if errors of those sizes have independent signs; `floor` and `sigmas` are in
tolerance.yaml, with their derivation. A factor s is found if n' = sum(want^2)^2 / sum(want^4), the effective number of
elements, is above (sigmas / (1 - floor / s))^2: 140 for a factor of 1.01 in 16 bits, which is 420 normally distributed
values.

**Third measure, for a dump without values: largest value, smallest value, mean and L2 norm.** With n values and rms =
norm / sqrt(n), the error is the largest of

    |max - max'|   / max(|max|, rms)
    |min - min'|   / max(|min|, rms)
    |mean - mean'| / (2 rms)
    |norm - norm'| / (sqrt(2) norm)

and the factor of `scaled` is the ratio of the norms. Independent errors d of values w, within Table 2's t, move it by
sum(d^2) / 2 sum(w^2) <= t^2 and by sum(w d) / sum(w^2), whose standard deviation is at most t max|w| / norm.

A tensor whose values all pass Table 2 passes this judgement, too: 2 and sqrt(2) are the most by which errors of
`tolerance * max(|want|, rms)` change mean and norm. It does not find values that changed places, a few wrong values
among many, and errors that cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plugins.errors import DataError
from tools.accuracy.dumps.read import Item, NpyFile, pieces
from tools.accuracy.judge import FILL, GAP, fills, powers, systematic

FILLED = (
    "values of {:.3g} and more, as of a mask that was added, hide how far the others are off; the worst of the others "
    "is {:.6g}, but must be {:.6g}"
)
_POSITIVE_FILL = 2.0**20  # the least one that statistics show
SQUARED = 1e-30  # the least mean square in float32: of much smaller values the squares are lost
ErrorOf = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Scale:
    """A `Scale` is a factor that all elements of a tensor share; `error` is the distance from 1 of the interval in
    which this factor lies.
    """

    factor: float
    error: float
    allowed: float


def scaled(found: Measured, golden: Path, bench: Path, dtype: str) -> Scale | None:
    """Return the factor between all values of one .npy file and those of another. Return None if this factor is 1
    within the tolerance. The files are read again only if the sums in `found`, the result of `measure`, exceed the
    smallest tolerance.
    """
    floor, sigmas = systematic(dtype)
    error = distance(found.sums)
    if not floor < error < math.inf:
        return None
    allowed = floor + sigmas * deviation(golden, bench, found.below)
    return Scale(1 + found.sums[1] / found.sums[0], error, allowed) if error > allowed else None


def distance(sums: tuple[float, float, float]) -> float:
    """Return the distance of [low, high] from 1; `sums` holds the sums of want^2, want d and d^2."""
    want, along, apart = sums
    if want <= 0 or want + along <= 0:
        return 0.0  # nothing to scale, or not even the same sign: no question of a factor
    low, high = along / want, (along + apart) / (want + along)  # both less 1
    return max(low, -high, 0.0)


def deviation(golden: Path, bench: Path, below: float = math.inf) -> float:
    """Return sqrt(sum(want^2 d^2)) / sum(want^2) of the finite values below `below` of two .npy files."""
    squares = products = 0.0
    with NpyFile(golden) as want, NpyFile(bench) as got, np.errstate(all="ignore"):
        for a, b in pieces(want, got):
            w = a.astype(np.float64)
            d = b.astype(np.float64) - w
            usable = np.isfinite(d) & (np.abs(w) < below)
            w = np.where(usable, w, 0.0)
            d = np.where(usable, d, 0.0) * w
            squares += float(np.dot(w, w))
            products += float(np.dot(d, d))
    return math.sqrt(products) / squares


@dataclass(frozen=True)
class Measured:
    """A `Measured` holds the measured differences between the values of two .npy files."""

    error: float = 0.0  # the largest; inf if one of two values is not finite and they differ, or if integers differ
    outside: int = 0  # the number of values over the tolerance, or of different integers
    where: int = 0  # the flat index of the worst value
    got: float = 0.0  # this value
    want: float = 0.0
    nans: int = 0  # the number of NaNs in `got`
    infinities: int = 0  # the number of infinities in `got` that are not in `want`
    # of want^2, want (got - want) and (got - want)^2 over the finite values; 0 for identical arrays and integers
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)
    below: float = math.inf  # the magnitude of the smallest fill; fills are not in `sums`
    hidden: str = ""  # why the error of most values is unknown, if it is


def measure(golden: Path, bench: Path, tolerance: float, smallest: float) -> Measured:
    """Compare two .npy files; `smallest` is the type's smallest normal number. Raise DataError if one is broken."""
    with NpyFile(golden) as want, NpyFile(bench) as got:
        if want.size != got.size:
            raise DataError(
                f"{bench}: the array has shape {list(got.shape)}, and the array of {golden} has shape "
                f"{list(want.shape)}, although the dump.json files give both the same shape; one dump is damaged, so "
                "make both dumps again"
            )
        identical, total, most = _first_look(want, got)
        if (identical and np.isfinite(total)) or not want.size:
            return Measured()
        if want.dtype.kind != "f" or got.dtype.kind != "f":  # integers, booleans, complex: every difference counts
            return Measured() if identical else _worst(want, got, 0.0, lambda a, b: np.where(a != b, np.inf, 0.0))
        mean_square = total / max(want.size, 1)
        sure, maybe = (math.inf, math.inf) if most < 4.0 ** (FILL - 1) else fills(_powers(want, got))
        narrow = maybe == np.inf and max(want.dtype.itemsize, got.dtype.itemsize) <= 4
        if narrow and SQUARED <= mean_square < np.inf:
            measured = _fast(want, got, tolerance, max(mean_square**0.5, smallest), total)
            if np.isfinite(measured.error):
                return measured
        measured = _slow(want, got, tolerance, smallest, sure)
        if maybe == sure or measured.error > tolerance:
            return measured
        own = _slow(want, got, tolerance, smallest, maybe)
        hidden = FILLED.format(maybe, own.got, own.want) if own.error > tolerance else ""
        clear = max((measured, own), key=lambda each: distance(each.sums))
        return replace(measured, sums=clear.sums, below=clear.below, hidden=hidden)


def _powers(want: NpyFile, got: NpyFile) -> np.ndarray:
    return sum((powers(b, a) for a, b in pieces(want, got)), np.zeros((2, 1), int))


def _first_look(want: NpyFile, got: NpyFile) -> tuple[bool, float, float]:
    """Return whether all bits agree, and the sum of squares of `want`, of all pieces and of the largest piece."""
    identical, sums = want.dtype == got.dtype, [0.0]
    with np.errstate(all="ignore"):
        for a, b in pieces(want, got):
            word = np.uint64 if a.nbytes % 8 == 0 else np.uint8
            identical = identical and np.array_equal(a.view(word), b.view(word))
            if want.dtype.kind == "f":
                wide = a if a.dtype.itemsize >= 4 else a.astype(np.float32)
                sums.append(float(np.dot(wide, wide)))
    return identical, sum(sums), float(np.max(sums))


def _worst(want: NpyFile, got: NpyFile, tolerance: float, error_of: ErrorOf) -> Measured:
    """Return the largest error and the number of errors over the tolerance; `error_of` computes those of one piece."""
    worst, outside, place, values, offset = -1.0, 0, 0, (0.0, 0.0), 0
    with np.errstate(all="ignore"):
        for a, b in pieces(want, got):
            error = error_of(a, b)
            top = int(error.argmax())  # of a NaN, if there is one
            if not error[top] <= worst:
                worst, place, values = float(error[top]), offset + top, (float(b[top].real), float(a[top].real))
            if not error[top] <= tolerance:
                outside += int((error > tolerance).sum())
            if np.isnan(worst):
                break
            offset += len(a)
    return Measured(worst, outside, place, *values)


def _fast(want: NpyFile, got: NpyFile, tolerance: float, scale: float, total: float) -> Measured:
    """Return the error in float32; `scale` is the root mean square of `want`, `total` the sum of its squares."""
    sums = np.array([total, 0.0, 0.0])

    def error_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        d, a = np.subtract(b, a, dtype=np.float32), a.astype(np.float32, copy=False)
        sums[1:] += np.dot(a, d), np.dot(d, d)
        return np.abs(d) / np.maximum(np.abs(a), np.float32(scale))

    return replace(_worst(want, got, tolerance, error_of), sums=tuple(sums.tolist()))


def _slow(want: NpyFile, got: NpyFile, tolerance: float, smallest: float, below: float) -> Measured:
    """Return `judge.errors` in float64, of values that are smaller than `below` in `want`, or not finite."""
    squares, count = 0.0, 0
    for (a,) in pieces(want):
        finite = a[np.isfinite(a) & (np.abs(a) < below)].astype(np.float64)
        squares, count = squares + float(np.dot(finite, finite)), count + len(finite)
    scale = max((squares / max(count, 1)) ** 0.5, smallest)
    sums, odd = np.zeros(3), np.zeros(2, int)

    def error_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = a.astype(np.float64), b.astype(np.float64)
        filled = np.isfinite(a) & (np.abs(a) >= below)
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | filled
        error = np.abs(b - a) / np.maximum(np.abs(a), scale)
        usable = np.isfinite(a) & np.isfinite(b) & np.isfinite(error) & ~filled
        w, d = a[usable], b[usable] - a[usable]
        sums[:] += np.dot(w, w), np.dot(w, d), np.dot(d, d)
        odd[:] += np.isnan(b).sum(), (np.isinf(b) & ~same).sum()
        return np.where(same, 0.0, np.where(usable, error, np.inf))

    found, (nans, infinities) = _worst(want, got, tolerance, error_of), odd.tolist()
    return replace(found, nans=nans, infinities=infinities, sums=tuple(sums.tolist()), below=below)


def filled(item: Item) -> int:
    """Return -1 or 1 if statistics show that a mask has filled a tensor with huge values of this sign (`judge.fills`):
    only one of its smallest and its largest value is far from 0. Return 0 for all other tensors.

    Positive fills must be larger than negative ones: squares, sums and positions are large and positive without a mask.
    """
    if not item.dtype.startswith(("float", "bfloat")) or None in item.statistics[:2] or len(item.statistics) < 2:
        return 0
    near, far = sorted((float(x) for x in item.statistics[:2]), key=abs)  # type: ignore[arg-type]
    least = _POSITIVE_FILL if far > 0 else 2.0 ** (FILL - 1)
    huge = abs(far) >= least and abs(near) * 2.0 ** (GAP - 1) < abs(far)
    return int(math.copysign(huge, far))


def statistics_error(golden: Item, bench: Item, smallest: float) -> float:
    """Return the largest relative difference between the statistics (max, min, mean, L2 norm) of a tensor in two dumps;
    return inf if a statistic differs and is not finite. If a mask has filled the tensor with huge values of one sign,
    the error of the largest value of the other sign is relative to this value itself.
    """
    pairs = list(zip(golden.statistics, bench.statistics, strict=True))
    if all(a == b for a, b in pairs):
        return 0.0
    if any(a is None or b is None for a, b in pairs) or not golden.dtype.startswith(("float", "bfloat")):
        return math.inf  # booleans, integers, or nothing on one side
    numbers = [(float(a), float(b)) for a, b in pairs]  # type: ignore[arg-type]
    finite = [math.isfinite(a) and math.isfinite(b) for a, b in numbers]
    if any(
        a != b and not (known or (math.isnan(a) and math.isnan(b)))
        for (a, b), known in zip(numbers, finite, strict=True)
    ):
        return math.inf
    norm = numbers[3][0] if finite[3] else 0.0
    rms = max(norm / math.sqrt(max(math.prod(golden.shape), 1)), smallest)
    above = smallest if filled(golden) < 0 and numbers[0][0] else rms
    below = smallest if filled(golden) > 0 and numbers[1][0] else rms
    scales = (max(abs(numbers[0][0]), above), max(abs(numbers[1][0]), below), 2 * rms, math.sqrt(2) * max(norm, rms))
    return max((abs(a - b) / s for (a, b), s, known in zip(numbers, scales, finite, strict=True) if known), default=0.0)


def scaled_norm(golden: Item, bench: Item, tolerance: float, dtype: str) -> Scale | None:
    """Return the factor between a tensor's L2 norms in two dumps; return None if the factor is within the tolerance of
    a norm, which follows from the tolerance of single elements.
    """
    largest, smallest, _, norm = golden.statistics
    other = bench.statistics[3]
    if not norm or other is None or largest is None or smallest is None:
        return None
    floor, sigmas = systematic(dtype)
    allowed = floor + tolerance**2 + sigmas * tolerance * max(abs(largest), abs(smallest)) / norm
    factor = other / norm
    error = abs(factor - 1)
    return Scale(factor, error, allowed) if allowed < error < math.inf else None
