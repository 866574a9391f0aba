"""This module enables `plugins.attention_balance` of a recipe: MindFormers' Megatron loader delivers its samples in the
order of the plan.

The data loader keeps its name, by which MindFormers' trainer finds it, and its other behaviour: sharding, batches,
`take`, skipping to a step on resume, empty data on ranks that do not read. Only the index at which a rank reads
changes. Every rank that reads computes the same order from the same index files; nothing is communicated. The order
follows from the data: a resumed run has the same order as an uninterrupted one, and a run with another number of ranks
trains on the same samples in each step (with a window of several steps, in each window).

Losses stay the same up to rounding, except where the loss is a mean over samples that the plugin moves apart: the mean
over a micro-batch's unmasked tokens (`eod_mask_loss`, `mtp_documents`), and some auxiliary losses
(docs/attention-balance.md).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mindformers.dataset.dataloader.blended_megatron_dataloader import BlendedMegatronDatasetDataLoader
from mindformers.dataset.dataloader.mock_dataloader import BaseMockDataLoader
from mindformers.tools.logger import logger
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore.dataset import GeneratorDataset

from plugins.attention_balance.plan import LOADER, Schedule, balance, delivery_order, epoch_plan, schedule_of
from plugins.attention_balance.samples import GPTIndex, blended, check_fits, check_last_tokens, documents_of_items
from plugins.errors import RecipeError
from plugins.spike_guard.ledger import Ranges, behind, count, reached

_DOCUMENTS_LOOKED_AT = 16


class Reordered:
    """A `Reordered` is a view of a random-access dataset whose item i is `source[order[i]]`.

    The columns of an item are returned as tuples. The view is a class, not a closure, so that it can be passed to
    MindSpore's reader processes.
    """

    def __init__(self, source: Any, order: np.ndarray):
        self.source = source
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, item: int) -> Any:
        return self.source[self.order[item]]


class BalancedMegatronDataLoader(BlendedMegatronDatasetDataLoader):
    """This data loader replaces the registered `BlendedMegatronDatasetDataLoader` while the plugin is on; without the
    argument `schedule` it does the same as MindFormers' loader.

    Args:
        schedule: the schedule, only for the training data; other data sets keep their order. All other arguments are
            those of MindFormers.
    """

    def __new__(cls, *, sizes, schedule=None, num_shards=None, shard_id=None, **arguments):
        """Return a GeneratorDataset, whose samples come in the order of `schedule` if that is given."""
        stock = super().__new__(cls, sizes=sizes, num_shards=num_shards, shard_id=shard_id, **arguments)
        if schedule is None:
            return stock
        if (num_shards or 1) != schedule.layout.ranks:
            raise RecipeError(
                f"parallel.dataset_strategy: the data is divided among {num_shards or 1} ranks, but "
                f"parallel_config.data_parallel is {schedule.layout.ranks}: plugins.attention_balance needs both "
                "numbers to be equal"
            )
        if isinstance(stock.source, BaseMockDataLoader):
            return stock
        ordered = Reordered(stock.source, order_of(stock.source, int(sizes[0]), schedule))
        return GeneratorDataset(
            ordered, column_names=stock.column_names, shuffle=False, num_shards=num_shards, shard_id=shard_id
        )


def enable(config, settings) -> None:
    """Make MindFormers deliver the training data of `config` (a MindFormerConfig) in balanced order.

    Raises:
        RecipeError: the settings are wrong, or the plugin cannot work with this recipe or gains nothing.
        DataError, RecipeError: the recipe's masks do not fit the documents; raised later, when the data is opened.
    """
    plugins = {**(config.get("plugins") or {}), "attention_balance": settings}
    schedule = schedule_of({**config, "plugins": plugins}, os.environ)
    config.train_dataset.data_loader.schedule = schedule
    MindFormerRegister.register_cls(BalancedMegatronDataLoader, MindFormerModuleType.DATASET_LOADER, alias=LOADER)


def order_of(source: Any, samples: int, schedule: Schedule) -> np.ndarray:
    """Return int64 [len(source)]: for each position in the delivery order, the index of the item of `source` to
    deliver.

    Args:
        source: MindFormers' BlendedDataset or GPTDataset.
        samples: `sizes[0]`; only whole steps of these samples are reordered, and the samples after them keep their
            places.
        schedule: the schedule that says what to balance.

    Memory: tens of bytes per sample and some 200 MiB while it is worked out, 8 bytes per sample afterwards.

    Raises:
        RecipeError: a sample that is trained has more documents than its compressed mask holds.
        DataError: the documents of the corpus do not end with the EOD token of the recipe.
    """
    parts = getattr(source, "datasets", [source])
    indices = [index_of(part) for part in parts]
    for part in parts:
        _check_ends(part)
    layout = schedule.layout
    trained = layout.steps(samples) * layout.batch
    costs = _of_items(source, [schedule.cost.of_dataset(index) for index in indices], trained)
    plan = epoch_plan(costs, layout)
    order = np.concatenate([delivery_order(plan, schedule.gathered), np.arange(trained, len(source))])
    if schedule.eod_pad_length is not None:
        of_parts = [documents_of_items(index) for index in indices]
        more = behind(source, count(schedule.skipped))[0]
        end = min(reached(trained, schedule.skipped), len(source))
        documents = np.append(_of_items(source, of_parts, end), [of_parts[part][item] for part, item in more])
        items = trained_items(order[:end], trained, schedule.skipped, len(documents))
        check_fits(documents[items], schedule.eod_pad_length, layout.batch, schedule.padding, items)
    if len(plan):
        _report(costs, plan, schedule)
    return order


def trained_items(order: np.ndarray, trained: int, skipped: Ranges, available: int) -> np.ndarray:
    """Return the items of the dataset on which a run trains, in order, as int64 [up to `trained`]. The samples in
    `skipped` are left out, and later items of the dataset take the places of the samples that are left out.

    Args:
        order: see `order_of`.
        trained: the number of samples on which the run trains.
        skipped: as in `Schedule`.
        available: the number of items, of which those behind the end of `order` follow in their own order.
    """
    if not skipped:
        return np.arange(trained)  # in the order of the data, as `tc3 data imbalance` counts them; steps stay the same
    stays = np.ones(available, bool)
    for first, stop in skipped:
        stays[first:stop] = False
    return np.append(order, np.arange(len(order), available))[stays][:trained]


def index_of(dataset: Any) -> GPTIndex:
    """Return the arrays of MindFormers' GPTDataset without copying them."""
    return GPTIndex(
        dataset.dataset.sequence_lengths,
        dataset.document_index,
        dataset.sample_index,
        dataset.shuffle_index,
        dataset.config.sequence_length,
    )


def _of_items(source: Any, values: list[np.ndarray], count: int) -> np.ndarray:
    """Return [`count`] for the first items of `source` from [items] of each of its data sets. Behind the items that are
    trained MindFormers' blends may name an item that a data set does not have.
    """
    if not hasattr(source, "datasets"):
        return values[0][:count]
    return blended(values, source.dataset_index[:count], source.dataset_sample_index[:count])


def _check_ends(part: Any) -> None:
    documents = part.dataset
    looked_at = np.linspace(0, len(documents) - 1, min(_DOCUMENTS_LOOKED_AT, len(documents)), dtype=np.int64)
    last = [documents.get(i, offset=int(documents.sequence_lengths[i]) - 1, length=1)[0] for i in looked_at]
    check_last_tokens(np.array(last), part._eod_token_id, documents.path_prefix)


def _report(costs: np.ndarray, plan: np.ndarray, schedule: Schedule) -> None:
    found = balance(costs, plan, schedule.layout)
    logger.info(
        "plugins.attention_balance: time of a step over that of an evenly loaded one, mean of %d steps: "
        "%.3f without the plugin, %.3f with it",
        len(plan),
        found.before.mean(),
        found.after.mean(),
    )
