"""This module makes the plan of a training run: on which sample each data-parallel rank trains in which micro-batch of
each step.

    index = build_gpt_index(lengths, 131072, samples, seed)         # or the arrays that MindFormers cached
    A global batch is `layout.batch` consecutive items of the dataset, as without the plugin; the plan only says which
        rank trains which of these items.
    The plan of a step follows only from the costs of its batch, because the dataset's order comes from its seed: any
        step's plan is known without the plans of earlier steps, and another number of ranks divides the same global
        batches differently.
    With a look-ahead window of W steps the samples of W consecutive steps may be moved from step to step (`deal`); the
        default, W = 1, moves none.

Such a window changes training: the set of samples of a step, and so its gradient, is no longer that of the dataset's
order. Each sample is still trained exactly once in its window of steps.

The second half of the module reads `plugins.attention_balance` of a recipe, and the other keys of the recipe that the
plugin needs (`check`, `schedule_of`, `layout_of`). The module needs only NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from plugins.attention_balance.assign import assign, integers, loads_of, taken, unscheduled
from plugins.attention_balance.objective import Objective, lower_bound, objective_of
from plugins.attention_balance.samples import MEASURED, UNITS, Cost, check_apart, padding_under
from plugins.errors import RecipeError
from plugins.semi_auto_cpu.chosen import splits_model
from plugins.settings import Section, count_at, graph_mode_only, section_at, setting, value_at
from plugins.spike_guard import plan as spike_guard
from plugins.spike_guard.ledger import Ranges

_SAMPLES = 1 << 19  # samples planned at a time: some 100 bytes each
KEY = "plugins.attention_balance"
COST = ("per_pair", "per_token", "unit")
INTERLEAVE = "micro_batch_interleave_num"
LOADER = "BlendedMegatronDatasetDataLoader"
# MindSpore reads it once a process: a pipeline then cuts each rank's own batch into micro-batches
OWN_BATCHES = "PIPELINE_SLICE_SKIP_REDISTRIBUTION"


def deal(costs: np.ndarray, unit: int) -> np.ndarray:
    """Distribute the samples of W global batches to W steps, so that samples of similar cost run at the same time.

    The samples are sorted by cost and cut into units (a unit is all samples that run at the same time, ranks * slots);
    the units are assigned to the steps in turn, back and forth, so that every step gets heavy and light units.

    Args:
        costs: float64 [W, batch]; batch is a multiple of `unit`.
        unit: the number of samples that stay together.

    Returns:
        int64 [W, batch]: indices into the flattened costs, each once; a step's are rising.
    """
    window, batch = costs.shape
    units = np.argsort(-costs.ravel(), kind="stable").reshape(batch // unit, window, unit)
    units[1::2] = units[1::2, ::-1]
    return np.sort(units.transpose(1, 0, 2).reshape(window, batch), axis=1)


@dataclass(frozen=True)
class Layout:
    """A `Layout` describes how the samples of a step are divided among ranks, micro-batches and slots.

    Args:
        ranks: the number of data-parallel ranks.
        micro_batches: the number of micro-batches of a step on each rank.
        slots: the number of samples of a rank's micro-batch.
        objective: the points at which ranks wait for each other.
        window: the number of consecutive global batches among which samples may move; 1: samples keep their step.
    """

    ranks: int
    micro_batches: int
    slots: int
    objective: Objective
    window: int = 1

    @property
    def batch(self) -> int:
        """Return the number of samples in a global batch."""
        return self.ranks * self.micro_batches * self.slots

    def steps(self, samples: int) -> int:
        """Return the number of whole steps in a dataset of `samples` samples; samples at the end that do not fill a
        step are dropped, as `drop_remainder` does.
        """
        return samples // self.batch


def epoch_plan(costs: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the plans of all whole steps, int64 [steps, ranks, micro_batches, slots]; the values are indices of the
    dataset's items.

    A step's plan follows only from the samples of its window. Windows begin at multiples of their size, counted from
    step 0, so a resumed run has the same windows as an uninterrupted run.

    Args:
        costs: float64 [items of the dataset], in the dataset's order; may be memory-mapped.
    """
    steps, window = layout.steps(len(costs)), layout.window
    at_a_time = max(_SAMPLES // (layout.batch * window), 1) * window
    plans = [_plan(costs, layout, at, min(at + at_a_time, steps)) for at in range(0, steps, at_a_time)]
    return np.concatenate([np.empty((0, layout.ranks, layout.micro_batches, layout.slots), np.int64), *plans])


def delivery_order(plan: np.ndarray, gathered: bool = False) -> np.ndarray:
    """Return int64 [steps * batch]: the items in the order in which a loader must hold them, so that each rank reads
    the samples that the plan assigns to it.

    MindSpore's sharded, unshuffled `GeneratorDataset` gives position p to rank p % ranks.

    Args:
        plan: [steps, ranks, micro_batches, slots].
        gathered: whether the graph gathers the ranks' batches, in the order of the ranks, and then cuts the first
            micro-batch of all ranks from the front, so that another rank than the one that read a sample usually
            computes it. MindSpore 2.9.0 does this with several micro-batches, unless each pipeline cuts the batch of
            its own rank (see `OWN_BATCHES`).
    """
    if gathered:
        steps, ranks, micro_batches, slots = plan.shape
        read = plan.transpose(0, 2, 1, 3).reshape(steps, ranks, micro_batches * slots)  # of the rank that reads them
        return read.transpose(0, 2, 1).ravel()
    return plan.transpose(0, 2, 3, 1).ravel()


@dataclass(frozen=True)
class Balance:
    """A `Balance` holds step times, float64 [steps], each divided by the time of an evenly loaded step; 1 is perfect.

    Args:
        before: the times without the plugin.
        after: the times with the plan.
        bound: a lower bound on the times if every sample stays in its step; with a window a step may be faster.
    """

    before: np.ndarray
    after: np.ndarray
    bound: np.ndarray


def balance(costs: np.ndarray, plan: np.ndarray, layout: Layout) -> Balance:
    """Compare the step times of `plan` [steps, ...], which starts at step 0 of the run, with the step times without
    balancing and with the lower bound.
    """
    batch = np.asarray(costs[: len(plan) * layout.batch]).reshape(len(plan), layout.batch)
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
    """Return the plan of steps [first, stop), which are whole windows; the last window of the
    dataset may be shorter.
    """
    batch = np.asarray(costs[first * layout.batch : stop * layout.batch], np.float64).reshape(-1, layout.batch)
    shape = (layout.ranks, layout.micro_batches, layout.slots)
    if layout.window == 1:
        row = np.arange(first, stop)[:, None, None, None]
        return assign(batch, *shape, layout.objective) + row * layout.batch
    position = _looking_ahead(batch, layout)
    chosen = assign(batch.ravel()[position], *shape, layout.objective)
    return first * layout.batch + taken(position, chosen)


def _looking_ahead(batch: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the positions in `batch` [steps, batch] of each step's samples; the samples of a window are dealt out to
    its steps if the steps then take less time.

    The times are compared as integers (see `assign`): rounding must neither move samples whose steps take the same
    time, nor let two ranks of a mixed cluster decide differently.
    """
    position = np.arange(batch.size).reshape(batch.shape)
    for at in range(0, len(batch), layout.window):
        own = batch[at : at + layout.window]
        weights = integers(own.reshape(1, -1)).ravel()
        kept = np.arange(own.size).reshape(own.shape)
        dealt = deal(own, layout.ranks * layout.slots)
        if _seconds(own, weights, dealt, layout) < _seconds(own, weights, kept, layout):
            position[at : at + layout.window] = at * layout.batch + dealt
    return position


def _seconds(own: np.ndarray, weights: np.ndarray, position: np.ndarray, layout: Layout) -> float:
    """Return the time of the steps of a window whose samples are at `position` in `own`, in the unit of `weights`. The
    sum is exact, so it does not depend on the order in which a processor adds numbers.
    """
    shape, objective = (layout.ranks, layout.micro_batches, layout.slots), layout.objective
    plan = assign(own.ravel()[position], *shape, objective)
    return math.fsum(objective.step_time(loads_of(weights[position], plan)).tolist())


_SECONDS = "write measured seconds, 0 or more"


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` holds the settings of `plugins.attention_balance`: over how many steps samples may be reordered, and
    the cost of a sample. By default the cost is computed from the model in FLOP when a run starts; a user may give
    measured costs in seconds instead.
    """

    KEY = KEY
    RIGHT = f"write `window: 1` under it, or {KEY}: False to leave it off"
    CHANGE = ("layout", "deals the samples of a step to other ranks")

    window: int = setting(
        1,
        "number of consecutive global batches among which samples may move; 1: each sample keeps its step",
        "write a number of steps, 1 to keep each step's own samples",
        least=1,
        change=("numbers", "samples change steps where it is above 1"),
    )
    per_pair: float | None = setting(None, "cost of a pair of tokens that attention compares", _SECONDS, least=0)
    per_token: float | None = setting(None, "cost of a token, whatever it attends to", _SECONDS, least=0)
    unit: str | None = setting(
        None,
        "unit of the costs; measured seconds by default",
        f"write {' or '.join(UNITS)}, or leave it out for measured seconds",
        choices=tuple(UNITS),
    )

    def agree(self) -> None:
        """Raise RecipeError if only one of `per_pair` and `per_token` is given, or if `per_pair` is 0, because
        attention would then have no cost to balance.
        """
        written = [name for name in COST if getattr(self, name) is not None]
        missing = [name for name in COST[:2] if name not in written]
        if written and missing:
            words = f"per_pair and per_token are needed together; write {missing[0]} as well"
            raise RecipeError(words, f"{KEY}.{written[0]}")
        if self.per_pair == 0:
            raise RecipeError(
                "a cost of 0 means that attention takes no time, so there is nothing to balance; write a positive "
                "cost, or leave out per_pair and per_token",
                f"{KEY}.per_pair",
            )

    @property
    def cost(self) -> Cost | None:
        """Return the cost of a sample; return None if the recipe does not give `per_pair` and `per_token`."""
        if self.per_pair is None or self.per_token is None:
            return None
        return Cost(self.per_pair, self.per_token, self.unit or MEASURED)


read = Settings.read


@dataclass(frozen=True)
class Schedule:
    """A `Schedule` holds the data that a loader needs to put its samples in balanced order.

    Args:
        layout: the division of a step.
        cost: the cost of a sample.
        gathered: as in `plan.delivery_order`.
        eod_pad_length: the number of entries of the compressed mask; None with a full mask.
        padding: the number of these entries that must stay padding.
        skipped: the places in the balanced order that `plugins.spike_guard` leaves out.
    """

    layout: Layout
    cost: Cost
    gathered: bool
    eod_pad_length: int | None
    padding: int = 0
    skipped: Ranges = ()


def schedule_of(recipe: Mapping[str, Any], environment: Mapping[str, str]) -> Schedule:
    """Return the schedule of a recipe whose `plugins.attention_balance` is on.

    Args:
        recipe: a flat recipe or a MindFormerConfig.
        environment: the environment variables of the training process.

    Raises:
        RecipeError: see `check`; or the cost of a sample does not follow from the recipe.
    """
    settings, layout = check(recipe)
    if settings.cost is None:
        raise RecipeError(
            "the cost of a sample (per_pair and per_token) is missing; start the run with tc3 train or "
            "launch/train.py, which compute it from the model, or write both keys, in measured seconds",
            f"{KEY}.per_pair",
        )
    data = section_at(recipe, "train_dataset.data_loader.config")
    guard = value_at(recipe, spike_guard.KEY)
    left_out = spike_guard.Settings.look(guard)[0] if guard not in (None, False) else None
    own = layout.objective.stages > 1 and environment.get(OWN_BATCHES) == "1"
    return Schedule(
        layout,
        settings.cost,
        gathered=layout.micro_batches > 1 and not own,
        eod_pad_length=_eod_pad_length(data) if data.get("create_compressed_eod_mask") else None,
        padding=_padding(recipe),
        skipped=left_out.skipped if left_out else (),
    )


def check(recipe: Mapping[str, Any]) -> tuple[Settings, Layout]:
    """Check a recipe, and return its settings of this plugin and the layout of a step; the recipe need not give the
    cost of a sample yet.

    Raises:
        RecipeError: the settings are wrong, or the plugin cannot work with this recipe or gains nothing.
    """
    settings = read(value_at(recipe, KEY))
    loader = section_at(recipe, "train_dataset.data_loader")
    if loader.get("type") != LOADER:
        raise RecipeError(
            f"{KEY} works only with {LOADER}, not with {loader.get('type')!r}", "train_dataset.data_loader.type"
        )
    if loader.get("shuffle"):
        raise RecipeError(
            f"shuffling would undo the order into which {KEY} puts the samples; write False",
            "train_dataset.data_loader.shuffle",
        )
    graph_mode_only(recipe, KEY)
    check_apart(section_at(loader, "config"), section_at(recipe, "model.model_config"))
    return settings, layout_of(recipe, settings.window)


def layout_of(recipe: Mapping[str, Any], window: int = 1) -> Layout:
    """Return how a recipe's step is divided into micro-batches, computed as MindFormers'
    `_check_global_batch_size_for_auto_parallel` does it.

    The number of micro-batches is `micro_batch_num` with a pipeline, `gradient_accumulation_steps` without a pipeline,
    and one outside semi-auto parallel, where MindFormers switches accumulation off.

    Raises:
        RecipeError: EP groups do not consist of whole data-parallel ranks, or parts of micro-batches are interleaved.
    """
    interleaved = count_at(recipe, INTERLEAVE)
    if interleaved > 1:
        raise RecipeError(
            f"{KEY} does not support the value {interleaved}, with which MindFormers takes {interleaved} times as many "
            "samples per step and splits each micro-batch; write 1",
            INTERLEAVE,
        )
    parallel = recipe.get("use_parallel") is True
    split = parallel and splits_model(value_at(recipe, "parallel.parallel_mode", 1))
    stages = count_at(recipe, "parallel_config.pipeline_stage") if split else 1
    micro_batches = "parallel_config.micro_batch_num" if stages > 1 else "runner_config.gradient_accumulation_steps"
    ranks = count_at(recipe, "parallel_config.data_parallel") if parallel else 1
    objective = objective_of(
        data_parallel=ranks,
        expert_parallel=count_at(recipe, "parallel_config.expert_parallel") if parallel else 1,
        context_parallel=count_at(recipe, "parallel_config.context_parallel") if split else 1,
        tensor_parallel=count_at(recipe, "parallel_config.model_parallel") if split else 1,
        pipeline_stages=stages,
        recomputed=recomputed_share(recipe),
    )
    slots = count_at(recipe, "runner_config.batch_size")
    return Layout(ranks, count_at(recipe, micro_batches) if split else 1, slots, objective, window)


def recomputed_share(recipe: Mapping[str, Any]) -> float:
    """Return the share of the forward pass that `recompute_config.recompute` repeats, 0 to 1.

    Selective recomputation is not counted, because it repeats only cheap operators.
    """
    recompute = value_at(recipe, "recompute_config.recompute")
    if not isinstance(recompute, (list, tuple)):
        return float(bool(recompute))
    chunks, layers = _flat(recompute), count_at(recipe, "model.model_config.num_hidden_layers")
    # True is a whole chunk, taken here as an equal part of the model
    repeated = sum(layers / len(chunks) if chunk is True else chunk for chunk in chunks if isinstance(chunk, int))
    return min(repeated / layers, 1.0)


def _flat(rows: Any) -> list[Any]:
    return [item for row in rows for item in _flat(row)] if isinstance(rows, (list, tuple)) else [rows]


def _eod_pad_length(data: Mapping[str, Any]) -> int:
    """Return `eod_pad_length` as MindFormers reads it, under either of its two names; 128 if the recipe has neither."""
    return data.get("eod_pad_length", data.get("compressed_eod_mask_length", 128))


def _padding(recipe: Mapping[str, Any]) -> int:
    """Return how many entries of the compressed mask must stay padding."""
    parallel = section_at(recipe, "parallel_config")
    split = recipe.get("use_parallel") is True and splits_model(value_at(recipe, "parallel.parallel_mode", 1))
    ranks = count_at(recipe, "parallel_config.context_parallel") if split else 1
    return padding_under(ranks, parallel.get("context_parallel_algo", "colossalai_cp"))
