"""Some steps of a run: what each device computes in them, without and with the plan of `plugins/attention_balance`.

One plan, made with the whole model's cost as in training, is read twice: by attention alone, and by attention and the
part that is linear in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.attention_balance.plan import (
    Balance,
    GPTIndex,
    balance,
    causal_pairs,
    epoch_plan,
    segments_of,
    unscheduled,
)
from plugins.attention_balance.schedule.context_parallel import balanced, contiguous
from tools.data.reporter import Reporter
from tools.imbalance.recipe import Setting

SHARES = (0.0, 0.5, 0.9, 0.99, 1.0)  # quantiles of loads
_CONTEXT_SAMPLES = 32


@dataclass(frozen=True)
class OneStep:
    """Attention in one step [ranks, micro-batches] over the mean of all, without and with the plan."""

    number: int
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class Steps:
    """What the chosen steps say; pairs are (without, with) the plan.

    Args:
        numbers: int64 [steps].
        attention, model: time over that of a step whose samples all cost the same, float64 [steps], by attention and
            by all work.
        micro_batch_loads, step_loads: attention of a rank's micro-batch, and of its step, over the mean of the step:
            float64 [len(SHARES)], means over steps.
        speed_up: modelled computation of these steps without the plan over that with it, waiting included.
        attention_share: of all work. of_one_document: attending pairs over those of undivided samples.
        one_step: the middle one of them.
        context: attending pairs of the slowest context-parallel rank over the mean, for samples cut into consecutive
            parts and by `context_parallel.balanced`; None without context parallelism that cuts samples.
    """

    numbers: np.ndarray
    attention: Balance
    model: Balance
    micro_batch_loads: tuple[np.ndarray, np.ndarray]
    step_loads: tuple[np.ndarray, np.ndarray]
    speed_up: float
    attention_share: float
    of_one_document: float
    one_step: OneStep
    context: tuple[float, float] | None


@dataclass(frozen=True)
class _Window:
    """What remains of one window of consecutive steps.

    quantiles: [micro-batch or step, without or with, len(SHARES)]; times: without, with, in the cost's unit.
    """

    attention: Balance
    model: Balance
    quantiles: np.ndarray
    times: np.ndarray
    pairs: float


def measure_steps(index: GPTIndex, setting: Setting, starts: np.ndarray, reporter: Reporter) -> Steps:
    """Plan the windows of steps that begin at `starts` (int64 [n], rising) and compare with no plan."""
    reporter.start("planning steps", len(starts))
    windows = []
    for number, start in enumerate(starts.tolist()):
        window, loads = _window(index, setting, start)
        windows.append(window)
        if number == len(starts) // 2:
            one_step = OneStep(start, loads[0][0], loads[1][0])
        reporter.advance(1)
    micro_batch, step = np.mean([window.quantiles for window in windows], 0)
    before, after = np.sum([window.times for window in windows], 0).tolist()
    layout, length, cost = setting.layout, setting.sequence_length, setting.cost
    samples = len(starts) * layout.window * layout.batch
    attention = cost.per_pair * sum(window.pairs for window in windows)
    return Steps(
        numbers=(starts[:, None] + np.arange(layout.window)).ravel(),
        attention=_joined([window.attention for window in windows]),
        model=_joined([window.model for window in windows]),
        micro_batch_loads=(micro_batch[0], micro_batch[1]),
        step_loads=(step[0], step[1]),
        speed_up=before / after,
        attention_share=attention / (attention + cost.per_token * length * samples),
        of_one_document=attention / (cost.per_pair * samples * length * (length + 1) / 2),
        one_step=one_step,
        context=_context(index, setting, int(starts[0]) * layout.batch) if setting.context_parallel > 1 else None,
    )


def _window(index: GPTIndex, setting: Setting, first: int) -> tuple[_Window, tuple[np.ndarray, np.ndarray]]:
    """The window that begins at step `first`, and attention [steps, ranks, micro-batches] over each step's mean."""
    layout = setting.layout
    pairs = np.concatenate([
        causal_pairs(segments_of(index, step * layout.batch, (step + 1) * layout.batch))
        for step in range(first, first + layout.window)
    ])  # fmt: skip
    attention = setting.cost.per_pair * pairs
    linear = setting.cost.per_token * setting.sequence_length
    # a window's plan follows from its samples alone, so it is planned as if it were the whole run
    plan = epoch_plan(attention + linear, layout)
    natural = unscheduled(layout.ranks, layout.micro_batches, layout.slots)
    natural = natural + layout.batch * np.arange(layout.window)[:, None, None, None]
    loads = [attention[order].sum(-1) for order in (natural, plan)]
    times = [layout.objective.step_time(side + linear * layout.slots).sum() for side in loads]
    relative = [side / side.mean((1, 2), keepdims=True) for side in loads]
    quantiles = [
        [np.quantile(side, SHARES, axis=(1, 2)).mean(1) for side in relative],
        [np.quantile(side.mean(2), SHARES, axis=1).mean(1) for side in relative],
    ]
    by_attention, by_all = (balance(costs, plan, layout) for costs in (attention, attention + linear))
    window = _Window(by_attention, by_all, np.array(quantiles), np.array(times), float(pairs.sum()))
    return window, (relative[0], relative[1])


def _joined(parts: list[Balance]) -> Balance:
    return Balance(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("before", "after", "bound")))


def _context(index: GPTIndex, setting: Setting, first: int) -> tuple[float, float]:
    """Mean over some samples from item `first` on."""
    segments = segments_of(index, first, first + min(_CONTEXT_SAMPLES, setting.layout.batch))
    ranks = setting.context_parallel
    plans = [
        [split(segments[item], ranks).imbalance for split in (contiguous, balanced)] for item in range(len(segments))
    ]
    apart, even = np.mean(plans, 0).tolist()
    return apart, even
