"""MindFormers' own build against our emulation of it."""

import pytest

from tests.tools.check.mutations import MODEL, put
from tests.tools.check.test_mutations import RECIPES, name, plain
from tests.tools.check.test_rules import INTERLEAVED, SEMI, change
from tools.check.build import built_by_mindformers, check_built, same
from tools.check.check import check_recipe
from tools.recipe.load import Recipe
from tools.recipe.view import View
from tools.schema.converter import convert
from tools.schema.schema import load_schema
from tools.schema.stages import layers_of

pytestmark = pytest.mark.slow
# what MindFormers turns into objects of its own
OBJECTS = {"init_method", "output_layer_init_method", "parallel_config", "activation_func", "moe_layer_freq"}
OBJECTS |= {"input_layout", "sparse_mode", "rope_scaling", "num_decoder_layers", "num_encoder_layers", "pad_token_id"}
ZBV = (("parallel", "pipeline_config"), {"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"})
CASES = {name(path): plain(path) for path in RECIPES}
CASES |= {"semi": SEMI, "interleaved": change(SEMI, *INTERLEAVED), "zero_bubble_v": change(SEMI, *INTERLEAVED, ZBV)}


@pytest.fixture(scope="module")
def built():
    with pytest.MonkeyPatch.context() as patch:  # a shell that a job left behind: no recipe is wrong for that
        for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID"):
            patch.setenv(name, "")
        return dict(zip(CASES, built_by_mindformers(list(CASES.values())), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_emulated_converter_equals_mindformers(case, built):
    assert "error" not in built[case], built[case]
    view = View(Recipe(CASES[case]))
    ours, theirs = convert(view, load_schema()), built[case]["fields"]
    compared = {key: value for key, value in ours.fields.items() if key in theirs and key not in OBJECTS}
    assert len(compared) > 150
    different = {key: (value, theirs[key]) for key, value in compared.items() if not same(value, theirs[key])}
    assert different == {}
    assert ours.conflicts == []


@pytest.mark.parametrize("case", CASES)
def test_the_emulated_layer_split_equals_mindformers(case, built):
    view = View(Recipe(CASES[case]))
    assert layers_of(view, convert(view, load_schema())) == built[case]["layers"]


def test_what_mindformers_refuses_is_a_finding():
    report = check_recipe(put(SEMI, (*MODEL, "experimental_attention_variant"), "dsa"))
    assert report.clean
    assert check_built([report]) == ""
    assert "dsa" in report.errors[0].wrong


def test_a_key_that_a_base_has_beside_the_one_that_was_asked_for_is_named():
    """It was told to write the other key, did so, and was told to take that back."""
    path, reaches = (*MODEL, "scoring_func"), (*MODEL, "moe_router_score_function")
    one, other = put(SEMI, path, "softmax"), put(SEMI, reaches, "softmax")
    rights = [
        [each.right for each in check_recipe(recipe).errors if each.key.endswith("scoring_func")]
        for recipe in (one, other)
    ]
    both = "write the same value under both keys, either scoring_func: softmax or moe_router_score_function: sigmoid"
    assert rights == [["write moe_router_score_function: softmax"], [both]]
    assert not [each for each in check_recipe(put(other, path, "softmax")).errors if each.key.endswith("scoring_func")]
