"""This module plans which device holds which expert of one layer. The module needs only NumPy.

A placement is int [E], logical expert -> slot; slot // (E / D) is the device. Loads are an array [E] with the number of
tokens of each logical expert. Every rank of the EP group waits for the fullest device, so a placement is judged by the
ratio max/mean: the tokens of the fullest device divided by the mean over all devices.

`improved` improves the present placement by a few swaps; other methods plan from scratch. `next_placement` decides
whether a layer's experts move at all, from the loads that `Prediction` expects.

All ranks plan for themselves and must come to the same placement, and so must a replay of the recorded loads: planners
compare whole numbers, whose sums are the same in any order, and among equal loads they take the lowest index.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import combinations
from typing import Any

import numpy as np

from plugins.expert_balance.settings import Settings

NEAR = 0.0225  # no device is left that is fuller than this share above what is possible
CLOSED = -1  # in the place of a device's tokens: nothing helps it
PAIRED = 8  # experts of a device up to which two are swapped with two; above, single swaps come near enough
FEW = 32  # experts
SHUFFLES = 2  # from which few experts are planned, too
PARTS = 256  # of a token: a prediction is rounded to them


def near_enough(each: int) -> float:
    """Return the relative amount by which the load of a device with `each` experts may exceed the best possible load
    before experts are moved. A smaller gain in balance is not worth a move of experts, because it is lost when the
    loads change.

    A swap has `each` squared pairs of experts to choose from, so a single swap can close a gap of the order 1 / `each`
    squared; closing a smaller gap takes many swaps. The factor was chosen for the drifting loads of
    benchmarks/expert_balance_plan.py.
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
    """Return the placement int64 [E] that results from swaps of experts between the fullest device and another device.
    Each swap of two experts is chosen so that afterwards the fuller of the two devices has the lowest possible load.

    If no swap of two experts helps and devices hold few experts, two experts are swapped with two experts. A device
    whose load no swap lowers is set aside, and the next fullest device is tried: the fullest device is often one with a
    very large expert, and the loads of the other devices matter when loads change. The devices that were set aside are
    tried once more at the end. No device ever gets more tokens than the fullest device had before.

    Args:
        loads: integers [E].
        old: int [E].
        most: the largest number of swaps of two experts.
        near: a device is not changed if its load is within this share of the mean, or of the best load that its largest
            expert allows; None: the share of `near_enough`.
        aligned: whether to swap only between equal positions of two devices, so that an optimizer state that is sharded
            over the copies of a device's experts stays on the ranks that hold the shard.
        nodes: the number of nodes, each of consecutive devices; experts do not leave their node.
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
    """Return the best exchange with one of the `width` devices of the same node; None if no exchange improves the
    balance, or if no moves are left.
    """
    each = held.shape[1]
    first = fullest // width * width
    held, on, fullest = held[first : first + width], on[first : first + width], fullest - first
    found = _best_swap(held, on, fullest, _subsets(each, 1), aligned) if left else None
    if found is None and left > 1 and each <= PAIRED:
        found = _best_swap(held, on, fullest, _subsets(each, 2), aligned)
    return found and (found[0] + first * each, found[1] + first * each)


@lru_cache(maxsize=64)
def _subsets(each: int, size: int) -> np.ndarray:
    """Return all choices of `size` of the slots 0 to each - 1, [S, size]."""
    return np.array(list(combinations(range(each), size)), np.int64).reshape(-1, size)


def _best_swap(held: np.ndarray, on: np.ndarray, fullest: int, places: np.ndarray, aligned: bool) -> Exchange | None:
    """Return the swap after which the fuller of the two devices has the lowest load; None if no swap lowers the load of
    the fullest device.

    Args:
        held: [D, n], the tokens of each slot.
        on: [D], the tokens of each device.
        places: [S, k], sets of slots; a set may be swapped with a set of the same size on another device.
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


def device_loads(loads: np.ndarray, slots: np.ndarray, devices: int) -> np.ndarray:
    """Return the tokens of each device, [..., D], for `loads` (tokens of each expert) and `slots` (the placement), both
    [..., E].
    """
    by_slot = np.empty_like(loads)
    np.put_along_axis(by_slot, slots, loads, axis=-1)
    return by_slot.reshape(*loads.shape[:-1], devices, -1).sum(-1)


def imbalance(loads: np.ndarray, slots: np.ndarray, devices: int) -> np.ndarray:
    """Return the imbalance of the devices for loads and slots [..., E]: the largest number of tokens of a device
    divided by the mean; a layer without tokens gives 1.
    """
    return fullest_over_mean(device_loads(loads, slots, devices))


def fullest_over_mean(on: np.ndarray) -> np.ndarray:
    """Return the largest of the devices' token counts `on`, [..., D], divided by their mean; return 1 for devices
    without tokens.
    """
    mean = on.mean(-1)
    return np.where(mean > 0, on.max(-1) / np.where(mean > 0, mean, 1), 1.0)


def bound(loads: np.ndarray, devices: int) -> float:
    """Return a lower bound on the tokens of the fullest device for any placement of experts with `loads` [E]: the
    larger of the mean over the devices, and the load of a device that holds the largest expert and otherwise the
    smallest experts.
    """
    ordered = np.sort(loads)
    beside = len(loads) // devices - 1
    return float(max(ordered.sum() / devices, ordered[-1] + ordered[:beside].sum()))


def moved(new: np.ndarray, old: np.ndarray, devices: int) -> int:
    """Return the number of experts that change device between two placements [..., E]."""
    each = new.shape[-1] // devices
    return int((new // each != old // each).sum())


def greedy(loads: np.ndarray, devices: int) -> np.ndarray:
    """Return the placement by the greedy rule: assign the experts in the order of falling loads, each to the device
    with the least load that has a free slot.
    """
    each = len(loads) // devices
    full, used = np.zeros(devices, loads.dtype), np.zeros(devices, np.int64)
    slots = np.empty(len(loads), np.int64)
    never = np.iinfo(np.int64).max if loads.dtype.kind == "i" else np.inf
    for expert in np.argsort(-loads, kind="stable"):
        device = int(np.where(used < each, full, never).argmin())
        slots[expert] = device * each + used[device]
        full[device] += loads[expert]
        used[device] += 1
    return slots


def swaps(
    loads: np.ndarray,
    old: np.ndarray,
    devices: int,
    *,
    most: int | None = None,
    near: float | None = None,
    aligned: bool = False,
) -> np.ndarray:
    """Return the placement that results if `improved` swaps experts of the current placement. If there are few experts,
    also try other starting placements, and return the best result if it is clearly better.

    With few experts, swaps can get stuck up to 2 % above the best placement; with many experts, another swap that helps
    is always found. The other starting placements are the result of `greedy` and two random placements: with them, a
    thousand random cases of 8 to 12 experts ended within 0.4 % of the best placement.
    """
    new = improved(loads, old, devices, most=most, near=near, aligned=aligned)
    if len(loads) > FEW or most is not None or aligned:
        return new
    others = [greedy(loads, devices), *(np.random.default_rng(k).permutation(len(loads)) for k in range(SHUFFLES))]
    ends = [new, *(improved(loads, start, devices, near=near) for start in others)]
    fullest = [int(device_loads(loads, slots, devices).max()) for slots in ends]
    gap = 1 + (near_enough(len(loads) // devices) if near is None else near)
    return ends[int(np.argmin(fullest))] if min(fullest) * gap < fullest[0] else new


def node_limited(
    loads: np.ndarray,
    old: np.ndarray,
    devices: int,
    nodes: int,
    *,
    most: int | None = None,
    aligned: bool = False,
) -> np.ndarray:
    """Balance nodes first, then the devices of each node, for a dispatch that sends a token once to each node that
    holds its experts.

    Args:
        loads, old, devices, most, aligned: as in `swaps`.
        nodes: the number of nodes, each of consecutive devices.
    """
    between = improved(loads, old, nodes, most=most, near=near_enough(len(loads) // devices), aligned=aligned)
    left = None if most is None else most - (moved(between, old, devices) + 1) // 2
    return improved(loads, between, devices, most=left, aligned=aligned, nodes=nodes)


class Prediction:
    """A `Prediction` predicts the loads of the next steps by an exponential moving average of the recorded loads.

    The same loads give the same prediction, bit for bit, so a resumed run and a replay make the same plans as the
    original run.

    Args:
        decay: the share of the old average that remains after a step.
    """

    def __init__(self, decay: float):
        self.decay = decay
        self.loads: np.ndarray | None = None

    def see(self, loads: np.ndarray) -> None:
        """Update the moving average with the loads [layers, E] of a step."""
        seen = np.asarray(loads, np.float64)
        self.loads = seen.copy() if self.loads is None else self.decay * self.loads + (1 - self.decay) * seen


def due(step: int, every: int) -> bool:
    """Return whether a new placement has to be planned after this step; if `every` is 0, no placement is ever
    planned.
    """
    return every > 0 and step % every == 0


def next_placements(
    settings: Settings, predicted: np.ndarray, old: np.ndarray, devices: int, *, step: int, nodes: int = 1
) -> np.ndarray:
    """Return the next placements int64 [layers, E] of all layers, each from `next_placement`.

    Args:
        predicted: `Prediction.loads`, which include those of this step.
        old: int [layers, E], the present placement.
    """
    rows = enumerate(zip(predicted, old, strict=True))
    return np.stack([next_placement(settings, *row, devices, step=step, layer=at, nodes=nodes) for at, row in rows])


def next_placement(
    settings: Settings,
    predicted: np.ndarray,
    old: np.ndarray,
    devices: int,
    *,
    step: int,
    layer: int,
    nodes: int = 1,
) -> np.ndarray:
    """Return the next placement int64 [E] of a layer; a live run and a replay both call this function.

    Args:
        predicted: [E], a row of `Prediction.loads`.
        old: int [E], the present placement.
        devices: the number of ranks of the EP group.
        step: the step after which the plan is made; used only as a seed of `method: random`.
        layer: the row of the layer; used only as a seed of `method: random`.
        nodes: see `node_limited`; 1 if an expert may be on any device. It applies to the methods swaps and aligned; if
            such a plan does not pass the gate, a plan that balances only the devices is tried.

    Returns:
        A new placement if it lowers max/mean of `predicted` by at least the gate's share, otherwise `old` (random:
            always a new shuffle).
    """
    old = np.asarray(old, np.int64)
    if settings.method == "random":
        return np.random.default_rng([step, layer]).permutation(len(old))
    loads = np.rint(np.asarray(predicted, np.float64) * PARTS).astype(np.int64)
    most = None if settings.moves is None else settings.moves // 2
    limits: dict[str, Any] = {"most": most, "aligned": settings.method == "aligned"}
    plans = [partial(swaps, loads, old, devices, **limits)]
    if settings.method == "greedy":
        plans = [partial(greedy, loads, devices)]
    elif nodes > 1:  # nodes may be even, or become so, while the fullest device stays as full, at each plan again
        plans = [partial(node_limited, loads, old, devices, nodes, **limits), *plans]
    before = int(device_loads(loads, old, devices).max())
    for plan in plans:
        new = plan()
        after = int(device_loads(loads, new, devices).max())
        if before - after >= settings.gate * before and after < before:
            return new
    return old
