"""A placement made better by few swaps from the one there is. NumPy only; terms as in `plan`."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import numpy as np

NEAR = 0.0225  # no device is left that is fuller than this share above what is possible
CLOSED = -1  # in the place of a device's tokens: nothing helps it
PAIRED = 8  # experts of a device up to which two are swapped with two; above, single swaps come near enough


def near_enough(each: int) -> float:
    """Share above the possible at which a device of so many experts is left: what follows is lost when loads change.

    A swap has `each` squared pairs to choose from, so one alone can close a gap of that order; smaller gaps take many.
    The factor is from the drifting loads of benchmarks/expert_balance_plan.py.
    """
    return min(NEAR, 0.6 / each**2)


def improved(
    loads: np.ndarray,
    old: np.ndarray,
    devices: int,
    *,
    most: int | None = None,
    near: float | None = None,
    aligned: bool = False,
    nodes: int = 1,
) -> np.ndarray:
    """The placement int64 [E] after swaps of experts of the fullest device with another's, the best swap first.

    Where no swap of two experts helps and devices hold few, two are swapped with two. A device that nothing helps is
    set aside and the next one looked at: the fullest device is often one large expert, and what the others carry counts
    when loads change. What was set aside is looked at once more. No device ever gets fuller than the fullest was.

    Args:
        loads: integers [E]. old: int [E]. most: swaps of two experts to make at most.
        near: leave a device within this share of the mean, or of what its largest expert leaves possible; None: as
            `near_enough` says.
        aligned: swap between equal places of two devices only, so that where the optimizer's state of a device's
            experts is sharded over their copies, it stays on the ranks that hold that shard.
        nodes: of consecutive devices; experts do not leave their node.
    """
    each = len(loads) // devices
    at = np.argsort(old)  # [E] expert of each slot
    held = loads[at].reshape(devices, each)
    on = held.sum(1)
    above = 1 + (near_enough(each) if near is None else near)
    least = int(np.sort(loads)[: each - 1].sum())  # beside the largest expert of a device, at least this
    opened, count, changed = on.copy(), devices, False  # a device that is set aside has CLOSED there
    left = len(loads) ** 2 if most is None else most
    while left > 0:
        fullest = int(opened.argmax())
        if not count or on[fullest] * count <= above * (opened.sum() - CLOSED * (devices - count)):
            if not changed:
                break
            opened, count, changed = on.copy(), devices, False
            continue
        found = None
        if on[fullest] > above * (held[fullest].max() + least):
            found = _best(held, on, fullest, devices // nodes, aligned, left)
        if found is None:
            opened[fullest], count = CLOSED, count - 1
            continue
        go, to = found
        at[to] = at[go]
        held.flat[to] = loads[at[to]]
        for device in set((to // each).tolist()):
            on[device] = held[device].sum()
            if opened[device] != CLOSED:
                opened[device] = on[device]
        left, changed = left - len(go) // 2, True
    new = np.empty(len(loads), np.int64)
    new[at] = np.arange(len(loads))
    return new


Exchange = tuple[np.ndarray, np.ndarray]  # slots whose experts go, and where each goes


def _best(held: np.ndarray, on: np.ndarray, fullest: int, width: int, aligned: bool, left: int) -> Exchange | None:
    """The best exchange with devices of the same node, `width` devices wide; None: nothing helps, or is left to do."""
    each = held.shape[1]
    first = fullest // width * width
    held, on, fullest = held[first : first + width], on[first : first + width], fullest - first
    found = _best_swap(held, on, fullest, _subsets(each, 1), aligned) if left else None
    if found is None and left > 1 and each <= PAIRED:
        found = _best_swap(held, on, fullest, _subsets(each, 2), aligned)
    return found and (found[0] + first * each, found[1] + first * each)


@lru_cache(maxsize=64)
def _subsets(each: int, size: int) -> np.ndarray:
    """[S, size] all choices of so many of the places 0 .. each - 1."""
    return np.array(list(combinations(range(each), size)), np.int64).reshape(-1, size)


def _best_swap(held: np.ndarray, on: np.ndarray, fullest: int, places: np.ndarray, aligned: bool) -> Exchange | None:
    """The swap after which the fuller of the two devices is least full; None: none makes the fullest emptier.

    Args:
        held: [D, n] tokens of each slot; on: [D] their sums. places: [S, k] that may be swapped with as many.
    """
    if not len(places):
        return None
    sums = held if places.shape[1] == 1 else held[:, places].sum(-1)  # [D, S]
    if aligned:
        given = sums[fullest][None, None] - sums[None]  # [1, D, S]
    else:
        given = sums[fullest][:, None, None] - sums[None]  # [S, D, S]
    after = np.maximum(on[fullest] - given, on[:, None] + given)
    after[:, fullest] = on[fullest]
    best = int(after.argmin())
    if after.flat[best] >= on[fullest]:
        return None
    mine, rest = divmod(best, sums.size)
    other, theirs = divmod(rest, len(places))
    one = fullest * held.shape[1] + places[theirs if aligned else mine]
    two = other * held.shape[1] + places[theirs]
    return np.concatenate([one, two]), np.concatenate([two, one])
