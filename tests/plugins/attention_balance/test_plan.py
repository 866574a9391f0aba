import copy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.attention_balance import plan as planner
from plugins.attention_balance.objective import Objective
from plugins.attention_balance.plan import (
    OWN_BATCHES,
    Layout,
    balance,
    check,
    delivery_order,
    epoch_plan,
    layout_of,
    read,
    recomputed_share,
    schedule_of,
)
from plugins.attention_balance.samples import Cost
from plugins.errors import RecipeError
from tools.recipe.load import load_recipe
from tools.recipe.view import View

many = settings(max_examples=60)

LAYOUTS = [
    Layout(4, 3, 1, Objective(4)),
    Layout(4, 3, 2, Objective(2)),
    Layout(4, 3, 1, Objective(1)),
    Layout(2, 6, 1, Objective(2, 4)),
    Layout(4, 3, 1, Objective(4), window=3),
    Layout(4, 3, 2, Objective(2), window=2),
]


@pytest.fixture
def costs():
    return np.random.default_rng(3).lognormal(0, 1.3, 12 * 16 + 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_planned_window_by_window_and_together_agree(costs, layout, monkeypatch):
    whole = epoch_plan(costs, layout)
    assert len(whole) == layout.steps(len(costs))
    assert epoch_plan(costs[: layout.batch - 1], layout).shape == (0, *whole.shape[1:]), "less than one step"
    monkeypatch.setattr(planner, "_SAMPLES", 1)
    np.testing.assert_array_equal(epoch_plan(costs, layout), whole)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_has_the_samples_of_its_window(costs, layout):
    whole = epoch_plan(costs, layout)
    size = layout.batch * layout.window
    for at in range(0, len(whole), layout.window):
        items = np.sort(whole[at : at + layout.window].ravel())
        np.testing.assert_array_equal(items, at * layout.batch + np.arange(min(size, len(items))))


@many
@given(st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2]))
def test_another_number_of_ranks_keeps_the_global_batches(step, ranks, slots):
    costs = np.random.default_rng(step).lognormal(0, 1, 24 * 10)
    plan = epoch_plan(costs, Layout(ranks, 24 // ranks // slots, slots, Objective(ranks)))[step]
    assert plan.shape[0] == ranks
    assert sorted(plan.ravel()) == list(range(24 * step, 24 * (step + 1)))


def test_what_comes_after_a_step_does_not_change_it(costs):
    for layout in LAYOUTS:
        shorter = costs[: 6 * layout.batch]
        np.testing.assert_array_equal(epoch_plan(costs, layout)[:6], epoch_plan(shorter, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loader_hands_each_rank_its_samples(costs, layout):
    whole = epoch_plan(costs, layout)
    order = delivery_order(whole)
    for rank in range(layout.ranks):
        np.testing.assert_array_equal(order[rank :: layout.ranks], whole[:, rank].ravel())
    for gathered in (True, False):
        assert delivery_order(whole[:0], gathered).shape == (0,), "less than one step"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_balance(costs, layout):
    whole = epoch_plan(costs, layout)[:6]
    found = balance(costs, whole, layout)
    assert found.before.shape == found.after.shape == found.bound.shape == (6,)
    assert found.after.mean() <= found.before.mean()
    if layout.window == 1:
        assert (found.bound <= found.after * (1 + 1e-8)).all()


# a plan that changes with a release breaks the resume of every run that began before it
GOLDEN = [
    (Layout(4, 3, 1, Objective(4)), [[14, 18, 23], [20, 19, 16], [15, 12, 13], [21, 17, 22]]),
    (Layout(4, 3, 1, Objective(2, 2)), [[18, 14, 13], [19, 20, 22], [23, 15, 12], [16, 21, 17]]),
    (Layout(3, 4, 1, Objective(1)), [[14, 12, 18, 13], [20, 17, 19, 16], [15, 21, 23, 22]]),
    (Layout(2, 3, 2, Objective(2)), [[14, 21, 12, 19, 23, 22], [20, 15, 17, 18, 16, 13]]),
]


@pytest.mark.parametrize(("layout", "items"), GOLDEN)
def test_plans_stay_what_they_are(layout, items):
    costs = (np.arange(1, 25) ** 7 % 101).astype(float)
    assert epoch_plan(costs, layout)[1].reshape(layout.ranks, -1).tolist() == items


def test_looking_ahead_shortens_the_run(costs):
    def total(window):
        layout = Layout(4, 3, 1, Objective(4), window)
        return Objective(4).step_time(costs[epoch_plan(costs, layout)].sum(-1)).sum()

    assert total(8) < 0.95 * total(1)


def test_rounding_moves_no_samples_to_another_step():
    """One rank needs as long for its samples in whatever steps they are; sums of floats depend on their order."""
    costs = np.random.default_rng(0).lognormal(0, 1, 600)
    items = epoch_plan(costs, Layout(1, 3, 1, Objective(1), window=2)).reshape(-1, 3)
    np.testing.assert_array_equal(np.sort(items, axis=1), np.arange(600).reshape(-1, 3))


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


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (True, "write `window: 1`"),
        (None, "write `window: 1`"),
        ({"windows": 2}, r"\.windows: no such setting \(did you mean 'window'\?\)"),
        ({"window": 0}, r"\.window: 0"),
        ({"window": True}, r"\.window: True"),
        ({"window": 2.0}, r"\.window: 2\.0"),
        ({"per_pair": 1e-9}, r"\.per_pair: per_pair and per_token are needed together; write per_token as well"),
        ({"per_token": 3}, r"\.per_token: per_pair and per_token are needed together; write per_pair as well"),
        ({"unit": "FLOP"}, r"\.unit: per_pair and per_token are needed together; write per_pair as well"),
        ({"per_pair": 1, "per_token": 1, "unit": "ms"}, r"\.unit: 'ms' is not allowed; write s or FLOP"),
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
        ("train_dataset.data_loader.type", "HFDataLoader", r"data_loader\.type: .*not with 'HFDataLoader'"),
        ("train_dataset.data_loader.shuffle", True, r"data_loader\.shuffle"),
        ("context.mode", 1, r"context\.mode"),
        ("train_dataset.data_loader.config.create_compressed_eod_mask", False, "every sample costs the same"),
        ("micro_batch_interleave_num", 2, r"micro_batch_interleave_num: .* the value 2, .*write 1"),
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
        RecipeError,
        match=r"attention_balance\.per_pair: the cost .* is missing; .*tc3 train or launch/train\.py, which compute",
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
