"""Linear layers with adapters, as MindFormers builds them, forward and backward, against the reference."""

import mindspore as ms
import numpy as np
import pytest
from mindformers.parallel_core.training_graph.tensor_parallel.lora_layers import init_lora_method
from mindformers.parallel_core.training_graph.transformer import utils
from mindspore import Tensor, nn, ops

from plugins import telechat3_moe
from plugins.cpu_backend.model import on_cpu
from plugins.errors import RecipeError
from plugins.lora import adapter, reference
from plugins.lora.plan import Settings, frozen
from tests.plugins.yarn.test_adapter import config

INPUTS, OUTPUTS, RANK, SCALE, TOKENS = 48, 10, 3, 0.5, 6
SETTINGS = Settings.read({"rank": RANK, "alpha": 6, "targets": ["*.linear_qkv", "mlp.*"]})


class Weighted(nn.Cell):
    """sum(layer(x) * dout)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def construct(self, dout, x):
        return ops.reduce_sum(self.layer(x)[0] * dout)


@pytest.mark.usefixtures("graph_mode")
@pytest.mark.parametrize("kind", adapter.ADAPTED.values())
def test_each_kind_of_layer_equals_the_reference(kind):
    rng = np.random.default_rng(3)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    options = {"config": config(), "init_method": init_lora_method("normal"), "bias": False, "skip_bias_add": True}
    layer = kind(INPUTS, OUTPUTS, lora_rank=RANK, lora_scale=SCALE, **options)
    assert not layer.lora_B.weight.init_data().asnumpy().any(), "training begins with the model as it is"
    w, a, b = draw(OUTPUTS, INPUTS), draw(RANK, INPUTS), draw(OUTPUTS, RANK)
    for weight, value in ((layer.weight, w), (layer.lora_A.weight, a), (layer.lora_B.weight, b)):
        weight.set_data(Tensor(value))
    weighted = Weighted(layer)
    adapter.freeze(weighted)
    trained = weighted.trainable_params()
    assert [each.name for each in trained] == ["layer.lora_A.weight", "layer.lora_B.weight"]
    x, dout = draw(TOKENS, 1, INPUTS), draw(TOKENS, 1, OUTPUTS)
    np.testing.assert_allclose(
        layer(Tensor(x))[0].asnumpy()[:, 0], reference.forward(x[:, 0], w, a, b, SCALE), rtol=2e-5, atol=2e-5
    )
    dx, (da, db) = ms.grad(weighted, 1, trained)(Tensor(dout), Tensor(x))
    expected = reference.backward(x[:, 0], w, a, b, SCALE, dout[:, 0])
    for found, right in zip((dx.asnumpy()[:, 0], da.asnumpy(), db.asnumpy()), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)


@pytest.fixture
def built(monkeypatch):
    """A function: the model of a recipe with these settings."""
    for name in ("_layer_edits", "_edits"):
        monkeypatch.setattr(telechat3_moe, name, {})
    monkeypatch.setattr(telechat3_moe, "_positions", [])
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)

    def make(settings):
        telechat3_moe.edit_layers("lora", lambda layers: adapter.put_in(layers, settings))
        plain = config()
        plain.position_embedding_type = "rope"
        model = telechat3_moe.gpt_model(plain, on_cpu)
        adapter.freeze(model)
        return model

    return make


def test_adapters_stand_in_their_layers_and_nothing_else_is_trained(built):
    model = built(SETTINGS)
    trained = [weight.name for weight in model.trainable_params()]
    expected = {
        f"decoder.layers.{layer}.{name}.lora_{matrix}.weight"
        for layer in (0, 1)
        for name in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
        for matrix in "AB"
    }
    assert set(trained) == expected and len(trained) == len(expected)
    assert frozen == {weight.name for weight in model.get_parameters()} - expected and len(frozen) > 10


def test_a_pattern_without_a_layer_is_refused(built):
    with pytest.raises(RecipeError, match=r"plugins\.lora\.targets: 'attention' names no linear layer"):
        built(Settings.read({"targets": ["attention"]}))
