"""Did the optimizer do the same? A weight's change from one step to the next, which the weight itself hides.

A step moves a weight by a thousandth of it or less, so a wrong weight decay passes Table 2 by value. With u the update
of GOLDEN, d that of BENCH less u, w the weight before, and L2 norms over the parameter, judged are

    the whole        |d| / |u|           <=  base + 2 sqrt(error of the gradient)
    along the weight |<d, v>| / |v| |u|  <=  base + sigmas sqrt(sum(v^2 d^2)) / |v| |u|       v = w - u <w, u> / <u, u>

base is the strictest row of Table 2, plus rounding: twice the unit roundoff of the weight's type times |w| / |u|. The
other terms are no fault of the optimizer: Adam divides a gradient by its own size, so that where a gradient is smaller
than its error the update may have either sign. With bit-identical gradients both terms vanish.

The first has to allow for the worst. On another platform, where every gradient errs, that is more than weight decay
moves. But noise knows nothing of the weight: its part along the weight is what independent signs leave of it, as in
`compare_scale`, and weight decay, which is all along the weight, stands out. v instead of w, because noise also makes
an update shorter as a whole, and an update is not quite at right angles to its weight.

With those terms, an update that passes excuses its weight, if that was right one step earlier: a step that noise turned
round moves a single value by more than Table 2 allows.

The error of a gradient is the largest that was dumped of it so far, or, where the dump has no gradients of parameters
(L1, L2), the largest error of anything in the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tools.accuracy.compare_rows import UPDATE, VALUE, Pair, Row, judged_type
from tools.accuracy.dumps.names import BACKWARD, WEIGHTS
from tools.accuracy.dumps.npy import CHUNK, WIDEST, NpyFile
from tools.accuracy.promotion import ROUNDOFF
from tools.accuracy.tolerance import systematic, tolerance

MOST = 0.7  # share of an error along the weight from which it is called weight decay
STRAIGHT = 0.95  # share of an error along GOLDEN's own update from which it is called the learning rate
DECAY = "weight decay"
RATE = "learning rate, or what else makes a whole update longer"


def judge_updates(pairs: list[Pair], rows: list[Row | None]) -> tuple[list[Row | None], int]:
    """`rows` with those weights marked whose update is wrong, and how many updates were judged.

    Args:
        rows: `rows[i]` is that of `pairs[i]`, steps in order.
    """
    gradients: dict[tuple, float] = {}  # the largest error so far
    backward: dict[int, float] = {}  # the same of a rank's backward pass
    before: dict[tuple, int] = {}  # the same weight one step earlier
    rows, judged = list(rows), 0
    for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
        entry, item = pair.sides
        if row is None or item is None or pair.golden is None or pair.bench is None:
            continue
        key = (row.rank, entry.name.path, item.parameter)
        if row.phase == BACKWARD:
            backward[row.rank] = max(backward.get(row.rank, 0.0), row.error)
        if item.role == "gradient":
            gradients[key] = max(gradients.get(key, 0.0), row.error)
        elif item.role == "parameters" and row.phase == WEIGHTS and entry.name.call == 0:
            earlier = before.get(key)
            before[key] = index
            if earlier is not None:
                error = gradients.get(key, backward.get(row.rank, 0.0))
                rows[index], seen = _judged(pairs[earlier], pair, rows[earlier], row, error)
                judged += seen
    return rows, judged


def _judged(before: Pair, after: Pair, old: Row | None, row: Row, gradient_error: float) -> tuple[Row, bool]:
    """The row, and whether its update could be judged."""
    assert old is not None
    files = [side[1].file if side and side[1] else None for side in (before.golden, after.golden)]
    files += [side[1].file if side and side[1] else None for side in (before.bench, after.bench)]
    if any(file is None for file in files):
        return row, False  # statistics cannot tell
    if row.kind not in ("", VALUE) or not (row.error or old.error):
        return row, True  # the weight itself is wrong, or all four are bit-identical
    moved = measure_update(*files)  # type: ignore[arg-type]
    item = after.sides[1]
    dtype = judged_type(item.dtype if item else "", row.dtype)
    base = tolerance(dtype, 1) + (2 * ROUNDOFF[dtype] * moved.weight / moved.update if moved.update else 0.0)
    whole = base + 2 * math.sqrt(min(gradient_error, 1.0))
    along = base + systematic(dtype)[1] * moved.by_chance
    error, allowed, how, cause, more = moved.error, whole, "L2 norm", "", ""
    if moved.along > along and (moved.error <= whole or moved.along > MOST * moved.error):
        error, allowed, how, cause = moved.along, along, f"along the weight: {_decay(moved)}", DECAY
    elif abs(moved.longer) > STRAIGHT * moved.error:
        cause, more = RATE, f": {1 + moved.longer:.4g} times as long as GOLDEN's"
    if error <= allowed:
        explained = row.kind and not old.kind and gradient_error
        return (
            replace(row, kind="", error=error, tolerance=allowed, detail="", by="update") if explained else row
        ), True
    if row.kind and old.kind not in ("", UPDATE):
        return row, True  # it started from a wrong weight
    detail = f"the update since step {before.step} is off by {error:.3g} of itself ({how}){more}"
    return replace(row, kind=UPDATE, error=error, tolerance=allowed, detail=detail, by="update", cause=cause), True


def _decay(moved: Moved) -> str:
    word = "less" if moved.grown > 0 else "more"
    return f"BENCH decays it by {abs(moved.grown):.2g} of itself {word} than GOLDEN"


@dataclass(frozen=True)
class Moved:
    """Two updates of one weight. All but the first two and the last two are shares of |u|, see above.

    Args:
        update, weight: |u|, |w|.
        error: |d|.
        along: |<d, v>| / |v|; by_chance: its standard deviation if the signs of d are independent.
        grown: <d, v> / <v, v>.
        longer: <d, u> / <u, u>.
    """

    update: float
    weight: float
    error: float
    along: float
    by_chance: float
    grown: float
    longer: float = 0.0


def measure_update(old: Path, new: Path, other_old: Path, other_new: Path) -> Moved:
    """Compare two updates, from four files of one shape; shares are inf where only BENCH has moved."""
    sums = np.zeros((3, 3))  # of products of u, d, w
    squares = np.zeros((2, 2))  # of products of u d and w d
    files = [NpyFile(path) for path in (old, new, other_old, other_new)]
    buffers = [np.empty(CHUNK * WIDEST, np.uint8) for _ in files]
    try:
        chunks = [file.chunks(buffer) for file, buffer in zip(files, buffers, strict=True)]
        for pieces in zip(*chunks, strict=True):
            w, b, c, e = (piece.astype(np.float64) for piece in pieces)
            u = b - w
            d = (e - c) - u
            three, two = np.stack((u, d, w)), np.stack((u * d, w * d))
            sums += three @ three.T
            squares += two @ two.T
    finally:
        for file in files:
            file.__exit__()
    update, error, weight = (math.sqrt(each) for each in np.diag(sums))
    if not update or not error:
        return Moved(update, weight, math.inf if error else 0.0, 0.0, 0.0, 0.0)
    share, longer = sums[0, 2] / sums[0, 0], sums[0, 1] / sums[0, 0]
    v = math.sqrt(max(sums[2, 2] - share * sums[0, 2], 0.0))
    if v < 1e-6 * weight or not v:
        return Moved(update, weight, error / update, 0.0, 0.0, 0.0, longer)  # the update is along the weight: `error` tells
    along = sums[1, 2] - share * sums[0, 1]
    chance = math.sqrt(max(squares[1, 1] - 2 * share * squares[0, 1] + share**2 * squares[0, 0], 0.0))
    shares = (error / update, abs(along) / v / update, chance / v / update)
    return Moved(update, weight, *shares, along / v**2, longer)
