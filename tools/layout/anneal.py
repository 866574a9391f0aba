"""This module improves plans by simulated annealing; a plan places layers on stages and chooses what to recompute. The
pipeline simulator predicts the step time of each plan.

Each of many annealing chains holds a plan that obeys every rule. In each iteration every chain tries a change of one to
three layers (another recompute option, another chunk); changes that break a rule are dropped before the simulation,
which then runs for all chains at once. A chain accepts a changed plan if it is faster, or if it is slower by at most a
random multiple of a temperature that falls to zero. Some chains begin with a high temperature, so that they can leave a
local minimum; most improvements come from chains that begin with a low temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tools.layout.budget import Budget
from tools.layout.ilp import Incumbent
from tools.layout.instance import Instance

CHAINS = 64
TRIES = 4  # changes drawn for a chain in a step, of which the first that keeps the rules is simulated
COLD, HOT = 0.0001, 0.003  # of the best time: the first temperatures of the chains, from the one to the other
_REPLACE_EVERY = 50
_STEP, _OPERATION = 1e-3, 1e-8  # effort of a step of all chains, and of each simulated operation in it
# chances of a change: a second and a third layer; a later layer on the first one's stage; where a layer goes
_SECOND, _THIRD, _SAME_STAGE, _STAYS, _NEXT_CHUNK = 0.45, 0.2, 0.6, 0.45, 0.25


def anneal(
    incumbent: Incumbent,
    starts: np.ndarray,
    budget: Budget,
    rng: np.random.Generator,
    step_times: Callable[[np.ndarray], np.ndarray] | None = None,
    planned: float | None = None,
) -> None:
    """Improve the plans `starts` [S, K, C] by simulated annealing until `budget` is spent, and pass every better plan
    to `incumbent`, which keeps the best plan. The function `step_times` computes the step time of plans; the default is
    a simulation. The temperature of the annealing reaches zero after `planned` units of work; the default is all units
    of the budget.
    """
    instance = incumbent.instance
    step_times = step_times or instance.step_times
    changes = Changes(instance, rng)
    plans = starts[np.arange(CHAINS) % len(starts)].copy()
    times = step_times(plans)
    hot = np.geomspace(COLD, HOT, CHAINS)
    step, operations = 0, 2 * instance.micro_batches * instance.chunks * instance.stages
    while not budget.over:
        done = budget.spent / (planned or budget.effort)
        temperature = hot * times.min() * (1 - done) ** 2
        which, tried = _legal(instance, changes(np.repeat(plans, TRIES, axis=0)))
        simulated = step_times(tried)
        budget.spend(_STEP + _OPERATION * operations * len(which))
        taken = simulated <= times[which] + temperature[which] * rng.standard_exponential(len(which))
        plans[which[taken]], times[which[taken]] = tried[taken], simulated[taken]
        if times.min() < incumbent.time:
            incumbent.offer(plans[times.argmin()])
        step += 1
        if step % _REPLACE_EVERY == 0:  # the best eighth of the chains take the place of the worst
            ranked = times.argsort()
            few = len(ranked) // 8
            plans[ranked[-few:]], times[ranked[-few:]] = plans[ranked[:few]], times[ranked[:few]]


def _legal(instance: Instance, tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the chains [n] that have a try within the rules, and the first such try [n, K, C] of each."""
    legal = (instance.fits(tried) & instance.well_formed(tried)).reshape(-1, TRIES)
    which = np.flatnonzero(legal.any(axis=1))
    return which, tried[which * TRIES + legal[which].argmax(axis=1)]


class Changes:
    """A `Changes` makes random changes to plans. A changed plan has the same number of layers of each type, but may
    break other rules (such as the memory limit).
    """

    def __init__(self, instance: Instance, rng: np.random.Generator):
        self._rng = rng
        self._stage_of = instance.stage_of
        spans = [instance.type_columns(t) for t, _ in instance.columns]
        self._first = np.array([span.start for span in spans])
        self._options = np.array([span.stop - span.start for span in spans])

    def __call__(self, plans: np.ndarray) -> np.ndarray:
        """Return changed copies of plans [N, K, C]."""
        rng, changed, count = self._rng, plans.copy(), len(plans)
        moves = 1 + (rng.random(count) < _SECOND) + (rng.random(count) < _THIRD)
        stage = np.full(count, -1)
        for turn in range(3):
            movers = np.flatnonzero(moves > turn)
            only = np.where(rng.random(len(movers)) < _SAME_STAGE, stage[movers], -1)
            movers, column, chunk = self._pick(changed, movers, only)
            option, target = self._destination(column, chunk, changed.shape[2])
            changed[movers, column, chunk] -= 1
            changed[movers, option, target] += 1
            if turn == 0:
                stage[movers] = self._stage_of[np.where(rng.random(len(movers)) < 0.5, chunk, target)]
        return changed

    def _pick(
        self, plans: np.ndarray, movers: np.ndarray, only: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw a layer of each mover, from the stage in `only` or any; return (movers with a layer, column, chunk)."""
        layers, size = plans[movers], plans.shape[2]
        elsewhere = (only[:, None] >= 0) & (self._stage_of != only[:, None])
        layers = np.where(elsewhere[:, None], 0, layers).reshape(len(movers), plans.shape[1] * size).cumsum(axis=1)
        total = layers[:, -1]
        drawn = (self._rng.random(len(movers)) * total).astype(int)
        column, chunk = np.divmod((layers > drawn[:, None]).argmax(axis=1), size)
        some = total > 0
        return movers[some], column[some], chunk[some]

    def _destination(self, column: np.ndarray, chunk: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        rng, count = self._rng, len(column)
        option = self._first[column] + (rng.random(count) * self._options[column]).astype(int)
        beside = np.clip(chunk + rng.choice([-1, 1], count), 0, size - 1)
        draw = rng.random(count)
        moved = np.where(draw < _STAYS + _NEXT_CHUNK, beside, rng.integers(0, size, count))
        return option, np.where(draw < _STAYS, chunk, moved)
