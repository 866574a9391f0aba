"""What `tc3 check` says of plugins.expert_balance: as its adapter refuses it, before any worker starts."""

import pytest

from tests.tools.check.test_plugins import errors
from tools.check.check import check_recipe
from tools.recipe.load import load_recipe
from tools.recipe.override import apply_overrides

BALANCED, ONE, FULL = (
    "recipes/mini/pretrain_ep4_balanced.yaml",
    "recipes/mini/pretrain.yaml",
    "recipes/telechat3_438b/pretrain_4k.yaml",
)
KEY = "plugins.expert_balance"


def test_the_shipped_recipe_passes():
    assert errors(BALANCED) == {}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ([f"{KEY}.method=swap"], f"{KEY}.method", "did you mean 'swaps'"),
        (["optimizer.type=Muon"], f"{KEY}.every", "would stay behind"),
        (["parallel_config.expert_parallel=1", "plugins.hierarchical_ep=False"], f"{KEY}.every", "nothing can move"),
        (["model.model_config.moe_router_enable_expert_bias=False"], KEY, "counts its tokens with"),
    ],
)
def test_what_cannot_move_or_be_counted_is_refused(changes, key, words):
    found = errors(BALANCED, *changes)
    assert key in found and words in found[key], found


def test_one_worker_records_and_moves_nothing():
    recipe = load_recipe(ONE)
    recipe["plugins"]["expert_balance"] = {"every": 0}
    assert check_recipe(recipe).errors == []
    recipe["plugins"]["expert_balance"] = {"every": 5}
    assert [error.key for error in check_recipe(recipe).errors] == [f"{KEY}.every"]


@pytest.mark.parametrize(
    ("changes", "every", "words"),
    [
        ([], 5, ""),
        (["parallel_config.data_parallel=4"], 5, "several groups of ranks"),
        (["parallel_config.data_parallel=4"], 0, ""),
        (["model.model_config.params_dtype=bfloat16"], 5, "float32 weights alone"),
        (["model.model_config.params_dtype=bfloat16"], 0, ""),
    ],
)
def test_what_a_sharded_graph_can_move(changes, every, words):
    recipe = apply_overrides(load_recipe("tests/training/sharded_ep2.yaml"), changes)
    recipe["parallel"]["dataset_strategy"] = [[recipe["parallel_config"]["data_parallel"], 1]] * 4
    recipe["plugins"]["expert_balance"] = {"every": every}
    found = {error.key: error.wrong for error in check_recipe(recipe).errors if error.key.startswith(KEY)}
    assert words in found[f"{KEY}.every"] if words else found == {}, found


def test_sums_of_gradients_would_stay_behind():
    recipe = load_recipe("tests/training/sharded_ep2.yaml")
    recipe["runner_config"]["gradient_accumulation_steps"] = 2
    recipe["plugins"]["expert_balance"] = {"every": 5}
    assert any("not available with accumulated gradients" in error.wrong for error in check_recipe(recipe).errors)


def test_a_pipeline_is_refused_with_the_reason():
    recipe = load_recipe(FULL)
    recipe["plugins"] = {"expert_balance": {"every": 0}}
    (error,) = check_recipe(recipe).errors
    assert error.key == KEY and "each stage counts its own layers" in error.wrong
