"""The optimizer's count of steps, where a run goes on with another number of samples a step.

The learning rate and Adam's bias correction follow that count. MindFormers 1.9.0 scales it as it scales the step of the
data (`trainer/base_trainer.py`: "Scaled global step"), and hands it to `load_checkpoint`, which takes it only where the
checkpoint lists none: a sharded graph's. One process, and data parallelism on CPU, list it, and would go on with the
learning rate of another step.
"""

from __future__ import annotations

from typing import Any

from plugins.private_hooks import replace


def enable() -> None:
    """Have MindFormers' trainer load the count that it has computed, wherever the checkpoint keeps it."""
    import mindspore as ms
    from mindformers.trainer import base_trainer

    load_all = base_trainer.load_checkpoint

    def load_checkpoint(
        checkpoint: str, network: Any, optimizer: Any = None, global_step: int | None = None, *more: Any, **named: Any
    ) -> None:
        load_all(checkpoint, network, optimizer, global_step, *more, **named)
        if optimizer is not None and global_step is not None:
            count = optimizer.global_step
            # a parameter that is not marked as sliced is left out of the next checkpoint of a sharded graph
            count.set_data(ms.Tensor([global_step], ms.int32), slice_shape=count.sliced)

    replace(base_trainer, "load_checkpoint", 'if optimizer and "global_step" not in state_dict', load_checkpoint)
