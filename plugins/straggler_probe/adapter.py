"""This module enables `plugins.straggler_probe` of a recipe: a callback that probes its own rank every few steps,
without a collective.

No hook of MindFormers reports how long a rank waits for its batches; but MindSpore's training loop fetches a batch
between two steps, and calls callbacks at the end of the first step and at the beginning of the second step. MindFormers
runs callbacks that it does not know after all others, so saving and evaluating take place before this callback observes
the end of a step.
"""

from __future__ import annotations

import socket

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_rank
from mindformers.trainer import base_trainer
from mindspore.train import model
from mindspore.train.callback import Callback

from plugins.private_hooks import relies_on, steps_before
from plugins.straggler_probe.record import probe_file
from plugins.straggler_probe.watch import Settings, Watch, of_device

relies_on(base_trainer.BaseTrainer.sort_callbacks, "callbacks.append(callback)")
relies_on(model.Model._train_process, "for next_element in dataset_helper:")
relies_on(model.Model._train_dataset_sink_process, "for inputs in dataset_helper:")


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class StragglerProbe(Callback):
    """A `StragglerProbe` is a callback that records probes of this rank (see `watch.Watch`).

    Args:
        settings: `plugins.straggler_probe.watch.Settings`.
        device: the type of the device.
        run_dir: the run's folder.
    """

    def __init__(self, settings, device, run_dir, **kwargs):
        super().__init__()
        self.settings, self.device, self.run_dir = settings, device, run_dir

    def on_train_begin(self, run_context):
        """Prepare the work of the probe, which must be compiled on an NPU, and find how many steps the run made before
        a resume.
        """
        params = run_context.original_args()
        self.done = steps_before(params)
        rank = get_real_rank()
        self.watch = Watch(
            self.settings, probe_file(self.run_dir, rank), rank, socket.gethostname(), self.device,
            of_device(self.device), not params.dataset_sink_mode,
        )  # fmt: skip

    def on_train_step_begin(self, run_context):
        """Record that the batch of the step has arrived."""
        self.watch.begin()

    def on_train_step_end(self, run_context):
        """Probe this rank if a probe is due after this step."""
        self.watch.end(self.done + run_context.original_args().cur_step_num)


def enable(config, settings) -> None:
    """Add the callback that probes this rank to `config` (a MindFormerConfig).

    Raises:
        RecipeError: a setting is unknown or impossible.
    """
    device = config.context.device_target
    config.callbacks.append(
        {"type": "StragglerProbe", "settings": Settings.read(settings), "device": device, "run_dir": config.output_dir}
    )
