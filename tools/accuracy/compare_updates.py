"""Did the optimizer do the same? A weight's change from one step to the next, which the weight itself hides.

A step moves a weight by a thousandth of it or less, so a wrong weight decay passes Table 2 by value. Judged here is

    |update - update'| / |update|       (L2 norms over the parameter)

against the strictest row of Table 2, plus what is no fault of the optimizer:

* `2 sqrt(error of the gradient)`: Adam divides a gradient by its own size, so that where a gradient is smaller than its
  error the update may have either sign. With bit-identical gradients this is zero;
* rounding: twice the unit roundoff of the weight's type times |weight| / |update|.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from tools.accuracy.compare_rows import UPDATE, Pair, Row, judged_type
from tools.accuracy.dumps.npy import CHUNK, WIDEST, NpyFile
from tools.accuracy.promotion import ROUNDOFF
from tools.accuracy.tolerance import tolerance


def judge_updates(pairs: list[Pair], rows: list[Row | None]) -> list[Row | None]:
    """`rows` with those weights marked whose update is wrong; `rows[i]` is that of `pairs[i]`, steps in order."""
    gradients: dict[tuple, float] = {}  # the largest error so far
    before: dict[tuple, int] = {}  # the same weight one step earlier
    rows = list(rows)
    for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
        entry, item = pair.sides
        if row is None or item is None or pair.golden is None or pair.bench is None:
            continue
        label = item.label.removeprefix("parameters.").split(".")[0]
        key = (row.rank, entry.name.path, label)
        if item.role == "gradient":
            gradients[key] = max(gradients.get(key, 0.0), row.error)
        elif item.role == "parameters" and entry.name.call == 0:
            earlier = before.get(key)
            before[key] = index
            if earlier is not None:
                old = rows[earlier]
                assert old is not None
                if not row.kind and (row.error or old.error):  # all four bit-identical otherwise
                    rows[index] = _judged(pairs[earlier], pair, row, gradients.get(key, 0.0))
    return rows


def _judged(before: Pair, after: Pair, row: Row, gradient_error: float) -> Row:
    files = [side[1].file if side and side[1] else None for side in (before.golden, after.golden)]
    files += [side[1].file if side and side[1] else None for side in (before.bench, after.bench)]
    if any(file is None for file in files):
        return row  # statistics cannot tell
    change, update, weight = measure_update(*files)  # type: ignore[arg-type]
    if not change:
        return row
    item = after.sides[1]
    dtype = judged_type(item.dtype if item else "", row.dtype)
    error = change / update if update else math.inf
    allowed = tolerance(dtype, 1) + 2 * math.sqrt(min(gradient_error, 1.0))
    allowed += 2 * ROUNDOFF[dtype] * weight / update if update else 0.0
    if error <= allowed:
        return row
    detail = f"the update since the step before is off by {error:.3g} of itself (L2 norm)"
    return replace(row, kind=UPDATE, error=error, tolerance=allowed, detail=detail, by="update")


def measure_update(old: Path, new: Path, other_old: Path, other_new: Path) -> tuple[float, float, float]:
    """L2 norms of (difference of the updates, golden update, golden weight), from four files of one shape."""
    difference = update = weight = 0.0
    files = [NpyFile(path) for path in (old, new, other_old, other_new)]
    buffers = [np.empty(CHUNK * WIDEST, np.uint8) for _ in files]
    try:
        chunks = [file.chunks(buffer) for file, buffer in zip(files, buffers, strict=True)]
        for pieces in zip(*chunks, strict=True):
            a, b, c, d = (piece.astype(np.float64) for piece in pieces)
            step = b - a
            update += float(np.dot(step, step))
            weight += float(np.dot(b, b))
            step -= d - c
            difference += float(np.dot(step, step))
    finally:
        for file in files:
            file.__exit__()
    return math.sqrt(difference), math.sqrt(update), math.sqrt(weight)
