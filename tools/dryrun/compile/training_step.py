"""A recipe's training step as MindFormers' own Trainer builds it, for a rank of a virtual cluster.

The Trainer runs as in a real training, from `build_context` to the call of `Model.train`, where the step is taken from
it: model, loss, wrappers, recompute, clipping, learning-rate groups and optimizer are its own. What is left out needs
data or a file system and adds nothing to the graph: data loading, callbacks, checkpoints. Parameters have shapes but no
memory.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from plugins.private_hooks import replaced
from tools.dryrun.compile.inputs import shapes_of
from tools.process import light_nltk
from tools.recipe.dump import dump_recipe
from tools.recipe.load import Recipe
from tools.recipe.view import View

# they choose and read samples: nothing of them is in the graph
_DATA_PLUGINS = ("attention_balance", "held_out_loss", "packed_labels", "spike_guard")


class _Reached(Exception):
    """The Trainer has called `Model.train`."""


class _NoData:
    """A dataset of the right length whose samples nobody reads."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a dry run reads no data")


def training_step(recipe: Recipe, folder: Path, enable_plugins: Callable[[Any], None]) -> Any:
    """The cell that the Trainer was about to train with; call it inside an open `virtual_cluster`.

    Args:
        recipe: flat; for Ascend or for CPU. It is not changed.
        folder: an empty one for what MindFormers insists on writing.
        enable_plugins: switches on the recipe's plugins, given the MindFormerConfig (tools never import adapters).
    """
    os.environ["LOCAL_DEFAULT_PATH"] = str(folder)
    plain = _without_files(recipe, folder)
    light_nltk.import_it()
    from mindformers import MindFormerConfig, Trainer, build_context
    from mindformers.core.context import parallel
    from mindspore._c_expression import AutoParallelContext
    from mindspore.communication import get_rank
    from mindspore.dataset import GeneratorDataset
    from mindspore.nn.utils import no_init_parameters
    from mindspore.parallel import strategy

    flat = folder / "recipe.yaml"
    dump_recipe(plain, flat)  # MindFormers applies its defaults only to a file
    config = MindFormerConfig(str(flat))
    context = importlib.import_module("mindformers.core.context.build_context")  # its package hides it
    no_affinity = replaced(context, "_setup_affinity", '"affinity_cpu_list" in context_config', lambda _: None)
    with replaced(parallel, "init", "def init(backend_name=None)", lambda: None), no_affinity:
        build_context(config)  # the virtual cluster is up already, and this host's CPUs are left alone
    # which C++ would ask of the library that is not there; Python's own setter stops at 4,095
    AutoParallelContext.get_instance().set_global_rank(get_rank())
    config.context.device_target = recipe["context"]["device_target"]  # what plugins and model are to build for
    enable_plugins(config)
    _set_data_strategy(config, View(recipe).packs)
    columns = list(shapes_of(View(recipe)))
    data = GeneratorDataset(_NoData(_samples(recipe)), column_names=columns, shuffle=False)
    # asked to, MindSpore also writes every rank's strategy for checkpoints: 14 of 16 GB and 40 % of the time at 8,192
    # devices, and nothing of it is in the graph
    online = "enable_save_strategy_online"
    keep_no_strategy = replaced(strategy, online, f"strategy_layout_handle.{online}()", lambda: None)
    with no_init_parameters(), keep_no_strategy, _stop_at_training() as taken:
        trainer = Trainer(config, train_dataset=data.batch(1))
        with suppress(_Reached):
            trainer.train()
    cell = taken[0]
    return cell.set_train()


def _set_data_strategy(config: Any, packs: bool) -> None:
    """How inputs lie on the ranks: the step of the Trainer that it leaves out where it is handed its data."""
    from mindformers.trainer.base_trainer import BaseTrainer

    loader = config.train_dataset.data_loader
    if packs:
        loader.create_attention_mask = True
    described = loader.config if loader.type == "BlendedMegatronDatasetDataLoader" else loader
    _, strategy, *_ = BaseTrainer._get_columns_with_strategy(config, described, loader.type)
    BaseTrainer._set_full_batch_with_strategy(config, strategy)


def inputs_of(recipe: Recipe) -> list[Any]:
    """What one rank reads for a step, as Tensors of zeros, in the order of the loader's columns."""
    from mindspore import Tensor

    return [Tensor(np.zeros(shape, dtype)) for shape, dtype in shapes_of(View(recipe)).values()]


def _without_files(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe without what reads or writes files and without callbacks; eager operators run on this CPU."""
    plain = copy.deepcopy(recipe)
    plain["output_dir"] = str(folder / "output")
    plain["callbacks"] = []
    plain["load_checkpoint"] = ""
    plain.setdefault("checkpoint", {}).update(load_path="", save_path=str(folder / "checkpoint"))
    plain["context"]["device_target"] = "CPU"
    for name in _DATA_PLUGINS:
        (plain.get("plugins") or {}).pop(name, None)
    return plain


def _samples(recipe: Recipe) -> int:
    """Samples of the stand-in for the data."""
    sizes = recipe["train_dataset"]["data_loader"].get("sizes") or [1]
    return max(int(sizes[0]), 1)


@contextmanager
def _stop_at_training() -> Iterator[list[Any]]:
    """Let `Model.train` hand over its network instead of training."""
    from mindspore.train import Model

    taken: list[Any] = []

    def train(model: Any, *_: Any, **__: Any) -> None:
        taken.append(model._network)
        raise _Reached

    with replaced(Model, "train", "_init_auto_parallel_context(self._network)", train):
        yield taken
