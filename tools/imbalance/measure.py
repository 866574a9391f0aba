"""How unevenly a corpus loads the devices of a recipe, without and with `plugins/attention_balance`, before any run.

1. Document lengths from PREFIX.idx, mapped; the dataset's index as MindFormers will build it; no token is read.
2. Documents of every sample that the run trains, against the room of the compressed mask.
3. Some steps, spread over the run: the cost of each sample, who trains it, and what the slowest device does over the
   mean.

Modelled: a device's computation takes as long as its FLOPs say, equally fast for attention and the rest, or the costs
that the recipe's plugin section measured; what a step has beside it is the estimator's (`seconds`). Experts that get
more tokens than others are not counted; they make the gain a smaller part of the step. Memory: for each document 4
bytes of mapped lengths, 4 bytes an epoch and 4 while they are shuffled; some 28 bytes for each sample of the dataset;
and one window of steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plugins.attention_balance.plan import GPTIndex, build_gpt_index
from plugins.attention_balance.samples.eod import check_fits
from tools.data.index import map_lengths
from tools.data.reporter import Reporter
from tools.estimate.efficiency import cluster as cluster_of
from tools.hardware import DEFAULT_HARDWARE
from tools.imbalance.lengths import Counter, Distribution, count_lengths
from tools.imbalance.recipe import Setting, equal_costs, setting_of
from tools.imbalance.seconds import Seconds, seconds_of
from tools.imbalance.steps import Steps, measure_steps
from tools.recipe.load import Recipe

_DOCUMENTS = 12_000_000  # documents in the samples that the default number of steps reads: a few seconds
_MOST_STEPS = 200
_CHUNK = 1 << 20  # samples at a time


@dataclass(frozen=True)
class Result:
    """A recipe that keeps documents apart.

    Args:
        dataset: samples that the dataset holds; epochs: passes over the corpus in them.
        samples: documents of each sample that the run trains.
        steps: what the chosen steps say.
    """

    setting: Setting
    dataset: int
    epochs: int
    samples: Distribution
    steps: Steps


@dataclass(frozen=True)
class Imbalance:
    """A corpus and a recipe.

    Args:
        equal: why every sample costs the same; then there is no result.
        seconds: a step of the recipe, or why it is not predicted.
    """

    prefix: str
    recipe: str
    documents: Distribution
    equal: str
    result: Result | None
    seconds: Seconds | str

    @property
    def uneven(self) -> tuple[float, float] | None:
        """Seconds of a step of this corpus (without, with) the plugin, where they are predicted."""
        if self.result is None or isinstance(self.seconds, str):
            return None
        model = self.result.steps.model
        return self.seconds.step(float(model.before.mean())), self.seconds.step(float(model.after.mean()))

    @property
    def speed_up(self) -> float | None:
        """A step's seconds without the plugin over those with it; of its computation alone where none are predicted."""
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
    """Measure PREFIX.idx as the only corpus of `recipe`.

    Args:
        steps: global batches to look at, rounded up to whole windows; None: as many as take seconds.
        window: global batches whose samples may change places; None: what the recipe says, or 1.
        cluster: whose seconds to predict.

    Raises:
        DataError: no index, a broken one, or less than one sample.
        RecipeError: see `equal_costs` and `setting_of`; a sample with more documents than the mask holds.
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
    reporter.start(f"shuffling {len(used):,} documents as the dataset does", 1)
    index = build_gpt_index(used, setting.sequence_length, setting.wanted, setting.seed)
    documents = documents_of_samples(index, setting.steps * setting.layout.batch, reporter)
    if setting.room is not None:
        check_fits(documents, setting.room, setting.layout.batch)
    counter = Counter()
    counter.add(documents)
    samples = counter.result()
    chosen = measure_steps(index, setting, _starts(setting, samples, steps), reporter)
    return Result(setting, len(index), len(index.document_index) // len(used), samples, chosen)


def documents_of_samples(index: GPTIndex, count: int, reporter: Reporter) -> np.ndarray:
    """int32 [count]: documents (or parts of one) in each of the dataset's first samples.

    Equal to the counts of `segments_of`, from the sample index alone.
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
    """First steps of the windows to look at, int64 [n], rising, spread evenly over the run."""
    layout = setting.layout
    if steps is None:
        of_a_step = layout.batch * samples.total / samples.count
        steps = min(max(int(_DOCUMENTS / of_a_step), 1), _MOST_STEPS)
    windows = setting.steps // layout.window
    count = min(-(-steps // layout.window), windows)
    return layout.window * np.unique(np.rint(np.linspace(0, windows - 1, count)).astype(np.int64))
