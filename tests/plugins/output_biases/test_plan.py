"""What a recipe says of biases on outputs."""

import pytest

from plugins.errors import RecipeError
from plugins.output_biases.plan import read

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
