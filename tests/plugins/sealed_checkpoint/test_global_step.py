"""MindFormers' own loader, with the optimizer's count of steps."""

import mindspore as ms
import pytest
from mindformers.core.optim import AdamW
from mindformers.trainer import base_trainer
from mindspore import nn

from plugins.sealed_checkpoint import global_step

PREFIX = "mini-{}-0000000-0000001.safetensors"


class Step(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ms.ops.ones((2, 2)), name="weight")


@pytest.fixture
def saved(tmp_path):
    """One process saved it at step 4."""
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.set_data(ms.Tensor([4], ms.int32))
    optimizer.exp_avg[0].set_data(ms.ops.full((2, 2), 7.0))
    ms.save_checkpoint(network, str(tmp_path / PREFIX.format("model")), format="safetensors")
    others = {"choice_func": lambda name: name != "weight", "format": "safetensors"}
    ms.save_checkpoint(optimizer, str(tmp_path / PREFIX.format("opt")), **others)
    return tmp_path


@pytest.mark.parametrize(("given", "loaded"), [(8, 8), (4, 4), (None, 4)])
def test_the_count_that_the_trainer_computed_is_loaded_with_the_moments(saved, given, loaded):
    global_step.enable()
    network = Step()
    optimizer = AdamW(network.trainable_params())
    optimizer.global_step.sliced = True  # as in a sharded graph, whose checkpoints have no other parameters
    base_trainer.load_checkpoint(checkpoint=str(saved), network=network, optimizer=optimizer, global_step=given)
    assert int(optimizer.global_step) == loaded and optimizer.global_step.sliced
    assert (optimizer.exp_avg[0].asnumpy() == 7.0).all()
