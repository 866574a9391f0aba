"""This module finds the best placement slowly: by trying every placement of a few experts, or by an integer program for
16 experts on 4 devices.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np


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
    """Return the same by an integer program in HiGHS: x[e, d] is 1 if device d holds expert e, and the bound t on every
    device's load is minimised.

    Raises:
        RuntimeError: not solved to the end in `seconds`.
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
