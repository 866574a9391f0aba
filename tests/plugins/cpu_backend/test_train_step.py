"""The overflow check and the reading of losses, on their own."""

import numpy as np
import pytest
from mindformers.utils.parameter_register import parameter_register
from mindspore import Tensor, nn, ops

from plugins.cpu_backend import losses
from plugins.cpu_backend.train_step import CpuTrainOneStepCell
from plugins.errors import ClusterError
from tests.plugins.cpu_backend.test_host_functions import call

pytestmark = pytest.mark.usefixtures("graph_mode")


class Overflow(nn.Cell):
    """`get_overflow_status` with the attributes that it takes from MindSpore's base class."""

    def __init__(self):
        super().__init__()
        self.base = Tensor(np.float32(1))
        self.split = False
        self.hyper_map = ops.HyperMap()

    def construct(self, first, second):
        return CpuTrainOneStepCell.get_overflow_status(self, None, (first, second))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_gradient_is_an_overflow(bad, place):
    gradients = [np.ones((2, 3), np.float32), np.full(4, 1e30, np.float32)]
    assert not Overflow()(*map(Tensor, gradients)).asnumpy()
    gradients[place].reshape(-1)[-1] = bad
    assert Overflow()(*map(Tensor, gradients)).asnumpy()


def test_losses_survive_their_clearing():
    """MindFormers reads a view of the parameter and clears it: 0.0 on CPU."""
    for value, name in enumerate(losses.PARTS, start=1):
        parameter_register.register(name, Tensor([float(value)]))
    values = losses.separate_losses()
    assert [part.tolist() for part in values] == [[1.0], [2.0], [3.0], [4.0]]
    assert [float(parameter_register.get(name).asnumpy()[0]) for name in losses.PARTS] == [0.0] * 4


def test_a_graph_that_calls_an_unknown_function_ends_the_worker_before_it_is_loaded(tmp_path, monkeypatch):
    graph = tmp_path / "rank_0" / "graph_cache" / "compile_cache_0.mindir"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(call("f()"))
    network = nn.Dense(2, 1)
    optimizer = nn.SGD(network.trainable_params())
    CpuTrainOneStepCell(network, optimizer)
    monkeypatch.setenv("MS_COMPILER_CACHE_PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"this worker does not have: f\(\);"):
        CpuTrainOneStepCell(network, optimizer)
