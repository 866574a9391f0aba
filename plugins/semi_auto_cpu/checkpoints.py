"""Lines of MindFormers 1.9.0 that keep a sharded run on CPU from saving and resuming."""

from __future__ import annotations

from typing import Any

from plugins.private_hooks import replace
from plugins.semi_auto_cpu.ranks import Ranks


def enable(ranks: Ranks) -> None:
    """Let MindFormers save and resume the slices of this rank; call after importing it.

    * `checkpoint/utils.py:compile_model` compiles before it loads slices, in sink mode only, which CPU has not.
    * `checkpoint/sharded_tensor.py` asks MindSpore for the layouts of this rank, and gets those of rank 0 where no
      communication library told it otherwise. Those of all ranks are right, with one pipeline stage and with many.
    """
    from mindformers.checkpoint import sharded_tensor
    from mindformers.trainer import base_trainer

    def of_this_rank(network: Any) -> dict[int, Any]:
        """As `mindspore.parallel.strategy.get_current_strategy_metadata`: the key is always 0."""
        return {0: sharded_tensor.get_strategy_metadata(network)[ranks.rank]}

    replace(base_trainer, "compile_model", "'sink_mode' must be set to True", compile_without_sink)
    replace(sharded_tensor, "get_current_strategy_metadata", ".get_local_rank_layout()", of_this_rank)


def compile_without_sink(model: Any, dataset: Any, **_: Any) -> None:
    """Compile the train step of a `mindspore.train.Model`: where slices lie is known after any compile."""
    batch = next(iter(dataset.create_tuple_iterator(num_epochs=1)))
    model._train_network.set_train()
    model._train_network.compile(*batch)
