"""What a recipe says of residual streams, and the sizes that follow."""

import pytest

from plugins.errors import RecipeError
from plugins.hyper_connections.plan import Settings, check, gates, shapes
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
