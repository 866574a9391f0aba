"""The overflow check, what a loss is divided by, and the reading of losses, on their own.

Other tests of this file check what is recorded of a forward pass, for models with other parts than those of
the shipped recipes.
"""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindformers.parallel_core.training_graph.loss_func import CrossEntropyLoss
from mindformers.utils.parameter_register import parameter_register
from mindspore import Tensor, nn, ops

from plugins.cpu_backend import pynative, train_step
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
    for value, name in enumerate(train_step.PARTS, start=1):
        parameter_register.register(name, Tensor([float(value)]))
    values = train_step.separate_losses()
    assert [part.tolist() for part in values] == [[1.0], [2.0], [3.0], [4.0]]
    assert [float(parameter_register.get(name).asnumpy()[0]) for name in train_step.PARTS] == [0.0] * 4


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


class OfAnother(nn.Cell):
    """An AllReduce's answer on a rank of two whose other one gives these numbers."""

    def __init__(self, others):
        super().__init__()
        self.others = Tensor(np.asarray(others, np.float32))

    def construct(self, x):
        return x + self.others


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(6, 6), (1, 6), (0, 5)])
def test_the_mean_over_ranks_is_the_loss_of_one_process_however_many_tokens_each_has(counts):
    """dp2 had 6.263776 and one process 6.263722, where ends of documents did not count."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(2, 6, 8)).astype(np.float32), rng.integers(0, 8, (2, 6)).astype(np.int32)
    masks = np.array([[1.0] * count + [0.0] * (6 - count) for count in counts], np.float32)

    def loss(own, *columns):
        value = lambda x: own(x, *map(Tensor, columns[1:]))[0]  # noqa: E731
        found, gradient = ops.value_and_grad(value)(Tensor(columns[0]))
        return float(found.asnumpy()), gradient.asnumpy()

    whole, gradient = loss(CrossEntropyLoss(), logits.reshape(12, 8), labels.reshape(12), masks.reshape(12))
    of_ranks = []
    for rank in range(2):
        own = CrossEntropyLoss()
        own.add2 = train_step.TokensOfARank(2)
        own.add2.sum = OfAnother([counts[1 - rank]])
        of_ranks.append(loss(own, logits[rank], labels[rank], masks[rank]))
    assert np.mean([value for value, _ in of_ranks]) == pytest.approx(whole, abs=1e-6)
    np.testing.assert_allclose(np.concatenate([each for _, each in of_ranks]) / 2, gradient, atol=1e-7)


@pytest.mark.slow
def test_experts_shares_are_the_mean_over_the_samples_of_all_ranks():
    """`gbs_aux_loss` multiplied the shares of a rank's samples together, [1, 1, 16], with [4, 16] and stopped."""
    shares = np.random.default_rng(0).random((2, 4, 16)).astype(np.float32)
    for rank in range(2):
        mean = train_step.MeanOfSamples(2)
        mean.sum = OfAnother(shares[1 - rank].mean(0))
        np.testing.assert_allclose(mean(Tensor(shares[rank]), 0).asnumpy(), shares.reshape(8, 16).mean(0), rtol=1e-6)
    alone = train_step.MeanOfSamples(1)(Tensor(shares[0]), 0)
    np.testing.assert_allclose(alone.asnumpy(), shares[0].mean(0), rtol=1e-6)


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
