"""This module estimates, before a run, how unevenly the documents of a corpus load the devices of a recipe, without and
with `plugins/attention_balance`.

1. The module maps the document lengths of PREFIX.idx into memory, and builds the dataset's index as MindFormers will
   build it; no token is read.
2. The module counts the documents of every sample on which the run trains (without the samples that
   `plugins.spike_guard` leaves out), and compares this number with the number of documents that the compressed
   attention mask can hold.
3. For some steps, spread over the run, the module computes the cost of each sample, the device that trains on the
   sample, and the work of the slowest device divided by the mean over devices.

The time of a device's computation is modelled: it is proportional to the FLOPs, at the same FLOP rate for attention and
all other work, or follows the measured costs in the recipe's plugin section. The estimator predicts the other seconds
of a step (`seconds`). The model does not include experts that get more tokens than others; such experts make the gain a
smaller part of the step. The module needs this memory: for each document 4 bytes of mapped lengths, 4 bytes for each
epoch, and 4 bytes during the shuffling; about 28 bytes for each sample of the dataset; and one window of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from plugins.attention_balance.samples import GPTIndex, build_gpt_index, check_fits
from plugins.errors import DataError, RecipeError
from plugins.spike_guard.ledger import Ranges, reached
from tools.data.imbalance.recipe import Setting, Steps, equal_costs, measure_steps, setting_of
from tools.data.index import map_lengths
from tools.estimate.efficiency import UNKNOWN, known_error
from tools.estimate.efficiency import cluster as cluster_of
from tools.estimate.from_recipe import from_recipe
from tools.estimate.time_model import TimeModel
from tools.hardware import DEFAULT_HARDWARE, Hardware
from tools.process.waiting import Reporter
from tools.recipe.load import Recipe
from tools.recipe.view import View

# A step of the recipe in seconds, by the estimator of `tc3 search`, and how many of them uneven samples add.
#
#     step = even + (ratio - 1) * stretched
#
# `even` is a step whose samples all cost what the corpus's samples cost on average, documents apart; `ratio` is what
# devices compute and wait in a step, pipeline included, over that of an even one; `stretched` are the seconds of `even`
# that grow by it. Communication, gradients and the optimizer take as long whatever the samples cost.

_STRETCHED = ("compute", "recompute", "bubble")  # parts of a step that last longer where samples are uneven


@dataclass(frozen=True)
class Seconds:
    """A `Seconds` holds the predicted seconds of a step.

    Args:
        cluster: the cluster on which the step runs.
        whole: seconds of a step in which each sample is one document, as `tc3 search` assumes.
        even: seconds of a step in which every sample has the average cost of the corpus's samples.
        stretched: the part of `even` in which devices compute, or wait for computing devices.
        error: the usual error of predicted step times, in words.
    """

    cluster: str
    whole: float
    even: float
    stretched: float
    error: str

    def step(self, over_even: float) -> float:
        """Return the seconds of a step whose computation takes `over_even` times as long as the computation of an
        evenly loaded step.
        """
        return self.even + (over_even - 1) * self.stretched


def seconds_of(recipe: Recipe, hardware: Hardware, attended: float = 1.0) -> Seconds | str:
    """Return the predicted seconds of a recipe's step, or the reason why there is no prediction. No value of the
    recipe may be `auto`.

    Args:
        attended: the number of token pairs that attend to each other, divided by that number for samples that consist
            of one document each.
    """
    if View(recipe).on_cpu:
        return "it runs on CPU workers"
    try:
        config, times = from_recipe(recipe), TimeModel(hardware)
        whole = times.step(config, simulated=True)
        even = times.step(replace(config, attended=attended), simulated=True)
    except RecipeError as error:
        return str(error)
    known, parts = known_error(hardware), even.by_part
    stretched = sum(parts[name] for name in _STRETCHED)
    return Seconds(hardware.name, whole.total, even.total, stretched, known.words if known else UNKNOWN)


# The distribution of document lengths, exact, in one pass and in memory that does not grow with the corpus.

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_CHUNK = 1 << 20  # documents or samples at a time
_COUNTED = 1 << 20  # shorter documents are counted by length; of longer ones a corpus has few, so they are kept


@dataclass(frozen=True)
class Distribution:
    """A `Distribution` holds distinct values in rising order, and the number of times that each value occurs, both as
    int64 [n]. A value is either the number of tokens of a document or the number of documents of a sample.
    """

    values: np.ndarray
    counts: np.ndarray

    @property
    def count(self) -> int:
        """Return the number of counted values."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """Return the sum of all counted values."""
        return int(self.values @ self.counts)

    def quantile(self, share: float) -> int:
        """Return a quantile: the smallest value v such that at least the fraction `share` of the values is at most
        v.
        """
        return _first(self.values, self.counts, share)

    def weighted_quantile(self, share: float) -> int:
        """Return the smallest value v for which the values up to v add up to at least the fraction `share` of the sum
        of all values.
        """
        return _first(self.values, self.counts * self.values, share)

    def octaves(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (from, below, count, sum) for each power of two in the range of the values: the number and the sum of
        the values in [from, below).
        """
        octave = np.frexp(self.values)[1] - 1  # exact below 2**53
        for power in range(int(octave[0]), int(octave[-1]) + 1):
            mine = octave == power
            yield 1 << power, 2 << power, int(self.counts[mine].sum()), int(self.values[mine] @ self.counts[mine])


def _first(values: np.ndarray, weights: np.ndarray, share: float) -> int:
    total = np.cumsum(weights)
    return int(values[np.searchsorted(total, share * total[-1] * (1 - 1e-12))])


class Counter:
    """A `Counter` counts how often each value occurs in arrays of integers, and returns the result as a
    `Distribution`.
    """

    def __init__(self) -> None:
        self._short = np.zeros(_COUNTED, np.int64)
        self._long: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Add values to the count; the values are an int array [n] of numbers that are at least 0."""
        long = values >= _COUNTED
        if long.any():
            self._long.append(np.asarray(values[long], np.int64))
            values = values[~long]
        counts = np.bincount(values)
        self._short[: len(counts)] += counts

    def result(self) -> Distribution:
        """Return the distribution of all counted values."""
        values = np.flatnonzero(self._short)
        long, counts = np.unique(np.concatenate([np.zeros(0, np.int64), *self._long]), return_counts=True)
        return Distribution(np.concatenate((values, long)), np.concatenate((self._short[values], counts)))


def count_lengths(lengths: np.ndarray, name: str, reporter: Reporter) -> Distribution:
    """Return the distribution of document lengths, which are int32 [documents] and may be memory-mapped. The argument
    `name` is the name of the file in error messages.

    Raises:
        DataError: a document has no token.
    """
    counter = Counter()
    reporter.start("reading document lengths", len(lengths))
    for start in range(0, len(lengths), _CHUNK):
        some = np.asarray(lengths[start : start + _CHUNK])
        if some.min() < 1:
            raise DataError(
                f"{name}: document {start + int(some.argmin()):,} has {int(some.min())} tokens, but each needs at "
                "least 1; prepare the corpus again"
            )
        counter.add(some)
        reporter.advance(len(some))
    return counter.result()


_DOCUMENTS = 12_000_000  # documents in the samples that the default number of steps reads: a few seconds
_MOST_STEPS = 200


@dataclass(frozen=True)
class Result:
    """A `Result` holds how evenly a corpus loads the devices of a recipe in which tokens attend only to their own
    document.

    Args:
        dataset: the number of samples in the dataset.
        epochs: the number of passes over the corpus that the dataset makes.
        samples: the distribution of the number of documents per sample, over the samples that the run trains.
        steps: the results for the steps that were examined.
    """

    setting: Setting
    dataset: int
    epochs: int
    samples: Distribution
    steps: Steps


@dataclass(frozen=True)
class Imbalance:
    """An `Imbalance` holds how evenly the documents of one corpus load the devices of one recipe, and the predicted
    seconds of a step.

    Args:
        equal: the reason why every sample costs the same, in which case `result` is None; "" if the costs of samples
            differ.
        seconds: the predicted seconds of a step of the recipe, or the reason why there is no prediction.
    """

    prefix: str
    recipe: str
    documents: Distribution
    equal: str
    result: Result | None
    seconds: Seconds | str

    @property
    def uneven(self) -> tuple[float, float] | None:
        """Return the predicted seconds of a step as (seconds without the plugin, seconds with the plugin), or None if
        they are unknown.
        """
        if self.result is None or isinstance(self.seconds, str):
            return None
        model = self.result.steps.model
        return self.seconds.step(float(model.before.mean())), self.seconds.step(float(model.after.mean()))

    @property
    def speed_up(self) -> float | None:
        """Return the speed-up by `plugins/attention_balance`: the step time without the plugin divided by the step time
        with the plugin. If step times cannot be predicted, the speed-up is the ratio of the computation times.
        """
        if self.result is None:
            return None
        return self.uneven[0] / self.uneven[1] if self.uneven else self.result.steps.speed_up


def imbalance(
    prefix: str | Path,
    recipe: Recipe,
    steps: int | None = None,
    window: int | None = None,
    reporter: Reporter | None = None,
    cluster: str = DEFAULT_HARDWARE,
) -> Imbalance:
    """Measure how evenly the documents of PREFIX.idx load the devices of `recipe`, as if PREFIX were the recipe's only
    corpus.

    Args:
        steps: the number of global batches to examine, rounded up to whole windows; None for a number that takes a few
            seconds.
        window: the number of consecutive global batches among which the plan may exchange samples; None for the
            recipe's value, or 1 if the recipe has none.
        cluster: the cluster for which seconds are predicted.

    Raises:
        DataError: the index is missing or broken, or the corpus has less than one sample.
        RecipeError: as for `equal_costs` and `setting_of`, or a sample has more documents than the attention mask can
            hold.
    """
    reporter = reporter or Reporter()
    equal, hardware = equal_costs(recipe), cluster_of(cluster)
    setting = None if equal else setting_of(recipe, prefix, window)
    lengths = map_lengths(prefix)
    documents = count_lengths(lengths, f"{prefix}.idx", reporter)
    result = _result(lengths, setting, steps, reporter) if setting else None
    seconds = seconds_of(recipe, hardware, result.steps.of_one_document if result else 1.0)
    return Imbalance(str(prefix), recipe.source, documents, equal, result, seconds)


def _result(lengths: np.ndarray, setting: Setting, steps: int | None, reporter: Reporter) -> Result:
    used = lengths[: round(setting.training_share * len(lengths))]
    if not len(used):
        raise DataError(
            f"the share of training in train_dataset.data_loader.config.split is rounded to 0 of the {len(lengths):,} "
            "documents; write a larger share, or add documents"
        )
    reporter.start(f"shuffling {len(used):,} documents as the dataset does", 1)
    whole = build_gpt_index(used, setting.sequence_length, setting.wanted, setting.seed)
    trained = setting.steps * setting.layout.batch
    # without samples to leave out the index is not copied: that takes half as much memory as the index itself
    items = trained_items(len(whole), setting.skipped, trained) if setting.skipped else None
    index = whole if items is None else replace(whole, shuffle_index=whole.shuffle_index[items])
    documents = documents_of_samples(index, trained, reporter)
    if setting.room is not None:
        check_fits(documents, setting.room + setting.padding, setting.layout.batch, setting.padding, items)
    counter = Counter()
    counter.add(documents)
    samples = counter.result()
    chosen = measure_steps(index, setting, _starts(setting, samples, steps), reporter)
    return Result(setting, len(whole), len(whole.document_index) // len(used), samples, chosen)


def trained_items(available: int, skipped: Ranges, trained: int) -> np.ndarray:
    """Return in order the items of a dataset on which a run trains, int64 [`trained`]; later items take the places of
    items that `plugins.spike_guard` leaves out.

    Args:
        available: the number of items of the dataset.
        skipped: the items that are left out, as ranges (first, stop).

    Raises:
        DataError: without these items the dataset has too few items, so that the run would not start.
    """
    end = reached(trained, skipped)
    if end > available:
        raise DataError(
            "plugins.spike_guard.skipped: without the samples that are left out, the data lacks "
            f"{end - available:,} of the {trained:,} samples that the run needs; train fewer steps, or add data"
        )
    stays = np.ones(end, bool)
    for first, stop in skipped:
        stays[first:stop] = False
    return np.flatnonzero(stays)


def documents_of_samples(index: GPTIndex, count: int, reporter: Reporter) -> np.ndarray:
    """Return the number of documents (or parts of one) in each of the dataset's first samples, as int32 [count].

    The counts are equal to those of `segments_of`, but this function reads only the sample index.
    """
    out = np.empty(count, np.int32)
    reporter.start("counting the documents of samples", count)
    for start in range(0, count, _CHUNK):
        samples = np.asarray(index.shuffle_index[start : min(start + _CHUNK, count)], np.int64)
        last, end = index.sample_index[samples + 1].T
        # a sample that ends with a document has no token of the next one, where its end is noted
        out[start : start + len(samples)] = last - index.sample_index[samples, 0] + (end > 0)
        reporter.advance(len(samples))
    return out


def _starts(setting: Setting, samples: Distribution, steps: int | None) -> np.ndarray:
    """Return the first steps of the windows that are examined, int64 [n], rising and evenly spread over the run."""
    layout = setting.layout
    if steps is None:
        of_a_step = layout.batch * samples.total / samples.count
        steps = min(max(int(_DOCUMENTS / of_a_step), 1), _MOST_STEPS)
    windows = setting.steps // layout.window
    count = min(-(-steps // layout.window), windows)
    return layout.window * np.unique(np.rint(np.linspace(0, windows - 1, count)).astype(np.int64))
