"""This module defines what a fault of the zoo is, and puts a fault into a run.

A fault is a function that is called when the plugins have been enabled and before MindFormers builds the model, the
data, the optimizer and the callbacks. The recipe that the run writes is the one without the fault: whoever diagnoses
does not see it there. What a fault replaces is compiled with the graph, so that its functions stand in a file, and not
in lambdas.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FAULTS: dict[str, Fault] = {}
ms = None  # MindSpore, in the workers: the process that starts them does not need it
BATCHES = ("known", "unseen", "public")  # modules of faults, the oldest first
BUILT = ("configuration",)  # of faults in what is built: this stage came after them, and names them better


@dataclass(frozen=True)
class Fault:
    """This is one fault.

    Args:
        source: the place where the fault was reported.
        what: a description of the fault.
        inject: a function that inserts the fault; called with the run's MindFormerConfig.
        stages: the stages that are right answers.
        module: a part of the right module's name.
        resumed: whether the run with the fault goes on from the second step of the faultless one.
        layout: the layout of `tests/zoo/run.py` in which the fault is executed; "" is one process.
        same_graph: whether the fault does not change the compiled graph, so that the faultless run's is loaded.
    """

    source: str
    what: str
    inject: Callable[[Any], None]
    stages: tuple[str, ...]
    module: str = ""
    resumed: bool = False
    layout: str = ""
    same_graph: bool = False

    @property
    def batch(self) -> str:
        """Return which of `BATCHES` it belongs to."""
        return self.inject.__module__.rpartition(".")[-1]


def fault(source: str, what: str, *stages: str, **more: Any):
    """Return a decorator that adds a function to `FAULTS` under its name."""

    def add(inject: Callable[[Any], None]) -> Callable[[Any], None]:
        FAULTS[inject.__name__] = Fault(source, what, inject, stages, **more)
        return inject

    return add


def enable(config, name) -> None:
    """Put one fault into a run; called as a plugin's `enable`."""
    global ms
    import mindspore as ms
    from mindformers.core.clip_grad import apply_global_norm, get_square_sum
    from mindformers.core.optim.adamw import _adamw_opt
    from mindspore import ops
    from mindspore.common.initializer import Normal, initializer
    from mindspore.ops.auto_generate import SumExt

    used = {"ms": ms, "ops": ops, "SumExt": SumExt, "Normal": Normal, "initializer": initializer}
    used |= {"apply_global_norm": apply_global_norm, "get_square_sum": get_square_sum, "_adamw_opt": _adamw_opt}
    for batch in BATCHES:  # whose functions use these names when a graph is compiled of them
        vars(importlib.import_module(f"tests.zoo.{batch}")).update(used)
    if name:
        FAULTS[name].inject(config)


# what several faults do


def in_norm(construct):
    """Let `construct` clip the gradients."""
    from mindformers.core.clip_grad import ClipGradNorm

    ClipGradNorm.construct = construct


def in_groups(change):
    """Let `change` alter the optimizer's groups, of which it gets (groups, the model's weights)."""
    from mindformers.trainer import base_trainer

    right = base_trainer.get_optimizer_grouped_parameters
    base_trainer.get_optimizer_grouped_parameters = lambda model=None, **more: change(
        right(model=model, **more), model.trainable_params()
    )


def in_samples(change=None, place=lambda idx: idx):
    """Let `change` alter each sample, of which it gets (sample, index); `place`: index -> that of the sample read."""
    from mindformers.dataset.blended_datasets.gpt_dataset import GPTDataset

    right = GPTDataset.__getitem__

    def wrong(self, idx):
        sample = right(self, place(idx))
        return change(sample, idx) if change else sample

    GPTDataset.__getitem__ = wrong


def before_training(pattern, change):
    """At the start of a training, before its state is recorded, replace the weights, moments and counters whose name
    matches `pattern`; `change` makes the new array from the old one, or from the name of a weight that a sharded graph
    has not made yet.
    """

    def spoil(step):
        found = {each.name: each for cell in (step.network, step.optimizer) for each in cell.get_parameters()}
        for name, each in found.items():
            if re.search(pattern, name):
                each.set_data(ms.Tensor(np.ascontiguousarray(change(np.array(each.asnumpy())))))

    in_monitor("on_train_begin", lambda step, number: spoil(step))


def in_monitor(event, change):
    """Call `change` with the train step and the number of the step at an event of the callbacks, before it is
    recorded.
    """
    from mindformers.tools.register import MindFormerModuleType, MindFormerRegister

    from plugins.private_hooks import train_step

    kind = MindFormerModuleType.CALLBACK
    monitor = MindFormerRegister.get_cls(kind, "MFLossMonitor")

    def wrong(self, run_context):
        arguments = run_context.original_args()
        change(train_step(arguments), arguments.get("cur_step_num", 0))
        getattr(monitor, event)(self, run_context)

    MindFormerRegister.register_cls(type("Changing", (monitor,), {event: wrong}), kind, alias="MFLossMonitor")


def after_biases(change):
    """Call `change` with each router, its loads and its biases of before, when the biases have been moved."""
    from mindformers.parallel_core.training_graph.base_models.gpt.gpt_model import GPTModel
    from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter

    right = GPTModel.update_topk_bias

    def wrong(self, steps=1):
        found = [cell for _, cell in self.cells_and_names() if isinstance(cell, TopKRouter)]
        old = [(np.array(each.expert_load.asnumpy()), np.array(each.expert_bias.asnumpy())) for each in found]
        told = right(self, steps)
        for router, (load, bias) in zip(found, old, strict=True):
            change(router, load, bias)
        return told

    GPTModel.update_topk_bias = wrong


def in_bfloat16(array):
    """Return a float32 array rounded to bfloat16."""
    return ((array.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)


for _batch in BATCHES:
    importlib.import_module(f"tests.zoo.{_batch}")
