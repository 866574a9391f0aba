"""These tests check what a recipe may say about adapters, which layers have adapters, and their merge against the
reference.

Linear layers with adapters, as MindFormers builds them, forward and backward, against the reference.
"""

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from mindformers.parallel_core.training_graph.tensor_parallel.lora_layers import init_lora_method
from mindformers.parallel_core.training_graph.transformer import utils
from mindspore import Tensor, nn, ops

from plugins import telechat3_moe
from plugins.cpu_backend.model import on_cpu
from plugins.errors import RecipeError
from plugins.lora import adapter, reference
from plugins.lora.plan import Settings, adapters_of, check, chosen, frozen, layer_of, layers_of, merged
from tests.plugins.test_yarn import config

GROUPED = {"multi_latent_attention": False}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 8, "mla_qkv_concat": False, "num_moe_experts": 4,
    "first_k_dense_replace": 1,
}  # fmt: skip
RECIPE = {"optimizer": {"type": "AdamW"}, "model": {"model_config": {}}}


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (GROUPED, "qkv proj"),
        (LATENT, "q_down_proj q_up_proj kv_down_proj kv_up_proj proj"),
        (LATENT | {"q_lora_rank": None}, "q_proj kv_down_proj kv_up_proj proj"),
        (LATENT | {"mla_qkv_concat": True}, "qkv qb kvb proj"),
        (LATENT | {"mla_qkv_concat": True, "q_lora_rank": None}, "qkv kvb proj"),
    ],
)
def test_layers_of_attention(fields, names):
    found = chosen(Settings(), layers_of(fields))
    assert found == [f"self_attention.linear_{name}" for name in names.split()]


def test_an_mlp_without_experts_may_have_adapters():
    every = Settings.read({"targets": "mlp.*"})
    assert chosen(every, layers_of(GROUPED)) == chosen(every, layers_of(LATENT)) == ["mlp.linear_fc1", "mlp.linear_fc2"]
    with pytest.raises(
        RecipeError,
        match=r"targets: 'mlp\.\*' names no linear layer .* the layers that can have one are self_attention",
    ):
        chosen(every, layers_of(LATENT | {"first_k_dense_replace": 0}))


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (True, {}, r"plugins\.lora: write \{rank: 16, alpha: 32\}"),
        ({"rank": 0}, {}, r"plugins\.lora\.rank: 0 is not allowed"),
        ({"alpha": 0}, {}, r"plugins\.lora\.alpha: 0 is not allowed"),
        ({"targets": []}, {}, r"plugins\.lora\.targets: \[\] is not a list of patterns"),
        (
            {"targets": ["self_attention.linear_qk"]},
            {},
            r"names no linear layer .*did you mean 'self",
        ),
        ({"dropout": 0.1}, {}, r"plugins\.lora\.dropout: no such setting"),
        (
            {},
            {"optimizer": {"type": "Muon"}},
            r"optimizer\.type: plugins\.lora works only with AdamW, not with",
        ),
        ({}, {"context": {"mode": 1}}, r"context\.mode: plugins\.lora works only in graph mode"),
        ({}, {"model": {"model_config": {"pet_config": {"pet_type": "lora"}}}}, r"model_config\.pet_config: MindFor"),
        ({}, {"plugins": {"expert_balance": {"every": 5}}}, r"plugins\.expert_balance: .*moves experts together"),
        ({}, {"plugins": {"grouped_gradient": {}}}, r"plugins\.grouped_gradient: .*gradients of experts' weights"),
    ],
)
def test_what_is_refused(settings, change, says):
    with pytest.raises(RecipeError, match=says):
        check(settings, RECIPE | change, GROUPED)


@pytest.mark.parametrize("change", [{"optimizer": {"type": "Muon"}}, {"plugins": {"expert_balance": {"every": 5}}}])
def test_a_worker_that_was_started_by_hand_refuses_it_too(change):
    with pytest.raises(RecipeError, match=next(iter(change))):
        adapter.enable(RECIPE | change, {"rank": 2})


def test_adapters_stand_beside_the_weights_of_their_layers():
    shapes = {
        "decoder.layers.3.self_attention.linear_qkv.weight": (12, 8),
        "decoder.layers.3.self_attention.linear_qkv.bias": (12,),
        "decoder.layers.3.mlp.linear_fc1.weight": (16, 8),
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight": (16, 8),
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": (8, 6),
        "output_layer.weight": (9, 8),
    }
    assert adapters_of(shapes, Settings.read({"rank": 2})) == {
        "decoder.layers.3.self_attention.linear_qkv.lora_A.weight": (2, 8),
        "decoder.layers.3.self_attention.linear_qkv.lora_B.weight": (12, 2),
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.lora_A.weight": (2, 6),
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.lora_B.weight": (8, 2),
    }
    assert layer_of("decoder.layers.3.mlp.linear_fc1.weight") == "mlp.linear_fc1"
    assert layer_of("decoder.layers.3.mlp.shared_experts.linear_fc1.weight") is None
    assert layer_of("decoder.layers.3.self_attention.linear_qkv.bias") is None


sizes = st.integers(1, 5)


@given(sizes, sizes, sizes, sizes, st.floats(0.1, 4), st.integers(0, 99))
def test_a_merged_weight_computes_what_the_adapted_layer_does(tokens, inputs, outputs, rank, scale, seed):
    rng = np.random.default_rng(seed)
    x, w = rng.standard_normal((tokens, inputs)), rng.standard_normal((outputs, inputs))
    a, b = rng.standard_normal((rank, inputs)), rng.standard_normal((outputs, rank))
    np.testing.assert_allclose(x @ merged(w, a, b, scale).T, reference.forward(x, w, a, b, scale), atol=1e-12)


def test_backwards_is_the_gradient():
    rng, step = np.random.default_rng(4), 1e-6
    parts = x, w, a, b = [rng.standard_normal(shape) for shape in ((3, 4), (5, 4), (2, 4), (5, 2))]
    dy = rng.standard_normal((3, 5))
    found = reference.backward(x, w, a, b, 0.5, dy)
    for gradient, place in zip(found, (0, 2, 3), strict=True):
        for index in np.ndindex(gradient.shape):
            moved = [part.copy() for part in parts]
            moved[place][index] += step
            change = np.sum((reference.forward(*moved, 0.5) - reference.forward(*parts, 0.5)) * dy) / step
            assert change == pytest.approx(gradient[index], abs=1e-5)


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


def test_the_routers_biases_stay_whatever_the_recipe_calls_their_rate():
    """MindFormers has a rate where a recipe names none, and reads `topk_bias_update_rate` as well."""
    model = nn.Cell()
    model.moe_router_bias_update_rate, model.config = 0.001, SimpleNamespace(moe_router_bias_update_rate=0.001)
    adapter.freeze(model)
    assert model.moe_router_bias_update_rate == model.config.moe_router_bias_update_rate == 0.0


@pytest.fixture
def built(monkeypatch):
    """A function: the model of a recipe with these settings."""
    for name in ("_layer_edits", "_edits", "_spared"):
        monkeypatch.setattr(telechat3_moe, name, {})
    monkeypatch.setattr(telechat3_moe, "_positions", [])
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)

    def make(settings, rules=None):
        telechat3_moe.edit_layers(adapter.KEY, lambda layers: adapter.put_in(layers, settings))
        plain = config()
        plain.position_embedding_type, plain.param_init_std_rules = "rope", rules
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


def test_rules_of_initial_weights_leave_what_begins_with_zeros(built, monkeypatch):
    """MindFormers would draw B at random, too, so that the model began as another one than its weights are."""
    monkeypatch.setattr(adapter, "set_auto_parallel_context", lambda **given: None)
    recipe = {**RECIPE, "context": {"device_target": "CPU"}}
    monkeypatch.setattr(adapter.telechat3_moe, "use_edited_model", lambda *given: None)
    adapter.enable(recipe, {"rank": 2})
    pattern = regex.compile("decoder.layers.*")
    assert repr(telechat3_moe.Spared(pattern)) == repr(pattern), "MindFormers logs it"
    model = built(SETTINGS, [{"target": pattern, "init_method_std": 3.0}])
    values = {weight.name: weight.asnumpy() for weight in model.get_parameters()}
    last = "decoder.layers.1.self_attention.linear_qkv"
    assert not values[f"{last}.lora_B.weight"].any()
    assert values[f"{last}.weight"].std() > 1 and values[f"{last}.lora_A.weight"].std() > 1


def test_a_pattern_without_a_layer_is_refused(built):
    with pytest.raises(RecipeError, match=r"plugins\.lora\.targets: 'attention' names no linear layer"):
        built(Settings.read({"targets": ["attention"]}))
