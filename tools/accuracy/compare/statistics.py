"""The weaker judgement of a dump without values: by largest, smallest, mean and L2 norm.

With n values and rms = norm / sqrt(n), the error is the largest of

    |max - max'|   / max(|max|, rms)
    |min - min'|   / max(|min|, rms)
    |mean - mean'| / (2 rms)
    |norm - norm'| / (sqrt(2) norm)

and the factor of `scale` is that of the norms. Independent errors d of values w, within Table 2's t, move it by
sum(d^2) / 2 sum(w^2) <= t^2 and by sum(w d) / sum(w^2), whose standard deviation is at most t max|w| / norm.

A tensor that Table 2 passes value by value passes here too: the factors 2 and sqrt(2) are the most by which errors of
`tolerance * max(|want|, rms)` can move mean and norm. The reverse does not hold: values that changed places, a few
wrong ones among many, and errors that cancel are not seen.
"""

from __future__ import annotations

import math

from tools.accuracy.compare.scale import Scale
from tools.accuracy.dumps.read_items import Item
from tools.accuracy.tolerance import systematic


def statistics_error(golden: Item, bench: Item, smallest: float) -> float:
    """The error of two tensors' statistics; inf where one is not finite and they differ."""
    pairs = list(zip(golden.statistics, bench.statistics, strict=True))
    if all(a == b for a, b in pairs):
        return 0.0
    if any(a is None or b is None for a, b in pairs) or not golden.dtype.startswith(("float", "bfloat")):
        return math.inf  # booleans, integers, or nothing on one side
    numbers = [(float(a), float(b)) for a, b in pairs]  # type: ignore[arg-type]
    if not all(math.isfinite(x) for pair in numbers for x in pair):
        same = all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in numbers)
        return 0.0 if same else math.inf
    norm = numbers[3][0]
    rms = max(norm / math.sqrt(max(math.prod(golden.shape), 1)), smallest)
    scales = (max(abs(numbers[0][0]), rms), max(abs(numbers[1][0]), rms), 2 * rms, math.sqrt(2) * max(norm, rms))
    return max(abs(a - b) / scale for (a, b), scale in zip(numbers, scales, strict=True))


def scaled_norm(golden: Item, bench: Item, tolerance: float, dtype: str) -> Scale | None:
    """The factor between two tensors, if their norms tell one; `tolerance` is Table 2's."""
    largest, smallest, _, norm = golden.statistics
    other = bench.statistics[3]
    if not norm or other is None or largest is None or smallest is None:
        return None
    floor, sigmas = systematic(dtype)
    allowed = floor + tolerance**2 + sigmas * tolerance * max(abs(largest), abs(smallest)) / norm
    factor = other / norm
    error = abs(factor - 1)
    return Scale(factor, error, allowed) if allowed < error < math.inf else None
