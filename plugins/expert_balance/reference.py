"""This module plans placements and copies of experts slowly, as a reference for tests of the real planners. The module
finds the best placement by trying every placement of a few experts, or by an integer program for 16 experts on 4
devices. The module plans copies by counting every device anew for each possible copy, or by trying every way to fill
the spare slots, and it chooses the slot of each token one by one.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, product

import numpy as np

from plugins.expert_balance.copies import NOTHING


def least_by_trying(loads: np.ndarray, devices: int) -> float:
    """Return the load of the fullest device in the best of all placements, found by trying all; this works for about
    ten experts.

    Args:
        loads: [E] tokens.
    """
    each = len(loads) // devices

    @cache
    def best(left: tuple[int, ...]) -> float:
        if not left:
            return 0
        first, rest = left[0], left[1:]  # who shares the device of the first one; devices have no names
        found = float("inf")
        for others in combinations(rest, each - 1):
            here = loads[first] + sum(loads[expert] for expert in others)
            found = min(found, max(here, best(tuple(expert for expert in rest if expert not in others))))
        return found

    return best(tuple(range(len(loads))))


def least_by_program(loads: np.ndarray, devices: int, seconds: float = 60.0) -> float:
    """Return the load of the fullest device in the best of all placements, computed by an integer program in HiGHS:
    x[e, d] is 1 if device d holds expert e, and the bound t on every device's load is minimised.

    Raises:
        RuntimeError: the problem was not solved within `seconds`.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    experts, each = len(loads), len(loads) // devices
    x = np.eye(experts * devices, experts * devices + 1).reshape(experts, devices, -1)
    t = np.eye(1, experts * devices + 1, experts * devices)[0]
    upper = np.ones(experts * devices + 1)
    upper[-1] = loads.sum()
    for rank, expert in enumerate(
        np.argsort(-loads)[:devices]
    ):  # devices have no names: the k-th largest on the first k
        upper[: experts * devices].reshape(experts, devices)[expert, rank + 1 :] = 0
    found = milp(
        t,
        constraints=[
            LinearConstraint(x.sum(1), 1, 1),
            LinearConstraint(x.sum(0), each, each),
            LinearConstraint(np.tensordot(loads, x, axes=1) - t, -np.inf, 0),
        ],
        integrality=1 - t,
        bounds=Bounds(0, upper),
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if found.status:
        raise RuntimeError(f"HiGHS: {found.message}")
    return float(found.fun)


def _held(slots: list[int], copies: list[int], devices: int) -> list[list[int]]:
    each, spare = len(slots) // devices, len(copies) // devices
    own = [[expert for expert, slot in enumerate(slots) if slot // each == device] for device in range(devices)]
    more = [
        [one for one in copies[device * spare : (device + 1) * spare] if one != NOTHING] for device in range(devices)
    ]
    return [first + then for first, then in zip(own, more, strict=True)]


def _counted(loads: list[int], held: list[list[int]]) -> list[int]:
    """Return the tokens of each device if the tokens of each expert are dealt to all devices that hold the expert, in
    whole parts rounded up.
    """
    devices = [sum(expert in here for here in held) for expert in range(len(loads))]
    return [sum((loads[expert] + devices[expert] - 1) // devices[expert] for expert in here) for here in held]


def planned_slowly(loads: list[int], slots: list[int], devices: int, spare: int, least: float = 0.0) -> list[int]:
    """Return the same result as `plugins.expert_balance.copies.planned`, computed by counting every device anew for
    each possible copy.
    """
    copies = [NOTHING] * (devices * spare)
    while True:
        held = _held(slots, copies, devices)
        before = _counted(loads, held)
        full = before.index(max(before))
        found = []
        for expert in sorted(held[full]):
            for device in range(devices):
                row = copies[device * spare : (device + 1) * spare]
                if NOTHING in row and expert not in held[device]:
                    trial = copies.copy()
                    trial[device * spare + row.index(NOTHING)] = expert
                    after = _counted(loads, _held(slots, trial, devices))
                    found.append((max(after[full], after[device]), expert, device, trial))
        if not found:
            return copies
        best, _, _, trial = min(found)
        if best >= before[full] or before[full] - best < least * before[full]:
            return copies
        copies = trial


def divided_slowly(loads: list[int], devices: int, spare: int) -> list[int]:
    """Return the same result as `plugins.expert_balance.copies.divided`, computed by dividing all loads anew for each
    copy.
    """
    count = [1] * len(loads)
    for _ in range(devices * spare):
        left = [(loads[e] + count[e] - 1) // count[e] if count[e] < devices else -1 for e in range(len(loads))]
        count[left.index(max(left))] += 1
    return [(load + some - 1) // some for load, some in zip(loads, count, strict=True)]


def least_with_copies(loads: list[int], slots: list[int], devices: int, spare: int) -> int:
    """Return the tokens of the fullest device with the best of all choices of copies, found by trying every choice."""
    found = max(_counted(loads, _held(slots, [NOTHING] * (devices * spare), devices)))
    for copies in product(range(NOTHING, len(loads)), repeat=devices * spare):
        held = _held(slots, list(copies), devices)
        if all(len(set(here)) == len(here) for here in held):
            found = min(found, max(_counted(loads, held)))
    return found


def chosen_slowly(homes: list[int], slots: list[int], copies: list[int], devices: int, rank: int) -> list[int]:
    """Return the same result as `plugins.expert_balance.copies.Table.choose`, computed one (token, expert) pair after
    the other.
    """
    each, spare = len(slots) // devices, len(copies) // devices
    seen, found = dict.fromkeys(homes, rank), []
    for home in homes:
        places = [home // each * (each + spare) + home % each]
        for at, expert in enumerate(copies):
            if expert != NOTHING and slots[expert] == home:
                places.append(at // spare * (each + spare) + each + at % spare)
        found.append(places[seen[home] % len(places)])
        seen[home] += 1
    return found
