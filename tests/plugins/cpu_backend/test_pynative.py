"""These tests check what is recorded of a forward pass, for models with other parts than those of
the shipped recipes.
"""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from plugins.cpu_backend import pynative


class Module:
    """A module whose hooks a test calls itself."""

    def __init__(self, **parts):
        self.hooks = []
        self.__dict__.update(parts)

    def register_forward_hook(self, hook):
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))


@pytest.fixture
def network(monkeypatch):
    """A network of one layer with four heads of queries in two groups of keys, and experts without a shared one."""
    monkeypatch.setattr(pynative, "GPTModel", SimpleNamespace)
    core = Module(heads=4, groups=2)
    names = ("input_layernorm", "pre_mlp_layernorm")
    router = Module(expert_dim=8)
    parts = {name: Module() for name in names} | {"self_attention": Module(core_attention=core)}
    layer = Module(**parts, mlp=Module(router=router))
    decoder = SimpleNamespace(final_layernorm=Module(), layers=[layer])
    gpt = SimpleNamespace(embedding=Module(), decoder=decoder, mtp_process=False)
    return SimpleNamespace(cells_and_names=lambda: [("gpt", gpt)], core=core)


def test_keys_and_values_of_grouped_queries_have_fewer_heads(network):
    trace = pynative.Trace(network)
    shapes = ((3, 1, 4, 5), (3, 1, 2, 5), (3, 1, 10))
    tensors = [ms.Tensor(np.ones(shape, np.float32)) for shape in shapes]
    for hook in network.core.hooks:
        hook(network.core, tensors, tensors[0])
    found = {name: value.shape for name, value in trace.out.items()}
    assert found == {
        "layers.0.query": (1, 3, 4, 5), "layers.0.key": (1, 3, 2, 5), "layers.0.value": (1, 3, 2, 5),
        "layers.0.context": (1, 3, 4, 5),
    }  # fmt: skip
    trace.close()
    assert not network.core.hooks


class Parted(nn.Cell):
    """A module one of whose outputs is None, as those of MindFormers' layers are."""

    def construct(self, x):
        return x, None, x + x


def test_modules_that_are_computed_again_keep_outputs_that_are_none():
    cell = Parted()
    cell.recompute()
    made = cell._recompute_cell
    assert made is not None
    with pynative.pynative(), pynative.without_recomputation(cell):
        found = cell(ms.Tensor(np.ones(2, np.float32)))
    assert len(found) == 3 and found[1] is None
    assert cell._recompute_cell is made
