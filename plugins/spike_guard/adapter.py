"""This module enables `plugins.spike_guard` of a recipe: it adds monitors that end the run at a spike, and a data
loader that leaves samples out.

No state is rolled back within the process. A rank that observes a spike writes `RUN/skipped.json` (`ledger.py`) and
ends the run, as `plugins.finite_loss` does, which this plugin replaces. The launch then starts the run again from the
newest good checkpoint, with the left-out samples in `plugins.spike_guard.skipped` of the effective recipe.

No step needs an additional collective for this check. With data parallelism all ranks have the loss and the norm, so
all ranks write the same file. In a pipeline the ranks that compute the loss judge the loss, and all ranks judge the
norm; if a single rank ends, the whole run ends. The values of the good steps before a resume are read from the rank's
own metrics, so the verdict on a step does not depend on where the run was interrupted, as long as the layout stays.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindformers.core.callback.callback import MFLossMonitor
from mindformers.dataset.blended_datasets.blended_dataset import BlendedDataset
from mindformers.dataset.dataloader.mock_dataloader import BaseMockDataLoader
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindformers.trainer import base_trainer
from mindspore.dataset import GeneratorDataset

from plugins.all_ranks import has_loss, pipeline_of
from plugins.batch_ramp.plan import Ramp, Stages, ramp_of
from plugins.errors import DataError, StoppedError
from plugins.finite_loss import adapter as finite_loss
from plugins.finite_loss.plan import NORM, Watch
from plugins.private_hooks import relies_on
from plugins.spike_guard.ledger import Ranges, add_entry, behind, count, original, read_ledger
from plugins.spike_guard.plan import KEY, LOADER, Settings, Window, check, good_steps, what_follows

# how many steps are trained, and what a blend goes on with, is worked out here as MindFormers does it
relies_on(base_trainer.BaseTrainer, "dataset = dataset.take(int(dataset_info.sizes[0]) // self.global_batch_size)")
relies_on(BlendedDataset, "dataset_sample_id = self.dataset_sample_index[idx]")


def enable(config, settings) -> None:
    """Watch the run of `config` (a MindFormerConfig) for spikes, and leave out the samples that its settings list.

    Raises:
        RecipeError: the settings are wrong, or the plugin does not support the recipe.
        DataError, RecipeError: the data has too few samples to skip any; this is raised later, when the data is opened
            and training begins.
    """
    chosen = check({**config, "plugins": {**(config.get("plugins") or {}), "spike_guard": settings}})
    loss_here = has_loss(get_real_rank(), get_real_group_size(), *pipeline_of(config))
    length = config.model.model_config.seq_length
    guard = Guard(chosen, config.output_dir, finite_loss.undefined_of(config), loss_here, length)
    finite_loss.put_in(config, guard, guard.end)
    callback_type, loader_type = MindFormerModuleType.CALLBACK, MindFormerModuleType.DATASET_LOADER
    losses = MindFormerRegister.get_cls(callback_type, "MFLossMonitor")
    MindFormerRegister.register_cls(
        _beginning(losses, guard, ramp_of(config, 1).stages), callback_type, alias="MFLossMonitor"
    )
    config.train_dataset.data_loader.guarded = True  # other data sets are read by the same class
    loader = MindFormerRegister.get_cls(loader_type, LOADER)
    MindFormerRegister.register_cls(_skipping(loader, guard), loader_type, alias=LOADER)


class Guard(Watch):
    """A `Guard` watches the loss and the gradient norm for spikes and for values that are not finite, and decides
    whether the run goes back to a checkpoint.

    Args:
        settings: see `plan.Settings`.
        run_dir: the run's folder.
        undefined: as in `Watch`.
        has_loss: whether this rank has the loss of the run.
        length: the number of tokens of a sample.
    """

    def __init__(self, settings: Settings, run_dir: str, undefined: tuple[str, ...], has_loss: bool, length: int):
        super().__init__(1, undefined=undefined)
        self.settings, self.run_dir, self.has_loss, self.length = settings, run_dir, has_loss, length
        self.window = Window(settings.window, settings.threshold)
        self.before = read_ledger(run_dir)
        self.ramp = Ramp((), 0)
        self.spare: Callable[[int], int] | None = None  # see `spare_of`; None on a rank that reads no data

    def begin(self, ramp: Ramp, done: int) -> None:
        """Record that training begins after `done` steps; `ramp` says how many samples each step has.

        Raises:
            DataError: the data has too few samples for the number of rollbacks in the settings.
        """
        self.ramp, batch = ramp, ramp.full
        needed = 0 if self.before else self.settings.rollbacks * self.settings.skip * batch
        spare = self.spare(needed) if self.spare else needed
        if spare < needed:
            raise DataError(
                f"train_dataset.data_loader.sizes: the data has only {spare:,} samples beyond those that the run needs,"
                f" but {KEY} may leave out {needed:,} ({self.settings.rollbacks} rollbacks, {self.settings.skip} "
                f"steps of {batch} samples each): train fewer steps, lower {KEY}.rollbacks, or add data"
            )
        metrics = Path(self.run_dir) / "metrics" / f"rank_{get_real_rank()}.jsonl"
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        for readings in good_steps(lines, done, self.settings.window, ramp, self.length):
            self._spike(readings)

    def see(self, step, losses, norm, overflow, scale):
        """Judge whether a step's values are finite, as `Watch.see` does, and then whether the step is a spike."""
        wrong = super().see(step, losses, norm, overflow, scale)
        if wrong is None and not overflow and (spike := self._spike({"loss": self.logged, NORM: norm})):
            self.run.append((step, spike))
            return self.verdict
        return wrong

    def _spike(self, readings):
        return self.window.see(readings if self.has_loss else {NORM: readings[NORM]})

    def end(self, saver, step: int, wrong: str) -> None:
        """Write `RUN/skipped.json` if the run is to go back to a checkpoint, and end the run with StoppedError."""
        entry, words = what_follows(step, wrong, self.before, self.settings, self.ramp, self.settings.skipped)
        if entry is None:
            raise StoppedError(f"{words}; {finite_loss.way_on(saver)}")
        add_entry(self.run_dir, entry)
        raise StoppedError(words)


def _beginning(monitor: type[MFLossMonitor], guard: Guard, stages: Stages = ()):
    """Return a subclass of the loss monitor class `monitor` that reports the beginning of the training to `guard`;
    `stages` are those of plugins.batch_ramp.
    """

    class GuardedLossMonitor(monitor):
        def on_train_begin(self, run_context):
            super().on_train_begin(run_context)
            guard.begin(Ramp(stages, self.global_batch_size), self.initial_step or 0)

    return GuardedLossMonitor


def _skipping(loader: Any, guard: Guard):
    """Return a subclass of the loader class `loader` that leaves samples out if it is created with `guarded=True`."""

    class SkippingDataLoader(loader):
        def __new__(cls, *, sizes, guarded=False, num_shards=None, shard_id=None, **arguments):
            stock = super().__new__(cls, sizes=sizes, num_shards=num_shards, shard_id=shard_id, **arguments)
            if not guarded or isinstance(stock.source, BaseMockDataLoader):
                return stock
            skipped, trained = guard.settings.skipped, int(sizes[0])
            check_enough(stock.source, skipped, trained)
            guard.spare = lambda wanted: spare_of(stock.source, skipped, trained, wanted)
            view = Skipping(stock.source, skipped)
            shards = {"num_shards": num_shards, "shard_id": shard_id}
            return GeneratorDataset(view, column_names=stock.column_names, shuffle=False, **shards)

    return SkippingDataLoader


class Skipping:
    """A `Skipping` is a view of a random-access dataset without the samples in `skipped`; for each skipped sample, one
    further sample from beyond the usual end of the dataset is added at the end.
    """

    def __init__(self, source: Any, skipped: Ranges):
        self.source, self.skipped = source, skipped
        self.more, self.parts = behind(source, count(skipped))

    def __len__(self) -> int:
        return len(self.source) + len(self.more) - count(self.skipped)

    def __getitem__(self, item: int) -> Any:
        sample = original(int(item), self.skipped)
        if sample < len(self.source):
            return self.source[sample]
        part, own = self.more[sample - len(self.source)]
        return self.parts[part][own]


def spare_of(source: Any, skipped: Ranges, trained: int, wanted: int) -> int:
    """Return how many samples, up to `wanted`, are left in `source` if the samples in `skipped` are left out and the
    run trains on `trained` samples.
    """
    have = len(source) - count(skipped) - trained
    if have < wanted:
        have += len(behind(source, count(skipped) + wanted)[0])
    return min(have, wanted)


def check_enough(source: Any, skipped: Ranges, trained: int) -> None:
    """Raise DataError if fewer than `trained` samples of `source` remain when `skipped` is left out."""
    spare = spare_of(source, skipped, trained, 0)
    if spare < 0:
        raise DataError(
            f"{KEY}.skipped: without the {count(skipped):,} samples that are left out, the data has only "
            f"{trained + spare:,} of the {trained:,} samples that train_dataset.data_loader.sizes asks for: train "
            "fewer steps, or add data"
        )
