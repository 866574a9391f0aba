"""The loss on documents that are never trained on: the second part of the dataset's `split`.

MindFormers' own evaluation runs the network's prediction graph against metrics; this runs the training loss
itself, on the same batches every time, so that its fall is a fair measure of what was learned.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from mindformers.dataset.dataloader.build_dataloader import build_dataset_loader
from mindformers.parallel_core.training_graph.transformer.moe.router import TopKRouter
from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindformers.tools.utils import get_real_group_size, get_real_rank
from mindspore import Tensor, ops
from mindspore.train.callback import Callback

from plugins.errors import RecipeError, did_you_mean

SETTINGS = ("every",)


def held_out_file(run_dir: str | Path) -> Path:
    """Where a run writes its held-out losses, one JSON line each."""
    return Path(run_dir) / "metrics" / "held_out.jsonl"


@MindFormerRegister.register(MindFormerModuleType.CALLBACK)
class HeldOutLoss(Callback):
    """Evaluate before the first step, every `every` steps, and after the last.

    Args:
        data_loader: `train_dataset.data_loader` of the recipe; its `sizes[1]` samples are read.
        columns: `train_dataset.input_columns`.
        batch_size: samples per worker and batch.
        every: steps between evaluations.
        run_dir: the run's folder.
    """

    def __init__(self, data_loader, columns, batch_size, every, run_dir, **kwargs):
        super().__init__()
        self.every = every
        self.path = held_out_file(run_dir)
        ranks = get_real_group_size()
        loader = build_dataset_loader(
            data_loader,
            default_args={"phase": "valid", "column_names": columns, "num_shards": ranks, "shard_id": get_real_rank()},
        )
        batches = loader.batch(batch_size, drop_remainder=True).create_tuple_iterator(num_epochs=1, output_numpy=True)
        self.batches = [tuple(np.array(column) for column in batch) for batch in batches]
        self.last_step = None

    def on_train_begin(self, run_context):
        """The loss that training starts from."""
        self._record(run_context.original_args())

    def on_train_step_end(self, run_context):
        """Evaluate when due."""
        params = run_context.original_args()
        if params.cur_step_num % self.every == 0:
            self._record(params)

    def on_train_end(self, run_context):
        """The loss that training ends with."""
        self._record(run_context.original_args())

    def _record(self, params):
        step = int(params.train_network.optimizer.global_step.asnumpy()[0])
        if step == self.last_step:
            return
        self.last_step = step
        loss = self._loss(params.train_network.network)
        if get_real_rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"step": step, "held_out_loss": loss}) + "\n")

    def _loss(self, network):
        """Mean language-model loss over the held-back batches and the ranks; the router's counters stay untouched."""
        routers = [cell for _, cell in network.cells_and_names() if isinstance(cell, TopKRouter)]
        loads = [np.array(router.expert_load.asnumpy()) for router in routers]
        losses = [float(network(*map(Tensor, batch))[0].asnumpy().reshape(-1)[0]) for batch in self.batches]
        for router, load in zip(routers, loads, strict=True):
            router.expert_load.set_data(Tensor(load))
        mean = np.mean(losses)
        if get_real_group_size() > 1:
            mean = ops.AllReduce()(Tensor([mean], dtype=None)).asnumpy()[0] / get_real_group_size()
        return float(mean)


def enable(config, settings) -> None:
    """Add the callback to `config` (a MindFormerConfig).

    Raises:
        RecipeError: an unknown setting, or a dataset without a held-back part.
    """
    for key in settings:
        if key not in SETTINGS:
            raise RecipeError(f"plugins.held_out_loss.{key}: no such setting{did_you_mean(key, list(SETTINGS))}")
    loader = config.train_dataset.data_loader
    every = settings.get("every", 100)
    if not isinstance(every, int) or every < 1:
        raise RecipeError(f"plugins.held_out_loss.every: a number of steps, not {every!r}")
    if loader.sizes[1] < config.runner_config.batch_size * get_real_group_size():
        raise RecipeError(
            "train_dataset.data_loader.sizes[1]: fewer held-back samples than one global batch; set it to a multiple "
            "of the global batch, and give config.split a second part (such as '95, 5, 0')"
        )
    config.callbacks.append({
        "type": "HeldOutLoss",
        "data_loader": loader,
        "columns": config.train_dataset.input_columns,
        "batch_size": config.runner_config.batch_size,
        "every": every,
        "run_dir": config.output_dir,
    })  # fmt: skip
