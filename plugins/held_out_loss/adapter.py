"""The loss on text that is never trained on: a corpus of its own, prepared with `tc3 data prepare --held-out`.

MindFormers' own evaluation runs the network's prediction graph against metrics; this runs the training loss
itself, on the same batches every time, so that its fall is a fair measure of what was learned.
"""

from __future__ import annotations

import json
import time

import numpy as np
from mindformers.core.callback.callback import MFLossMonitor
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import Tensor
from mindspore.train.callback import Callback

from plugins.all_ranks import sum_over_ranks
from plugins.held_out_loss.plan import check, due, held_out_file, held_out_loader, of_instructions
from plugins.lines import Span, append_line, note


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class HeldOutLoss(Callback):
    """Evaluate before the first step, every `every` steps of the whole run (see `plan.due`), and after the last.

    Args:
        data_loader: a `train_dataset.data_loader` section for the held-back corpus; its whole global batches are read.
        columns: `train_dataset.input_columns`.
        batch_size: samples per worker and batch.
        every: steps between evaluations.
        run_dir: the run's folder.
    """

    def __init__(self, data_loader, columns, batch_size, every, run_dir, **kwargs):
        super().__init__()
        self.every = every
        self.run_dir = run_dir
        self.path = held_out_file(run_dir)
        ranks = get_real_group_size()
        loader = build_dataset_loader(
            data_loader,
            default_args={"column_names": columns, "num_shards": ranks, "shard_id": get_real_rank()},
        )
        batches = loader.batch(batch_size, drop_remainder=True).create_tuple_iterator(num_epochs=1, output_numpy=True)
        self.batches = [tuple(np.array(column) for column in batch) for batch in batches]
        self.last_step = None

    def on_train_begin(self, run_context):
        """The loss that training starts from."""
        params = run_context.original_args()
        monitors = [each for each in params.list_callback if isinstance(each, MFLossMonitor)]
        self.done = monitors[0].initial_step or 0 if monitors else 0  # cur_step_num counts from here
        self._record(params)

    def on_train_step_end(self, run_context):
        """Evaluate when due."""
        params = run_context.original_args()
        if due(self.done + params.cur_step_num, self.every):
            self._record(params)

    def on_train_end(self, run_context):
        """The loss that training ends with."""
        self._record(run_context.original_args())

    def _record(self, params):
        step = self.done + params.cur_step_num
        if step == self.last_step:
            return
        self.last_step = step
        began = time.time()
        loss = self._loss(params.train_network.network)
        if get_real_rank() == 0:
            append_line(self.path, json.dumps({"step": step, "held_out_loss": loss}))
            note(self.run_dir, Span("evaluation", step, began, time.time()))

    def _loss(self, network):
        """Mean language-model loss over the held-back batches and the ranks.

        The forward pass of training counts the experts' load; those counters are put back. What it leaves alone, such
        as where experts live, is not written: the compiled graph may lose sight of a parameter that `set_data` wrote.
        """
        counters = [param for param in network.get_parameters() if not param.requires_grad]
        before = [np.array(param.asnumpy()) for param in counters]
        losses = [float(network(*map(Tensor, batch))[0].asnumpy().reshape(-1)[0]) for batch in self.batches]
        for param, value in zip(counters, before, strict=True):
            if not np.array_equal(param.asnumpy(), value):
                param.set_data(Tensor(value))
        mean = np.mean(losses)
        if get_real_group_size() > 1:
            mean = sum_over_ranks(float(mean)) / get_real_group_size()
        return float(mean)


def enable(config, settings) -> None:
    """Add the callback to `config` (a MindFormerConfig).

    Args:
        settings: `data_path`, the prefix of a Megatron .bin/.idx, or a file of HFDataLoader's; `samples` to read of it,
            of `seq_length` tokens (of such a file all where it is missing); `every`, steps.

    Raises:
        RecipeError: an unknown or impossible setting.
        DataError: there is no such corpus.
    """
    loader = config.train_dataset.data_loader
    check(settings, config.runner_config.batch_size * get_real_group_size(), of_instructions(loader))
    config.callbacks.append({
        "type": "HeldOutLoss",
        "data_loader": held_out_loader(loader, settings),
        "columns": config.train_dataset.input_columns,
        "batch_size": config.runner_config.batch_size,
        "every": settings["every"],
        "run_dir": config.output_dir,
    })  # fmt: skip
