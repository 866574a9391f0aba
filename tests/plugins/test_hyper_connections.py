"""These tests check what a recipe may say about residual streams, and the sizes that follow.

The reference: Sinkhorn's sums, and gradients against finite differences.

Layers with hyper-connections as MindFormers builds them, forward and backward, against the reference.

The reference against mlx-lm's own layer of Xing4.0 (ml-explore/mlx-lm at 71a6ec0, `xing4_0.py`), where it is
installed: forward, and backward by MLX's automatic differentiation. MLX computes on Linux's CPU, too (`mlx[cpu]`); the
newest mlx-lm on PyPI (0.32.2) does not have the file yet.
"""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mindformers import MindFormerConfig
from mindformers.parallel_core.training_graph.device_matrix import layout
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.training_graph.transformer.transformer_layer import TransformerLayer
from mindspore import Tensor, nn, ops

from plugins import telechat3_moe
from plugins.cpu_backend.layers import Outer
from plugins.cpu_backend.model import on_cpu
from plugins.errors import RecipeError
from plugins.hyper_connections import reference
from plugins.hyper_connections.adapter import HyperConnectedLayer, HyperConnection, enable
from plugins.hyper_connections.plan import CLIP, Settings, check, gates, shapes
from plugins.hyper_connections.reference import Weights
from tests.plugins.test_output_biases import config
from tools.check.check import check_recipe
from tools.model import Model, connection_weights, multiplied, parameters
from tools.recipe.load import load_recipe

MINI = "recipes/mini/pretrain.yaml"


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (True, {}, r"plugins\.hyper_connections: write {streams: 4}, or plugins\.hyper_connections: False"),
        ({"streams": 0}, {}, r"streams: 0 is not allowed; write a number of streams from 1 to 16"),
        ({"streams": 17}, {}, r"streams: 17 is not allowed"),
        ({"streams": 2.0}, {}, r"streams: 2\.0 is not allowed"),
        ({"streams": "4"}, {}, r"streams: '4' is not allowed"),
        ({"streams": True}, {}, r"streams: True is not allowed"),
        ({"stream": 4}, {}, r"hyper_connections\.stream: no such setting \(did you mean 'streams'\?\)"),
        ({"sinkhorn_iterations": 0}, {}, r"sinkhorn_iterations: 0 is not allowed; write a number from 1 to 100"),
        ({"initial_scale": -1}, {}, r"initial_scale: -1 is not allowed"),
        ({}, {"context": {"mode": 1}}, r"context\.mode"),
        ({}, {"optimizer": {"type": "Muon"}}, r"optimizer\.type: Muon cannot train the weights"),
        ({}, {"model": {"model_config": {"apply_residual_connection_post_layernorm": True}}}, r"streams, not to"),
    ],
)  # fmt: skip
def test_what_is_refused_in_one_line(settings, change, says):
    with pytest.raises(RecipeError, match=says) as raised:
        check(settings, change)
    assert "\n" not in str(raised.value)


def test_one_stream_goes_with_everything():
    assert check({"streams": 1}, {"optimizer": {"type": "Muon"}}) == Settings(streams=1)
    assert shapes(1, 8) == {}


def test_check_names_the_key():
    recipe = load_recipe(MINI)
    recipe["plugins"]["hyper_connections"] = {"streams": 4}
    assert check_recipe(recipe).errors == []
    recipe["plugins"]["hyper_connections"] = {"streams": 0}
    (finding,) = check_recipe(recipe).errors
    assert finding.key == "plugins.hyper_connections.streams"


def test_sizes_are_those_of_the_public_weights():
    """24 x 14,336 weights before each of 80 sublayers, 27,527,280 numbers in all (recipes/xing4_29b/card.yaml)."""
    assert gates(4) == 24 and shapes(4, 3584)["hc_fn"] == (24, 14336)
    model = Model(("dense",) * 40, 3584, 32, 32, 128, 9216, 131072, mtp=1, streams=4, sinkhorn=20)
    plain = Model(("dense",) * 40, 3584, 32, 32, 128, 9216, 131072, mtp=1)
    assert parameters(model) - parameters(plain) == 27_527_280
    assert sum(weight.size for weight in connection_weights(model)) * 40 == 27_527_280
    assert multiplied(model).pop("hyper-connections") == 80 * (24 * 14336 + 24 * 3584)
    assert {name: size for name, size in multiplied(model).items() if name != "hyper-connections"} == multiplied(plain)


EPS = 1e-6


def drawn(tokens, streams, hidden, seed=0, scale=1.0):
    """(streams [T, n, h], weights)."""
    rng = np.random.default_rng(seed)
    count = gates(streams)
    weights = Weights(
        rng.standard_normal((count, streams * hidden)) / np.sqrt(streams * hidden),
        rng.standard_normal(count),
        rng.uniform(0.5, 1.5, 3) * scale,
    )
    return rng.standard_normal((tokens, streams, hidden)), weights


@given(
    st.integers(1, 6).flatmap(
        lambda n: arrays.arrays(np.float64, (n, n), elements=st.floats(-3, 3, allow_subnormal=False))
    )
)
def test_rows_and_columns_sum_to_one(logits):
    found, _ = reference.sinkhorn(np.exp(logits - logits.max(1, keepdims=True)), 100)
    assert (found > 0).all()
    np.testing.assert_allclose(found.sum(0), 1, atol=1e-5)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-3)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_mixing_keeps_the_mean_of_the_streams(streams, seed):
    """Columns are divided last, so that their sums are 1 to epsilon after any number of iterations."""
    x, weights = drawn(2, streams, 3, seed)
    for token in x:
        _, _, residual, _ = reference.gates_of(token, weights, 2, EPS)
        np.testing.assert_allclose((residual @ token).mean(0), token.mean(0), atol=1e-4)


def test_a_permutation_stays_what_it_is():
    found, _ = reference.sinkhorn(np.eye(4)[[2, 0, 3, 1]], 20)
    np.testing.assert_allclose(found, np.eye(4)[[2, 0, 3, 1]], atol=1e-5)


def test_logits_beyond_the_clip_have_no_gradient():
    x, weights = drawn(1, 2, 3)
    weights.base[-1] = 10 * CLIP
    dout = np.ones_like(x)
    _, found = reference.backward(x, weights, np.tanh, lambda x, d: d * (1 - np.tanh(x) ** 2), dout, 3, EPS)
    assert found.base[-1] == 0 and found.base[-2] != 0


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_gradients_equal_finite_differences(streams):
    x, weights = drawn(3, streams, 5)
    matrix = np.random.default_rng(1).standard_normal((5, 5))
    sublayer = lambda read: np.tanh(read @ matrix)  # noqa: E731
    behind = lambda read, d: (d * (1 - np.tanh(read @ matrix) ** 2)) @ matrix.T  # noqa: E731
    dout = np.random.default_rng(2).standard_normal(x.shape)
    dx, dw = reference.backward(x, weights, sublayer, behind, dout, 4, EPS)
    for array, gradient in ((x, dx), (weights.fn, dw.fn), (weights.base, dw.base), (weights.scale, dw.scale)):
        for place in list(np.ndindex(array.shape))[:: max(1, array.size // 12)]:
            kept, step = array[place], 1e-5
            values = []
            for moved in (kept + step, kept - step):
                array[place] = moved
                values.append((reference.forward(x, weights, sublayer, 4, EPS) * dout).sum())
            array[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-4, abs=2e-5)


LENGTH, BATCH, HIDDEN, NORM_EPS, ITERATIONS = 8, 2, 16, 1e-5, 4


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


@pytest.mark.slow
@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("streams", [1, 4])
def test_connections_equal_the_reference(streams):
    x, weights = drawn(LENGTH * BATCH, streams, HIDDEN)
    dout = np.random.default_rng(3).standard_normal(x.shape)
    cell = Around(connection(streams, weights))
    step = ms.value_and_grad(cell, 1, cell.trainable_params(), has_aux=True)
    as_tensor = lambda each: Tensor(each.reshape(LENGTH, BATCH, -1).astype(np.float32))  # noqa: E731
    (_, out), (dx, found) = step(as_tensor(dout), as_tensor(x))
    expected = reference.forward(x, weights, np.tanh, ITERATIONS, NORM_EPS)
    behind, by_weight = reference.backward(
        x, weights, np.tanh, lambda read, d: d * (1 - np.tanh(read) ** 2), dout, ITERATIONS, NORM_EPS
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
        normed = first / np.sqrt((first**2).mean(-1, keepdims=True) + NORM_EPS)
        np.testing.assert_allclose(normed, expected, rtol=1e-4, atol=1e-4)


STREAMS, WIDTH, TOKENS, ROUNDS = 4, 8, 5, 20


def test_streams_and_gradients_are_those_of_mlx():
    xing4 = pytest.importorskip("mlx_lm.models.xing4_0", reason="needs mlx[cpu] and mlx-lm with xing4_0.py")
    import mlx.core as mx

    x, weights = drawn(TOKENS, STREAMS, WIDTH, seed=4)
    dout = np.random.default_rng(5).standard_normal(x.shape)
    sizes = {"hidden_size": WIDTH, "hc_mult": STREAMS, "hc_sinkhorn_iters": ROUNDS, "rms_norm_eps": EPS}
    layer = xing4.HyperConnection(xing4.ModelArgs(**sizes))

    def streams(held, fn, base, scale):
        layer.update({"hc_fn": fn, "hc_base": base, "hc_scale": scale})
        post, mix, read = layer(held)
        return post[..., None] * mx.tanh(read)[..., None, :] + mix @ held  # as Xing4_0DecoderLayer

    given = [mx.array(each.astype(np.float32)) for each in (x[None], weights.fn, weights.base, weights.scale)]
    with mx.stream(mx.cpu):
        got = streams(*given)
        by = mx.grad(lambda *each: (streams(*each) * mx.array(dout[None].astype(np.float32))).sum(), (0, 1, 2, 3))
        gradients = [np.array(each) for each in by(*given)]
    want = reference.forward(x, weights, np.tanh, ROUNDS, EPS)
    np.testing.assert_allclose(np.array(got)[0], want, atol=2e-5)
    slope = reference.backward(x, weights, np.tanh, lambda a, d: d * (1 - np.tanh(a) ** 2), dout, ROUNDS, EPS)
    wanted = (slope[0][None], slope[1].fn, slope[1].base, slope[1].scale)
    for found, right in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-4 * np.abs(right).max())
