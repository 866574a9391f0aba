"""This module says on which samples each step of a run trains while the global batch grows, and reads
`plugins.batch_ramp` of a recipe. The module is pure Python.

A ramp is a list of stages `[last step, samples of a step]`; after the last stage, the number of samples in a step
follows from the recipe's own keys (`runner_config.batch_size`, data-parallel ranks, micro-batches). A recipe without a
ramp is treated as a ramp without stages, and `Ramp` makes every conversion between steps and samples: for the data
loader, a resume, the number of steps of a run, and the learning rate.

Steps are counted from 1, samples from 0. Step s trains on the samples [samples_until(s - 1), samples_until(s)): each
sample is used once, in order. These samples are dealt to the data-parallel ranks in turn, as MindSpore deals samples
without a ramp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from itertools import pairwise
from typing import Any

from plugins.errors import RecipeError
from plugins.held_out_loss.plan import stages_and_micro_batches
from plugins.pipeline_layout import fewest_to_fill
from plugins.semi_auto_cpu.chosen import splits_model
from plugins.settings import Section, count_at, graph_mode_only, setting, value_at

KEY = "plugins.batch_ramp"
LOADER = "BlendedMegatronDatasetDataLoader"
STEPS, SAMPLES = AXES = ("steps", "samples")
_LOADER = "train_dataset.data_loader"
_RIGHT = "write [[last step, samples], ...], such as [[1000, 512], [2000, 1024]]"

Stages = tuple[tuple[int, int], ...]


def _stages(value: Any) -> Stages:
    if not isinstance(value, (list, tuple)) or not value:
        raise RecipeError(f"{value!r} is not a list of stages; {_RIGHT}")
    for stage in value:
        if not (isinstance(stage, (list, tuple)) and len(stage) == 2):
            raise RecipeError(f"{stage!r} is not a stage of two numbers; {_RIGHT}")
        if not all(type(number) is int and number > 0 for number in stage):
            raise RecipeError(f"{list(stage)!r} is not a stage: both numbers must be whole and above 0; {_RIGHT}")
    for (end, batch), (later, larger) in pairwise(value):
        if later <= end:
            wrong = f"a stage that ends at step {later} is listed after a stage that ends at step {end}"
            raise RecipeError(f"{wrong}; sort the stages by their last step")
        if larger <= batch:
            wrong = (
                f"the stage until step {later} has {larger} samples per step, which is not more than the {batch} "
                f"samples of the stage until step {end}"
            )
            raise RecipeError(f"{wrong}; write a larger number, or join the two stages")
    return tuple((end, batch) for end, batch in value)


@dataclass(frozen=True)
class Settings(Section):
    """A `Settings` says how the global batch grows, and whether the learning rate's schedule counts steps or
    samples.
    """

    KEY = KEY
    RIGHT = f"write `stages: [[last step, samples], ...]` under it, or {KEY}: False to leave it off"
    CHANGE = ("numbers", "other samples in a step")

    stages: Stages = setting(
        MISSING,
        "`[last step, samples of a step]` of each stage; after the last one a step has the recipe's own batch",
        _RIGHT,
        parse=_stages,
    )
    learning_rate: str = setting(
        STEPS,
        "what `lr_schedule` counts: `steps`, or `samples`, in units of the recipe's own batch",
        choices=AXES,
    )


read = Settings.read


@dataclass(frozen=True)
class Ramp:
    """A `Ramp` converts between steps and samples of a run whose global batch grows.

    Attributes:
        stages: (last step, samples in a step) of each stage; both numbers grow.
        full: the number of samples in a step after the last stage.
    """

    stages: Stages
    full: int

    def batch_at(self, step: int) -> int:
        """Return the number of samples in step number `step`; steps count from 1."""
        return next((batch for end, batch in self.stages if step <= end), self.full)

    def samples_until(self, step: int) -> int:
        """Return on how many samples the first `step` steps train."""
        samples = begin = 0
        for end, batch in self.stages:
            samples += batch * (min(step, end) - begin)
            begin = min(step, end)
        return samples + self.full * (step - begin)

    def steps_of(self, samples: int) -> int:
        """Return the largest number of whole steps that can be trained with `samples` samples."""
        begin = 0
        for end, batch in self.stages:
            if samples < batch * (end - begin):
                return begin + samples // batch
            samples -= batch * (end - begin)
            begin = end
        return begin + samples // self.full

    def rows_at(self, step: int, rank: int, ranks: int) -> range:
        """Return, as a range, the samples on which data-parallel rank `rank`, one of `ranks` ranks, trains in step
        number `step`.
        """
        return range(self.samples_until(step - 1) + rank, self.samples_until(step), ranks)

    def end_at(self, step: int) -> int | None:
        """Return the last step of the stage that contains step number `step`; return None if the step comes after the
        last stage.
        """
        return next((end for end, _ in self.stages if step <= end), None)


def ramp_of(recipe: Mapping[str, Any], full: int) -> Ramp:
    """Return the ramp of a recipe whose full global batch is `full` samples. The ramp has no stages if the plugin is
    off, or if `Settings` refuses the plugin's section.
    """
    settings = Settings.look(value_at(recipe, KEY))[0]
    return Ramp(settings.stages if settings else (), full)


def scheduled(recipe: Mapping[str, Any], ramp: Ramp, steps: int) -> int:
    """Return the position in the learning-rate schedule (`lr_schedule`) after the first `steps` steps of a run. If the
    setting `learning_rate` has the value "samples", the position is the number of steps with the full batch that train
    on the same number of samples, rounded up. If `learning_rate` has the value "steps", the position is the argument
    `steps` itself.
    """
    settings = Settings.look(value_at(recipe, KEY))[0]
    by_samples = settings is not None and settings.learning_rate == SAMPLES
    return -(-ramp.samples_until(steps) // ramp.full) if by_samples else steps


def fewest_micro_batches(pipeline: int, scheduler: str = "") -> int:
    """Return the smallest number of micro-batches that a step of a growing batch may have with `pipeline` stages:
    enough to fill the stages, and at least two, because MindSpore accumulates the gradient of a single micro-batch
    wrongly.
    """
    return max(2, fewest_to_fill(pipeline, scheduler))


@dataclass(frozen=True)
class Division:
    """A `Division` says how the samples of a step are divided over ranks and micro-batches.

    Attributes:
        ranks: the number of data-parallel ranks.
        micro: the number of samples in a micro-batch of one rank.
        micro_batches: the number of micro-batches in a step with the recipe's own batch.
        pipeline: the number of pipeline stages.
        whole: whether the step of a rank is a single batch of any size, because the model is not split over devices
            (MindFormers then does not accumulate gradients).
        scheduler: the name of the pipeline's schedule.
    """

    ranks: int
    micro: int
    micro_batches: int
    pipeline: int
    whole: bool
    scheduler: str = ""

    @property
    def unit(self) -> int:
        """Return the number by which the samples of every step must be divisible."""
        return self.ranks * (1 if self.whole else self.micro)

    @property
    def full(self) -> int:
        """Return the number of samples in a step with the recipe's own batch, which is the batch after the ramp."""
        return self.ranks * self.micro * self.micro_batches

    @property
    def least(self) -> int:
        """Return the smallest number of micro-batches that a step of a ramp may have."""
        return 1 if self.whole else fewest_micro_batches(self.pipeline, self.scheduler)

    def advice(self, micro_batches: int, word: str = "write at least") -> str:
        """Return the advice for an error about a stage of the ramp whose batch is too small. The advice is to write the
        smallest allowed number of samples or, if the recipe's full batch is not larger than this number, to leave the
        stage out.
        """
        samples = micro_batches * self.unit
        if samples < self.full:
            return f"{word} {samples}"
        return f"leave the stage out, because the recipe's own batch of {self.full} is not larger than {samples}"

    def micro_batches_at(self, samples: int) -> int:
        """Return the number of micro-batches in a step of `samples` samples."""
        return 1 if self.whole else samples // self.unit


def division_of(recipe: Mapping[str, Any]) -> Division:
    """Return how a flat recipe or a MindFormerConfig divides its full global batch over ranks and micro-batches."""
    together = bool(recipe.get("use_parallel"))
    whole = not (together and splits_model(value_at(recipe, "parallel.parallel_mode", 1)))
    pipeline, micro_batches = stages_and_micro_batches(recipe)
    ranks = count_at(recipe, "parallel_config.data_parallel") if together else 1
    scheduler = str(value_at(recipe, "parallel.pipeline_config.pipeline_scheduler") or "")
    micro = count_at(recipe, "runner_config.batch_size")
    return Division(ranks, micro, micro_batches, pipeline, whole, scheduler)


def check(recipe: Mapping[str, Any]) -> Settings:
    """Return the settings of a recipe whose `plugins.batch_ramp` is on.

    Raises:
        RecipeError: the settings are wrong, the layout cannot divide a stage, or this is a recipe in which the plugin
            cannot change the batch.
    """
    settings, division = read(value_at(recipe, KEY)), division_of(recipe)
    key = f"{KEY}.stages"
    for end, batch in settings.stages:
        if batch % division.unit:
            parts = f"{division.ranks} data-parallel ranks"
            parts += "" if division.whole else f" x {division.micro} samples of a micro-batch"
            raise RecipeError(
                f"the stage until step {end} has {batch} samples per step, which are not divisible by {division.unit} "
                f"({parts}); {division.advice(max(division.least, round(batch / division.unit)), 'write')}",
                key,
            )
        if (made := division.micro_batches_at(batch)) < division.pipeline:
            raise RecipeError(
                f"the stage until step {end} has {batch} samples per step; these make {made} micro-batches, fewer than "
                f"the {division.pipeline} stages of the pipeline; {division.advice(division.pipeline)}",
                key,
            )
        if made < division.least and division.pipeline > 1:
            raise RecipeError(
                f"the stage until step {end} has {batch} samples per step; these make {made} micro-batches, but "
                f"{division.scheduler} needs {division.least} for the {division.pipeline} stages of the pipeline; "
                f"{division.advice(division.least)}",
                key,
            )
        if made < division.least:
            raise RecipeError(
                f"the stage until step {end} has {batch} samples per step, which make only one micro-batch. With a "
                "single micro-batch MindSpore accumulates wrong gradients (in one process they are zero); "
                f"{division.advice(2)}, or halve runner_config.batch_size and double "
                "runner_config.gradient_accumulation_steps",
                key,
            )
    last, most = settings.stages[-1]
    if most >= division.full:
        raise RecipeError(
            f"the last stage, until step {last}, has {most} samples per step, but the recipe's full batch after it has "
            f"only {division.full}; write fewer samples, or raise runner_config.batch_size or the micro-batches",
            key,
        )
    _check_loader(recipe, division)
    _check_others(recipe, division)
    if settings.learning_rate == SAMPLES and not value_at(recipe, "lr_schedule.type"):
        wrong = f"the value {SAMPLES!r} works only with lr_schedule, which this recipe lacks"
        raise RecipeError(f"{wrong}; write {STEPS!r}, or add lr_schedule", f"{KEY}.learning_rate")
    if settings.learning_rate == SAMPLES and value_at(recipe, "grouped_lr_schedule"):
        wrong = (
            f"the value {SAMPLES!r} works only with one lr_schedule for all weights, not with a schedule for each "
            "parameter group"
        )
        raise RecipeError(f"{wrong}; write {STEPS!r}", f"{KEY}.learning_rate")
    return settings


def _check_loader(recipe: Mapping[str, Any], division: Division) -> None:
    """Refuse data loaders for which the number of a step does not determine its samples, or whose data do not pass
    through this process.
    """
    kind = value_at(recipe, f"{_LOADER}.type")
    if kind != LOADER:
        raise RecipeError(
            f"{KEY} works only with the data loader {LOADER}, and this recipe has {kind!r}; leave the plugin out",
            f"{_LOADER}.type",
        )
    if value_at(recipe, f"{_LOADER}.shuffle"):
        raise RecipeError(
            f"if the data is shuffled, {KEY} cannot compute which samples a step reads; write False",
            f"{_LOADER}.shuffle",
        )
    graph_mode_only(recipe, KEY)
    if (value_at(recipe, "runner_config.epochs") or 1) != 1:
        wrong = f"{KEY} counts steps from the run's beginning, so a second epoch has no stages"
        raise RecipeError(f"{wrong}; write 1, and ask for more samples with {_LOADER}.sizes", "runner_config.epochs")
    if value_at(recipe, "runner_config.sink_mode", True):
        raise RecipeError(
            f"in sink mode the queue to the device keeps one batch shape for the whole run, but {KEY} changes this "
            "shape; write False, or train each stage as a run of its own and resume",
            "runner_config.sink_mode",
        )
    level = "context.dataset_broadcast_opt_level"
    if not division.whole and value_at(recipe, level) != 0:
        wrong = "MindFormers' default lets only some ranks read data and sends it to the others by sink mode's queue"
        raise RecipeError(f"{wrong}, but with {KEY} each process must read its own batches; write 0", level)
    if value_at(recipe, "train_dataset.dynamic_batch"):
        raise RecipeError(f"{KEY} does not pad samples to one length; write False", "train_dataset.dynamic_batch")


# plugin: why it cannot run with this plugin
_NEVER = {"attention_balance": "moves samples within a window of steps whose batches have one size"}
_OF_MICRO_BATCHES = {"held_out_loss": "runs the train step with batches of the recipe's own size"}
_OF_ONE_BATCH = {"ep_overlap": "cuts a rank's batch of one size into chunks"}


def _check_others(recipe: Mapping[str, Any], division: Division) -> None:
    for name, why in (_NEVER | (_OF_ONE_BATCH if division.whole else _OF_MICRO_BATCHES)).items():
        if value_at(recipe, f"plugins.{name}", False) not in (None, False):
            raise RecipeError(
                f"the plugin {why}, but {KEY} changes that size; leave one of the two plugins out", f"plugins.{name}"
            )
