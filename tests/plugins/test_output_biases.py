"""These tests check what a recipe may say about biases of outputs.

The model that MindFormers builds, with the plugin and without it; what it computes: tests/tools/weights.
"""

import operator

import pytest
from mindformers.parallel_core.training_graph.transformer import utils
from mindformers.parallel_core.transformer_config import TransformerConfig

from plugins import telechat3_moe
from plugins.cpu_backend.model import on_cpu
from plugins.errors import RecipeError
from plugins.lora import adapter as lora
from plugins.lora.plan import Settings
from plugins.output_biases.adapter import without_input_biases
from plugins.output_biases.plan import KEY, read

MODEL = {"model_type": "telechat3", "add_bias_linear": True, "attention_bias": False}


def test_a_dense_model_with_biases_is_taken():
    read({}, MODEL)


@pytest.mark.parametrize(
    ("settings", "change", "says"),
    [
        (True, {}, r"plugins\.output_biases: write plugins\.output_biases: {}, or False"),
        ({"layers": 2}, {}, r"plugins\.output_biases\.layers: no such setting"),
        ({}, {"model_type": "telechat3_moe"}, r"model_config\.model_type: .* not for 'telechat3_moe'"),
        ({}, {"n_routed_experts": 8}, r"model_config\.n_routed_experts: experts have no bias"),
        ({}, {"add_bias_linear": False}, r"model_config\.add_bias_linear: False gives no linear layer a bias"),
        ({}, {"add_bias_linear": None}, r"model_config\.add_bias_linear: None gives no .* write True, or plugins\.out"),
        ({}, {"attention_bias": True}, r"model_config\.attention_bias: True gives queries, keys and values a bias"),
        ({}, {"qkv_has_bias": True}, r"model_config\.qkv_has_bias: True gives queries"),
    ],
)
def test_what_is_refused(settings, change, says):
    with pytest.raises(RecipeError, match=says):
        read(settings, MODEL | change)


ALL = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}
OUTPUTS = {"self_attention.linear_proj", "mlp.linear_fc2"}


def config():
    """As MindFormers makes it of a recipe for TeleChat2."""
    return TransformerConfig(
        num_layers=2, num_attention_heads=4, num_query_groups=2, kv_channels=4, hidden_size=16, ffn_hidden_size=16,
        seq_length=8, compute_dtype="float32", params_dtype="float32", attention_dropout=0.0, add_bias_linear=True,
        fused_norm=False, hidden_act="swiglu", gated_linear_unit=True, moe_layer_freq=[0, 0],
        position_embedding_type="rope", rotary_base=10000.0, vocab_size=32,
    )  # fmt: skip


def biased(model):
    """Linear layers of each layer that have a bias."""
    names = [parameter.name for parameter in model.get_parameters() if parameter.name.endswith(".bias")]
    return [{name.split(f"layers.{layer}.")[1].removesuffix(".bias") for name in names if f"layers.{layer}." in name}
            for layer in range(2)]  # fmt: skip


@pytest.fixture
def built(monkeypatch):
    """A function: the model that is built with these edits of layers and of the model."""
    monkeypatch.setattr(utils, "is_legacy_model", lambda: False)
    monkeypatch.setattr(telechat3_moe, "_layer_edits", {})
    monkeypatch.setattr(telechat3_moe, "_edits", {})

    def make(edits, adapters=None):
        for name, edit in edits.items():
            telechat3_moe.edit_model(name, edit)
        if adapters:
            telechat3_moe.edit_layers("lora", lambda layers: lora.put_in(layers, adapters))
        model = telechat3_moe.gpt_model(config(), on_cpu)
        telechat3_moe.apply_edits(model)
        return model

    return make


@pytest.mark.parametrize(("on", "expected"), [(False, ALL), (True, OUTPUTS)])
def test_only_outputs_have_a_bias(built, on, expected):
    """A layer that says so describes its bias in checkpoints; whether it is added depends on the bias itself."""
    model = built({KEY: without_input_biases} if on else {})
    assert biased(model) == [expected, expected]
    for layer in model.decoder.layers:
        assert {name for name in ALL if operator.attrgetter(name)(layer).has_bias} == expected


@pytest.mark.parametrize("first", [KEY, "lora"])
def test_layers_with_adapters_have_the_same_biases_and_these_are_frozen(built, first):
    edits = {KEY: without_input_biases, "lora": lora.freeze}
    model = built({first: edits[first], **edits}, Settings.read({"rank": 2, "targets": ["*"]}))
    assert biased(model) == [OUTPUTS, OUTPUTS]
    trained = {weight.name.removeprefix("decoder.layers.") for weight in model.trainable_params()}
    assert trained == {f"{layer}.{name}.lora_{each}.weight" for layer in range(2) for name in ALL for each in "AB"}
