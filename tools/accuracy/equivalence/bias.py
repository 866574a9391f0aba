"""Compare the biases that steer the routers' choices (aux-free balance), and the loads by which they move.

After each step an expert's bias goes up by a fixed rate if it got less than its share of the choices of all ranks, and
down if it got more. That is exact, save that a token at a tie between two experts may go to the other one, and so turn
the move of an expert whose load is next to its share. So loads are recorded as well: the biases of two runs must be
equal wherever both runs' loads say that they moved alike, and each must have moved as its own loads say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tools.accuracy.equivalence.runs import BIAS, LOAD, Trained

# share of a step's choices that ties may move between experts: as what they do to the auxiliary loss
MOVED = 2e-3
AT_SHARE = 1e-5  # relative; a float32 mean of ones and zeros errs by less, one choice of a step weighs more


@dataclass(frozen=True)
class Row:
    """One comparison of a router: it is wrong if `error` is over `allowed`."""

    step: int
    router: str
    tensor: str
    error: float
    allowed: float
    detail: str


def bias_rows(run: Trained, reference: Trained) -> Iterator[Row]:
    """For each router that has a bias: the loads of each step, then how the biases moved, then where they ended."""
    for name in (name.removeprefix(BIAS) for name in reference.state if name.startswith(BIAS)):
        loads, wants = (side.state[LOAD + name].astype(np.float64) for side in (run, reference))
        for step, (load, want) in enumerate(zip(loads, wants, strict=True), 1):
            moved = float(np.abs(load - want).sum() / 2 / want.sum())
            moved = moved if np.isfinite(moved) else np.inf
            yield Row(step, name, "loads of experts", moved, MOVED, f"{moved:.2%} of the choices are others")
        got, bias = run.state[BIAS + name], reference.state[BIAS + name]
        directions = np.sign(np.diff(got, axis=0)) == _directions(loads)
        yield from _wrong(name, "moves of the bias", directions | _at_share(loads), "not towards its share of the load")
        alike = (_directions(loads) == _directions(wants)) & ~_at_share(loads) & ~_at_share(wants)
        equal = (got[1:] == bias[1:]) | ~np.logical_and.accumulate(alike, axis=0)
        yield from _wrong(name, "bias", equal & (got[0] == bias[0]), "another than the reference's")


def _directions(loads: np.ndarray) -> np.ndarray:
    """+1 where an expert got less than its share, so that its bias has to rise; -1 where it got more."""
    return np.where(_at_share(loads), 0.0, np.sign(loads.mean(-1, keepdims=True) - loads))


def _at_share(loads: np.ndarray) -> np.ndarray:
    """Where rounding decides the direction."""
    share = loads.mean(-1, keepdims=True)
    return np.abs(loads - share) <= AT_SHARE * share


def _wrong(router: str, tensor: str, right: np.ndarray, what: str) -> Iterator[Row]:
    """One row for an array [steps, experts] of what is right."""
    steps, experts = np.nonzero(~right)
    first = int(steps[0]) + 1 if len(steps) else len(right)
    detail = f"experts {sorted(set(experts[steps == first - 1].tolist()))}: {what}" if len(steps) else ""
    yield Row(first, router, tensor, float(len(steps)), 0.0, detail)
