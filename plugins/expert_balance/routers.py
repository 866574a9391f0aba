"""This module measures a run's routers after each step from the tokens that each expert got, and says which routers
need attention. The module is pure Python and NumPy.

Rank 0 writes these measures to `RUN/metrics/routers.jsonl`, one line of a few kilobytes for each step, so that a month
of training can be monitored (`tc3 runs watch`) and plotted (TensorBoard). Each line has lists with one value for each
MoE layer:

| key | what | even routers |
|---|---|---|
| `fullest` | tokens of the fullest expert over the mean of the layer (MaxVio + 1 of arXiv 2408.15664) | 1 |
| `entropy` | entropy of the experts' shares over that of equal shares | 1 |
| `similarity` | part of the tokens for which experts have the same share as in the step before | 1 |
| `idle` | experts that got no token | 0 |
| `streak` | longest run of steps in which one expert stayed on the same side of the mean | a few |

`Watcher` also raises alarms. A router raises an alarm in three cases: a measure is outside the range of its own values
in the last `WINDOW` steps; an expert got no tokens for `WINDOW` steps; or the bias of an expert has moved in one
direction by more than the whole range of a router's score, which is 1, and the load is still not even.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plugins.robust import deviation

WINDOW = 64  # steps to which a measure is compared
FEWEST = 32  # steps without which it is not
HOLD = 3  # steps that a measure has to stay away
SIGMAS = 16  # robust standard deviations, as for spikes of the loss (`plugins.spike_guard`)
_LEAST = {"fullest": 0.25, "entropy": 0.02, "similarity": 0.1}  # smaller changes raise no alarm
_DEPARTED = {
    "fullest": "the fullest expert has {0:.2f} times the mean, usually {1:.2f}",
    "entropy": "the entropy of the experts' shares is {0:.3f} of the possible, usually {1:.3f}",
    "similarity": "{0:.0%} of the tokens went to the experts of the step before, usually {1:.0%}",
}
_DIGITS = 4


def routers_file(run_dir: str | Path) -> Path:
    """Return the file in which a run records the statistics of its routers."""
    return Path(run_dir) / "metrics" / "routers.jsonl"


@dataclass(frozen=True)
class Alarm:
    """An `Alarm` says which router needs attention, and why.

    Args:
        layer: the number of the MoE layer in the model.
        rule: fullest, entropy, similarity, idle or bias.
        since: the step in which the alarm was raised.
        words: a description of the observation.
    """

    layer: int
    rule: str
    since: int
    words: str


@dataclass(frozen=True)
class Measures:
    """A `Measures` holds the statistics of the routers in one step, as arrays with one value for each layer; the
    module's docstring lists them. The field `similarity` is NaN if the loads of the previous step are not known.
    """

    step: int
    layers: tuple[int, ...]
    fullest: np.ndarray
    entropy: np.ndarray
    similarity: np.ndarray
    idle: np.ndarray
    streak: np.ndarray
    alarms: tuple[Alarm, ...] = ()

    def as_json(self, time: float) -> dict[str, Any]:
        """Return the statistics as a dictionary that can be written as JSON; `time` is the time at which the step
        ended, in seconds since 1970.
        """
        found: dict[str, Any] = {"step": self.step, "time": time, "layers": list(self.layers)}
        for name in ("fullest", "entropy", "similarity"):
            found[name] = [None if math.isnan(x) else float(f"{x:.{_DIGITS}g}") for x in getattr(self, name)]
        found |= {"idle": self.idle.tolist(), "streak": self.streak.tolist()}
        return found | {"alarms": [vars(alarm) for alarm in self.alarms]}


class Watcher:
    """A `Watcher` computes the statistics (`Measures`) of the routers after each step. A resumed run uses a new
    `Watcher`, which can read the recorded loads of the earlier steps; statistics that were written before are not
    replaced.

    Args:
        layers: numbers of the MoE layers in the model.
        rate: the amount by which the routers' biases move in a step; 0 if they do not move.
    """

    def __init__(self, layers: Sequence[int], rate: float):
        self.layers, self.rate = tuple(layers), rate
        self.before: np.ndarray | None = None  # shares of the step before
        self.unused = self.side = np.zeros((0, 0), np.int64)
        self.window: deque[dict[str, np.ndarray]] = deque(maxlen=WINDOW + HOLD)
        self.raised: dict[tuple[int, str], Alarm] = {}

    def see(self, step: int, tokens: np.ndarray) -> Measures:
        """Return the statistics of the routers in a step.

        Args:
            tokens: int64 [layers, E], the tokens of each expert, summed over all ranks and micro-batches.
        """
        experts = tokens.shape[1]
        shares = tokens / np.maximum(tokens.sum(1, keepdims=True), 1)
        logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
        entropy = -(shares * logs).sum(1) / math.log(experts) if experts > 1 else np.ones(len(tokens))
        nan = np.full(len(tokens), math.nan)
        similarity = nan if self.before is None else 1 - np.abs(shares - self.before).sum(1) / 2
        self._count(tokens, np.sign(shares - 1 / experts).astype(np.int64))
        self.before = shares
        now = {"fullest": shares.max(1) * experts, "entropy": entropy, "similarity": similarity}
        self.window.append(now)
        self._judge(step)
        raised = tuple(sorted(self.raised.values(), key=lambda each: (each.layer, each.rule)))
        idle, streak = (tokens == 0).sum(1), np.abs(self.side).max(1)
        return Measures(step, self.layers, **now, idle=idle, streak=streak, alarms=raised)

    def _count(self, tokens: np.ndarray, sign: np.ndarray) -> None:
        """Count the steps in a row without tokens, and the steps in a row above (positive) or below (negative) the
        mean.
        """
        if self.side.shape != tokens.shape:
            self.unused, self.side = np.zeros((2, *tokens.shape), np.int64)
        self.unused = np.where(tokens == 0, self.unused + 1, 0)
        self.side = np.where(sign * self.side < 0, 0, self.side) * (sign != 0) + sign

    def _judge(self, step: int) -> None:
        found = {**self._unused(), **self._drifting()}
        for name in _LEAST:
            found |= self._departed(name)
        self.raised = {
            key: self.raised.get(key) or Alarm(self.layers[key[0]], key[1], step, words) for key, words in found.items()
        }

    def _unused(self) -> dict[tuple[int, str], str]:
        found = {}
        for row in np.flatnonzero((self.unused >= WINDOW).any(1)):
            experts = np.flatnonzero(self.unused[row] >= WINDOW)
            more = f" and {len(experts) - 1} more expert{'s' * (len(experts) > 2)}" if len(experts) > 1 else ""
            found[int(row), "idle"] = f"expert {experts[0]}{more} got no token in {WINDOW} steps"
        return found

    def _drifting(self) -> dict[tuple[int, str], str]:
        """Return experts whose bias has moved by 1 in one direction."""
        if not self.rate or self.before is None:
            return {}
        steps, found = math.ceil(1 / self.rate - 1e-9), {}
        experts = np.abs(self.side) >= steps
        for row in np.flatnonzero(experts.any(1)):
            away = self.before[row] - 1 / experts.shape[1]
            expert = int(np.where(experts[row], np.abs(away), -1).argmax())
            where = "above" if away[expert] > 0 else "below"
            found[int(row), "bias"] = (
                f"expert {expert} was {where} the mean in each of {steps} steps, in which its bias moved by 1"
            )
        return found

    def _departed(self, name: str) -> dict[tuple[int, str], str]:
        """Return the layers whose newest values all differ strongly from those of the window before them."""
        hold = 1 if name == "similarity" else HOLD  # routers that have changed are like themselves in the next step
        values = np.array([each[name] for each in self.window])  # [steps, layers]
        known, newest = values[:-hold], values[-hold:]
        if np.isfinite(known[:, 0]).sum() < FEWEST if len(known) else True:
            return {}
        usual = np.nanmedian(known, axis=0)
        far = np.maximum(SIGMAS * deviation(known, usual, axis=0), _LEAST[name])
        away = newest - usual if name == "fullest" else usual - newest
        words = _DEPARTED[name]
        rows = np.flatnonzero((away > far).all(axis=0))
        return {(int(row), name): words.format(newest[-1, row], usual[row]) for row in rows}
