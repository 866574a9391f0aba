"""The layouts that cannot be told apart within the estimator's error, and the cheapest experiment that would tell.

The estimator's terms (`terms`) are drawn 4,096 times, each draw the same for all layouts: what they have in common
cancels, what one of them rests on more than another does not. The share of the draws in which a layout is the
fastest is how likely it is, as far as the terms' errors go; layouts with a share of 5 % belong to the set. A term's
experiment is worth how much likelier the first choice is right once the term is known: the mean, over its values, of
the largest share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tools.search.sensitivity.terms import TERMS, Term

DRAWS, SEED = 4096, 0
LEAST_SHARE = 0.05  # of the draws, for a layout to be in the set
_ALIKE = 1e-3  # relative: times this near are equal, and share the draw
_BINS = 16  # of a term's values
_WORTH = 0.05  # an experiment that makes the choice less than this likelier to be right tells nothing
_NEARLY = 0.8  # of the best experiment's worth is as good, where it needs fewer devices


@dataclass(frozen=True)
class Experiment:
    """What would tell.

    Args:
        right: how likely the choice is right after it.
        devices: that it needs.
    """

    term: Term
    right: float
    devices: int


@dataclass(frozen=True)
class Doubt:
    """How sure a choice is.

    Args:
        names: of the layouts, the fastest first.
        shares: of the draws in which each is the fastest; they add up to 1.
        experiment: None where there is no doubt, or where no single term would tell.
        steps: devices that a step of each of the set needs, with as few data-parallel copies as it can have.
        error: mean error of step times that was drawn; `known` says whether published runs tell it.
        whole: whether no other layout of the space can be the fastest, by the estimator's bounds; where some were never
            placed, nothing is said of the space.
    """

    names: tuple[str, ...]
    shares: tuple[float, ...]
    experiment: Experiment | None
    error: float
    known: bool
    steps: int = 0
    whole: bool = False

    @property
    def alike(self) -> list[tuple[str, float]]:
        """The set that cannot be told apart, (name, share), the likeliest first."""
        pairs = zip(self.names, self.shares, strict=True)
        return sorted((pair for pair in pairs if pair[1] >= LEAST_SHARE), key=lambda pair: -pair[1])

    def lines(self) -> list[str]:
        """Sentences."""
        of = f"{'the known error' if self.known else 'an assumed error'} of {100 * self.error:.1f} % on average"
        alike = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in self.alike)
        if len(self.alike) == 1 and self.whole:
            return [f"the choice holds within {of}, drawn term by term alike for all layouts: fastest is {alike}"]
        if len(self.alike) == 1:
            return [
                f"of the layouts that were placed the fastest is {alike}, within {of}, drawn term by term alike for "
                "all; this says nothing of layouts that were not placed"
            ]
        among = "" if self.whole else " among those that were placed"
        words = [
            f"cannot be told apart within {of}{among}: {alike}; shares of {DRAWS:,} draws of the estimator's terms, "
            "alike for all layouts, in which each is the fastest"
        ]
        if self.experiment is None:
            names = ", ".join(name for name, _ in self.alike)
            return [
                *words,
                f"no single term would tell them apart: the cheapest experiment is one step of each of {names}, with "
                f"as little data parallelism as their experts need, on {self.steps:,} devices",
            ]
        one = self.experiment
        devices = f"{one.devices} devices" if one.devices > 1 else "one device"
        return [
            *words,
            f"the cheapest experiment that would tell: {one.term.experiment} on {devices} ({one.term.name}); with it "
            f"the choice{among} is right in {100 * one.right:.0f} % instead of {100 * max(self.shares):.0f} %",
        ]

    def as_json(self) -> dict[str, Any]:
        """For `--json`."""
        one = self.experiment
        told = one and {"term": one.term.name, "what": one.term.experiment, "devices": one.devices, "right": one.right}
        return {
            "error": self.error,
            "error_is_known": self.known,
            "draws": DRAWS,
            "shares": dict(zip(self.names, self.shares, strict=True)),
            "cannot_be_told_apart": [name for name, _ in self.alike],
            "of_the_whole_space": self.whole,
            "experiment": told,
            "step_devices": self.steps or None,
        }


def doubt(
    names: Sequence[str],
    seconds: Sequence[float],
    slope: np.ndarray,
    node: int,
    error: float,
    known: bool = True,
    devices: Sequence[int] = (),
    terms: Sequence[Term] = TERMS,
    whole: bool = False,
) -> Doubt:
    """How sure it is that the fastest is the fastest.

    Args:
        seconds: predicted, of each layout.
        slope: [layouts, terms] of ln(seconds), scaled to the error.
        node: devices of a node.
        error, known, whole: as `Doubt`.
        devices: that a step of each layout needs at least.
    """
    drawn = np.random.default_rng(SEED).standard_normal((DRAWS, slope.shape[1]))
    times = np.log(np.asarray(seconds)) + drawn @ slope.T
    first = times <= times.min(axis=1, keepdims=True) + _ALIKE
    wins = first / first.sum(axis=1, keepdims=True)
    shares = wins.mean(axis=0)
    experiment, steps = None, 0
    if (shares >= LEAST_SHARE).sum() > 1:
        right = [_right_after(wins, drawn[:, column]) for column in range(len(terms))]
        experiment = _cheapest(right, float(shares.max()), node, terms)
        steps = max((few for few, share in zip(devices, shares, strict=False) if share >= LEAST_SHARE), default=0)
    return Doubt(tuple(names), tuple(map(float, shares)), experiment, error, known, steps, whole)


def _right_after(wins: np.ndarray, values: np.ndarray) -> float:
    """How often the likeliest layout is the fastest, once a term's value is known to one of some bins."""
    bins = np.array_split(values.argsort(kind="stable"), _BINS)
    return float(np.mean([wins[some].mean(axis=0).max() for some in bins]))


def _cheapest(right: Sequence[float], before: float, node: int, terms: Sequence[Term]) -> Experiment | None:
    most = max(right) - before
    if most < _WORTH:
        return None
    good = [
        Experiment(term, after, max(1, term.nodes * node))
        for term, after in zip(terms, right, strict=True)
        if after - before >= _NEARLY * most
    ]
    return min(good, key=lambda one: (one.devices, -one.right))
