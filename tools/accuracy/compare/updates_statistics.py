"""What largest, smallest, mean and L2 norm of a weight before and after a step tell about the update between.

The update itself is not in such a dump, nor its length. Known is how far each statistic moved on either side, and with
n values, s the size of an element's update, W the norm and M the largest magnitude of the weight, the two sides' moves
of one statistic may be apart by

    largest, smallest   base s + 4 eps M                                    4 s more where gradients differ
    mean                (base + sigmas g / sqrt(n)) s + 2 sigmas eps W / n
    norm                (base + sigmas g M / W + g sqrt(n) s / W) sqrt(n) s + 2 sigmas eps M

base is the strictest row of Table 2 and eps the unit roundoff of the weight's type. g = 2 sqrt(error of the gradient)
is what noise of the gradients may do to an update (updates.py): steps turned round, of either sign, which know
nothing of the weight, so that mean and norm see what independent signs leave of them; one turned at the largest value
moves that by 2 s. g is 0 where the gradients' statistics are the same, which is where the largest and smallest value
tell most. s is the largest move of a statistic, per element, of this weight or, if more, of the median weight in this
step. Where statistics are float32 numbers (msprobe's own), sums may be off by `SUMMED` of the norm.

From these follows how far off a whole update (a learning rate) would have to be to be seen. Where that is more than
`BLIND` of it, the update is unknown, not right. What changes places or cancels is never seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

import numpy as np

from tools.accuracy.dumps.read_items import Item
from tools.accuracy.promotion import ROUNDOFF
from tools.accuracy.tolerance import systematic, tolerance

BLIND = 0.5  # of an update that statistics may hide before it is called unknown
SUMMED = 1e-6  # of a norm that was summed in float32
ALIKE = 0.1  # of what decay or rate would do to a statistic that it may be off by, to be called one
STATISTICS = ("max", "min", "mean", "norm")
HIDDEN = "too small beside the rounding of max, min, mean and norm"
NOISE = "the gradients differ, which moves these statistics as much as a wrong update would"
NONE = "no finite statistics"


@dataclass(frozen=True)
class Seen:
    """An update as far as statistics tell it.

    Args:
        error, allowed: of the statistic that is off most: of its move, relative to what the update's size may move it.
        detail: that statistic.
        longer: by which share of itself the whole update differs; grown: by which share of the weight less it decays;
            None where it is no such difference.
        least: the smallest share of the update that would have been seen.
        unknown: why nothing can be said, or empty.
    """

    error: float = 0.0
    allowed: float = 0.0
    detail: str = ""
    longer: float | None = None
    grown: float | None = None
    least: float = 0.0
    unknown: str = ""


def size_of(before: Item, after: Item) -> float:
    """The size of an element's update, at least: by how much the statistics moved. 0 where there are none."""
    old, new = _numbers(before), _numbers(after)
    if old is None or new is None:
        return 0.0
    moves = np.abs(new - old)
    moves[3] /= math.sqrt(max(math.prod(before.shape), 1))
    return float(moves.max())


def typical(sizes: list[float]) -> float:
    """The median size of those that moved."""
    return median(size for size in sizes if size) if any(sizes) else 0.0


def judge_statistics(
    golden: tuple[Item, Item], bench: tuple[Item, Item], size: float, gradient_error: float, dtype: str
) -> Seen:
    """Compare two updates of one weight, each given by the weight before and after.

    Args:
        size: of the median weight's update in this step, an element of it.
        gradient_error: of this weight's gradient; 0 where its statistics are the same.
        dtype: the judged type.
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
        f"{STATISTICS[worst]} moved by {(other_new - other_old)[worst]:.6g}, should be {move[worst]:.6g}",
        least=least,
    )
    if shares[worst] <= 1:
        return found if least <= BLIND else Seen(unknown=NOISE if gradient_error else HIDDEN)
    longer, grown = (None, None) if gradient_error else _explained(old, move, apart, allowed)
    return Seen(found.error, found.allowed, found.detail, longer, grown, least)


def _numbers(item: Item) -> np.ndarray | None:
    """Its four statistics, or None where one is not a finite number."""
    values = item.statistics
    if len(values) != len(STATISTICS) or any(isinstance(value, bool) or value is None for value in values):
        return None
    numbers = np.array(values, np.float64)
    return numbers if np.isfinite(numbers).all() else None


def _allowed(
    old: np.ndarray, shape: tuple[int, ...], size: float, error: float, dtype: str
) -> tuple[np.ndarray, np.ndarray]:
    """(what an update of this size may move each statistic by, by how much the moves may be apart)."""
    root, eps, sigmas = math.sqrt(max(math.prod(shape), 1)), ROUNDOFF[dtype], systematic(dtype)[1]
    base, noise = tolerance(dtype, 1), 2 * math.sqrt(min(error, 1.0))
    norm, largest = max(old[3], 1e-300), max(abs(old[0]), abs(old[1]))
    summed = SUMMED * norm if float(np.float32(old[3])) == old[3] else 0.0
    extreme = (base + (4 if error else 0)) * size + 4 * eps * largest
    mean = (base + sigmas * noise / root) * size + 2 * sigmas * eps * norm / root**2 + summed / root
    length = (base + sigmas * noise * largest / norm + noise * root * size / norm) * root * size
    allowed = np.array([extreme, extreme, mean, length + 2 * sigmas * eps * largest + summed])
    return np.array([size, size, size, root * size]), np.maximum(allowed, 1e-300)


def _explained(
    old: np.ndarray, move: np.ndarray, apart: np.ndarray, allowed: np.ndarray
) -> tuple[float | None, float | None]:
    """(longer, grown), see `Seen`: a factor of the whole update, or of the weight, moves all statistics alike."""
    longer, misfit = _factor(move[:3], apart[:3], allowed[:3])  # the norm moves by the square of an update too
    grown, other = _factor(old, apart, allowed)
    return (longer, None) if misfit < other else (None, grown)


def _factor(cause: np.ndarray, apart: np.ndarray, allowed: np.ndarray) -> tuple[float | None, float]:
    """The one number that makes `apart` of `cause`, if there is one, and how far from it they are (inf without)."""
    place = int(np.argmax(np.abs(cause) / allowed))
    factor = apart[place] / cause[place] if cause[place] else 0.0
    rest = np.abs(apart - factor * cause)
    if not factor or np.any(rest > ALIKE * np.abs(factor * cause) + 2 * allowed):
        return None, math.inf
    return float(factor), float(np.max(rest / allowed))
