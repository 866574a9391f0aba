import copy
from pathlib import Path

import pytest

from plugins.attention_balance.plan import Cost, Layout, Objective
from plugins.attention_balance.settings import (
    OWN_BATCHES,
    SETTINGS,
    check,
    layout_of,
    read,
    recomputed_share,
    schedule_of,
)
from plugins.errors import RecipeError
from tools.recipe.load import load_recipe
from tools.recipe.view import View

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
ALL = sorted(path.relative_to(RECIPES).as_posix() for path in RECIPES.glob("*/*k.yaml"))


@pytest.fixture
def recipe():
    recipe = load_recipe(RECIPES / "telechat3_1119b/context_128k.yaml")
    recipe["plugins"] = {"attention_balance": {"window": 1, "per_pair": 2, "per_token": 3, "unit": "FLOP"}}
    return recipe


def put(recipe, path, value):
    *keys, last = path.split(".")
    for key in keys:
        recipe = recipe[key]
    recipe[last] = value


def test_settings():
    assert read({}).window == 1 and read({}).cost is None
    assert read({"window": 4}).window == 4
    cost = read({"per_pair": 2e-9, "per_token": 0}).cost
    assert (cost.per_pair, cost.per_token, cost.unit) == (2e-9, 0.0, "s")
    assert read({"per_pair": 8, "per_token": 9, "unit": "FLOP"}).cost == Cost(8.0, 9.0, "FLOP")
    assert SETTINGS == ("window", "per_pair", "per_token", "unit")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (True, "write `window: 1`"),
        (None, "write `window: 1`"),
        ({"windows": 2}, r"\.windows: no such setting \(did you mean 'window'\?\)"),
        ({"window": 0}, r"\.window: 0"),
        ({"window": True}, r"\.window: True"),
        ({"window": 2.0}, r"\.window: 2\.0"),
        ({"per_pair": 1e-9}, r"\.per_pair: costs come as two, .*; write per_token as well"),
        ({"per_token": 3}, r"\.per_token: costs come as two, .*; write per_pair as well"),
        ({"unit": "FLOP"}, r"\.unit: costs come as two, .*; write per_pair as well"),
        ({"per_pair": 1, "per_token": 1, "unit": "ms"}, r"\.unit: 'ms'; write s or FLOP"),
        ({"per_pair": 1e-9, "per_token": -1}, r"\.per_token: -1"),
        ({"per_pair": "1e-9", "per_token": 1}, r"\.per_pair: '1e-9'"),
        ({"per_pair": float("nan"), "per_token": 1}, r"\.per_pair: nan"),
        ({"per_pair": 0, "per_token": 1}, "nothing to balance"),
    ],
)
def test_wrong_settings_are_named(settings, words):
    with pytest.raises(RecipeError, match=r"plugins\.attention_balance.*" + words):
        read(settings)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("train_dataset.data_loader.type", "HFDataLoader", r"data_loader\.type: .*not 'HFDataLoader'"),
        ("train_dataset.data_loader.shuffle", True, r"data_loader\.shuffle"),
        ("context.mode", 1, r"context\.mode"),
        ("train_dataset.data_loader.config.create_compressed_eod_mask", False, "every sample costs the same"),
        ("micro_batch_interleave_num", 2, r"micro_batch_interleave_num: 2; .*write 1"),
        ("parallel_config.expert_parallel", 24, r"parallel_config\.expert_parallel"),
    ],
)
def test_recipes_that_the_plugin_cannot_help_are_refused(recipe, path, value, words):
    schedule_of(recipe, {})
    put(recipe, path, value)
    with pytest.raises(RecipeError, match=words):
        schedule_of(recipe, {})


@pytest.mark.parametrize("name", ALL)
def test_batches_are_those_of_tc3_check(name):
    """Two readers of the same recipe."""
    recipe = load_recipe(RECIPES / name)
    view = View(recipe)
    layout = layout_of(recipe, 3)
    assert (layout.ranks, layout.slots, layout.batch) == (view.dp, view.batch, view.global_batch)
    assert (layout.objective.stages, layout.window) == (view.pp, 3)


def test_the_graph_gathers_batches_that_it_cuts(recipe):
    assert schedule_of(recipe, {}).gathered
    assert not schedule_of(recipe, {OWN_BATCHES: "1"}).gathered
    assert schedule_of(recipe, {OWN_BATCHES: "0"}).gathered
    without = copy.deepcopy(recipe)
    put(without, "parallel_config.pipeline_stage", 1)
    assert not schedule_of(without, {}).gathered
    # the variable has no effect on gradient accumulation
    put(without, "runner_config.gradient_accumulation_steps", 4)
    assert schedule_of(without, {OWN_BATCHES: "1"}).gathered


def test_layouts_follow_mindformers_batch_arithmetic(recipe):
    sizes = recipe["parallel_config"]
    sizes.update(data_parallel=8, model_parallel=2, context_parallel=2, expert_parallel=16, pipeline_stage=4)
    sizes["micro_batch_num"] = 16
    recipe["runner_config"].update(batch_size=2, gradient_accumulation_steps=5)
    recipe["recompute_config"]["recompute"] = False
    assert layout_of(recipe) == Layout(8, 16, 2, Objective(4, 4))
    sizes["pipeline_stage"] = 1
    assert layout_of(recipe) == Layout(8, 5, 2, Objective(4))
    recipe["parallel"]["parallel_mode"] = 0  # no model parallelism, no accumulation
    sizes["expert_parallel"] = 8
    assert layout_of(recipe) == Layout(8, 1, 2, Objective(8))
    recipe["use_parallel"] = False
    assert layout_of(recipe) == Layout(1, 1, 2, Objective(1))


def test_the_cost_of_a_sample_is_read_and_never_computed(recipe):
    recipe["plugins"]["attention_balance"] = {"per_pair": 1e-10, "per_token": 3e-6}
    assert schedule_of(recipe, {}).cost == Cost(1e-10, 3e-6, "s")
    recipe["plugins"]["attention_balance"] = {"window": 2}
    with pytest.raises(
        RecipeError, match=r"attention_balance\.per_pair: missing.* tc3 train, .*launch/train\.py write"
    ):
        schedule_of(recipe, {})
    settings, layout = check(recipe)
    assert settings.cost is None and layout.window == 2


@pytest.mark.parametrize(
    ("recompute", "share"),
    [(None, 0), (False, 0), (True, 1), ([1, 1], 0.5), ([[1, 0], [1, 1]], 0.75), ([True, 1], 0.75), ([9, 9], 1)],
)
def test_the_share_of_the_forward_pass_that_runs_again(recompute, share):
    recipe = {"model": {"model_config": {"num_hidden_layers": 4}}, "recompute_config": {"recompute": recompute}}
    assert recomputed_share(recipe) == share


@pytest.mark.parametrize("path", ["parallel_config.data_parallel", "train_dataset.data_loader", "model.model_config"])
@pytest.mark.parametrize("value", [None, "8", [8]])
def test_a_broken_recipe_is_left_to_tc3_check(recipe, path, value):
    put(recipe, path, value)
    try:
        ranks = schedule_of(recipe, {}).layout.ranks
        assert ranks == 1 or path != "parallel_config.data_parallel"
    except RecipeError as error:
        assert path in str(error)
