"""The plan of a training run: which sample each data-parallel rank trains in which micro-batch of each step.

    index = build_gpt_index(lengths, 131072, samples, seed)         # or the arrays that MindFormers cached
    costs = Cost(per_pair, per_token).of_dataset(index)             # one a sample, no token read
    layout = Layout(ranks, micro_batches, slots, objective_of(...))
    plan = step_plan(costs, step, layout)                           # [ranks, micro_batches, slots] items of the dataset

A global batch is `layout.batch` consecutive items of the dataset, as without the plugin; the plan only says who trains
which of them. It follows from the costs of that batch alone: the dataset's order comes from its seed, so any step's
plan is known without the earlier ones, and another number of ranks divides the same global batches differently.
(With a look-ahead window, whole windows of steps take the place of steps: see `window.py`.) NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plugins.attention_balance.samples.cost import Cost, causal_pairs
from plugins.attention_balance.samples.gpt_index import GPTIndex, blended, build_gpt_index
from plugins.attention_balance.samples.segments import Segments, segments_of
from plugins.attention_balance.schedule.assign import assign, loads_of, unscheduled
from plugins.attention_balance.schedule.lower_bound import lower_bound
from plugins.attention_balance.schedule.objective import Objective, objective_of
from plugins.attention_balance.schedule.order import taken
from plugins.attention_balance.schedule.window import deal
from plugins.errors import DataError

__all__ = [
    "Balance",
    "Cost",
    "GPTIndex",
    "Layout",
    "Objective",
    "Segments",
    "assign",
    "balance",
    "blended",
    "build_gpt_index",
    "causal_pairs",
    "delivery_order",
    "epoch_plan",
    "loads_of",
    "lower_bound",
    "objective_of",
    "segments_of",
    "step_plan",
    "unscheduled",
]

_SAMPLES = 1 << 19  # samples planned at a time: some 100 bytes each


@dataclass(frozen=True)
class Layout:
    """How a step is divided.

    ranks: data-parallel ranks; micro_batches: of a step on each rank; slots: samples of a rank's micro-batch;
    objective: where ranks wait; window: global batches whose samples may change places (1: none, the default).
    """

    ranks: int
    micro_batches: int
    slots: int
    objective: Objective
    window: int = 1

    @property
    def batch(self) -> int:
        """Samples of a global batch."""
        return self.ranks * self.micro_batches * self.slots

    def steps(self, samples: int) -> int:
        """Whole steps in a dataset of `samples`; what remains is dropped, as `drop_remainder` does."""
        return samples // self.batch


def step_plan(costs: np.ndarray, step: int, layout: Layout) -> np.ndarray:
    """The plan of one step, from scratch.

    Args:
        costs: float64 [items of the dataset], in the dataset's order; may be memory-mapped.
        step: from 0, over the whole dataset: a resumed run passes the step that it resumes at.

    Returns:
        int64 [ranks, micro_batches, slots]: items of the dataset.

    Raises:
        DataError: the dataset ends before this step.
    """
    return epoch_plan(costs, layout, step, 1)[0]


def epoch_plan(costs: np.ndarray, layout: Layout, first: int = 0, count: int | None = None) -> np.ndarray:
    """The plans of `count` steps from step `first` (None: to the end): int64 [count, ranks, micro_batches, slots].

    Arguments and errors as in `step_plan`; every step is what `step_plan` gives.
    """
    steps = layout.steps(len(costs))
    stop = steps if count is None else first + count
    if not 0 <= first <= stop <= steps:
        raise DataError(f"steps {first} to {stop - 1}: the dataset of {len(costs):,} samples has {steps:,} steps")
    # windows begin at multiples of their size, counted from step 0: the same ones wherever a run resumes
    window = layout.window
    begin, end = first // window * window, min(-(-stop // window) * window, steps)
    at_a_time = max(_SAMPLES // (layout.batch * window), 1) * window
    plans = [_plan(costs, layout, at, min(at + at_a_time, end)) for at in range(begin, end, at_a_time)]
    shape = (layout.ranks, layout.micro_batches, layout.slots)
    return np.concatenate([np.empty((0, *shape), np.int64), *plans])[first - begin : stop - begin]


def delivery_order(plan: np.ndarray, gathered: bool = False) -> np.ndarray:
    """int64 [steps * batch]: the items in the order in which a loader must hold them so that rank r gets its own.

    MindSpore's sharded, unshuffled `GeneratorDataset` gives position p to rank p % ranks.

    Args:
        plan: [steps, ranks, micro_batches, slots].
        gathered: the graph gathers the ranks' batches, in the order of the ranks, before it cuts the first micro-batch
            of all ranks from the front; a sample is then mostly computed by another rank than the one that read it.
            MindSpore 2.9.0 does this with several micro-batches, unless it is told to let each pipeline cut the batch
            of its own rank (see `settings.OWN_BATCHES`).
    """
    if gathered:
        steps, ranks = plan.shape[:2]
        read = plan.transpose(0, 2, 1, 3).reshape(steps, ranks, -1)  # [steps, reading rank, its samples]
        return read.transpose(0, 2, 1).ravel()
    return plan.transpose(0, 2, 3, 1).ravel()


@dataclass(frozen=True)
class Balance:
    """Step times over the time of an evenly loaded step, float64 [steps]: 1 is perfect.

    before: without the plugin; after: with the plan; bound: no assignment of these samples to the same steps is
    shorter (with a window the samples change steps, so a step may lie below the bound of its old samples).
    """

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray


def balance(costs: np.ndarray, plan: np.ndarray, layout: Layout, first: int = 0) -> Balance:
    """Measure the plan [steps, ...] of the steps from `first` against no scheduling and the lower bound."""
    steps = len(plan)
    batch = np.asarray(costs[first * layout.batch : (first + steps) * layout.batch]).reshape(steps, layout.batch)
    shape = (layout.ranks, layout.micro_batches, layout.slots)
    natural = np.broadcast_to(unscheduled(*shape), plan.shape)
    before = layout.objective.step_time(loads_of(batch, natural))
    after = layout.objective.step_time(costs[plan].sum(-1))
    even = layout.objective.even_time(batch.sum(1), *shape[:2])
    # a step's share of an evenly loaded window, where samples changed steps
    even_after = layout.objective.even_time(costs[plan].sum((1, 2, 3)), *shape[:2])
    bound = lower_bound(batch, *shape, layout.objective)
    return Balance(before / even, after / even_after, bound / even)


def _plan(costs: np.ndarray, layout: Layout, first: int, stop: int) -> np.ndarray:
    """Steps [first, stop): whole windows, the dataset's last one perhaps shorter."""
    batch = np.asarray(costs[first * layout.batch : stop * layout.batch], np.float64).reshape(-1, layout.batch)
    shape = (layout.ranks, layout.micro_batches, layout.slots)
    if layout.window == 1:
        row = np.arange(first, stop)[:, None, None, None]
        return assign(batch, *shape, layout.objective) + row * layout.batch
    position = _looking_ahead(batch, layout)
    chosen = assign(batch.ravel()[position], *shape, layout.objective)
    return first * layout.batch + taken(position, chosen)


def _looking_ahead(batch: np.ndarray, layout: Layout) -> np.ndarray:
    """Positions in `batch` [steps, batch] of each step's samples, windows dealt out where that makes them faster."""
    shape, objective = (layout.ranks, layout.micro_batches, layout.slots), layout.objective
    position = np.arange(batch.size).reshape(batch.shape)
    for at in range(0, len(batch), layout.window):
        own = batch[at : at + layout.window]
        dealt = deal(own, layout.ranks * layout.slots)
        mixed = own.ravel()[dealt]
        apart = objective.step_time(loads_of(own, assign(own, *shape, objective))).sum()
        together = objective.step_time(loads_of(mixed, assign(mixed, *shape, objective))).sum()
        if together < apart:
            position[at : at + layout.window] = at * layout.batch + dealt
    return position
