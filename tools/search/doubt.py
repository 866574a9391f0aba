"""This module finds the layouts whose predicted times differ by less than the estimator's error, and the cheapest
experiment that would show which of these layouts is the fastest.

Step times are sums of the estimator's terms, each of which may be wrong by a factor that is the same for all layouts.
The factors are drawn 4,096 times, with the same factors for all layouts: therefore errors of time that all layouts have
in common cancel, and errors of a term that is larger in one layout do not. The share of the draws in which a layout is
the fastest is the probability that it is the fastest, as far as errors of the terms are concerned; layouts with a share
of at least 5 % are reported. The value of an experiment that measures a term is the increase in the probability that
the first choice is right if the term is known: it is computed as the mean, over the values of the term, of the largest
share.

Predictions of runs with software newer than the fitted rows have larger errors (`Newer`). The effect of a new release
is drawn separately, as the same terms with deviations of that size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tools.estimate.configuration import Configuration
from tools.estimate.efficiency import Newer, known_error, newer_error
from tools.estimate.time_model import TimeModel
from tools.search.ranking.run import Found

UNKNOWN_ERROR = 0.10  # mean error of step times where no published run tells (assumed)
_DEVIATION = (np.pi / 2) ** 0.5  # of a normal error, for its mean size


@dataclass(frozen=True)
class Term:
    """A `Term` is one part of the predicted step time, such as matmul, with its uncertainty."""

    name: str  # in a few words
    keys: tuple[str, ...]  # of `Efficiency`, or a link of the hardware, all off by the same factor
    # of the factor's logarithm, beside the other terms' (assumed: small for what published Ascend runs fit, large for
    # what is a guess there); `scaled` brings the sum to the estimator's known error
    deviation: float
    experiment: str  # what would measure it
    nodes: int  # on how many nodes; 0 is one device


TERMS = (
    Term("matmul", ("matmul", "matmul_fp8"), 0.1, "time a layer's large matmuls", 0),
    Term("narrow matmul", ("half_size",), 0.2, "time a layer's matmuls at each layout's tensor-parallel width", 0),
    Term("attention", ("attention",), 0.15, "time fused attention at the recipe's sequence length", 0),
    Term("HBM", ("memory",), 0.2, "time a layer's norms, residuals and activations", 0),
    Term("routing", ("moe_s",), 0.5, "time a MoE layer's routing and sorting beside its matmuls", 0),
    Term("launch", ("layer_s",), 0.5, "time a layer's gaps between kernels in a profile", 0),
    Term("links of a node", ("intra_node",), 0.15, "time the tensor- and expert-parallel collectives inside a node", 1),
    Term("links of nodes", ("inter_node",), 0.25, "time the experts' AlltoAll between nodes", 2),
    Term("overlap", ("hidden", "hidden_ep"), 0.25, "one step of a few layers with and without its overlaps", 1),
)


def perturbed(model: TimeModel, term: Term, factor: float) -> TimeModel:
    """Return the time model with the efficiencies, bandwidths or seconds of one term multiplied by `factor`."""
    reached, hardware = model.reached, model.hardware
    for key in term.keys:
        if hasattr(reached, key):
            value = getattr(reached, key) * factor
            reached = replace(reached, **{key: min(1.0, value) if term.name == "overlap" else value})
        else:
            hardware = hardware.with_faster(key, factor)
    return TimeModel(hardware, reached)


def slopes(model: TimeModel, configs: Sequence[Configuration]) -> np.ndarray:
    """Return the sensitivity of each layout's step time to each term (such as matmul), as an array [layouts, TERMS].
    The sensitivity is the change of ln(seconds) if the term changes by its usual deviation.
    """
    found = np.zeros((len(configs), len(TERMS)))
    for column, term in enumerate(TERMS):
        up, down = (perturbed(model, term, float(np.exp(sign * term.deviation))) for sign in (1, -1))
        for row, config in enumerate(configs):
            found[row, column] = np.log(up.step(config).total / down.step(config).total) / 2
    return found


def scaled(slope: np.ndarray, error: float) -> np.ndarray:
    """Scale the sensitivities `slope` [layouts, TERMS] by one factor, so that step times vary by `error` on average,
    like the errors of predictions.
    """
    wanted = _DEVIATION * error
    varies = float(np.sqrt((slope**2).sum(axis=1).mean()))
    return slope * (wanted / varies) if varies else slope


DRAWS, SEED = 4096, 0
LEAST_SHARE = 0.05  # of the draws, for a layout to be in the set
_ALIKE = 1e-3  # relative: times this near are equal, and share the draw
_BINS = 16  # of a term's values
_WORTH = 0.05  # an experiment that makes the choice less than this likelier to be right tells nothing
_NEARLY = 0.8  # of the best experiment's worth is as good, where it needs fewer devices


@dataclass(frozen=True)
class Experiment:
    """An `Experiment` describes an experiment that would help to show which layout is the fastest."""

    term: Term
    right: float  # how likely the choice is right after it
    devices: int  # that it needs


@dataclass(frozen=True)
class Doubt:
    """A `Doubt` holds the probability that the chosen layout is the fastest one, and the layouts that may be faster."""

    names: tuple[str, ...]  # of the layouts, the fastest first
    shares: tuple[float, ...]  # of the draws in which each is the fastest; they add up to 1
    experiment: Experiment | None  # None where there is no doubt, or where no single term would tell
    error: float  # mean error of step times that was drawn
    known: bool  # whether published runs tell the error
    steps: int = 0  # devices that a step of each of the set needs, with as few data-parallel copies as it can have
    # whether no other layout of the space can be the fastest, by the estimator's bounds; where some were never placed,
    # nothing is said of the space
    whole: bool = False
    newer: Newer | None = None  # the errors of newer software; None where it is not drawn
    newer_shares: tuple[float, ...] = ()  # as `shares`, with terms that are off by as much

    @property
    def alike(self) -> list[tuple[str, float]]:
        """Return the layouts that may be the fastest, as pairs (name, probability), the most probable first."""
        return self._likely(self.shares)

    def _likely(self, shares: Sequence[float]) -> list[tuple[str, float]]:
        pairs = zip(self.names, shares, strict=True)
        return sorted((pair for pair in pairs if pair[1] >= LEAST_SHARE), key=lambda pair: -pair[1])

    def lines(self) -> list[str]:
        """Return sentences about the probability that the chosen layout is the fastest, and about the other layouts."""
        return [*self._lines(), *([self._on_newer(self.newer)] if self.newer else [])]

    def _on_newer(self, newer: Newer) -> str:
        likely = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in self._likely(self.newer_shares))
        return (
            f"on software newer than the fit, whose runs were off by {100 * newer.mean:.1f} % on average, the fastest "
            f"is {likely}: tc3 search calibrate on steps of your own software tells more"
        )

    def _lines(self) -> list[str]:
        of = f"{'the known error' if self.known else 'an assumed error'} of {100 * self.error:.1f} % on average"
        alike = ", ".join(f"{name} ({100 * share:.0f} %)" for name, share in self.alike)
        if len(self.alike) == 1 and self.whole:
            return [
                f"among the layouts of the table, layout {self.alike[0][0]} stays the fastest within {of}; the errors "
                "were drawn term by term, alike for all layouts"
            ]
        if len(self.alike) == 1:
            return [
                f"of the layouts that were placed, layout {self.alike[0][0]} stays the fastest within {of} (errors "
                "drawn term by term, alike for all layouts); layouts that were not placed may be faster"
            ]
        among = "" if self.whole else " among those that were placed"
        words = [
            f"within {of} any of these layouts may be the fastest{among}: {alike}; the percentages are the shares of "
            f"{DRAWS:,} draws of the estimator's terms, alike for all layouts, in which each layout is the fastest"
        ]
        if self.experiment is None:
            names = ", ".join(name for name, _ in self.alike)
            return [
                *words,
                f"measuring a single term would not decide between them: the cheapest experiment is one step of each "
                f"of {names}, with as little data parallelism as their experts need, on {self.steps:,} devices",
            ]
        one = self.experiment
        devices = f"{one.devices} devices" if one.devices > 1 else "one device"
        return [
            *words,
            f"the cheapest experiment that would tell: {one.term.experiment} on {devices} ({one.term.name}); with it "
            f"the choice{among} is right in {100 * one.right:.0f} % instead of {100 * max(self.shares):.0f} %",
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the probability of each layout to be the fastest, and the proposed experiment, as a dictionary for
        `--json`.
        """
        one = self.experiment
        told = one and {"term": one.term.name, "what": one.term.experiment, "devices": one.devices, "right": one.right}
        return {
            "error": self.error,
            "error_is_known": self.known,
            "draws": DRAWS,
            "shares": dict(zip(self.names, self.shares, strict=True)),
            "cannot_be_told_apart": [name for name, _ in self.alike],
            "of_the_whole_space": self.whole,
            "newer_software": {**self.newer.as_json(), "shares": dict(zip(self.names, self.newer_shares, strict=True))}
            if self.newer
            else None,
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
    whole: bool = False,
) -> Doubt:
    """Return the probability that the first layout is the fastest, given the predicted step times and their errors.

    Args:
        seconds: the predicted seconds of each layout.
        slope: [layouts, terms] the change of ln(seconds) with each term, scaled to the error.
        node: the number of devices of a node.
        error, known, whole: the fields of `Doubt` with these names.
        devices: the number of devices that a step of each layout needs at least.
    """
    drawn, wins = _wins(seconds, slope)
    shares = wins.mean(axis=0)
    experiment, steps = None, 0
    if (shares >= LEAST_SHARE).sum() > 1:
        # how often the likeliest layout is the fastest, once a term's value is known to one of some bins
        bins = (np.array_split(one.argsort(kind="stable"), _BINS) for one in drawn.T)
        right = [float(np.mean([wins[some].mean(axis=0).max() for some in of_term])) for of_term in bins]
        experiment = _cheapest(right, float(shares.max()), node)
        steps = max((few for few, share in zip(devices, shares, strict=False) if share >= LEAST_SHARE), default=0)
    return Doubt(tuple(names), tuple(map(float, shares)), experiment, error, known, steps, whole)


def _wins(seconds: Sequence[float], slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [draws, terms] what was drawn, and [draws, layouts] who is the fastest; equal layouts share a draw."""
    drawn = np.random.default_rng(SEED).standard_normal((DRAWS, slope.shape[1]))
    times = np.log(np.asarray(seconds)) + drawn @ slope.T
    first = times <= times.min(axis=1, keepdims=True) + _ALIKE
    return drawn, first / first.sum(axis=1, keepdims=True)


def _cheapest(right: Sequence[float], before: float, node: int) -> Experiment | None:
    most = max(right) - before
    if most < _WORTH:
        return None
    good = [
        Experiment(term, after, max(1, term.nodes * node))
        for term, after in zip(TERMS, right, strict=True)
        if after - before >= _NEARLY * most
    ]
    return min(good, key=lambda one: (one.devices, -one.right))


def doubt_of(found: Found, times: TimeModel) -> Doubt | None:
    """Return the probability that the first layout of a search is the fastest, given the errors of predicted step
    times; return None if the search found no layout. The recipe's own layout is included if it uses the requested
    number of devices and batch, and fits into memory.
    """
    entries = {str(number): entry for number, entry in enumerate(found.entries, 1)}
    if not entries:
        return None
    if found.own and not found.request.changed and found.own.peak <= found.request.room:
        entries["recipe"] = found.own
    known, newer = known_error(times.hardware), newer_error(times.hardware)
    error = known.mean if known else UNKNOWN_ERROR
    slope, seconds = (
        slopes(times, [entry.config for entry in entries.values()]),
        [one.seconds for one in entries.values()],
    )
    made = doubt(
        list(entries),
        seconds,
        scaled(slope, error),
        found.request.node,
        error,
        known is not None,
        [least_devices(entry.config) for entry in entries.values()],
        whole=found.complete,
    )
    if newer is None or len(entries) == 1:
        return made
    shares = _wins(seconds, scaled(slope, newer.mean))[1].mean(axis=0)
    return replace(made, newer=newer, newer_shares=tuple(map(float, shares)))


def least_devices(config: Configuration) -> int:
    """Return the smallest number of devices on which a layout can run a step: one pipeline with as few data-parallel
    ranks as the expert-parallel groups allow. MindFormers distributes experts over data- and tensor-parallel ranks, and
    not over context-parallel ranks.
    """
    return config.pp * config.cp * math.lcm(config.tp, config.ep)
