"""Layers with hyper-connections as MindFormers builds them, forward and backward, against the reference."""

import mindspore as ms
import numpy as np
import pytest
from mindformers import MindFormerConfig
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import Tensor, nn, ops

from plugins import telechat3_moe
from plugins.cpu_backend.layers import Outer
from plugins.cpu_backend.model import on_cpu
from plugins.hyper_connections import reference
from plugins.hyper_connections.adapter import HyperConnectedLayer, HyperConnection, enable
from plugins.hyper_connections.plan import Settings, shapes
from tests.plugins.hyper_connections.test_plan import MINI
from tests.plugins.hyper_connections.test_reference import drawn
from tests.plugins.output_biases.test_adapter import config
from tools.recipe.load import load_recipe

LENGTH, BATCH, HIDDEN, EPS, ITERATIONS = 8, 2, 16, 1e-5, 4


class Around(nn.Cell):
    """sum(what hyper-connections make of x around tanh * dout), and it."""

    def __init__(self, connection):
        super().__init__()
        self.hc = connection

    def construct(self, dout, x):
        found = self.hc(x)
        out = self.hc.write(x, ops.tanh(self.hc.read(x, found)), found)
        return ops.reduce_sum(out * dout), out


def connection(streams, weights):
    layout.init_layout(config())
    cell = HyperConnection(config(), Settings(streams=streams, sinkhorn_iterations=ITERATIONS))
    for name in ("fn", "base", "scale"):
        getattr(cell, f"hc_{name}").set_data(Tensor(getattr(weights, name).astype(np.float32)))
    return cell


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("streams", [1, 4])
def test_connections_equal_the_reference(streams):
    x, weights = drawn(LENGTH * BATCH, streams, HIDDEN)
    dout = np.random.default_rng(3).standard_normal(x.shape)
    cell = Around(connection(streams, weights))
    step = ms.value_and_grad(cell, 1, cell.trainable_params(), has_aux=True)
    as_tensor = lambda each: Tensor(each.reshape(LENGTH, BATCH, -1).astype(np.float32))  # noqa: E731
    (_, out), (dx, found) = step(as_tensor(dout), as_tensor(x))
    expected = reference.forward(x, weights, np.tanh, ITERATIONS, EPS)
    behind, by_weight = reference.backward(
        x, weights, np.tanh, lambda read, d: d * (1 - np.tanh(read) ** 2), dout, ITERATIONS, EPS
    )
    np.testing.assert_allclose(out.asnumpy().reshape(x.shape), expected, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(dx.asnumpy().reshape(x.shape), behind, rtol=1e-4, atol=5e-5)
    assert [each.name for each in cell.trainable_params()] == ["hc.hc_fn", "hc.hc_base", "hc.hc_scale"]
    for gradient, name in zip(found, ("fn", "base", "scale"), strict=True):
        np.testing.assert_allclose(gradient.asnumpy(), getattr(by_weight, name), rtol=1e-4, atol=1e-4)


@pytest.fixture
def built(monkeypatch):
    """A function: the model with so many streams; None: without the plugin."""
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    for name in ("_layer_edits", "_edits"):
        monkeypatch.setattr(telechat3_moe, name, {})
    for name in ("_positions", "_layers"):
        monkeypatch.setattr(telechat3_moe, name, [])

    def make(streams):
        telechat3_moe._layers.clear()
        if streams:
            telechat3_moe.use_layer(HyperConnectedLayer, settings=Settings(streams, sinkhorn_iterations=ITERATIONS))
        return telechat3_moe.gpt_model(config(), on_cpu)

    return make


def test_layers_have_the_weights_of_the_plan(built):
    model = built(4)
    assert {type(layer) for layer in model.decoder.layers} == {HyperConnectedLayer}
    found = {each.name: each.shape for each in model.get_parameters() if ".hc_" in each.name}
    expected = {
        f"decoder.layers.{layer}.{part}.{name}": shape
        for layer in range(2)
        for part in ("attn_hc", "ffn_hc")
        for name, shape in shapes(4, HIDDEN).items()
    }
    assert found == expected
    assert {type(layer) for layer in built(None).decoder.layers} == {TransformerLayer}


def test_one_stream_is_the_model_without_the_plugin(built, monkeypatch):
    """MindFormers' own layers are built, so that every bit is the same."""
    monkeypatch.setattr("plugins.hyper_connections.adapter.active", [])
    built(None)
    for streams, layers in ((1, 0), (2, 1)):
        enable(MindFormerConfig(**load_recipe(MINI)), {"streams": streams})
        assert len(telechat3_moe._layers) == layers


class Decoder(nn.Cell):
    """sum(the decoder's result * dout), and it."""

    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.decoder, self.angles = model.decoder, model.rotary_pos_emb

    def construct(self, dout, x, mask):
        out = self.decoder(x, mask, rotary_pos_emb=self.angles(LENGTH))[0]
        return ops.reduce_sum(out * dout), out


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("streams", [1, 4])
def test_closed_gates_make_the_plain_model(built, streams):
    """Gates that read and write one stream wholly and mix nothing: the first stream is the plain model's residual, and
    the others are what came in, so that with one stream the mean is the plain model's.
    """
    rng = np.random.default_rng(7)
    x, dout = (rng.standard_normal((LENGTH, BATCH, HIDDEN)).astype(np.float32) for _ in range(2))
    mask = Tensor(np.triu(np.ones((BATCH, 1, LENGTH, LENGTH)), 1).astype(np.uint8))
    results = []
    plain = built(None)
    values = {each.name: each.value().asnumpy() for each in plain.get_parameters()}
    for model in (plain, built(streams)):
        model.rotary_pos_emb.outer = Outer()
        for each in model.get_parameters():
            if each.name in values:
                each.set_data(Tensor(values[each.name]))
        for layer in model.decoder.layers if model is not plain else ():
            for cell in (layer.attn_hc, layer.ffn_hc):
                base = np.full(streams * (2 + streams), -30.0)
                base[0], base[streams] = 30.0, 0.0  # sigmoid 1, and 2 sigmoid 1
                base[2 * streams :] = (60.0 * np.eye(streams) - 30.0).reshape(-1)
                cell.hc_base.set_data(Tensor(base.astype(np.float32)))
                cell.hc_scale.set_data(Tensor(np.zeros(3, np.float32)))
        if model is not plain and streams > 1:
            model.decoder.final_layernorm = nn.Identity()
        step = ms.value_and_grad(Decoder(model), 1, None, has_aux=True)
        (_, out), dx = step(Tensor(dout), Tensor(x), mask)
        results.append((out.asnumpy(), dx.asnumpy()))
    (expected, d_expected), (found, d_found) = results
    if streams == 1:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(d_found, d_expected, rtol=1e-4, atol=2e-5)
    else:
        first = streams * found - (streams - 1) * x  # of the mean, the streams that nothing wrote into
        first -= first.mean(-1, keepdims=True)
        normed = first / np.sqrt((first**2).mean(-1, keepdims=True) + EPS)
        np.testing.assert_allclose(normed, expected, rtol=1e-4, atol=1e-4)
