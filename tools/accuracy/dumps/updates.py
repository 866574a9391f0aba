"""This module checks whether the optimizer made the same updates in two dumped runs. The weights themselves do not show
a wrong update, because a step usually changes a weight by a thousandth of its size or less.

**From dumped values**, let u be the update of GOLDEN, d the update of BENCH minus u, and w the weight before the step,
with L2 norms over the parameter. Two conditions are checked:

    the whole        |d| / |u|           <=  base + 2 sqrt(error of the gradient)
    along the weight |<d, v>| / |v| |u|  <=  base + sigmas sqrt(sum(v^2 d^2)) / |v| |u|       v = w - u <w, u> / <u, u>

`base` is the strictest row of Table 2, plus rounding: twice the unit roundoff of the weight's type times |w| / |u|. The
other terms allow for errors of the gradients (0 if these are bit-identical): Adam divides a gradient by its own size,
so if a gradient is smaller than its error, the update may have either sign.

The term with the root is a mean over many elements. In a small parameter, a single element whose update has the wrong
sign exceeds it (one of 2,700 elements gives |d| / |u| = 0.038), which happens in about one of some hundred parameters.
If gradients differ, the `TURNED` elements that differ most are therefore each allowed 2 max|u|, the distance between
the two signs. Of n elements about n e / 5 change their sign, where e is the error of the gradient, and the term with
the root allows for n e of them: the chance that more than n e + TURNED elements do so is below 1e-9 (a Poisson
variable). A wrong value of any other size, and errors in more elements than these, still count in full.

On another platform every gradient has an error, and the noise that the first condition allows for is larger than the
effect of weight decay. But noise of independent signs cancels along the weight, as in `errors.scaled`, where the effect
of weight decay lies. The component is that along v and not along w, because noise also shortens an update as a whole,
and an update is not exactly orthogonal to its weight.

If an update passes with these terms, the new weight also passes, provided that it was right one step earlier: an
element whose update has changed its sign by noise differs by more than Table 2 allows. The error of a gradient is the
largest error of its dumps so far; without gradients of parameters (L1, L2), of any tensor in the backward pass.

**From dumped statistics**, an update is judged by how largest value, smallest value, mean and L2 norm of the weight
change. With n values, s the size of an element's update, W the norm and M the largest magnitude of the weight, the
changes on the two sides may differ by

    largest, smallest   base s + 4 eps M                                    4 s more where gradients differ
    mean                (base + sigmas g / sqrt(n)) s + 2 sigmas eps W / n
    norm                (base + sigmas g M / W + g sqrt(n) s / W) sqrt(n) s + 2 sigmas eps M

Here base is the strictest row of Table 2, eps the unit roundoff of the weight's type, and g = 2 sqrt(error of the
gradient), 0 if the gradients' statistics are the same: noise reverses the steps of some elements, with signs that
largely cancel in mean and norm; a reversed step of the largest element changes the largest value by 2 s. The size s is
the largest change of a statistic, per element, of this weight, or that of the median weight in this step if it is
larger. If statistics are float32 numbers (as msprobe's own), sums may be wrong by `SUMMED` of the norm.

If a whole update (a learning rate) must be wrong by more than `BLIND` of itself to be found, it counts as unknown, not
as right. Values that change places, and differences that cancel, are never found.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np

from tools.accuracy.dumps.read import BACKWARD, WEIGHTS, Item, NpyFile, pieces
from tools.accuracy.dumps.rows import SCALED, UPDATE, VALUE, Pair, Row, judged_type
from tools.accuracy.judge import ROUNDOFF, systematic, tolerance

BLIND = 0.5  # of an update that statistics may hide before it is called unknown
SUMMED = 1e-6  # of a norm that was summed in float32
ALIKE = 0.1  # of what decay or rate would do to a statistic that it may be off by, to be called one
STATISTICS = ("max", "min", "mean", "norm")
HIDDEN = "too small beside the rounding of max, min, mean and norm"
NOISE = "the gradients differ, which moves these statistics as much as a wrong update would"
NONE = "no finite statistics"
MOST = 0.7  # share of an error along the weight from which it is called weight decay
STRAIGHT = 0.95  # share of an error along GOLDEN's own update from which it is called the learning rate
DECAY = "weight decay"
WRONG = "the weight itself differs"
ONCE = "the dumps show the weight in one step only"
TURNED = 6  # elements whose step noise of the gradient may have turned round, beyond those that the mean allows
RATE = "learning rate, or what else makes a whole update longer"


@dataclass(frozen=True)
class Seen:
    """A `Seen` compares one weight's update in two dumps that hold only its statistics."""

    error: float = 0.0  # of the worst statistic, relative to the change that an update of this size can cause
    allowed: float = 0.0
    detail: str = ""  # about that statistic
    longer: float | None = None  # the relative difference of the updates' lengths, if that explains the difference
    grown: float | None = None  # the share of the weight by which decay is too small, if that explains the difference
    least: float = 0.0  # the smallest relative error of the update that the statistics would have shown
    unknown: str = ""  # the reason why the update cannot be judged; "" if it can


def size_of(before: Item, after: Item) -> float:
    """Return a lower bound on the largest change of an element in an update of a weight; return 0 if the dump has no
    statistics of the weight.
    """
    old, new = _numbers(before), _numbers(after)
    if old is None or new is None:
        return 0.0
    moves = np.abs(new - old)
    moves[3] /= math.sqrt(max(math.prod(before.shape), 1))
    return float(moves.max())


def judge_statistics(
    golden: tuple[Item, Item], bench: tuple[Item, Item], size: float, gradient_error: float, dtype: str
) -> Seen:
    """Compare the updates of one weight in two runs, from the weight's statistics before and after the step. `size` is
    the median, over the weights of this step and rank, of a lower bound on the largest change of an element
    (`size_of`). `gradient_error` is 0 if the statistics of the gradients are the same in both runs.
    """
    numbers = [_numbers(item) for item in (*golden, *bench)]
    if any(each is None for each in numbers):
        return Seen(unknown=NONE)
    old, new, other_old, other_new = (each for each in numbers if each is not None)
    move, apart = new - old, (other_new - other_old) - (new - old)
    if not apart.any():
        return Seen()
    size = max(size, size_of(*golden))
    scale, allowed = _allowed(old, golden[0].shape, size, gradient_error, dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.abs(apart) / allowed
        least = float(np.min(np.where(move, allowed / np.abs(move), np.inf)))
    worst = int(shares.argmax())
    found = Seen(
        float(abs(apart[worst]) / scale[worst]) if scale[worst] else math.inf,
        float(allowed[worst] / scale[worst]) if scale[worst] else 0.0,
        f"{STATISTICS[worst]} moved by {(other_new - other_old)[worst]:.6g}, but must move by {move[worst]:.6g}",
        least=least,
    )
    if shares[worst] <= 1:
        return found if least <= BLIND else Seen(unknown=NOISE if gradient_error else HIDDEN)
    if gradient_error:
        return found
    # a factor of the whole update, or of the weight, moves all statistics alike; the norm by an update's square, too
    longer, misfit = _factor(move[:3], apart[:3], allowed[:3])
    grown, other = _factor(old, apart, allowed)
    return replace(found, longer=longer) if misfit < other else replace(found, grown=grown)


def _numbers(item: Item) -> np.ndarray | None:
    """Return the four statistics of a tensor; None if one of them is not a finite number."""
    values = item.statistics
    if len(values) != len(STATISTICS) or any(isinstance(value, bool) or value is None for value in values):
        return None
    numbers = np.array(values, np.float64)
    return numbers if np.isfinite(numbers).all() else None


def _allowed(
    old: np.ndarray, shape: tuple[int, ...], size: float, error: float, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest change of each statistic in such an update, and the allowed difference of the two dumps."""
    root, eps, sigmas = math.sqrt(max(math.prod(shape), 1)), ROUNDOFF[dtype], systematic(dtype)[1]
    base, noise = tolerance(dtype, 1), 2 * math.sqrt(min(error, 1.0))
    norm, largest = max(old[3], 1e-300), max(abs(old[0]), abs(old[1]))
    summed = SUMMED * norm if float(np.float32(old[3])) == old[3] else 0.0
    extreme = (base + (4 if error else 0)) * size + 4 * eps * largest
    mean = (base + sigmas * noise / root) * size + 2 * sigmas * eps * norm / root**2 + summed / root
    length = (base + sigmas * noise * largest / norm + noise * root * size / norm) * root * size
    allowed = np.array([extreme, extreme, mean, length + 2 * sigmas * eps * largest + summed])
    return np.array([size, size, size, root * size]), np.maximum(allowed, 1e-300)


def _factor(cause: np.ndarray, apart: np.ndarray, allowed: np.ndarray) -> tuple[float | None, float]:
    """Return the factor by which `apart` is a multiple of `cause`, and the largest deviation as a share of its
    tolerance; (None, inf) if there is none.
    """
    place = int(np.argmax(np.abs(cause) / allowed))
    factor = apart[place] / cause[place] if cause[place] else 0.0
    rest = np.abs(apart - factor * cause)
    if not factor or np.any(rest > ALIKE * np.abs(factor * cause) + 2 * allowed):
        return None, math.inf
    return float(factor), float(np.max(rest / allowed))


@dataclass
class Updates:
    """An `Updates` counts the weight updates that were judged, and those that could not be."""

    judged: int = 0  # the number of judged updates
    exact: int = 0  # the number of updates that were judged from all values
    unknown: Counter[str] = field(default_factory=Counter)  # the number of updates that were not judged, by the reason
    least: list[float] = field(default_factory=list)  # `Seen.least` of each update that was judged by statistics


def judge_updates(pairs: list[Pair], rows: list[Row | None]) -> tuple[list[Row | None], Updates]:
    """Return `rows` with each wrong update marked, and the numbers of judged updates; `pairs` are in order of steps."""
    rows, updates = list(rows), Updates()
    steps, once = _steps(pairs, rows)
    updates.unknown += Counter({ONCE: once} if steps and once else {})
    sizes: dict[tuple[int, int], list[float]] = {}  # of the updates in one step of one rank, where values are not known
    for one, two, _ in steps:
        before, after = pairs[one], pairs[two]
        if not _files(before, after) and (size := size_of(*_items(before, after)[0])):
            sizes.setdefault((after.step, after.rank), []).append(size)
    for one, two, gradient_error in steps:
        before, after = pairs[one], pairs[two]
        if _files(before, after):
            updates.judged += 1
            updates.exact += 1
            rows[two] = _judged(before, after, rows[one], rows[two], gradient_error)
        else:
            size = median(sizes.get((after.step, after.rank), [0.0]))
            rows[two] = _by_statistics(before, after, rows[one], rows[two], gradient_error, size, updates)
    return rows, updates


def _steps(pairs: list[Pair], rows: list[Row | None]) -> tuple[list[tuple[int, int, float]], int]:
    """Return the indices of the two rows, with the error of the gradients between, of each trained weight that was
    dumped in two steps; and the number of those dumped in one step only.
    """
    gradients: dict[tuple, float] = {}  # the largest error so far
    backward: dict[int, float] = {}  # the same of a rank's backward pass
    last: dict[tuple, int] = {}  # where the same weight was seen before
    found = []
    for index, (pair, row) in enumerate(zip(pairs, rows, strict=True)):
        entry, item = pair.sides
        if row is None or item is None or pair.golden is None or pair.bench is None:
            continue
        key = _key(pair, row)
        if row.phase == BACKWARD:
            backward[row.rank] = max(backward.get(row.rank, 0.0), row.error)
        if item.role == "gradient":
            gradients[key] = max(gradients.get(key, 0.0), row.error)
        elif item.role == "parameters" and row.phase == WEIGHTS and entry.name.call == 0:
            if key in last:
                found.append((last[key], index, gradients.get(key, backward.get(row.rank, 0.0))))
            last[key] = index
    return found, len(last.keys() - {_key(pairs[one], rows[one]) for one, _, _ in found})


def _key(pair: Pair, row: Row | None) -> tuple[int, str, str]:
    entry, item = pair.sides
    assert row is not None and item is not None
    return row.rank, entry.name.path, item.parameter


def _items(before: Pair, after: Pair) -> tuple[tuple[Item, Item], tuple[Item, Item]]:
    """Return the weight before and after an update in GOLDEN, and then in BENCH."""
    sides = [side[1] for side in (before.golden, after.golden, before.bench, after.bench) if side and side[1]]
    assert len(sides) == 4, "_steps takes weights that both sides have"
    return (sides[0], sides[1]), (sides[2], sides[3])


def _files(before: Pair, after: Pair) -> list[Path]:
    """Return the four files with the values; empty if one of them was not dumped."""
    files = [item.file for side in _items(before, after) for item in side if item.file]
    return files if len(files) == 4 else []


def _by_statistics(
    before: Pair, after: Pair, old: Row | None, row: Row | None, gradient_error: float, size: float, updates: Updates
) -> Row:
    """Return the row of a weight whose values are unknown, and count in `updates` how it was judged."""
    assert old is not None and row is not None
    golden, bench = _items(before, after)
    if row.kind not in ("", VALUE, SCALED) or old.kind not in ("", UPDATE):
        updates.unknown[WRONG] += 1
        return row
    seen = judge_statistics(golden, bench, size, gradient_error, judged_type(golden[0].dtype, row.dtype))
    if seen.unknown:
        updates.unknown[seen.unknown] += 1
        return row
    updates.judged += 1
    updates.least += [seen.least] if 0 < seen.least < math.inf else []  # infinite where GOLDEN did not move
    if seen.error <= seen.allowed:
        explained = row.kind == VALUE and gradient_error
        numbers = {"error": seen.error, "tolerance": seen.allowed, "by": "update"}
        return replace(row, kind="", detail="", **numbers) if explained else row  # type: ignore[arg-type]
    cause, more = "", ""
    if seen.longer is not None:
        cause, more = RATE, f": {1 + seen.longer:.4g} times as long as GOLDEN's"
    elif seen.grown is not None:
        cause, more = DECAY, f": {_decay(seen.grown)}"
    detail = f"the update since step {before.step} is not the same by statistics: {seen.detail}{more}"
    return replace(row, kind=UPDATE, error=seen.error, tolerance=seen.allowed, detail=detail, by="update", cause=cause)


def _judged(before: Pair, after: Pair, old: Row | None, row: Row | None, gradient_error: float) -> Row:
    assert old is not None and row is not None
    if row.kind not in ("", VALUE, SCALED) or not (row.error or old.error):
        return row  # the weight itself is wrong, or all four are bit-identical
    moved = measure_update(*_files(before, after))
    item = after.sides[1]
    dtype = judged_type(item.dtype if item else "", row.dtype)
    base = tolerance(dtype, 1) + (2 * ROUNDOFF[dtype] * moved.weight / moved.update if moved.update else 0.0)
    whole = base + 2 * math.sqrt(min(gradient_error, 1.0))
    along = base + systematic(dtype)[1] * moved.by_chance
    error, allowed, how, cause, more = moved.steady if gradient_error else moved.error, whole, "L2 norm", "", ""
    if moved.along > along and (error <= whole or moved.along > MOST * moved.error):
        error, allowed, how, cause = moved.along, along, f"along the weight: {_decay(moved.grown)}", DECAY
    elif abs(moved.longer) > STRAIGHT * moved.error:
        cause, more = RATE, f": {1 + moved.longer:.4g} times as long as GOLDEN's"
    if error <= allowed:
        explained = row.kind == VALUE and not old.kind and gradient_error
        return replace(row, kind="", error=error, tolerance=allowed, detail="", by="update") if explained else row
    if row.kind and old.kind not in ("", UPDATE):
        return row  # it started from a wrong weight
    detail = f"the update since step {before.step} is off by {error:.3g} of itself ({how}){more}"
    return replace(row, kind=UPDATE, error=error, tolerance=allowed, detail=detail, by="update", cause=cause)


def _decay(grown: float) -> str:
    word = "less" if grown > 0 else "more"
    return f"BENCH decays it by {abs(grown):.2g} of itself {word} than GOLDEN"


@dataclass(frozen=True)
class Moved:
    """A `Moved` compares one weight's update in two dumps that hold all values; the module's docstring defines u, d and
    v.
    """

    update: float  # |u|
    weight: float  # |w|
    error: float  # |d|
    steady: float  # |d|, with what `TURNED` steps that were turned round explain left out
    along: float  # |<d, v>| / |v|
    by_chance: float  # the standard deviation of `along` if the signs of d are independent
    grown: float  # <d, v> / <v, v>
    longer: float = 0.0  # <d, u> / <u, u>


def measure_update(old: Path, new: Path, other_old: Path, other_new: Path) -> Moved:
    """Compare an update of a weight in two runs; the errors are infinite if only the second run changed the weight."""
    sums = np.zeros((3, 3))  # of products of u, d, w
    squares = np.zeros((2, 2))  # of products of u d and w d
    farthest, step = np.zeros(TURNED), 0.0  # the largest |d|, and max |u|
    with ExitStack() as stack:
        files = [stack.enter_context(NpyFile(path)) for path in (old, new, other_old, other_new)]
        for four in pieces(*files):
            w, b, c, e = (piece.astype(np.float64) for piece in four)
            u = b - w
            d = (e - c) - u
            three, two = np.stack((u, d, w)), np.stack((u * d, w * d))
            sums += three @ three.T
            squares += two @ two.T
            farthest = np.sort(np.concatenate((farthest, np.abs(d))))[-TURNED:]
            step = max(step, float(np.abs(u).max(initial=0.0)))
    update, error, weight = (math.sqrt(each) for each in np.diag(sums))
    if not update or not error:
        share_of_all = math.inf if error else 0.0
        return Moved(update, weight, share_of_all, share_of_all, 0.0, 0.0, 0.0)
    left = np.maximum(farthest - 2 * step, 0.0)
    steady = math.sqrt(max(sums[1, 1] - farthest @ farthest + left @ left, 0.0))
    share, longer = sums[0, 2] / sums[0, 0], sums[0, 1] / sums[0, 0]
    v = math.sqrt(max(sums[2, 2] - share * sums[0, 2], 0.0))
    if v < 1e-6 * weight or not v:  # the update is along the weight: `error` tells
        return Moved(update, weight, error / update, steady / update, 0.0, 0.0, 0.0, longer)
    along = sums[1, 2] - share * sums[0, 1]
    chance = math.sqrt(max(squares[1, 1] - 2 * share * squares[0, 1] + share**2 * squares[0, 0], 0.0))
    shares = (error / update, steady / update, abs(along) / v / update, chance / v / update)
    return Moved(update, weight, *shares, along / v**2, longer)
