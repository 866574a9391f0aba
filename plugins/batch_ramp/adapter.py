"""This module makes MindFormers train with a global batch that grows (`plugins.batch_ramp`).

* Data. The loader's items are the batches of a rank (`Steps`): an item of the dataset is the set of samples that a rank
  trains in one step, so a resume skips whole steps, whatever their sizes, without reading them.
* Graph. MindSpore compiles the train step again for an input of another shape. Before a new compilation, the cells that
  hold the number of samples or micro-batches get the new number (`Stage`), so there is one graph for each stage.
* Callbacks. MFLossMonitor, the first callback, changes the stage before a step, and counts the samples of this step.
* Learning rate. With `learning_rate: samples` the argument of the schedule is the number of full-batch steps that hold
  the samples trained so far (`BySamples`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindformers.core.callback.callback import MFLossMonitor, TopkBiasBalanceCallback, TrainingStateMonitor
from mindformers.dataset import causal_language_model_dataset as stock_dataset
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.trainer import base_trainer
from mindformers.wrapper.wrapper import GradAccumulationCellWithMultiOutputs, PipelineCellWithMultiOutputs
from mindspore import ParameterTuple, nn, ops
from mindspore.common import dtype as mstype
from mindspore.dataset import GeneratorDataset
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from plugins.batch_ramp.plan import SAMPLES, Division, Ramp, check, division_of, scheduled
from plugins.private_hooks import relies_on, replace, train_step
from plugins.semi_auto_cpu.chosen import chosen as chosen_on_cpu

# the numbers that follow the batch are read here and nowhere else
relies_on(MFLossMonitor, "throughput = self.global_batch_size / self.device_num / (per_step_seconds / 1000)")
relies_on(TopkBiasBalanceCallback, "expert_loads = network.update_topk_bias(self.gradient_accumulation_steps)")
relies_on(nn.Cell.init_parameters_data, "cell.__dict__[key] = ParameterTuple(new_param_tuple)")


def enable(config, settings) -> None:
    """Let the global batch of `config` (a MindFormerConfig) grow as the plugin's settings say.

    Raises:
        RecipeError: the settings are wrong, or the batch of this recipe cannot change.
    """
    recipe = {**config, "plugins": {**(config.get("plugins") or {}), "batch_ramp": settings}}
    chosen, division = check(recipe), division_of(recipe)
    ramp = Ramp(chosen.stages, division.full)
    config.train_dataset.data_loader.ramped = True  # other data sets are batched by the same function
    _deal_by_steps(ramp, division)
    stage = Stage(division, by_sample=config.context.device_target == "CPU" and not chosen_on_cpu(config))
    _begin_in(stage, ramp)
    if not division.whole:
        from plugins.semi_auto_cpu.adapter import compile_without_sink

        replace(base_trainer, "compile_model", "'sink_mode' must be set to True", compile_without_sink)
    kind = MindFormerModuleType.CALLBACK
    monitor = MindFormerRegister.get_cls(kind, "MFLossMonitor")
    MindFormerRegister.register_cls(_ramping(monitor, ramp, stage), kind, alias="MFLossMonitor")
    if chosen.learning_rate == SAMPLES:
        _count_samples(config, recipe, ramp)


class Steps:
    """A `Steps` is a random-access dataset whose items are the batches of a data-parallel rank, one for each step.

    Args:
        source: the samples of all ranks by number, each a tuple of arrays.
        rank, ranks: the data-parallel rank and the number of these ranks.
        total: the number of samples of the run.
        join: builds the columns of a batch from the columns of the samples, as MindFormers' `per_batch_map` does.
    """

    def __init__(self, source: Any, ramp: Ramp, rank: int, ranks: int, total: int, join: Any = None):
        self.source, self.ramp, self.rank, self.ranks, self.join = source, ramp, rank, ranks, join
        self.steps = ramp.steps_of(min(total, len(source)))

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, item: int) -> tuple[np.ndarray, ...]:
        rows = self.ramp.rows_at(int(item) + 1, self.rank, self.ranks)
        columns = [list(column) for column in zip(*(self.source[row] for row in rows), strict=True)]
        if self.join:
            columns = self.join(len(rows) * self.ranks, columns)
        return tuple(np.stack(column) for column in columns)


def _deal_by_steps(ramp: Ramp, division: Division) -> None:
    """Replace the function that cuts the training data into batches of one size, and the function that ends the data
    after a number of steps of that size.
    """
    batched = stock_dataset.dataset_batch_func

    def dataset_batch_func(config, dataset):
        if not config.data_loader.get("ramped"):
            return batched(config, dataset)
        masks = stock_dataset._use_compressed_eod_mask(config.data_loader)

        def join(samples, columns):
            parts = division.micro_batches_at(samples)
            return stock_dataset.asl_batch_wrapper(*columns, None, micro_batch_num=parts)

        shards = config.num_shards or 1
        total = int(config.data_loader.sizes[0])
        items = Steps(dataset.source, ramp, config.shard_id or 0, shards, total, join if masks else None)
        return GeneratorDataset(
            items, column_names=config.input_columns, shuffle=False, num_parallel_workers=config.num_parallel_workers,
            python_multiprocessing=False,
        )  # fmt: skip

    def postprocess(self, dataset, config):
        return dataset  # `Steps` has exactly the run's steps

    replace(stock_dataset, "dataset_batch_func", "batch_size=config.batch_size,", dataset_batch_func)
    line = "dataset = dataset.take(int(dataset_info.sizes[0]) // self.global_batch_size)"
    replace(base_trainer.BaseTrainer, "_train_dataset_postprocess", line, postprocess)


class Stage:
    """A `Stage` is the present stage of a growing batch: it sets the numbers of samples and micro-batches in the train
    step and in the callbacks.

    Attributes:
        samples: the number of samples in a step, 0 before the first step.
        division: the division of these samples over ranks and micro-batches.
        by_sample: whether routers know the number of samples, as those of `plugins.cpu_backend` do; MindFormers' own
            routers only know the number of ranks.
    """

    def __init__(self, division: Division, by_sample: bool = True):
        self.division, self.by_sample, self.samples = division, by_sample, 0
        self.tuples: list[tuple[nn.Cell, str, ParameterTuple]] = []

    def apply(self, step: nn.Cell, samples: int) -> None:
        """Prepare the train step for steps of `samples` samples; MindSpore then compiles a new graph for this number of
        samples.
        """
        if samples == self.samples:
            return
        self.samples = samples
        if self.division.whole:
            if self.by_sample:
                from plugins.cpu_backend.model import set_rows

                set_rows(step.network, samples // self.division.ranks)
            return
        self._keep_all_weights(step)
        kinds = (PipelineCellWithMultiOutputs, GradAccumulationCellWithMultiOutputs)
        (cutting,) = (cell for _, cell in step.cells_and_names() if isinstance(cell, kinds))
        fresh = type(cutting)(cutting.network, self.division.micro_batches_at(samples))
        cutting.micro_inputs, cutting.add_list = fresh.micro_inputs, fresh.add_list
        cutting.micro_size = step.micro_size = fresh.micro_size

    def _keep_all_weights(self, step: nn.Cell) -> None:
        """Give the cells of the train step their lists of weights as they were built. After a pipeline is loaded,
        `init_parameters_data` leaves the weights of other stages out of the optimizer's lists, and MindSpore could not
        compile the graph of a later stage of the ramp from them.
        """
        if not self.tuples:
            named = ((cell, key, each) for _, cell in step.cells_and_names() for key, each in vars(cell).items())
            self.tuples = [entry for entry in named if isinstance(entry[2], ParameterTuple)]
        for cell, key, weights in self.tuples:
            vars(cell)[key] = weights

    def tell(self, callbacks: list[Any]) -> None:
        """Set in the callbacks the numbers of samples and micro-batches of a step, which the callbacks use to compute
        mean losses and loads.
        """
        count, pipeline = self.division.micro_batches_at(self.samples), self.division.pipeline > 1
        for each in callbacks:
            if isinstance(each, MFLossMonitor) and each.global_batch_size != self.samples:
                each.global_batch_size, each.mf_calculated = self.samples, False  # the FLOPs of a step are others, too
                setattr(each, "mirco_size" if pipeline else "gradient_accumulation_steps", count)
            if isinstance(each, TrainingStateMonitor):
                each.global_batch_size = self.samples
            if isinstance(each, TopkBiasBalanceCallback):
                # MindFormers' model multiplies this by the micro-batches of the recipe's own batch in a pipeline
                each.gradient_accumulation_steps = count / (self.division.micro_batches if pipeline else 1)


def _begin_in(stage: Stage, ramp: Ramp) -> None:
    """Make a trainer build its train step for the batch of its first step, because a resume compiles the step before it
    loads the slices of a sharded model.
    """
    make = base_trainer.BaseTrainer.create_model_wrapper

    def create_model_wrapper(self, network, optimizer):
        wrapper = make(self, network, optimizer)
        stage.apply(wrapper, ramp.batch_at(self.config.runner_config.initial_step + 1))
        return wrapper

    line = "model_wrapper = build_wrapper(self.config.runner_wrapper,"
    replace(base_trainer.BaseTrainer, "create_model_wrapper", line, create_model_wrapper)


def _ramping(monitor: type[MFLossMonitor], ramp: Ramp, stage: Stage):
    """Return a subclass of the loss monitor class `monitor` that prepares each stage of the ramp before the first step
    of the stage.
    """

    class RampingLossMonitor(monitor):
        def on_train_step_begin(self, run_context):
            params = run_context.original_args()
            samples = ramp.batch_at((self.initial_step or 0) + params.cur_step_num)
            stage.apply(train_step(params), samples)
            stage.tell(params.list_callback)
            super().on_train_step_begin(run_context)

    return RampingLossMonitor


class BySamples(LearningRateSchedule):
    """A `BySamples` is a learning-rate schedule that counts the trained samples, in units of the full batch, instead of
    the steps.

    Args:
        schedule: MindFormers' schedule of the recipe.
        ramp: the ramp of the run.
    """

    def __init__(self, schedule: LearningRateSchedule, ramp: Ramp):
        super().__init__()
        self.schedule, self.cast = schedule, ops.Cast()
        begins = (0, *(end for end, _ in ramp.stages))
        self.stages = tuple(
            (float(begin), float(end - begin), 1 - batch / ramp.full)
            for begin, (end, batch) in zip(begins, ramp.stages, strict=False)
        )

    def construct(self, global_step):
        """Return the learning rate of the next step after `global_step` [1] steps."""
        steps = self.cast(global_step, mstype.float32)
        full = steps
        for begin, length, missing in self.stages:  # whole numbers of steps are exact in float32, unlike samples
            full = full - ops.minimum(ops.maximum(steps - begin, 0.0), length) * missing
        return self.schedule(full)


def _count_samples(config, recipe, ramp: Ramp) -> None:
    """Make the learning-rate schedule of `config` count samples. A schedule without `total_steps`, for which
    MindFormers would take the number of the run's own steps, ends with the last sample of the run.
    """
    if config.lr_schedule.get("total_steps") in (None, -1):
        steps = ramp.steps_of(int(config.train_dataset.data_loader.sizes[0]))
        config.lr_schedule.total_steps = scheduled(recipe, ramp, steps)
    kind, name = MindFormerModuleType.LR, config.lr_schedule.type
    schedule = MindFormerRegister.get_cls(kind, name)
    MindFormerRegister.register_cls(_by_samples(schedule, ramp), kind, alias=name)


def _by_samples(schedule: type[LearningRateSchedule], ramp: Ramp):
    """Return a class whose instances are `BySamples` of an instance of the class `schedule`."""

    class OfSamples:
        def __new__(cls, **arguments):
            return BySamples(schedule(**arguments), ramp)

    return OfSamples
